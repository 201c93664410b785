"""Audited sums: whoever lies in a sum is caught and left out, and nobody else ever is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from marfl.errors import WireError
from marfl.net.base import NOT_ENTITLED, Parcel
from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.peer.state_dir import VoteLog
from marfl.peer.voter import keep_votes
from marfl.plan.grid import plan
from marfl.plan.schedule import schedule
from marfl.protocol.attempt import BAD_DATA, Attempt
from marfl.protocol.audit import BAD_PROOF, not_shown
from marfl.protocol.ballot import ACCUSES_ALONE, ACCUSES_MANY
from marfl.protocol.fraud import (
    CONTRADICTION,
    FORGED,
    WRONG_SUM,
    Proof,
    ShownCells,
    check_fraud,
    contradicts,
    examined,
    ranges_of,
)
from marfl.protocol.messages import Audit, Audited, Complaint, Fraud, Recall, Sync
from marfl.protocol.participant import Outcome, Participant
from marfl.protocol.protocol_settings import EXCHANGES, Settings
from marfl.protocol.roster import Member, Roster
from marfl.protocol.signed_slices import (
    SPOT_CHECKS,
    UNANSWERED,
    UNSIGNED,
    AuditBook,
    AuditPart,
    Signed,
    Slot,
    Witnessed,
    auditors,
    cells_of,
    claimed,
    parts_of,
    signed_slot,
    slice_hash,
    stage_of,
)
from marfl.protocol.statements import Cast, statement
from stages.forgery import an_ack
from stages.virtual import LENGTH, Swarm

PAUSE = 1.0  # seconds in which peers train, and audits happen
Change = Callable[[Attempt], None]  # what a liar does to its own exchange


class Court(Swarm):
    """A swarm whose sums are audited; liars change their own exchanges."""

    def __init__(self, n: int = 8, liars: dict[str, Change] | None = None, bear: int = 0, **settings: Any) -> None:
        # Where votes bear a liar, replicas that differ commit nothing: here they do, and the audit must find it.
        asked = {"run": "test", "group_size": 2, "audit": 1.0, "exchange": "grid", "liars": bear} | settings
        asked.setdefault("fallbacks", (asked["exchange"],))
        length = asked.pop("length", LENGTH)
        super().__init__(n, length=length, network=VirtualNetwork(0, Link(latency=0.01)), settings=Settings(**asked))
        for name, change in (liars or {}).items():
            self.corrupt(self.people[name], change)

    def corrupt(self, person: Participant, change: Change) -> None:
        begin = person.audits.begin

        def lying(attempt: Attempt) -> None:
            begin(attempt)
            change(attempt)

        person.audits.begin = lying  # type: ignore[method-assign]

    def hold_court(self, iterations: int = 2) -> list[dict[str, Outcome]]:
        """So many iterations, with time for audits after each; all outcomes."""

        async def all_of_them() -> list[dict[str, Outcome]]:
            found = []
            for _ in range(iterations):
                found.append(await self.iterate())
                await asyncio.sleep(PAUSE)
            return found

        return run_virtual(all_of_them())

    def honest(self, *liars: str) -> list[Participant]:
        return [person for name, person in self.people.items() if name not in liars and self.network.alive(name)]


def adds_to_its_sum(round: int, at: int = 0) -> Change:
    """Adds 1,000 to one value of what it has summed in a round."""

    def change(attempt: Attempt) -> None:
        honest = attempt.sum_in_order

        async def lying(*work: Any) -> Tensor:
            total = await honest(*work)
            if work[1] == round and total.numel():
                total[at] += 1000
            return total

        attempt.sum_in_order = lying  # type: ignore[method-assign]

    return change


def uses_another_input(round: int) -> Change:
    """Adds up something else than the part of its vector that it said it keeps."""

    def change(attempt: Attempt) -> None:
        honest = attempt.sum_in_order

        async def lying(phase: int, at: int, sources: Any, own: Tensor, room: Tensor, start: int) -> Tensor:
            return await honest(phase, at, sources, own + 1000 if at == round else own, room, start)

        attempt.sum_in_order = lying  # type: ignore[method-assign]

    return change


def passes_on_something_else(round: int) -> Change:
    """Changes what the owners of its group gave it, before it sends that on."""

    def change(attempt: Attempt) -> None:
        honest = attempt.gather

        async def lying(phase: int, at: int, wants: Any, room: Tensor, inputs: Any = ()) -> None:
            wants = list(wants)
            await honest(phase, at, wants, room, inputs)
            if at == round:
                room[wants[0].start] += 1000

        attempt.gather = lying  # type: ignore[method-assign]

    return change


def assert_caught(court: Court, liar: str, outcomes: list[dict[str, Outcome]], kind: str = WRONG_SUM) -> None:
    """Everybody else leaves it out from the next iteration on, and says why; they go on together."""
    why = f"was caught lying: {kind} in iteration 1"
    for person in court.honest(liar):
        assert person.standing.banned == {liar: why}
        assert outcomes[1][person.net.me].missing == {liar: why}
        assert outcomes[1][person.net.me].tainted == (1,)
    assert len(court.hashes([person.net.me for person in court.honest(liar)])) == 1


CASES = [
    (exchange, wire, round)
    for exchange in EXCHANGES
    for wire in ("fp32", "fixed", "masked")
    for round in range(2 if exchange == "full" else 3)  # what `full` sums last goes to nobody
]


@pytest.mark.parametrize(("exchange", "wire", "round"), CASES)
def test_an_owner_that_adds_to_its_sum_is_named_by_everybody_and_left_out(exchange: str, wire: str, round: int):
    court = Court(8, {"p1": adds_to_its_sum(round)}, exchange=exchange, wire=wire)
    outcomes = court.hold_court()
    assert {outcome.status for outcome in outcomes[0].values()} == {"committed"}  # the lie is in the model
    assert_caught(court, "p1", outcomes)


@pytest.mark.parametrize("round", [0, 1, 2])
@pytest.mark.parametrize("exchange", ["grid", "chunked"])
def test_an_owner_that_lies_at_the_end_of_its_part_is_caught(exchange: str, round: int):
    """In one of two cases that is what it keeps itself, and sends to nobody."""
    court = Court(8, {"p1": adds_to_its_sum(round, at=-1)}, exchange=exchange)
    assert_caught(court, "p1", court.hold_court())


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_owner_that_adds_up_another_input_than_it_said_is_caught(exchange: str):
    court = Court(8, {"p2": uses_another_input(1)}, exchange=exchange)
    assert_caught(court, "p2", court.hold_court())


def sends_something_else(round: int, only: int | None = None) -> Change:
    """Changes what it sends in a round, to all or to one of its group, and signs that."""

    def change(attempt: Attempt) -> None:
        honest, book = attempt._outgoing, attempt.book
        assert book is not None

        def lying(rank: int, tag: Any, value: Tensor) -> Any:
            if not (tag.channel == "reduce" and tag.round == round and only in (None, rank)):
                return honest(rank, tag, value)
            start, whole = book._mine[round]
            before, book._signed = book._signed, {}  # one claim would do for all
            slot = signed_slot(book.roster, book.length, "reduce", round, (book.rank, rank))
            assert slot is not None
            changed = whole.clone()
            changed[slot.start - start : slot.stop - start] += 1000
            book._mine[round] = start, changed
            try:
                return honest(rank, tag, value + 1000)
            finally:
                book._mine[round], book._signed = (start, whole), before

        attempt._outgoing = lying  # type: ignore[method-assign]

    return change


def test_whoever_sends_on_something_else_than_it_was_given_is_caught():
    court = Court(8, {"p3": sends_something_else(2)}, exchange="chunked")
    assert_caught(court, "p3", court.hold_court())


def test_whoever_shows_other_inputs_than_it_was_given_is_caught():
    court = Court(8, {"p3": passes_on_something_else(1)}, exchange="chunked")
    assert_caught(court, "p3", court.hold_court(), FORGED)


def test_whoever_shows_its_receivers_different_things_contradicts_itself():
    """Both slices are signed, and an auditor sees both."""

    def two_faced(attempt: Attempt) -> None:
        seat = attempt.plan.seats(attempt.rank)[1]
        assert seat is not None
        sends_something_else(1, next(rank for rank in seat.core if rank != attempt.rank))(attempt)

    court = Court(9, {"p4": two_faced}, exchange="full", group_size=3)
    court.hold_court()
    kinds = {person.standing.banned.get("p4", "") for person in court.honest("p4")}
    assert kinds == {f"was caught lying: {CONTRADICTION} in iteration 1"}


@pytest.mark.parametrize("wire", ["fp32", "fixed", "masked"])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("peers", "group_size"), [(4, 5), (7, 2), (10, 3)])
def test_the_honest_are_never_accused_and_end_on_the_bits_of_an_unaudited_run(
    exchange: str, wire: str, peers: int, group_size: int
):
    audited = Court(peers, exchange=exchange, wire=wire, group_size=group_size)
    plain = Court(peers, exchange=exchange, wire=wire, group_size=group_size, audit=0.0)
    outcomes = audited.hold_court()
    plain.hold_court()
    assert audited.hashes() == plain.hashes()
    assert len(audited.hashes()) == 1
    for person in audited.honest():
        assert person.standing.banned == {}
        assert not person.net.refused
        assert outcomes[1][person.net.me].missing == {}
    assert any(p.net.sent.repair for p in audited.honest()) == bool(parts_of(peers, group_size, exchange))
    assert not any(person.net.sent.repair for person in plain.honest())


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_nobody_is_blamed_for_slices_that_are_so_short_that_they_are_not_sent(exchange: str, length: int):
    court = Court(6, exchange=exchange, group_size=3, length=length)
    outcomes = court.hold_court()
    assert outcomes[1]["p0"].missing == {}
    assert not any(person.net.refused for person in court.honest())


def test_slices_in_many_pieces_are_signed_as_one():
    court = Court(8, {"p1": adds_to_its_sum(0)}, piece=40)
    assert_caught(court, "p1", court.hold_court())
    assert not Court(8, piece=40).hold_court()[1]["p0"].missing


# --- what arrives ---


def test_a_slice_with_a_bad_signature_is_bad_data_and_its_sender_is_named():
    court = Court(8, {"p5": signs_nothing}, fallbacks=("full",))
    outcomes = court.hold_court(1)
    assert sum(person.net.refused[BAD_DATA] for person in court.honest("p5")) > 0
    assert "p5" in outcomes[0]["p0"].missing
    assert "signature" in outcomes[0]["p0"].missing["p5"]
    assert not court.people["p0"].standing.banned  # nothing is proven


def test_a_slice_without_a_signature_is_bad_data():
    def careless(attempt: Attempt) -> None:
        assert attempt.book is not None
        attempt.book.prove = lambda *_: b""  # type: ignore[method-assign]

    court = Court(8, {"p5": careless}, fallbacks=("full",))
    assert "not signed" in court.hold_court(1)[0]["p0"].missing["p5"]


def unchecked(court: Court) -> None:
    """Nobody's dice have it verify a claim as it comes."""

    def trusting(attempt: Attempt) -> None:
        if attempt.book is not None:
            attempt.book._is_checked = lambda *_: False  # type: ignore[method-assign]

    for person in court.people.values():
        court.corrupt(person, trusting)


def signs_nothing(attempt: Attempt, since: int = 0) -> None:
    """Of what it sends, after so many rounds."""
    if attempt.book is not None:  # it may be alone
        honest = attempt.book._claim

        def claim(slot: Slot, *given: Any) -> tuple[list[bytes], bytes]:
            hashes, signature = honest(slot, *given)
            return hashes, bytes(64) if slot.done >= since else signature

        attempt.book._claim = claim  # type: ignore[method-assign]


def test_who_signs_nothing_and_is_not_found_out_at_once_is_named_by_those_who_are_audited():
    court = Court(8, {"p5": signs_nothing})
    unchecked(court)
    outcomes = court.hold_court()
    assert outcomes[0]["p0"].missing == {}
    assert outcomes[1]["p0"].missing == {"p5": UNSIGNED}  # by several: none of them sits out with it
    assert not any(person.standing.banned for person in court.honest())


def test_an_owner_that_signs_nothing_of_its_wrong_sum_is_named_by_those_who_hold_it():
    def liar(attempt: Attempt) -> None:
        adds_to_its_sum(2)(attempt)
        signs_nothing(attempt, since=3)

    court = Court(8, {"p5": liar})
    unchecked(court)
    assert UNSIGNED in court.hold_court()[1]["p0"].missing.get("p5", "")


@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_the_dice_that_choose_which_claims_are_verified_are_everybodys_own(rate: float):
    roster = a_roster(9, group_size=3)
    books = [AuditBook(roster, 0, 60, sign[name], verify, rate) for name in ("p0", "p1")]
    chosen = [{key for key in range(4000) if book._is_checked("reduce", (0, key))} for book in books]
    assert chosen[0] != chosen[1]
    for each in chosen:
        assert abs(len(each) / 4000 - max(rate, 1 / SPOT_CHECKS)) < 0.03


@pytest.mark.parametrize("exchange", ["grid", "chunked"])  # in `full` a sender that was overtaken may never sign
def test_the_claim_of_a_slice_that_was_lost_is_asked_for(exchange: str):
    court = Court(8, exchange=exchange)
    lost: list[Departure] = []

    def lose(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "send" and event.tag.channel == "reduce" and not lost:
            lost.append(event)
            delivery.copies = 0

    court.network.intercept = lose
    outcomes = court.hold_court()
    assert lost
    assert outcomes[0]["p0"].attempt == 0
    assert outcomes[1]["p0"].missing == {}  # its owner could show all inputs


def test_nobody_is_blamed_for_what_somebody_who_is_gone_did_not_sign():
    """Its slice was given by itself again, without a claim, and then it dies."""
    court = Court(8)
    lost: list[Departure] = []

    def lose(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "send" and event.tag.channel == "reduce" and not lost:
            lost.append(event)
            delivery.copies = 0
        if lost and event.op == "call" and event.tag.channel == "recall" and event.dest == lost[0].source:
            network.crash(event.dest)

    court.network.intercept = lose
    outcomes = court.hold_court()
    assert not court.network.alive(lost[0].source)
    asked = next(each for name, each in outcomes[1].items() if court.network.alive(name))
    assert asked.missing.keys() == {lost[0].source}


def test_whoever_blames_somebody_that_is_there_is_not_excused():
    court = Court(8)

    async def shifts_the_blame(*_: Any) -> Parcel:
        return Audited("gone", b"", msgpack.packb([0, 1, 2]), b"").parcel()

    court.people["p6"].net.serve("audit", shifts_the_blame)
    assert UNANSWERED in court.hold_court()[1]["p0"].missing.get("p6", "")


# --- who audits ---


def a_roster(peers: int, exchange: str = "grid", group_size: int = 5, **others: Any) -> Roster:
    members = tuple(Member(f"p{index}", index, 1.0) for index in range(peers))
    blank = Roster("test", 1, 0, bytes(32), b"b" * 32, b"l" * 32, exchange, group_size, members, (), (), ())
    return replace(blank, **others)


def test_the_committed_hash_decides_who_audits_what_and_nobody_audits_itself():
    roster = a_roster(125)
    everything = auditors(b"h" * 32, roster, 1.0)
    assert tuple(everything) == parts_of(125, 5, "grid")
    assert len(everything) == 3 * 125
    assert all(roster.members[part.rank].id != who for part, who in everything.items())
    assert everything != auditors(b"i" * 32, roster, 1.0)
    assert everything != auditors(b"h" * 32, replace(roster, attempt=1), 1.0)
    assert auditors(b"h" * 32, roster, 0.0) == {}


def test_the_share_of_audited_parts_is_the_setting():
    found = sum(len(auditors(bytes([number]) * 32, a_roster(125), 0.1)) for number in range(40))
    assert 0.09 < found / (40 * 375) < 0.11


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_audits_of_one_part_in_a_hundred_cost_less_than_two_percent_of_the_payload(exchange: str):
    roster, length = a_roster(125, exchange), 12_500
    payload = sum(slice.stop - slice.start for phase in schedule(plan(125, 5), exchange, length) for slice in phase)
    stages = [stage_of(roster, length, part) for part in parts_of(125, 5, exchange)]
    shown = sum(stop - start for stage in stages if stage for _, start, stop in stage.sources)
    assert 0.01 * shown < 0.02 * payload


@pytest.mark.slow
def test_signatures_cost_at_most_2800_bytes_of_a_peer_at_125_peers_in_groups_of_5():
    control = {}
    for rate in (0.0, 1e-12):  # all is signed, and nothing audited
        court = Court(125, group_size=5, audit=rate)
        run_virtual(court.iterate())
        control[rate] = sum(person.net.sent.control for person in court.honest()) / 125
    assert 0 < control[1e-12] - control[0.0] <= 2800


# --- who may ask ---


def test_strangers_and_members_who_audit_something_else_are_refused_and_counted():
    court = Court(8)

    async def scene() -> None:
        await court.iterate()
        record = court.people["p0"].record
        roster = record.roster
        assert roster is not None
        named = auditors(record.hash, roster, 1.0)
        part = next(part for part in named if roster.members[part.rank].id == "p0")
        busy = {who for other, who in named.items() if other.rank == part.rank}
        wrong, holder = sorted(court.people.keys() - busy - {"p0"})[:2]
        for net in (court.network.join("somebody"), court.people[wrong].net):
            asked = {"p0": Audit(roster.digest, *part), holder: Recall(roster.digest, part.rank, 0)}
            for to, question in asked.items():
                before = court.people[to].net.refused[NOT_ENTITLED]
                answer = await net.call(to, question.name(), question.parcel(), deadline=net.now() + 5)
                assert not answer.payload
                assert b"shown" not in answer.header
                assert court.people[to].net.refused[NOT_ENTITLED] == before + 1

    run_virtual(scene())


def test_inputs_are_given_once_and_kept_for_nobody_after_that():
    court = Court(8)

    async def scene() -> None:
        await court.iterate()
        await asyncio.sleep(PAUSE)
        record = court.people["p0"].record
        assert record.roster is not None
        for part, who in auditors(record.hash, record.roster, 1.0).items():
            owner = court.people[record.roster.members[part.rank].id]
            assert owner.audits.book is not None
            assert not owner.audits.book._values
            net = court.people[who].net
            answer = await net.call(
                owner.net.me, "audit", Audit(record.roster.digest, *part).parcel(), deadline=net.now() + 5
            )
            assert Audited.decode(answer.header).status == "unknown"
            assert not answer.payload

    run_virtual(scene())


def test_an_audit_that_is_not_asked_for_is_not_kept_either():
    court = Court(8, audit=1e-12)
    court.hold_court(1)
    for person in court.honest():
        assert person.audits.book is not None
        assert not person.audits.book._values
        assert not person.audits.book._mine


# --- who does not answer ---


def silent(person: Participant) -> None:
    async def nothing(*_: Any) -> Parcel:
        raise WireError("not today")

    person.net.serve("audit", nothing)


def test_an_owner_that_shows_nothing_is_not_proven_a_liar_but_sits_out_once():
    court = Court(8)
    silent(court.people["p6"])
    outcomes = court.hold_court(3)
    assert all(not person.standing.banned for person in court.honest())
    assert UNANSWERED in outcomes[1]["p0"].missing["p6"]
    assert {outcome.status for outcome in outcomes[2].values()} == {"committed"}


def test_an_owner_that_dies_after_the_commit_is_no_liar_and_takes_nobody_with_it():
    court = Court(8)

    async def scene() -> dict[str, Outcome]:
        await court.iterate()
        court.network.crash("p6")
        await asyncio.sleep(3 * PAUSE)
        return await court.iterate()

    outcomes = run_virtual(scene())
    assert all(not person.standing.banned for person in court.honest())
    assert outcomes["p0"].missing == {"p6": "did not answer"}


def ack(*accused: str) -> Any:
    return replace(an_ack(), blamed=tuple(Complaint(peer, UNANSWERED, False) for peer in accused))


def unsigned(*accused: str) -> Any:
    return replace(an_ack(), blamed=tuple(Complaint(peer, UNSIGNED, False) for peer in accused))


@pytest.mark.parametrize(
    ("acks", "out"),
    [
        ({"a": ack("b"), "b": ack(), "c": ack()}, {"a": ACCUSES_ALONE, "b": f"{UNANSWERED}, says a"}),
        ({"a": ack("b"), "b": ack(), "c": ack("b")}, {"b": UNANSWERED}),
        ({"a": ack("b", "c"), "b": ack(), "c": ack()}, {"a": ACCUSES_MANY}),
        ({"a": ack("d"), "b": ack(), "c": ack("d")}, {}),  # it is not there: churn
        ({"a": ack("a"), "b": ack()}, {}),
        ({"a": ack("b"), "b": unsigned("c"), "c": ack()}, {"b": ACCUSES_ALONE, "c": f"{UNSIGNED}, says b"}),
        ({"a": unsigned("c"), "b": unsigned("c"), "c": unsigned("a")}, {"c": UNSIGNED}),
        ({"a": replace(ack(), blamed=(Complaint("b", "late", False),)), "b": ack()}, {}),
    ],
)
def test_one_auditors_word_alone_costs_it_as_much_as_the_accused(acks: dict[str, Any], out: dict[str, str]):
    assert not_shown(acks) == out


# --- proofs ---


class Evidence(NamedTuple):
    """What an auditor was shown of one part."""

    culprit: str
    said: Signed
    roster: Roster
    values: list[Tensor]
    seen: list[Witnessed]

    def proof(self) -> Proof | None:
        return examined(*self, verify)


NETWORK = VirtualNetwork(0)
verify = NETWORK.join("the court").verify
sign = {name: NETWORK.join(name).sign for name in (f"p{index}" for index in range(10))}


def evidence(
    roster: Roster, part: AuditPart, *, length: int = 60, spoil: Callable[[Tensor], Tensor] | None = None, seed: int = 0
) -> Evidence:
    """One part of an exchange as its members sign it, without a network; `spoil` is what its owner does to its sum."""
    generator = torch.Generator().manual_seed(seed)
    stage = stage_of(roster, length, part)
    assert stage is not None
    books = {rank: AuditBook(roster, rank, length, sign[m.id], verify, 1.0) for rank, m in enumerate(roster.members)}
    owner, values = books[part.rank], []
    for rank, start, stop in stage.sources:
        whole = torch.randn(length, generator=generator)
        books[rank].note(stage.level, 0, whole)
        values.append(whole[start:stop])
        if rank != part.rank:
            proof = books[rank].prove("reduce", part.round, part.rank, values[-1])
            owner.take("reduce", part.round, rank, stop, values[-1], proof)
    seen = [_claims(owner, rank, stage.level) for rank in stage.peers]
    total = values[0]
    for value in values[1:]:
        total = total + value
    if stage.done == len(plan(len(roster.members), roster.group_size).rounds):
        total = total / roster.weight
    total = spoil(total) if spoil else total
    owner.note(stage.done, stage.own[0], total)
    channel = "gather" if stage.outputs == (stage.own,) and roster.exchange != "full" else "reduce"
    round = part.round if channel == "gather" else part.round + 1
    for holder in stage.holders:
        slot = signed_slot(roster, length, channel, round, (part.rank, holder))
        assert slot is not None
        value = total[slot.start - stage.own[0] : slot.stop - stage.own[0]]
        books[holder].take(channel, round, part.rank, slot.stop, value, owner.prove(channel, round, holder, value))
        found = books[holder].witnessed(part.rank, stage.done)
        assert found is not None
        seen.append(found)
    answer = owner.answer(part)
    assert answer is not None
    return Evidence(roster.members[part.rank].id, answer.said, roster, answer.values, [each for each in seen if each])


def _claims(owner: AuditBook, rank: int, done: int) -> Witnessed | None:
    """What the owner claimed to a rank of its own input."""
    value = owner._mine[done][1]
    slot = signed_slot(owner.roster, owner.length, "reduce", done, (owner.rank, rank))
    if slot is None or owner.roster.exchange == "full":
        return None
    proof = owner.prove("reduce", done, rank, value[slot.start : slot.stop])
    cells = cells_of(slot.start, value[slot.start : slot.stop])
    return Witnessed(claimed(owner.roster, owner.length, slot, slice_hash(cells), proof), cells)


def add_one(value: Tensor) -> Tensor:
    changed = value.clone()
    changed[len(changed) // 2] += 1
    return changed


ROSTERS = st.builds(
    lambda peers, group_size, exchange, attempt: a_roster(peers, exchange, group_size, attempt=attempt),
    st.integers(4, 10), st.integers(2, 3), st.sampled_from(["grid", "chunked"]), st.integers(0, 2),
)  # fmt: skip
WHOLE = a_roster(9, group_size=3)


def parts(roster: Roster) -> list[AuditPart]:
    found = parts_of(len(roster.members), roster.group_size, roster.exchange)
    return [part for part in found if not part.passing and stage_of(roster, 60, part)]


@settings(max_examples=40, deadline=None)
@given(ROSTERS, st.data())
def test_a_wrong_sum_is_proven_to_everybody_and_a_right_one_to_nobody(roster: Roster, data: st.DataObject):
    part = data.draw(st.sampled_from(parts(roster)))
    assert evidence(roster, part).proof() is None
    proof = evidence(roster, part, spoil=add_one).proof()
    assert proof is not None
    assert proof.kind == WRONG_SUM
    assert check_fraud(Proof.decode(proof.encoded), verify) == roster.members[part.rank].id


@settings(max_examples=60, deadline=None)
@given(ROSTERS, st.data())
def test_no_mixture_of_what_an_honest_owner_signed_proves_anything(roster: Roster, data: st.DataObject):
    """Words and claims of other rosters, values of others, fewer of them, in another order: `WireError`."""
    part = data.draw(st.sampled_from(parts(roster)))
    mine = evidence(roster, part)
    other_roster = replace(roster, attempt=roster.attempt + 1)
    other = evidence(other_roster, part, seed=1)
    lie = evidence(roster, part, spoil=add_one)  # the shape of a proof that would do
    made = lie.proof()
    assert made is not None
    said = [mine.said, other.said, *(each.signed for each in (*mine.seen, *other.seen))]
    chosen = data.draw(st.lists(st.sampled_from(said), min_size=1, max_size=3))
    kind = data.draw(st.sampled_from([WRONG_SUM, CONTRADICTION, FORGED, "a lie"]))
    named = data.draw(st.sampled_from([roster, other_roster]))
    forged = replace(
        made, kind=kind, said=tuple(chosen), roster=named.encoded,
        inputs=data.draw(st.sampled_from([made.inputs, made.inputs[:-1], made.inputs[::-1], ()])),
        output=data.draw(st.sampled_from([made.output, b""])),
    )  # fmt: skip
    with pytest.raises(WireError):
        check_fraud(forged, verify)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_proof_proves_the_same_or_nothing(data: st.DataObject):
    proof = evidence(WHOLE, AuditPart(1, 0), spoil=add_one).proof()
    assert proof is not None
    raw = bytearray(proof.encoded)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert check_fraud(Proof.decode(bytes(raw[: data.draw(st.integers(0, len(raw)))])), verify) == proof.culprit
    except WireError:
        return


def test_a_sender_that_signs_two_slices_cannot_make_an_honest_owner_a_liar():
    """The auditor and a sender collude: they show another slice, just as well signed, than the owner was sent."""
    mine, lie = evidence(WHOLE, AuditPart(1, 0)), evidence(WHOLE, AuditPart(1, 0), spoil=add_one).proof()
    assert lie is not None
    others = [number for number, value in enumerate(mine.values) if not torch.equal(value, own_input(mine))]
    twisted = [value + 1 if number == others[0] else value for number, value in enumerate(mine.values)]
    with pytest.raises(WireError, match="other inputs"):
        examined(mine.culprit, mine.said, WHOLE, twisted, mine.seen, verify)
    output = next(each.signed for each in mine.seen if each.signed.parts[2] == 1)
    changed = [replace_data(shown) if number == others[0] else shown for number, shown in enumerate(lie.inputs)]
    with pytest.raises(WireError, match="values of another input"):
        check_fraud(replace(lie, said=(mine.said, output), inputs=tuple(changed), output=b""), verify)


def own_input(mine: Evidence) -> Tensor:
    stage = stage_of(WHOLE, 60, AuditPart(1, 0))
    assert stage is not None
    return mine.values[[rank for rank, *_ in stage.sources].index(1)]


def replace_data(shown: ShownCells) -> ShownCells:
    return shown._replace(data=bytes(len(shown.data)))


def test_a_right_sum_is_no_proof_however_it_is_shown():
    mine, lie = evidence(WHOLE, AuditPart(1, 0)), evidence(WHOLE, AuditPart(1, 0), spoil=add_one).proof()
    assert lie is not None
    output = next(each for each in mine.seen if each.signed.parts[2] == 1)
    where = next((a, b) for a, b, digest in ranges_of(output.signed) if digest == slice_hash(output.cells))
    for cells in (output.cells, b""):
        with pytest.raises(WireError, match="a sum that is right"):
            check_fraud(replace(lie, said=(mine.said, output.signed), where=where, output=cells), verify)


def test_nobody_else_can_sign_an_owners_word():
    mine = evidence(WHOLE, AuditPart(1, 0))
    for name in ("p0", "p2"):
        word = mine.said._replace(signature=sign[name](mine.said.statement))
        with pytest.raises(WireError, match="not signed"):
            examined(mine.culprit, word, WHOLE, mine.values, mine.seen, verify)
        with pytest.raises(WireError, match="not its culprit's"):
            check_fraud(Proof(FORGED, mine.culprit, (word,), WHOLE.encoded), verify)


def test_an_owner_that_makes_up_an_input_is_proven_a_liar():
    mine = evidence(WHOLE, AuditPart(1, 0))
    roster, length, round, passing, start, stop, own, hashes, _ = mine.said.parts
    packed = msgpack.packb([bytes(128)] * (len(hashes) // 32))  # type: ignore[arg-type]
    said = (roster, length, round, passing, start, stop, own, hashes, packed)
    word = Signed("inputs", said, sign[mine.culprit](statement("inputs", *said)))
    proof = examined(mine.culprit, word, WHOLE, mine.values, mine.seen, verify)
    assert proof is not None
    assert proof.kind == FORGED
    assert check_fraud(proof, verify) == mine.culprit
    with pytest.raises(WireError, match="have signed"):
        check_fraud(replace(proof, said=(mine.said,)), verify)


def test_an_owner_that_chooses_its_own_input_afterwards_contradicts_itself():
    mine = evidence(WHOLE, AuditPart(1, 0))
    roster, length, round, passing, start, stop, own, hashes, packed = mine.said.parts
    assert isinstance(hashes, bytes)
    assert isinstance(own, bytes)
    other = own_input(mine) + 1
    digest = slice_hash(cells_of(int(start), other))
    said = (roster, length, round, passing, start, stop, digest, hashes.replace(own, digest), packed)
    word = Signed("inputs", said, sign[mine.culprit](statement("inputs", *said)))
    values = [other if torch.equal(value + 1, other) else value for value in mine.values]
    proof = examined(mine.culprit, word, WHOLE, values, mine.seen, verify)
    assert proof is not None
    assert proof.kind == CONTRADICTION
    assert check_fraud(proof, verify) == mine.culprit


def test_two_votes_in_one_attempt_are_proof_and_votes_in_two_are_not():
    cast = Cast("test", 3, 1, bytes(32), b"p" * 32, b"r" * 32, b"o" * 32, b"e" * 32, b"h" * 32)
    others = [cast._replace(hash=b"x" * 32), cast._replace(attempt=2, hash=b"x" * 32), cast]
    signed = [Signed("vote", tuple(each), sign["p1"](each.statement)) for each in (cast, *others)]
    assert [contradicts(signed[0], each) for each in signed[1:]] == [True, False, False]
    assert check_fraud(Proof(CONTRADICTION, "p1", (signed[0], signed[1])), verify) == "p1"
    for pair in ((signed[0], signed[2]), (signed[0], signed[3]), (signed[0],)):
        with pytest.raises(WireError):
            check_fraud(Proof(CONTRADICTION, "p1", pair), verify)
    with pytest.raises(WireError):
        check_fraud(Proof(CONTRADICTION, "p2", (signed[0], signed[1])), verify)


def test_a_lying_auditor_harms_nobody():
    court = Court(8)

    async def scene() -> None:
        await court.iterate()
        await asyncio.sleep(PAUSE)
        liar, victim = court.people["p0"], court.people["p1"]
        proof = evidence(WHOLE, AuditPart(1, 0), spoil=add_one).proof()
        assert proof is not None
        forged = [replace(proof, said=proof.said[:1]), replace(proof, culprit="p2"), replace(proof, output=b"x" * 32)]
        for each in (*(one.encoded for one in forged), b"", b"nonsense"):
            answer = await liar.net.call("p1", "fraud", Fraud("p2").parcel(each), deadline=liar.net.now() + 5)
            assert b"refused" in answer.header
        assert victim.net.refused[BAD_PROOF] == 5
        assert victim.standing.banned == {}
        assert (await court.iterate())["p0"].missing == {}

    run_virtual(scene())


# --- what becomes of liars ---


def test_nobody_answers_a_liar_any_more_and_it_does_not_come_back():
    court = Court(8, {"p1": adds_to_its_sum(0)})

    async def scene() -> None:
        outcomes = []
        for _ in range(3):
            outcomes.append(await court.iterate())
            await asyncio.sleep(PAUSE)
        assert ["p1" in each["p0"].present for each in outcomes] == [True, False, False]
        assert "p1" not in [elector.id for elector in court.people["p0"].record.electors]
        liar, honest = court.people["p1"].net, court.people["p0"].net
        for channel, parcel in (("sync", Sync(bytes(32), None).parcel()), ("terms", Parcel(b""))):
            before = honest.refused[NOT_ENTITLED]
            answer = await liar.call("p0", channel, parcel, deadline=liar.now() + 5)
            assert not answer.payload
            assert honest.refused[NOT_ENTITLED] == before + 1

    run_virtual(scene())


def test_a_leader_that_has_not_heard_of_a_lie_is_shown_the_proof():
    court = Court(8, {"p1": adds_to_its_sum(0)})

    async def scene() -> list[dict[str, Outcome]]:
        first = await court.iterate()
        await asyncio.sleep(PAUSE)
        for person in court.honest("p1", "p0"):
            person.standing.banned.clear()  # they know of the proof no more, only p0 does
            person.audits.proofs.clear()
        second = await court.iterate()
        await asyncio.sleep(PAUSE)
        return [first, second, await court.iterate()]

    outcomes = run_virtual(scene())
    assert "p1" not in outcomes[2]["p0"].present


def test_a_liar_stays_out_after_a_restart(tmp_path: Path):
    identity = tmp_path / "identity"
    identity.touch()
    log = VoteLog(identity)
    log.begin("p0", "test")
    court = Court(3)
    keep_votes(court.people["p0"], log)
    court.people["p0"].standing.ban("p1", "was caught lying: a wrong sum in iteration 1")
    log.close()
    again = VoteLog(identity)
    again.begin("p0", "test")
    fresh = Court(3)
    keep_votes(fresh.people["p0"], again)
    again.close()
    assert fresh.people["p0"].standing.banned == {"p1": "was caught lying: a wrong sum in iteration 1"}
