"""Clocks have no common origin: nothing that a peer does depends on what its clock shows at the beginning."""

from __future__ import annotations

import pytest
import torch

from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import Outcome, Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.state import Snapshot
from marfl.testing.world import LAYOUT, advance


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_whoever_is_left_without_a_majority_goes_on_whatever_its_clock_shows(offset: float) -> None:
    start = Snapshot(0, {"theta": torch.zeros(3)}, {})
    record = genesis(start, (("a", 0), ("b", 1), ("c", 2)))

    async def scene() -> Outcome:
        network = VirtualNetwork()
        me = Participant(network.join("a"), Settings(), 0, LAYOUT, start, record, advance)
        network.skew("a", rate=1.0, offset=offset)
        return await me.run_iteration(Contribution(start.hash, torch.ones(3)))

    outcome = run_virtual(scene())
    assert (outcome.status, outcome.present) == ("committed", ("a",))
    assert 60 < outcome.seconds < 90
