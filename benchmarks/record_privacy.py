"""What it costs to hide single records: time of a local step, and accuracy against ε.

    python benchmarks/record_privacy.py [--only cost|accuracy] [--tasks mnist 20ng] [--noise 0.6 1 2] [--iterations 100]
                                        [--peers 16] [--seeds 3] [--learning-rate 1] [--clip 1] [--out FILE]

Cost: one local step of batch 64, private (gradients of single records, clipped, truncated and added, and the share of
noise of a whole vector) beside a plain one; they take turns, medians of CPU seconds count.
Accuracy: peers that hide single records under masks, with batches of 64 (20NG: 16) at a public rate, beside the same
run without privacy; ε is that of a masked insider at δ = 1e-5. `--out` keeps every run as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from marfl.config import load
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
from marfl.sim.engine import simulate

BATCH = 64
RUNS: dict[str, dict[str, Any]] = {  # what 16 peers have of each, at least about so many records
    "mnist": {"task": "mnist", "batch": 64, "privacy.records": 3750},
    "20ng": {"task": "20ng", "batch": 16, "privacy.records": 700},
}
DELTA = 1e-5


class Shaped(ClassificationTask):
    """A network of the paper, without its data."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def model(self) -> nn.Module:
        return self._network

    def test_set(self) -> Any:
        raise NotImplementedError


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "CNN": (lambda: Cnn(28, (32, 64), 128), (1, 28, 28)),
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


def run(task: str, noise: float | None, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run to its end, and what came of it."""
    settings = RUNS[task] | {
        "peers": given.peers, "iterations": given.iterations, "test_every": given.iterations, "seed": seed,
        "group_size": 4,
    }  # fmt: skip
    if noise is None:
        settings.pop("privacy.records")
    else:
        settings |= {
            "privacy.unit": "record", "privacy.noise_multiplier": noise, "privacy.delta": DELTA, "privacy.masks": True,
            "privacy.clip": given.clip, "optimizer.learning_rate": given.learning_rate,
        }  # fmt: skip
    summary = simulate(load(overrides=settings))
    told = summary["privacy"] or {}
    return {
        "task": task, "noise": noise, "seed": seed, "accuracy": summary["final_accuracy"],
        "epsilon": told.get("epsilon_insider_masked"), "epsilon_outsider": told.get("epsilon_outsider"),
        "iterations": summary["iterations"], "peers": given.peers, "clip": given.clip,
        "learning_rate": given.learning_rate,
    }  # fmt: skip


def show_accuracy(given: argparse.Namespace) -> None:
    for task in given.tasks:
        print(f"\n{task}: {given.peers} peers, {given.iterations} iterations, {given.seeds} seeds, delta = {DELTA:g}")
        print("     σ   ε masked insider   ε outsider   accuracy")
        for noise in (None, *given.noise):
            found = [run(task, noise, seed, given) for seed in range(given.seeds)]
            if given.out is not None:
                with given.out.open("a") as kept:
                    kept.writelines(json.dumps(each) + "\n" for each in found)
            accuracies = [each["accuracy"] for each in found]
            shown = f"{statistics.mean(accuracies):.1%} ({min(accuracies):.1%} to {max(accuracies):.1%})"
            if noise is None:
                print(f"  none                  –            –   {shown}", flush=True)
            else:
                worth = f"{found[0]['epsilon']:>18.2f} {found[0]['epsilon_outsider']:>12.2f}"
                print(f"  {noise:>4g} {worth}   {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("cost", "accuracy"))
    parser.add_argument("--tasks", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    parser.add_argument("--noise", nargs="+", type=float, default=[0.6, 1.0, 2.0, 4.0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if given.only != "accuracy":
        show_cost(given.turns)
    if given.only != "cost":
        show_accuracy(given)


if __name__ == "__main__":
    main()
