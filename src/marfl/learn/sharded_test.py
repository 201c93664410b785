"""The test set as the paper's code has it: every peer is tested on a shard of its own, and the mean over peers counts.

The shards are drawn as those of the training set are. They weigh every peer alike, however few rows it has, so the mean
differs a little from the accuracy on the whole test set, also where all peers hold one model.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from marfl.errors import InputError
from marfl.learn.data import gather, labels_of, size_of
from marfl.learn.partition import Rows, split
from marfl.learn.task import EVALUATION_BATCH, ClassificationTask, Metrics, Task, evaluating
from marfl.rng import numpy_stream

Scores = NDArray[np.float64]  # [2, rows]: the loss of each, and whether the answer is right


class ShardedTest:
    """The peers' shards of a task's test set."""

    def __init__(self, task: Task, peers: int, seed: int) -> None:
        own = isinstance(task, ClassificationTask) and type(task).evaluate is not ClassificationTask.evaluate
        if own or not isinstance(task, ClassificationTask):
            raise InputError("test_on = shards: the task evaluates its models itself; choose test_on = whole")
        self._data = task.tested
        labels = labels_of(self._data)
        if len(labels) < peers * task.partition.min_samples:
            raise InputError(f"test_on = shards: {len(labels)} test samples are too few for {peers} peers")
        self._shards: tuple[Rows, ...] = split(task.partition, labels, peers, numpy_stream(seed, "test shard", peers))

    def of_all(self, model: nn.Module) -> Metrics:
        """The mean over all peers, when all hold this model: one pass over the test set."""
        scores = self._scores(model, np.arange(size_of(self._data)))
        means = np.stack([scores[:, shard].mean(axis=1) for shard in self._shards])
        loss, accuracy = means.mean(axis=0)
        return Metrics(float(loss), float(accuracy), scores.shape[1])

    def of_peer(self, model: nn.Module, peer: int) -> Metrics:
        """How good a peer's model is on that peer's shard."""
        shard = self._shards[peer]
        loss, accuracy = self._scores(model, shard).mean(axis=1)
        return Metrics(float(loss), float(accuracy), len(shard))

    def _scores(self, model: nn.Module, rows: Rows) -> Scores:
        found: list[Tensor] = []
        with evaluating(model):
            for first in range(0, len(rows), EVALUATION_BATCH):
                inputs, labels = gather(self._data, torch.from_numpy(rows[first : first + EVALUATION_BATCH]))
                logits = model(inputs)
                losses = functional.cross_entropy(logits, labels, reduction="none")
                found.append(torch.stack((losses, (logits.argmax(dim=1) == labels).to(losses.dtype))))
        return torch.cat(found, dim=1).numpy().astype(np.float64)
