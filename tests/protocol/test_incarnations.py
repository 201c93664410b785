"""Which process speaks in a peer's name, and whose vote does not count for it."""

from __future__ import annotations

import pytest

from marfl.net.virtual_clock import run_virtual
from marfl.protocol.ballot import Reply
from marfl.protocol.incarnations import BITS, SECOND, Heard, Incarnations, incarnation_of, objection
from marfl.protocol.messages import Propose
from stages.virtual import Swarm

NOW, BEFORE = b"now", b"before"
BACKUP = "is a restored backup, or another process uses its key (incarnation {} after {})"
TWINS = "two processes use its key"
AGAIN = "has voted in this iteration under another incarnation"


def of(starts: int, bits: int = 7) -> int:
    return incarnation_of(starts, lambda _: bits)


@pytest.mark.parametrize(
    ("incarnation", "heard", "why"),
    [
        (of(3), None, ""),
        (of(3), Heard(of(3)), ""),
        (of(3), Heard(of(3), of(3), BEFORE), ""),
        (of(3), Heard(of(3), of(3), NOW), ""),  # a lost answer: it was asked again
        (of(4), Heard(of(3)), ""),
        (of(4), Heard(of(3), of(3), BEFORE), ""),  # a restart between two iterations
        (of(9), Heard(of(3), of(3), BEFORE), ""),  # and several, while nobody listened
        (of(4), Heard(of(3), of(3), NOW), AGAIN),  # a restart with its log would be barred
        (of(4), Heard(of(4), of(3), NOW), AGAIN),  # also when it had said that it is there
        (of(4), Heard(of(6)), BACKUP.format(4, 6)),
        (of(4), Heard(of(6), of(6), NOW), BACKUP.format(4, 6)),
        (of(4, 8), Heard(of(6), of(4, 8), NOW), BACKUP.format(4, 6)),  # its own vote, but the later one has spoken
        (of(3, 8), Heard(of(3)), TWINS),
        (of(3, 8), Heard(of(3), of(3), BEFORE), TWINS),
        (of(0, 8), Heard(of(0)), TWINS),  # without a counter, too: nobody draws twice for one key
        (of(4, 0), Heard(of(3, 2**BITS - 1)), ""),  # the bits are below the counter
    ],
)
def test_what_an_incarnation_means(incarnation: int, heard: Heard | None, why: str):
    assert objection(incarnation, heard, NOW) == why


def test_a_vote_that_does_not_count_changes_nothing_and_an_old_word_neither():
    known = Incarnations()
    assert known.vote("p", of(3), BEFORE) == ""
    known.note("p", of(2))  # an old record in the DHT
    known.note("p", of(3, 9))
    assert known.vote("p", of(3, 9), NOW) == TWINS
    assert known.vote("p", of(3), NOW) == ""
    assert known.vote("p", of(4), NOW) == AGAIN
    assert known.vote("p", of(3), NOW) == "", "who is refused takes nobody's place"
    known.note("p", of(4))
    assert known.vote("p", of(4), NOW) == AGAIN
    assert known.vote("p", of(4), b"the next one") == ""
    assert known.vote("p", of(3), b"the next one") == BACKUP.format(3, 4)


def test_strangers_do_not_fill_the_memory_and_whoever_is_heard_stays_in_it():
    known = Incarnations(most=4)
    assert known.vote("p", of(3), BEFORE) == ""
    for stranger in range(100):
        known.note(f"s{stranger}", of(1))
        known.note("p", of(3))
    assert len(known._heard) == 4
    assert known.vote("p", of(2), NOW) == BACKUP.format(2, 3)


def test_who_voted_before_a_restart_never_votes_in_that_decision_again() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        me, leader = swarm.people["p2"], swarm.people["p1"]
        standing, record = me.standing, me.record
        standing.barred = record.iteration + 1
        former = standing.former = standing.enter()  # taken over, but not for sure: its votes stand
        attempt = former.next_attempt(former.rank(leader.net.me) or 0)
        asked = Propose(
            record.iteration + 1, attempt, -1, record.lineage, record.hash, False, 0, me.terms.digest
        )
        standing.barred = -1  # of the iteration after it
        assert me.voting._vote_elsewhere(leader.net.me, asked).status == Reply.BARRED.value

    run_virtual(play())


@pytest.mark.parametrize(
    ("first", "then", "why"), [(of(3), of(2), BACKUP.format(2, 3)), (of(3), of(3, 8), TWINS)], ids=["backup", "twin"]
)
def test_another_process_with_a_voters_key_is_named_left_out_and_counted(first: int, then: int, why: str):
    async def play() -> None:
        swarm = Swarm(5)
        swarm.people["p2"].standing.incarnation = first
        for _ in range(6):  # until everybody has led, and heard it
            await swarm.iterate()
        swarm.people["p2"].standing.incarnation = then
        outcomes = await swarm.iterate()
        others = [name for name in swarm.names if name != "p2"]
        assert {outcomes[name].status for name in others} == {"committed"}
        assert {outcomes[name].missing.get("p2") for name in others} == {why}
        assert sum(swarm.people[name].net.refused[SECOND] for name in others) > 0
        assert len(swarm.hashes(others)) == 1

    run_virtual(play())


def test_an_honest_restart_between_two_iterations_is_nothing_to_speak_of():
    async def play() -> None:
        swarm = Swarm(5)
        for starts in range(1, 5):
            swarm.people["p2"].standing.incarnation = of(starts, 99 - starts)
            outcomes = await swarm.iterate()
            assert not any(outcome.missing for outcome in outcomes.values())

    run_virtual(play())


def test_a_twin_that_leads_gets_no_votes():
    async def play() -> None:
        swarm = Swarm(3)
        me = swarm.people["p0"]
        me.standing.incarnation = of(3)
        await swarm.iterate()
        await swarm.iterate()
        me.standing.incarnation = of(2)
        instance = me.standing.enter()
        rank = instance.rank("p0")
        assert rank is not None
        for name in ("p1", "p2"):
            swarm.people[name].standing.incarnations.note("p0", of(3))
            swarm.people[name].standing.enter()
        await me.leader.lead(instance, instance.next_attempt(rank))
        assert not instance.over.is_set()
        assert [swarm.people[name].instance.promised for name in ("p1", "p2")] == [-1, -1]
        assert [swarm.people[name].net.refused[SECOND] for name in ("p1", "p2")] == [1, 1]

    run_virtual(play())
