"""What every entrant of the race trains, in plain torch and numpy: entrants run in environments without marfl.

One iteration: every peer makes one step of SGD on one mini-batch of its own shard, from the common model, and the
models are averaged.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Workload:
    """A federated task: so many peers, one batch each."""

    name: str
    peers: int
    batch: int

    def model(self) -> nn.Module:
        """As one would write it with torch alone; the sizes are those of marfl's own models."""
        torch.manual_seed(0)
        if self.name == "cnn":
            return nn.Sequential(
                nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
                nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
            )  # fmt: skip
        return nn.Sequential(nn.Linear(768, 72), nn.ReLU(), nn.Linear(72, 20))

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """All inputs and labels; equal shards of them are the peers'."""
        if self.name == "cnn":
            return _mnist()
        draw = np.random.default_rng(0)
        rows = 20 * self.peers
        return draw.standard_normal((rows, 768), dtype=np.float32), draw.integers(0, 20, rows)

    def rows(self, peer: int, iteration: int, samples: int) -> np.ndarray:
        """Which rows a peer trains on: the next batch of its shard, over and over."""
        size = samples // self.peers
        return peer * size + (iteration * self.batch + np.arange(self.batch)) % size


WORKLOADS = {each.name: each for each in (Workload("cnn", 125, 64), Workload("small", 1_000, 16))}


def _mnist() -> tuple[np.ndarray, np.ndarray]:
    folder = Path(os.environ["MARFL_DATA"]) / "mnist"
    images = np.frombuffer(gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    scaled = (images.reshape(-1, 1, 28, 28).astype(np.float32) / 255 - 0.1307) / 0.3081
    return scaled, labels.astype(np.int64)


@lru_cache
def loaded(name: str) -> tuple[nn.Module, np.ndarray, np.ndarray]:
    """Model and data, once in a process of one thread."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    return workload.model(), *workload.data()


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


class Stopwatch:
    """Says on standard output, as lines of JSON, when an iteration has ended; the harness reads them."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self, loss: float | None = None) -> None:
        now = time.perf_counter()
        print(json.dumps({"lap": now - self._last, "loss": loss}), flush=True)
        self._last = time.perf_counter()


def arguments() -> tuple[Workload, int]:
    """The workload and the number of iterations, from the command line."""
    return WORKLOADS[sys.argv[1]], int(sys.argv[2])
