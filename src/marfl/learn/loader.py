"""Which rows a peer trains on: random access to an endless, reshuffled pass over its shard.

The stream of a peer is epoch after epoch of its shard, each in the order of a derived permutation, cut in batches of
`min(batch_size, shard)` rows; a batch may reach into the next epoch. So every batch has the same size and no sample is
seen twice before all were seen. Batch number `consumed` is found without replaying those before it: the caller keeps
one number per peer, and absent or resumed peers need nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from marfl.errors import InputError
from marfl.learn.data import Batch, gather, size_of
from marfl.learn.dropout import row_keys
from marfl.learn.randomness import key, permutation


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """One local step's data, and the dropout key of each of its rows."""

    batch: Batch
    keys: Tensor  # int64 [rows]

    @property
    def rows(self) -> int:
        return len(self.keys)


class Loader:
    """The mini-batches of one peer."""

    def __init__(self, shard: Dataset[Any], *, seed: int, peer: int, batch_size: int) -> None:
        if batch_size < 1:
            raise InputError(f"batch {batch_size}: must be at least 1")
        self.samples = size_of(shard)
        if not self.samples:
            raise InputError(f"peer {peer}: its shard is empty, and a peer without data cannot train")
        self.rows = min(batch_size, self.samples)  # of every mini-batch
        self._shard = shard
        self._seed = seed
        self._peer = peer
        self._memo: tuple[int, Tensor] | None = None  # the last epoch asked for, and its order

    def order(self, epoch: int) -> Tensor:
        """The order of the shard's samples in one epoch."""
        if self._memo is None or self._memo[0] != epoch:
            self._memo = (epoch, permutation(key(self._seed, "order", self._peer, epoch), self.samples))
        return self._memo[1]

    def indices(self, consumed: int) -> Tensor:
        """The samples of batch number `consumed`, counted from 0 over this peer's whole life."""
        epoch, start = divmod(consumed * self.rows, self.samples)
        head = self.order(epoch)[start : start + self.rows]
        if len(head) == self.rows:
            return head
        return torch.cat((head, self.order(epoch + 1)[: self.rows - len(head)]))

    def minibatch(self, consumed: int, iteration: int, step: int = 0) -> MiniBatch:
        """Batch number `consumed`, used in local step `step` of an iteration (which decides its dropout masks)."""
        keys = row_keys(self._seed, self._peer, iteration, step, self.rows)
        return MiniBatch(gather(self._shard, self.indices(consumed)), keys)

    def minibatches(self, consumed: int, iteration: int, count: int) -> Iterator[MiniBatch]:
        """The `count` mini-batches of one iteration; afterwards this peer has consumed `count` more."""
        for step in range(count):
            yield self.minibatch(consumed + step, iteration, step)
