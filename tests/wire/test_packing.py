"""Integers as bytes: every value comes back, sizes are what the formats say, and the way back is a pure rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from marfl.errors import BadPayload
from marfl.wire.packing import (
    BLOCK,
    WIDTHS,
    IntegerWire,
    SliceFormat,
    blocks_of,
    largest,
    narrowest,
    pack,
    pack_slice,
    round_back,
    unpack,
    unpack_slice,
)

LENGTHS = st.integers(0, 3 * BLOCK + 1)


def drawn(length: int, limit: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-limit, limit + 1, length).astype(np.int32)


@given(LENGTHS, st.sampled_from(WIDTHS), st.integers(0, 99))
def test_every_value_comes_back_from_its_field_and_takes_its_bits(length, width, seed):
    values = drawn(length, largest(width), seed)
    data = pack(values, width)
    assert data.size == -(-length * width // 8)
    np.testing.assert_array_equal(unpack(data, length, width), values)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_value_of_both_signs_fits_its_field(width):
    ends = np.array([-largest(width), largest(width), 0], dtype=np.int32)
    np.testing.assert_array_equal(unpack(pack(ends, width), 3, width), ends)


def test_of_two_values_in_a_byte_the_first_has_the_lower_half():
    assert pack(np.array([1, -1, 7], dtype=np.int32), 4).tolist() == [0xF1, 0x07]


@given(st.integers(0, 10**6), st.sampled_from(WIDTHS))
def test_bytes_of_another_number_of_values_are_refused(length, width):
    data = np.zeros(-(-length * width // 8) + 1, dtype=np.uint8)
    with pytest.raises(BadPayload, match="bytes where"):
        unpack(data, length, width)


@given(st.integers(1, 5 * BLOCK), st.sampled_from([4, 8, 16]), st.integers(1, 2**30), st.integers(0, 99))
def test_a_rounded_sum_travels_without_another_loss_and_in_its_size(length, bits, limit, seed):
    rounded = round_back(drawn(length, limit, seed), bits)
    form = SliceFormat(bits, rounded=True)
    data = pack_slice(rounded, form)
    assert data.size == form.size(length) == -(-length * bits // 8) + blocks_of(length)
    np.testing.assert_array_equal(unpack_slice(data, length, form), rounded)


@given(st.integers(1, 3 * BLOCK), st.sampled_from([4, 8, 16]), st.integers(1, 2**30), st.integers(0, 99))
def test_rounding_twice_is_rounding_once_whoever_rounds_which_blocks(length, bits, limit, seed):
    values = drawn(length, limit, seed)
    whole = round_back(values, bits)
    np.testing.assert_array_equal(round_back(whole, bits), whole)
    by_blocks = [round_back(values[at : at + BLOCK], bits) for at in range(0, length, BLOCK)]
    np.testing.assert_array_equal(np.concatenate(by_blocks), whole)


@given(arrays(np.int32, st.integers(1, 40), elements=st.integers(-(2**30), 2**30)), st.sampled_from([4, 8]))
def test_rounding_is_to_the_nearest_of_the_values_that_fit(values, bits):
    rounded = round_back(values, bits)
    shift = next(k for k in range(32) if np.rint(np.abs(values).max() / 2.0**k) <= largest(bits))
    np.testing.assert_array_equal(rounded, np.rint(values / 2.0**shift) * 2**shift)


def test_a_sum_that_fits_goes_back_as_it_is():
    values = drawn(2 * BLOCK, 127, 1)
    np.testing.assert_array_equal(round_back(values, 8), values)
    np.testing.assert_array_equal(round_back(np.zeros(5, dtype=np.int32), 4), np.zeros(5))


def test_rounding_back_leans_to_neither_side():
    ties = np.tile(np.array([15, -15, 13, -13, 1, -1, 3, -3, 5, -5], dtype=np.int32), 10)
    assert abs(int(round_back(ties, 4).sum())) == 0


def test_a_shift_out_of_range_is_refused():
    form = SliceFormat(4, rounded=True)
    data = pack_slice(np.ones(10, dtype=np.int32), form)
    data[0] = 29
    with pytest.raises(BadPayload, match="shifted"):
        unpack_slice(data, 10, form)
    with pytest.raises(BadPayload, match="bytes where"):
        unpack_slice(data[:-1], 10, form)


@pytest.mark.parametrize(
    ("bits", "contributions", "width"), [(4, 1, 4), (4, 5, 8), (4, 25, 16), (8, 1, 8), (8, 5, 16), (8, 259, 32)]
)
def test_a_partial_sum_travels_in_the_narrowest_field_that_holds_it(bits, contributions, width):
    assert IntegerWire(bits, bits).partial(contributions, 125) == (width, False)


@pytest.mark.parametrize(("bits", "members", "width"), [(8, 258, 16), (8, 259, 32), (4, 4681, 16), (4, 4682, 32)])
def test_masks_have_16_bits_as_long_as_these_hold_the_rosters_sum(bits, members, width):
    wire = IntegerWire(bits, bits, masked=True)
    assert wire.partial(1, members) == wire.result(members) == (width, False)


def test_what_no_field_holds_has_no_width():
    assert narrowest(2**31) == 0
