"""The wire: round trips, and a decoder that survives any bytes with a clear error."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import BadPayload, WireError
from marfl.net.base import Parcel
from marfl.protocol.roster import Elector, Member, Record, Roster
from marfl.protocol.roster_code import decode_record, decode_roster
from marfl.protocol.wire import (
    HASH,
    MAX_HEADER,
    SCHEMAS,
    VERSION,
    pack,
    tensor_from,
    tensor_parcel,
    unpack,
    vector_from,
)

DIGEST, LAYOUT = b"d" * 32, b"l" * 32


def values(kind: Any) -> st.SearchStrategy[Any]:
    """What a field of this kind may hold."""
    plain = {
        HASH: st.binary(min_size=32, max_size=32),
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
        list: st.lists(st.text(max_size=5), max_size=4),
        dict: st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    }
    if isinstance(kind, str) and kind.startswith("?"):
        return st.none() | values(HASH if kind == "?hash" else bytes)
    return plain[kind]


@st.composite
def messages(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(SCHEMAS)))
    return name, {field: draw(values(kind)) for field, kind in SCHEMAS[name].items()}


@given(messages())
def test_every_message_survives_the_wire(message: tuple[str, dict[str, Any]]) -> None:
    name, fields = message
    assert unpack(name, pack(name, **fields)) == fields


@given(st.binary(max_size=200), st.sampled_from(sorted(SCHEMAS)))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes, name: str) -> None:
    try:
        fields = unpack(name, data)
    except WireError:
        return
    assert fields.keys() == SCHEMAS[name].keys()


@given(messages(), st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(
    message: tuple[str, dict[str, Any]], data: st.DataObject
) -> None:
    name, fields = message
    raw = bytearray(pack(name, **fields))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for other in (name, data.draw(st.sampled_from(sorted(SCHEMAS)))):
        try:
            assert unpack(other, cut).keys() == SCHEMAS[other].keys()
        except WireError:
            continue


@pytest.mark.parametrize(
    "header",
    [
        msgpack.packb([VERSION + 1, "ok", {"status": "x"}]),
        msgpack.packb([True, "ok", {"status": "x"}]),
        msgpack.packb([VERSION, "ready", {"status": "x"}]),
        msgpack.packb([VERSION, "ok", {"status": 3}]),
        msgpack.packb([VERSION, "ok", {"status": "x", "more": 1}]),
        msgpack.packb([VERSION, "ok", ["status"]]),
        msgpack.packb({"status": "x"}),
        msgpack.packb(msgpack.ExtType(5, b"x" * 10)),
        b"\x91" * 5000,  # lists in lists in lists
        b"\xdd\xff\xff\xff\xff",  # a list of four billion items
        b"\xc6\xff\xff\xff\xff",  # four gigabytes of bytes
        b"",
    ],
)
def test_what_a_schema_does_not_allow_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        unpack("ok", header)


def test_a_header_over_the_limit_is_not_even_parsed() -> None:
    with pytest.raises(WireError, match="at most"):
        unpack("ok", bytes(MAX_HEADER + 1))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50))
def test_a_slice_survives_the_wire_bit_for_bit(numbers: list[float]) -> None:
    vector = torch.tensor(numbers, dtype=torch.float32)
    parcel = tensor_parcel(vector, DIGEST, LAYOUT)
    back = tensor_from(parcel, digest=DIGEST, layout=LAYOUT, count=len(numbers))
    assert torch.equal(back.view(torch.int32), vector.view(torch.int32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_slice_that_is_not_finite_is_refused(bad: float) -> None:
    vector = torch.tensor([1.0, bad, 2.0])
    with pytest.raises(BadPayload, match="NaN or infinity"):
        tensor_from(tensor_parcel(vector, DIGEST, LAYOUT), digest=DIGEST, layout=LAYOUT, count=3)


def test_a_slice_of_another_roster_layout_or_length_is_refused() -> None:
    parcel = tensor_parcel(torch.ones(3), DIGEST, LAYOUT)
    for wanted in (
        {"digest": b"x" * 32, "layout": LAYOUT, "count": 3},
        {"digest": DIGEST, "layout": b"x" * 32, "count": 3},
        {"digest": DIGEST, "layout": LAYOUT, "count": 4},
    ):
        with pytest.raises(BadPayload):
            tensor_from(parcel, **wanted)
    with pytest.raises(BadPayload):
        vector_from(parcel.payload[:-1], 3)
    with pytest.raises(WireError):
        tensor_from(Parcel(b"\xc1", parcel.payload), digest=DIGEST, layout=LAYOUT, count=3)


def roster(members: int = 3) -> Roster:
    people = tuple(Member(f"p{i}", i, 1.0 + i) for i in range(members))
    hashes = {"lineage": b"n" * 32, "base": b"b" * 32, "layout": LAYOUT}
    return Roster(
        "run", 4, 2, **hashes, exchange="grid", group_size=5, members=people,
        witnesses=(Elector("w", 9),), electors=(), omitted=(("gone", "did not answer"),),
    )  # fmt: skip


def test_rosters_and_records_survive_the_wire_with_their_digest() -> None:
    one = roster()
    again = decode_roster(one.encoded)
    assert again == one
    assert again.digest == one.digest
    record = Record(one, b"h" * 32, 17, 3)
    assert decode_record(record.encoded) == record
    beginning = Record(None, b"h" * 32, 0, 0, (Elector("a", 0),))
    assert decode_record(beginning.encoded) == beginning


@given(st.data())
def test_damaged_rosters_and_records_are_refused_or_well_formed(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([roster().encoded, Record(roster(), b"h" * 32, 17, 3).encoded])))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_roster, decode_record):
        try:
            found = decode(bytes(raw))
        except WireError:
            continue
        assert found.encoded
