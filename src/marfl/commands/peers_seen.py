"""`marfl peers`: who is in a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marfl.commands import flags as flag

if TYPE_CHECKING:
    from marfl.peer.about import Seen

Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="Of any peer of the run.", show_default=False)]
RunName = Annotated[str | None, typer.Option(help="The run's name; by default the one of the peer at ADDRESS.")]


def show_peers(
    address: Address,
    run: RunName = None,
    identity: Annotated[Path | None, flag.joining("identity")] = None,
    token: Annotated[Path | None, flag.joining("token")] = None,
    authority: Annotated[str | None, flag.joining("authority")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Show who is in the run of the peer at an address: name, iteration, age, version, and whether it answers.

    It only looks, and takes no part. A closed run is shown to who has a token of it. Examples:

      marfl peers /ip4/192.168.1.5/tcp/4001/p2p/12D3Koo…

      marfl peers /ip4/192.168.1.5/tcp/4001/p2p/12D3Koo… --json
    """
    from marfl.peer.about import as_row, guest  # hivemind takes a second: only when something is asked

    async def look() -> tuple[str, list[Seen]]:
        async with guest(address, run, identity=identity, token=token, authority=authority) as visitor:
            return visitor.run, await visitor.look()

    name, found = asyncio.run(look())
    if as_json:
        typer.echo(json.dumps({"run": name, "peers": [dict(as_row(each)) for each in found]}, indent=2))
        return
    console = Console(highlight=False)
    answered = sum(each.about is not None for each in found)
    console.print(f"run {name}: {_counted(len(found))}, {answered} of them can be reached", markup=False)
    console.print(_table(found))
    for each in found:
        if each.about is None:
            typer.echo(f"{each.peer} does not answer: {each.why}")


def _counted(peers: int) -> str:
    return f"{peers} peer" if peers == 1 else f"{peers} peers"


def _table(found: list[Seen]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for head in ("name", "index", "iteration", "state", "age", "version", "model", "reachable"):
        right = head in ("index", "iteration", "age")
        table.add_column(head, justify="right" if right else "left", no_wrap=True)
    for each in found:
        about: Any = each.about
        name, index = f"{each.peer[:4]}…{each.peer[-6:]}", str(each.index) if each.index < 2**20 else "–"
        if about is None:
            table.add_row(name, index, *["–"] * 5, "no")
        else:
            age = duration(about.up)
            table.add_row(name, index, str(about.iteration), about.state, age, about.version, about.model[:8], "yes")
    return table


def duration(seconds: float) -> str:
    """A time as a person says it: 45 s, 12 min, 3.5 h, 2.1 d."""
    for unit, size, more in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 172_800)):
        if seconds < more:
            return f"{seconds / size:.0f} {unit}" if size < 3600 else f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"
