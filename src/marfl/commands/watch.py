"""`marfl watch`: a run as one page in a browser."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marfl.commands import flags as flag
from marfl.commands.flags import whole_number
from marfl.errors import InputError, NetError
from marfl.live import Iteration, Page, Scene, read_page, scene_of_run, serve_pages

if TYPE_CHECKING:
    from marfl.peer.about import Guest, Seen

LOOK = 2.0  # seconds between two looks at a live run
What = Annotated[
    str, typer.Argument(metavar="ADDRESS|RUN", help="A peer of a live run, or a run directory.", show_default=False)
]
Port = Annotated[int, typer.Option(parser=whole_number(0, 65535), metavar="PORT", help="Of the page; 0: a free one.")]


def watch(
    what: What,
    port: Port = 0,
    run: Annotated[str | None, typer.Option(help="The run's name; by default the one of the peer at ADDRESS.")] = None,
    identity: Annotated[Path | None, flag.joining("identity")] = None,
    token: Annotated[Path | None, flag.joining("token")] = None,
    authority: Annotated[str | None, flag.joining("authority")] = None,
) -> None:
    """Show a run in a browser: who is here, who meets whom, bytes, accuracy, hashes, and who is missing and why.

    The page is served on 127.0.0.1 until Ctrl-C, needs nothing from elsewhere and takes no input. A live run is looked
    at through any of its peers; a run directory may be under way or finished, and is played. Examples:

      marfl watch /ip4/192.168.1.5/tcp/4001/p2p/12D3Koo…

      marfl watch runs/swarm --port 8000
    """
    if "/p2p/" not in what:
        folder = Path(what)
        scene_of_run(folder)  # what is wrong with it is said before anything is served
        _serve(port, lambda: scene_of_run(folder).as_json())
        return
    if Path(what).exists():
        raise InputError(f"{what}: is a file here, and looks like an address; write it otherwise")
    from marfl.peer.about import guest  # hivemind takes a second: only when something is asked

    scene = Scene("looking …")

    @asynccontextmanager
    async def looking() -> AsyncIterator[None]:
        async with guest(what, run, identity=identity, token=token, authority=authority) as visitor:
            task = asyncio.create_task(_follow(visitor, scene))
            try:
                yield
            finally:
                task.cancel()

    _serve(port, scene.as_json, looking)


def _serve(
    port: int, data: Callable[[], bytes], during: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
) -> None:
    """Serve the page until Ctrl-C or SIGTERM; `during` is what goes on meanwhile."""

    async def live() -> None:
        over = asyncio.Event()
        with suppress(NotImplementedError):  # on Windows a Ctrl-C ends it all the same
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, over.set)
        pages = {"/": Page("text/html; charset=utf-8", read_page), "/data": Page("application/json", data)}
        server = await serve_pages(port, pages)
        async with server, during():
            typer.echo(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/  (Ctrl-C ends it)")
            await over.wait()

    asyncio.run(live())


async def _follow(visitor: Guest, scene: Scene) -> None:
    """Look again and again, and keep what was seen."""
    scene.title = f"run {visitor.run}"
    sent: dict[int, dict[str, int]] = {}
    while True:
        with suppress(NetError):  # the peer that was joined may be gone: others may answer the next time
            found = await visitor.look()
            note(scene, found, sent)
        await asyncio.sleep(LOOK)


def note(scene: Scene, found: list[Seen], sent: dict[int, dict[str, int]]) -> None:
    """Take in what peers say of themselves; `sent` has the bytes of each in each iteration."""
    seen = {each.peer for each in found}
    for peer in scene.peers.keys() - seen:
        scene.meet(peer, here=False, why="is not here")
    for each in found:
        about = each.about
        if about is None:
            scene.meet(each.peer, index=each.index, here=False, why=f"cannot be reached: {each.why}")
            continue
        scene.group_size = about.group_size if about.group_size >= 2 else scene.group_size
        scene.meet(
            each.peer, index=each.index, here=True, why="", iteration=about.iteration, state=about.state,
            model=about.model, sent=about.sent, accuracy=about.last.accuracy if about.last else None,
        )  # fmt: skip
        if about.last is not None:
            last = about.last
            sent.setdefault(last.iteration, {})[each.peer] = last.sent
            total = sum(sent[last.iteration].values()) if sent[last.iteration].keys() >= {*last.present} else None
            scene.add(Iteration(
                last.iteration, last.present, last.missing, last.exchange, last.accuracy, total, last.hash, last.seconds
            ))  # fmt: skip
