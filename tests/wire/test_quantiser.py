"""The quantiser: exact, unbiased, the same on every machine; and scales that follow from the sum alone."""

from __future__ import annotations

import numpy as np
import pytest
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
    UNIT,
    can_quantise,
    dequantise,
    is_first,
    next_exponents,
    quantise,
    rounding_dice,
    scales_of,
    unset,
    wire_at,
)

VALUES = st.floats(-LARGEST, LARGEST, width=32)
EXPONENTS = st.integers(FINEST, COARSEST)


def learned(length: int, spread: float = 1e-3, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(length) * spread).astype(np.float32)


def one_scale(length: int, exponent: int) -> np.ndarray:
    return np.full(-(-length // BLOCK), exponent, dtype=np.int32)


@given(
    arrays(np.float32, st.integers(1, 50), elements=VALUES), st.lists(EXPONENTS, min_size=1, max_size=6),
    st.sampled_from([4, 8]), st.integers(0, 2**60),
)  # fmt: skip
def test_what_was_sent_plus_what_is_left_is_what_was_learned_to_the_last_bit(values, exponents, bits, seed):
    left, sent, taken_in = None, [0] * values.size, [0] * values.size
    for iteration, exponent in enumerate(exponents):
        now = np.roll(values, iteration)
        if not can_quantise(now, left):
            break
        found = quantise(now, left, one_scale(now.size, exponent), largest(bits), rounding_dice(seed, 1, iteration))
        for at in range(values.size):  # in whole units, with integers of any size
            taken_in[at] += round(float(now[at]) / UNIT)
            sent[at] += int(found.sent[at]) * 2 ** (exponent - FINEST)
            assert sent[at] + int(found.left[at] / UNIT) == taken_in[at]
            assert found.left[at] / UNIT == int(found.left[at] / UNIT)
        left = found.left


@given(st.integers(1, 3 * BLOCK), st.sampled_from([4, 8]), EXPONENTS, st.floats(0, 100))
def test_no_contribution_is_larger_than_its_field_however_large_the_value(length, bits, exponent, spread):
    values = np.clip(learned(length, spread), -LARGEST, LARGEST)
    found = quantise(values, None, one_scale(length, exponent), largest(bits), rounding_dice(0, 0, 1))
    assert np.abs(found.sent).max() <= largest(bits)


def test_rounding_is_right_on_average():
    values = np.full(100 * BLOCK, 0.3e-3, dtype=np.float32)
    found = quantise(values, None, one_scale(values.size, -10), 7, rounding_dice(0, 0, 1))
    assert set(np.unique(found.sent)) == {0, 1}
    assert found.sent.mean() * 2**-10 == pytest.approx(0.3e-3, rel=0.02)


def test_the_same_stream_rounds_the_same_way_and_another_peer_or_iteration_another():
    values, scale = learned(BLOCK), one_scale(BLOCK, -10)
    sent = [quantise(values, None, scale, 7, rounding_dice(*name)).sent for name in ((1, 2, 3), (1, 2, 3))]
    np.testing.assert_array_equal(*sent)
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert (quantise(values, None, scale, 7, rounding_dice(*other)).sent != sent[0]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2 * LARGEST])
def test_what_is_not_a_number_or_out_of_range_never_leaves(bad):
    values = learned(2 * BLOCK + 5)
    assert can_quantise(values, None)
    for at in (0, BLOCK, values.size - 1):
        spoilt = values.copy()
        spoilt[at] = bad
        assert not can_quantise(spoilt, None)
        assert not can_quantise(values, spoilt.astype(np.float64))


def test_a_mean_is_the_sum_times_its_scale_over_the_weight():
    total = np.arange(-BLOCK, BLOCK, dtype=np.int32)
    exponents = np.array([-3, 2], dtype=np.int32)
    mean = dequantise(total, exponents, 3.0)
    np.testing.assert_array_equal(mean[:BLOCK], (total[:BLOCK] / 8 / 3.0).astype(np.float32))
    np.testing.assert_array_equal(mean[BLOCK:], (total[BLOCK:] * 4 / 3.0).astype(np.float32))


# --- scales ---


def settled(spread: float, bits: int, peers: int, length: int = 3 * BLOCK + 500, iterations: int = 12) -> np.ndarray:
    """The exponents after some iterations of independent peers."""
    wire, exponents = IntegerWire(bits, bits), unset(length)
    for iteration in range(iterations):
        total = np.zeros(length, dtype=np.int32)
        for peer in range(peers):
            values = learned(length, spread, 1000 * iteration + peer)
            limit = wire_at(wire, exponents).limit(peers)
            total += quantise(values, None, exponents, limit, rounding_dice(1, peer, iteration)).sent
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
    assert 2**30 < wire_at(wire, unset(5)).limit(125) * 125 < 2**31
    assert wire_at(wire, one_scale(5, -10)).limit(125) == 7
