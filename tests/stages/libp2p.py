"""Real peers for tests: on loopback, in this process, and ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import warnings
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
    from marfl.net.libp2p.transport import DIED, Libp2pNet
from marfl.net.base import Net
from marfl.net.libp2p.admission import Admission, TokenAdmission, new_authority, parse_authority, sign_token
from marfl.net.libp2p.connection import Libp2pSettings
from marfl.net.libp2p.identity import load_identity

T = TypeVar("T")
SCENE_TIMEOUT = 120.0
hivemind_warnings = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")


class Swarm:
    """A `World` of real peers. It remembers the pid of every daemon it started."""

    def __init__(self) -> None:
        self.known: list[Libp2pNet] = []
        self.others: list[Libp2pNet] = []
        self.daemons: list[int] = []
        self.taken: dict[str, socket.socket] = {}  # ports, by the peers whose they are

    async def start(self, settings: Libp2pSettings | None = None, admission: Admission | None = None) -> Libp2pNet:
        net = await Libp2pNet.start(settings, admission)
        self.daemons.append(net.daemon_pid)
        return net

    async def peers(self, count: int) -> list[Net]:
        if not self.known:
            self.known.append(await self.start())
        more = count - len(self.known)
        if more > 0:
            settings = await self.joining()
            self.known += await asyncio.gather(*(self.start(settings) for _ in range(more)))
        return list(self.known[:count])

    async def joining(self, **settings: Any) -> Libp2pSettings:
        await self.peers(1)
        return Libp2pSettings(join=await self.known[0].addresses(), **settings)

    async def newcomer(self, settings: Libp2pSettings | None = None, admission: Admission | None = None) -> Libp2pNet:
        net = await self.start(settings or await self.joining(), admission)
        self.others.append(net)
        return net

    async def kill(self, peer: Net) -> None:
        """Its daemon dies; the daemons of the others have noticed when this returns."""
        os.kill(peer.daemon_pid, signal.SIGKILL)
        await peer.close()
        kept = [wire for net in self.known + self.others for wire, to in net._dialer._idle.items() if to == peer.me]
        await until(lambda: all(wire.has_news for wire in kept))

    async def silence_dht(self, peer: Net) -> None:
        """Its daemon dies, and finds its port taken."""
        port = int(peer._daemon.listen[0].rpartition("/")[2])
        taken = self.taken[peer.me] = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the daemon does
        taken.bind(("127.0.0.1", port))
        before = peer.refused[DIED]
        os.kill(peer.daemon_pid, signal.SIGKILL)
        await until(lambda: peer.refused[DIED] > before)

    async def mend_dht(self, peer: Net) -> None:
        self.taken.pop(peer.me).close()
        peer.returned.clear()
        await peer.returned.wait()
        self.daemons.append(peer.daemon_pid)

    async def close(self) -> None:
        await asyncio.gather(*(net.close() for net in self.known + self.others))

    def stop_daemons(self) -> None:
        for pid in self.daemons:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class ClosedSwarm(Swarm):
    """The same among holders of tokens, as peers of a closed run start."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.authority = folder, parse_authority(new_authority(folder / "authority"))
        self.count = itertools.count()

    async def start(self, settings: Libp2pSettings | None = None, admission: Admission | None = None) -> Libp2pNet:
        settings = settings or Libp2pSettings()
        identity = self.folder / f"key{next(self.count)}"
        token = sign_token(self.folder / "authority", "test", load_identity(identity).peer, days=1)
        admission = TokenAdmission(self.authority, "test", bytes.fromhex(token))
        return await super().start(replace(settings, identity=identity), admission)

    async def peers(self, count: int) -> list[Net]:
        """They have greeted each other: a first message would cost more."""
        nets = await super().peers(count)
        for one in nets:
            await asyncio.gather(*(one._greet(other.me, one.now() + 10) for other in nets if other is not one))
        return nets


class Stage:
    """An event loop, and the swarm that lives on it."""

    def __init__(self, runner: asyncio.Runner, swarm: Swarm) -> None:
        self.runner = runner
        self.swarm = swarm

    def play(self, scene: Callable[[Swarm], Awaitable[T]]) -> T:
        async def timed() -> T:
            async with asyncio.timeout(SCENE_TIMEOUT):
                return await scene(self.swarm)

        return self.runner.run(timed())


@pytest.fixture(scope="module")
def new_stage() -> Iterator[Stage]:
    with open_stage(Swarm) as stage:
        yield stage


@pytest.fixture(scope="module")
def new_closed_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(lambda: ClosedSwarm(tmp_path_factory.mktemp("closed"))) as stage:
        yield stage


@contextlib.contextmanager
def open_stage(new: Callable[[], Swarm]) -> Iterator[Stage]:
    """A stage that is cleared at the end."""
    with asyncio.Runner() as runner:
        stage = Stage(runner, new())
        try:
            yield stage
            runner.run(stage.swarm.close())
        finally:
            stage.swarm.stop_daemons()


async def freeze(pid: int) -> None:
    """Stop a process until it is continued. On a busy machine its threads go on for a while after the signal."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    await until(lambda: all(_state(thread) == "T" for thread in threads.iterdir()))


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks, or another process, will make true; the scene's time-out is the limit."""
    while not condition():
        await asyncio.sleep(0.002)
