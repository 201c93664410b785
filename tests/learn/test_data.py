"""Loaders: random access to an endless pass in which no sample comes twice before all were seen."""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from marfl.errors import InputError
from marfl.learn.data import Loader, gather, join, joined, labels_of, minibatch_of_many, row_keys, take


def rows(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(samples) * 10, torch.arange(samples))


def loader(samples: int, batch_size: int, peer: int = 0, seed: int = 0) -> Loader:
    return Loader(rows(samples), seed=seed, peer=peer, batch_size=batch_size)


class Pairs(Dataset[tuple[Tensor, int]]):
    """A data set that is not in tensors."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([index, -index]), index % 3


class Endless(IterableDataset[int]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[int]:
        return count()


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 30))
def test_no_sample_is_seen_twice_before_all_were_seen(samples: int, batch_size: int, batches: int) -> None:
    source = loader(samples, batch_size)
    seen = [sample for number in range(batches) for sample in source.indices(number).tolist()]
    for start in range(0, len(seen), samples):
        epoch = seen[start : start + samples]
        assert len(set(epoch)) == len(epoch)
    counts = Counter(seen)
    assert max(counts.values()) - min(counts.get(sample, 0) for sample in range(samples)) <= 1


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 1000))
def test_every_batch_has_the_batch_size_or_the_shards(samples: int, batch_size: int, number: int) -> None:
    source = loader(samples, batch_size)
    assert len(source.indices(number)) == source.rows == min(samples, batch_size)


def test_a_batch_is_found_without_those_before_it_and_in_any_order() -> None:
    forward, backward = loader(17, 5), loader(17, 5)
    expected = [forward.minibatch(number, iteration=number) for number in range(20)]
    for number in reversed(range(20)):
        found = backward.minibatch(number, iteration=number)
        assert torch.equal(found.batch[0], expected[number].batch[0])
        assert torch.equal(found.keys, expected[number].keys)


def test_epochs_peers_and_seeds_have_their_own_orders() -> None:
    first = loader(30, 5)
    orders = [first.order(0), first.order(1), loader(30, 5, peer=1).order(0), loader(30, 5, seed=1).order(0)]
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_the_order_of_samples_does_not_depend_on_iteration_or_step_but_the_masks_do() -> None:
    source = loader(30, 5)
    first, later = source.minibatch(3, iteration=3), source.minibatch(3, iteration=8, step=1)
    assert torch.equal(first.batch[1], later.batch[1])
    assert torch.equal(first.keys, row_keys(0, 0, 3, 0, 5))
    assert torch.equal(later.keys, row_keys(0, 0, 8, 1, 5))


def test_the_batches_of_one_iteration_follow_the_cursor() -> None:
    source = loader(30, 4)
    found = list(source.minibatches(consumed=5, iteration=2, count=3))
    assert [minibatch.rows for minibatch in found] == [4, 4, 4]
    for step, minibatch in enumerate(found):
        assert minibatch.batch[1].tolist() == source.indices(5 + step).tolist()
        assert torch.equal(minibatch.keys, row_keys(0, 0, 2, step, 4))


@pytest.mark.parametrize("nested", [True, False])
def test_the_batches_of_many_peers_at_once_are_those_of_each_one_after_the_other(nested: bool) -> None:
    whole = rows(40)
    shards = [Subset(Subset(whole, range(1, 40)) if nested else whole, range(p, 39, 4 + p)) for p in range(4)]
    loaders = [Loader(shard, seed=3, peer=peer, batch_size=9) for peer, shard in enumerate(shards)]
    assert len({loader.rows for loader in loaders}) > 1  # not all batches are of one length
    wanted = [(loader, 2 * peer + 1) for peer, loader in enumerate(loaders)]
    expected = joined([loader.minibatch(consumed, 7, 1) for loader, consumed in wanted])
    found = minibatch_of_many(wanted, 7, 1)
    assert found.rows_of_peers == expected.rows_of_peers == tuple(loader.rows for loader in loaders)
    assert torch.equal(found.keys, expected.keys)
    assert all(torch.equal(one, other) for one, other in zip(found.batch, expected.batch, strict=True))


def test_the_batches_of_many_peers_may_come_from_different_data_sets() -> None:
    wanted = [(loader(9, 4, peer=0), 0), (loader(7, 4, peer=1), 3)]
    found = minibatch_of_many(wanted, 2)
    assert found.batch[1].tolist() == [*wanted[0][0].indices(0).tolist(), *wanted[1][0].indices(3).tolist()]


def test_rows_are_gathered_alike_from_tensors_subsets_and_plain_data_sets() -> None:
    chosen = torch.tensor([4, 0, 2])
    inputs, labels = gather(Subset(Subset(rows(30), [5, 6, 7, 8, 9]), [4, 3, 2, 1, 0]), chosen)
    assert (inputs.tolist(), labels.tolist()) == ([50, 90, 70], [5, 9, 7])
    inputs, labels = gather(Pairs(), chosen)
    assert (inputs.tolist(), labels.tolist()) == ([[4, -4], [0, 0], [2, -2]], [1, 0, 2])


def test_labels_are_found_in_tensors_subsets_attributes_and_rows() -> None:
    assert labels_of(Subset(rows(9), [3, 1])).tolist() == [3, 1]
    assert labels_of(Pairs()).tolist() == [0, 1, 2] * 3
    with_targets = Pairs()
    with_targets.targets = [7] * 9  # type: ignore[attr-defined]
    assert labels_of(with_targets).tolist() == [7] * 9
    with pytest.raises(InputError, match="no labels"):
        labels_of(TensorDataset(torch.ones(3)))


def test_batches_are_joined_and_rows_taken_in_tuples_lists_and_mappings() -> None:
    one, two = torch.tensor([1]), torch.tensor([2, 3])
    assert join([one, two]).tolist() == [1, 2, 3]
    joined = join([{"x": [one, one]}, {"x": [two, two]}])
    assert [part.tolist() for part in joined["x"]] == [[1, 2, 3]] * 2
    assert [part.tolist() for part in take(joined, torch.tensor([2, 0]))["x"]] == [[3, 1]] * 2
    with pytest.raises(InputError, match="a batch holds str"):
        join(["text", "text"])


@pytest.mark.parametrize(
    ("shard", "batch_size", "message"),
    [
        (rows(0), 4, "peer 3: its shard is empty"),
        (rows(4), 0, "batch 0: must be at least 1"),
        (Endless(), 4, "data set Endless: must have a length"),
    ],
)
def test_a_shard_that_cannot_be_trained_on_is_refused(shard: Dataset[Any], batch_size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Loader(shard, seed=0, peer=3, batch_size=batch_size)
