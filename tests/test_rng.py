"""Derived randomness: a function of (seed, purpose) alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marfl.rng import churn_stream, counter_hash, key, numpy_stream, permutation, seeded_torch


def test_every_part_of_a_name_counts_and_parts_do_not_run_together() -> None:
    names = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "ab", "c"), (0, "a", "bc"), (0, "1"), (0, 1)]
    names += [(0, 11), (0, 1, 1), (0, 1, -1), (0,), (0, "")]
    assert len({key(*name) for name in names}) == len(names)


def test_a_numpy_integer_names_the_same_stream_as_a_plain_one() -> None:
    assert key(np.int64(3), "peer", np.uint8(7)) == key(3, "peer", 7)


def test_a_fraction_cannot_name_a_stream() -> None:
    with pytest.raises(TypeError):
        key(0, 0.5)  # type: ignore[arg-type]


def test_keys_never_change_between_versions() -> None:
    assert key(0, "order", 3, 5) == 9298369019030521833


def test_streams_of_one_name_are_equal_and_of_another_are_not() -> None:
    for make in (numpy_stream, churn_stream):
        first, again, other = (make(1, "noise", peer).random(8) for peer in (4, 4, 5))
        assert (first == again).all()
        assert (first != other).all()


def test_counter_hash_is_splitmix64() -> None:
    # The first outputs for seed 0, as published with the reference implementation.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert counter_hash(np.zeros(1, dtype=np.uint64), 5)[0].tolist() == published


def test_counter_hash_of_a_row_does_not_depend_on_the_other_rows() -> None:
    keys = np.arange(20, dtype=np.uint64) ** 7
    together = counter_hash(keys, 9)
    for row, name in enumerate(keys):
        assert (counter_hash(np.array([name]), 9)[0] == together[row]).all()


@given(st.integers(0, 2**64 - 1), st.integers(0, 200))
def test_a_permutation_holds_every_index_once(name: int, length: int) -> None:
    assert sorted(permutation(name, length).tolist()) == list(range(length))


def test_permutations_are_uniform() -> None:
    counts = np.zeros((6, 6))
    for name in range(6000):
        counts[np.arange(6), permutation(key(0, name), 6)] += 1
    # Each cell is Binomial(6000, 1/6): mean 1000, deviation 29.
    assert np.abs(counts - 1000).max() < 5 * 29


def test_a_seeded_block_draws_the_same_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded_torch(0, "model"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded_torch(0, "model"):
        assert torch.equal(torch.rand(3), first)


def test_a_seeded_block_restores_the_generator_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), seeded_torch(0, "model"):
        torch.rand(1) @ torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
