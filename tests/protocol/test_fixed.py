"""`wire = "fixed"`: values as integers, exact sums, and overflow that is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marfl.errors import BadPayload, InputError
from marfl.protocol.fixed_point import FRACTION_BITS, LARGEST, MOST_MEMBERS, check_range, decode_mean, encode, fits
from marfl.protocol.protocol_settings import Settings
from marfl.wire.packing import NoiseRoom

reasonable = st.floats(-LARGEST, LARGEST, width=32)


@given(st.lists(reasonable, max_size=20))
@settings(max_examples=80, deadline=None)
def test_a_value_comes_back_within_half_a_step(values):
    vector = torch.tensor(values, dtype=torch.float32)
    back = decode_mean(encode(vector), 1, 1.0)
    assert ((back.double() - vector.double()).abs() <= 2.0 ** -(FRACTION_BITS + 1)).all()


@given(st.lists(reasonable.filter(lambda v: v == 0 or abs(v) >= 2**-8), max_size=20))
@settings(max_examples=60, deadline=None)
def test_what_is_above_the_step_of_fp32_comes_back_exactly(values):
    vector = torch.tensor(values, dtype=torch.float32) + 0.0  # -0.0 has no integer of its own
    assert torch.equal(decode_mean(encode(vector), 1, 1.0), vector)


@given(st.lists(st.lists(reasonable, min_size=3, max_size=3), min_size=1, max_size=12), st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_sum_is_the_same_in_every_order(rows, random):
    encoded = [encode(torch.tensor(row)) for row in rows]
    forwards = sum(encoded)
    random.shuffle(encoded)
    assert torch.equal(sum(encoded), forwards)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 16385.0, -1e30])
def test_what_would_overflow_is_refused(bad):
    vector = torch.tensor([0.0, bad])
    assert not fits(vector)
    with pytest.raises(InputError, match=r"wire = fixed: a value of .* within ±16384"):
        encode(vector)


def test_the_largest_members_largest_values_do_not_overflow():
    total = encode(torch.tensor([LARGEST, -LARGEST])) * MOST_MEMBERS
    assert torch.equal(decode_mean(total, MOST_MEMBERS, float(MOST_MEMBERS)), torch.tensor([LARGEST, -LARGEST]))


def test_a_sum_that_nobody_can_have_brought_is_refused():
    limit = 3 * int(LARGEST * 2**FRACTION_BITS)
    check_range(torch.tensor([limit, -limit]), 3)
    for bad in (limit + 1, -limit - 1, -(2**63)):
        with pytest.raises(BadPayload, match="cannot have brought"):
            check_range(torch.tensor([0, bad]), 3)
    with pytest.raises(BadPayload, match="at most 65536"):
        check_range(torch.tensor([0]), MOST_MEMBERS + 1)


def test_the_mean_is_divided_by_the_weights_once():
    total = encode(torch.tensor([0.75])) + encode(torch.tensor([0.25]))
    assert torch.equal(decode_mean(total, 2, 0.5), torch.tensor([2.0]))


# --- private integers in narrow fields ---

ROOM = NoiseRoom(each=1000, variance=100**2)


@given(st.lists(st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=3), min_size=1, max_size=12), st.randoms())
def test_a_sum_in_a_narrow_field_is_the_sum_modulo_its_size_in_every_order(rows, random):
    whole = torch.tensor(rows).sum(0).to(torch.int32)
    narrow = [torch.tensor(row).to(torch.int32) for row in rows]
    random.shuffle(narrow)
    total = narrow[0].clone()
    for row in narrow[1:]:
        total.add_(row)
    assert torch.equal(total, whole)


def test_a_private_sum_that_its_members_cannot_have_brought_is_refused_so_masks_that_do_not_cancel_are():
    most = ROOM.largest(5)
    assert most == 5000 + 12 * 223
    check_range(torch.tensor([most, -most], dtype=torch.int32), 5, ROOM)
    for bad in (most + 1, -most - 1, -(2**31)):
        with pytest.raises(BadPayload, match="cannot have brought"):
            check_range(torch.tensor([0, bad], dtype=torch.int32), 5, ROOM)


@pytest.mark.parametrize(("wire", "most"), [("fixed16", 20), ("masked16", 20), ("fixed32", 2_100_000)])
def test_a_roster_whose_sum_could_wrap_is_too_large(wire, most):
    settings = Settings(wire=wire, room=ROOM)
    assert settings.holds(most)
    assert not settings.holds(2 * most)
    assert Settings(wire="fixed").holds(2 * most)
