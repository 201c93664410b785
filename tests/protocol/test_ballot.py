"""The rules of a decision: each in a table, with Lamport's name for it, and all of them in every order of events."""

from __future__ import annotations

import pytest

from marfl.protocol import ballot, roster
from marfl.protocol.ballot import Ballot, Choice, Tally, Way
from marfl.protocol.roster import Elector
from marfl.testing.exhaustive import QUICK, Bounds, Vote, search
from stages.mutation import Edit, mutate

A, B = bytes(32), bytes([1]) * 32  # two hashes


def electors(count: int) -> list[Elector]:
    return [Elector(str(at), at) for at in range(count)]


# --- phase 1b and 2b: what an elector may do ---


@pytest.mark.parametrize(("promised", "attempt", "may"), [(-1, 0, True), (2, 2, True), (2, 3, True), (2, 1, False)])
def test_an_elector_promises_no_attempt_below_one_that_it_has_promised(promised: int, attempt: int, may: bool) -> None:
    assert ballot.may_promise(Ballot(promised), attempt) is may
    if may:
        assert ballot.promise(Ballot(promised, Vote(0, 0, True)), attempt) == Ballot(attempt, Vote(0, 0, True))


@pytest.mark.parametrize(
    ("bound", "attempt", "digest", "may"),
    [
        (Ballot[Vote](2), 2, A, True),
        (Ballot[Vote](2), 3, A, True),  # a vote in an attempt that it never acked is a promise, too
        (Ballot[Vote](2), 1, A, False),  # phase 2b
        (Ballot(2, Vote(1, 0, True)), 2, B, True),  # a later attempt's leader knew better
        (Ballot(2, Vote(2, 0, True)), 2, A, True),  # asked twice
        (Ballot(2, Vote(2, 0, False)), 2, B, False),  # one vote in an attempt
    ],
)
def test_an_elector_votes_in_no_attempt_below_its_promise_and_once_in_each(
    bound: Ballot[Vote], attempt: int, digest: bytes, may: bool
) -> None:
    assert ballot.may_vote(bound, attempt, digest) is may


def test_a_vote_binds_like_a_promise() -> None:
    assert ballot.voted(Ballot(1), Vote(3, 0, True)) == Ballot(3, Vote(3, 0, True))
    assert ballot.voted(Ballot(3), Vote(3, 0, True)).promised == 3


# --- phase 2a: what a leader must adopt ---

HELD, HEARD = True, False  # with the data, or only the hash

CHOICES: dict[str, tuple[int, dict[str, Vote | None], Choice]] = {
    "nobody has voted": (3, {"0": None, "1": None}, Choice(Way.FREE)),
    "somebody holds a result": (3, {"0": Vote(0, 0, HELD), "1": None}, Choice(Way.ADOPT, A, ("0",))),
    "a result may be committed, and nobody here has it": (3, {"0": Vote(0, 0, HEARD), "1": None}, Choice(Way.WAIT)),
    "a result cannot be committed, and nobody has it": (
        5, {"0": Vote(0, 0, HEARD), "1": None, "2": None, "3": None}, Choice(Way.FREE),
    ),
    "a result cannot be committed, and somebody has it": (
        5, {"0": Vote(0, 0, HELD), "1": None, "2": None, "3": None}, Choice(Way.ADOPT, A, ("0",)),
    ),
    "the newest vote counts": (
        3, {"0": Vote(0, 0, HELD), "1": Vote(1, 1, HELD)}, Choice(Way.ADOPT, B, ("1",)),
    ),
    "two hashes of one attempt may be committed": (
        3, {"0": Vote(0, 0, HELD), "1": Vote(0, 1, HELD)}, Choice(Way.WAIT),
    ),
    "of two hashes only one can be": (
        5, {"0": Vote(0, 0, HELD), "1": Vote(0, 1, HELD), "2": Vote(0, 1, HEARD)}, Choice(Way.WAIT),
    ),
    "of two hashes only one can be, and its holder is here": (
        5, {"0": Vote(0, 0, HELD), "1": Vote(0, 1, HELD), "2": Vote(0, 1, HEARD), "3": None},
        Choice(Way.ADOPT, B, ("1",)),
    ),
    # The commit of attempt 0 was adopted by attempt 1, where one elector endorsed it again; its holder is lost.
    "votes of all attempts make a commit": (
        5, {"0": Vote(1, 0, HEARD), "1": Vote(0, 0, HEARD), "2": None, "3": None}, Choice(Way.WAIT),
    ),
    "whoever held it earlier holds it still": (
        5, {"0": Vote(1, 0, HEARD), "1": Vote(0, 0, HELD), "2": None}, Choice(Way.ADOPT, A, ("1",)),
    ),
    "whoever is no elector has no vote": (3, {"0": None, "1": None, "9": Vote(2, 1, HELD)}, Choice(Way.FREE)),
    "but may hold what an elector voted for": (
        3, {"0": Vote(0, 0, HEARD), "1": None, "9": Vote(0, 0, HELD)}, Choice(Way.ADOPT, A, ("9",)),
    ),
    "a tie is decided by the first, who is silent": (
        4, {"1": Vote(0, 0, HEARD), "2": None, "3": None}, Choice(Way.WAIT),
    ),
    "a tie is decided by the first, who did not vote": (
        4, {"0": None, "1": Vote(0, 0, HEARD), "2": None}, Choice(Way.FREE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_a_leader_adopts_what_may_be_committed(name: str) -> None:
    count, acks, choice = CHOICES[name]
    assert ballot.choose(electors(count), acks) == choice


# --- what is decided ---


@pytest.mark.parametrize(
    ("finished", "endorsed", "again", "held", "decided"),
    [
        ({"0": A, "1": A}, {}, False, A, None),  # a majority of the roster, not of the electors
        ({"0": A, "1": A}, {"3": A}, False, A, A),
        ({"0": A, "1": A}, {"3": B}, False, A, None),
        ({"0": A, "1": B}, {"2": A, "3": A, "4": A}, False, None, None),  # no majority of the roster
        ({"0": A, "1": None, "2": A}, {"3": A}, False, A, A),
        ({"0": A, "3": A, "4": A}, {}, False, None, None),  # of the electors, but not of the roster
        ({"0": A, "3": A, "4": A}, {}, True, A, A),  # as is enough for what is adopted
    ],
)
def test_a_result_is_decided_when_it_is_held_and_voted_for(
    finished: dict[str, bytes | None],
    endorsed: dict[str, bytes],
    again: bool,
    held: bytes | None,
    decided: bytes | None,
) -> None:
    everybody = electors(5)
    tally = Tally(finished, endorsed)
    assert ballot.held(everybody, everybody[:3], tally, again=again) == held
    assert ballot.decided(everybody, everybody[:3], tally, again=again) == decided


@pytest.mark.parametrize(
    ("voters", "holders", "enough"),
    [
        (1, "0", True),  # alone
        (2, "0", True),  # half, with the first
        (2, "1", False),
        (3, "1", False),  # whoever is left when it dies is a majority, and would have nothing
        (3, "12", True),
        (5, "01", False),
        (5, "012", True),
        (40, "45", False),
        (40, "456", True),  # no majority, but three copies
    ],
)
def test_a_result_is_committed_once_a_majority_of_its_voters_or_three_hold_it(
    voters: int, holders: str, enough: bool
) -> None:
    assert ballot.kept(electors(voters), set(holders)) is enough


# --- every order of events ---


@pytest.mark.parametrize("bounds", QUICK, ids=str)
def test_no_order_of_events_commits_twice(bounds: Bounds) -> None:
    found = search(bounds)
    assert found.trace == ()
    assert found.commits > 0


MUTANTS: dict[str, tuple[list[Edit], Bounds]] = {
    "only votes of the newest attempt count": (
        [Edit(ballot.choose, "if vote.hash == h}", "if vote.hash == h and vote.attempt == newest}")],
        Bounds(4, bring=2),
    ),
    "an earlier result is not adopted": ([Edit(ballot.choose, "if not votes:", "if True:")], Bounds(3, bring=2)),
    "the oldest vote counts": ([Edit(ballot.choose, "newest = max(", "newest = min(")], Bounds(3, bring=2)),
    "who is silent has not voted": ([Edit(ballot.choose, "backers[h] | silent", "backers[h]")], Bounds(3, bring=2)),
    "nobody waits for data that is not here": (
        [Edit(ballot.choose, "Choice(Way.WAIT if possible else Way.FREE)", "Choice(Way.FREE)")],
        Bounds(3, bring=2),
    ),
    "one of two possible hashes is taken": (
        [Edit(ballot.choose, "if len(possible) > 1:", "if False:")],
        Bounds(3, bring=3, wrong=True),
    ),
    "a vote below a promise": ([Edit(ballot.may_vote, "attempt >= ballot.promised", "True")], Bounds(3, bring=2)),
    "a promise below a promise": (
        [
            Edit(ballot.may_promise, "attempt >= ballot.promised", "True"),
            Edit(ballot.promise, "max(ballot.promised, attempt)", "attempt"),
        ],
        Bounds(3, bring=2),
    ),
    "two votes in one attempt": ([Edit(ballot.may_vote, "once and", "")], Bounds(3, bring=2, wrong=True)),
    "a commit without a majority of the electors": (
        [Edit(ballot.decided, "digest if quorum(electors, voters) else None", "digest")],
        Bounds(3, bring=2),
    ),
    "any half is a majority": (
        [Edit(roster.quorum, "2 * votes + (electors[0].id in voters) > len(electors)", "2 * votes >= len(electors)")],
        Bounds(4, bring=2),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, bounds = MUTANTS[name]
    mutate(edits, monkeypatch)
    assert search(bounds).trace
