"""A masked swarm on the virtual network: deaths on cue, everything that travels on record, and who helped to unmask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.protocol.exchange import Contribution, replay_mean
from marfl.protocol.participant import Participant
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Roster
from marfl.protocol.standing import Diary
from stages.virtual import Swarm, advance

MASKED = Settings(wire="masked", group_size=3, exchange="full", on_minority="wait")


@dataclass(frozen=True)
class Death:
    """Somebody dies instead of sending its message number `after` (from 0) on a channel."""

    victim: str
    channel: str
    after: int = 0
    round: int = 0  # of the exchange, or any later one


class Helper(Diary):
    """Writes down for whom a participant helped to take masks off."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def helped(self, roster: Roster) -> None:
        self.stage.helped.setdefault(roster.digest, roster)


class Stage(Swarm):
    """A swarm that sums under masks, unless its settings say otherwise."""

    def __init__(
        self,
        count: int,
        length: int = 9,
        *,
        deaths: tuple[Death, ...] = (),
        weights: tuple[float, ...] = (),
        fewest: tuple[int, ...] = (),
        settings: Settings = MASKED,
    ) -> None:
        """`weights` and `fewest` (contributions that one demands of a sum) are those of the first peers."""
        network = VirtualNetwork(0, Link(latency=0.01))
        super().__init__(count, length=length, network=network, settings=settings)
        self.deaths, self.weights, self.fewest = deaths, weights, fewest
        for person in self.people.values():
            person.standing.keep(Helper(self))
        self.helped: dict[bytes, Roster] = {}
        self.lifted = 0  # answers that brought all the secrets of a sum
        self.seen: list[tuple[Departure, Tensor]] = []  # every slice that travelled
        self.watch: Callable[[Departure, Delivery], None] | None = None
        self._sent: Counter[Death] = Counter()
        self.network.intercept = self._intercept

    def _intercept(self, network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "send" and event.tag.channel in ("reduce", "gather"):
            self.seen.append((event, torch.frombuffer(bytearray(delivery.parcel.payload), dtype=torch.int64)))
        if event.op == "answer" and event.tag.channel == "held" and len(delivery.parcel.payload):
            self.lifted += 1
        if self.watch is not None:
            self.watch(event, delivery)
        for death in self.deaths:
            if event.source != death.victim or event.tag.channel != death.channel or event.tag.round < death.round:
                continue
            if self._sent[death] == death.after and network.alive(death.victim):
                delivery.copies = 0
                network.crash(death.victim)
            self._sent[death] += 1

    def mine(self, name: str, weight: float = 1.0) -> Contribution:
        index = self.people[name].index
        value = torch.randn(self.length, generator=torch.Generator().manual_seed(index))
        weight = self.weights[index] if index < len(self.weights) else weight
        fewest = self.fewest[index] if index < len(self.fewest) else 0
        return Contribution(self.people[name].state.hash, value, weight, fewest)

    @property
    def living(self) -> list[Participant]:
        return [person for name, person in self.people.items() if self.network.alive(name)]

    def expected(self, roster: Roster) -> bytes:
        """The hash of the state after the first iteration over this roster."""
        mine = {name: self.mine(name) for name in self.people}
        return advance(self.start, replay_mean(roster, mine), roster).hash
