"""Who takes part: the roster of an attempt, the record of a committed iteration, and both as bytes.

The value that an iteration decides is (roster, hash of the new state). Its *electors* are all who voted for the last
committed roster (Paxos: the acceptors); the rules of the decision are in `ballot`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import msgpack

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.plan.grid import order
from marfl.protocol.fixed_point import WIRES, is_masked
from marfl.protocol.messages import MAX_INDEX

NO_HASH = bytes(32)
PIECE = 2**20  # bytes of a slice that travel as one message
LEAST_PIECE = 8  # one value, however it travels
VOID = "none"  # the exchange of a roster that lets its iteration go by: nothing is summed, the model stays as it is
MOST_DIGITS = 16  # of an iteration; Python refuses to read thousands of them
BACK = "back to "  # and an iteration: nothing is summed, and the state is again what it was after that one


class Member(NamedTuple):
    """A peer as rosters name it."""

    id: PeerId
    index: int  # type: ignore[assignment]  # its shard, its random streams, its place; tuple.index is never needed here
    weight: float


class Elector(NamedTuple):
    """A peer that may vote."""

    id: PeerId
    index: int  # type: ignore[assignment]


class Staying(NamedTuple):
    """An elector that a roster does not name, and that votes after it all the same: see `seniority.staying`."""

    id: PeerId
    index: int  # type: ignore[assignment]
    missed_by: PeerId  # the leader that was the first to leave it out


UNUSUAL: dict[str, Any] = {"piece": PIECE, "juniors": (), "ages": (), "stays": ()}  # a roster's last fields, as always


@dataclass(frozen=True)
class Roster:
    """Exactly who is summed in one attempt, in plan order, and how. Its digest is in every data message."""

    run: str
    iteration: int
    attempt: int
    lineage: bytes
    base: bytes  # hash of the state that every member starts from
    layout: bytes
    exchange: str
    group_size: int
    members: tuple[Member, ...]
    witnesses: tuple[Elector, ...]  # voted, but bring no data
    electors: tuple[Elector, ...]  # only when the roster founds a lineage: who decides from here on
    omitted: tuple[tuple[PeerId, str], ...]  # who was known and is not in, and why
    wire: str = "fp32"  # how values travel: see `fixed_point`
    masks: bytes = b""  # which masks hide the values: the epoch, see `marfl.secagg.session`
    circle: tuple[PeerId, ...] = ()  # everybody in that epoch, where some of them are not members any more
    piece: int = PIECE  # longer slices travel in pieces of so many bytes
    juniors: tuple[tuple[PeerId, int], ...] = ()  # who does not vote yet, and to how many commits it contributed
    ages: tuple[tuple[PeerId, int], ...] = ()  # whose update is late, and by how many iterations
    stays: tuple[Staying, ...] = ()  # who is missing and votes next all the same

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def encoded(self) -> bytes:
        told = [getattr(self, field.name) for field in fields(self)[: -len(UNUSUAL)]]
        data: bytes = msgpack.packb([*told, *self.unusual], use_bin_type=True)
        return data

    @property
    def unusual(self) -> tuple[Any, ...]:
        """The last fields, which are written only where they are not what they always are."""
        told = tuple(getattr(self, name) for name in UNUSUAL)
        last = max((at for at, usual in enumerate(UNUSUAL.values(), 1) if told[at - 1] != usual), default=0)
        return told[:last]

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encoded).digest()

    @property
    def restores(self) -> int | None:
        """The iteration whose state is taken back; None where a roster does nothing of the kind."""
        number = self.exchange.removeprefix(BACK)
        is_number = number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS
        return int(number) if number != self.exchange and is_number else None

    @property
    def is_sum(self) -> bool:
        """Whether its members sum anything."""
        return self.exchange != VOID and self.restores is None

    @property
    def masked(self) -> bool:
        """Whether values travel under masks."""
        return is_masked(self.wire)

    @property
    def part(self) -> int:
        """What the tags of this roster's messages carry of its digest."""
        return int.from_bytes(self.digest[:6])

    @cached_property
    def ranks(self) -> dict[PeerId, int]:
        return {member.id: rank for rank, member in enumerate(self.members)}

    @cached_property
    def ids(self) -> tuple[PeerId, ...]:
        return tuple(member.id for member in self.members)

    @cached_property
    def weight(self) -> float:
        """The sum of the weights, added in plan order so that every peer gets the same bits."""
        total = 0.0
        for member in self.members:
            total += member.weight
        return total

    @cached_property
    def contributions(self) -> int:
        """How many updates are summed: members that only help to aggregate bring none."""
        return sum(member.weight > 0 for member in self.members)

    @cached_property
    def party(self) -> tuple[Elector, ...]:
        """Everybody who acked it, whether it brings something or not."""
        return (*(Elector(m.id, m.index) for m in self.members), *self.witnesses)

    @cached_property
    def voters(self) -> tuple[Elector, ...]:
        """Whoever acked this roster, is no junior (see `seniority`), and so votes in the next iteration."""
        young = {peer for peer, _ in self.juniors}
        return tuple(elector for elector in self.party if elector.id not in young) if young else self.party

    @cached_property
    def next_electors(self) -> tuple[Elector, ...]:
        """Who votes in the next iteration, whether it was there in this one or not."""
        return (*self.voters, *(Elector(one.id, one.index) for one in self.stays)) if self.stays else self.voters

    @cached_property
    def root(self) -> bytes:
        """One hash over the electors of the next iteration, of which single ones can be shown: see `tree_root`."""
        return root_of(self.next_electors)


def root_of(electors: Iterable[Elector]) -> bytes:
    """One hash over electors, in this order."""
    return tree_root([leaf(elector) for elector in electors])


def leaf(elector: Elector) -> bytes:
    """An elector as a leaf of a tree of hashes."""
    return hashlib.sha256(b"\x00" + f"{elector.index}:{elector.id}".encode()).digest()


def tree_root(leaves: Sequence[bytes]) -> bytes:
    """The root of a tree of hashes (Merkle 1987): a node is the hash of its two children; an odd one moves up.

    The number of leaves is hashed in on top: how many liars are borne depends on it.
    """
    row = list(leaves)
    while len(row) > 1:
        row = [_parent(row[at : at + 2]) for at in range(0, len(row), 2)]
    return _topped(len(leaves), row[0]) if row else NO_HASH


def membership(leaves: Sequence[bytes], places: Iterable[int]) -> tuple[bytes, ...]:
    """The nodes that somebody needs who knows the leaves at these places alone: see `shown_root`."""
    row, known, nodes = list(leaves), set(places), []
    while len(row) > 1:
        beside = sorted({at ^ 1 for at in known} - known)
        nodes += [row[at] for at in beside if at < len(row)]
        row = [_parent(row[at : at + 2]) for at in range(0, len(row), 2)]
        known = {at // 2 for at in known}
    return tuple(nodes)


def shown_root(size: int, leaves: Mapping[int, bytes], nodes: Sequence[bytes]) -> bytes:
    """The root of a tree of so many leaves, from some of them, by place, and the nodes beside them. Or `WireError`."""
    _need(bool(leaves) and all(0 <= at < size for at in leaves), "places")
    row, rest = dict(leaves), list(reversed(nodes))
    count = size
    while count > 1:
        beside = sorted({at ^ 1 for at in row} - row.keys())
        beside = [at for at in beside if at < count]
        _need(len(beside) <= len(rest), "nodes")
        row |= {at: rest.pop() for at in beside}
        row = {at // 2: _parent([row[each] for each in (at, at + 1) if each in row]) for at in row if at % 2 == 0}
        count = (count + 1) // 2
    _need(not rest, "nodes")
    return _topped(size, row[0])


def _parent(children: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"\x01" + b"".join(children)).digest() if len(children) == 2 else children[0]


def _topped(size: int, top: bytes) -> bytes:
    return hashlib.sha256(b"\x02" + size.to_bytes(8) + top).digest()


class DecisionId(NamedTuple):
    """Which decision is meant: rosters of another one are none of its business."""

    run: str
    iteration: int
    base: bytes  # hash of the state before
    lineage: bytes


@dataclass(frozen=True)
class Record:
    """One committed iteration: what a peer must know to vote in the next one, and to check a state it is given."""

    roster: Roster | None  # None: the beginning
    hash: bytes  # of the state after it
    founders: tuple[Elector, ...] = ()  # the electors at the beginning, where they are known

    @property
    def iteration(self) -> int:
        return self.roster.iteration if self.roster else 0

    @property
    def lineage(self) -> bytes:
        return self.roster.lineage if self.roster else NO_HASH

    @property
    def electors(self) -> tuple[Elector, ...]:
        return self.roster.next_electors if self.roster else self.founders

    @property
    def root(self) -> bytes:
        """Of its electors: who votes next names it."""
        return self.roster.root if self.roster else root_of(self.founders)

    def after(self, roster: Roster, digest: bytes) -> Record:
        """The record of this roster's commit on top of this one."""
        return Record(roster, digest)

    def is_later(self, iteration: int, digest: bytes) -> bool:
        """Whether this record seems to be ahead of that commit. A hint who shows the other: nobody moves for it."""
        return (-self.iteration, self.hash) < (-iteration, digest)

    @cached_property
    def encoded(self) -> bytes:
        return self.packed(self.roster.encoded if self.roster else b"")

    def packed(self, roster: bytes) -> bytes:
        """The record with its roster in these bytes (see `brief_record`)."""
        data: bytes = msgpack.packb([roster, self.hash, self.founders])
        return data


def given_up(mine: Mapping[int, bytes], theirs: Mapping[int, bytes]) -> int:
    """How many of my commits another history does not have, from the first that it has otherwise, or ends before.

    What its donor does not tell is taken to be the same; the beginning is no commit.
    """
    last = max(theirs, default=0)
    parted = [at for at, digest in mine.items() if at > 0 and (at > last or theirs.get(at, digest) != digest)]
    return max(mine) - min(parted) + 1 if parted else 0


@lru_cache(maxsize=16)
def ranked(run: str, iteration: int, electors: tuple[Elector, ...]) -> tuple[Elector, ...]:
    """Electors in the order in which they lead the attempts of an iteration (also the order of plans).

    Cached: peers of one process share the tuple, or a thousand of them would hold a million electors.
    """
    return tuple(Elector(peer, index) for index, peer in order(run, iteration, [(e.index, e.id) for e in electors]))


# --- as bytes: written out, or by places for whoever knows the electors; any bytes are survived ---


@lru_cache(maxsize=64)
def decode_roster(data: bytes) -> Roster:
    """The roster in these bytes, or `WireError`. Cached: peers of one process decode a roster once."""
    return _checked(_list(data, 15, 16, 17, 18, 19))


def _checked(values: list[Any]) -> Roster:
    run, iteration, attempt, lineage, base, layout, exchange, group_size, members, witnesses, electors, *rest = values
    omitted, wire, masks, circle, *unusual = rest
    usual: list[Any] = [PIECE, [], [], []]
    piece, young, late, kept = [*unusual, *usual[len(unusual) :]]
    _need(isinstance(run, str) and isinstance(exchange, str) and wire in WIRES, "names")
    _need(all(_is_int(v) for v in (iteration, attempt, group_size, piece)) and piece >= LEAST_PIECE, "numbers")
    _need(all(isinstance(v, bytes) and len(v) == 32 for v in (lineage, base, layout)), "hashes")
    _need(isinstance(masks, bytes) and len(masks) == (32 if is_masked(wire) else 0), "masks")
    _need(all(isinstance(peer, str) for peer in _rows(circle)), "circle")
    _need(isinstance(members, list) and len(members) > 0, "members")
    people = tuple(Member(*_row(row, (str, int, float))) for row in members)
    _need(len({m.id for m in people}) == len(people), "a peer twice")
    _need(all(0 <= m.weight < float("inf") for m in people), "weights")
    gone = [_row(row, (str, str)) for row in _rows(omitted)]
    others, founders = _electors(witnesses), _electors(electors)
    for voters in ([*(member.id for member in people), *(one.id for one in others)], [one.id for one in founders]):
        _need(len({*voters}) == len(voters), "voters: one is named twice")
    party = {*(member.id for member in people), *(one.id for one in others)}
    juniors, ages = _counts(young, "juniors"), _counts(late, "ages")
    _need({peer for peer, _ in juniors} < party and {peer for peer, _ in ages} <= party, "juniors and ages")
    stays = tuple(Staying(*_row(row, (str, int, str))) for row in _rows(kept))
    named = {*party, *(one.id for one in stays)}
    _need(len(named) == len(party) + len(stays), "voters: one is there and missing")
    return Roster(
        run, iteration, attempt, lineage, base, layout, exchange, group_size, people,
        others, founders, tuple((peer, why) for peer, why in gone), wire, masks,
        tuple(circle), piece, juniors, ages, stays,
    )  # fmt: skip


def _counts(rows: Any, what: str) -> tuple[tuple[PeerId, int], ...]:
    """Peers with a number each, none of them twice."""
    found = tuple((peer, count) for peer, count in (_row(row, (str, int)) for row in _rows(rows)))
    _need(len({peer for peer, _ in found}) == len(found), what)
    return found


@lru_cache(maxsize=16)
def brief(roster: Roster, electors: tuple[Elector, ...]) -> bytes:
    """The roster for peers that know these electors, in the order in which they lead: `unbrief` gives it back.

    Everybody is sent the roster, so written out it would cost bytes with the square of the swarm. Here runs of electors
    are named by their places; a roster has the same order, so one of all electors is a single run. Whoever is asked to
    found a lineage knows no electors yet: such a roster is written out.
    """
    known = () if roster.electors else electors
    place = {elector: at for at, elector in enumerate(known)}
    people = [Elector(member.id, member.index) for member in roster.members]
    gone = [peer for peer, _ in roster.omitted]
    data: bytes = msgpack.packb([
        roster.digest, *(getattr(roster, field.name) for field in fields(roster)[:8]),
        _runs(people, place), _repeats([member.weight for member in roster.members]),
        _runs(roster.witnesses, place), roster.electors,
        _runs(gone, {elector.id: at for elector, at in place.items()}), _repeats([why for _, why in roster.omitted]),
        roster.wire, roster.masks, roster.circle, *roster.unusual,
    ])  # fmt: skip
    return data


@lru_cache(maxsize=16)
def unbrief(data: bytes, electors: tuple[Elector, ...]) -> Roster:
    """The roster in these bytes, or `WireError`: also when the sender knows other electors, by the roster's digest."""
    told = _list(data, 18, 19, 20, 21, 22)
    digest, *head = told[:9]
    members, weights, witnesses, founders, gone, reasons, *rest = told[9:]
    known = () if founders else electors
    people = _spelt_out(members, [list(elector) for elector in known])
    rows = [[*_row(who, (str, int)), weight] for who, weight in zip(people, _column(weights, len(people)), strict=True)]
    others = _spelt_out(witnesses, [list(elector) for elector in known])
    missing = _spelt_out(gone, [elector.id for elector in known])
    omitted = [list(row) for row in zip(missing, _column(reasons, len(missing)), strict=True)]
    roster = _checked([*head, rows, others, founders, omitted, *rest])
    _need(roster.digest == digest, "places")
    return roster


def _runs(people: Iterable[Any], place: Mapping[Any, int]) -> list[Any]:
    """People as they are, but for runs of those who have a place: [first, one past the last]."""
    rows: list[Any] = []
    end = -1
    for person in people:
        at = place.get(person)
        if at is None:
            rows.append(person)
        elif at == end:
            rows[-1][1] = at + 1
        else:
            rows.append([at, at + 1])
        end = -1 if at is None else at + 1
    return rows


def _spelt_out(rows: Any, known: Sequence[Any]) -> list[Any]:
    """Undo `_runs`: whatever is not a run is returned as it came, unchecked. Nobody can be named twice."""
    people: list[Any] = []
    for row in _rows(rows):
        if isinstance(row, list) and len(row) == 2 and _is_int(row[0]) and _is_int(row[1]):
            _need(row[0] < row[1] <= len(known) and len(people) + row[1] - row[0] <= len(known) + len(rows), "places")
            people += known[row[0] : row[1]]
        else:
            people.append(row)
    return people


def _repeats(column: Sequence[Any]) -> list[tuple[Any, int]]:
    """A column as (value, how often in a row); compared by repr, because -0.0 is not 0.0."""
    groups = (list(same) for _, same in groupby(column, key=repr))
    return [(same[0], len(same)) for same in groups]


def _column(rows: Any, length: int) -> list[Any]:
    """Undo `_repeats`: exactly so many values, unchecked."""
    pairs = [_row(row, (object, int)) for row in _rows(rows)]
    _need(sum(count for _, count in pairs) == length, "columns")
    return [value for value, count in pairs for _ in range(count)]


def brief_record(record: Record, electors: tuple[Elector, ...]) -> bytes:
    """The record for whoever knows the electors of its iteration."""
    return record.packed(brief(record.roster, electors) if record.roster else b"")


def decode_record(data: bytes, electors: tuple[Elector, ...] | None = None) -> Record:
    """The record in these bytes, or `WireError`. With electors, one that was made brief for those who know them."""
    roster, digest, *_, founders = _list(data, 3, 5)  # files of earlier versions have two numbers more
    _need(isinstance(roster, bytes) and isinstance(digest, bytes) and len(digest) == 32, "record")
    people = _electors(founders)
    if not roster:
        return Record(None, digest, people)
    _need(not people, "founders")  # a roster names its electors
    return Record(decode_roster(roster) if electors is None else unbrief(roster, electors), digest)


def _list(data: bytes, *lengths: int) -> list[Any]:
    try:
        values = msgpack.unpackb(data, raw=False, max_array_len=200_000, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a roster or record: {type(error).__name__}") from None
    _need(isinstance(values, list) and len(values) in lengths, "length")
    return list(values)


def _electors(rows: Any) -> tuple[Elector, ...]:
    return tuple(Elector(*_row(row, (str, int))) for row in _rows(rows))


def _rows(rows: Any) -> list[Any]:
    _need(isinstance(rows, list), "rows")
    return list(rows)


def _row(row: Any, kinds: tuple[type, ...]) -> list[Any]:
    _need(isinstance(row, list) and len(row) == len(kinds), "row")
    for value, kind in zip(row, kinds, strict=True):
        _need(_is_int(value) if kind is int else isinstance(value, kind), "row value")
    return list(row)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INDEX


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise WireError(f"a roster or record with bad {what}")
