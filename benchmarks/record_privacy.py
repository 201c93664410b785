"""What it costs to hide single records: a local step of batch 64, private beside plain, and Opacus beside both.

    python benchmarks/record_privacy.py [--turns 5] [--opacus PYTHON]

Private: gradients of single records, clipped, truncated and added, and the share of noise of a whole vector. Steps take
turns, medians of CPU seconds count. With --opacus, an interpreter that has opacus and torch, it does the same with its
own plain step beside it (`opacus_central.py`). Accuracy against ε is in `record_accuracy.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from marfl.dp.calibration import NoisePlan
from marfl.dp.mechanism import Adaptation
from marfl.dp.noise import system_words
from marfl.dp.privacy_settings import Sound
from marfl.dp.private_agreement import RecordAgreement, Secret
from marfl.dp.record_level import Sampling
from marfl.learn import Loader, initial_model
from marfl.learn.data import MiniBatch
from marfl.learn.local_work import LocalWork
from marfl.learn.models import Cnn
from marfl.learn.record_gradients import RecordGradients
from marfl.learn.task import ClassificationTask
from marfl.learn.worker import Worker, keep_freed_memory

BATCH = 64
CENTRAL = Path(__file__).with_name("opacus_central.py")


class Shaped(ClassificationTask):
    """A network of the paper, without its data."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def model(self) -> nn.Module:
        return self._network

    def test_set(self) -> Any:
        raise NotImplementedError


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "CNN": (lambda: Cnn(28, (32, 64), 128, dropout=(0.0, 0.0)), (1, 28, 28)),
    "head": (lambda: nn.Sequential(nn.Linear(768, 72), nn.ReLU(), nn.Linear(72, 20)), (768,)),
}


def seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def show_cost(turns: int) -> None:
    print(f"one local step, batch {BATCH}: CPU seconds, and over plain")
    for name, (network, shape) in NETWORKS.items():
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(BATCH, *shape), torch.randint(0, 10, (BATCH,)))
        task = Shaped(network())
        worker = Worker(task, initial_model(task, 0))
        loader = Loader(data, seed=0, peer=0, batch_size=BATCH)
        gradients = RecordGradients(worker, loader.records(np.arange(1)))
        sound = Sound(NoisePlan(1.0, 16, adaptive=False), Adaptation(step=0.0), 1.0)
        agreement = RecordAgreement(
            LocalWork(), "derive", sound=sound, trainable=worker.trainable, sampling=Sampling(BATCH, BATCH)
        )
        batch, theta = MiniBatch(data.tensors, torch.arange(BATCH)), worker.flat.clone()

        def private(each: RecordAgreement = agreement, parts: Any = (gradients, loader, theta)) -> None:
            words = system_words()
            each.of_records(*parts, 1.0, Secret(words, words))

        def plain(one: Worker = worker, minibatch: MiniBatch = batch) -> None:
            one.differentiate(minibatch)

        taken = [(seconds(plain), seconds(private)) for _ in range(turns + 1)][1:]  # the first warms up
        usual, hidden = (statistics.median(column) for column in zip(*taken, strict=True))
        print(f"  {name:<6}{worker.trainable:>10,} parameters   plain {usual:.4f} s   private {hidden:.4f} s", end="")
        print(f"   {hidden / usual:.2f} ×   ({gradients.way})", flush=True)


def show_opacus(python: str, turns: int) -> None:
    """The same steps by Opacus, in an interpreter that has it."""
    done = subprocess.run([python, CENTRAL, "cost", str(turns)], check=True, capture_output=True, text=True)
    print("Opacus")
    for name, taken in json.loads(done.stdout.splitlines()[-1]).items():
        usual, hidden = taken["plain"], taken["private"]
        print(f"  {name:<29}plain {usual:.4f} s   private {hidden:.4f} s   {hidden / usual:.2f} ×")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--opacus", metavar="PYTHON", help="An interpreter that has opacus and torch.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    show_cost(given.turns)
    if given.opacus is not None:
        show_opacus(given.opacus, given.turns)


if __name__ == "__main__":
    main()
