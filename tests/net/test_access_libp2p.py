"""The same strangers and wrong members on real sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from stages.access_contract import AccessContract
from stages.libp2p import Libp2pNet, Stage, Swarm, hivemind_warnings, open_stage
from stages.net_contract import World

T = TypeVar("T")
pytestmark = hivemind_warnings


class OneStranger(Swarm):
    """Whoever comes to it comes again: a stranger leaves nothing behind, and a daemon takes half a second to start."""

    async def newcomer(self, *settings: Any) -> Libp2pNet:
        return self.others[0] if self.others else await super().newcomer(*settings)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with open_stage(OneStranger) as stage:
        yield stage


class TestOnLibp2p(AccessContract):
    @pytest.fixture(autouse=True)
    def _on(self, stage: Stage) -> None:
        self.stage = stage

    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        return self.stage.play(scene)

    @pytest.mark.parametrize(("exchange", "wire"), [("grid", "fp32"), ("full", "fixed")])
    def test_a_stranger_that_syncs_the_roster_reads_no_update(self, exchange: str, wire: str) -> None:
        """Every exchange is tried on the virtual network: sockets make no difference to who is shown what."""
        super().test_a_stranger_that_syncs_the_roster_reads_no_update(exchange, wire)
