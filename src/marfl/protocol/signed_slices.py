"""What members sign of an exchange, and what of it is audited: rules, as pure functions, and one member's book.

A *claim* is a member's signature of "after so many rounds my partial sum has these hashes, part by part"; after no
round that is its own update. It is signed once for all to whom parts of it are sent: every slice that is to be added up
carries it, and so does what an owner hands out of its own sum. Whoever sends slices keeps one part of its vector
itself: the hash of that part is in the claim as well, so nobody can choose it afterwards.

A sender hashes what it sends, once. A receiver keeps the claim as it came and the values as they came, without a copy,
until the iteration is committed: it hashes and verifies what an audit then needs, and before that one slice in
`SPOT_CHECKS`, by dice that nobody else knows (all of them where everything is audited).

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
from itertools import pairwise
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
from marfl.protocol.fixed_point import DTYPES
from marfl.protocol.roster import Roster
from marfl.protocol.statements import SIGNATURE_BYTES, Verify, statement
from marfl.protocol.tensors import raw

CELL = 16_384  # values of a vector that are hashed as one, counted from its start
HASH_BYTES = 32
SPOT_CHECKS = 16  # one claim of so many is verified as it comes: who signs what is not its own must not feel safe
UNANSWERED = "did not answer an audit"
UNSIGNED = "did not sign a slice"

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
    data, each, size = raw(value), value.dtype.itemsize, value.numel()
    ends = [*range(CELL - start % CELL, size, CELL), size] if size else []
    return b"".join(blake3(data[each * a : each * b]).digest() for a, b in pairwise([0, *ends]))


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
    """What a slice is of: a member's partial sum after `done` rounds, claimed in these parts; it is one of them."""

    done: int
    parts: tuple[Slice, ...]
    at: int = 0

    @property
    def start(self) -> int:
        return self.parts[self.at][0]

    @property
    def stop(self) -> int:
        return self.parts[self.at][1]


def signed_slot(roster: Roster, length: int, channel: str, round: int, ends: tuple[int, int]) -> Slot | None:
    """What is claimed by a slice from the first of these ranks to the second; None where nothing is."""
    source, dest = ends
    table = places_of(roster, length) if channel in ("reduce", "gather") else ()
    place = table[round].get(source) if round < len(table) else None
    if place is None:
        return None  # a spare takes the result: the committed hash says what it must be
    if channel == "reduce":
        if roster.exchange == "full":
            return Slot(round, place.parts[:1])  # everybody is sent the same
        return Slot(round, place.parts, place.seat.core.index(dest))
    last = round + 1 == len(table)
    if roster.exchange == "chunked" or (roster.exchange == "grid" and last):
        return Slot(round + 1, (place.of(source),))
    return None


def is_audited(roster: Roster) -> bool:
    """Whether sums of such values can be added up again: not those of a few bits, which are rounded."""
    return roster.wire in DTYPES


def value_type(roster: Roster) -> torch.dtype:
    """What the values of a slice are, on their way and in sums."""
    return DTYPES[roster.wire]


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


@lru_cache(maxsize=1024)
def stage_of(roster: Roster, length: int, part: AuditPart) -> Stage | None:
    """What the plan says of a part; None where there is no such part, or nothing in it. Cached as `places`."""
    if part not in parts_of(len(roster.members), roster.group_size, roster.exchange):
        return None
    table = places_of(roster, length)
    place, level = table[part.round][part.rank], part.round + part.passing
    own, core = place.of(part.rank), place.seat.core
    if part.passing:
        given = ((rank, *place.of(rank)) for rank in core)
        sources = tuple(each for each in given if each[1] < each[2] or each[0] == part.rank)  # nothing is not sent
    else:
        sources = tuple((rank, *own) for rank in place.seat.members)
    handed_out = not part.passing and (roster.exchange == "chunked" or part.round + 1 == len(table))
    after = place if handed_out else table[part.round + 1][part.rank]
    outputs = (own,) if handed_out else tuple(dict.fromkeys(after.parts))
    sent = tuple(each for each in outputs if each[0] < each[1])
    others = tuple(tuple(rank for rank in seat.core if rank != part.rank) for seat in (after.seat, place.seat))
    return Stage(level, own, sources, part.round + 1, sent, *others) if sent and others[0] else None


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


def claim_parts(roster: bytes, length: int, slot: Slot, hashes: Sequence[bytes]) -> tuple[Value, ...]:
    """A claim as it is signed: which roster's vector, after how many rounds; then each part's range and hash."""
    rows = ((*part, digest) for part, digest in zip(slot.parts, hashes, strict=True))
    return (roster, length, slot.done, *(value for row in rows for value in row))


def input_parts(
    roster: bytes, length: int, part: AuditPart, own: Slice, used: Sequence[tuple[bytes, bytes]], at: int
) -> tuple[Value, ...]:
    """An owner's word on what it used: hash and claim of each input in plan order; `at` is the place of its own."""
    hashes = b"".join(digest for digest, _ in used)
    proofs: bytes = msgpack.packb([proof for _, proof in used])
    return (roster, length, part.round, int(part.passing), *own, used[at][0], hashes, proofs)


def proof_of(slot: Slot, hashes: Sequence[bytes], signature: bytes) -> bytes:
    """What travels of a claim with one of its slices: the hashes of the others, and the signature."""
    return b"".join(digest for at, digest in enumerate(hashes) if at != slot.at) + signature


def claimed(roster: Roster, length: int, slot: Slot, digest: bytes, proof: bytes) -> Signed:
    """A claim from what travels of it and the hash of the slice that it came with."""
    if not has_form(slot, proof):
        raise BadPayload("a slice that is not signed")
    others = [proof[at : at + HASH_BYTES] for at in range(0, len(proof) - SIGNATURE_BYTES, HASH_BYTES)]
    hashes = [*others[: slot.at], digest, *others[slot.at :]]
    return Signed("slice", claim_parts(roster.digest, length, slot, hashes), proof[-SIGNATURE_BYTES:])


def has_form(slot: Slot, proof: bytes) -> bool:
    """Whether these bytes can be what travels of a claim."""
    return len(proof) == SIGNATURE_BYTES + HASH_BYTES * (len(slot.parts) - 1)


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
    """One member's claims of one exchange, those that it was sent, and its inputs as long as somebody may ask.

    `rate` is the share of parts that will be audited.
    """

    def __init__(self, roster: Roster, rank: int, length: int, sign: Sign, verify: Verify, rate: float) -> None:
        self.roster, self.rank, self.length = roster, rank, length
        self._sign, self._verify = sign, verify
        self._checked = max(rate, 1 / SPOT_CHECKS)  # share of claims that are verified as they come
        self._dice = b""  # by which they are chosen: nobody else can make this signature
        self._rounds = len(places_of(roster, length))
        self.closed = False  # the iteration is committed: what is gone by now cannot be signed any more
        self._mine: dict[int, tuple[int, Tensor]] = {}  # rounds done: my partial sum then, and where it begins
        self._signed: dict[tuple[int, tuple[Slice, ...]], tuple[list[bytes], bytes]] = {}  # my claims
        self._sent: dict[tuple[int, int], bytes] = {}  # what travelled of them, by rank and rounds done
        # What I was sent, by (rounds done, rank):
        self._coming: dict[tuple[int, int], CellHasher] = {}  # of slices that are not whole, and will not be here
        self._values: dict[tuple[int, int], list[Tensor]] = {}
        self._slots: dict[tuple[int, int], Slot] = {}  # of whole slices
        self._proofs: dict[tuple[int, int], bytes] = {}  # what came with them; nothing where others gave them
        self._cells: dict[tuple[int, int], bytes] = {}  # hashes, where they were needed so far
        self._witnessed: dict[tuple[int, int], Witnessed] = {}

    # --- what I send ---

    def note(self, done: int, start: int, value: Tensor) -> None:
        """My partial sum after so many rounds, from `start` on; more of it may follow. The result is no input."""
        known = self._mine.get(done)
        if done < self._rounds and (known is None or value.numel() > known[1].numel()):
            self._mine[done] = start, value

    def prove(self, channel: str, round: int, dest: int, value: Tensor) -> bytes:
        """What goes with a slice to this rank; the partial sum that it is of was noted before."""
        slot = signed_slot(self.roster, self.length, channel, round, (self.rank, dest))
        if slot is None:
            return b""
        start, whole = (slot.start, value) if channel == "gather" else self._mine[slot.done]
        hashes, signature = self._claim(slot, start, whole)
        self._sent[dest, slot.done] = proof_of(slot, hashes, signature)
        return self._sent[dest, slot.done]

    def _claim(self, slot: Slot, start: int, whole: Tensor) -> tuple[list[bytes], bytes]:
        """My claim of a partial sum in these parts, made once."""
        key = slot.done, slot.parts
        if key not in self._signed:
            hashes = [slice_hash(cells_of(a, whole[a - start : b - start])) for a, b in slot.parts]
            parts = claim_parts(self.roster.digest, self.length, slot, hashes)
            self._signed[key] = hashes, self._sign(statement("slice", *parts))
        return self._signed[key]

    # --- what I am sent ---

    def take(self, channel: str, round: int, source: int, stop: int, value: Tensor, proof: bytes | None) -> None:
        """The next piece of a slice, which ends at `stop`; with the last one comes its claim.

        `BadPayload` where there is none, or where it is verified at once and not its sender's. No claim (None) is known
        of what somebody else had to give.
        """
        slot = signed_slot(self.roster, self.length, channel, round, (source, self.rank))
        if slot is None:
            return
        key = slot.done, source
        if channel == "reduce":
            self._values.setdefault(key, []).append(value)
        else:  # it is written into the result, which may not stay
            self._coming.setdefault(key, CellHasher(slot.start)).add(value)
        if stop < slot.stop:
            return
        self._slots[key] = slot
        if channel == "gather":
            self._cells[key] = self._coming.pop(key).finish()
        if proof is None:
            return
        if not has_form(slot, proof):
            raise BadPayload("a slice that is not signed")
        self._proofs[key] = proof
        if self._is_checked(channel, key) and not self.is_claimed(source, slot.done):
            raise BadPayload("a slice with a signature that is not its sender's")

    def _is_checked(self, channel: str, key: tuple[int, int]) -> bool:
        """Whether my dice have me verify this claim now."""
        if self._checked >= 1:
            return True
        self._dice = self._dice or self._sign(statement("spot checks", self.roster.digest))
        throw = blake3(self._dice + f"{channel} {key}".encode()).digest(8)
        return int.from_bytes(throw) < self._checked * 2.0**64

    def is_claimed(self, source: int, done: int) -> bool:
        """Whether a slice came with its sender's own claim of it."""
        found = self._witness((done, source))
        if found is None:
            return False
        return self._verify(self.roster.members[source].id, found.signed.statement, found.signed.signature)

    def complete(self, source: int, done: int, proof: bytes) -> None:
        """Another claim of a slice that is here: its sender was asked for it."""
        self._witnessed.pop((done, source), None)
        self._proofs[done, source] = proof

    def unclaimed(self, part: AuditPart) -> list[int]:
        """Whose inputs of a part came without their senders' claims: others gave them, or somebody does not sign."""
        stage = stage_of(self.roster, self.length, part) if part.rank == self.rank else None
        sources = [rank for rank, *_ in stage.sources if rank != self.rank] if stage else []
        return [rank for rank in sources if stage is not None and not self.is_claimed(rank, stage.level)]

    def _witness(self, key: tuple[int, int]) -> Witnessed | None:
        """The claim of a slice that I was sent, hashed when it is asked for; nobody has verified it by that."""
        slot, proof = self._slots.get(key), self._proofs.get(key)
        if key not in self._witnessed and slot is not None and proof is not None and has_form(slot, proof):
            cells = self._hashed(key, slot)
            if cells is not None:
                self._witnessed[key] = Witnessed(
                    claimed(self.roster, self.length, slot, slice_hash(cells), proof), cells
                )
        return self._witnessed.get(key)

    def _hashed(self, key: tuple[int, int], slot: Slot) -> bytes | None:
        if key not in self._cells and key in self._values:
            hasher = CellHasher(slot.start)
            for value in self._values[key]:
                hasher.add(value)
            self._cells[key] = hasher.finish()
        return self._cells.get(key)

    # --- what others may ask for ---

    def keep_for(self, audited: Iterable[AuditPart]) -> list[tuple[int, int]]:
        """The iteration is committed, and these parts are audited: let go of all that nobody will ask for.

        What I was sent of them is hashed and verified now; (rounds done, rank) of what its sender has not signed.
        """
        self.closed = True
        stages = [(part, stage) for part in audited if (stage := stage_of(self.roster, self.length, part))]
        asked = {
            (done, part.rank)
            for part, stage in stages
            for done, ranks in ((stage.level, stage.peers), (stage.done, stage.holders))
            if self.rank in ranks
        }
        for key in asked & self._slots.keys():
            self._hashed(key, self._slots[key])
        self.keep_only(part for part, _ in stages if part.rank == self.rank)
        return [(done, rank) for done, rank in sorted(asked & self._slots.keys()) if not self.is_claimed(rank, done)]

    def keep_only(self, parts: Iterable[AuditPart]) -> None:
        """Let go of the inputs of all other parts than these of mine; what stays is no part of a larger vector."""
        mine: dict[int, tuple[int, Tensor]] = {}
        levels: set[int] = set()
        for part in sorted(parts):
            level = part.round + part.passing
            start, stop = places_of(self.roster, self.length)[part.round][part.rank].of(part.rank)
            if part.passing and level in self._mine:
                mine[level] = self._mine[level]
            elif level in self._mine and (level not in mine or mine[level][1].numel() < stop - start):
                begin, whole = self._mine[level]
                mine[level] = start, whole[start - begin : stop - begin].clone()
            levels |= set() if part.passing else {level}
        self._mine = mine
        self._values = {key: values for key, values in self._values.items() if key[0] in levels}
        self._coming.clear()

    def witnessed(self, rank: int, done: int) -> Witnessed | None:
        """What this rank claimed to me of its partial sum after so many rounds."""
        return self._witness((done, rank))

    def sent_to(self, dest: int, done: int) -> bytes:
        """What went with the slice that I sent this rank; nothing if I sent none."""
        return self._sent.get((dest, done), b"")

    def answer(self, part: AuditPart) -> Testimony | None:
        """My word on the inputs of a part, and the inputs; None where I do not have all of them and their claims."""
        stage = stage_of(self.roster, self.length, part) if part.rank == self.rank else None
        if stage is None or self.unclaimed(part):
            return None
        values: list[Tensor] = []
        used: list[tuple[bytes, bytes]] = []
        for rank, start, stop in stage.sources:
            value = self._input(stage.level, rank, (start, stop), passing=part.passing)
            if value is None:
                return None
            values.append(value)
            claim = self._proofs[stage.level, rank] if rank != self.rank else b""
            used.append((slice_hash(cells_of(start, value)), claim))
        at = [source[0] for source in stage.sources].index(self.rank)
        parts = input_parts(self.roster.digest, self.length, part, stage.own, used, at)
        return Testimony(Signed("inputs", parts, self._sign(statement("inputs", *parts))), values)

    def _input(self, level: int, rank: int, where: Slice, *, passing: bool) -> Tensor | None:
        """One input. What was passed on is in my own vector: it was put together from the others'."""
        if rank == self.rank or passing:
            start, mine = self._mine.get(level, (0, None))
            return mine[where[0] - start : where[1] - start] if mine is not None else None
        pieces = self._values.get((level, rank))
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)) if pieces else None
