"""Iterations that end without a sum, and peers that must be told how an iteration ended."""

from __future__ import annotations

import asyncio

import pytest
import torch

from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.ballot import SILENT
from marfl.protocol.exchange import Contribution
from marfl.protocol.messages import Finish, Ruling
from marfl.protocol.roster import VOID, ranked
from stages.virtual import LENGTH, Swarm, crash_on, leaders


def test_an_iteration_to_which_nobody_brings_anything_goes_by_at_once() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        theta = swarm.people["p0"].state.vectors["theta"]
        begun = swarm.network.time
        outcomes = await swarm.iterate(witnesses=tuple(swarm.names))
        assert {o.status for o in outcomes.values()} == {"committed"}
        assert {o.exchange for o in outcomes.values()} == {VOID}
        assert all(not o.present and o.missing.keys() == set(swarm.names) for o in outcomes.values())
        assert swarm.network.time - begun < 0.1 * swarm.settings.ready_timeout
        assert len(swarm.hashes()) == 1
        assert torch.equal(swarm.people["p3"].state.vectors["theta"], theta)
        after = await swarm.iterate()
        assert all(o.iteration == 3 and set(o.present) == set(swarm.names) for o in after.values())

    run_virtual(play())


def test_all_who_abstain_are_as_good_as_witnesses() -> None:
    async def play() -> None:
        swarm = Swarm(3)
        nan = Contribution(swarm.record.hash, torch.full((LENGTH,), float("nan")))
        swarm.mine = lambda name, weight=1.0: nan  # type: ignore[method-assign]
        outcomes = await swarm.iterate()
        assert {(o.status, o.exchange) for o in outcomes.values()} == {("committed", VOID)}

    run_virtual(play())


def test_whoever_still_trains_is_waited_for_where_the_others_only_vote() -> None:
    async def play() -> None:
        swarm = Swarm(4)

        async def train() -> str:
            await asyncio.sleep(3 * swarm.settings.ready_timeout)
            return (await swarm.people["p2"].run_iteration(swarm.mine("p2"))).status

        training = swarm.network.spawn("p2", train())
        outcomes = await swarm.iterate(skip=("p2",), witnesses=tuple(swarm.names))
        assert await training == "committed"
        assert all(o.present == ("p2",) for o in outcomes.values())

    run_virtual(play())


def test_a_majority_that_waits_for_whoever_trains_founds_no_lineage() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        _, *_, last = leaders(swarm)
        lineage = swarm.people[last].record.lineage

        async def train() -> str:
            await asyncio.sleep(2 * swarm.settings.minority_timeout)
            return (await swarm.people[last].run_iteration(swarm.mine(last))).status

        training = swarm.network.spawn(last, train())
        outcomes = await swarm.iterate(skip=(last,), witnesses=tuple(swarm.names))
        assert await training == "committed"
        assert all(o.present == (last,) for o in outcomes.values())
        assert {me.record.lineage for me in swarm.people.values()} == {lineage}

    run_virtual(play())


def test_whoever_comes_too_late_and_waits_for_the_others_is_not_waited_for() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        _, *_, last = leaders(swarm)
        trained = swarm.network.time + 3 * swarm.settings.ready_timeout

        async def train() -> str:
            await asyncio.sleep(trained - swarm.network.time)
            return (await swarm.people[last].run_iteration(None)).status

        training = swarm.network.spawn(last, train())
        late = swarm.join("late", 4)
        caught: list[asyncio.Task[bool]] = []

        def joins(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.op == "call" and event.tag.channel == "propose" and not caught:
                caught.append(network.spawn("late", late.catch_up()))

        swarm.network.intercept = joins
        outcomes = await swarm.iterate(skip=(last, "late"), witnesses=tuple(swarm.names))
        assert await training == "committed"
        assert {(o.status, o.exchange) for o in outcomes.values()} == {("committed", VOID)}
        assert await caught[0]
        assert swarm.network.time < trained + swarm.settings.phase_timeout
        assert (late.record.iteration, late.behind) == (2, False)

    run_virtual(play())


def test_the_only_one_who_brings_something_dies_and_the_iteration_goes_by() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        swarm.network.crash("p1")
        outcomes = await swarm.iterate(witnesses=("p0", "p2", "p3"))
        assert {(o.status, o.exchange) for o in outcomes.values()} == {("committed", VOID)}
        assert all(o.missing["p1"] == "did not answer" for o in outcomes.values())

    run_virtual(play())


def test_survivors_that_only_vote_found_a_lineage_in_which_the_iteration_goes_by() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        for name in ("p0", "p1", "p2"):
            swarm.network.crash(name)
        outcomes = await swarm.iterate(witnesses=("p3", "p4"))
        assert {(o.status, o.exchange) for o in outcomes.values()} == {("committed", VOID)}
        assert len({me.record.lineage for name, me in swarm.people.items() if name in ("p3", "p4")}) == 1
        assert len(swarm.hashes()) == 1

    run_virtual(play())


def test_a_member_that_does_not_finish_is_told_the_decision_a_phase_later() -> None:
    def deaf(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        """Nothing of the exchange's second half reaches p3, and nobody sends it again."""
        if event.dest == "p3" and event.tag.channel == "gather":
            delivery.copies = 0
        if event.dest == "p3" and event.op == "answer" and event.tag.channel in ("resend", "finish"):
            delivery.copies = 0

    async def play() -> None:
        swarm = Swarm(9, exchange="chunked")
        swarm.network.intercept = deaf
        outcomes = await swarm.iterate()
        assert outcomes["p3"].status == "committed"
        assert outcomes["p3"].holds
        fastest = min(o.seconds for o in outcomes.values())
        assert outcomes["p3"].seconds <= fastest + swarm.settings.phase_timeout + 0.1
        told = [e for e in swarm.network.events or [] if e.op == "call" and e.tag.channel == "decided"]
        assert "p3" in {e.dest for e in told}

    run_virtual(play())


def test_an_elector_whose_vote_was_lost_is_told_the_decision_a_phase_later() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        led, unheard, *_ = leaders(swarm)

        def loses_votes(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.source == unheard and event.tag.channel == "propose":
                delivery.copies = 0

        swarm.network.intercept = loses_votes
        outcomes = await swarm.iterate()
        assert outcomes[led].missing == {unheard: SILENT}
        assert (outcomes[unheard].status, outcomes[unheard].holds) == ("committed", True)
        assert outcomes[unheard].seconds <= outcomes[led].seconds + swarm.settings.phase_timeout + 0.1

    run_virtual(play())


def test_a_leader_that_nobody_follows_announces_its_head() -> None:
    async def play() -> None:
        swarm = Swarm(3)
        await swarm.iterate()
        alone = swarm.people[ranked("test", 2, swarm.people["p0"].record.electors)[2].id]
        for name in swarm.names:
            if name != alone.net.me:
                swarm.network.crash(name)
        swarm.network.dht.clear()  # whoever announced the commit is gone, and its record with it
        life = swarm.network.spawn(alone.net.me, alone.run_iteration(swarm.mine(alone.net.me)))
        turn = swarm.settings.ready_timeout + 2 * swarm.settings.takeover
        await asyncio.sleep(turn + swarm.settings.call_timeout)  # it has led, and nobody followed
        assert alone.net.me in swarm.network.dht["head/test"]
        life.cancel()

    run_virtual(play())


@pytest.mark.parametrize("peers", [3, 5, 9])
def test_a_commit_outlives_the_only_peer_that_brought_something(peers: int) -> None:
    async def play() -> None:
        swarm = Swarm(peers)
        await swarm.iterate()
        others = tuple(swarm.names[1:])
        outcomes = await swarm.iterate(witnesses=others)
        assert {(o.status, o.present) for o in outcomes.values()} == {("committed", ("p0",))}
        swarm.network.crash("p0")
        for name in others:
            assert await swarm.people[name].catch_up()
        assert swarm.hashes() == {outcomes["p0"].hash}
        after = await swarm.iterate()
        assert all(set(o.present) == set(others) for o in after.values())

    run_virtual(play())


def test_a_commit_is_not_lost_with_the_only_peer_that_holds_it() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        swarm.network.intercept = crash_on("sync", "p0")  # before anybody else has the state
        outcomes = await swarm.iterate(witnesses=tuple(swarm.names[1:]))
        assert all((o.status, o.exchange) == ("committed", VOID) for o in outcomes.values())
        swarm.network.intercept = None
        assert len(swarm.hashes()) == 1
        assert {o.status for o in (await swarm.iterate()).values()} == {"committed"}

    run_virtual(play())


async def live(swarm: Swarm, name: str) -> None:
    """Until the third iteration is over, with a little training before each."""
    me = swarm.people[name]
    for _ in range(5):
        if me.record.iteration < 3:
            await me.run_iteration(swarm.mine(name))
            await me.catch_up()
            await asyncio.sleep(1.0)


def test_whoever_was_not_told_the_decision_hears_of_it_from_the_next_leader() -> None:
    async def play() -> None:
        swarm = Swarm(16)
        await swarm.iterate()
        led, *rest = leaders(swarm)
        told = rest[:-3]  # those who are not take their turn long after the next iteration has begun
        for name in swarm.names:
            swarm.network.relink(name, Link(latency=0.01))

        def dies_when_most_have_heard(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.source == led and event.op == "answer" and event.tag.channel == "finish":
                delivery.copies = int(event.dest in told)
                asyncio.get_running_loop().call_later(0.1, network.crash, led)

        swarm.network.intercept = dies_when_most_have_heard
        lives = {name: swarm.network.spawn(name, live(swarm, name)) for name in swarm.names}
        await asyncio.wait([lives[name] for name in rest])
        assert not swarm.network.alive(led)
        for name in rest:
            roster = swarm.people[name].record.roster
            assert roster is not None
            assert (roster.iteration, set(roster.ids)) == (3, set(rest))

    run_virtual(play())


def test_whoever_begins_to_train_when_an_iteration_has_begun_goes_on_from_what_comes_of_it() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        for name in swarm.names:
            swarm.network.relink(name, Link(latency=0.1))
        late = swarm.join("late", 5)
        caught: list[asyncio.Task[bool]] = []

        def joins(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.op == "call" and event.tag.channel == "propose" and not caught:
                caught.append(network.spawn("late", late.catch_up()))

        swarm.network.intercept = joins
        outcomes = await swarm.iterate()
        assert all("late" not in o.present for o in outcomes.values())
        assert await caught[0]
        assert late.record.iteration == 2  # and not the state that the iteration began with

    run_virtual(play())


def test_whoever_waits_with_a_minority_hears_with_it_of_the_lineage_that_wins() -> None:
    async def play() -> None:
        swarm = Swarm(7)
        await swarm.iterate()
        swarm.people["late"] = swarm.join("late", 5)
        assert await swarm.people["late"].catch_up()
        few = [*leaders(swarm)[5:], "late"]
        swarm.network.partition(dict.fromkeys(few, 1))
        waiting = {name: swarm.network.spawn(name, swarm.people[name].run_iteration(swarm.mine(name))) for name in few}
        await swarm.iterate(skip=tuple(few))
        await swarm.iterate(skip=tuple(few))
        await asyncio.sleep(35.0)
        swarm.network.heal()
        begun = swarm.network.time
        done, _ = await asyncio.wait(waiting.values())
        assert {task.result().status for task in done} == {"stale"}
        assert swarm.network.time - begun < 5.0  # it would look again after 8.75 seconds by itself

    run_virtual(play())


def test_a_leader_whose_iteration_is_over_without_a_decision_lets_nobody_ask_again() -> None:
    """Else members would ask it over and over, and where nothing takes time for ever."""

    async def play() -> None:
        swarm = Swarm(3)
        leader, member, _ = leaders(swarm)
        standing = swarm.people[leader].standing
        instance = standing.enter()
        instance.lead.attempt = 0
        finish = Finish(instance.iteration, 0, None, True).parcel()
        asked = asyncio.create_task(swarm.people[leader].verdicts.answer_finish(member, finish))
        await asyncio.sleep(0.1)
        standing.gone_elsewhere(member)
        for answer in (await asked, await swarm.people[leader].verdicts.answer_finish(member, finish)):
            assert Ruling.decode(answer.header).status == "retry"

    run_virtual(play())
