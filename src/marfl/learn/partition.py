"""Who holds which samples: IID, or Dirichlet(α) over the labels as in the paper ("LDA", after Hsu et al. 2019)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from marfl.errors import InputError
from marfl.settings import Partition

Rows: TypeAlias = NDArray[np.int64]  # indices into a data set, ascending

def split(partition: Partition, labels: NDArray[np.integer], peers: int, rng: np.random.Generator) -> tuple[Rows, ...]:
    """Every sample to exactly one peer, every peer at least `min_samples`; the same `rng` gives the same split."""
    needed = peers * partition.min_samples
    if peers < 1:
        raise InputError(f"peers {peers}: must be at least 1")
    if needed > len(labels):
        raise InputError(
            f"peers {peers} with min-samples {partition.min_samples}: needs {needed} samples, "
            f"but the training set has {len(labels)}"
        )
    if partition.kind == "iid":
        return tuple(np.sort(rows) for rows in np.array_split(rng.permutation(len(labels)), peers))
    shards = _dirichlet(labels, peers, partition.alpha, rng)
    _top_up(shards, partition.min_samples)
    return tuple(np.sort(np.asarray(shard, dtype=np.int64)) for shard in shards)


def _dirichlet(labels: NDArray[np.integer], peers: int, alpha: float, rng: np.random.Generator) -> list[list[int]]:
    """Each label's samples are dealt out in proportions drawn from Dirichlet(α) over the peers."""
    shards: list[list[int]] = [[] for _ in range(peers)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(peers, alpha))
        cuts = (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for shard, part in zip(shards, np.split(rows, cuts), strict=True):
            shard.extend(part.tolist())
    return shards


def _top_up(shards: list[list[int]], floor: int) -> None:
    """Move samples from the largest shards (ties: the lowest peer) to those below the floor, one at a time."""
    largest = [(-len(shard), peer) for peer, shard in enumerate(shards)]
    heapq.heapify(largest)
    for shard in shards:
        while len(shard) < floor:
            # The floor fits on average, so as long as somebody is below it the largest is above it.
            size, donor = largest[0]
            shard.append(shards[donor].pop())
            heapq.heapreplace(largest, (size + 1, donor))


def label_table(labels: Sequence[NDArray[np.integer]], classes: int | None = None) -> NDArray[np.int64]:
    """How many samples of each label each peer holds: [peers, classes], from the labels of every peer's shard."""
    width = classes or 1 + max(int(shard.max(initial=-1)) for shard in labels)
    return np.stack([np.bincount(shard, minlength=width) for shard in labels]).astype(np.int64)
