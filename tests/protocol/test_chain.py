"""Proofs that a record is committed: true ones convince, and nothing else does."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.net.virtual import VirtualNet, VirtualNetwork
from marfl.protocol.ballot import bearable, quorum
from marfl.protocol.chain import (
    PROOF_BYTES,
    Anchor,
    Founded,
    Hop,
    Next,
    Signer,
    Skip,
    advanced,
    cast_on,
    decode_proof,
    encode_proof,
    follow,
    for_knowing,
    hop_to,
    skip_by,
)
from marfl.protocol.chronicle import RECENT, Chronicle
from marfl.protocol.roster import (
    NO_HASH,
    Elector,
    Member,
    Record,
    Roster,
    leaf,
    membership,
    ranked,
    root_of,
    shown_root,
    tree_root,
)
from marfl.protocol.statements import Cast, Certificate, cast, certificate, lineage_after, link_of

LIARS = 1
NETWORK = VirtualNetwork()
NETS: dict[PeerId, VirtualNet] = {}
verify = lru_cache(maxsize=100_000)(NETWORK.join("reader").verify)  # many proofs share their signatures
OTHER = hashlib.sha256(b"other").digest()


def net(name: PeerId) -> VirtualNet:
    return NETS.get(name) or NETS.setdefault(name, NETWORK.join(name))


def named(*names: PeerId) -> tuple[Elector, ...]:
    """Electors by name: p7 has index 7."""
    return tuple(Elector(name, int(name[1:])) for name in names)


def people(*numbers: int) -> tuple[Elector, ...]:
    return named(*(f"p{number}" for number in numbers))


def signed(said: Cast, electors: Sequence[Elector]) -> dict[Elector, bytes]:
    return {elector: net(elector.id).sign(said.statement) for elector in electors}


class Line:
    """A run that is committed record by record, and what a peer keeps of it."""

    def __init__(self, founders: Sequence[Elector], run: str = "run", liars: int = LIARS) -> None:
        self.run, self.liars = run, liars
        self.records = [Record(None, hashlib.sha256(run.encode()).digest(), founders=tuple(founders))]
        self.certificates: list[Certificate] = [Certificate(0, ())]
        self.anchors = [Anchor.at(run, self.records[0])]
        self.chronicle = Chronicle(self.anchors[0], liars)

    @property
    def head(self) -> Record:
        return self.records[-1]

    def copy(self) -> Line:
        """A peer that has seen the same so far."""
        other = Line((), self.run, self.liars)
        other.records, other.certificates, other.anchors = [*self.records], [*self.certificates], [*self.anchors]
        other.chronicle = Chronicle.decode(self.chronicle.encoded)
        return other

    def lineage(self, salt: bytes | None) -> bytes:
        return self.head.lineage if salt is None else lineage_after(link_of(self.head), salt)

    def roster(self, electors: Sequence[Elector], lineage: bytes | None = None) -> Roster:
        iteration = self.head.iteration + 1
        there = ranked(self.run, iteration, tuple(electors))
        founding = lineage is not None
        return Roster(
            self.run, iteration, 0, self.lineage(lineage), self.head.hash, NO_HASH,
            "grid", 2, tuple(Member(*each, 1.0) for each in there[: len(there) // 2 + 1]), there[len(there) // 2 + 1 :],
            there if founding else (), (),
        )  # fmt: skip

    def commit(
        self, electors: Sequence[Elector], lineage: bytes | None = None, silent: Collection[PeerId] = ()
    ) -> Record:
        """One record more, made of these electors and signed by all who may vote, but for the silent."""
        roster = self.roster(electors, lineage)
        digest = hashlib.sha256(roster.digest).digest()
        voters = ranked(self.run, roster.iteration, roster.electors or self.head.electors)
        said = cast(roster, 2, self.head, digest)
        signatures = {each.id: sign for each, sign in signed(said, voters).items() if each.id not in silent}
        assert quorum(voters, signatures, self.liars)
        proof = certificate(voters, 2, signatures)
        record = self.head.after(roster, digest)
        self.chronicle.note(record, proof)
        self.records.append(record)
        self.certificates.append(proof)
        self.anchors.append(self.chronicle.head)
        return record

    def said(self, iteration: int) -> Cast:
        """What was voted for in an iteration."""
        record, before = self.records[iteration], self.records[iteration - 1]
        assert record.roster is not None
        return cast(record.roster, 2, before, record.hash)

    def hop(self, iteration: int) -> Next | Founded:
        """To the record of an iteration from the one before."""
        return hop_to(self.anchors[iteration - 1], self.records[iteration], self.certificates[iteration])

    def skip(self, start: int, iteration: int) -> Skip:
        """By the votes of an iteration, for whoever knows the root of the electors at the start."""
        said = self.said(iteration)
        found = skip_by(said, signed(said, self.records[iteration - 1].electors), self.records[start].electors, LIARS)
        assert found is not None
        return found


def slowly(iterations: int, size: int = 5) -> Line:
    """One elector of some is replaced in every second iteration."""
    line = Line(people(*range(size)))
    for at in range(1, iterations + 1):
        line.commit(people(*range(at // 2, at // 2 + size)))
    return line


def bare(anchor: Anchor) -> Anchor:
    """The anchor of somebody who knows the root alone."""
    return anchor._replace(electors=None)


LINE = slowly(12)


# --- trees ---


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_whoever_knows_some_leaves_and_the_nodes_beside_them_knows_the_root(size: int, seed: int):
    dice = random.Random(seed)
    leaves = [leaf(Elector(f"p{at}", at)) for at in range(size)]
    places = dice.sample(range(size), dice.randint(1, size))
    nodes = membership(leaves, places)
    shown = {at: leaves[at] for at in places}
    assert shown_root(size, shown, nodes) == tree_root(leaves)
    wrong = dice.choice(places)
    assert shown_root(size, shown | {wrong: OTHER}, nodes) != tree_root(leaves)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_a_wrong_path_leads_to_another_root_or_to_none(size: int):
    leaves = [leaf(Elector(f"p{at}", at)) for at in range(size)]
    nodes, shown, root = membership(leaves, [0]), {0: leaves[0]}, tree_root(leaves)
    for at in range(len(nodes)):
        assert shown_root(size, shown, (*nodes[:at], OTHER, *nodes[at + 1 :])) != root
    for wrong in (nodes[:-1], (*nodes, OTHER)):
        if wrong != nodes:
            with pytest.raises(WireError):
                shown_root(size, shown, wrong)
    for places in ({}, {-1: leaves[0]}, {size: leaves[0]}):
        with pytest.raises(WireError):
            shown_root(size, places, nodes)


def test_the_root_says_how_many_electors_there_are():
    electors = people(0, 1, 2)
    nodes = membership([leaf(each) for each in electors], [2])  # the odd one: its path is as long in a tree of two
    assert shown_root(3, {2: leaf(electors[2])}, nodes) == root_of(electors)
    assert shown_root(2, {1: leaf(electors[2])}, nodes) != root_of(electors)


# --- hops that convince ---


def test_the_record_that_follows_is_proven_by_its_certificate():
    for at in range(1, 13):
        after = advanced(LINE.anchors[at - 1], LINE.hop(at), verify, LIARS)
        assert after == LINE.anchors[at] == Anchor.at("run", LINE.records[at])
        assert after.is_of(LINE.records[at])


def test_whoever_knows_the_root_alone_is_shown_all_electors_with_the_record_that_follows():
    hop = replace(LINE.hop(3), electors=LINE.records[2].electors)
    assert advanced(bare(LINE.anchors[2]), hop, verify, LIARS) == LINE.anchors[3]


@pytest.mark.parametrize("whole", [True, False])
def test_a_skip_proves_the_record_that_is_voted_upon(whole: bool):
    hop = LINE.skip(0, 6)
    start = LINE.anchors[0] if whole else bare(LINE.anchors[0])
    assert advanced(start, for_knowing(hop) if whole else hop, verify, LIARS) == bare(LINE.anchors[5])


def test_a_founding_counts_who_of_the_electors_before_signed_it():
    line = slowly(3)  # the electors are p1 to p5
    line.commit(people(4, 5, 8, 9), lineage=OTHER)
    after = advanced(line.anchors[3], line.hop(4), verify, LIARS)
    assert after == line.anchors[4]
    assert after.foundings == ((4, 2, line.head.hash, 0),)
    assert after.pedigree.head == 4
    opened = replace(line.hop(4), electors=line.records[3].electors)
    assert advanced(bare(line.anchors[3]), opened, verify, LIARS) == after


def test_a_run_whose_first_electors_nobody_knows_begins_with_a_founding():
    line = Line(())
    line.commit(people(0, 1, 2, 3), lineage=OTHER)
    assert follow(line.anchors[0], [line.hop(1)], verify, LIARS).foundings == ((1, 4, line.head.hash, 0),)


# --- hops that do not ---


def verdict(anchor: Anchor, hop: Hop) -> Anchor | str:
    """Where a hop leads, or why it is refused."""
    try:
        return advanced(anchor, hop, verify, LIARS)
    except WireError as error:
        return str(error)


def refused(anchor: Anchor, hop: Hop, words: str = "") -> None:
    found = verdict(anchor, hop)
    assert isinstance(found, str), "it was believed"
    assert words in found


@pytest.mark.parametrize("whole", [True, False])
def test_one_signer_is_too_few_where_one_may_lie(whole: bool):
    electors = LINE.records[0].electors
    said = LINE.said(6)
    one = skip_by(said, signed(said, electors[-1:]), electors, 0)
    assert one is not None
    refused(LINE.anchors[0] if whole else bare(LINE.anchors[0]), one, "1 signers that are known, but 2 are needed")
    assert skip_by(said, signed(said, electors[-1:]), electors, LIARS) is None


@pytest.mark.parametrize("whole", [True, False])
def test_who_signs_twice_counts_once(whole: bool):
    hop = LINE.skip(0, 6)
    anchor = LINE.anchors[0] if whole else bare(LINE.anchors[0])
    refused(anchor, replace(hop, signers=(hop.signers[0], hop.signers[0])), "signs twice")
    two = hop.signers[0], hop.signers[1]._replace(place=hop.signers[0].place)
    if not whole:
        refused(anchor, replace(hop, signers=two), "two signers in one place")


def test_signers_outside_the_set_count_for_nothing():
    said, strangers = LINE.said(6), people(20, 21, 22, 23)
    hop = skip_by(said, signed(said, strangers), strangers, LIARS)
    assert hop is not None
    refused(LINE.anchors[0], hop, "0 signers")
    refused(bare(LINE.anchors[0]), hop, "no electors")
    mixed = Skip(said, tuple(Signer(each, 0, sign) for each, sign in signed(said, [*strangers, *people(3)]).items()))
    refused(LINE.anchors[0], mixed, "1 signers")
    renamed = LINE.skip(0, 6)
    index = tuple(each._replace(elector=each.elector._replace(index=77)) for each in renamed.signers)
    refused(LINE.anchors[0], replace(renamed, signers=index))
    refused(bare(LINE.anchors[0]), replace(renamed, signers=index))


def test_a_smaller_tree_is_not_believed_to_need_fewer_signers():
    electors = people(0, 1, 2, 3, 4)  # one of five may lie, none of three
    said = LINE.said(6)
    nodes = membership([leaf(each) for each in electors], [4])
    lone = (Signer(electors[4], 2, signed(said, electors[4:])[electors[4]]),)
    for size in (1, 2, 3):
        refused(bare(LINE.anchors[0]), Skip(said, lone, size, nodes))


def test_every_node_of_a_path_is_checked():
    hop = LINE.skip(0, 6)
    for at in range(len(hop.nodes)):
        refused(bare(LINE.anchors[0]), replace(hop, nodes=(*hop.nodes[:at], OTHER, *hop.nodes[at + 1 :])))
    refused(bare(LINE.anchors[0]), replace(hop, nodes=hop.nodes[:-1]))
    refused(bare(LINE.anchors[0]), replace(hop, nodes=(*hop.nodes, OTHER)))
    refused(bare(LINE.anchors[0]), replace(hop, signers=tuple(s._replace(place=s.place + 1) for s in hop.signers)))
    refused(bare(LINE.anchors[0]), for_knowing(hop))


@pytest.mark.parametrize("field", Cast._fields)
def test_every_field_of_the_vote_that_skips_is_signed(field: str):
    hop = LINE.skip(0, 6)
    value: str | int | bytes = {"run": "x", "iteration": 7, "attempt": 3}.get(field, OTHER)
    refused(LINE.anchors[0], replace(hop, said=hop.said._replace(**{field: value})))


def test_votes_of_another_run_prove_nothing():
    other = Line(people(0, 1, 2, 3, 4), run="another")
    for _ in range(5):
        other.commit(people(0, 1, 2, 3, 4))
    here = Line(people(0, 1, 2, 3, 4))
    refused(here.anchors[0], other.skip(0, 5), "another run")
    refused(here.anchors[0], other.hop(1))
    said = other.said(5)._replace(run="run")
    refused(here.anchors[0], replace(other.skip(0, 5), said=said), "signature")


def test_votes_in_another_lineage_prove_nothing_and_no_founding_is_skipped():
    line = slowly(2)
    line.commit(people(1, 2, 3, 4), lineage=OTHER)
    for _ in range(3):
        line.commit(people(1, 2, 3, 4))
    refused(line.anchors[0], line.skip(0, 6), "another lineage")
    hidden = line.skip(0, 6)
    refused(line.anchors[0], replace(hidden, said=hidden.said._replace(lineage=NO_HASH)), "signature")
    founded = line.hop(3)
    refused(line.anchors[2], Next(founded.roster, founded.hash, founded.certificate), "another lineage")
    plain = line.hop(2)
    refused(line.anchors[1], Founded(plain.roster, plain.hash, plain.certificate), "no new lineage")


def test_a_skip_leads_forward():
    refused(LINE.anchors[5], LINE.skip(5, 6), "nowhere")
    refused(LINE.anchors[6], LINE.skip(5, 6), "nowhere")


def test_a_record_needs_a_quorum_of_the_electors_before_it():
    hop, electors = LINE.hop(3), LINE.records[2].electors
    assert bearable(len(electors), LIARS) == 1
    few = replace(hop, certificate=replace(hop.certificate, signatures=hop.certificate.signatures[:3]))
    refused(LINE.anchors[2], few, "no quorum")
    enough = replace(hop, certificate=replace(hop.certificate, signatures=hop.certificate.signatures[:4]))
    assert advanced(LINE.anchors[2], enough, verify, LIARS) == LINE.anchors[3]


def test_a_record_on_top_of_another_is_refused():
    refused(LINE.anchors[1], LINE.hop(3))
    refused(LINE.anchors[2]._replace(link=OTHER), LINE.hop(3), "signature")
    refused(LINE.anchors[2], replace(LINE.hop(3), hash=OTHER), "signature")
    refused(LINE.anchors[2], replace(LINE.hop(3), hash=b"short"))
    roster = LINE.hop(5).roster
    refused(LINE.anchors[2], replace(LINE.hop(3), roster=roster))
    again = LINE.hop(3).certificate
    refused(LINE.anchors[2], replace(LINE.hop(3), certificate=replace(again, attempt=1)), "signature")


def test_electors_that_are_not_the_anchor_s_are_not_believed():
    hop = LINE.hop(3)
    for electors in ((), people(0, 1, 2), LINE.records[2].electors[::-1], LINE.records[2].electors[:-1]):
        refused(bare(LINE.anchors[2]), replace(hop, electors=electors), "other electors")
    twice = (*LINE.records[2].electors, LINE.records[2].electors[0])
    refused(bare(LINE.anchors[2]), replace(hop, electors=twice), "twice")


def test_a_founding_needs_a_quorum_of_the_electors_that_it_names():
    line = slowly(2)
    line.commit(people(1, 2, 3, 4, 5), lineage=OTHER)
    hop = line.hop(3)
    few = replace(hop, certificate=replace(hop.certificate, signatures=hop.certificate.signatures[:3]))
    refused(line.anchors[2], few, "no quorum")
    refused(line.anchors[1], hop)
    nobody = replace(hop, certificate=Certificate(2, ()))
    refused(line.anchors[2], nobody, "no quorum")


def test_electors_that_are_named_twice_in_a_roster_are_refused():
    line = slowly(2)
    electors = line.head.electors
    roster = replace(line.roster(electors), witnesses=(*electors, *electors))
    said = cast_on(line.anchors[2], roster, 0, OTHER)
    voters = ranked("run", 3, electors)
    proof = certificate(voters, 0, {each.id: sign for each, sign in signed(said, voters).items()})
    record = line.head.after(roster, OTHER)
    refused(line.anchors[2], hop_to(line.anchors[2], record, proof), "twice")


def test_without_liars_one_elector_s_word_is_enough():
    line = Line(people(0, 1, 2), liars=0)
    for _ in range(4):
        line.commit(people(0, 1, 2))
    said = line.said(4)
    hop = skip_by(said, signed(said, people(1)), line.records[0].electors, 0)
    assert hop is not None
    assert advanced(bare(line.anchors[0]), hop, verify, 0).iteration == 3


# --- bytes ---


def test_a_proof_is_the_same_after_it_was_bytes():
    line = slowly(4)
    line.commit(people(2, 3, 4, 5), lineage=OTHER)
    hops = [line.skip(0, 3), replace(line.hop(4), electors=line.records[3].electors), line.hop(5)]
    assert decode_proof(encode_proof(hops)) == hops
    assert decode_proof(encode_proof([])) == []


def test_bytes_that_are_cut_off_are_no_proof():
    data = encode_proof([LINE.skip(0, 6), LINE.hop(3)])
    for at in range(0, len(data), 7):
        with pytest.raises(WireError):
            decode_proof(data[:at])


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes):
    with contextlib.suppress(WireError):
        decode_proof(data)
    with pytest.raises(WireError):
        Chronicle.decode(data)


@settings(max_examples=300)
@given(st.data())
def test_a_proof_with_a_byte_changed_is_refused_or_says_the_same(data: st.DataObject):
    hops = [LINE.skip(0, 6), replace(LINE.hop(6), electors=LINE.records[5].electors)]
    good = bytearray(encode_proof(hops))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    try:
        after = follow(bare(LINE.anchors[0]), decode_proof(bytes(good)), verify, LIARS)
    except WireError:
        return
    assert after == LINE.anchors[6]  # there are bytes of which nothing follows


def rows(change: Callable[[list], object]) -> bytes:
    """A proof of one skip and one record, with something wrong in its rows."""
    values = msgpack.unpackb(encode_proof([LINE.skip(0, 6), LINE.hop(3)]))
    change(values)
    return msgpack.packb(values)


BAD: dict[str, Callable[[list], object]] = {
    "another kind": lambda v: v[0].__setitem__(0, "jump"),
    "a hop too short": lambda v: v[0].pop(),
    "a vote too short": lambda v: v[0][1].pop(),
    "an iteration that is no number": lambda v: v[0][1].__setitem__(1, True),
    "an iteration below zero": lambda v: v[0][1].__setitem__(1, -1),
    "an attempt beyond bounds": lambda v: v[0][1].__setitem__(2, 2**63),
    "a short hash": lambda v: v[0][1].__setitem__(3, b"x"),
    "a run that is no name": lambda v: v[0][1].__setitem__(0, 7),
    "a short signature": lambda v: v[0][2][0].__setitem__(3, bytes(63)),
    "a signer that is no name": lambda v: v[0][2][0].__setitem__(0, b"p0"),
    "a long name": lambda v: v[0][2][0].__setitem__(0, "p" * 1000),
    "a place below zero": lambda v: v[0][2][0].__setitem__(2, -1),
    "signers that are no list": lambda v: v[0].__setitem__(2, 3),
    "a huge tree": lambda v: v[0].__setitem__(3, 2**60),
    "half a node": lambda v: v[0].__setitem__(4, bytes(33)),
    "a roster that is none": lambda v: v[1].__setitem__(1, 3),
    "a certificate that is none": lambda v: v[1].__setitem__(3, b"x"),
    "an elector with three parts": lambda v: v[1].__setitem__(4, [["p0", 0, 0]]),
    "too many hops": lambda v: v.extend([v[0]] * 4096),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_of_another_form_are_refused(name: str):
    with pytest.raises(WireError):
        decode_proof(rows(BAD[name]))


def test_huge_sizes_are_refused_before_anything_is_allocated():
    for data in (bytes(PROOF_BYTES + 1), b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000, b"\x80"):
        with pytest.raises(WireError):
            decode_proof(data)


# --- what a peer keeps ---


def convinces(line: Line, start: Anchor, giver: Chronicle | None = None) -> list[Hop]:
    """The proof that somebody with this anchor is given leads to the head."""
    hops = (giver or line.chronicle).proof(start.iteration, start.link)
    assert hops is not None
    assert follow(start, decode_proof(encode_proof(hops)), verify, line.liars) == line.anchors[-1]
    return hops


def test_a_few_skips_lead_from_any_record_to_the_head():
    line = slowly(200, size=8)
    assert len(convinces(line, line.anchors[0])) < 30
    for start in line.anchors:
        convinces(line, start)
    assert convinces(line, line.anchors[-1]) == []
    assert len(line.chronicle.posts) < 40
    assert len(line.chronicle.recent) == RECENT


def test_one_skip_is_enough_while_enough_of_the_first_electors_stay():
    line = Line(people(0, 1, 2, 3))
    for at in range(300):
        line.commit(people(0, 1, at + 2, at + 3))
    assert [type(hop) for hop in convinces(line, line.anchors[0])] == [Skip, Next]
    assert len(line.chronicle.posts) == 3
    for start in line.anchors:
        assert len(convinces(line, start)) <= 2


def test_electors_that_return_make_the_way_shorter_again():
    line = slowly(60, size=6)
    assert len(line.chronicle.posts) > 5
    line.commit(people(0, 1, *range(30, 36)))
    line.commit(people(0, 1, *range(30, 36)))
    assert len(line.chronicle.posts) == 3
    assert [type(hop) for hop in convinces(line, line.anchors[0])] == [Skip, Next]


def test_where_all_electors_change_at_once_every_record_is_shown():
    line = Line(people(0, 1, 2, 3))
    for at in range(1, 6):
        line.commit(people(*range(4 * at, 4 * at + 4)))
    assert [type(hop) for hop in convinces(line, line.anchors[0])] == [Next] * 5


def test_a_proof_leads_through_every_founding():
    line = slowly(20, size=6)
    line.commit(people(10, 11, 30, 31, 32), lineage=OTHER)
    for at in range(30):
        line.commit(people(*range(30 + at // 3, 35 + at // 3)))
    line.commit(people(39, 40, 41, 42), lineage=hashlib.sha256(b"third").digest())
    for _ in range(10):
        line.commit(people(39, 40, 41, 42))
    hops = convinces(line, line.anchors[0])
    assert sum(isinstance(hop, Founded) for hop in hops) == 2
    assert [founding.iteration for founding in line.chronicle.head.foundings] == [21, 52]
    for start in line.anchors:
        convinces(line, start)


def test_whoever_is_elsewhere_or_ahead_is_proven_nothing():
    line = slowly(6)
    assert line.chronicle.proof(6, OTHER) is None
    assert line.chronicle.proof(3, OTHER) is None
    assert line.chronicle.proof(7, OTHER) is None


def test_whoever_comes_back_goes_on_from_the_proof_and_can_give_it():
    line = slowly(3, size=6)
    away = line.copy()
    for at in range(4, 60):
        line.commit(people(*range(at // 2, at // 2 + 6)))
    start = away.chronicle.head
    head = away.chronicle.take(start, convinces(line, start), verify)
    assert head == line.anchors[-1]
    for at in range(60, 90):
        record = line.commit(people(*range(at // 2, at // 2 + 6)))
        away.chronicle.note(record, line.certificates[-1])
    for at in (0, 1, 2, 3, 70, 90 - 1):
        convinces(line, line.anchors[at], away.chronicle)


def test_whoever_joins_late_gives_the_proof_that_it_was_given():
    line = slowly(80, size=6)
    late = Chronicle(line.anchors[0], LIARS)
    late.take(line.anchors[0], convinces(line, line.anchors[0]), verify)
    convinces(line, line.anchors[0], late)
    second = Chronicle(line.anchors[0], LIARS)
    hops = late.proof(0, line.anchors[0].link)
    assert hops is not None
    assert second.take(line.anchors[0], hops, verify) == line.anchors[-1]


def test_whoever_loses_goes_back_to_the_last_common_record_and_on_from_there():
    line = slowly(10)
    lost = line.copy()
    for _ in range(3):
        line.commit(people(5, 6, 7, 8, 9))
    lost.commit(people(8, 9, 10, 11), lineage=OTHER)
    lost.commit(people(8, 9, 10, 11))
    assert line.chronicle.proof(lost.head.iteration, link_of(lost.head)) is None
    common = lost.chronicle.anchor(10)
    assert common is not None
    head = lost.chronicle.take(common, convinces(line, common), verify)
    assert head == line.anchors[-1]
    assert head.foundings == ()
    convinces(line, line.anchors[0], lost.chronicle)


def test_a_bad_proof_changes_nothing():
    line = slowly(3, size=6)
    away = line.copy()
    for at in range(4, 20):
        line.commit(people(*range(at // 2, at // 2 + 6)))
    start, before = away.chronicle.head, away.chronicle.encoded
    hops = convinces(line, start)
    for bad in (hops[:-1], [*hops[:-1], LINE.hop(3)], hops[1:]):
        with pytest.raises(WireError):
            away.chronicle.take(start, bad, verify)
    assert away.chronicle.encoded == before


def test_a_record_without_a_certificate_is_passed_over_by_the_next_votes():
    line = slowly(8, size=6)
    blind = Chronicle(line.anchors[0], LIARS)
    for at in range(1, 9):
        unseen = at in (4, 5)
        blind.note(line.records[at], None if unseen else line.certificates[at])
        assert (blind.proof(0, line.anchors[0].link) is None) == unseen
    convinces(line, line.anchors[0], blind)


def test_a_certificate_that_comes_later_leads_over_the_records_that_came_without_one():
    line = slowly(8, size=6)
    blind = Chronicle(line.anchors[0], LIARS)
    for at in range(1, 7):
        blind.note(line.records[at], None if at > 3 else line.certificates[at])
    assert blind.proof(2, line.anchors[2].link) is None
    blind.show(line.anchors[5], line.records[6], line.certificates[6])
    for at in (7, 8):
        blind.note(line.records[at], line.certificates[at])
    for at in (0, 2, 3, 5, 6):
        convinces(line, line.anchors[at], blind)


def test_a_gap_that_nobody_signed_a_way_over_is_where_proofs_begin():
    line = Line(people(0, 1, 2, 3))
    for at in (1, 2, 3):
        line.commit(people(*range(4 * at, 4 * at + 4)))
    blind = Chronicle(line.anchors[0], LIARS)
    for at in (1, 2, 3):
        blind.note(line.records[at], None if at == 2 else line.certificates[at])
    assert blind.proof(0, line.anchors[0].link) is None
    convinces(line, line.anchors[2], blind)


def test_records_are_noted_in_their_order():
    line = slowly(4)
    with pytest.raises(ValueError, match="does not follow"):
        line.chronicle.note(line.records[2], line.certificates[2])


def test_a_chronicle_is_the_same_after_a_restart():
    line = slowly(150, size=8)
    again = Chronicle.decode(line.chronicle.encoded)
    assert again.encoded == line.chronicle.encoded
    assert again.head == line.chronicle.head
    assert again.posts == line.chronicle.posts
    record = line.commit(line.head.electors)
    again.note(record, line.certificates[-1])
    for start in line.anchors:
        convinces(line, start, again)


def test_a_chronicle_that_was_cut_off_or_changed_is_refused():
    data = slowly(20).chronicle.encoded
    for at in range(0, len(data), 97):
        with pytest.raises(WireError):
            Chronicle.decode(data[:at])


def test_what_a_chronicle_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("marfl.protocol.chronicle.MOST_POSTS", 12)
    monkeypatch.setattr("marfl.protocol.chronicle.LISTED", 4)
    line = slowly(200, size=6)
    assert len(line.chronicle.posts) == 12
    assert sum(post.anchor.electors is not None for post in line.chronicle.posts) <= 4
    hops = line.chronicle.proof(0, line.anchors[0].link)
    assert hops is not None  # the oldest skip that is left: who knows its signers is convinced
    with pytest.raises(WireError, match="0 signers"):
        follow(line.anchors[0], hops, verify, LIARS)
    oldest = line.chronicle.posts[0].anchor.iteration
    for start in line.anchors[oldest:]:
        convinces(line, start)
    again = Chronicle.decode(line.chronicle.encoded)
    for start in line.anchors[oldest:]:
        convinces(line, start, again)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_electors_come_and_go_a_proof_from_the_beginning_convinces(seed: int):
    dice = random.Random(seed)
    line = Line(people(0, 1, 2, 3, 4))
    for at in range(20):
        everybody = line.head.electors
        stay = [each for each in everybody if dice.random() < 0.8]
        come = people(*dice.sample(range(30), dice.randint(0, 3)))
        electors = tuple(dict.fromkeys([*stay, *come])) or everybody
        founding = hashlib.sha256(bytes([at])).digest() if dice.random() < 0.05 else None
        silent = {dice.choice(everybody).id} if len(everybody) > 4 and founding is None else ()
        line.commit(electors, founding, silent)
    for start in (line.anchors[0], *dice.sample(line.anchors, 5)):
        convinces(line, start)


def test_liars_and_strangers_together_prove_no_record_that_is_not_committed():
    line, liar, strangers = slowly(12, size=7), people(5), people(40, 41, 42)
    forged = line.said(9)._replace(parent=OTHER, electors=root_of(strangers))
    signatures = signed(forged, [*liar, *strangers])
    everybody = tuple(Signer(each, 0, sign) for each, sign in signatures.items())
    for start in line.anchors[:8]:
        refused(start, Skip(forged, everybody))
        places = {each: at for at, each in enumerate(start.electors or ())}
        lone = tuple(Signer(each, places[each], signatures[each]) for each in liar if each in places)
        nodes = membership([leaf(each) for each in start.electors or ()], [signer.place for signer in lone])
        refused(bare(start), Skip(forged, lone, len(places), nodes))
