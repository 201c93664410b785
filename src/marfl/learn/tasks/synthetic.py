"""`synthetic`: Gaussian inputs labelled by a hidden linear teacher, and an MLP of any size. For scale tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from marfl.errors import InputError
from marfl.learn.models import SeededDropout
from marfl.learn.task import ClassificationTask
from marfl.rng import numpy_stream


class Synthetic(ClassificationTask):
    """An MLP features → hidden… → classes; by default the paper's 20NG head, 768 → 72 → 20 with 56,828 parameters.

    The data is a function of its sizes and `data_seed` alone, so every process makes the same.
    """

    def __init__(
        self,
        *,
        features: int = 768,
        hidden: Sequence[int] = (72,),
        classes: int = 20,
        samples: int = 20_000,
        test_samples: int = 2_000,
        dropout: float = 0.0,
        data_seed: int = 0,
    ) -> None:
        sizes = {"features": features, "classes": classes, "samples": samples, "test_samples": test_samples}
        sizes |= {f"hidden[{layer}]": width for layer, width in enumerate(hidden)}
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"task synthetic: {name} {size}: must be at least 1")
        self.widths = (features, *hidden, classes)
        self.samples = samples
        self.test_samples = test_samples
        self.dropout = dropout
        self.data_seed = data_seed

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for width, following in zip(self.widths[:-2], self.widths[1:-1], strict=True):
            layers += [nn.Linear(width, following), nn.ReLU()]
            if self.dropout:
                layers.append(SeededDropout(self.dropout))
        return nn.Sequential(*layers, nn.Linear(self.widths[-2], self.widths[-1]))

    def train_set(self) -> Dataset[Any]:
        return self._draw("train", self.samples)

    def test_set(self) -> Dataset[Any]:
        return self._draw("test", self.test_samples)

    @cached_property
    def _teacher(self) -> NDArray[np.float32]:
        rng = numpy_stream(self.data_seed, "teacher")
        return rng.standard_normal((self.widths[0], self.widths[-1]), dtype=np.float32)

    def _draw(self, part: str, count: int) -> TensorDataset:
        rng = numpy_stream(self.data_seed, part)
        inputs = rng.standard_normal((count, self.widths[0]), dtype=np.float32)
        labels = (inputs @ self._teacher).argmax(axis=1)
        return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels))
