"""What differential privacy costs in time, bytes and accuracy.

    python benchmarks/privacy.py [--only cost|accuracy] [--iterations 100] [--peers 125] [--seeds 1] [--turns 3]

Cost: one iteration of a swarm on the virtual network, from the announcements to the commit, with and without sound
mode: every peer clips its update, draws noise from the OS and sends one value more, and settles the mean. They take
turns, medians of CPU seconds count, and a ratio is against the plain aggregation beside it.
Accuracy: MNIST with a linear model (7,850 parameters), because noise over clip grows as √parameters over peers; `mar`
beside `fedavg` with the same mechanism, for several noise multipliers.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from aggregate import aggregate, stopwatch
from torch import Tensor, nn

from marfl.config import load
from marfl.learn.memory import keep_freed_memory
from marfl.learn.tasks.mnist import Mnist
from marfl.privacy.accounting import COLUMNS
from marfl.privacy.calibration import NoisePlan
from marfl.privacy.mechanism import Adaptation, privatise, settle
from marfl.privacy.noise import os_noise
from marfl.sim.engine import simulate

MODELS = {"CNN": 1_199_882, "head": 56_828}  # the paper's networks for MNIST and 20NG
SIZES = {8: 2, 27: 3, 125: 5}  # peers, and their group size: perfect grids
MULTIPLIERS = (0.5, 1.0, 2.0, 4.0, 8.0)


class LinearMnist(Mnist):
    """MNIST by one linear layer."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


@dataclass(frozen=True)
class Turn:
    """One plain and one private iteration, in CPU seconds and bytes."""

    plain: float
    noise: float  # of it: clipping and drawing noise, all peers
    private: float
    payload_plain: int
    payload_private: int


def turn(deltas: Tensor, group_size: int) -> Turn:
    """A plain iteration, then a private one of the same updates."""
    peers = len(deltas)
    plain = aggregate(deltas, group_size, "grid")
    plan = NoisePlan(0.9 * peers / 10, peers)
    sent = torch.empty(peers, deltas.shape[1] + 1)
    with stopwatch() as noising:
        for row, delta in enumerate(deltas):
            sent[row] = privatise(delta, 1.0, plan, os_noise)
    private = aggregate(sent, group_size, "grid")
    public = torch.zeros(deltas.shape[1])
    with stopwatch() as settling:
        for _ in range(peers):
            settle(private.mean, public, 1.0, Adaptation())
    noise = noising().cpu
    whole = private.seconds.cpu + noise + settling().cpu
    return Turn(plain.seconds.cpu, noise, whole, plain.payload, private.payload)


def show_cost(turns: int) -> None:
    print("one iteration of the protocol, CPU s     plain   private   ratio   noise, ms a peer   payload, values more")
    for name, parameters in MODELS.items():
        for peers, group_size in SIZES.items():
            deltas = torch.randn(peers, parameters, generator=torch.Generator().manual_seed(0))
            done = [turn(deltas, group_size) for _ in range(turns + 1)][1:]  # the first warms up
            plain, private, noise = (
                statistics.median(getattr(each, field) for each in done) for field in ("plain", "private", "noise")
            )
            more = (done[0].payload_private - done[0].payload_plain) // 4
            size = f"{name}, {parameters:,} × {peers} peers"
            print(f"  {size:<36} {plain:>7.3f} {private:>9.3f} {private / plain:>7.2f} {1000 * noise / peers:>18.1f}"
                  f" {more:>22,}", flush=True)  # fmt: skip


def private_run(technique: str, multiplier: float | None, settings: dict[str, Any]) -> dict[str, Any]:
    noise = {} if multiplier is None else {"privacy.noise_multiplier": multiplier}
    return simulate(load(overrides={**settings, "technique": technique, **noise}))


def show_accuracy(peers: int, iterations: int, seeds: int) -> None:
    settings = {
        "task": "privacy:LinearMnist", "peers": peers, "iterations": iterations, "batch": 64, "engine": "fast",
        "test_every": iterations, "group_size": 5,
    }  # fmt: skip
    print(f"\nMNIST, linear model, {peers} peers, {iterations} iterations, delta = peers^-1.1, {seeds} seeds")
    print("     σ   noise/clip   ε outsider   ε insider   ε insider, masked   mar accuracy   fedavg accuracy")
    for multiplier in (None, *MULTIPLIERS):
        found = {
            name: [private_run(name, multiplier, settings | {"seed": seed}) for seed in range(seeds)]
            for name in ("mar", "fedavg")
        }
        shown = "   ".join(
            f"{statistics.mean(run['final_accuracy'] for run in runs):>12.1%}" for runs in found.values()
        )
        told = found["mar"][0]["privacy"]
        if told is None or multiplier is None:
            print(f"  none            0            –           –                   –   {shown}", flush=True)
            continue
        ratio = NoisePlan(multiplier, peers).noise_to_clip_ratio(7_850)
        outsider, insider, masked = (told[column] for column in COLUMNS)
        epsilons = f"{outsider:>12.1f} {insider:>11,.0f} {masked:>19.1f}"
        print(f"  {multiplier:>4g} {ratio:>12.2f} {epsilons}   {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("cost", "accuracy"))
    parser.add_argument("--peers", type=int, default=125)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if given.only != "accuracy":
        show_cost(given.turns)
    if given.only != "cost":
        show_accuracy(given.peers, given.iterations, given.seeds)


if __name__ == "__main__":
    main()
