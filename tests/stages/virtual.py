"""A swarm on the virtual network: participants who bring made-up updates, deaths on cue, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import Outcome, Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Roster, ranked
from marfl.state import Snapshot

LAYOUT = b"l" * 32
LENGTH = 60


def advance(state: Snapshot, mean: torch.Tensor, _: Roster) -> Snapshot:
    return Snapshot(state.version + 1, {"theta": state.vectors["theta"] + mean}, {})


class Swarm:
    """Participants p0, p1, … on one virtual network; what they bring follows from who they are and when."""

    def __init__(
        self,
        n: int,
        *,
        named: bool = True,
        length: int = LENGTH,
        network: VirtualNetwork | None = None,
        settings: Settings | None = None,
        **others: Any,
    ) -> None:
        """`others` are settings too, where the usual ones of these tests will do; unnamed peers have to be found."""
        self.network = network or VirtualNetwork(0)
        self.settings = settings or Settings(run="test", group_size=3, **others)
        self.length = length
        self.start = Snapshot(0, {"theta": torch.zeros(length)}, {})
        self.names = [f"p{i}" for i in range(n)]
        founders = tuple((name, i) for i, name in enumerate(self.names)) if named else ()
        self.record = genesis(self.start, founders)
        self.people = {name: self.join(name, i) for i, name in enumerate(self.names)}

    def join(self, name: str, index: int, layout: bytes = LAYOUT) -> Participant:
        return Participant(self.network.join(name), self.settings, index, layout, self.start, self.record, advance)

    def mine(self, name: str, weight: float = 1.0) -> Contribution:
        me = self.people[name]
        generator = torch.Generator().manual_seed(1000 * me.record.iteration + me.index)
        return Contribution(me.record.hash, torch.randn(self.length, generator=generator), weight)

    async def iterate(self, skip: tuple[str, ...] = (), witnesses: tuple[str, ...] = ()) -> dict[str, Outcome]:
        """One iteration of everybody else who lives, and the outcomes of those who survive it; witnesses only vote."""
        there = [name for name in self.people if name not in skip and self.network.alive(name)]
        work = {n: self.people[n].run_iteration(None if n in witnesses else self.mine(n)) for n in there}
        tasks = {name: self.network.spawn(name, each) for name, each in work.items()}
        await asyncio.wait(tasks.values())
        return {name: task.result() for name, task in tasks.items() if not task.cancelled()}

    def play(self, iterations: int = 1) -> dict[str, Outcome]:
        """So many iterations in virtual time; the outcomes of the last."""

        async def all_of_them() -> dict[str, Outcome]:
            for _ in range(iterations):
                found = await self.iterate()
            return found

        return run_virtual(all_of_them())

    def play_with(self, brought: Sequence[Contribution]) -> list[Outcome]:
        """One iteration to which the peers bring these updates of the first state, in their order; nobody may fail."""
        mine = {name: replace(one, base=self.start.hash) for name, one in zip(self.names, brought, strict=True)}
        self.mine = lambda name, weight=1.0: mine[name]  # type: ignore[method-assign]
        outcomes = self.play()
        return [outcomes[name] for name in self.names]

    def hashes(self, names: list[str] | None = None) -> set[bytes]:
        return {self.people[name].state.hash for name in names or self.people if self.network.alive(name)}


def crash_on(channel: str, victim: str, after: int = 0) -> Callable[[VirtualNetwork, Departure, Delivery], None]:
    """Kill a peer when it has sent so many messages on a channel."""
    sent = 0

    def intercept(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        nonlocal sent
        if event.source == victim and event.tag.channel == channel and network.alive(victim):
            if sent == after:
                delivery.copies = 0
                network.crash(victim)
            sent += 1

    return intercept


def leaders(swarm: Swarm) -> list[str]:
    """Everybody, in the order in which they lead the next iteration."""
    record = swarm.people["p0"].record
    return [elector.id for elector in ranked("test", record.iteration + 1, record.electors)]
