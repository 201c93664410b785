"""Acks of a peer that lies in them: the run goes on without it, at once, and what it said is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from marfl.errors import InputError, WireError
from marfl.net.base import Parcel
from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.ballot import ACCUSES_MANY, BAD_ACK, FAR, Ballot, check_ack, in_reach, next_attempt
from marfl.protocol.exchange import Contribution
from marfl.protocol.messages import Ack
from marfl.protocol.roster import DecisionId, Member
from marfl.state import Snapshot
from stages.forgery import forged
from stages.virtual import LENGTH, Swarm, crash_on

LIAR = "p2"


def lying(change: Callable[[Ack], dict[str, Any]]) -> Callable[[VirtualNetwork, Departure, Delivery], None]:
    """The liar's acks are changed on their way."""

    def intercept(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "answer" and event.tag.channel == "propose" and event.source == LIAR:
            ack = Ack.decode(delivery.parcel.header)
            delivery.parcel = Parcel(forged(ack, **change(ack)), delivery.parcel.payload)

    return intercept


LIES: dict[str, Callable[[Ack], dict[str, Any]]] = {
    "a negative index": lambda _: {"index": -1},
    "an index beyond all bounds": lambda _: {"index": 2**60},
    "a negative weight": lambda _: {"weight": -1.0},
    "a weight beyond the run's": lambda _: {"weight": 1e30},
    "another attempt": lambda ack: {"attempt": ack.attempt + 1},
    "no roster": lambda _: {"accepted": b"garbage", "accepted_hash": bytes(32), "accepted_attempt": 0},
    "a hash without a roster": lambda _: {"accepted_hash": bytes(32)},
    "a pledge that is none": lambda _: {"pledged": b"", "pledged_attempt": 0},
    "names that are none": lambda _: {"unsent": [1, 2]},
    "complaints that are none": lambda _: {"blamed": ["everybody"]},
    "an unknown role": lambda _: {"role": "king"},
    "a negative number of contributions": lambda _: {"fewest": -1},
}


@pytest.mark.parametrize("name", LIES)
def test_an_ack_out_of_bounds_is_as_good_as_none_and_costs_no_time(name: str) -> None:
    async def play() -> None:
        swarm = Swarm(5)
        swarm.network.intercept = lying(LIES[name])
        honest = [other for other in swarm.names if other != LIAR]
        begun = swarm.network.time
        tasks = {n: swarm.network.spawn(n, swarm.people[n].run_iteration(swarm.mine(n))) for n in swarm.names}
        for other in honest:
            outcome = await tasks[other]
            assert outcome.status == "committed"
            if LIAR not in outcome.present:  # it leads now and then, and its own ack does not travel
                assert outcome.missing[LIAR] == "did not answer"
        assert swarm.network.time - begun < 2 * swarm.settings.call_timeout
        tasks[LIAR].cancel()
        refused = sum(swarm.people[other].net.refused[BAD_ACK] for other in honest)
        assert refused > 0

    run_virtual(play())


def test_who_blames_everybody_is_left_out_alone() -> None:
    async def play() -> None:
        swarm = Swarm(6)
        others = [name for name in swarm.names if name != LIAR]
        everybody = [[name, "a chunk with NaN or infinity", True] for name in others]
        crash, lie = crash_on("reduce", "p5"), lying(lambda _: {"blamed": everybody})

        def both(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            crash(network, event, delivery)  # so that there is a second attempt, before which blame is asked for
            lie(network, event, delivery)

        swarm.network.intercept = both
        outcomes = await swarm.iterate()
        outcome = outcomes["p0"]
        assert outcome.status == "committed"
        assert set(outcome.present) >= {"p0", "p1", "p3", "p4"}
        assert outcome.missing[LIAR] == ACCUSES_MANY

    run_virtual(play())


def test_a_weight_beyond_the_runs_is_refused_where_it_is_made() -> None:
    async def play() -> None:
        swarm = Swarm(2, max_weight=10.0)
        heavy = Contribution(swarm.record.hash, torch.zeros(LENGTH), 11.0)
        with pytest.raises(InputError, match=r"weight: 11\.0 must be a number from 0 to 10, .* max_weight"):
            await swarm.people["p0"].run_iteration(heavy)

    run_virtual(play())


def test_a_few_refusals_of_a_liar_lift_no_leader_out_of_the_others_reach() -> None:
    """Who has heard of none of these attempts still takes part in the last one."""

    async def scene() -> int:
        swarm, attempt = Swarm(4), 0
        instance = swarm.people["p0"].standing.enter()
        refusal = swarm.people[LIAR].voting.ack("refused", instance)
        for _ in range(32):
            lies = [replace(refusal, attempt=attempt + lift) for lift in (FAR, FAR // 2, FAR // 64, 0)]
            heard = next(lie for lie in lies if _is_heard(lie, attempt, instance.decision))
            attempt = next_attempt(instance.electors, None, 0, heard.attempt)
        return attempt

    assert in_reach(Ballot(), run_virtual(scene()))


def _is_heard(ack: Ack, attempt: int, decision: DecisionId) -> bool:
    try:
        check_ack(ack, attempt, decision, 1.0)
    except WireError:
        return False
    return True


def test_every_ack_of_an_honest_peer_passes() -> None:
    async def play() -> None:
        swarm = Swarm(1)
        me = swarm.people["p0"]
        instance = me.standing.enter()
        for status in ("ack", "refused", "behind", "stale", "left", "barred"):
            check_ack(Ack.decode(me.voting.ack(status, instance).encoded), -1, instance.decision, 1e6)
        with pytest.raises(WireError, match="attempt"):
            check_ack(me.voting.ack("ack", instance), 3, instance.decision, 1e6)

    run_virtual(play())


def test_a_newcomer_that_claims_a_finished_result_does_not_have_it_adopted() -> None:
    """It names a roster and a state of its own making: only electors' votes are adopted."""

    async def play() -> None:
        swarm = Swarm(3)
        await swarm.iterate()
        stranger = swarm.join("stranger", 9)
        assert await stranger.catch_up()
        me = swarm.people["p0"]
        roster = me.record.roster
        assert roster is not None
        false = Snapshot(2, {"theta": torch.full((LENGTH,), 7.0)}, {})
        invented = replace(
            roster, iteration=2, attempt=0, base=me.record.hash, members=(Member("stranger", 9, 1.0),), witnesses=()
        )

        def lie(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.op == "answer" and event.tag.channel == "propose" and event.source == "stranger":
                ack = Ack.decode(delivery.parcel.header)
                said = {"accepted": invented.encoded, "accepted_hash": false.hash, "accepted_attempt": 0, "holds": True}
                delivery.parcel = Parcel(replace(ack, **said).encoded, delivery.parcel.payload)

        swarm.network.intercept = lie
        swarm.people["stranger"] = stranger
        outcomes = await swarm.iterate()
        assert {outcomes[name].status for name in ("p0", "p1", "p2")} == {"committed"}
        assert set(outcomes["p0"].present) == {"p0", "p1", "p2", "stranger"}
        assert false.hash not in swarm.hashes()

    run_virtual(play())
