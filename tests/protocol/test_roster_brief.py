"""Rosters made brief for peers that know the electors: nothing is lost, nothing else is accepted."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import WireError
from marfl.protocol.roster import (
    PIECE,
    Elector,
    Member,
    Record,
    Roster,
    brief,
    brief_record,
    decode_record,
    decode_roster,
    ranked,
    unbrief,
)

ROSTER = Roster("run", 7, 2, bytes(32), b"b" * 32, b"l" * 32, "grid", 5, (Member("solo", 0, 1.0),), (), (), ())
REASONS = ("did not answer", "brings no update")


def electors_of(peers: int) -> tuple[Elector, ...]:
    """So many electors, in the order in which they lead iteration 7."""
    return ranked("run", 7, tuple(Elector(f"peer{index}", index) for index in range(peers)))


@st.composite
def rosters(draw: st.DrawFn) -> tuple[Roster, tuple[Elector, ...]]:
    """Electors and strangers, in any order and any role, and the electors that sender and reader know."""
    electors = electors_of(draw(st.integers(0, 12)))
    strangers = [Elector(f"new{index}", 100 + index) for index in range(draw(st.integers(1, 3)))]
    people = draw(st.permutations([*electors, *strangers]))
    weights = draw(st.lists(st.sampled_from([1.0, 0.0, -0.0, 0.1]), min_size=len(people), max_size=len(people)))
    cut, last = sorted((draw(st.integers(1, len(people))), draw(st.integers(1, len(people)))))
    roster = replace(
        ROSTER,
        members=tuple(Member(*who, weight) for who, weight in zip(people[:cut], weights, strict=False)),
        witnesses=tuple(people[cut:last]),
        electors=tuple(people[:last]) if draw(st.booleans()) else (),
        omitted=tuple((who.id, draw(st.sampled_from(REASONS))) for who in people[last:]),
        piece=draw(st.sampled_from([PIECE, 8, 2**18])),
    )
    return roster, electors


@given(rosters())
def test_a_brief_roster_comes_back_whole(pair):
    roster, electors = pair
    read = unbrief(brief(roster, electors), electors)
    assert read == roster
    assert read.digest == roster.digest  # also tells -0.0 from 0.0


@given(rosters())
def test_a_brief_record_comes_back_whole(pair):
    roster, electors = pair
    record = Record(roster, b"h" * 32)
    assert decode_record(brief_record(record, electors), electors) == record
    assert decode_record(record.encoded) == record


def test_the_usual_piece_is_not_written_and_one_without_room_for_a_value_is_refused():
    fields = msgpack.unpackb(ROSTER.encoded)
    assert len(fields) == 15
    assert decode_roster(msgpack.packb([*fields, 2**18])) == replace(ROSTER, piece=2**18)
    for bad in (7, 0, -8, 8.0, True, None, "8"):
        with pytest.raises(WireError):
            decode_roster(msgpack.packb([*fields, bad]))


@pytest.mark.parametrize("peers", [10, 100, 10_000])
def test_a_roster_of_all_electors_is_as_brief_for_any_number_of_them(peers):
    electors = electors_of(peers)
    roster = replace(ROSTER, members=tuple(Member(*elector, 1.0) for elector in electors))
    assert len(brief(roster, electors)) < 200


def test_a_reader_that_knows_other_electors_refuses():
    electors = electors_of(5)
    roster = replace(ROSTER, members=tuple(Member(*elector, 1.0) for elector in electors))
    for others in ((), electors[:4], electors[::-1], electors_of(6)[1:]):
        with pytest.raises(WireError):
            unbrief(brief(roster, electors), others)


def test_whoever_knows_no_electors_can_read_a_founding_roster():
    electors = electors_of(5)
    people = tuple(Member(*elector, 1.0) for elector in electors)
    roster = replace(ROSTER, members=people, electors=electors)
    assert unbrief(brief(roster, electors), ()) == roster


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(data):
    with pytest.raises(WireError):
        unbrief(data, electors_of(3))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**60) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


@given(st.integers(0, 14), JUNK)
def test_a_spoilt_field_is_refused(place, junk):
    electors = electors_of(4)
    roster = replace(ROSTER, members=tuple(Member(*elector, 1.0) for elector in electors))
    values = msgpack.unpackb(brief(roster, electors))
    same = msgpack.packb(values[place]) == msgpack.packb(junk)
    values[place] = junk
    if not same:
        with pytest.raises(WireError):
            unbrief(msgpack.packb(values), electors)


def test_a_few_bytes_never_become_a_huge_roster():
    electors = electors_of(1000)
    values = msgpack.unpackb(brief(replace(ROSTER, members=(Member("solo", 0, 1.0),)), electors))
    everybody = [[0, 1000]] * 1000
    for place, bomb in {9: everybody, 10: [[1.0, 10**15]], 13: everybody, 14: [["gone", 10**15]]}.items():
        spoilt = [*values[:place], bomb, *values[place + 1 :]]
        with pytest.raises(WireError, match=r"places|columns"):
            unbrief(msgpack.packb(spoilt), electors)
