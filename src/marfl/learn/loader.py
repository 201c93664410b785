"""Which rows a peer trains on: random access to an endless, reshuffled pass over its shard.

The stream of a peer is epoch after epoch of its shard, each in the order of a derived permutation, cut in batches of
`min(batch_size, shard)` rows; a batch may reach into the next epoch. So every batch has the same size and no sample is
seen twice before all were seen. Batch number `consumed` is found without replaying those before it: the caller keeps
one number per peer, and absent or resumed peers need nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from marfl.errors import InputError
from marfl.learn.data import Batch, gather, join, size_of
from marfl.learn.dropout import batch_name, row_keys_of_many
from marfl.learn.randomness import key, permutation

Order: TypeAlias = NDArray[np.int64]  # places of samples


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
