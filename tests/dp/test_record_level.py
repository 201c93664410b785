"""One record as the unit: its sample, its clipping in integers, and that nothing else depends on it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marfl.dp.noise import derived_words
from marfl.dp.record_level import MOST_STEPS_POWER, Sampling, add_records, check_record_bound
from marfl.errors import InputError
from marfl.learn.layer_gradients import Outer
from marfl.learn.record_gradients import MOST_RECORDS

FLOATS = st.floats(-1e6, 1e6, width=32)


def words(seed):
    return derived_words(np.random.default_rng(seed))


def summed(*records, bound=1.0, steps=1000, layers=(2,)):
    gradients = torch.tensor(records, dtype=torch.float32)
    out = torch.zeros(gradients.shape[1], dtype=torch.int64)
    parts = list(gradients.split((*layers, gradients.shape[1] - sum(layers)), dim=1))
    add_records([parts] if len(records) else [], bound, steps, out)
    return out.tolist()


def test_every_record_is_clipped_by_itself():
    assert summed((30.0, 40.0, 0.0), (0.0, 0.0, 0.5)) == [599, 799, 499]


def test_every_record_is_truncated_towards_zero_before_they_are_added():
    assert summed((0.0009, -0.0009, 0.0), (0.0009, -0.0009, 0.0)) == [0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_record_whose_gradient_is_not_finite_counts_as_zero_and_spoils_no_other(bad):
    assert summed((bad, 0.0, 0.0), (0.0, 0.5, 0.0)) == summed((0.0, 0.5, 0.0))


@given(st.lists(FLOATS, min_size=3, max_size=40), st.floats(1e-6, 1e3), st.integers(3, 19))
def test_one_record_never_changes_the_sum_by_more_than_the_bound(values, bound, power):
    changed = summed(values, bound=bound, steps=1 << power)
    assert sum(x * x for x in changed) <= (1 << power) ** 2


@given(st.integers(0, 2**32), st.floats(0.01, 100))
def test_products_that_are_not_written_out_keep_to_the_bound_and_hardly_differ(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(5, 3, generator=generator) * scale, torch.randn(5, 4, generator=generator)
    dense = (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1)
    one, other = torch.zeros(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
    add_records([[Outer(left, right)]], 1.0, 1 << 16, one)
    add_records([[dense]], 1.0, 1 << 16, other)
    assert int((one - other).abs().max()) <= 5 * 2
    alone = torch.zeros(12, dtype=torch.int64)
    add_records([[Outer(left[:1], right[:1])]], 1.0, 1 << 16, alone)
    assert int(alone @ alone) <= 1 << 32


@pytest.mark.parametrize(("left", "right"), [(1e-23, 1e17), (1e17, 1e-23), (1e-30, 1e18), (1e37, 1e-37), (1e30, 1e30)])
def test_a_product_keeps_to_the_bound_also_where_the_squares_of_one_side_vanish_or_overflow(left, right):
    """A record of huge inputs, chosen by an attacker, whose loss is all but flat: 0 times infinity in fp32."""
    out = torch.zeros(20 * 70, dtype=torch.int64)
    add_records([[Outer(torch.full((1, 20), left), torch.full((1, 70), right))]], 1e-9, 1 << 19, out)
    assert math.hypot(*out.tolist()) <= 1 << 19


def test_a_long_gradient_of_equal_values_keeps_to_the_bound():
    gradients = torch.full((16, 100_003), 0.37)
    out = torch.zeros(100_003, dtype=torch.int64)
    add_records([[gradients[:1]]], 1.0, 1 << 20, out)
    assert 0.998 * 2**20 < math.sqrt(int(out @ out)) <= 2**20


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_record_more_changes_the_sum_by_that_record_and_nothing_else(seed, count):
    some = np.random.default_rng(seed).normal(size=(count + 1, 7)).tolist()
    with_it, without, alone = summed(*some), summed(*some[:-1]), summed(some[-1])
    assert [a - b for a, b in zip(with_it, without, strict=True)] == alone


def test_as_many_records_as_a_slice_has_add_up_exactly_at_the_largest_scale():
    one = summed((1.0, 0.0, 0.0), steps=1 << MOST_STEPS_POWER)
    assert summed(*[(1.0, 0.0, 0.0)] * MOST_RECORDS, steps=1 << MOST_STEPS_POWER) == [MOST_RECORDS * x for x in one]
    assert MOST_RECORDS << MOST_STEPS_POWER <= 1 << 24


def test_records_are_drawn_independently_with_the_public_rate():
    drawn = [Sampling(30, 100).draw(500, words(seed)) for seed in range(400)]
    sizes = np.array([len(rows) for rows in drawn])
    assert sizes.mean() == pytest.approx(150, abs=4 * math.sqrt(105 / 400))
    assert sizes.var() == pytest.approx(105, rel=0.3)  # of a batch of fixed size it would be 0
    often = np.bincount(np.concatenate(drawn), minlength=500)
    assert abs(often - 120).max() < 5 * math.sqrt(84)


def test_a_batch_may_be_empty_and_a_rate_of_one_takes_all():
    assert len(Sampling(1, 10**9).draw(50, words(1))) == 0
    assert Sampling(7, 7).draw(5, words(1)).tolist() == [0, 1, 2, 3, 4]


def test_a_batch_of_more_than_all_records_and_a_bound_beyond_floats_are_refused():
    with pytest.raises(InputError, match=r"batch = 8: must be at most privacy.records = 7"):
        Sampling(8, 7)
    with pytest.raises(InputError, match="clip = 1e-20: must be at least"):
        check_record_bound(1e-20)
