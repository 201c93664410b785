"""Deaths in the midst of an exchange on the virtual network: who dies when, and how long the others wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from marfl.net.base import PeerId
from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.plan.cost import Cost
from marfl.sim.links import Links

# When nobody ever dies, nobody ever has to give up waiting: slow links then cannot look like deaths.
PATIENT: dict[str, Any] = {
    "phase_timeout": 3600.0,
    "call_timeout": 600.0,
    "ready_timeout": 7200.0,
    "iteration_timeout": 1e6,
}


def patience(given: Links | None, cost: Cost, largest: int) -> dict[str, Any]:
    """Time-outs for peers that may die: twice what the slowest link needs for all that the busiest peer carries.

    `largest` is the most that one message of a later attempt may hold, in bytes.
    """
    phase = 4.0
    if given is not None:
        slowest = min(given.up.min(), given.down.min())
        phase += float(2 * max(*cost.bytes_sent, *cost.bytes_received, largest) / slowest + 8 * given.latency.max())
    return {
        "phase_timeout": phase,
        "call_timeout": phase,
        "ready_timeout": 4 * phase,
        "minority_timeout": 20 * phase,
        "iteration_timeout": 100 * phase,
    }


class Reaper:
    """Crashes peers when their time has come: plug into `VirtualNetwork.intercept`.

    A peer that dies in round r (from 0) has sent all that it sends in r phases, and nothing of the next one.
    """

    def __init__(self, dies: Mapping[PeerId, int]) -> None:
        self.dies = dict(dies)
        self.dead: list[PeerId] = []
        self._begun: dict[PeerId, set[tuple[int, str, int]]] = defaultdict(set)

    def __call__(self, network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        peer, tag = event.source, event.tag
        if peer not in self.dies or event.op != "send" or tag.kind != "payload":
            return
        self._begun[peer].add((tag.attempt, tag.channel, tag.round))
        if len(self._begun[peer]) > self.dies[peer]:
            del self.dies[peer]
            self.dead.append(peer)
            delivery.copies = 0
            network.crash(peer)
