"""What a user writes to bring a model and data.

    class MyTask(ClassificationTask):
        def model(self): return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        def train_set(self): return TensorDataset(images, labels)
        def test_set(self): return TensorDataset(test_images, test_labels)

is a complete task: `--task my_module:MyTask`. Anything else that has the four methods of `Task` will do as well.
`load_task` finds a task by such a name, or by the name of a built-in one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset

from marfl.errors import InputError
from marfl.learn.data import Batch, gather, labels_of, size_of
from marfl.learn.partition import Rows, split
from marfl.loading import construct, find_class
from marfl.rng import numpy_stream, seeded_torch
from marfl.settings import Partition

BUILT_IN = {  # tasks that have a short name
    "20ng": "marfl.learn.tasks.news20:News20",
    "digits": "marfl.learn.tasks.digits:Digits",
    "mnist": "marfl.learn.tasks.mnist:Mnist",
    "synthetic": "marfl.learn.tasks.synthetic:Synthetic",
}
_METHODS = ("model", "shard", "loss", "evaluate")  # of `Task`
EVALUATION_BATCH = 256  # rows per forward pass: bounds the memory of an evaluation


@dataclass(frozen=True)
class Metrics:
    """How good a model is on a test set."""

    loss: float  # mean over the samples
    accuracy: float  # 0 … 1
    count: int  # samples


@runtime_checkable
class Task(Protocol):
    """A model and its data, split over peers."""

    def model(self) -> nn.Module:
        """A fresh model. All peers call it with torch's generator in the same state, so all start alike."""

    def shard(self, peer: int, peers: int, rng: np.random.Generator) -> Dataset[Any]:
        """What one peer trains on. Every peer gets `rng` in the same state, so what is drawn from it is common."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over a batch, a scalar to be differentiated."""

    def evaluate(self, model: nn.Module) -> Metrics:
        """The model's quality on the one global test set."""


@runtime_checkable
class PoolableTask(Task, Protocol):
    """A task whose loss is the mean of losses of single rows, which lets one pass serve many peers."""

    def sample_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each row, [rows], with mean `loss(model, batch)`."""


def row_loss_obstacle(task: Task) -> str | None:
    """Why the losses of single rows cannot stand for the task's loss, or None."""
    if not isinstance(task, PoolableTask):
        return "the task has no sample_losses()"
    return _inherited_beside_own_loss(task, "sample_losses")


@runtime_checkable
class LogitTask(Task, Protocol):
    """A task whose loss is the cross entropy of logits against labels: what knowledge distillation needs."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's answer to a batch, [rows, classes], before any softmax."""

    def labels(self, batch: Batch) -> Tensor:
        """The right classes of a batch, [rows]."""


def logit_obstacle(task: Task) -> str | None:
    """Why the cross entropy of its logits cannot stand for the task's loss, or None."""
    if not isinstance(task, LogitTask):
        return "the task has no logits() and labels()"
    return _inherited_beside_own_loss(task, "logits")


def _inherited_beside_own_loss(task: Task, method: str) -> str | None:
    """Why a method that `ClassificationTask` defines may contradict the task's own loss, or None."""
    if isinstance(task, ClassificationTask):
        own = [getattr(type(task), name) is not getattr(ClassificationTask, name) for name in ("loss", method)]
        if own == [True, False]:
            return f"the task has its own loss(), but not its own {method}()"
    return None


class ClassificationTask(ABC):
    """The usual classifier: cross entropy on (inputs, labels), a test set, and a training set split by `partition`."""

    partition: Partition = Partition()

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model: inputs to logits. Use `SeededDropout` for masks that agree in every engine."""

    @abstractmethod
    def test_set(self) -> Dataset[Any]:
        """Rows of (input, label); called once."""

    def train_set(self) -> Dataset[Any]:
        """Rows of (input, label), all of them; called once, then split over the peers. Or override `shard`."""
        raise InputError(f"task {type(self).__name__}: define train_set(), or shard() to split the data yourself")

    @cached_property
    def _train(self) -> Dataset[Any]:
        return self.train_set()

    @cached_property
    def tested(self) -> Dataset[Any]:
        """The test set, made once."""
        return self.test_set()

    @cached_property
    def _splits(self) -> dict[tuple[Partition, int, int], tuple[Rows, ...]]:
        return {}

    def shard(self, peer: int, peers: int, rng: np.random.Generator) -> Dataset[Any]:
        # The draw names the split: all peers draw the same, so the split is computed once and not once per peer.
        draw = int(rng.integers(1 << 62))
        name = (self.partition, peers, draw)
        if name not in self._splits:
            self._splits[name] = split(self.partition, labels_of(self._train), peers, numpy_stream(draw, "split"))
        return Subset(self._train, torch.from_numpy(self._splits[name][peer]))  # type: ignore[arg-type]

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        answer: Tensor = model(batch[0])
        return answer

    def labels(self, batch: Batch) -> Tensor:
        right: Tensor = batch[1]
        return right

    def sample_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="none")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module) -> Metrics:
        return evaluate_classifier(model, self.tested)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside the block; afterwards every submodule's own mode is back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def evaluate_classifier(model: nn.Module, dataset: Dataset[Any]) -> Metrics:
    """Cross entropy and accuracy of a classifier on rows of (input, label), in batches of bounded memory."""
    count = size_of(dataset)
    if not count:
        raise InputError("the test set is empty: there is nothing to evaluate on")
    loss, right = 0.0, 0
    with evaluating(model):
        for first in range(0, count, EVALUATION_BATCH):
            inputs, labels = gather(dataset, torch.arange(first, min(first + EVALUATION_BATCH, count)))
            logits = model(inputs)
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(dim=1) == labels).sum())
    return Metrics(loss / count, right / count, count)


def initial_model(task: Task, seed: int) -> nn.Module:
    """The model every peer starts from: θ⁰ is a function of the run's seed alone."""
    with seeded_torch(seed, "model"):
        return task.model()


def shard_of(task: Task, peer: int, peers: int, seed: int) -> Dataset[Any]:
    """The shard of one peer: a function of (seed, peers, peer) alone, in whichever process it is asked for."""
    return task.shard(peer, peers, numpy_stream(seed, "shard", peers))


def load_task(spec: str, *, partition: Partition | None = None, **options: Any) -> Task:
    """The task that `spec` names: a built-in name or `module:Class`, with `options` for its constructor.

    `partition` replaces the task's own; a task that splits its data itself refuses one.
    """
    task: object = construct("task", spec, find_class("task", spec, BUILT_IN), options)
    missing = [method for method in _METHODS if not callable(getattr(task, method, None))]
    if missing or not isinstance(task, Task):
        raise InputError(f"task {spec}: lacks {', '.join(missing)}(); a task needs {', '.join(_METHODS)}")
    if partition is not None:
        if not isinstance(task, ClassificationTask) or type(task).shard is not ClassificationTask.shard:
            raise InputError(f"task {spec}: splits its data itself, so partition settings cannot apply to it")
        task.partition = partition
    return task
