"""The way back: a pure rounding of the sum, and no other loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from marfl.errors import BadPayload
from marfl.wire.packing import BLOCK, SliceFormat, blocks_of, largest
from marfl.wire.rounded_sum import pack_slice, round_back, unpack_slice

LENGTHS = st.integers(0, 3 * BLOCK + 1)


def summed(length: int, limit: int, seed: int) -> Tensor:
    values = np.random.default_rng(seed).integers(-limit, limit + 1, length)
    return torch.from_numpy(values.astype(np.int32))


@given(st.integers(1, 5 * BLOCK), st.sampled_from([4, 8, 16]), st.integers(1, 2**24 - 1), st.integers(0, 99))
def test_a_rounded_sum_travels_without_another_loss_and_in_its_size(length, bits, limit, seed):
    rounded = round_back(summed(length, limit, seed), bits)
    form = SliceFormat(bits, rounded=True)
    data = pack_slice(rounded, form)
    assert data.size == form.size(length) == -(-length * bits // 8) + blocks_of(length)
    assert torch.equal(unpack_slice(data, length, form).to(torch.int32), rounded)


@given(st.integers(1, 3 * BLOCK), st.sampled_from([4, 8, 16]), st.integers(1, 2**24 - 1), st.integers(0, 99))
def test_rounding_twice_is_rounding_once_whoever_rounds_which_blocks(length, bits, limit, seed):
    values = summed(length, limit, seed)
    whole = round_back(values, bits)
    assert torch.equal(round_back(whole, bits), whole)
    by_blocks = [round_back(values[at : at + BLOCK], bits) for at in range(0, length, BLOCK)]
    assert torch.equal(torch.cat(by_blocks), whole)


@given(arrays(np.int32, st.integers(1, 40), elements=st.integers(-(2**24) + 1, 2**24 - 1)), st.sampled_from([4, 8]))
def test_rounding_is_to_the_nearest_of_the_values_that_fit(values, bits):
    rounded = round_back(torch.from_numpy(values), bits)
    shift = next(k for k in range(32) if np.rint(np.abs(values).max() / 2.0**k) <= largest(bits))
    np.testing.assert_array_equal(rounded, np.rint(values / 2.0**shift) * 2**shift)


def test_a_sum_that_fits_goes_back_as_it_is():
    values = summed(2 * BLOCK, 127, 1)
    assert torch.equal(round_back(values, 8), values)
    assert not round_back(torch.zeros(5, dtype=torch.int32), 4).any()


def test_rounding_back_leans_to_neither_side():
    ties = torch.tensor([13, -13, 11, -11, 1, -1, 3, -3, 5, -5], dtype=torch.int32)  # all of them, as the shift is 1
    assert int(round_back(ties, 4).sum()) == 0


def test_a_shift_out_of_range_is_refused():
    form = SliceFormat(4, rounded=True)
    data = pack_slice(torch.ones(10, dtype=torch.int32), form)
    data[0] = 29
    with pytest.raises(BadPayload, match="shifted"):
        unpack_slice(data, 10, form)
    with pytest.raises(BadPayload, match="bytes where"):
        unpack_slice(data[:-1], 10, form)
    data[0] = 2
    assert unpack_slice(data, 10, form, most_shift=2).tolist() == [4] * 10
    with pytest.raises(BadPayload, match="shifted"):
        unpack_slice(data, 10, form, most_shift=1)
