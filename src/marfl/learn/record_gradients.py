"""The gradient of every record by itself, as the privacy of one record needs it.

`torch.func` computes those of a slice of records at once (vmap over grad); for plain networks there is a faster way
(`layer_gradients`). Slices all have one size, the last one is
filled up: what is computed for a record then does not depend on how many others there are, not even in its last bit
(`tests/learn/test_record_gradients.py`). A model that vmap cannot take goes one record at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from marfl.errors import InputError
from marfl.learn.data import Batch, map_tensors, take
from marfl.learn.layer_gradients import Layer, LayerGradients, Outer, plain
from marfl.learn.models import dropout_context
from marfl.learn.task import PoolableTask, Task, row_loss_obstacle
from marfl.learn.worker import Worker
from marfl.rng import seeded_torch

Slice: TypeAlias = list[Layer]  # by layer, in the order of the flat vector: [records, values]

MOST_RECORDS = 16  # of a slice
SLICE_VALUES = 2**25  # so many gradients at a time: 128 MB


def record_obstacle(worker: Worker) -> str | None:
    """Why the gradients of single records cannot be had, or None."""
    if obstacle := row_loss_obstacle(worker.task):
        return obstacle
    for name, module in worker.module.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name} normalises over a batch, which mixes records; take GroupNorm or LayerNorm"
    if worker.trainable < worker.layout.length:
        return "the model has floating buffers, which are made from all records together"
    return None


class RecordGradients:
    """Of the model in a worker, for one batch after the other."""

    def __init__(self, worker: Worker, example: Batch) -> None:
        """`example` is any record, as a batch of one: it is tried out whether vmap can take the model."""
        if obstacle := record_obstacle(worker):
            raise InputError(f"privacy.unit = record: {obstacle}")
        self.worker = worker
        self.at_once = max(1, min(MOST_RECORDS, SLICE_VALUES // worker.trainable))
        self.way = f"gradients of single records, {self.at_once} at a time"
        self._of_slice: Callable[[Batch, Tensor], Slice] = self._vmapped()
        if plain(worker):
            self._of_slice = LayerGradients(worker).of_slice
            if self._refused(example) is None:
                return
            self._of_slice = self._vmapped()
        if (error := self._refused(example)) is not None:
            self.at_once, self._of_slice = 1, self._alone
            self.way = f"gradients one record at a time, because vmap cannot take the model: {_first_line(error)}"

    def _refused(self, example: Batch) -> Exception | None:
        """Why the way chosen cannot take the model, or None."""
        try:
            next(self.slices(example, torch.zeros(1, dtype=torch.int64)))
        except (RuntimeError, ValueError) as error:  # whatever torch cannot transform
            return error
        return None

    def slices(self, batch: Batch, keys: Tensor) -> Iterator[Slice]:
        """The gradients at the worker's θ; `keys` name the dropout masks of each record. None for an empty batch."""
        for first in range(0, len(keys), self.at_once):
            rows = torch.arange(first, first + self.at_once).clamp_(max=len(keys) - 1)
            some = take(batch, rows)
            with seeded_torch(int(keys[first]), "plain dropout"):
                found = self._of_slice(some, keys[rows])
            there = min(self.at_once, len(keys) - first)
            yield [_first(layer, there) for layer in found]

    def _vmapped(self) -> Callable[[Batch, Tensor], Slice]:
        layers = self.worker.layers()
        # a copy: torch leaves a module changed in which a layer is used twice
        losses = _Losses(self.worker.task, copy.deepcopy(self.worker.module))

        def of_slice(batch: Batch, keys: Tensor) -> Slice:
            names = keys.numpy()

            def loss(values: dict[str, Tensor], record: Batch, row: Tensor) -> Tensor:
                with dropout_context(names, row):
                    alone = map_tensors(lambda tensor: tensor.unsqueeze(0), record)
                    value: Tensor = functional_call(losses, {f"module.{n}": v for n, v in values.items()}, (alone,))
                    return value

            each = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
            found = each(layers, batch, torch.arange(len(keys)))
            return [found[name] for name in layers]

        return of_slice

    def _alone(self, batch: Batch, keys: Tensor) -> Slice:
        losses = _Losses(self.worker.task, self.worker.module)
        self.worker.grad.zero_()
        self.worker.accumulate(keys, lambda: losses(batch))
        return [self.worker.grad[None, : self.worker.trainable].clone()]


def _first(layer: Layer, count: int) -> Layer:
    """Without the records that only filled the slice up."""
    if isinstance(layer, Outer):
        return Outer(layer.left[:count], layer.right[:count])
    return layer[:count].flatten(1)


def written_out(layer: Layer) -> Tensor:
    """[records, values]."""
    if isinstance(layer, Outer):
        return (layer.left.unsqueeze(2) * layer.right.unsqueeze(1)).flatten(1)
    return layer


class _Losses(nn.Module):
    """The sum of a task's losses of single records, as a module whose parameters can be swapped."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        super().__init__()
        assert isinstance(task, PoolableTask)  # `record_obstacle` has seen to it
        self.module, self._task = module, task

    def forward(self, batch: Batch) -> Tensor:
        return self._task.sample_losses(self.module, batch).sum()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
