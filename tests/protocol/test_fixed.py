"""`wire = "fixed"`: values as integers, exact sums, and overflow that is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marfl.errors import BadPayload, InputError
from marfl.protocol.fixed_point import FRACTION_BITS, LARGEST, MOST_MEMBERS, check_range, decode_mean, encode, fits

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
