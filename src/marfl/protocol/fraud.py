"""Proofs that somebody lied: what they are made of, how an auditor makes one, and how everybody checks it.

All of it is pure functions. A proof is what the culprit signed itself, and where that is not enough, the values behind
it: nobody can be proven a liar by what others say, whoever they are, and however many.

    two words on one thing      signatures of one peer that contradict each other: slices, votes, seals or acks; a vote
                                and a later ack that tells of none
    an input that nobody sent   an owner says that it used an input which its sender has not signed
    a wrong sum                 the inputs that an owner says it used do not give what it handed out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from marfl.errors import WireError
from marfl.net.base import Buffer, PeerId
from marfl.plan.schedule import EXCHANGES, Slice
from marfl.protocol.roster import Roster, decode_roster
from marfl.protocol.signed_slices import (
    CELL,
    HASH_BYTES,
    AuditPart,
    Signed,
    Stage,
    Value,
    Witnessed,
    cells_of,
    claimed,
    is_audited,
    made,
    signed_slot,
    slice_hash,
    stage_of,
    value_type,
)
from marfl.protocol.statements import Verify
from marfl.protocol.tensors import raw, vector_from

MOST_SAID = 8  # statements in a proof
LIED = "was caught lying"

# --- contradictions ---

_SHAPES: dict[str, tuple[type, ...]] = {  # which types the parts of a statement have
    "slice": (bytes, int, int),
    "inputs": (bytes, int, int, int, int, int, bytes, bytes, bytes),
    "vote": (str, int, int, bytes, bytes, bytes, bytes, bytes, bytes),
    "seal": (str, int, bytes, bytes, int, bytes, bytes),
    "promise": (str, int, bytes, bytes, int, int, bytes, bytes, bool, int, bytes),
}
DECISIONS = ("vote", "seal", "promise")  # they begin with the run
_RANGE = (int, int, bytes)  # what follows in a slice, once for each part: from where to where, and its hash


def said_of(signed: Signed) -> dict[tuple[Value, ...], tuple[Value, ...]]:
    """What a statement says, by what it is about: an honest peer never says two things about one. `WireError`: nothing.

    A slice's hash, by roster and range; in votes, seals and promises what is said, by decision and attempt.
    """
    ranges = (len(signed.parts) - 3) // 3 if signed.kind == "slice" else 0
    shape = (*_SHAPES.get(signed.kind, ()), *_RANGE * ranges)
    if signed.kind not in _SHAPES or tuple(map(type, signed.parts)) != shape:
        raise WireError(f"a {signed.kind!r:.30} that says nothing")
    parts = signed.parts
    if signed.kind in DECISIONS:  # by decision and attempt
        return {(signed.kind, *parts[:5]): parts[5:]}
    if signed.kind == "inputs":
        roster, length, round, passing, start, stop, own = parts[:7]
        return {("slice", roster, length, int(round) + int(passing), start, stop): (own,)}
    return {("slice", *parts[:3], start, stop): (digest,) for start, stop, digest in ranges_of(signed)}


def ranges_of(signed: Signed) -> list[tuple[int, int, bytes]]:
    """The parts of a claim: from where to where, and the hash."""
    parts: tuple[Any, ...] = signed.parts
    return [(parts[at], parts[at + 1], parts[at + 2]) for at in range(3, len(parts), 3)]


def contradicts(one: Signed, other: Signed) -> bool:
    """Whether these two cannot both be signed by one honest peer."""
    first, second = said_of(one), said_of(other)
    if (one.kind, other.kind) == ("vote", "promise"):
        return _hides(one, other)
    return any(second.get(about, value) != value for about, value in first.items())


def _hides(vote: Signed, promise: Signed) -> bool:
    """Whether a promise of a later attempt does not tell of this vote, nor of one after it.

    Who has voted tells of it with every promise, and who has promised never votes in an earlier attempt.
    """
    run, iteration, attempt, lineage, parent, roster, _, _, digest = vote.parts
    *about, promised, voted_in, of, result = promise.parts[:8]
    if about != [run, iteration, parent, lineage] or int(promised) <= int(attempt):
        return False
    return int(voted_in) < int(attempt) or (voted_in == attempt and (of, result) != (roster, digest))


# --- proofs ---


class ShownCells(NamedTuple):
    """Cells of one input: the hashes of all, and the values of those that the proof is about."""

    cells: bytes
    data: bytes


@dataclass(frozen=True)
class Proof:
    """That somebody lied: what it signed, and where that is not enough, the values behind it."""

    kind: str  # one of `CHECKS`
    culprit: PeerId
    said: tuple[Signed, ...]
    roster: bytes = b""
    where: Slice = (0, 0)  # of a wrong sum: which part of the output
    first: int = 0  # cell of it that is shown
    last: int = 0  # one past the last
    inputs: tuple[ShownCells, ...] = ()  # of a wrong sum, as the plan has them
    output: bytes = b""  # hashes of the cells of the output; empty where only the hash of the whole is known

    @property
    def encoded(self) -> bytes:
        data: bytes = msgpack.packb([
            self.kind, self.culprit, self.said, self.roster, self.where, self.first, self.last, self.inputs, self.output
        ])  # fmt: skip
        return data

    @classmethod
    def decode(cls, data: Buffer) -> Proof:
        """The proof in these bytes, or `WireError`; nothing is checked yet."""
        try:
            kind, culprit, said, roster, ends, *rest = msgpack.unpackb(data, raw=False, max_ext_len=0)
            (start, stop), (first, last, inputs, output) = ends, rest
            signed = tuple(Signed(word, tuple(parts), signature) for word, parts, signature in said)
            shown = tuple(ShownCells(cells, values) for cells, values in inputs)
        except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise WireError(f"not a proof: {type(error).__name__}") from None
        texts = (kind, culprit, *(each.kind for each in signed))
        blobs = (roster, output, *(each.signature for each in signed), *(part for each in shown for part in each))
        good = all(type(text) is str for text in texts) and all(type(blob) is bytes for blob in blobs)
        numbers = all(type(each) is int for each in (start, stop, first, last))
        if not good or not numbers or not 0 < len(signed) <= MOST_SAID:
            raise WireError("not a proof: bad fields")
        return cls(kind, culprit, signed, roster, (start, stop), first, last, shown, output)

    @property
    def iteration(self) -> int:
        """In which it lied; 0 where the proof does not say."""
        return decode_roster(self.roster).iteration if self.roster else 0

    @property
    def run(self) -> str:
        """Of which run it is; empty where the proof does not say."""
        if self.roster:
            return decode_roster(self.roster).run
        said = self.said[0]
        return str(said.parts[0]) if said.kind in DECISIONS and said.parts else ""

    @property
    def reason(self) -> str:
        """What is said of the culprit, wherever it is named."""
        when = f" in iteration {self.iteration}" if self.roster else ""
        return f"{LIED}: {self.kind}{when}"


def check_fraud(proof: Proof, verify: Verify) -> PeerId:
    """Who is proven to have lied; `WireError` when this proves nothing. It depends on nothing that a peer believes."""
    if proof.kind not in CHECKS:
        raise WireError(f"a proof of {proof.kind!r:.30}")
    for signed in proof.said:
        said_of(signed)  # what says nothing proves nothing
        if not verify(proof.culprit, signed.statement, signed.signature):
            raise WireError("a proof with a signature that is not its culprit's")
    if proof.roster and {each.parts[0] for each in proof.said} != {_roster(proof).digest}:
        raise WireError("a proof of other rosters than it names")
    CHECKS[proof.kind](proof, verify)
    return proof.culprit


def _roster(proof: Proof) -> Roster:
    return decode_roster(proof.roster)


def _check_contradiction(proof: Proof, _: Verify) -> None:
    if len(proof.said) != 2 or not contradicts(*proof.said):
        raise WireError("statements that do not contradict each other")


class SaidInputs(NamedTuple):
    """An owner's signed word on the inputs of a part, read by the plan."""

    roster: Roster
    part: AuditPart
    stage: Stage
    length: int
    hashes: tuple[bytes, ...]
    proofs: tuple[bytes, ...]


def read_inputs(culprit: PeerId, roster: Roster, signed: Signed) -> SaidInputs:
    """What an owner says that it used; `WireError` where the plan knows no such part, or it says too little."""
    if signed.kind != "inputs":
        raise WireError("no word on inputs")
    said_of(signed)
    digest, length, round, passing, start, stop, own, joined, packed = signed.parts
    rank = roster.ranks.get(culprit)
    planned = roster.exchange in EXCHANGES and roster.group_size >= 2 and is_audited(roster)
    if digest != roster.digest or rank is None or not planned or passing not in (0, 1):
        raise WireError("inputs of another roster")
    part = AuditPart(rank, int(round), bool(passing))
    stage = stage_of(roster, int(length), part) if 0 <= int(length) < 2**53 and part.round >= 0 else None
    if stage is None or (start, stop) != stage.own:
        raise WireError("inputs of no part of the plan")
    assert isinstance(joined, bytes)
    assert isinstance(packed, bytes)
    hashes = tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
    proofs = _unpacked(packed)
    if not len(hashes) == len(proofs) == len(stage.sources) or len(joined) % HASH_BYTES:
        raise WireError("inputs that are not the plan's")
    if hashes[[source[0] for source in stage.sources].index(rank)] != own:
        raise WireError("inputs that are not its own")
    return SaidInputs(roster, part, stage, int(length), hashes, proofs)


def _unpacked(packed: bytes) -> tuple[bytes, ...]:
    try:
        found = msgpack.unpackb(packed, raw=False, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a list of claims: {type(error).__name__}") from None
    if not isinstance(found, list) or not all(type(each) is bytes for each in found):
        raise WireError("not a list of claims")
    return tuple(found)


def claim_of(word: SaidInputs, number: int) -> Signed:
    """The claim of an input as its sender must have signed it; `WireError` for one of another form."""
    rank, start, stop = word.stage.sources[number]
    channel, ends = ("gather", (rank, word.part.rank)) if word.part.passing else ("reduce", (rank, word.part.rank))
    slot = signed_slot(word.roster, word.length, channel, word.part.round, ends)
    if slot is None or (slot.start, slot.stop) != (start, stop):
        raise WireError("a claim of a slice that is not sent")
    return claimed(word.roster, word.length, slot, word.hashes[number], word.proofs[number])


def is_signed(word: SaidInputs, number: int, verify: Verify) -> bool:
    """Whether an input was signed by its sender. An owner's own needs no claim: its word is one."""
    rank = word.stage.sources[number][0]
    if rank == word.part.rank:
        return True
    try:
        claim = claim_of(word, number)
    except WireError:
        return False
    return verify(word.roster.members[rank].id, claim.statement, claim.signature)


def _check_forged(proof: Proof, verify: Verify) -> None:
    """An owner vouches for an input that its sender has not signed: it checks each when it comes."""
    word = read_inputs(proof.culprit, _roster(proof), proof.said[0])
    if all(is_signed(word, number, verify) for number in range(len(word.hashes))):
        raise WireError("inputs that their senders have signed")


def _check_sum(proof: Proof, _: Verify) -> None:
    """The inputs that an owner says it used do not give what it signed."""
    if len(proof.said) != 2:
        raise WireError("a wrong sum is two statements: on the inputs, and on the output")
    word, output = read_inputs(proof.culprit, _roster(proof), proof.said[0]), proof.said[1]
    (start, stop), digest = proof.where, _output(word, output, proof.where)
    if proof.output and slice_hash(proof.output) != digest:
        raise WireError("cells of another output")
    begin, end = (max(start, proof.first * CELL), min(stop, proof.last * CELL)) if proof.output else (start, stop)
    if not (proof.first * CELL <= begin < end <= proof.last * CELL) or len(proof.inputs) != len(word.hashes):
        raise WireError("cells that are not the output's")
    values = [_shown(word, number, each, (begin, end)) for number, each in enumerate(proof.inputs)]
    result = made(word.roster, word.stage, values, passing=word.part.passing)
    cells = cells_of(begin, result)
    from_cell = (begin // CELL - start // CELL) * HASH_BYTES
    right = proof.output[from_cell : from_cell + len(cells)] if proof.output else digest
    if (cells if proof.output else slice_hash(cells)) == right:
        raise WireError("a sum that is right")


def _output(word: SaidInputs, signed: Signed, wanted: Slice) -> bytes:
    """The hash of a part of the output, as it is claimed."""
    if signed.kind != "slice" or signed.parts[1] != word.length or signed.parts[2] != word.stage.done:
        raise WireError("a claim that is not of this output")
    found = [digest for start, stop, digest in ranges_of(signed) if (start, stop) == wanted]
    if not found or wanted not in word.stage.outputs:
        raise WireError("a claim that is not of this output")
    return found[0]


def _shown(word: SaidInputs, number: int, shown: ShownCells, wanted: Slice) -> Tensor:
    """An input's values in a range, from the cells that cover it; `WireError` unless they are those it was signed with.

    Where inputs are put together, and not added, this one may have none there.
    """
    _, start, stop = word.stage.sources[number]
    dtype = value_type(word.roster)
    begin, end = max(start, wanted[0]), min(stop, wanted[1])
    if begin >= end:
        return torch.empty(0, dtype=dtype)
    if slice_hash(shown.cells) != word.hashes[number]:
        raise WireError("cells of another input")
    first, last = max(start, begin // CELL * CELL), min(stop, -(-end // CELL) * CELL)
    value = vector_from(shown.data, last - first, dtype)
    at = (first // CELL - start // CELL) * HASH_BYTES
    cells = cells_of(first, value)
    if shown.cells[at : at + len(cells)] != cells:
        raise WireError("values of another input")
    return value[begin - first : end - first]


CONTRADICTION, FORGED, WRONG_SUM = "two words on one thing", "an input that nobody sent", "a wrong sum"
CHECKS: dict[str, Callable[[Proof, Verify], None]] = {
    CONTRADICTION: _check_contradiction, FORGED: _check_forged, WRONG_SUM: _check_sum,
}  # fmt: skip


# --- what an auditor makes of what it is shown ---


def examined(
    culprit: PeerId, said: Signed, roster: Roster, values: Sequence[Tensor], seen: Sequence[Witnessed], verify: Verify
) -> Proof | None:
    """What is wrong with a part: its owner's word on the inputs, their values, and its claims as others were sent them.

    None: nothing is. `WireError` when its inputs are not shown: then nothing is proven.
    """
    if not verify(culprit, said.statement, said.signature):
        raise WireError("a word on inputs that is not signed")
    word = read_inputs(culprit, roster, said)
    cells = [cells_of(start, value) for (_, start, _), value in zip(word.stage.sources, values, strict=True)]
    if tuple(map(slice_hash, cells)) != word.hashes:
        raise WireError("values of other inputs")
    theirs = [each for each in seen if verify(culprit, each.signed.statement, each.signed.signature)]
    if not all(is_signed(word, number, verify) for number in range(len(values))):
        return Proof(FORGED, culprit, (said,), roster.encoded)
    for one, other in combinations([said, *(each.signed for each in theirs)], 2):
        if contradicts(one, other):
            return Proof(CONTRADICTION, culprit, (one, other), roster.encoded)
    found = _wrong_part(word, made(roster, word.stage, values, passing=word.part.passing), theirs)
    if found is None:
        return None
    claim, where, first, last = found
    shown = [
        _show(source, hashes, value, (first * CELL, last * CELL))
        for source, hashes, value in zip(word.stage.sources, cells, values, strict=True)
    ]
    said_both = (said, claim.signed)
    return Proof(WRONG_SUM, culprit, said_both, roster.encoded, where, first, last, tuple(shown), claim.cells)


class WrongPart(NamedTuple):
    """A claim that is not what the inputs give: of which part, and the cells that show it."""

    claim: Witnessed
    where: Slice
    first: int
    last: int


def _wrong_part(word: SaidInputs, output: Tensor, claims: Iterable[Witnessed]) -> WrongPart | None:
    """What is wrong with an owner's claims of its output; None where nothing is. One cell, where that can be shown."""
    base = 0 if word.part.passing else word.stage.own[0]
    right = {(a, b): cells_of(a, output[a - base : b - base]) for a, b in word.stage.outputs}
    whole: WrongPart | None = None
    for claim in claims:
        signed, cells = claim
        if signed.kind != "slice" or signed.parts[1] != word.length or signed.parts[2] != word.stage.done:
            continue
        for start, stop, digest in ranges_of(signed):
            where = start, stop
            if where not in right or slice_hash(right[where]) == digest:
                continue
            if slice_hash(cells) == digest:
                first = start // CELL + _differ_at(cells, right[where])
                return WrongPart(claim, where, first, first + 1)
            # whoever was sent this claim has only the hash of this part: its owner keeps it, or sent it to another
            whole = WrongPart(Witnessed(signed, b""), where, start // CELL, -(-stop // CELL))
    return whole


def _differ_at(cells: bytes, right: bytes) -> int:
    """The first cell whose hash is another."""
    return next(at for at in range(len(cells)) if cells[at] != right[at]) // HASH_BYTES


def _show(source: tuple[int, int, int], cells: bytes, value: Tensor, wanted: Slice) -> ShownCells:
    """The cells of an input that cover a range."""
    _, start, stop = source
    first, last = max(start, wanted[0]), min(stop, wanted[1])
    return ShownCells(cells, bytes(raw(value[first - start : last - start])) if first < last else b"")
