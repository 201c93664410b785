"""A slow peer counts: the others hardly wait for it, and what it learned is in a later average, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from marfl.net.virtual_clock import run_virtual
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import Participant
from marfl.protocol.roster import Roster
from stages.virtual import Swarm

STEP = 2.0  # seconds that most peers train for


class Workers:
    """Peers that train for so many seconds each and bring what they learned, late or not, as the library does."""

    def __init__(self, seconds: list[float]) -> None:
        self.swarm = Swarm(len(seconds), ready_timeout=60.0, iteration_timeout=600.0)
        self.seconds = dict(zip(self.swarm.names, seconds, strict=True))
        self.rosters: dict[int, Roster] = {}
        self.learned: Counter[tuple[str, bytes]] = Counter()  # by peer and the state it learned from
        self.ended: dict[str, float] = {}

    async def work(self, name: str, until: int) -> None:
        me = self.swarm.people[name]
        me.standing.carries = True
        while me.record.iteration < until:
            if me.behind:
                await me.catch_up()
            await me.readiness.say_how_long(self.seconds[name])
            mine = self.swarm.mine(name)
            await me.net.sleep_until(me.net.now() + self.seconds[name])
            await self._bring(me, mine)
        self.ended[name] = self.swarm.network.time

    async def _bring(self, me: Participant, mine: Contribution) -> None:
        began, base = me.state.version, mine.base
        outcome = await me.run_iteration(mine)
        if outcome.status == "stale":
            await me.catch_up()
            if me.may_carry(mine):
                late = replace(mine, base=me.record.hash, age=me.record.iteration - began)
                outcome = await me.run_iteration(late)
        if outcome.status == "committed" and me.net.me in outcome.present:
            self.learned[me.net.me, base] += 1
        if me.record.roster is not None:
            self.rosters[me.record.iteration] = me.record.roster

    def play(self, iterations: int) -> float:
        """Seconds of an iteration, on average."""

        async def all_of_them() -> None:
            slowest = max(self.seconds.values())
            quick = [name for name, seconds in self.seconds.items() if seconds < slowest or slowest == STEP]
            tasks = {name: self.swarm.network.spawn(name, self.work(name, iterations)) for name in self.swarm.names}
            await asyncio.gather(*(tasks[name] for name in quick))
            for task in tasks.values():
                task.cancel()

        run_virtual(all_of_them())
        return max(self.ended.values()) / iterations


async def gone_ahead() -> tuple[Swarm, Participant, Participant]:
    """Two peers: one has committed two iterations alone, and said goodbye; the other still trains, and only voted."""
    swarm = Swarm(2, ready_timeout=20.0)
    await asyncio.gather(*(swarm.people[name].run_iteration(swarm.mine(name)) for name in swarm.names))
    first = swarm.people[swarm.people[swarm.names[0]].standing.electors[0].id]
    slow = next(me for me in swarm.people.values() if me is not first)
    assert not first.heirs, "the other holds what they committed together"
    await slow.readiness.say_how_long(6.0)
    while first.record.iteration < 3:
        await first.run_iteration(swarm.mine(first.net.me))
    await first.farewell()
    assert slow.behind
    assert first.heirs == {slow.net.me}
    return swarm, first, slow


@pytest.mark.parametrize("hands_over", [True, False])
def test_who_went_on_alone_and_leaves_hands_its_state_to_who_still_trains(hands_over: bool) -> None:
    async def scenario() -> None:
        swarm, first, slow = await gone_ahead()
        begun = swarm.network.time

        async def leave() -> float:
            if hands_over:
                assert await first.hand_over(20.0)
            swarm.network.crash(first.net.me)
            return swarm.network.time

        async def train() -> bool:
            await slow.net.sleep_until(slow.net.now() + 6.0)
            await slow.run_iteration(swarm.mine(slow.net.me))
            return await slow.catch_up()

        left, caught = await asyncio.gather(leave(), train())
        assert (caught and slow.state.hash == first.state.hash) is hands_over
        assert left - begun < (10.0 if hands_over else 1.0)

    run_virtual(scenario())


@pytest.mark.parametrize(("crashed", "least", "most"), [(True, 0.0, 5.0), (False, 20.0, 25.0)])
def test_who_leaves_waits_for_no_heir_that_is_gone_nor_for_ever(crashed: bool, least: float, most: float) -> None:
    async def scenario() -> None:
        swarm, first, slow = await gone_ahead()
        if crashed:
            swarm.network.crash(slow.net.me)
        begun = swarm.network.time
        assert not await first.hand_over(20.0)
        assert least <= swarm.network.time - begun < most

    run_virtual(scenario())


@pytest.mark.parametrize("peers", [2, 3, 5, 9])
def test_one_peer_five_times_slower_costs_the_rest_a_fifth_at_most_and_its_work_counts(peers: int) -> None:
    alone = Workers([STEP] * peers).play(20)
    workers = Workers([STEP] * (peers - 1) + [5 * STEP])
    assert workers.play(20) <= 1.2 * alone + 8 * STEP / 20  # at first nobody knows that it is slow
    slow = f"p{peers - 1}"
    ages = [age for roster in workers.rosters.values() for peer, age in roster.ages if peer == slow]
    assert len(ages) >= 2, "its work counts"
    assert all(3 <= age <= 6 for age in ages)


def test_what_comes_late_counts_once() -> None:
    workers = Workers([STEP] * 4 + [5 * STEP])
    workers.play(25)
    assert workers.learned
    assert set(workers.learned.values()) == {1}


def test_where_most_are_slow_the_quick_one_waits_for_them() -> None:
    workers = Workers([STEP] + [5 * STEP] * 4)
    workers.play(6)
    assert all(len(roster.members) == 5 for roster in workers.rosters.values())


def test_a_peer_that_is_only_a_little_slower_is_waited_for() -> None:
    workers = Workers([STEP] * 4 + [1.15 * STEP])
    workers.play(10)
    assert all(len(roster.members) == 5 for roster in workers.rosters.values())
    assert not any(roster.ages for roster in workers.rosters.values())


def test_what_was_offered_once_is_never_brought_again_for_a_roster_may_have_it() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        mine = swarm.mine("p1")
        me = swarm.people["p1"]
        assert not me.may_carry(mine), "not every peer does"
        me.standing.carries = True
        assert me.may_carry(mine)
        await swarm.iterate()
        assert not me.may_carry(mine)
        assert not me.may_carry(replace(swarm.mine("p1"), age=2)), "nor twice late"

    run_virtual(play())
