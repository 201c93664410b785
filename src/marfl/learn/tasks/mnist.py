"""`mnist`: the paper's network on the four original MNIST files (LeCun et al. 1998), from `$MARFL_DATA/mnist`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from marfl.errors import InputError
from marfl.learn.data import data_folder
from marfl.learn.idx import read_idx
from marfl.learn.models import Cnn
from marfl.learn.task import ClassificationTask

FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"


class Mnist(ClassificationTask):
    """60,000 training and 10,000 test images of 28×28, normalised by the training set's mean and deviation."""

    def model(self) -> nn.Module:
        return Cnn(side=28, channels=(32, 64), hidden=128)

    def train_set(self) -> Dataset[Any]:
        return load("train", 60_000)

    def test_set(self) -> Dataset[Any]:
        return load("t10k", 10_000)


def load(part: str, count: int) -> TensorDataset:
    """One part of MNIST as normalised fp32 images [count, 1, 28, 28] and int64 labels [count]."""
    folder = data_folder("mnist", files=FILES, source=SOURCE)
    images = _read(folder / f"{part}-images-idx3-ubyte.gz", (count, 28, 28))
    labels = _read(folder / f"{part}-labels-idx1-ubyte.gz", (count,))
    if int(labels.max()) > 9:
        raise InputError(f"{folder / f'{part}-labels-idx1-ubyte.gz'}: label {int(labels.max())} is not a digit")
    scaled = images.to(torch.float32).div_(255).sub_(0.1307).div_(0.3081)
    return TensorDataset(scaled.unsqueeze(1), labels.to(torch.int64))


def _read(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    array = read_idx(path)
    if array.shape != shape:
        raise InputError(f"{path}: has shape {array.shape}, MNIST has {shape}; download it again")
    return torch.from_numpy(array.copy())  # a copy, because the file's bytes are read-only
