"""A task whose steps take a moment, with dropout of torch's own: long enough for something to die in one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from marfl.errors import InputError
from marfl.learn.task import ClassificationTask


class SlowTask(ClassificationTask):
    """`seconds`: for each loss; `refuses`: all processes but this one; `breaks`: losses raise; `says`: pids."""

    def __init__(
        self,
        *,
        seconds: float = 0.0,
        refuses: int = 0,
        breaks: bool = False,
        says: str | None = None,
        normalised: bool = False,
    ) -> None:
        if refuses and os.getpid() != refuses:
            raise InputError("task slow: its data are elsewhere")
        self._seconds, self._breaks, self._normalised = seconds, breaks, normalised
        if says is not None:
            Path(says).mkdir(exist_ok=True)
            (Path(says) / str(os.getpid())).touch()
        generator = torch.Generator().manual_seed(3)
        self._inputs = torch.randn(240, 8, generator=generator)
        self._labels = (self._inputs.sum(1) > 0).long()

    def model(self) -> nn.Module:
        middle = nn.BatchNorm1d(16) if self._normalised else nn.Dropout(0.2)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), middle, nn.Linear(16, 2))

    def train_set(self) -> Dataset[Any]:
        return TensorDataset(self._inputs[:200], self._labels[:200])

    def test_set(self) -> Dataset[Any]:
        return TensorDataset(self._inputs[200:], self._labels[200:])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self._seconds)
        if self._breaks:
            raise ZeroDivisionError("a loss that raises")
        return super().loss(model, batch)
