"""Rosters and records as bytes: written out, or by places for whoever knows the electors. Any bytes are survived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgpack

from marfl.errors import WireError
from marfl.protocol.fixed import WIRES
from marfl.protocol.roster import LEAST_PIECE, PIECE, Elector, Member, Record, Roster

MAX_INDEX = 2**53


@lru_cache(maxsize=64)
def decode_roster(data: bytes) -> Roster:
    """The roster in these bytes, or `WireError`. Cached: peers of one process decode a roster once."""
    return _checked(_list(data, 15, 16))


def _checked(values: list[Any]) -> Roster:
    run, iteration, attempt, lineage, base, layout, exchange, group_size, members, witnesses, electors, *rest = values
    omitted, wire, masks, circle, *unusual = rest
    piece = unusual[0] if unusual else PIECE
    _need(isinstance(run, str) and isinstance(exchange, str) and wire in WIRES, "names")
    _need(all(_is_int(v) for v in (iteration, attempt, group_size, piece)) and piece >= LEAST_PIECE, "numbers")
    _need(all(isinstance(v, bytes) and len(v) == 32 for v in (lineage, base, layout)), "hashes")
    _need(isinstance(masks, bytes) and len(masks) == (32 if wire == "masked" else 0), "masks")
    _need(all(isinstance(peer, str) for peer in _rows(circle)), "circle")
    _need(isinstance(members, list) and len(members) > 0, "members")
    people = tuple(Member(*_row(row, (str, int, float))) for row in members)
    _need(len({m.id for m in people}) == len(people), "a peer twice")
    _need(all(0 <= m.weight < float("inf") for m in people), "weights")
    gone = [_row(row, (str, str)) for row in _rows(omitted)]
    return Roster(
        run, iteration, attempt, lineage, base, layout, exchange, group_size, people,
        _electors(witnesses), _electors(electors), tuple((peer, why) for peer, why in gone), wire, masks,
        tuple(circle), piece,
    )  # fmt: skip


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
    told = _list(data, 18, 19)
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
    roster, digest, mass, since, founders = _list(data, 5)
    _need(isinstance(roster, bytes) and isinstance(digest, bytes) and len(digest) == 32, "record")
    _need(_is_int(mass) and _is_int(since), "mass")
    people = _electors(founders)
    if not roster:
        return Record(None, digest, mass, since, people)
    return Record(decode_roster(roster) if electors is None else unbrief(roster, electors), digest, mass, since, people)


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
