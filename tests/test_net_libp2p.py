"""Real sockets keep the contract, and bear what the virtual network never sees: garbage, forgers and slow senders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest
from net_contract import NetContract, World

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
    from marfl.net.libp2p import Libp2pNet
from marfl.net.base import Net
from marfl.net.libp2p_settings import Libp2pSettings

T = TypeVar("T")
pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
SCENE_TIMEOUT = 120.0


class Swarm:
    """Peers on loopback, in this process, and their daemons' pids: those are stopped whatever happens."""

    def __init__(self) -> None:
        self.known: list[Libp2pNet] = []
        self.others: list[Libp2pNet] = []
        self.daemons: list[int] = []

    async def start(self, settings: Libp2pSettings | None = None, **options: object) -> Libp2pNet:
        net = await Libp2pNet.start(settings, **options)
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

    async def joining(self, **options: object) -> Libp2pSettings:
        (first,) = await self.peers(1)
        return Libp2pSettings(join=await first.addresses(), **options)

    async def newcomer(self, **options: object) -> Libp2pNet:
        net = await self.start(await self.joining(**options))
        self.others.append(net)
        return net

    async def kill(self, peer: Net) -> None:
        await peer.close()

    async def close(self) -> None:
        await asyncio.gather(*(net.close() for net in self.known + self.others))

    def stop_daemons(self) -> None:
        for pid in self.daemons:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Stage:
    """An event loop and the swarm that lives on it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.swarm = Swarm()

    def play(self, scene: Callable[[Swarm], Awaitable[T]]) -> T:
        async def timed() -> T:
            async with asyncio.timeout(SCENE_TIMEOUT):
                return await scene(self.swarm)

        return self.runner.run(timed())


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with asyncio.Runner() as runner:
        stage = Stage(runner)
        try:
            yield stage
            runner.run(stage.swarm.close())
        finally:
            stage.swarm.stop_daemons()


class TestLibp2pNet(NetContract):
    @pytest.fixture(autouse=True)
    def _on_stage(self, stage: Stage) -> None:
        self.stage = stage

    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        return self.stage.play(scene)
