"""The quantiser: exact, unbiased, the same on every machine; and scales that follow from the sum alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marfl.wire.packing import BLOCK, IntegerWire, largest
from marfl.wire.quantiser import (
    COARSEST,
    FINEST,
    FIRST,
    HEADROOM,
    LARGEST,
    STEPS,
    Quantised,
    can_quantise,
    dequantise,
    is_first,
    quantise,
    rounding_dice,
    scales_of,
    unset,
    wire_at,
)
from marfl.wire.rounded_sum import round_back

VALUES = st.floats(-LARGEST, LARGEST, width=32)
EXPONENTS = st.integers(FINEST, COARSEST)


def learned(length: int, spread: float = 1e-3, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(length) * spread).astype(np.float32)


def rounded(values, left, exponent, limit, dice):
    """What is sent and left, as arrays, where all blocks have one scale."""
    before = None if left is None else torch.from_numpy(left)
    found = quantise(torch.from_numpy(values), before, one_scale(values.size, exponent), limit, dice)
    return Quantised(found.sent.numpy(), found.left.numpy())


def one_scale(length: int, exponent: int) -> np.ndarray:
    return np.full(-(-length // BLOCK), exponent, dtype=np.int32)


NEAR = st.lists(st.integers(-2, 3), min_size=1, max_size=8)  # how exponents move


def check_conservation(values: np.ndarray, exponents: list[int], bits: int, seed: int) -> int:
    """Sent and left are taken in and left before, as fractions of any size; how many values had to be exact."""
    left, exact = None, 0
    finest = min(exponents) - 12  # of the fixed point, so far or later
    for iteration, exponent in enumerate(exponents):
        now, limit = np.roll(values, iteration), largest(bits)
        found = rounded(now, left, exponent, limit, rounding_dice(seed, 1, iteration))
        assert np.abs(found.sent).max() <= limit
        step = Fraction(2) ** exponent / int(STEPS)
        for at in range(values.size):
            before = Fraction(0) if left is None else Fraction(float(left[at]))
            taken = round(Fraction(float(now[at])) / step) * step + before
            after = int(found.sent[at]) * Fraction(2) ** exponent + Fraction(float(found.left[at]))
            size = max(abs(taken), abs(before), abs(Fraction(float(now[at]))))  # what cancels was rounded before
            if size < Fraction(2) ** min(finest + 22, exponent + 10):
                assert after == taken
                exact += 1
            else:
                assert abs(after - taken) <= size / 2**21 + step
        left = found.left
    return exact


@given(
    arrays(np.float32, st.integers(1, 40), elements=VALUES), EXPONENTS, NEAR, st.sampled_from([4, 8]),
    st.integers(0, 2**60),
)  # fmt: skip
def test_what_was_sent_plus_what_is_left_is_what_was_learned_to_the_last_bit(values, exponent, moves, bits, seed):
    exponents = [int(each) for each in np.clip(exponent + np.cumsum(moves), FINEST, COARSEST)]
    check_conservation(values, exponents, bits, seed)
    small = (values * 2.0 ** (exponents[0] - 10)).astype(np.float32)  # of the size that scales are made for
    bounded = np.clip(small, -(2.0 ** (exponents[0] + 6)), 2.0 ** (exponents[0] + 6))
    assert check_conservation(bounded, [exponents[0]] * 3, bits, seed) == 3 * values.size


SCALE = 2.0**-13


@pytest.mark.parametrize("value", [2**12, -(2**12), 2.0**-126, 1e-45, 0.0, 127 * SCALE, -7 * SCALE, 1000 * SCALE])
@pytest.mark.parametrize("bits", [4, 8])
def test_adversarial_values_are_conserved_too(value, bits):
    values = np.full(2 * BLOCK + 3, value, dtype=np.float32)[:40]
    check_conservation(values, [-13, -13, -12, -14], bits, 5)
    check_conservation(values, [FINEST, COARSEST, FINEST], bits, 5)


@given(arrays(np.float32, st.integers(1, 40), elements=VALUES), st.integers(1, 2**16), st.integers(0, 2**60))
def test_without_scales_nothing_is_lost_either_and_no_sum_overflows(values, contributions, seed):
    limit = wire_at(IntegerWire(8, 8), unset(values.size)).limit(contributions)
    found = quantise(torch.from_numpy(values), None, unset(values.size), limit, rounding_dice(seed, 0, 1))
    assert int(found.sent.abs().max()) * contributions < 2**31
    step = 2.0**FIRST / STEPS
    after = found.sent.numpy().astype(np.float64) * 2.0**FIRST + found.left.numpy().astype(np.float64)
    assert (np.abs(after - values) <= np.maximum(step, np.abs(values) * 2.0**-22)).all()


@given(st.integers(1, 3 * BLOCK), st.sampled_from([4, 8]), EXPONENTS, st.floats(0, 100))
def test_no_contribution_is_larger_than_its_field_however_large_the_value(length, bits, exponent, spread):
    values = np.clip(learned(length, spread), -LARGEST, LARGEST)
    found = rounded(values, None, exponent, largest(bits), rounding_dice(0, 0, 1))
    assert np.abs(found.sent.astype(int)).max() <= largest(bits)


def test_rounding_is_right_on_average():
    values = np.full(100 * BLOCK, 0.3e-3, dtype=np.float32)
    found = rounded(values, None, -10, 7, rounding_dice(0, 0, 1))
    assert set(np.unique(found.sent)) == {0, 1}
    assert found.sent.mean() * 2**-10 == pytest.approx(0.3e-3, rel=0.02)


def test_the_same_stream_rounds_the_same_way_and_another_peer_or_iteration_another():
    values = learned(BLOCK)
    sent = [rounded(values, None, -10, 7, rounding_dice(*name)).sent for name in ((1, 2, 3), (1, 2, 3))]
    np.testing.assert_array_equal(*sent)
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert (rounded(values, None, -10, 7, rounding_dice(*other)).sent != sent[0]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2 * LARGEST])
def test_what_is_not_a_number_or_out_of_range_never_leaves(bad):
    values = torch.from_numpy(learned(2 * BLOCK + 5))
    assert can_quantise(values)
    for at in (0, BLOCK, -1):
        spoilt = values.clone()
        spoilt[at] = bad
        assert not can_quantise(spoilt)


def test_a_mean_is_the_sum_times_its_scale_over_the_weight():
    total = torch.arange(-BLOCK, BLOCK, dtype=torch.int16)
    exponents = np.array([-3, 2], dtype=np.int32)
    mean = dequantise(total, exponents, 3.0, 3, IntegerWire(8, 8)).mean
    single = total.to(torch.float32)
    assert torch.equal(mean[:BLOCK], single[:BLOCK] * np.float32(1 / 8 / 3.0))
    assert torch.equal(mean[BLOCK:], single[BLOCK:] * np.float32(4 / 3.0))


def next_exponents(total, exponents, contributions, bits, down=32):
    """The next scales from a sum."""
    values = torch.from_numpy(np.asarray(total))
    return dequantise(values, exponents, 1.0, contributions, IntegerWire(bits, down)).exponents


@given(st.integers(0, 99), st.integers(1, 2**16))
def test_a_sum_that_was_rounded_has_the_same_scales_in_single_precision(seed, limit):
    total = round_back(torch.from_numpy(np.random.default_rng(seed).integers(-limit, limit + 1, 3 * BLOCK)), 8)
    exponents = one_scale(3 * BLOCK, -10)
    narrow = next_exponents(total.numpy(), exponents, 5, 8, down=8)
    np.testing.assert_array_equal(narrow, next_exponents(total.numpy(), exponents, 5, 8, down=32))


# --- scales ---


def settled(spread: float, bits: int, peers: int, length: int = 3 * BLOCK + 500, iterations: int = 12) -> np.ndarray:
    """The exponents after some iterations of independent peers."""
    wire, exponents = IntegerWire(bits, bits), unset(length)
    for iteration in range(iterations):
        total = np.zeros(length, dtype=np.int32)
        for peer in range(peers):
            values = learned(length, spread, 1000 * iteration + peer)
            limit = wire_at(wire, exponents).limit(peers)
            sent = quantise(torch.from_numpy(values), None, exponents, limit, rounding_dice(1, peer, iteration)).sent
            total += sent.numpy()
        exponents = next_exponents(total, exponents, peers, bits)
    return exponents


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_settle_where_a_peers_values_fill_the_field(bits, spread):
    for peers in (1, 8):
        found = scales_of(settled(spread, bits, peers)) * largest(bits) / HEADROOM[bits]
        assert (found > spread / 2).all()
        assert (found < spread * 2).all()


def test_one_iteration_in_32_bits_is_enough_to_find_the_scales():
    assert np.abs(settled(1e-3, 8, 8, iterations=1) - settled(1e-3, 8, 8)).max() <= 1


def test_a_block_that_saturates_grows_at_once_and_one_that_is_too_coarse_shrinks_by_half():
    exponents = one_scale(2 * BLOCK, -10)
    total = np.concatenate([np.full(BLOCK, 7 * 25), np.full(BLOCK, 1)]).astype(np.int32)  # 25 peers agree
    assert next_exponents(total, exponents, 25, 4).tolist() == [-5, -11]


def test_a_block_in_which_nothing_was_sent_keeps_its_scale():
    total = np.zeros(2 * BLOCK, dtype=np.int32)
    total[0] = 60
    exponents = np.array([-10, -13], dtype=np.int32)
    assert next_exponents(total, exponents, 5, 4)[1] == -13
    np.testing.assert_array_equal(next_exponents(np.zeros_like(total), exponents, 5, 4), exponents)


def test_without_scales_a_silent_block_takes_those_of_the_others_and_all_silent_stay_without():
    total = np.zeros(2 * BLOCK, dtype=np.int32)
    assert is_first(next_exponents(total, unset(total.size), 5, 4))
    total[:BLOCK] = 1000
    found = next_exponents(total, unset(total.size), 5, 4)
    assert found[0] == found[1] > FIRST


SUMS = arrays(np.int32, st.integers(1, 2 * BLOCK), elements=st.integers(-(2**31) + 1, 2**31 - 1))


@settings(max_examples=30)
@given(SUMS, st.integers(1, 2**16))
def test_scales_stay_in_their_range_whatever_the_sum(total, contributions):
    exponents = unset(total.size)
    for _ in range(3):
        exponents = next_exponents(total, exponents, contributions, 4)
        assert ((exponents >= FINEST) & (exponents <= COARSEST)).all() or not total.any()


def test_without_scales_the_roster_decides_how_large_a_contribution_may_be():
    wire = IntegerWire(4, 4)
    assert 2**29 < wire_at(wire, unset(5)).limit(125) * 125 < 2**31
    assert wire_at(wire, one_scale(5, -10)).limit(125) == 7
