"""The rules of a decision: each in a table, with Lamport's name for it, and all of them in every order of events."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from marfl.errors import BrokenPromise, WireError
from marfl.protocol import ballot
from marfl.protocol.ballot import Acceptor, Against, Ballot, Choice, Reply, Sealed, Tally, Told, Value, Way
from marfl.protocol.instance import Accepted, Instance
from marfl.protocol.messages import Ack, Propose
from marfl.protocol.participant import genesis
from marfl.protocol.roster import VOID, DecisionId, Elector, Member, Roster
from marfl.state import Snapshot
from marfl.testing import exhaustive
from marfl.testing.exhaustive import QUICK, Bounds, SaidVote, search
from stages.forgery import an_ack
from stages.mutation import Edit, mutate

A, B = bytes(32), bytes([1]) * 32  # two hashes


def electors(count: int) -> list[Elector]:
    return [Elector(str(at), at) for at in range(count)]


# --- quorums (Lamport: majorities) and turns (ballot numbers) ---


@pytest.mark.parametrize(
    ("count", "voters", "enough"),
    [(0, "", False), (1, "0", True), (2, "1", False), (2, "0", True), (3, "12", True), (4, "12", False),
     (4, "01", True), (4, "123", True), (5, "01", False), (3, "0xy", False)],
)  # fmt: skip
def test_a_quorum_is_more_than_half_or_half_with_the_first_elector(count: int, voters: str, enough: bool) -> None:
    assert ballot.quorum(electors(count), set(voters)) is enough


def test_any_two_quorums_share_an_elector() -> None:
    for count in range(1, 7):
        everybody = electors(count)
        sets = [{str(at) for at in range(count) if bits >> at & 1} for bits in range(2**count)]
        quorums = [some for some in sets if ballot.quorum(everybody, some)]
        assert all(one & other for one in quorums for other in quorums)


@pytest.mark.parametrize(
    ("founder", "attempt", "leader"), [(None, 0, "0"), (None, 4, "1"), ("f", 0, "f"), ("f", 1, "1"), ("f", 3, "0")]
)
def test_an_attempt_has_one_leader_so_no_two_proposals_share_a_ballot_number(
    founder: str | None, attempt: int, leader: str
) -> None:
    assert ballot.leader_of(electors(3), founder, attempt) == leader
    assert ballot.leader_of((), None, attempt) is None


@pytest.mark.parametrize(
    ("founder", "rank", "highest", "attempt"),
    [(None, 0, -1, 0), (None, 2, -1, 2), (None, 0, 0, 3), (None, 1, 4, 7), ("f", 0, -1, 3), ("f", 1, -1, 1)],
)
def test_a_leader_proposes_the_next_ballot_number_of_its_own(
    founder: str | None, rank: int, highest: int, attempt: int
) -> None:
    assert ballot.next_attempt(electors(3), founder, rank, highest) == attempt
    assert ballot.leader_of(electors(3), founder, attempt) == str(rank)


# --- phase 1b: what an elector (acceptor) answers to a proposal (prepare) ---

OLD, NEW = b"o" * 32, b"n" * 32  # lineages
ME = Acceptor[SaidVote](4, A, OLD, tuple(electors(3)), None, Ballot(2), barred=False, under_way=None)
ASKED = Propose(4, 3, 2, OLD, A, False, 0, bytes(32))  # by the elector 0

PROPOSALS: dict[str, tuple[dict[str, Any], str, dict[str, Any], bool, Reply]] = {
    "the next attempt, by its leader": ({}, "0", {}, False, Reply.ACK),
    "the promised attempt again, by its leader": ({}, "2", {"attempt": 2}, False, Reply.ACK),
    "a lower ballot number than was promised": ({}, "1", {"attempt": 1}, False, Reply.REFUSED),
    "somebody else's ballot number": ({}, "1", {}, False, Reply.REFUSED),
    "another iteration": ({}, "0", {"iteration": 5}, False, Reply.REFUSED),
    "a far ballot number": ({}, "0", {"attempt": 3 * (ballot.FAR // 3)}, False, Reply.ACK),
    "one after which there may be none any more": ({}, "1", {"attempt": 2**64 - 3}, False, Reply.REFUSED),
    "one below the first": ({"ballot": Ballot(-1)}, "2", {"attempt": -1}, False, Reply.REFUSED),
    "another lineage": ({}, "0", {"lineage": NEW}, False, Reply.LEFT),
    "after a restart in this iteration": ({"barred": True}, "0", {}, False, Reply.BARRED),
    "an exchange is under way that its leader knew of": ({"under_way": 2}, "0", {}, False, Reply.ACK),
    "an exchange is under way that its leader did not know of": (
        {"under_way": 2}, "0", {"seen": 1}, False, Reply.REFUSED,
    ),
    "a founder that may be followed": ({}, "f", {"founding": True, "attempt": 0, "lineage": NEW}, True, Reply.ACK),
    "a founder that may not": ({}, "f", {"founding": True, "attempt": 0, "lineage": NEW}, False, Reply.REFUSED),
    "a founder, by one that is barred in the old lineage": (
        {"barred": True}, "f", {"founding": True, "attempt": 0, "lineage": NEW}, True, Reply.ACK,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROPOSALS)
def test_an_elector_acks_a_proposal_that_breaks_no_promise(name: str) -> None:
    state, sender, asked, follows, expected = PROPOSALS[name]
    before, proposal = replace(ME, **state), replace(ASKED, **asked)
    reply, after = ballot.on_propose(before, sender, proposal, follows=follows)
    assert reply is expected
    if reply is Reply.ACK:
        assert after.ballot.promised == proposal.attempt
        assert after.lineage == proposal.lineage
    else:
        assert after == before


def test_who_follows_a_founder_takes_no_promise_and_no_vote_with_it() -> None:
    bound = replace(ME, ballot=Ballot(2, SaidVote(1, 0, True)), under_way=2)
    after = ballot.founded(bound, NEW, "f")
    assert (after.ballot, after.electors, after.founder, after.under_way) == (Ballot(), (), "f", None)


@pytest.mark.parametrize(
    ("state", "sender", "alone", "quiet", "may"),
    [
        ({}, "f", True, False, True),  # nobody was heard of for long
        ({}, "f", False, True, False),  # a majority is there
        ({"founder": "g", "electors": (), "ballot": Ballot(0)}, "f", True, False, True),  # the lower name wins
        ({"founder": "e", "electors": (), "ballot": Ballot(0)}, "f", True, False, False),
        ({"founder": "g", "ballot": Ballot(0)}, "f", True, False, False),  # its roster is sealed
        ({"founder": "e", "ballot": Ballot(0)}, "f", True, True, True),  # but it has fallen silent
        ({"founder": "f", "lineage": NEW}, "f", False, False, True),  # asked again
        ({"founder": "g", "lineage": NEW}, "f", True, True, False),  # a lineage has one founder
    ],
)
def test_a_founder_is_followed_by_whoever_is_alone(
    state: dict[str, Any], sender: str, alone: bool, quiet: bool, may: bool
) -> None:
    """Paxos has a fixed set of acceptors; here a minority may go on as another lineage."""
    assert ballot.may_follow(replace(ME, **state), sender, NEW, alone=alone, quiet=quiet) is may


# --- phase 2b: what an elector does on a leader's accept request ---

ROSTER = Roster(
    "run", 4, 3, OLD, A, bytes(32), "grid", 3, (Member("0", 0, 1.0), Member("9", 9, 1.0)), (Elector("1", 1),), (), ()
)


@pytest.mark.parametrize(
    ("state", "sender", "roster", "digest", "may"),
    [
        ({}, "0", {}, B, True),
        ({}, "0", {}, None, True),  # a pledge
        ({"ballot": Ballot(4)}, "0", {}, B, False),  # a higher ballot number was promised
        ({}, "1", {}, B, False),  # not its leader
        ({"barred": True}, "0", {}, B, False),
        ({}, "0", {"lineage": NEW}, B, False),
        ({}, "0", {"base": B}, B, False),
        ({}, "0", {"iteration": 5}, B, False),
        ({}, "0", {"attempt": 4}, B, False),  # no leader could go by an ack that tells of it
        ({}, "0", {"attempt": 1}, B, True),
        ({"ballot": Ballot(3, SaidVote(3, 0, False))}, "0", {}, B, False),  # one vote in an attempt
        ({"ballot": Ballot(3, Told(3, Value(ROSTER.digest, A), False))}, "0", {}, A, True),
        ({"ballot": Ballot(3, Told(3, Value(B, A), False))}, "0", {}, A, False),  # the same hash of another roster
    ],
)
def test_an_elector_endorses_what_its_promises_allow(
    state: dict[str, Any], sender: str, roster: dict[str, Any], digest: bytes | None, may: bool
) -> None:
    assert ballot.on_endorse(replace(ME, **state), sender, replace(ROSTER, **roster), 3, digest) is may


@pytest.mark.parametrize(
    ("me", "sender", "seal", "may"),
    [
        ("0", "0", Sealed(3), True),
        ("9", "0", Sealed(3), True),  # a newcomer is a member without a vote
        ("1", "0", Sealed(3), False),  # it only votes: there is nothing for it to compute
        ("1", "0", Sealed(3, A), True),  # but it adopts a result
        ("8", "0", Sealed(3, A), False),  # neither
        ("0", "1", Sealed(3), False),
        ("0", "1", Sealed(1), False),  # below its promise
    ],
)
def test_a_sealed_attempt_is_begun_by_its_members_and_an_earlier_result_by_electors_too(
    me: str, sender: str, seal: Sealed, may: bool
) -> None:
    assert ballot.on_seal(ME, me, sender, ROSTER, seal) is may


def test_nothing_is_adopted_that_a_later_attempt_will_make() -> None:
    """Acks that tell of such a vote are bad: whoever cast it would be as good as silent from then on."""
    assert not ballot.on_seal(ME, "1", "0", replace(ROSTER, attempt=4), Sealed(3, A))


def test_whoever_acked_a_roster_may_be_asked_to_hold_its_result() -> None:
    roster = replace(ROSTER, witnesses=(Elector("8", 8),))  # a newcomer, which has no vote in this decision
    assert ballot.on_seal(ME, "8", "0", roster, Sealed(3, A))
    assert not ballot.on_seal(ME, "8", "0", roster, Sealed(3))


# --- phases 1b and 2b: what binds an elector ---


@pytest.mark.parametrize(("promised", "attempt", "may"), [(-1, 0, True), (2, 2, True), (2, 3, True), (2, 1, False)])
def test_an_elector_promises_no_attempt_below_one_that_it_has_promised(promised: int, attempt: int, may: bool) -> None:
    assert ballot.may_promise(Ballot(promised), attempt) is may
    if may:
        assert ballot.promise(Ballot(promised, SaidVote(0, 0, True)), attempt) == Ballot(attempt, SaidVote(0, 0, True))


@pytest.mark.parametrize(
    ("bound", "attempt", "digest", "may"),
    [
        (Ballot[SaidVote](2), 2, A, True),
        (Ballot[SaidVote](2), 3, A, True),  # a vote in an attempt that it never acked is a promise, too
        (Ballot[SaidVote](2), 1, A, False),  # phase 2b
        (Ballot(2, SaidVote(1, 0, True)), 2, B, True),  # a later attempt's leader knew better
        (Ballot(2, SaidVote(2, 0, True)), 2, A, True),  # asked twice
        (Ballot(2, SaidVote(2, 0, False)), 2, B, False),  # one vote in an attempt
    ],
)
def test_an_elector_votes_in_no_attempt_below_its_promise_and_once_in_each(
    bound: Ballot[SaidVote], attempt: int, digest: bytes, may: bool
) -> None:
    assert ballot.may_vote(bound, attempt, Value(b"", digest)) is may


def test_a_vote_is_not_forgotten_when_the_iteration_is_decided() -> None:
    before = genesis(Snapshot(0, {}, {}), tuple((elector.id, elector.index) for elector in electors(4)))
    instance = Instance.after("run", before, 0.0)
    instance.ballot = ballot.voted(Ballot(0), Accepted(0, ROSTER, A, Snapshot(1, {}, {}), None))
    instance.record = before.after(ROSTER, A)
    instance.end()
    instance.release()
    assert instance.accepted is not None
    assert not instance.accepted.holds, "its data is let go of"
    assert not ballot.may_vote(instance.ballot, 0, Value(B, A)), "nobody votes twice in one attempt"


def test_a_vote_binds_like_a_promise() -> None:
    assert ballot.voted(Ballot(1), SaidVote(3, 0, True)) == Ballot(3, SaidVote(3, 0, True))
    assert ballot.voted(Ballot(3), SaidVote(3, 0, True)).promised == 3


# --- phase 2a: what a leader must adopt ---

HELD, HEARD = True, False  # with the data, or only the hash

CHOICES: dict[str, tuple[int, dict[str, SaidVote | None], Choice]] = {
    "nobody has voted": (3, {"0": None, "1": None}, Choice(Way.FREE)),
    "somebody holds a result": (3, {"0": SaidVote(0, 0, HELD), "1": None}, Choice(Way.ADOPT, Value(b"", A), ("0",))),
    "a result may be committed, and nobody here has it": (3, {"0": SaidVote(0, 0, HEARD), "1": None}, Choice(Way.WAIT)),
    "a result cannot be committed, and nobody has it": (
        5, {"0": SaidVote(0, 0, HEARD), "1": None, "2": None, "3": None}, Choice(Way.FREE),
    ),
    "a result cannot be committed, and somebody has it": (
        5, {"0": SaidVote(0, 0, HELD), "1": None, "2": None, "3": None}, Choice(Way.ADOPT, Value(b"", A), ("0",)),
    ),
    "the newest vote counts": (
        3, {"0": SaidVote(0, 0, HELD), "1": SaidVote(1, 1, HELD)}, Choice(Way.ADOPT, Value(b"", B), ("1",)),
    ),
    "two hashes of one attempt may be committed": (
        3, {"0": SaidVote(0, 0, HELD), "1": SaidVote(0, 1, HELD)}, Choice(Way.WAIT),
    ),
    "of two hashes only one can be": (
        5, {"0": SaidVote(0, 0, HELD), "1": SaidVote(0, 1, HELD), "2": SaidVote(0, 1, HEARD)}, Choice(Way.WAIT),
    ),
    "of two hashes only one can be, and its holder is here": (
        5, {"0": SaidVote(0, 0, HELD), "1": SaidVote(0, 1, HELD), "2": SaidVote(0, 1, HEARD), "3": None},
        Choice(Way.ADOPT, Value(b"", B), ("1",)),
    ),
    # The commit of attempt 0 was adopted by attempt 1, where one elector endorsed it again; its holder is lost.
    "votes of all attempts make a commit": (
        5, {"0": SaidVote(1, 0, HEARD), "1": SaidVote(0, 0, HEARD), "2": None, "3": None}, Choice(Way.WAIT),
    ),
    "whoever held it earlier holds it still": (
        5, {"0": SaidVote(1, 0, HEARD), "1": SaidVote(0, 0, HELD), "2": None}, Choice(Way.ADOPT, Value(b"", A), ("1",)),
    ),
    "whoever is no elector has no vote": (3, {"0": None, "1": None, "9": SaidVote(2, 1, HELD)}, Choice(Way.FREE)),
    "but may hold what an elector voted for": (
        3, {"0": SaidVote(0, 0, HEARD), "1": None, "9": SaidVote(0, 0, HELD)}, Choice(Way.ADOPT, Value(b"", A), ("9",)),
    ),
    "a tie is decided by the first, who is silent": (
        4, {"1": SaidVote(0, 0, HEARD), "2": None, "3": None}, Choice(Way.WAIT),
    ),
    "a tie is decided by the first, who did not vote": (
        4, {"0": None, "1": SaidVote(0, 0, HEARD), "2": None}, Choice(Way.FREE),
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
    ("members", "witnesses", "liars", "may"),
    [("0", "", 1, False), ("0", "1234", 1, True), ("04", "123", 1, True), ("0", "123", 1, True), ("0", "12", 1, False),
     ("0", "12", 0, True), ("0", "xyz", 1, False)],
)  # fmt: skip
def test_a_roster_leaves_the_next_decision_to_a_quorum_of_the_electors(
    members: str, witnesses: str, liars: int, may: bool
) -> None:
    some = tuple(Member(peer, int(peer), 1.0) for peer in members)
    rest = tuple(Elector(peer, 9) for peer in witnesses)
    assert ballot.is_handed_on(electors(5), replace(ROSTER, members=some, witnesses=rest), liars) is may


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


# --- which acks (promises) count ---

HERE = DecisionId("run", 4, A, OLD)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({}, ""),
        ({"weight": 7.0}, "weight"),
        ({"join": True, "role": "witness"}, "role"),
        ({"attempt": 4}, "attempt"),
        ({"attempt": 2**64 - 1, "status": "refused"}, "attempt"),  # its leader would have no number to go on with
        ({"attempt": 4, "status": "refused"}, ""),  # it says what it has promised to others
        ({"accepted_hash": A}, "vote"),  # a vote without its roster
        ({"accepted": ROSTER.encoded, "accepted_hash": A, "accepted_attempt": 3}, ""),
        ({"accepted": ROSTER.encoded, "accepted_hash": A, "accepted_attempt": 2}, "vote"),  # before it was sealed
        ({"accepted": ROSTER.encoded, "accepted_hash": A, "accepted_attempt": 4}, "vote"),  # in the future
        ({"accepted": replace(ROSTER, base=B).encoded, "accepted_hash": A, "accepted_attempt": 3}, "vote"),
        ({"pledged": replace(ROSTER, lineage=NEW).encoded, "pledged_attempt": 3}, "vote"),
    ],
)
def test_an_ack_that_no_honest_elector_gives_is_refused(said: dict[str, Any], wrong: str) -> None:
    ack = replace(an_ack(attempt=3), **said)
    with pytest.raises(WireError, match=wrong) if wrong else nullcontext():
        ballot.check_ack(ack, 3, HERE, 2.0)


def test_the_last_vote_is_told_with_the_ack() -> None:
    told = an_ack(accepted=ROSTER.encoded, accepted_hash=B, accepted_attempt=2, holds=True)
    assert ballot.last_vote(told) == (2, (ROSTER.digest, B), True)
    assert ballot.last_vote(an_ack()) is None


# --- phase 2a: what a leader seals where it is free ---

BLANK = replace(ROSTER, members=(), witnesses=())


def sealed(acks: dict[str, Ack], *, founding: bool = False, **reasons: str) -> Roster | None:
    numbered = {peer: replace(ack, index=ord(peer)) for peer, ack in acks.items()}
    return ballot.new_roster(BLANK, numbered, Against("abcd", reasons, left="d"), founding=founding)


def named(roster: Roster | None) -> tuple[set[str], set[str], dict[str, str]]:
    assert roster is not None
    return set(roster.ids), {witness.id for witness in roster.witnesses}, dict(roster.omitted)


WITNESS = an_ack(join=False, role="witness", weight=0.0)
TRAINING = an_ack(join=False, role="training", weight=0.0)
IDLE = an_ack(weight=0.0)


@pytest.mark.parametrize(
    ("acks", "reasons", "members", "witnesses", "omitted"),
    [
        ({"a": an_ack(), "b": an_ack()}, {}, "ab", "", {"c": "did not answer", "d": "said goodbye"}),
        ({"a": an_ack(), "b": WITNESS, "c": IDLE}, {}, "ac", "b", {"b": "brings no update", "d": "said goodbye"}),
        (
            {"a": an_ack(), "b": an_ack(), "c": an_ack(), "d": an_ack()}, {"b": "late"}, "acd", "b", {"b": "late"},
        ),
        (
            {"a": an_ack(), "b": an_ack(layout=B), "c": an_ack(wire="fixed"), "d": an_ack()}, {}, "ad", "bc",
            {"b": "brings another model layout", "c": "sends values in another way (wire)"},
        ),
    ],
)  # fmt: skip
def test_a_roster_has_those_who_acked_and_bring_something_and_names_all_others(
    acks: dict[str, Ack], reasons: dict[str, str], members: str, witnesses: str, omitted: dict[str, str]
) -> None:
    roster = sealed(acks, **reasons)
    assert named(roster) == (set(members), set(witnesses), omitted)
    assert roster is not None
    assert (roster.exchange, roster.electors) == ("grid", ())


def test_an_iteration_goes_by_where_nobody_brings_anything_and_nobody_still_trains() -> None:
    gone = sealed({"a": IDLE, "b": WITNESS})
    assert named(gone)[0] == {"a", "b"}
    assert gone is not None
    assert (gone.exchange, gone.wire, gone.weight) == (VOID, "fp32", 0.0)
    assert sealed({"a": IDLE, "b": TRAINING}) is None, "it may still bring something"
    assert sealed({"a": an_ack(role="behind", join=False, weight=0.0)}) is None, "nobody holds the state"
    assert sealed({"a": IDLE, "b": TRAINING}, b="late") is not None


def test_a_founding_roster_names_its_electors() -> None:
    roster = sealed({"a": an_ack(), "b": WITNESS}, founding=True)
    assert roster is not None
    assert {elector.id for elector in roster.electors} == {"a", "b"}


def test_whoever_wants_a_larger_sum_than_there_is_only_votes_and_so_on_until_all_agree() -> None:
    acks = {"a": an_ack(), "b": an_ack(fewest=3), "c": an_ack(fewest=2)}
    assert ballot.willing(sealed(acks) or BLANK, acks).ids == (sealed(acks) or BLANK).ids
    acks["b"] = an_ack(fewest=4)
    assert set(ballot.willing(sealed(acks) or BLANK, acks).ids) == {"a", "c"}
    acks["c"] = an_ack(fewest=3)
    small = ballot.willing(sealed(acks) or BLANK, acks)
    assert named(small)[:2] == ({"a"}, {"b", "c"})
    assert named(small)[2]["c"] == ballot.TOO_SMALL
    void = ballot.abandoned(small)
    assert (void.exchange, void.weight, set(void.ids)) == (VOID, 0.0, {"a"})


# --- every order of events ---


LONGEST = {Bounds(4, bring=2, tie=tie) for tie in (True, False)}  # of four electors, those that fetch are always tried


@pytest.mark.parametrize(
    "bounds", [pytest.param(each, marks=[pytest.mark.slow] * (each in LONGEST)) for each in QUICK], ids=str
)
def test_no_order_of_events_commits_twice(bounds: Bounds) -> None:
    found = search(bounds)
    assert found.trace == ()
    assert found.commits > 0


LYING = Bounds(4, liars=1, full=True)

MUTANTS: dict[str, tuple[list[Edit], Bounds]] = {
    "only votes of the newest attempt count": (
        [Edit(ballot.choose, "if vote.value == value}", "if vote.value == value and vote.attempt == newest}")],
        Bounds(4, bring=2),
    ),
    "an earlier result is not adopted": ([Edit(ballot.choose, "if not votes:", "if True:")], Bounds(3, bring=2)),
    "the oldest vote counts": ([Edit(ballot.choose, "newest = max(", "newest = min(")], Bounds(3, bring=2)),
    "who is silent has not voted": ([Edit(ballot._may_be_committed, "*silent, ", "")], Bounds(3, bring=2)),
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
        [Edit(ballot.decided, "digest if quorum(electors, voters, liars) else None", "digest")],
        Bounds(3, bring=2),
    ),
    "any half is a majority": (
        [Edit(ballot.quorum, "2 * votes + (electors[0].id in voters) > len(electors)", "2 * votes >= len(electors)")],
        Bounds(4, bring=2),
    ),
    "a quorum is no larger where some lie": ([Edit(ballot.quorum, "if borne:", "if False:")], LYING),
    "only the newest attempt counts where some lie": (
        [Edit(ballot.choose, "if borne or vote.attempt == newest", "if vote.attempt == newest")],
        LYING,
    ),
    "what a leader shows is not looked at": (
        [Edit(ballot.justified, "choice.way is (Way.FREE if adopt is None else Way.ADOPT)", "True"),
         Edit(ballot.justified, "and choice.value == adopt", "")],
        LYING,
    ),
    "a leader need not show a quorum": (
        [Edit(ballot.justified, "not quorum(electors, acks, liars)", "False")], LYING,
    ),
    "nobody who says otherwise lies": (
        [Edit(ballot._may_be_committed, ", *others[:bearable(len(electors), liars)]", "")], LYING,
    ),
    "the word of a liar is enough to adopt": (
        [Edit(ballot.choose, "len(backers[likely]) > borne", "backers[likely]")], LYING,
    ),
    "one vote for a hash, but of two rosters": (
        [Edit(ballot.may_vote, "last.value == value", "last.hash == value.hash")], replace(LYING, twins=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_search_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, bounds = MUTANTS[name]
    mutate(edits, monkeypatch)
    assert search(bounds).trace


def endings(bounds: Bounds) -> tuple[set[Any], int]:
    """Everybody's last votes and what is committed, in every state that can be; and how many states there are."""
    exhaustive.forget()
    seen = {state for _, state in exhaustive._starts(bounds)}
    waiting, found = list(seen), set()
    while waiting:
        state = waiting.pop()
        votes = sorted((person.elector, person.brings, person.vote) for person in state.people)
        found.add((tuple(votes), frozenset(exhaustive._commits(state))))
        new = {after for _, after in exhaustive._events(bounds, state)} - seen
        seen |= new
        waiting += new
    return found, len(seen)


@pytest.mark.parametrize("bounds", QUICK[:4], ids=str)
def test_a_sorted_search_reaches_the_same_votes_and_commits_by_fewer_states(bounds: Bounds) -> None:
    every, states = endings(bounds)
    found, fewer = endings(replace(bounds, sorted=True))
    assert found == every
    assert 3 * fewer < states


@pytest.mark.parametrize("name", [name for name, (_, bounds) in MUTANTS.items() if not bounds.liars])
def test_the_sorted_search_finds_the_mutant_too_or_refuses_to_sort(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, bounds = MUTANTS[name]
    mutate(edits, monkeypatch)
    if name.endswith("below a promise"):
        with pytest.raises(BrokenPromise, match="cannot be sorted"):
            search(replace(bounds, sorted=True))
    else:
        assert search(replace(bounds, sorted=True)).trace
