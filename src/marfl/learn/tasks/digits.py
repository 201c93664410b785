"""`digits`: scikit-learn's 1,797 handwritten 8×8 digits. No download, trains in seconds: the default."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from marfl.learn.models import Cnn
from marfl.learn.task import ClassificationTask
from marfl.rng import key, permutation

TEST_SAMPLES = 360  # a fifth


class Digits(ClassificationTask):
    """Ten digits, a small CNN with dropout (30,154 parameters), and a split in training and test set that is fixed."""

    def model(self) -> nn.Module:
        return Cnn(side=8, channels=(24, 48), hidden=96, dropout=(0.1, 0.25))

    def train_set(self) -> Dataset[Any]:
        return self._rows(self._order[TEST_SAMPLES:])

    def test_set(self) -> Dataset[Any]:
        return self._rows(self._order[:TEST_SAMPLES])

    def _rows(self, rows: Tensor) -> Dataset[Any]:
        images, labels = _digits()
        return TensorDataset(images[rows], labels[rows])

    @property
    def _order(self) -> Tensor:
        order = permutation(key(0, "digits"), len(_digits()[1]))  # never the run's seed: one test set for all
        return torch.from_numpy(order)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """All of them, read once in a process; nobody writes into them."""
    from sklearn.datasets import load_digits  # takes a second to import: only for those who ask for it

    images, labels = load_digits(return_X_y=True)
    scaled = torch.from_numpy(images).to(torch.float32).view(-1, 1, 8, 8) / 16
    return (scaled - 0.3053) / 0.3761, torch.from_numpy(labels).to(torch.int64)  # mean and deviation of all pixels
