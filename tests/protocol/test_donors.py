"""Whom a peer asks for a state that it missed, and for how long one donor can keep it from the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from marfl.errors import SyncError
from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.messages import Head, Sync
from marfl.protocol.participant import Participant
from stages.virtual import Swarm, leaders

SILENCE = 2.0  # half of phase_timeout: for so long a donor is waited for alone
USUAL = 7.0  # phase_timeout and call_timeout: then it is given up
TRAINING = 4.0
FAR = 30.0
LARGE = 20_000  # values, beside which no header counts

Watch = Callable[[Departure, Delivery], None]


def watched(swarm: Swarm, watch: Watch) -> None:
    swarm.network.intercept = lambda _, event, delivery: watch(event, delivery)


async def missed(swarm: Swarm, late: str = "p4") -> Participant:
    """A peer that knows of the newest commit, and does not have its state."""
    await swarm.iterate(skip=(late,))
    me = swarm.people[late]
    assert me.behind
    return me


async def fetched(swarm: Swarm, me: Participant, donors: list[str]) -> tuple[float, list[str]]:
    """How long it takes to fetch the state, and who was asked for it."""
    asked: list[str] = []
    before = swarm.network.intercept

    def watch(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "call" and event.tag.channel == "sync" and not Sync.decode(delivery.parcel.header).light:
            asked.append(event.dest)
        if before is not None:
            before(network, event, delivery)

    swarm.network.intercept = watch
    begun = swarm.network.time
    caught = await me.transfer.fetch(donors, me.record.hash)
    assert caught.state.hash == me.record.hash
    return swarm.network.time - begun, asked


def lose(*donors: str) -> Watch:
    """What is asked of these never arrives."""

    def watch(event: Departure, delivery: Delivery) -> None:
        if event.op == "call" and event.tag.channel == "sync" and event.dest in donors:
            delivery.copies = 0

    return watch


def delay(donor: str, seconds: float) -> Watch:
    """What this one answers comes so late."""

    def watch(event: Departure, delivery: Delivery) -> None:
        if event.op == "answer" and event.tag.channel == "sync" and event.source == donor:
            delivery.delay = seconds

    return watch


@pytest.mark.parametrize("watch", [lose("p0"), delay("p0", FAR)], ids=["a lost question", "a late answer"])
def test_a_donor_that_shows_nothing_does_not_keep_a_peer_from_the_next_one(watch: Watch) -> None:
    async def play() -> None:
        swarm = Swarm(5)
        me = await missed(swarm)
        watched(swarm, watch)
        seconds, asked = await fetched(swarm, me, ["p0", "p1", "p2"])
        assert SILENCE <= seconds < SILENCE + 0.5
        assert asked == ["p0", "p1"]

    run_virtual(play())


def test_a_donor_that_hangs_costs_no_more_than_its_silence() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        me = await missed(swarm)
        swarm.network.hang("p0", FAR)
        seconds, _ = await fetched(swarm, me, ["p0", "p1"])
        assert SILENCE <= seconds < SILENCE + 0.5

    run_virtual(play())


def test_a_donor_that_answers_after_the_next_one_was_asked_counts_all_the_same() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        me = await missed(swarm)
        late, mute = delay("p0", SILENCE + 1.0), lose("p1")

        def watch(event: Departure, delivery: Delivery) -> None:
            late(event, delivery)
            mute(event, delivery)

        watched(swarm, watch)
        seconds, asked = await fetched(swarm, me, ["p0", "p1"])
        assert SILENCE + 1.0 <= seconds < SILENCE + 1.5
        assert asked == ["p0", "p1"]

    run_virtual(play())


def test_while_bytes_of_a_donor_come_nobody_else_sends_them_again() -> None:
    async def play() -> None:
        swarm = Swarm(5, length=LARGE)
        me = await missed(swarm)
        swarm.network.relink("p0", Link(up=4 * LARGE / (2 * SILENCE)))
        seconds, asked = await fetched(swarm, me, ["p0", "p1"])
        assert 2 * SILENCE < seconds < USUAL
        assert asked == ["p0"]

    run_virtual(play())


def test_who_can_ask_only_one_waits_for_it_as_long_as_ever() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        me = await missed(swarm)
        watched(swarm, delay("p0", USUAL - 1.0))
        seconds, asked = await fetched(swarm, me, ["p0"])
        assert USUAL - 1.5 < seconds < USUAL
        assert asked == ["p0"]
        watched(swarm, lose("p0"))
        begun = swarm.network.time
        with pytest.raises(SyncError, match="p0: no sync"):
            await me.transfer.fetch(["p0"], me.record.hash)
        assert USUAL <= swarm.network.time - begun < USUAL + 0.5

    run_virtual(play())


def test_a_stranger_that_announces_a_head_and_says_nothing_is_not_asked_again_at_once() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        me = await missed(swarm)
        stranger = swarm.join("s0", 9)
        head = Head(99, bytes(32), me.record.lineage, me.standing.terms.digest).encoded
        await stranger.net.announce(me.talk.key("head"), head, ttl=600.0)
        assert "s0" in dict(await me.standing.heads())
        watched(swarm, lose("s0"))
        seconds, _ = await fetched(swarm, me, ["s0", "p0"])
        assert seconds < SILENCE + 0.5
        assert "s0" not in dict(await me.standing.heads())
        await asyncio.sleep(USUAL)
        assert "s0" in dict(await me.standing.heads())

    run_virtual(play())


def test_one_bad_link_leaves_nobody_else_out_of_the_next_iteration() -> None:
    """A peer hears a phase late what was decided without it; the first one that it asks for the state is silent."""

    async def play() -> None:
        swarm = Swarm(7)
        await swarm.iterate()
        victim, mute = leaders(swarm)[-1], list[str]()

        def watch(event: Departure, delivery: Delivery) -> None:
            channel, to_victim = event.tag.channel, event.dest == victim
            if event.op == "send" and to_victim and swarm.people[victim].record.iteration == 1:
                delivery.copies = 0  # it cannot finish
            if event.source == victim and event.op == "call" and channel in ("resend", "finish"):
                delivery.copies = 0  # nor can it ask
            asks = event.source == victim and event.op == "call" and channel == "sync"
            if asks and not Sync.decode(delivery.parcel.header).light:
                mute.extend([] if mute else [event.dest])
                delivery.copies = 0 if event.dest in mute else 1

        async def work(name: str) -> None:
            me = swarm.people[name]
            while me.record.iteration < 3:
                if me.behind:
                    await me.catch_up()
                mine = swarm.mine(name)
                await me.net.sleep_until(me.net.now() + TRAINING)
                await me.run_iteration(mine)

        watched(swarm, watch)
        await asyncio.gather(*(work(name) for name in swarm.names))
        assert mute
        left_out = {person.record.iteration: person.record.roster.omitted for person in swarm.people.values()}
        assert left_out == {3: ()}

    run_virtual(play())
