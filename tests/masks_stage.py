"""A masked swarm on the virtual network: deaths on cue, everything that travels on record, and who helped to unmask."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.exchange import Contribution, replay_mean
from marfl.protocol.participant import Outcome, Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Roster
from marfl.protocol.standing import Diary
from marfl.state import Snapshot
from marfl.testing.world import LAYOUT, advance


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


@dataclass
class Stage:
    """Peers p0, p1, …; every iteration they bring values that follow from who they are."""

    count: int
    length: int = 9
    deaths: tuple[Death, ...] = ()
    weights: tuple[float, ...] = ()  # of the first peers; the others have 1
    fewest: tuple[int, ...] = ()  # contributions that the first peers demand of a sum; the others take any
    settings: Settings = field(
        default_factory=lambda: Settings(wire="masked", group_size=3, exchange="full", on_minority="wait")
    )

    def __post_init__(self) -> None:
        self.network = VirtualNetwork(0, Link(latency=0.01))
        self.start = Snapshot(0, {"theta": torch.zeros(self.length)}, {})
        names = [f"p{i}" for i in range(self.count)]
        record = genesis(self.start, tuple((name, i) for i, name in enumerate(names)))
        self.people = {
            name: Participant(self.network.join(name), self.settings, i, LAYOUT, self.start, record, advance)
            for i, name in enumerate(names)
        }
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

    def contribution(self, name: str) -> Contribution:
        index = self.people[name].index
        value = torch.randn(self.length, generator=torch.Generator().manual_seed(index))
        weight = self.weights[index] if index < len(self.weights) else 1.0
        fewest = self.fewest[index] if index < len(self.fewest) else 0
        return Contribution(self.people[name].state.hash, value, weight, fewest)

    async def iterate(self) -> dict[str, Outcome]:
        """One iteration; the outcomes of those who live to see its end."""
        found: dict[str, Outcome] = {}

        async def one(name: str) -> None:
            found[name] = await self.people[name].run_iteration(self.contribution(name))

        tasks = [
            self.network.spawn(name, one(name)) for name in self.people if self.network.alive(name)
        ]
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    def play(self, iterations: int = 1) -> dict[str, Outcome]:
        async def all_of_them() -> dict[str, Outcome]:
            for _ in range(iterations):
                found = await self.iterate()
            return found

        return run_virtual(all_of_them())

    @property
    def living(self) -> list[Helper]:
        return [person for name, person in self.people.items() if self.network.alive(name)]

    def expected(self, roster: Roster) -> bytes:
        """The hash of the state after the first iteration over this roster."""
        mine = {name: self.contribution(name) for name in self.people}
        return advance(self.start, replay_mean(roster, mine), roster).hash
