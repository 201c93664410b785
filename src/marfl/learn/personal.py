"""Personal layers: they stay at home and are tested on the peer's own data, a part of which is kept from training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from marfl.errors import InputError
from marfl.learn.data import size_of
from marfl.learn.task import ClassificationTask, Metrics, Task, evaluate_classifier
from marfl.learn.worker import Worker
from marfl.rng import numpy_stream

KEPT = 5  # one row in so many is kept for the test


def apart(shard: Dataset[Any], seed: int, peer: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """(what the peer trains on, what it is tested on): the same in every engine and in a real swarm."""
    count = size_of(shard)
    if count < 2:
        raise InputError(f"local: peer {peer} has {count} rows: it needs 2, one to train on and one to be tested on")
    order = torch.from_numpy(numpy_stream(seed, peer, "kept for the test").permutation(count))
    tested = max(1, count // KEPT)
    return Subset(shard, order[tested:]), Subset(shard, order[:tested])  # type: ignore[arg-type]


def check_task(task: Task) -> None:
    """Only a classifier can be tested on any data."""
    if not isinstance(task, ClassificationTask):
        raise InputError("local: needs a ClassificationTask: personal layers are tested on the peer's own data")


def tested(worker: Worker, theta: Tensor, home: Tensor | None, rows: Dataset[Any]) -> Metrics:
    """How good the agreed layers are with one peer's own, on its own data."""
    worker.load(theta)
    worker.home.move_in(home)
    return evaluate_classifier(worker.module, rows)


def pooled(found: Iterable[Metrics]) -> Metrics:
    """The mean over all rows of all peers."""
    each = list(found)
    count = sum(metrics.count for metrics in each)
    loss = sum(metrics.loss * metrics.count for metrics in each) / count
    return Metrics(loss, sum(metrics.accuracy * metrics.count for metrics in each) / count, count)
