"""From data sets to the mini-batches of a peer. Any map-style torch `Dataset` will do.

The stream of a peer is epoch after epoch of its shard, each in the order of a derived permutation, cut in batches of
`min(batch_size, shard)` rows; a batch may reach into the next epoch. So every batch has the same size and no sample is
seen twice before all were seen. Batch number `consumed` is found without replaying those before it: the caller keeps
one number per peer, and absent or resumed peers need nothing more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from marfl.errors import InputError
from marfl.rng import counter_hash, key, permutation

Batch: TypeAlias = Any  # what the task's loss understands: tensors with the rows first, in a tuple, list or mapping
Order: TypeAlias = NDArray[np.int64]  # places of samples


def data_folder(name: str, *, files: Sequence[str], source: str) -> Path:
    """`$MARFL_DATA/name`, checked to hold `files`; if not, an `InputError` that says how to get them from `source`."""
    root = os.environ.get("MARFL_DATA")
    folder = Path(root or "DATA") / name
    missing = [file for file in files if not root or not (folder / file).is_file()]
    if missing:
        problem = f"no {missing[0]} is in {folder}" if root else "MARFL_DATA is not set"
        raise InputError(
            f"task {name}: {problem}; either set MARFL_DATA to the folder that holds {name}/, "
            f"or download {', '.join(files)} from {source} into {folder} and set MARFL_DATA={folder.parent}"
        )
    return folder


def size_of(dataset: Dataset[Any]) -> int:
    """The number of rows; an `InputError` for a data set that has none to tell (an iterable one)."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise InputError(f"data set {type(dataset).__name__}: must have a length and be indexed by row") from None


def gather(dataset: Dataset[Any], rows: Tensor) -> Batch:
    """The rows of a data set as one batch: one indexing operation for tensors in memory, collated one by one else."""
    if isinstance(dataset, Subset):
        return gather(dataset.dataset, torch.as_tensor(dataset.indices)[rows])
    if isinstance(dataset, TensorDataset):
        return take(dataset.tensors, rows)
    return default_collate([dataset[row] for row in rows.tolist()])


def take(batch: Batch, rows: Tensor) -> Batch:
    """Some rows of a batch, in the order asked for."""
    return map_tensors(lambda tensor: tensor.index_select(0, rows), batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """A batch with the function applied to each of its tensors."""
    return _by_tensor(lambda tensors: function(tensors[0]), [batch])


def join(batches: Sequence[Batch]) -> Batch:
    """Batches of one kind as one batch, in their order."""
    return _by_tensor(torch.cat, batches)


def _by_tensor(function: Callable[[list[Tensor]], Tensor], batches: Sequence[Batch]) -> Batch:
    """Apply a function to the tensors that have the same place in each batch."""
    first = batches[0]
    if isinstance(first, Tensor):
        return function(list(batches))
    if isinstance(first, Mapping):
        return {name: _by_tensor(function, [batch[name] for batch in batches]) for name in first}
    if isinstance(first, (tuple, list)):
        return tuple(_by_tensor(function, parts) for parts in zip(*batches, strict=True))
    raise InputError(f"a batch holds {type(first).__name__}: it must be tensors in a tuple, list or mapping")


def labels_of(dataset: Dataset[Any]) -> np.ndarray:
    """The label of every row: the second tensor, the attribute `targets`, or the second item of each row."""
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) < 2:
            raise InputError("the training set has no labels: its rows must be (input, label)")
        return dataset.tensors[1].numpy()
    if hasattr(dataset, "targets"):
        return np.asarray(dataset.targets)
    return np.asarray([int(dataset[row][1]) for row in range(size_of(dataset))])


def row_keys(seed: int, peer: int, iteration: int, step: int, rows: int) -> Tensor:
    """The dropout keys of one mini-batch: int64 [rows]."""
    return row_keys_of_many([batch_name(seed, peer, iteration, step)], [rows])


def batch_name(seed: int, peer: int, iteration: int, step: int) -> int:
    """The key of a mini-batch, from which those of its rows derive."""
    return key(seed, "dropout", peer, iteration, step)


def row_keys_of_many(names: Sequence[int], rows: Sequence[int]) -> Tensor:
    """The dropout keys of several mini-batches, one after the other: int64 [sum of rows]."""
    table = counter_hash(np.array(names, dtype=np.uint64), max(rows)).view(np.int64)
    kept = np.arange(max(rows)) < np.array(rows)[:, None]
    return torch.from_numpy(table[kept])


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One local step's data, and the dropout key of each of its rows: of one peer, or of several in their order."""

    batch: Batch
    keys: Tensor  # int64 [rows]
    parts: tuple[int, ...] = ()  # the rows of each peer; empty: all are one peer's

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def rows_of_peers(self) -> tuple[int, ...]:
        return self.parts or (self.rows,)


def joined(minibatches: Sequence[MiniBatch]) -> MiniBatch:
    """Mini-batches one after the other as one."""
    if len(minibatches) == 1:
        return minibatches[0]
    parts = tuple(rows for minibatch in minibatches for rows in minibatch.rows_of_peers)
    keys = torch.cat([minibatch.keys for minibatch in minibatches])
    return MiniBatch(join([minibatch.batch for minibatch in minibatches]), keys, parts)


class Loader:
    """The mini-batches of one peer."""

    def __init__(self, shard: Dataset[Any], *, seed: int, peer: int, batch_size: int) -> None:
        if batch_size < 1:
            raise InputError(f"batch {batch_size}: must be at least 1")
        self.samples = size_of(shard)
        if not self.samples:
            raise InputError(f"peer {peer}: its shard is empty, and a peer without data cannot train")
        self.rows = min(batch_size, self.samples)  # of every mini-batch
        self._source, self._places = _origin(shard)
        self._seed = seed
        self._peer = peer
        self._memo: tuple[int, Order] | None = None  # the last epoch asked for, and its order

    @property
    def whole_batches(self) -> int:
        """How many mini-batches the shard has, without one that would reach into the next epoch."""
        return self.samples // self.rows

    def order(self, epoch: int) -> Order:
        """The order of the shard's samples in one epoch."""
        if self._memo is None or self._memo[0] != epoch:
            self._memo = (epoch, permutation(key(self._seed, "order", self._peer, epoch), self.samples))
        return self._memo[1]

    def indices(self, consumed: int) -> Order:
        """The samples of batch number `consumed`, counted from 0 over this peer's whole life."""
        epoch, start = divmod(consumed * self.rows, self.samples)
        head = self.order(epoch)[start : start + self.rows]
        if len(head) == self.rows:
            return head
        return np.concatenate((head, self.order(epoch + 1)[: self.rows - len(head)]))

    def minibatch(self, consumed: int, iteration: int, step: int = 0) -> MiniBatch:
        """Batch number `consumed`, used in local step `step` of an iteration (which decides its dropout masks)."""
        return minibatch_of_many([(self, consumed)], iteration, step)

    def minibatches(self, consumed: int, iteration: int, count: int) -> Iterator[MiniBatch]:
        """The `count` mini-batches of one iteration; afterwards this peer has consumed `count` more."""
        for step in range(count):
            yield self.minibatch(consumed + step, iteration, step)

    def records(self, rows: Order) -> Batch:
        """These rows of the shard as one batch."""
        return gather(self._source, torch.from_numpy(rows if self._places is None else self._places[rows]))

    def _found(self, consumed: int) -> Order:
        """The rows of batch number `consumed` in the source."""
        rows = self.indices(consumed)
        return rows if self._places is None else self._places[rows]


def minibatch_of_many(wanted: Sequence[tuple[Loader, int]], iteration: int, step: int = 0) -> MiniBatch:
    """`loader.minibatch(consumed, …)` of many peers, joined: one gather where all shards are parts of one source."""
    first = wanted[0][0]
    if any(loader._source is not first._source for loader, _ in wanted):
        return joined([loader.minibatch(consumed, iteration, step) for loader, consumed in wanted])
    names = [batch_name(loader._seed, loader._peer, iteration, step) for loader, _ in wanted]
    parts = tuple(loader.rows for loader, _ in wanted)
    rows = np.concatenate([loader._found(consumed) for loader, consumed in wanted])
    return MiniBatch(gather(first._source, torch.from_numpy(rows)), row_keys_of_many(names, parts), parts)


def _origin(shard: Dataset[Any]) -> tuple[Dataset[Any], Order | None]:
    """The data set that a shard is part of, and where its rows are in it; None: the shard is all of it."""
    places: Order | None = None
    while isinstance(shard, Subset):
        here = np.asarray(shard.indices, dtype=np.int64)
        places = here if places is None else here[places]
        shard = shard.dataset
    return shard, places
