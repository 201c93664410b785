"""What somebody may leave with a peer, fetch from it, and hold up: limits that no honest peer meets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from marfl.net.base import NOT_ENTITLED, PATIENCE, Net, Parcel, PeerId, Tag
from marfl.net.virtual import Delivery, Departure, Link, VirtualNet, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol import transfer
from marfl.protocol.messages import Ready, Sync
from marfl.protocol.roster import Member, Record, Roster
from marfl.protocol.transfer import TOO_MUCH, Allowance
from stages.forgery import an_ack
from stages.virtual import LAYOUT, LENGTH, Swarm

FAR = 2**60


def kept(net: VirtualNet) -> int:
    """Messages that wait to be received, or to be judged."""
    waiting = sum(isinstance(held, tuple) for box in net._inbox.values() for held in box.values())
    return waiting + len(net._waiting)


async def send(net: Net, to: PeerId, tag: Tag) -> None:
    await net.send(to, tag, Parcel(b"h", bytes(1000)), deadline=net.now() + 5)


# --- data ---


@pytest.mark.parametrize("who", ["stranger", "p1"])
def test_data_for_iterations_that_are_not_under_way_is_refused_and_counted(who: str) -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        victim = swarm.people["p0"].net
        net = swarm.network.join("stranger") if who == "stranger" else swarm.people[who].net
        for iteration in (3, FAR):
            await send(net, "p0", Tag("reduce", iteration))
        await asyncio.sleep(0.1)
        assert kept(victim) == 0
        assert victim.refused == {NOT_ENTITLED: 2}
        assert {o.status for o in (await swarm.iterate()).values()} == {"committed"}

    run_virtual(play())


def test_a_strangers_data_waits_for_a_roster_that_names_it_and_is_refused_when_none_comes() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        victim, stranger = swarm.people["p0"].net, swarm.network.join("stranger")
        await send(stranger, "p0", Tag("reduce", 2))
        await send(stranger, "p0", Tag("reduce", 1))  # long decided: nothing to wait for
        await asyncio.sleep(PATIENCE - 1)
        assert (kept(victim), victim.refused[NOT_ENTITLED]) == (1, 1)
        await swarm.iterate()
        await asyncio.sleep(2)
        assert kept(victim) == 0
        assert victim.refused == {NOT_ENTITLED: 2}
        assert victim.received.payload < 1000 + 5 * 2 * 4 * LENGTH

    run_virtual(play())


def test_data_of_a_newcomer_that_overtakes_the_seal_is_not_lost() -> None:
    def late_seal(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "call" and event.tag.channel == "seal" and event.dest != "new":
            delivery.delay = 1.0

    async def play() -> None:
        swarm = Swarm(4, exchange="full")
        swarm.network.link = Link(latency=0.01)
        await swarm.iterate()
        swarm.people["new"] = swarm.join("new", 9)
        assert await swarm.people["new"].catch_up()
        swarm.network.intercept = late_seal
        outcomes = await swarm.iterate()
        assert {(o.status, len(o.present), o.sent.repair) for o in outcomes.values()} == {("committed", 5, 0)}
        assert [me.net.refused for me in swarm.people.values()] == [{}] * 5

    run_virtual(play())


def leader_of(swarm: Swarm) -> str:
    me = next(iter(swarm.people.values()))
    return me.standing.enter().electors[0].id


def test_what_comes_after_the_decision_is_dropped_and_an_honest_sender_is_not_counted() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        victim = swarm.people["p0"].net
        await send(swarm.people["p1"].net, "p0", Tag("reduce", 1))
        await asyncio.sleep(0.1)
        assert (kept(victim), victim.refused) == (0, {})

    run_virtual(play())


# --- states ---


async def fetch(net: Net, donor: str) -> int:
    """Bytes of a state that a donor gives."""
    answer = await net.call(donor, "sync", Parcel(Sync(have=bytes(32), want=None).encoded), deadline=net.now() + 5)
    return memoryview(answer.payload).nbytes


def test_a_peer_fetches_a_few_states_in_a_minute_and_another_is_not_hindered_by_it() -> None:
    async def play() -> None:
        swarm = Swarm(3)
        await swarm.iterate()
        greedy, honest = swarm.network.join("greedy"), swarm.network.join("honest")
        given = [await fetch(greedy, "p0") for _ in range(30)]
        assert given == [4 * LENGTH] * 10 + [0] * 20
        assert swarm.people["p0"].net.refused == {TOO_MUCH: 20}
        assert await fetch(greedy, "p1") == await fetch(honest, "p0") == 4 * LENGTH
        await asyncio.sleep(6.0)  # a tenth of a minute
        assert [await fetch(greedy, "p0") for _ in range(2)] == [4 * LENGTH, 0]
        await asyncio.sleep(60.0)
        assert [await fetch(greedy, "p0") for _ in range(11)] == [4 * LENGTH] * 10 + [0]

    run_virtual(play())


def test_what_one_peer_may_fetch_is_remembered_only_as_long_as_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MANY", 3)
    allowance = Allowance()
    for number in range(100):
        assert allowance.take(f"peer{number}", 10, 100.0, now=10.0 * number)
    assert len(allowance._level) <= 4
    assert allowance.take("large", 1000, 100.0, now=2000.0)  # one always fits beside nothing
    assert not allowance.take("large", 1, 100.0, now=2001.0)


def test_a_result_that_is_not_decided_is_for_those_who_decide_on_it() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        undecided: list[bytes] = []

        def hold_up(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.op in ("call", "answer") and event.tag.channel in ("finish", "endorse"):
                delivery.copies = 0

        swarm.network.intercept = hold_up
        working = asyncio.create_task(swarm.iterate())
        await asyncio.sleep(1.0)
        holder = next(me for me in swarm.people.values() if me.instance and me.instance.accepted)
        assert holder.instance
        assert holder.instance.accepted
        undecided.append(holder.instance.accepted.hash)
        want = Parcel(Sync(have=bytes(32), want=undecided[0]).encoded)
        stranger = swarm.network.join("stranger")
        elector = next(me.net for me in swarm.people.values() if me is not holder)
        answers = [await net.call(holder.net.me, "sync", want, deadline=net.now() + 5) for net in (stranger, elector)]
        assert [memoryview(answer.payload).nbytes > 0 for answer in answers] == [False, True]
        assert holder.net.refused == {NOT_ENTITLED: 1}
        swarm.network.intercept = None
        await working

    run_virtual(play())


# --- time ---


def notice(swarm: Swarm, role: str, of: str = "p0") -> bytes:
    record = swarm.people[of].record
    fields = {"iteration": record.iteration + 1, "base": record.hash, "index": 77, "weight": 1.0, "layout": LAYOUT}
    return Ready(**fields, role=role, incarnation=0, terms=swarm.people[of].terms.digest).encoded


async def announce(swarm: Swarm, net: Net, role: str) -> None:
    """To everybody, and to the DHT."""
    said, me = notice(swarm, role), swarm.people["p0"]
    await net.announce(me.talk.key(f"ready/{me.record.iteration + 1}"), said, ttl=600)
    for name in swarm.names:
        await net.call(name, "ready", Parcel(said), deadline=net.now() + 5)


def test_a_stranger_that_says_it_trains_is_not_waited_for() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        stranger = swarm.network.join("stranger")
        for _ in range(4):
            await announce(swarm, stranger, "training")
            outcomes = await swarm.iterate()
            assert {o.status for o in outcomes.values()} == {"committed"}
            assert max(o.seconds for o in outcomes.values()) < 0.5

    run_virtual(play())


def test_a_peer_that_fetched_the_state_is_waited_for_wherever_it_fetched_it() -> None:
    async def play() -> None:
        for donor in range(5):
            swarm = Swarm(5)
            await swarm.iterate()
            swarm.people["new"] = new = swarm.join("new", 9)
            new.standing.donors[f"p{donor}"] = None
            heads, new.standing.heads = new.standing.heads, nobody  # type: ignore[method-assign]
            assert await new.catch_up()
            new.standing.heads = heads  # type: ignore[method-assign]
            work = asyncio.create_task(swarm.iterate(skip=("new",)))
            await asyncio.sleep(3.0)  # it trains for longer than the others
            mine = await new.run_iteration(swarm.mine("new"))
            outcomes = await work
            assert {(o.status, len(o.present)) for o in (*outcomes.values(), mine)} == {("committed", 6)}

    run_virtual(play())


async def nobody() -> list[Any]:
    return []


def test_a_stranger_that_fetches_every_state_and_trains_for_ever_is_waited_for_once_by_each_leader() -> None:
    async def play() -> None:
        swarm = Swarm(3)
        stranger = swarm.network.join("stranger")
        slow: dict[str, int] = {}
        for _ in range(12):
            for name in swarm.names:
                await fetch(stranger, name)
            await announce(swarm, stranger, "training")
            leader = leader_of(swarm)
            outcomes = await swarm.iterate()
            assert {o.status for o in outcomes.values()} == {"committed"}
            slow[leader] = slow.get(leader, 0) + (max(o.seconds for o in outcomes.values()) > 1.0)
            await asyncio.sleep(60.0)
        assert max(slow.values()) <= 1

    run_virtual(play())


# --- refusals ---


def ack(swarm: Swarm, status: str, **changes: Any) -> Callable[[PeerId, Parcel], Any]:
    """An answer to proposals that is always the same."""

    async def answer(_: PeerId, __: Parcel) -> Parcel:
        terms = swarm.people["p0"].terms.digest
        return an_ack(status=status, terms=terms, attempt=10**9, index=77, layout=LAYOUT, **changes).parcel()

    return answer


def test_a_stranger_that_refuses_every_proposal_holds_nobody_up() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        stranger = swarm.network.join("stranger")
        stranger.serve("propose", ack(swarm, "refused"))
        for _ in range(3):
            await announce(swarm, stranger, "member")
            outcomes = await swarm.iterate()
            assert {(o.status, o.attempt, len(o.present)) for o in outcomes.values()} == {("committed", 0, 5)}
            assert max(o.seconds for o in outcomes.values()) < 0.5

    run_virtual(play())


def test_a_stranger_that_makes_up_a_decision_is_not_believed() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        record = swarm.people["p0"].record
        members = (Member("stranger", 77, 1.0),)
        lie = Roster("test", 2, 0, record.lineage, record.hash, LAYOUT, "grid", 3, members, (), (), ())
        stranger = swarm.network.join("stranger")
        stranger.serve("propose", ack(swarm, "behind", record=Record(lie, b"x" * 32).encoded))
        await announce(swarm, stranger, "member")
        outcomes = await swarm.iterate()
        assert {(o.status, len(o.present)) for o in outcomes.values()} == {("committed", 5)}
        assert len(swarm.hashes()) == 1

    run_virtual(play())


@pytest.mark.parametrize("begun", [False, True])
def test_one_that_refuses_does_not_keep_the_rest_from_founding(begun: bool) -> None:
    """At the beginning, when nobody is known, and when most electors are lost for good."""

    async def play() -> None:
        swarm = Swarm(7, named=begun, expected=0 if begun else 8, ready_timeout=4.0)
        net: Net = swarm.people["p6"].net if begun else swarm.network.join("stranger")
        lost = ("p0", "p1", "p2", "p3") if begun else ()
        if begun:
            await swarm.iterate()
        for name in lost:
            swarm.network.crash(name)
        net.serve("propose", ack(swarm, "refused"))
        key = swarm.people["p4"].talk.key(f"ready/{1 + begun}")
        await net.announce(key, notice(swarm, "member", of="p4"), ttl=600)
        outcomes = await swarm.iterate(skip=(*lost, net.me))
        assert {o.status for o in outcomes.values()} == {"committed"}
        assert len(swarm.hashes(list(outcomes))) == 1
        assert net.me not in next(iter(outcomes.values())).present

    run_virtual(play())


def test_founders_that_begin_at_once_end_in_one_lineage() -> None:
    async def play() -> None:
        swarm = Swarm(6, named=False, expected=6, takeover=0.01)  # it is everybody's turn before anybody is heard
        for name in swarm.names:
            swarm.network.relink(name, Link(latency=0.1))
        for _ in range(4):
            outcomes = await swarm.iterate()
            for me in swarm.people.values():
                await me.catch_up()
        assert {o.status for o in outcomes.values()} == {"committed"}
        assert len(swarm.hashes()) == 1
        assert len({me.record.lineage for me in swarm.people.values()}) == 1

    run_virtual(play())
