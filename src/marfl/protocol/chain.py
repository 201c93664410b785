"""A short proof that a record is committed, for whoever joins or was away long. Pure: bytes in, a verdict out.

Whoever trusts one record (an `Anchor`) is moved forward by hops, each of which is checked against the anchor before it:

    next        the record that follows, with its certificate: a quorum of the anchor's electors voted for it
    skip        more of the anchor's electors than may lie voted in one later iteration of the same lineage
    founded     the record that follows founds a lineage: a quorum of the electors that its roster names signed it

Why a skip proves something. At most f of an anchor's electors lie (`bearable`), so among f + 1 that sign one vote is an
honest one. It votes in iteration m only on top of a record of m − 1 that it knows to be committed, and its vote names
that record (`parent`) and who votes (`electors`). So the record m − 1 is committed, and its electors are those; of the
value voted for nothing is proven yet. No founding can be skipped: the vote must be of the anchor's own lineage, and a
lineage decides each iteration once. (Two lineages of one name would break that; so a lineage's name follows from the
record on top of which it is founded, see `is_lineage_after`.)

The idea is that of light clients, which skip blocks as long as they trust enough of the later validators (Braithwaite
et al., "A Tendermint light client", 2020). There a third of the voting power must be shared; here f + 1 electors are
enough, because the run says how many may lie.

A verifier knows the electors of an anchor whole (its own record, or one that a hop opened) or by their root alone; then
signers are shown by their places in the tree (`shown_root`), or all electors are written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import msgpack

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.protocol.ballot import bearable, quorum
from marfl.protocol.messages import MAX_INDEX
from marfl.protocol.pedigree import Founding, Pedigree
from marfl.protocol.roster import (
    Elector,
    Record,
    Roster,
    brief,
    leaf,
    membership,
    ranked,
    root_of,
    shown_root,
    unbrief,
)
from marfl.protocol.statements import (
    SIGNATURE_BYTES,
    Cast,
    Certificate,
    Verify,
    is_lineage_after,
    leavers,
    link_of,
    signers,
)

PROOF_BYTES = 2**22  # of a whole proof
MOST_HOPS = 4096
MOST_ELECTORS = 100_000  # written out in one hop
LONGEST_NAME = 256  # of a peer or a run


class Anchor(NamedTuple):
    """A committed record, as far as somebody must know it to judge what comes after."""

    run: str
    iteration: int
    link: bytes
    lineage: bytes
    root: bytes  # of the electors for the next iteration
    electors: tuple[Elector, ...] | None  # None: only their root is known
    foundings: tuple[Founding, ...] = ()  # that were passed on the way here, oldest first

    @classmethod
    def at(cls, run: str, record: Record, foundings: tuple[Founding, ...] = ()) -> Anchor:
        """A record that is trusted: one's own, or that of whom one joins through."""
        return cls(run, record.iteration, link_of(record), record.lineage, record.root, record.electors, foundings)

    @property
    def pedigree(self) -> Pedigree:
        return Pedigree(self.foundings, self.iteration)

    def is_of(self, record: Record) -> bool:
        """Whether this is the anchor of a record: what the record says of itself is proven then."""
        return (self.iteration, self.link, self.root) == (record.iteration, link_of(record), record.root)


# --- hops ---


class Signer(NamedTuple):
    """An elector's signature of a vote."""

    elector: Elector
    place: int  # among the anchor's electors, for whoever knows their root alone
    signature: bytes


@dataclass(frozen=True)
class Skip:
    """Electors of the anchor vote in a later iteration: the record before that one is committed."""

    said: Cast
    signers: tuple[Signer, ...]
    size: int = 0  # of the tree of the anchor's electors; 0: for whoever knows them all
    nodes: tuple[bytes, ...] = ()  # of that tree: see `shown_root`


@dataclass(frozen=True)
class Next:
    """The record that follows the anchor in its lineage."""

    roster: bytes  # brief, for whoever knows the electors
    hash: bytes
    certificate: Certificate
    electors: tuple[Elector, ...] = ()  # the anchor's, written out for whoever knows their root alone


@dataclass(frozen=True)
class Founded:
    """The record that follows founds a lineage. That it was made is proven, not that it stays: see `pedigree`."""

    roster: bytes
    hash: bytes
    certificate: Certificate  # places of the electors that the roster names
    electors: tuple[Elector, ...] = ()  # as in `Next`: those before, whose signatures are counted


Hop: TypeAlias = Skip | Next | Founded


def advanced(anchor: Anchor, hop: Hop, verify: Verify, liars: int) -> Anchor:
    """The anchor after a hop, or `WireError` if anything in it is not proven."""
    if isinstance(hop, Skip):
        return _skipped(anchor, hop, verify, liars)
    electors = _opened(anchor, hop.electors)
    roster = unbrief(hop.roster, ranked(anchor.run, anchor.iteration + 1, electors))
    _need((roster.run, roster.iteration) == (anchor.run, anchor.iteration + 1), "the record of another iteration")
    _need(_is_distinct(roster.next_electors), "electors that are named twice")
    _need(len(hop.hash) == 32, "a hash that is none")
    after = _followed if isinstance(hop, Next) else _founded
    return after(anchor._replace(electors=electors), hop, roster, verify, liars)


def follow(anchor: Anchor, hops: Iterable[Hop], verify: Verify, liars: int) -> Anchor:
    """The anchor after all these hops, or `WireError`."""
    for hop in hops:
        anchor = advanced(anchor, hop, verify, liars)
    return anchor


def _skipped(anchor: Anchor, hop: Skip, verify: Verify, liars: int) -> Anchor:
    said = hop.said
    _need(said.run == anchor.run, "a vote of another run")
    _need(said.lineage == anchor.lineage, "a vote in another lineage")
    _need(said.iteration > anchor.iteration + 1, "a vote that leads nowhere")
    shown = _shown(anchor, hop)
    size = hop.size if anchor.electors is None else len(anchor.electors)
    enough = bearable(size, liars) + 1
    _need(len(shown) >= enough, f"{len(shown)} signers that are known, but {enough} are needed")
    for signer in shown[:enough]:
        _need(verify(signer.elector.id, said.statement, signer.signature), f"a signature not {signer.elector.id}'s")
    return Anchor(anchor.run, said.iteration - 1, said.parent, said.lineage, said.electors, None, anchor.foundings)


def _shown(anchor: Anchor, hop: Skip) -> list[Signer]:
    """The signers that are electors of the anchor, each once."""
    _need(_is_distinct([signer.elector for signer in hop.signers]), "somebody who signs twice")
    if anchor.electors is not None:
        known = set(anchor.electors)
        return [signer for signer in hop.signers if signer.elector in known]
    leaves = {signer.place: leaf(signer.elector) for signer in hop.signers}
    _need(len(leaves) == len(hop.signers), "two signers in one place")
    _need(shown_root(hop.size, leaves, hop.nodes) == anchor.root, "signers that are no electors")
    return list(hop.signers)


def _opened(anchor: Anchor, written: tuple[Elector, ...]) -> tuple[Elector, ...]:
    """All electors of the anchor, as it knows them or as they are written out."""
    if anchor.electors is not None:
        return anchor.electors
    _need(_is_distinct(written), "electors that are named twice")
    _need(root_of(written) == anchor.root, "other electors than the anchor's")
    return written


def _followed(anchor: Anchor, hop: Next | Founded, roster: Roster, verify: Verify, liars: int) -> Anchor:
    _need(roster.lineage == anchor.lineage and not roster.electors, "the record of another lineage")
    voters = ranked(anchor.run, roster.iteration, anchor.electors or ())
    said = cast_on(anchor, roster, hop.certificate.attempt, hop.hash)
    _need(quorum(voters, signers(hop.certificate, said, voters, verify), liars), "no quorum")
    return Anchor.at(anchor.run, Record(roster, hop.hash), anchor.foundings)


def _founded(anchor: Anchor, hop: Next | Founded, roster: Roster, verify: Verify, liars: int) -> Anchor:
    new = roster.lineage != anchor.lineage and is_lineage_after(anchor.link, roster.lineage)
    _need(new and _is_distinct(roster.electors), "a founding of no new lineage")
    voters = ranked(anchor.run, roster.iteration, roster.electors)
    said = cast_on(anchor, roster, hop.certificate.attempt, hop.hash)
    signed = signers(hop.certificate, said, voters, verify)
    _need(quorum(voters, signed, liars), "no quorum")
    counted = _shared(anchor.electors, signed) if anchor.electors else len(signed)  # nobody was an elector before
    before = ranked(anchor.run, roster.iteration, anchor.electors or ())
    left = leavers(hop.certificate, anchor.run, anchor.link, before, verify) - set(signed)
    # Who said goodbye may be back: with the goodbyes of all others a liar alone would have more than they can sign.
    shown = len(left) if counted > bearable(len(before), liars) else 0
    founding = Founding(roster.iteration, counted, hop.hash, shown)
    return Anchor.at(anchor.run, Record(roster, hop.hash), (*anchor.foundings, founding))


def cast_on(anchor: Anchor, roster: Roster, attempt: int, digest: bytes) -> Cast:
    """The vote on top of an anchor for what came of a roster: see `cast`."""
    voters = root_of(roster.electors) if roster.electors else anchor.root
    return Cast(
        anchor.run, roster.iteration, attempt, roster.lineage, anchor.link, roster.digest, roster.root, voters, digest
    )  # fmt: skip


def _shared(electors: Iterable[Elector], signed: Iterable[PeerId]) -> int:
    """How many of these electors signed."""
    return len({elector.id for elector in electors} & set(signed))


def _is_distinct(electors: Sequence[Elector]) -> bool:
    return len({elector.id for elector in electors}) == len(electors)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise WireError(f"a proof with {what}")


# --- how hops are made ---


def hop_to(anchor: Anchor, record: Record, certificate: Certificate) -> Next | Founded:
    """The hop from an anchor whose electors are known to the record that follows it, for whoever knows them, too."""
    if record.roster is None or anchor.electors is None:
        raise ValueError("the beginning follows nothing, and a root alone does not say who voted")
    roster = brief(record.roster, ranked(anchor.run, record.iteration, anchor.electors))
    return (Founded if record.roster.electors else Next)(roster, record.hash, certificate)


def skip_by(said: Cast, signatures: Mapping[Elector, bytes], electors: Sequence[Elector], liars: int) -> Skip | None:
    """The skip by as many of these electors as are needed, for whoever knows their root; None: too few signed."""
    places = [at for at, elector in enumerate(electors) if elector in signatures][: bearable(len(electors), liars) + 1]
    if len(places) <= bearable(len(electors), liars):
        return None
    nodes = membership([leaf(elector) for elector in electors], places)
    signed = [Signer(electors[at], at, signatures[electors[at]]) for at in places]
    return Skip(said, tuple(signed), len(electors), nodes)


def for_knowing(hop: Hop) -> Hop:
    """The hop for whoever knows all electors of the anchor."""
    return replace(hop, size=0, nodes=()) if isinstance(hop, Skip) else replace(hop, electors=())


# --- as bytes; any bytes are survived ---


def encode_proof(hops: Iterable[Hop]) -> bytes:
    data: bytes = msgpack.packb([packed(hop) for hop in hops])
    return data


def decode_proof(data: bytes) -> list[Hop]:
    """The hops in these bytes, or `WireError`; nothing is proven yet."""
    return list(read_proof(data))


def read_proof(data: bytes) -> Iterator[Hop]:
    """The same, one by one: who finds one that does not hold need not read on."""
    rows = unpacked(data, PROOF_BYTES)
    _need(isinstance(rows, list) and len(rows) <= MOST_HOPS, "too many hops, or none")
    return map(unpacked_hop, rows)


def packed(hop: Hop) -> list[Any]:
    """A hop as plain values."""
    if isinstance(hop, Skip):
        signed = [[*signer.elector, signer.place, signer.signature] for signer in hop.signers]
        return ["skip", list(hop.said), signed, hop.size, b"".join(hop.nodes)]
    kind = "next" if isinstance(hop, Next) else "founded"
    return [kind, hop.roster, hop.hash, hop.certificate.encoded, hop.electors]


def unpacked(data: bytes, most: int) -> Any:
    """Plain values from bytes, or `WireError`."""
    _need(len(data) <= most, f"{len(data)} bytes")
    try:
        return msgpack.unpackb(data, raw=False, max_array_len=MOST_ELECTORS, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a proof: {type(error).__name__}") from None


def unpacked_hop(row: Any) -> Hop:
    """A hop from plain values, or `WireError`."""
    kind, *fields = unpacked_row(row, 5)
    if kind == "skip":
        said, signed, size, nodes = fields
        _need(is_count(size) and isinstance(nodes, bytes) and len(nodes) % 32 == 0, "bad nodes")
        cuts = tuple(nodes[at : at + 32] for at in range(0, len(nodes), 32))
        return Skip(_unpacked_cast(said), unpacked_signers(signed), size, cuts)
    roster, digest, certificate, electors = fields
    _need(kind in ("next", "founded"), "an unknown hop")
    _need(isinstance(roster, bytes) and is_hash(digest) and isinstance(certificate, bytes), "bad fields")
    whole = roster, digest, Certificate.decode(certificate), unpacked_electors(electors)
    return Next(*whole) if kind == "next" else Founded(*whole)


def unpacked_signers(rows: Any) -> tuple[Signer, ...]:
    """Signatures from plain values, or `WireError`."""
    found = []
    for row in unpacked_row(rows):
        peer, index, place, signature = unpacked_row(row, 4)
        _need(isinstance(signature, bytes) and len(signature) == SIGNATURE_BYTES and is_count(place), "bad signers")
        (elector,) = unpacked_electors([[peer, index]])
        found.append(Signer(elector, place, signature))
    return tuple(found)


def unpacked_electors(rows: Any) -> tuple[Elector, ...]:
    """Electors from plain values, or `WireError`."""
    found = [Elector(*unpacked_row(row, 2)) for row in unpacked_row(rows)]
    _need(all(_is_name(elector.id) and is_count(elector.index) for elector in found), "bad electors")
    return tuple(found)


def unpacked_row(row: Any, length: int | None = None) -> list[Any]:
    """A list of this length, or `WireError`."""
    _need(isinstance(row, list) and len(row) == (len(row) if length is None else length), "a bad row")
    return list(row)


def _unpacked_cast(row: Any) -> Cast:
    said = Cast(*unpacked_row(row, len(Cast._fields)))
    _need(_is_name(said.run) and is_count(said.iteration) and is_count(said.attempt), "a bad vote")
    _need(all(is_hash(part) for part in said[3:]), "a bad vote")
    return said


def is_hash(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == 32


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INDEX


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME
