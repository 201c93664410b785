"""Integers as bytes: every value comes back, sizes are what the formats say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import BadPayload
from marfl.wire.packing import (
    BLOCK,
    WIDTHS,
    IntegerWire,
    largest,
    narrowest,
    pack,
    unpack,
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


def test_in_four_bits_the_first_half_of_the_values_has_the_lower_halves_of_the_bytes():
    assert pack(np.array([1, -1, 7], dtype=np.int32), 4).tolist() == [0x71, 0x0F]


@given(st.integers(0, 10**6), st.sampled_from(WIDTHS))
def test_bytes_of_another_number_of_values_are_refused(length, width):
    data = np.zeros(-(-length * width // 8) + 1, dtype=np.uint8)
    with pytest.raises(BadPayload, match="bytes where"):
        unpack(data, length, width)


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
