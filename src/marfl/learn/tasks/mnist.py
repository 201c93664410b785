"""`mnist`: the paper's network on the four original MNIST files (LeCun et al. 1998), from `$MARFL_DATA/mnist`."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from marfl.errors import InputError
from marfl.learn.data import data_folder
from marfl.learn.models import Cnn
from marfl.learn.task import ClassificationTask

FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_UNSIGNED_BYTE = 8  # the type code of every MNIST file


class Mnist(ClassificationTask):
    """60,000 training and 10,000 test images of 28×28, normalised by the training set's mean and deviation.

    The paper's code has no dropout (`dropout = false`).
    """

    def __init__(self, *, dropout: bool = True) -> None:
        if not isinstance(dropout, bool):
            raise InputError(f"task mnist: dropout {dropout}: must be true or false")
        self._dropout = (0.25, 0.5) if dropout else (0.0, 0.0)

    def model(self) -> nn.Module:
        return Cnn(side=28, channels=(32, 64), hidden=128, dropout=self._dropout)

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


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in a gzipped IDX file of unsigned bytes; an `InputError` of one line for anything else.

    IDX is Yann LeCun's format: a header, then the values, all big-endian.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be unpacked ({error}); download it again") from error
    dimensions = content[3] if len(content) >= 4 else 0
    start = 4 + 4 * dimensions
    if len(content) < start or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise InputError(f"{path}: not an IDX file of unsigned bytes; download it again")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    if len(content) - start != math.prod(shape):
        raise InputError(f"{path}: holds {len(content) - start} values, its header says {shape}; download it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
