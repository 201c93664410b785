"""The wire: round trips, and a decoder that survives any bytes with a clear error."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import BadPayload, WireError
from marfl.net.base import Parcel
from marfl.protocol import messages as wire
from marfl.protocol.messages import MAX_HEADER, VERSION, Ack, Between, Committed, Complaint, Hash, Message, Ok, OneOf
from marfl.protocol.roster import Elector, Member, Record, Roster, decode_record, decode_roster
from marfl.protocol.tensors import tensor_from, tensor_parcel, vector_from
from stages.forgery import an_ack, forged

DIGEST, LAYOUT = b"d" * 32, b"l" * 32


KINDS = [kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, Message)]
KINDS.remove(Message)

HASHES = st.binary(min_size=32, max_size=32)
NAMES = st.text(max_size=5)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    Hash: HASHES,
    int: st.integers(-(2**63), 2**63),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    bytes | None: st.none() | st.binary(max_size=40),
    Hash | None: st.none() | HASHES,
    tuple[str, ...]: st.lists(NAMES, max_size=4).map(tuple),
    tuple[int, ...]: st.lists(st.integers(-(2**63), 2**63), max_size=4).map(tuple),
    tuple[Complaint, ...]: st.lists(st.builds(Complaint, NAMES, NAMES, st.booleans()), max_size=3).map(tuple),
    tuple[Committed, ...]: st.lists(st.builds(Committed, st.integers(0, 99), HASHES), max_size=3).map(tuple),
    dict[str, float]: st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """What a field of this type may hold."""
    rule = next(iter(getattr(kind, "__metadata__", ())), None)
    if isinstance(rule, OneOf):
        return st.sampled_from(rule.words)
    if isinstance(rule, Between) and kind.__origin__ is float:
        return st.floats(rule.least, allow_nan=False, allow_infinity=False)
    if isinstance(rule, Between):
        return st.integers(int(rule.least), int(rule.most))
    return PLAIN[kind]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(KINDS))
    types = get_type_hints(kind, include_extras=True)
    return kind(**{field.name: draw(values(types[field.name])) for field in fields(kind)})


@given(messages())
def test_every_message_survives_the_wire(message: Message) -> None:
    assert type(message).decode(message.encoded) == message


@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes, kind: type[Message]) -> None:
    try:
        found = kind.decode(data)
    except WireError:
        return
    assert isinstance(found, kind)


@given(messages(), st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(message: Message, data: st.DataObject) -> None:
    raw = bytearray(message.encoded)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for kind in (type(message), data.draw(st.sampled_from(KINDS))):
        try:
            assert isinstance(kind.decode(cut), kind)
        except WireError:
            continue


def test_a_message_is_a_version_a_name_and_its_fields_by_name() -> None:
    """These bytes are what peers of other releases read and write."""
    assert msgpack.unpackb(Ok("fine").encoded) == [1, "ok", {"status": "fine"}]
    ruling = wire.Ruling("commit", b"record", ("a", "b"))
    assert msgpack.unpackb(ruling.encoded) == [
        1, "verdict", {"status": "commit", "record": b"record", "holders": ["a", "b"], "certificate": b""}
    ]  # fmt: skip
    names = {kind.name() for kind in KINDS}
    assert names == {
        "ready", "noted", "head", "propose", "ack", "seal", "ok", "finish", "verdict", "endorse", "decided",
        "overtaken", "vouch",
        "share", "masked", "held", "pledge", "reveal", "revealed", "pace", "present", "data", "resend", "sync", "state",
        "claim", "audit", "audited", "recall", "recalled", "fraud",
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"index": -1}, {"index": 2**60}, {"index": True}, {"weight": -1.0}, {"weight": 1}, {"fewest": -1},
        {"role": "king"}, {"role": "left"}, {"unsent": ["a", 1]}, {"unsent": "ab"}, {"heard": [b"a"]},
        {"blamed": ["everybody"]}, {"blamed": [["a", "b", 1]]}, {"blamed": [["a", "b" * 201, True]]},
        {"terms": bytes(31)}, {"epoch": "x" * 32}, {"accepted": "x"}, {"join": 1},
    ],
)  # fmt: skip
def test_an_ack_with_a_field_that_does_not_fit_is_refused_where_it_is_read(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError, match=f"ack.{next(iter(changes))}"):
        Ack.decode(forged(an_ack(), **changes))
    with pytest.raises(WireError, match="does not fit"):
        replace(an_ack(), **changes).encoded  # noqa: B018 - it must not even be written


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
        Ok.decode(header)


def test_a_header_over_the_limit_is_not_even_parsed() -> None:
    with pytest.raises(WireError, match="at most"):
        Ok.decode(bytes(MAX_HEADER + 1))


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
    record = Record(one, b"h" * 32)
    assert decode_record(record.encoded) == record
    beginning = Record(None, b"h" * 32, (Elector("a", 0),))
    assert decode_record(beginning.encoded) == beginning


def test_records_that_earlier_versions_kept_are_read() -> None:
    """They had two numbers more, which nobody could check."""
    one = roster()
    assert decode_record(msgpack.packb([one.encoded, b"h" * 32, 17, 3, []])) == Record(one, b"h" * 32)


@given(st.data())
def test_damaged_rosters_and_records_are_refused_or_well_formed(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([roster().encoded, Record(roster(), b"h" * 32).encoded])))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_roster, decode_record):
        try:
            found = decode(bytes(raw))
        except WireError:
            continue
        assert found.encoded
