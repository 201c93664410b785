"""Which commits a peer knows to be certified, how it shows that to others, and which of two lineages it stays with.

A record is certified by a quorum of signed votes of the electors of the record before (`statements.Certificate`). Its
leader makes the certificate and hands it to the next leaders. Whoever has voted for the very result that is decided
need not see it: the leader's word that it has the certificate is enough to go on. But until more peers than can lie say
that they know the record to be certified, it is not *settled* here: this peer does not vote on top of it, and stays an
elector of the decision before, with the votes that it has cast there (`Standing.former`).

Nothing here talks. Proofs for others are made from a `Chronicle`; what a proof is, is in `chain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

import msgpack

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.protocol.ballot import bearable, quorum
from marfl.protocol.chain import (
    PROOF_BYTES,
    Anchor,
    Founded,
    Hop,
    Next,
    Skip,
    advanced,
    encode_proof,
    read_proof,
)
from marfl.protocol.chronicle import Chronicle
from marfl.protocol.messages import Committed
from marfl.protocol.notices import remember
from marfl.protocol.pedigree import Kinship, Pedigree, compare
from marfl.protocol.roster import Elector, Record, decode_record, ranked, unbrief
from marfl.protocol.statements import Certificate, Verify, cast, is_lineage_after, leavers, link_of, signers

RECENT = 16  # certificates that are kept, and records that a proof may begin with
MOST_VERIFIED = 8192  # signatures of a proof: about half a second
MOST_LOSERS = 1024  # that are remembered: who founds lineages without end fills nobody's memory
YOUNG = 3  # iterations in which peers that began apart may still come together


class Evidence(NamedTuple):
    """A proof that was checked: it leads from a record that this peer is sure of to another one."""

    begin: Anchor
    hops: tuple[Hop, ...]
    end: Anchor
    liars: int = 0
    verify: Verify | None = None

    @property
    def hashes(self) -> dict[int, bytes]:
        """By iteration, the states after the records that are shown one by one."""
        at, found = self.begin, {}
        for hop in self.hops:
            at = advanced(at, hop, _seen, self.liars)
            if not isinstance(hop, Skip):
                found[at.iteration] = hop.hash
        return found

    def votes_of(self, peer: PeerId) -> tuple[int, int]:
        """The newest iteration of which a vote with this peer's signature is shown (0: none), and how many decided."""
        at, newest, deciders = self.begin, 0, len(self.begin.electors or ())
        for hop in self.hops:
            after = advanced(at, hop, _seen, self.liars)
            if isinstance(hop, Skip):
                theirs = [signer.signature for signer in hop.signers if signer.elector.id == peer]
                said, iteration = hop.said.statement, hop.said.iteration
                signed = any(self.verify is not None and self.verify(peer, said, each) for each in theirs)
            else:
                voters = _deciders(at, hop)
                deciders, iteration = len(voters), after.iteration
                signed = any(voters[place].id == peer for place, _ in hop.certificate.signatures)
            newest, at = iteration if signed else newest, after
        return newest, deciders


def electors_of(before: Record, record: Record) -> tuple[Elector, ...]:
    """Who decided a record, in the order in which they led: a roster that founds a lineage names them itself."""
    roster = record.roster
    assert roster is not None
    founders = roster.electors if roster.lineage != before.lineage else ()
    return ranked(roster.run, roster.iteration, founders or before.electors)


def check(before: Record, record: Record, proof: Certificate, liars: int, verify: Verify) -> None:
    """`WireError` unless a quorum of those who decide it signed a record that follows another one."""
    roster = record.roster
    if roster is None or (roster.base, roster.iteration) != (before.hash, before.iteration + 1):
        raise WireError("a record that does not follow the one before")
    if roster.lineage != before.lineage and not (roster.electors and is_lineage_after(link_of(before), roster.lineage)):
        raise WireError("a record of another lineage that does not found it")
    electors = electors_of(before, record)
    who = signers(proof, cast(roster, proof.attempt, before, record.hash), electors, verify)
    if not quorum(electors, who, liars):
        raise WireError("a certificate without a quorum")
    leavers(proof, roster.run, link_of(before), ranked(roster.run, roster.iteration, before.electors), verify)


class Commits:
    """One peer's knowledge of what is certified."""

    def __init__(self, run: str, liars: int, verify: Verify, record: Record, expected: int = 0) -> None:
        self.run, self.liars, self.verify = run, liars, verify
        self.expected = expected  # peers at the beginning, where that is known
        self.settled = True  # whether the newest record is surely committed
        self.vouchers: set[PeerId] = set()  # who said that it knows so
        self.chronicle = Chronicle(Anchor.at(run, record), liars)
        self._former: Chronicle | None = None  # without the newest record, where it came without a certificate
        self.losers: dict[tuple[PeerId, bytes], None] = {}  # who has shown me a lineage that mine has won over
        self._certificates: dict[bytes, Certificate] = {}  # by link, of the last records

    # --- what is certain ---

    def borne(self, electors: Sequence[Elector]) -> int:
        """How many of these may lie."""
        return bearable(len(electors), self.liars)

    def enter(self, record: Record, proof: Certificate | None, vouchers: Iterable[PeerId], liars: int) -> None:
        """This record follows the newest one: with its certificate, or on the word of these; so many may lie."""
        if record.roster is not None and record.roster.electors:
            self.losers.clear()
        self._former = copy(self.chronicle) if proof is None else None
        self.chronicle.note(record, proof)
        self._keep(record, proof)
        self.settled, self.vouchers = proof is not None, set()
        self.vouch(vouchers, liars)

    def step_back(self) -> None:
        """Nobody can show the newest record to be certified: the one before is the newest again."""
        if self._former is not None:
            self.chronicle, self._former = self._former, None
        self.settled, self.vouchers = True, set()

    def _keep(self, record: Record, proof: Certificate | None) -> None:
        if proof is not None:
            self._certificates[link_of(record)] = proof
            while len(self._certificates) > RECENT:
                del self._certificates[next(iter(self._certificates))]

    def prove(self, before: Record, record: Record, proof: Certificate) -> None:
        """The newest record's certificate is here, after all, and holds."""
        self._keep(record, proof)
        self.settled = True
        head = self.chronicle.head
        begin = Anchor.at(self.run, before, tuple(f for f in head.foundings if f.iteration < record.iteration))
        self.chronicle.show(begin, record, proof)

    def vouch(self, peers: Iterable[PeerId], liars: int) -> None:
        """These say that they know the newest record to be certified."""
        self.vouchers.update(peers)
        self.settled = self.settled or liars == 0 or len(self.vouchers) > liars

    def jump(self, evidence: Evidence | None, record: Record) -> None:
        """Another record is the newest, as was proven; None: this peer believes whom it joins."""
        self.settled, self.vouchers = True, set()
        if record.lineage != self.chronicle.head.lineage:
            self.losers.clear()
        if evidence is None:
            self.chronicle = Chronicle(Anchor.at(self.run, record), self.liars)
        else:
            self.chronicle.take(evidence.begin, evidence.hops, _seen)

    def packed(self, before: Record) -> bytes:
        """What must outlive a restart: whoever made or was shown a certificate may be the only one who can prove it.

        And while the newest record is not settled, the one before it.
        """
        certificates = [(link, proof.encoded) for link, proof in self._certificates.items()]
        doubted = [] if self.settled else [before.encoded]
        data: bytes = msgpack.packb([self.chronicle.encoded, certificates, *doubted])
        return data

    def restore(self, data: bytes, record: Record) -> Record | None:
        """Go on with what was kept; `WireError` for what is damaged. What belongs to another record is dropped.

        Where the newest record was not settled it is not now: the one before it.
        """
        try:
            chronicle, rows, *doubted = msgpack.unpackb(data, raw=False, max_ext_len=0)
            kept = {bytes(link): Certificate.decode(proof) for link, proof in rows}
        except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"not what was kept of commits: {type(error).__name__}") from None
        found = Chronicle.decode(chronicle)
        if not found.head.is_of(record):
            return None
        self.chronicle, self._certificates = found, kept
        self.settled = not doubted
        return decode_record(doubted[0]) if doubted else None

    def votes_of(self, peer: PeerId, record: Record) -> tuple[int, int]:
        """Whether the certificate of a record that was kept has a peer's signature: see `Evidence.votes_of`."""
        proof, before = self.certificate(record), self.chronicle.anchor(record.iteration - 1)
        if proof is None or before is None or before.electors is None or record.roster is None:
            return 0, len(record.electors)
        voters = ranked(self.run, record.iteration, record.roster.electors or before.electors)
        signed = any(voters[place].id == peer for place, _ in proof.signatures)
        return record.iteration if signed else 0, len(voters)

    def certificate(self, record: Record) -> Certificate | None:
        """The certificate of a record, if it is here."""
        return self._certificates.get(link_of(record))

    # --- proofs ---

    def anchors(self, records: Iterable[Record]) -> list[Anchor]:
        """What a proof for me may begin with, the newest first: these records, and where lineages parted."""
        foundings = self.chronicle.head.foundings
        last = (
            Anchor.at(self.run, record, tuple(f for f in foundings if f.iteration <= record.iteration))
            for record in records
        )
        forks = (self.chronicle.anchor(founding.iteration - 1) for founding in reversed(foundings))
        found = {anchor.link: anchor for anchor in (*last, *forks) if anchor is not None}
        return list(found.values())[:RECENT]

    def proof(self, links: Sequence[Committed]) -> bytes:
        """That my newest record is certified, from the first of these that it can be shown from; b"" without any."""
        for place, (iteration, link) in enumerate(links):
            hops = self.chronicle.proof(iteration, link)
            if hops is not None:
                data: bytes = msgpack.packb([place, encode_proof(hops)])
                return data
        return b""

    def checked(self, anchors: Sequence[Anchor], record: Record, proof: bytes) -> Evidence:
        """How a record is certain to somebody who is sure of these anchors; `WireError` if that is not shown."""
        known = next((anchor for anchor in anchors if anchor.link == link_of(record)), None)
        if known is not None:
            return Evidence(known, (), known)
        place, hops = _unpacked(proof)
        if place >= len(anchors):
            raise WireError("a proof from nowhere")
        end, passed, verify = anchors[place], [], _bounded(self.verify)
        for hop in hops:
            end = advanced(end, hop, verify, self.liars)
            passed.append(hop)
        if not end.is_of(record) or end.electors is None:
            raise WireError("a proof of another record, or one that ends with a skip")
        return Evidence(anchors[place], tuple(passed), end, self.liars, self.verify)

    # --- which lineage stays ---

    def note_loser(self, peer: PeerId, evidence: Evidence, record: Record) -> None:
        """A lineage that has lost is not looked at again, of whoever has shown it.

        Of others it is: anybody can found a lineage of any name, and have it lose.
        """
        if compare(self.chronicle.head.pedigree, evidence.end.pedigree) is Kinship.WINS:
            remember(self.losers, (peer, record.lineage), None, MOST_LOSERS)

    def is_beaten(
        self, evidence: Evidence, record: Record, electors: Sequence[Elector], followed: int, *, lost: bool = False
    ) -> bool:
        """Whether a proven record wins over my newest one.

        A founding on top of my own record is no progress while a quorum of its electors may still go on. It is followed
        if a quorum of them signed it, or so many as `followed` says.
        Where the state of my own record is `lost`, any that others have is better.
        """
        mine, theirs = self.chronicle.head, evidence.end
        kinship = compare(mine.pedigree, theirs.pedigree)
        if kinship is Kinship.WINS and lost:
            return True
        if kinship is Kinship.SAME:
            return mine.link != theirs.link and (not self.settled or theirs.link < mine.link)
        if kinship is Kinship.LOSES and began_apart(mine.pedigree, theirs.pedigree):
            if 2 * mine.foundings[0].signers > self.expected > 0:
                return False  # most of those who were to begin did so with me: the others are made up
            return mine.iteration <= YOUNG or mine.foundings[0].signers == 1 == len(electors)
        if kinship is Kinship.BEHIND:
            new = theirs.foundings[len(mine.foundings) :]
            if new and new[0].iteration == mine.iteration + 1 and electors:
                quorate = 2 * new[0].support > len(electors) + self.borne(electors)
                return quorate or new[0].signers >= followed
        return kinship in (Kinship.BEHIND, Kinship.LOSES)


def _deciders(anchor: Anchor, hop: Next | Founded) -> tuple[Elector, ...]:
    """Who decided the record that a hop leads to, in the order in which they led."""
    known = anchor.electors if anchor.electors is not None else hop.electors
    roster = unbrief(hop.roster, ranked(anchor.run, anchor.iteration + 1, known))
    return ranked(anchor.run, roster.iteration, roster.electors or known)


def began_apart(mine: Pedigree, theirs: Pedigree) -> bool:
    """Whether two chains part at a beginning that had no electors: then no signature says which of them is right."""
    one, other = mine.foundings[:1], theirs.foundings[:1]
    return bool(one and other) and not one[0].is_same(other[0]) and one[0].iteration == other[0].iteration == 1


def _seen(peer: PeerId, digest: bytes, signature: bytes) -> bool:
    """Instead of `Net.verify` for what has been verified before."""
    return True


def _bounded(verify: Verify) -> Verify:
    """The same for as many signatures as a proof may have: whoever shows more costs me no more time than that."""
    left = MOST_VERIFIED

    def bounded(peer: PeerId, digest: bytes, signature: bytes) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            raise WireError(f"a proof with more than {MOST_VERIFIED} signatures")
        return verify(peer, digest, signature)

    return bounded


def _unpacked(data: bytes) -> tuple[int, Iterator[Hop]]:
    if not data or len(data) > PROOF_BYTES:
        raise WireError("a record without a proof")
    try:
        row = msgpack.unpackb(data, raw=False, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a proof: {type(error).__name__}") from None
    if not isinstance(row, list) or [type(each) for each in row] != [int, bytes] or row[0] < 0:
        raise WireError("not a proof: bad fields")
    return row[0], read_proof(row[1])
