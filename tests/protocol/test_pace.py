"""A phase has time for its bytes on the slowest link; whoever shows no sign of life is given up as fast as ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.net.virtual import Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.grid import plan
from marfl.plan.schedule import EXCHANGES, schedule
from marfl.protocol.pace import BYTES_PER_MBIT, pace_for, vectors_in_phase
from marfl.protocol.participant import Outcome
from stages.virtual import Swarm, crash_on

SLOW = 8_000  # bytes a second of a slow link's way up; down it is ten times as fast
LENGTH = 20_000  # values: 80 kB, ten seconds of such a link, where a phase usually has four
MBIT = SLOW / BYTES_PER_MBIT
PIECE = 2048


# --- the rule ---


@given(usual=st.floats(0.1, 100), mbit=st.floats(0.01, 1e4), load=st.integers(0, 10**10))
def test_a_phase_has_the_usual_time_or_half_of_it_and_that_of_its_bytes(usual: float, mbit: float, load: int) -> None:
    pace = pace_for(usual, mbit, load)
    needed = load / (mbit * BYTES_PER_MBIT)
    assert pace.phase == pytest.approx(max(usual, usual / 2 + needed))
    assert (pace.extra == 0) == (needed <= usual / 2)


def test_without_a_slowest_link_a_phase_takes_what_it_always_took() -> None:
    assert pace_for(4.0, float("inf"), 10**12).phase == 4.0


@given(peers=st.integers(2, 60), group_size=st.integers(2, 9), length=st.integers(1, 500))
def test_no_exchange_has_a_phase_in_which_a_peer_carries_more_than_it_is_given_time_for(
    peers: int, group_size: int, length: int
) -> None:
    layout = plan(peers, group_size)
    for exchange in EXCHANGES:
        most = vectors_in_phase(exchange, peers, group_size) * length
        for phase in schedule(layout, exchange, length):
            sent, received = Counter[int](), Counter[int]()
            for each in phase:
                sent[each.source] += each.stop - each.start
                received[each.dest] += each.stop - each.start
            assert max(max(sent.values()), max(received.values())) <= most + group_size, exchange  # slices are rounded


# --- slow links ---


def slow_swarm(n: int = 5, link: float = SLOW, mbit: float = MBIT, **others: Any) -> Swarm:
    """Peers with a large model on slow links that stand for each other as real ones do, and know how slow they are."""
    network = VirtualNetwork(0, Link(up=link, down=10 * link, latency=0.01))
    return Swarm(n, length=LENGTH, network=network, piece=PIECE, slowest_link=mbit, **others)


@pytest.mark.parametrize("exchange", ["grid", "chunked", "full"])
def test_what_a_slow_link_carries_in_its_own_time_is_committed_at_once_and_sent_once(exchange: str) -> None:
    swarm = slow_swarm(exchange=exchange)
    outcomes = swarm.play()
    assert {(o.status, o.attempt, len(o.present), o.slow) for o in outcomes.values()} == {("committed", 0, 5, ())}
    assert len(swarm.hashes()) == 1
    asked, sent = (sum(getattr(o.sent, kind) for o in outcomes.values()) for kind in ("repair", "payload"))
    assert asked <= 0.02 * sent, "hardly anybody asks for what is on its way"


def test_the_same_links_without_that_time_commit_nothing_at_first_and_say_which_setting_to_change() -> None:
    outcomes = slow_swarm(mbit=float("inf"), iteration_timeout=40.0).play()
    assert not [o for o in outcomes.values() if o.status == "committed" and o.attempt == 0]
    said = [line for o in outcomes.values() for line in o.slow]
    assert said
    assert all("slowest_link" in line and "phase_timeout (now 4 s)" in line and "int8" in line for line in said)
    assert all(any(name in line for name in ("p0", "p1", "p2", "p3", "p4")) for line in said)


def test_a_link_that_is_slower_than_said_is_named_and_the_others_go_on_without_it() -> None:
    swarm = slow_swarm(link=100 * SLOW)

    async def scene() -> dict[str, Outcome]:
        swarm.network.relink("p3", Link(up=SLOW / 5, down=100 * SLOW, latency=0.01))
        return await swarm.iterate()

    outcomes = run_virtual(scene())
    rest = [outcomes[name] for name in swarm.names if name != "p3"]
    assert all(o.status == "committed" and "p3" in o.missing for o in rest)
    assert any("what p3 sends was still on its way" in line for o in rest for line in o.slow)


def test_an_iteration_and_a_majority_are_not_given_up_while_a_slow_exchange_goes_on() -> None:
    swarm = slow_swarm(iteration_timeout=6.0, minority_timeout=6.0)
    outcomes = swarm.play()
    assert {(o.status, o.attempt, len(o.present)) for o in outcomes.values()} == {("committed", 0, 5)}
    assert min(o.seconds for o in outcomes.values()) > 12.0


def test_whoever_was_away_is_given_a_whole_state_in_the_time_that_it_takes() -> None:
    async def scene() -> None:
        swarm = slow_swarm(wire="fp32")
        await swarm.iterate(skip=("p4",))
        before = swarm.network.time
        assert await swarm.people["p4"].catch_up()
        assert swarm.network.time - before > 7.0, "the usual time for it is over"
        assert len(swarm.hashes()) == 1

    run_virtual(scene())


@pytest.mark.parametrize("wire", ["masked", "fixed"])
def test_wider_values_are_given_their_time_too_and_masks_come_off(wire: str) -> None:
    outcomes = slow_swarm(wire=wire).play()
    assert {(o.status, o.attempt, len(o.present)) for o in outcomes.values()} == {("committed", 0, 5)}


# --- hung and dead peers, with phases that may take minutes ---


def seconds_without(
    struck: str, how: Callable[[Swarm], None], mbit: float, exchange: str = "grid", wire: str = "fp32"
) -> float:
    """How long the others take to commit without a peer to which something happens, on links that are fast."""
    swarm = slow_swarm(link=1e6, mbit=mbit, exchange=exchange, wire=wire)

    async def scene() -> list[Outcome]:
        how(swarm)
        work = {n: swarm.network.spawn(n, swarm.people[n].run_iteration(swarm.mine(n))) for n in swarm.names}
        del work[struck]  # nobody waits for what it makes of it
        return await asyncio.gather(*work.values())

    outcomes = run_virtual(scene())
    assert all(o.status == "committed" and struck in o.missing for o in outcomes)
    return max(o.seconds for o in outcomes)


def hang_on_its_first_slice(name: str, after: int = 1) -> Callable[[Swarm], None]:
    """Its process stops for good in the midst of what it sends."""

    def how(swarm: Swarm) -> None:
        seen = Counter[str]()

        def strike(network: VirtualNetwork, event: Any, _: Any) -> None:
            seen[event.source] += event.op == "send" and event.tag.channel == "reduce"
            if event.source == name and seen[name] == after:
                network.hang(name, 1e5)

        swarm.network.intercept = strike

    return how


@pytest.mark.parametrize(
    ("struck", "after", "exchange", "wire"),
    [
        ("p1", 1, "grid", "fp32"),  # the leader
        ("p4", 1, "grid", "fp32"),
        ("p4", 7, "grid", "fp32"),
        ("p4", 7, "chunked", "fp32"),
        ("p4", 7, "grid", "masked"),
    ],
)
def test_a_hung_peer_costs_about_as_much_where_phases_may_be_very_long(
    struck: str, after: int, exchange: str, wire: str
) -> None:
    hangs = hang_on_its_first_slice(struck, after)
    usual = seconds_without(struck, hangs, float("inf"), exchange, wire)
    patient = seconds_without(struck, hangs, MBIT / 50, exchange, wire)  # a phase may take 500 s
    assert patient <= usual + 10.0, "no more than a few usual phases of 4 s"


def test_a_dead_peer_is_noticed_at_once_where_phases_may_be_very_long() -> None:
    def dies(swarm: Swarm) -> None:
        swarm.network.intercept = crash_on("reduce", "p2", 3)

    usual, patient = (seconds_without("p2", dies, mbit) for mbit in (float("inf"), MBIT / 50))
    assert patient == pytest.approx(usual, abs=1.0)


# --- what is said of an attempt that was lost ---


@pytest.mark.parametrize("mbit", [float("inf"), MBIT / 50])
@pytest.mark.parametrize("wire", ["fp32", "fixed"])
def test_a_lost_attempt_says_in_which_phase_it_was_and_who_was_silent(mbit: float, wire: str) -> None:
    swarm = slow_swarm(link=1e6, mbit=mbit, wire=wire)

    async def scene() -> list[Outcome]:
        hang_on_its_first_slice("p4")(swarm)
        work = {n: swarm.network.spawn(n, swarm.people[n].run_iteration(swarm.mine(n))) for n in swarm.names}
        return await asyncio.gather(*(work[name] for name in swarm.names if name != "p4"))

    outcomes = run_virtual(scene())
    assert all(o.status == "committed" and o.attempt > 0 for o in outcomes)
    assert all(any(line.startswith("attempt 0 was lost: ") for line in (*o.lost, *o.slow)) for o in outcomes)
    waited = [line for o in outcomes for line in o.lost if "no slice of p4 from anybody" in line]
    assert any("in phase 0 (reduce, round 0), waiting for p4 (never heard of)" in line for line in waited)
    assert any("in phase 1 (reduce, round 1), waiting for p4 (silent for " in line for line in waited)
    led = [line for o in outcomes for line in o.lost if line.startswith("attempt 0, which this peer led, was lost: ")]
    assert len(led) == 1
    assert "no word of p4" in led[0]


def test_where_nothing_is_lost_nothing_is_said_of_it() -> None:
    assert [(o.lost, o.slow) for o in slow_swarm().play().values()] == [((), ())] * 5
