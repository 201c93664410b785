"""Rosters from peers that have none to make: refused, counted, and without effect. Honest ones may be late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from marfl.net.base import Net, Parcel
from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.messages import Endorse, Ok, Pledge, Seal
from marfl.protocol.roster import Elector, Member, Roster, brief, ranked
from stages.virtual import LAYOUT, Swarm, crash_on

COUNTED = "not entitled"


def roster_by(swarm: Swarm, name: str, *, ahead: int = 1, founding: bool = True) -> Roster:
    """What somebody would seal for itself and p0, so many iterations after the last one."""
    record = swarm.people["p0"].record
    electors = (Elector(name, 0),) if founding else ()
    members = Member(name, 7, 1.0), Member("p0", 0, 1.0)
    return Roster(
        "test", record.iteration + ahead, 0, record.lineage, record.hash, LAYOUT, "grid", 3, members, (), electors, ()
    )


def question(channel: str, roster: Roster, known: tuple[Elector, ...] = ()) -> Parcel:
    named = brief(roster, known)
    if channel == "seal":
        return Seal(named, roster.attempt, None, ()).parcel()
    if channel == "endorse":
        return Endorse(roster.iteration, roster.attempt, named, bytes(32)).parcel()
    return Pledge(roster.iteration, roster.attempt, named).parcel()


async def status(net: Net, channel: str, parcel: Parcel) -> str:
    answer = await net.call("p0", channel, parcel, deadline=net.now() + 5)
    return str(Ok.decode(answer.header).status)


def first_elector(swarm: Swarm, iteration: int) -> str:
    record = swarm.people["p0"].record
    return ranked("test", iteration, record.electors)[0].id


@pytest.mark.parametrize("channel", ["seal", "endorse", "pledge"])
@pytest.mark.parametrize("ahead", [1, 2, 100])
def test_a_stranger_or_an_elector_out_of_turn_that_makes_a_roster_is_refused_and_counted(channel: str, ahead: int):
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        me, stranger = swarm.people["p0"], swarm.network.join("stranger")
        leader = first_elector(swarm, 2)
        rival = next(name for name in swarm.names if name not in (leader, "p0"))
        before = me.state.hash, me.record
        for net in (stranger, swarm.people[rival].net):
            forged = question(channel, roster_by(swarm, net.me, ahead=ahead))
            assert await status(net, channel, forged) == "refused"
        assert me.net.refused == {COUNTED: 2}
        assert (me.state.hash, me.record) == before
        outcomes = await swarm.iterate()
        assert {(o.status, len(o.present)) for o in outcomes.values()} == {("committed", 5)}

    run_virtual(play())


def test_a_roster_for_other_electors_cannot_be_read_and_is_counted_as_a_bad_question():
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        swarm.people["p0"].standing.enter()
        stranger = swarm.network.join("stranger")
        roster = replace(roster_by(swarm, "stranger", founding=False), members=(Member("p3", 3, 1.0),))
        parcel = question("seal", roster, (Elector("p1", 1), Elector("p2", 2), Elector("p3", 3)))
        assert await swarm.people["p1"].talk.ask("p0", "seal", parcel) is None
        assert await stranger.lookup("nothing") == {}
        assert swarm.people["p0"].net.refused == {"bad question": 2}  # it is asked twice

    run_virtual(play())


def test_a_rightful_roster_that_comes_again_when_the_iteration_is_over_is_refused_and_not_taken_for_a_forgery():
    seals: list[tuple[str, str, Parcel]] = []

    def note(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "call" and event.tag.channel == "seal":
            seals.append((event.source, event.dest, delivery.parcel))

    async def play() -> None:
        swarm = Swarm(5)
        swarm.network.intercept = note
        for _ in range(3):
            await swarm.iterate()
            for source, dest, parcel in seals[-4:]:  # of this iteration
                net = swarm.people[source].net
                answer = await net.call(dest, "seal", parcel, deadline=net.now() + 5)
                assert Ok.decode(answer.header).status == "refused"
        assert len(seals) == 3 * (4 + 4)
        assert [dict(me.net.refused) for me in swarm.people.values()] == [{}] * 5

    run_virtual(play())


@pytest.mark.parametrize("exchange", ["grid", "chunked", "full"])
def test_nothing_is_counted_where_everybody_is_honest_and_somebody_dies(exchange: str):
    async def play() -> None:
        swarm = Swarm(9, exchange=exchange)
        swarm.network.intercept = crash_on("reduce", "p4", 1)
        for _ in range(3):
            await swarm.iterate()
        assert [dict(me.net.refused) for me in swarm.people.values()] == [{}] * 9

    run_virtual(play())
