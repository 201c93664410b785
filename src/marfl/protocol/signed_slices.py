"""What members sign of an exchange, and what of it is audited: rules, as pure functions, and one member's book.

A *claim* is a member's signature of "after so many rounds my partial sum has this hash, from here to there"; after no
round that is its own update. Every slice that is to be added up carries its sender's claim, and so does what an owner
hands out of its own sum. Whoever sends slices keeps one part of its vector itself: the hash of that part is in each of
its claims, so nobody can choose it afterwards.

A *part* of an iteration is what one member made of what it was sent: the sum that it owns in a round or, in `chunked`,
the vector that it put together from its group's sums and sent on. When an iteration is committed its hash names who
audits which parts (`auditors`). The auditor asks for the inputs, the owner signs which ones it used, and sums are
exact: if they do not give what the owner signed before, its own signatures are the proof (see `fraud`).

Hashes are BLAKE3, cell by cell, so that a proof shows one cell of a slice and not the slice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgpack
import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from marfl.errors import BadPayload
from marfl.net.base import PeerId
from marfl.plan.grid import Seat, plan
from marfl.plan.schedule import EXCHANGES, Slice, steps
from marfl.protocol.roster import Roster
from marfl.protocol.statements import SIGNATURE_BYTES, Verify, statement
from marfl.protocol.tensors import raw

CELL = 16_384  # values of a vector that are hashed as one, counted from its start
HASH_BYTES = 32
UNANSWERED = "did not answer an audit"

Sign: TypeAlias = Callable[[bytes], bytes]  # a statement: my signature, see `Net.sign`


# --- hashes ---


class CellHasher:
    """The hashes of a slice's cells, as its pieces come."""

    def __init__(self, start: int) -> None:
        self._at, self._cell, self._open = start, blake3(), False
        self._done: list[bytes] = []

    def add(self, value: Tensor) -> None:
        """The next values of the slice."""
        data, each, taken = raw(value), value.dtype.itemsize, 0
        while taken < value.numel():
            count = min(CELL - self._at % CELL, value.numel() - taken)
            self._cell.update(data[each * taken : each * (taken + count)])
            self._at, taken, self._open = self._at + count, taken + count, True
            if self._at % CELL == 0:
                self._close()

    def _close(self) -> None:
        self._done.append(self._cell.digest())
        self._cell, self._open = blake3(), False

    def finish(self) -> bytes:
        """All of them, joined."""
        if self._open:
            self._close()
        return b"".join(self._done)


def cells_of(start: int, value: Tensor) -> bytes:
    """The hashes of a slice's cells, joined; `start` is its place in the vector."""
    hasher = CellHasher(start)
    hasher.add(value)
    return hasher.finish()


def slice_hash(cells: bytes) -> bytes:
    """The hash of a slice."""
    return blake3(cells).digest()


# --- where slices are, by the plan ---


class GroupPlace(NamedTuple):
    """A member's group in one round, and the part of the vector that each of its core owns."""

    seat: Seat
    parts: tuple[Slice, ...]

    def of(self, rank: int) -> Slice:
        return self.parts[self.seat.core.index(rank)]


@lru_cache(maxsize=16)
def places(peers: int, group_size: int, exchange: str, length: int) -> tuple[dict[int, GroupPlace], ...]:
    """By round and rank. Cached: peers of one process share it."""
    rounds = [step for step in steps(plan(peers, group_size), exchange, length) if step.inward]
    return tuple(
        {rank: GroupPlace(seat, tuple(parts)) for seat, parts in step.cuts for rank in seat.members} for step in rounds
    )


def places_of(roster: Roster, length: int) -> tuple[dict[int, GroupPlace], ...]:
    return places(len(roster.members), roster.group_size, roster.exchange, length)


class Slot(NamedTuple):
    """What a claim is about: a member's partial sum after `done` rounds, and the part that it keeps of it."""

    done: int
    start: int
    stop: int
    kept: Slice | None = None


def signed_slot(roster: Roster, length: int, channel: str, round: int, ends: tuple[int, int]) -> Slot | None:
    """What is claimed by a slice from the first of these ranks to the second; None where nothing is."""
    source, dest = ends
    table = places_of(roster, length) if channel in ("reduce", "gather") else ()
    place = table[round].get(source) if round < len(table) else None
    if place is None:
        return None  # a spare takes the result: the committed hash says what it must be
    if channel == "reduce":
        keeps = source in place.seat.core and roster.exchange != "full"  # there it sends what it keeps
        return Slot(round, *place.of(dest), place.of(source) if keeps else None)
    last = round + 1 == len(table)
    if roster.exchange == "chunked" or (roster.exchange == "grid" and last):
        return Slot(round + 1, *place.of(source))
    return None


# --- parts, and who audits them ---


class AuditPart(NamedTuple):
    """What one member made in one round of what it was sent."""

    rank: int
    round: int
    passing: bool = False  # not its own sum, but what it passed on of its group's


@lru_cache(maxsize=16)
def parts_of(peers: int, group_size: int, exchange: str) -> tuple[AuditPart, ...]:
    """All parts of an iteration; what nobody else is sent is none."""
    tables = plan(peers, group_size).tables if exchange in EXCHANGES else ()
    found: list[AuditPart] = []
    for round, table in enumerate(tables):
        owners = [rank for seat in table for rank in seat.core]
        last = round + 1 == len(tables)
        if not (last and exchange == "full"):
            found += [AuditPart(rank, round) for rank in owners]
        if not last and exchange == "chunked":
            found += [AuditPart(rank, round, passing=True) for rank in owners]
    return tuple(found)


@lru_cache(maxsize=16)
def auditors(committed: bytes, roster: Roster, rate: float) -> dict[AuditPart, PeerId]:
    """For a share `rate` of all parts, by dice that the committed hash has thrown: who audits it. Never the owner."""
    peers = len(roster.members)
    parts = parts_of(peers, roster.group_size, roster.exchange)
    if rate <= 0 or peers < 2:
        return {}
    dice = hashlib.shake_256(statement("auditors", committed, roster.digest)).digest(16 * len(parts))
    rows = np.frombuffer(dice, dtype="<u8").reshape(len(parts), 2)
    found = {}
    for number in map(int, np.flatnonzero(rows[:, 0] / 2.0**64 < rate)):
        part, other = parts[number], int(rows[number, 1] % np.uint64(peers - 1))
        found[part] = roster.members[other + (other >= part.rank)].id
    return found


@dataclass(frozen=True)
class Stage:
    """A part as the plan has it: what goes into it, what comes out of it, and who was sent that."""

    level: int  # inputs are partial sums after so many rounds
    own: Slice  # the range that the member owns in the round
    sources: tuple[tuple[int, int, int], ...]  # (rank, start, stop) of the inputs, in the order in which they are used
    done: int  # the output is a partial sum after so many rounds
    outputs: tuple[Slice, ...]  # ranges of the output that are claimed apart
    holders: tuple[int, ...]  # ranks that were sent claims of the output
    peers: tuple[int, ...]  # ranks that were sent claims of the member's own input


def stage_of(roster: Roster, length: int, part: AuditPart) -> Stage | None:
    """What the plan says of a part; None where there is no such part, or nothing in it."""
    if part not in parts_of(len(roster.members), roster.group_size, roster.exchange):
        return None
    table = places_of(roster, length)
    place, level = table[part.round][part.rank], part.round + part.passing
    own, core = place.of(part.rank), place.seat.core
    if part.passing:
        sources = tuple((rank, *place.of(rank)) for rank in core)
    else:
        sources = tuple((rank, *own) for rank in place.seat.members)
    handed_out = not part.passing and (roster.exchange == "chunked" or part.round + 1 == len(table))
    after = place if handed_out else table[part.round + 1][part.rank]
    outputs = (own,) if handed_out else tuple(dict.fromkeys(after.parts))
    full = tuple(each for each in outputs if each[0] < each[1])
    others = tuple(tuple(rank for rank in seat.core if rank != part.rank) for seat in (after.seat, place.seat))
    return Stage(level, own, sources, part.round + 1, full, *others) if full and others[0] else None


def made(roster: Roster, stage: Stage, values: Sequence[Tensor], *, passing: bool) -> Tensor:
    """What comes out of these inputs, bit for bit: added in plan order, or put together."""
    if passing:
        return torch.cat(list(values))
    total = values[0]
    for value in values[1:]:
        total = total + value
    last = stage.done == len(plan(len(roster.members), roster.group_size).rounds)
    return total / roster.weight if last and roster.wire == "fp32" else total


# --- what is signed ---

Value: TypeAlias = bytes | str | int


class Signed(NamedTuple):
    """A statement in full, and somebody's signature of it."""

    kind: str
    parts: tuple[Value, ...]
    signature: bytes

    @property
    def statement(self) -> bytes:
        return statement(self.kind, *self.parts)


def claim_parts(roster: bytes, length: int, slot: Slot, digest: bytes, kept: bytes) -> tuple[Value, ...]:
    """A claim as it is signed: which roster's vector, which slice, its hash; and the part that the signer keeps."""
    more = (*slot.kept, kept) if slot.kept is not None else ()
    return (roster, length, slot.done, slot.start, slot.stop, digest, *more)


def input_parts(
    roster: bytes, length: int, part: AuditPart, own: Slice, used: Sequence[tuple[bytes, bytes]], at: int
) -> tuple[Value, ...]:
    """An owner's word on what it used: hash and claim of each input in plan order; `at` is the place of its own."""
    hashes = b"".join(digest for digest, _ in used)
    proofs: bytes = msgpack.packb([proof for _, proof in used])
    return (roster, length, part.round, int(part.passing), *own, used[at][0], hashes, proofs)


def claimed(roster: Roster, length: int, slot: Slot, digest: bytes, proof: bytes) -> Signed:
    """A claim from what travels of it: the hash of the kept part, where there is one, and the signature."""
    size = SIGNATURE_BYTES + (HASH_BYTES if slot.kept is not None else 0)
    if len(proof) != size:
        raise BadPayload("a slice that is not signed")
    kept, signature = proof[:-SIGNATURE_BYTES], proof[-SIGNATURE_BYTES:]
    return Signed("slice", claim_parts(roster.digest, length, slot, digest, kept), signature)


class Witnessed(NamedTuple):
    """A claim as its receiver kept it: with the hashes of its cells, which nobody signs."""

    signed: Signed
    cells: bytes


# --- what one member signs and keeps ---


class Testimony(NamedTuple):
    """An owner's word on the inputs of a part, and their values."""

    said: Signed
    values: list[Tensor]


class AuditBook:
    """One member's claims of one exchange, those that it was sent, and its inputs as long as somebody may ask."""

    def __init__(self, roster: Roster, rank: int, length: int, sign: Sign, verify: Verify) -> None:
        self.roster, self.rank, self.length = roster, rank, length
        self._sign, self._verify = sign, verify
        self._mine: dict[int, tuple[int, Tensor]] = {}  # rounds done: my partial sum then, and where it begins
        self._signed: dict[Slot, bytes] = {}  # what travels of each of my claims
        self._sent: dict[tuple[int, int], bytes] = {}  # the same by rank and rounds done
        self._kept: dict[int, bytes] = {}  # hash of the part that I keep of a partial sum
        self._coming: dict[tuple[int, int], CellHasher] = {}  # (rounds done, rank): a slice that is not whole
        self._values: dict[tuple[int, int], list[Tensor]] = {}
        self._claims: dict[tuple[int, int], tuple[bytes, Witnessed]] = {}  # by the same, also as it came
        self._unclaimed: dict[tuple[int, int], tuple[Slot, bytes]] = {}  # slices without one, and hashes of their cells

    # --- what I send ---

    def note(self, done: int, start: int, value: Tensor) -> None:
        """My partial sum after so many rounds, from `start` on; more of it may follow."""
        if done not in self._mine or value.numel() > self._mine[done][1].numel():
            self._mine[done] = start, value

    def prove(self, channel: str, round: int, dest: int, value: Tensor) -> bytes:
        """What goes with a slice to this rank; the partial sum that it is of was noted before."""
        slot = signed_slot(self.roster, self.length, channel, round, (self.rank, dest))
        if slot is None:
            return b""
        if slot not in self._signed:
            kept = self._kept_hash(slot)
            digest = slice_hash(cells_of(slot.start, value))
            parts = claim_parts(self.roster.digest, self.length, slot, digest, kept)
            self._signed[slot] = kept + self._sign(statement("slice", *parts))
        self._sent[dest, slot.done] = self._signed[slot]
        return self._signed[slot]

    def _kept_hash(self, slot: Slot) -> bytes:
        """Of the part that I keep of the partial sum that a slice is of."""
        if slot.kept is None:
            return b""
        if slot.done not in self._kept:
            start, mine = self._mine[slot.done]
            first, last = slot.kept
            self._kept[slot.done] = slice_hash(cells_of(first, mine[first - start : last - start]))
        return self._kept[slot.done]

    # --- what I am sent ---

    def take(self, channel: str, round: int, source: int, stop: int, value: Tensor, proof: bytes | None) -> None:
        """The next piece of a slice, which ends at `stop`; with the last one comes its claim.

        `BadPayload` unless its sender signed it. No claim (None) is known of what somebody else had to give.
        """
        slot = signed_slot(self.roster, self.length, channel, round, (source, self.rank))
        if slot is None:
            return
        key = slot.done, source
        hasher = self._coming.setdefault(key, CellHasher(slot.start))
        hasher.add(value)
        if channel == "reduce":
            self._values.setdefault(key, []).append(value)
        if stop < slot.stop:
            return
        self._unclaimed[key] = slot, self._coming.pop(key).finish()
        if proof is not None:
            self.complete(source, slot.done, proof)

    def complete(self, source: int, done: int, proof: bytes) -> None:
        """The claim of a slice that is here; `BadPayload` unless it is its sender's."""
        if (done, source) not in self._unclaimed:
            return
        slot, cells = self._unclaimed[done, source]
        claim = claimed(self.roster, self.length, slot, slice_hash(cells), proof)
        if not self._verify(self.roster.members[source].id, claim.statement, claim.signature):
            raise BadPayload("a slice with a signature that is not its sender's")
        self._claims[done, source] = proof, Witnessed(claim, cells)
        del self._unclaimed[done, source]

    def unclaimed(self, part: AuditPart) -> list[int]:
        """Whose inputs of a part came without a claim: others gave them, when their senders were late."""
        stage = stage_of(self.roster, self.length, part) if part.rank == self.rank else None
        return [rank for rank, *_ in stage.sources if (stage.level, rank) in self._unclaimed] if stage else []

    # --- what others may ask for ---

    def keep_only(self, parts: Iterable[AuditPart]) -> None:
        """Let go of the inputs of all other parts."""
        levels = {part.round + part.passing for part in parts}
        self._values = {key: values for key, values in self._values.items() if key[0] in levels}
        self._mine = {done: value for done, value in self._mine.items() if done in levels}
        self._coming.clear()

    def witnessed(self, rank: int, done: int) -> Witnessed | None:
        """What this rank claimed to me of its partial sum after so many rounds."""
        found = self._claims.get((done, rank))
        return found[1] if found else None

    def sent_to(self, dest: int, done: int) -> bytes:
        """What went with the slice that I sent this rank; nothing if I sent none."""
        return self._sent.get((dest, done), b"")

    def answer(self, part: AuditPart) -> Testimony | None:
        """My word on the inputs of a part, and the inputs; None where I do not have all of them, or no claim of one."""
        stage = stage_of(self.roster, self.length, part) if part.rank == self.rank else None
        if stage is None:
            return None
        values: list[Tensor] = []
        used: list[tuple[bytes, bytes]] = []
        for rank, start, stop in stage.sources:
            value, claim = self._input(stage.level, rank, (start, stop), passing=part.passing)
            if value is None or (claim is None and rank != self.rank):
                return None
            values.append(value)
            used.append((slice_hash(cells_of(start, value)), claim or b""))
        at = [source[0] for source in stage.sources].index(self.rank)
        parts = input_parts(self.roster.digest, self.length, part, stage.own, used, at)
        return Testimony(Signed("inputs", parts, self._sign(statement("inputs", *parts))), values)

    def _input(self, level: int, rank: int, where: Slice, *, passing: bool) -> tuple[Tensor | None, bytes | None]:
        """One input and its claim. What was passed on is in my own vector: it was put together from the others'."""
        claim = self._claims.get((level, rank))
        if rank == self.rank or passing:
            start, mine = self._mine.get(level, (0, None))
            value = mine[where[0] - start : where[1] - start] if mine is not None else None
        else:
            pieces = self._values.get((level, rank))
            value = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)) if pieces else None
        return value, claim[0] if claim and rank != self.rank else None
