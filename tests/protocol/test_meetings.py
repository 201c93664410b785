"""Groups that meet before they average: who sees whom, and what a death or a lost vector changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from marfl.net.base import Parcel
from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.grid import plan
from marfl.protocol.exchange import Contribution, replay_mean
from marfl.protocol.meetings import Meetings
from marfl.protocol.roster import PIECE, Record, Roster
from marfl.testing.world import World
from stages.virtual import Swarm

LENGTH = 12


def own(index: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(index))


class MeetingSwarm(Swarm):
    """Peers that add to their update, in every round, half of what their group shows them."""

    def __init__(self, n: int, weights: dict[str, float] | None = None, **settings: Any) -> None:
        super().__init__(n, length=LENGTH, meet_until=1, **settings)
        self.weights = weights or {}
        self.missed: dict[str, list[tuple[int, str]]] = {}

    def mine(self, name: str, weight: float = 1.0) -> Contribution:
        mine, weight = own(self.people[name].index), self.weights.get(name, weight)

        async def prepare(meetings: Meetings) -> Tensor:
            value = mine
            for round in range(meetings.rounds):
                if meetings.mates(round):
                    value = learnt(value, await meetings.show(round, value))
            self.missed[name] = meetings.missed
            return value

        return Contribution(self.people[name].record.hash, mine, weight, prepare=prepare if weight else None)

    def state(self) -> Tensor:
        """The one state of all who live."""
        held = [p.state for name, p in self.people.items() if self.network.alive(name)]
        assert len({state.hash for state in held}) == 1
        return held[0].vectors["theta"]

    def sent(self, kind: str) -> int:
        return sum(getattr(person.net.sent, kind) for person in self.people.values())


def learnt(value: Tensor, seen: list[Tensor]) -> Tensor:
    for other in seen:
        value = value + 0.5 * other
    return value


def expected(roster: Roster, lost: Callable[[int, str, str], bool] = lambda *_: False) -> Tensor:
    """What this roster must come to: all rounds of meetings without a network, then the mean."""
    names = roster.ids
    values = {m.id: own(m.index) for m in roster.members}
    for number, groups in enumerate(plan(len(names), roster.group_size).rounds):
        before = dict(values)
        for group in groups:
            present = [names[rank] for rank in group if roster.members[rank].weight]
            for me in present:
                others = [other for other in present if other != me and not lost(number, other, me)]
                values[me] = learnt(before[me], [before[other] for other in others])
    mine = {m.id: Contribution(b"", values[m.id], m.weight) for m in roster.members}
    return replay_mean(roster, mine)


@pytest.mark.parametrize("exchange", ["grid", "chunked", "full"])
@pytest.mark.parametrize("n", [2, 7, 9])
def test_everybody_sees_its_group_in_order_and_the_sum_is_of_what_they_made_of_it(n, exchange):
    async def play() -> None:
        swarm = MeetingSwarm(n, exchange=exchange)
        outcomes = await swarm.iterate()
        roster = swarm.people["p0"].record.roster
        assert roster is not None
        assert roster.attempt == 0
        assert torch.equal(swarm.state(), expected(roster))
        assert all(not missed for missed in swarm.missed.values())
        models = sum(len(g) * (len(g) - 1) for groups in plan(n, 3).rounds for g in groups)
        assert (
            swarm.sent("distill") == sum(p.net.received.distill for p in swarm.people.values()) == 4 * LENGTH * models
        )
        assert sum(o.sent.distill for o in outcomes.values()) == 4 * LENGTH * models
        assert swarm.sent("repair") == 0

    run_virtual(play())


def test_after_the_last_iteration_with_meetings_nobody_meets():
    async def play() -> None:
        swarm = MeetingSwarm(4)
        await swarm.iterate()
        before = swarm.sent("distill")
        assert before
        await swarm.iterate()
        assert swarm.sent("distill") == before

    run_virtual(play())


def test_whoever_brings_no_update_neither_shows_nor_sees_anything():
    async def play() -> None:
        swarm = MeetingSwarm(7, weights={"p3": 0.0, "p5": 0.0})
        await swarm.iterate()
        roster = swarm.people["p0"].record.roster
        assert roster is not None
        assert len(roster.members) == 7
        assert torch.equal(swarm.state(), expected(roster))
        assert swarm.people["p3"].net.sent.distill == swarm.people["p3"].net.received.distill == 0

    run_virtual(play())


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_death_in_a_meeting_leaves_the_sum_exact_over_the_survivors(after):
    sent = 0

    def intercept(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        nonlocal sent
        if event.source == "p4" and event.tag.channel == "distill" and network.alive("p4"):
            if sent == after:
                delivery.copies = 0
                network.crash("p4")
            sent += 1

    async def play() -> None:
        swarm = MeetingSwarm(9)
        swarm.network.intercept = intercept
        outcomes = await swarm.iterate()
        assert {o.status for o in outcomes.values()} == {"committed"}
        roster = swarm.people["p0"].record.roster
        assert roster is not None
        assert set(roster.ids) == set(swarm.people) - {"p4"}
        assert all("p4" in o.missing for o in outcomes.values())
        assert torch.equal(swarm.state(), expected(roster))  # those who are left met again, in new groups

    run_virtual(play())


@pytest.mark.parametrize("fate", ["lost", "NaN", "short"])
def test_a_vector_that_does_not_arrive_or_is_no_good_is_not_seen_and_everybody_is_averaged(fate):
    def intercept(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.tag.channel == "distill" and event.source == "p2" and event.tag.round == 0:
            header, payload = delivery.parcel
            nothing = torch.full((LENGTH,), float("nan")).numpy().tobytes()
            bad = {"lost": payload, "NaN": nothing, "short": bytes(payload)[:-4]}[fate]
            delivery.parcel = Parcel(header, bad)
            delivery.copies = int(fate != "lost")

    async def play() -> None:
        swarm = MeetingSwarm(9)
        swarm.network.intercept = intercept
        outcomes = await swarm.iterate()
        roster = swarm.people["p0"].record.roster
        assert roster is not None
        assert len(roster.members) == 9
        assert {o.attempt for o in outcomes.values()} == {0}
        assert torch.equal(swarm.state(), expected(roster, lambda round, who, _: round == 0 and who == "p2"))
        unseen = [name for name, missed in swarm.missed.items() if missed == [(0, "p2")]]
        assert len(unseen) == 2
        assert swarm.missed["p2"] == []
        counted = [swarm.people[name].net.refused["bad data"] for name in unseen]
        assert counted == [int(fate != "lost")] * 2

    run_virtual(play())


def test_a_slice_that_is_lost_while_others_might_still_meet_is_asked_for_before_the_meetings_end():
    lost = []

    def intercept(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.tag.channel == "reduce" and not lost:
            delivery.copies = 0
            lost.append(event)

    async def play() -> None:
        swarm = MeetingSwarm(9, phase_timeout=4.0)
        swarm.network.intercept = intercept
        outcomes = await swarm.iterate()
        assert {o.status for o in outcomes.values()} == {"committed"}
        assert lost
        assert swarm.sent("repair") == lost[0].payload
        assert max(o.seconds for o in outcomes.values()) < 2 * 4.0  # the two meetings alone may take as long

    run_virtual(play())


class MeetingWorld(World):
    """A world of the soak in which groups meet in every iteration, and bring what they would have brought."""

    def __init__(self, seed: int, piece: int | None = None) -> None:
        super().__init__(seed, piece=piece, classic=True)
        self.settings = replace(self.settings, meet_until=1000)
        self.seen = 0

    def contribution(self, index: int, record: Record) -> Contribution:
        mine = super().contribution(index, record)

        async def prepare(meetings: Meetings) -> Tensor:
            for round in range(meetings.rounds):
                if meetings.mates(round):
                    self.seen += len(await meetings.show(round, mine.delta))
            return mine.delta

        return replace(mine, prepare=prepare) if mine.weight else mine


WHOLE = [(seed, PIECE) for seed in (3, 35, 151, 265, 322, 393)]
CUT = [(700, 8), (701, 16), (702, None), (703, 8)]


@pytest.mark.parametrize(("seed", "piece"), WHOLE + CUT)
def test_worlds_of_the_soak_keep_every_promise_when_groups_meet(seed, piece):
    world = MeetingWorld(seed, piece)
    report = world.run()
    assert report.broken == []
    assert report.committed
    assert world.seen
