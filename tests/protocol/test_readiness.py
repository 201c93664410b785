"""Whom an iteration waits for: not for those who died, and a hung peer only once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from marfl.net.virtual import Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.messages import Vouch
from stages.virtual import Swarm, leaders

PATIENT = 10.0  # seconds, the virtual peers' ready_timeout


async def _after(swarm: Swarm, rank: int, strike: Callable[[str], None]) -> tuple[float, float]:
    """Seconds of an iteration before the peer that leads in this place is gone, and of the one after that."""
    before = max(outcome.seconds for outcome in (await swarm.iterate()).values())
    gone = leaders(swarm)[rank]
    strike(gone)
    after = await swarm.iterate(skip=(gone,))
    assert {outcome.status for outcome in after.values()} == {"committed"}
    assert all(set(outcome.present) == set(swarm.people) - {gone} for outcome in after.values())
    return before, max(outcome.seconds for outcome in after.values())


def test_who_died_is_not_waited_for() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        before, after = await _after(swarm, -1, swarm.network.crash)
        assert after < before + 2

    run_virtual(play())


def test_where_the_first_leader_died_the_next_one_leads_at_once() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        before, after = await _after(swarm, 0, swarm.network.crash)
        assert after < before + 2

    run_virtual(play())


def test_where_the_first_two_leaders_died_the_third_one_leads_at_once() -> None:
    async def play() -> None:
        swarm = Swarm(7, liars=0)
        await swarm.iterate()
        for gone in leaders(swarm)[:2]:
            swarm.network.crash(gone)
        after = await swarm.iterate()
        assert {outcome.status for outcome in after.values()} == {"committed"}
        assert len(after) == 5
        assert max(outcome.seconds for outcome in after.values()) < 3

    run_virtual(play())


@pytest.mark.parametrize(("peers", "rank"), [(3, 0), (3, 2), (4, 0), (4, 1), (4, 3), (5, 0), (5, 4), (9, 0)])
def test_a_hung_peer_costs_its_patience_once_also_where_it_leads(peers: int, rank: int) -> None:
    async def play() -> None:
        swarm, hung = Swarm(peers), list[str]()

        def hang(peer: str) -> None:
            hung.append(peer)
            swarm.network.hang(peer, 600.0)

        before, after = await _after(swarm, rank, hang)
        assert after > before + PATIENT / 2  # it may still train
        assert after < before + 1.5 * PATIENT
        for _ in range(4):
            again = await swarm.iterate(skip=(*hung,))
            assert max(outcome.seconds for outcome in again.values()) < before + 1.1

    run_virtual(play())


@pytest.mark.parametrize("rank", [0, 3])
def test_a_peer_that_hung_and_answers_again_is_waited_for_while_it_trains(rank: int) -> None:
    async def play() -> None:
        swarm = Swarm(4)  # so few that it is an elector after the iteration it was missed in
        await swarm.iterate()
        hung = leaders(swarm)[rank]
        swarm.network.hang(hung, 1.5 * PATIENT)
        await swarm.iterate(skip=(hung,))
        await asyncio.sleep(PATIENT)
        others = asyncio.create_task(swarm.iterate(skip=(hung,)))
        await swarm.people[hung].catch_up()
        await asyncio.sleep(PATIENT / 2)
        mine = await swarm.people[hung].run_iteration(swarm.mine(hung))
        assert mine.status == "committed"
        assert all(set(outcome.present) == set(swarm.people) for outcome in (await others).values())

    run_virtual(play())


def test_two_hung_leaders_cost_hardly_more_than_one() -> None:
    async def play() -> None:
        swarm = Swarm(9)
        await swarm.iterate()
        hung = leaders(swarm)[:2]
        for each in hung:
            swarm.network.hang(each, 600.0)
        after = await swarm.iterate(skip=(*hung,))
        assert {outcome.status for outcome in after.values()} == {"committed"}
        assert max(outcome.seconds for outcome in after.values()) < 2 * PATIENT

    run_virtual(play())


def test_who_was_thought_gone_and_says_that_it_is_there_takes_part() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        leader, *_, back = leaders(swarm)
        swarm.people[leader].standing.enter().absent.add(back)
        found = await swarm.iterate()
        assert all(set(outcome.present) == set(swarm.people) for outcome in found.values())

    run_virtual(play())


async def _works(swarm: Swarm, name: str, met: asyncio.Event) -> None:
    """Trains for a moment and averages, until it has met somebody; who is late goes on from where the others are."""
    me = swarm.people[name]
    while not met.is_set():
        if me.behind or not me.record.iteration:
            await me.catch_up()
        mine = swarm.mine(name)
        await me.net.sleep_until(me.net.now() + 0.02)
        outcome = await me.run_iteration(mine)
        if outcome.status == "committed" and len(outcome.present) > 1:
            met.set()
        elif outcome.status != "committed":
            await me.catch_up()


def test_a_newcomer_meets_one_whose_iterations_are_shorter_than_the_way_to_it() -> None:
    async def play() -> None:
        swarm, met = Swarm(1, named=False, network=VirtualNetwork(0, Link(latency=0.2))), asyncio.Event()
        swarm.people["p0"].standing.company = 1  # it knows of nobody else
        swarm.network.spawn("p0", _works(swarm, "p0", met))
        await asyncio.sleep(5)
        swarm.names.append("p1")
        swarm.people["p1"] = swarm.join("p1", 1)
        swarm.network.spawn("p1", _works(swarm, "p1", met))
        async with asyncio.timeout(10):
            await met.wait()
        assert set(swarm.people["p0"].record.roster.ids) == {"p0", "p1"}

    run_virtual(play())


def test_a_lying_elector_that_vouches_for_peers_it_made_up_costs_the_others_no_time() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        before = max(outcome.seconds for outcome in (await swarm.iterate()).values())
        leader, *_, liar = leaders(swarm)
        for number in range(20):
            vouch = Vouch(f"nobody{number}", swarm.people[liar].record.hash).parcel()
            await swarm.people[liar].net.call(leader, "vouch", vouch, deadline=swarm.network.time + 1)
        after = max(outcome.seconds for outcome in (await swarm.iterate()).values())
        assert after < before + 0.5

    run_virtual(play())
