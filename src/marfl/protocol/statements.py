"""What peers sign: every statement of the protocol as 32 bytes, and quorums of signatures over one of them.

A statement is the SHA-256 of its kind and its parts, each with its length before it, so that no two of them have the
same bytes, whatever their kinds. A signature is Ed25519 (RFC 8032), made with the key that is the peer's name.

    vote        an elector votes for a value (Paxos: accepted); a quorum of votes in one attempt is a `Certificate`
    promise     an elector's ack (Paxos: promise), with its last vote and what it has pledged itself to
    seal        a leader seals one roster in an attempt, and goes by one set of promises
    goodbye     a peer leaves after a commit

The value of a decision is a roster and the hash of the state that comes of it. A vote also names the record before (its
`link`), its electors, and the electors that the value makes (`Roster.root`): so certificates form a chain (`chain`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import msgpack

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.protocol.roster import DecisionId, Elector, Record, Roster, root_of

SIGNATURE_BYTES = 64
MOST_SIGNATURES = 100_000
DIGEST_BYTES = 32
LONGEST_GROUNDS = 4096  # bytes of promises that an ack repeats: those of some twenty electors

Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]  # who, the statement, its signature: see `Net.verify`


def statement(kind: str, *parts: bytes | str | int) -> bytes:
    """One statement as 32 bytes."""
    digest = hashlib.sha256(b"marfl statement 1")
    for part in (kind, *parts):
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8) + data)
    return digest.digest()


def link_of(record: Record) -> bytes:
    """The name of a committed record: its value. Votes for the next one name it."""
    return statement("record", record.roster.digest if record.roster else b"", record.hash)


def lineage_after(link: bytes, salt: bytes) -> bytes:
    """The name of a lineage that is founded on top of a record: no lineage founded elsewhere can have it."""
    nonce = statement("salt", salt)[:16]
    return statement("lineage", link, nonce)[:16] + nonce


def is_lineage_after(link: bytes, lineage: bytes) -> bool:
    """Whether a lineage of this name can have been founded on top of the record with this link."""
    return lineage[:16] == statement("lineage", link, lineage[16:])[:16]


class Cast(NamedTuple):
    """A vote, all that it says: an elector signs `statement` of it."""

    run: str
    iteration: int
    attempt: int  # in which it is cast; the value may be of an earlier one
    lineage: bytes
    parent: bytes  # link of the record before
    roster: bytes  # digest
    root: bytes  # of the electors that it makes
    electors: bytes  # root of those who vote: of the record before, or whom a founding roster names
    hash: bytes  # of the state after it

    @property
    def statement(self) -> bytes:
        return statement("vote", *self)


def cast(roster: Roster, attempt: int, before: Record, digest: bytes) -> Cast:
    """The vote for what came of a roster, in this attempt, on top of the record before."""
    voters = root_of(roster.electors) if roster.electors else before.root
    return Cast(
        roster.run, roster.iteration, attempt, roster.lineage, link_of(before), roster.digest, roster.root, voters,
        digest,
    )  # fmt: skip


class Promise(NamedTuple):
    """What an ack says of an elector's votes: it signs `statement` of it, where other electors may have to see it."""

    attempt: int  # that is promised
    voted_in: int  # its last vote: attempt, roster and hash; -1 and nothing where it has none
    roster: bytes
    hash: bytes
    holds: bool  # has the data of that result
    pledged_in: int  # which masked roster may be unmasked with its help: attempt and digest
    pledged: bytes

    def statement(self, decision: DecisionId) -> bytes:
        return statement("promise", *decision, *self)


def seal_parts(decision: DecisionId, attempt: int, roster: bytes, promises: bytes) -> tuple[str | int | bytes, ...]:
    """What a leader signs that seals a roster: it does so once in an attempt, and shows everybody the same promises."""
    return (*decision, attempt, roster, statement("grounds", promises) if promises else b"")


class SignedSeal(NamedTuple):
    """A roster that was sealed in an attempt, the promises that its leader went by, and its signature of both."""

    attempt: int
    roster: bytes  # digest
    promises: bytes  # as they are packed; the digest of them where they are too long to be told
    signature: bytes

    def parts(self, decision: DecisionId) -> tuple[str | int | bytes, ...]:
        """What the leader has signed."""
        *first, grounds = seal_parts(decision, self.attempt, self.roster, self.promises)
        return (*first, self.promises if len(self.promises) == DIGEST_BYTES else grounds)

    @property
    def brief(self) -> SignedSeal:
        """With the digest of its promises."""
        return self._replace(promises=statement("grounds", self.promises) if self.promises else b"")

    @property
    def encoded(self) -> bytes:
        """With its promises where they are few: then two of one elector are found by comparing seals."""
        data: bytes = msgpack.packb(list(self if len(self.promises) <= LONGEST_GROUNDS else self.brief))
        return data

    @classmethod
    def decode(cls, data: bytes) -> SignedSeal:
        """The seal in these bytes, or `WireError`; nothing is verified yet."""
        try:
            row = msgpack.unpackb(data, raw=False, max_ext_len=0)
        except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"not a seal: {type(error).__name__}") from None
        if not isinstance(row, list) or [type(each) for each in row] != [int, bytes, bytes, bytes]:
            raise WireError("not a seal: bad fields")
        return cls(*row)


class SignedPromise(NamedTuple):
    """One elector's promise, as a leader shows it to others."""

    place: int  # of the elector in the order in which they lead
    promise: Promise
    signature: bytes


def pack_promises(rows: Sequence[SignedPromise]) -> bytes:
    data: bytes = msgpack.packb([(place, *promise[1:], signature) for place, promise, signature in rows])
    return data


def unpack_promises(data: bytes, attempt: int) -> list[SignedPromise]:
    """The promises of an attempt in these bytes, or `WireError`; nothing is verified yet."""
    try:
        rows = msgpack.unpackb(data, raw=False, max_array_len=MOST_SIGNATURES, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not promises: {type(error).__name__}") from None
    kinds = (int, int, bytes, bytes, bool, int, bytes, bytes)
    if not isinstance(rows, list) or any(
        not isinstance(row, list) or len(row) != len(kinds) or [type(each) for each in row] != [*kinds] for row in rows
    ):
        raise WireError("not promises: bad fields")
    return [SignedPromise(place, Promise(attempt, *said), signature) for place, *said, signature in rows]


def verified_promises(
    data: bytes, attempt: int, decision: DecisionId, electors: Sequence[Elector], verify: Verify
) -> dict[PeerId, SignedPromise]:
    """By elector, what it promised for this attempt; `WireError` if any signature is not its elector's."""
    found: dict[PeerId, SignedPromise] = {}
    for row in unpack_promises(data, attempt):
        if not 0 <= row.place < len(electors) or electors[row.place].id in found:
            raise WireError("a promise of an elector who is none")
        if not verify(electors[row.place].id, row.promise.statement(decision), row.signature):
            raise WireError(f"a promise that is not {electors[row.place].id}'s")
        found[electors[row.place].id] = row
    return found


def goodbye(run: str, link: bytes) -> bytes:
    """What a peer signs that leaves after the record with this link."""
    return statement("goodbye", run, link)


@dataclass(frozen=True)
class Certificate:
    """Signatures of one vote by electors of its iteration. It is worth something once `signers` has checked it."""

    attempt: int  # in which the votes were cast
    signatures: tuple[tuple[int, bytes], ...]  # places of electors in the order in which they lead, ascending
    goodbyes: tuple[tuple[int, bytes], ...] = ()  # of a founding: who of the electors before it had left, by place

    @cached_property
    def encoded(self) -> bytes:
        data: bytes = msgpack.packb([self.attempt, *_columns(self.signatures), *_columns(self.goodbyes)[: self._rest]])
        return data

    @property
    def _rest(self) -> int:
        return 2 if self.goodbyes else 0

    @cached_property
    def digest(self) -> bytes:
        return statement("certificate", self.encoded)

    @classmethod
    def decode(cls, data: bytes) -> Certificate:
        """The certificate in these bytes, or `WireError`; nothing is verified yet."""
        try:
            row = msgpack.unpackb(data, raw=False, max_array_len=MOST_SIGNATURES, max_ext_len=0)
        except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"not a certificate: {type(error).__name__}") from None
        if not isinstance(row, list) or len(row) not in (3, 5) or type(row[0]) is not int or row[0] < 0:
            raise WireError("not a certificate: bad fields")
        return cls(row[0], _signed(*row[1:3]), _signed(*row[3:5]) if len(row) == 5 else ())


def _columns(signed: Sequence[tuple[int, bytes]]) -> tuple[list[int], bytes]:
    return [place for place, _ in signed], b"".join(signature for _, signature in signed)


def _signed(places: object, joined: object) -> tuple[tuple[int, bytes], ...]:
    """Places and their signatures, or `WireError`."""
    if not isinstance(places, list) or any(type(place) is not int for place in places):
        raise WireError("not a certificate: bad fields")
    if not isinstance(joined, bytes) or len(joined) != SIGNATURE_BYTES * len(places):
        raise WireError("not a certificate: bad fields")
    if any(place < 0 for place in places) or places != sorted(set(places)):
        raise WireError("not a certificate: bad places")
    cuts = range(0, len(joined), SIGNATURE_BYTES)
    return tuple(zip(places, (joined[at : at + SIGNATURE_BYTES] for at in cuts), strict=True))


def certificate(electors: Sequence[Elector], attempt: int, signatures: Mapping[PeerId, bytes]) -> Certificate:
    """These electors' signatures of one vote, put together. They must have been verified one by one."""
    rows = [(place, signatures[elector.id]) for place, elector in enumerate(electors) if elector.id in signatures]
    return Certificate(attempt, tuple(rows))


def signers(proof: Certificate, said: Cast, electors: Sequence[Elector], verify: Verify) -> Collection[PeerId]:
    """The electors whose signature of this vote is in a certificate; `WireError` if any of them is not theirs."""
    found = set()
    for place, signature in proof.signatures:
        if place >= len(electors):
            raise WireError("a certificate that names an elector who is none")
        if not verify(electors[place].id, said.statement, signature):
            raise WireError(f"a certificate with a signature that is not {electors[place].id}'s")
        found.add(electors[place].id)
    return found


def leavers(proof: Certificate, run: str, link: bytes, electors: Sequence[Elector], verify: Verify) -> set[PeerId]:
    """Who of the electors of a record said goodbye after it, as a founding shows; `WireError` if one of them did not.

    `electors`: in the order in which they would lead what follows the record with this link.
    """
    found = set()
    for place, signature in proof.goodbyes:
        if place >= len(electors) or not verify(electors[place].id, goodbye(run, link), signature):
            raise WireError("a founding with a goodbye that nobody said")
        found.add(electors[place].id)
    return found
