"""What differential privacy costs in time, bytes and accuracy.

    python benchmarks/privacy.py [--only cost|accuracy] [--iterations 100] [--peers 125] [--seeds 1] [--turns 3]
                                 [--models CNN head] [--sizes 8 27 125]

Cost: one iteration of a swarm on the virtual network, from the announcements to the commit: plain; in sound mode, where
every peer clips its update, makes integers of it, draws noise from the OS, sends one value more and settles the mean;
with masks, and with both. "integers" is wire = fixed without privacy, in 64 bits; private integers take 32. "noise" is
all that a private peer does beside the exchange. They take turns, medians of CPU seconds count, and a ratio is against
the plain aggregation beside it.
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
from marfl.dp.accounting import COLUMNS
from marfl.dp.calibration import NoisePlan
from marfl.dp.lattice import lattice_of
from marfl.dp.mechanism import Adaptation, privatise, settle
from marfl.dp.noise import system_words
from marfl.errors import BrokenPromise
from marfl.learn.tasks.mnist import Mnist
from marfl.learn.worker import keep_freed_memory
from marfl.sim.engine import simulate

MODELS = {"CNN": 1_199_882, "head": 56_828}  # the paper's networks for MNIST and 20NG
SIZES = {8: 2, 27: 3, 125: 5}  # peers, and their group size: perfect grids
WIDTH = 32  # bits of private integers, for these models and crowds
MULTIPLIERS = (0.5, 1.0, 2.0, 4.0, 8.0)


class LinearMnist(Mnist):
    """MNIST by one linear layer."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


@dataclass(frozen=True)
class Cost:
    """What an iteration of the whole swarm takes."""

    seconds: float  # of CPU
    sent: int  # bytes of all peers, control included


def turn(deltas: Tensor, group_size: int) -> dict[str, Cost]:
    """The same updates, aggregated in every way."""
    sent, noise = private(deltas)
    found = {
        "plain": summed(deltas, group_size, "fp32"),
        "integers": summed(deltas, group_size, "fixed"),
        "noise": noise,
        "DP": summed(sent, group_size, "fixed32"),
        "masks": summed(deltas, group_size, "masked"),
        "DP and masks": summed(sent, group_size, "masked32"),
    }
    for way in ("DP", "DP and masks"):
        found[way] = Cost(found[way].seconds + noise.seconds, found[way].sent)
    return found


def summed(values: Tensor, group_size: int, wire: str) -> Cost:
    run = aggregate(values, group_size, "grid", wire)
    return Cost(run.seconds.cpu, run.payload + run.control)


def private(deltas: Tensor) -> tuple[Tensor, Cost]:
    """What private peers send, and what it costs them to make it and to settle the mean."""
    peers, parameters = deltas.shape
    lattice = lattice_of(NoisePlan(0.9 * peers / 10, peers), parameters)
    if lattice.width != WIDTH:
        raise BrokenPromise(f"private integers of {lattice.width} bits")
    sent = torch.zeros(peers, parameters + 1, dtype=torch.int32)  # its pages are no part of the noise
    mean, public = torch.zeros(parameters + 1), torch.zeros(parameters)
    with stopwatch() as alone:
        for row, delta in enumerate(deltas):
            sent[row] = privatise(delta, 1.0, lattice, system_words())
            settle(mean, public, 1.0, lattice, Adaptation())
    return sent, Cost(alone().cpu, 0)


def show_cost(turns: int, models: list[str], sizes: list[int]) -> None:
    print("one iteration of the protocol: CPU seconds and bytes over plain (CPU s a peer, models a peer)")
    for name in models:
        parameters = MODELS[name]
        for peers, group_size in ((size, SIZES[size]) for size in sizes):
            deltas = torch.randn(peers, parameters, generator=torch.Generator().manual_seed(0))
            done = [turn(deltas, group_size) for _ in range(turns + 1)][1:]  # the first warms up
            seconds = {way: statistics.median(each[way].seconds for each in done) for way in done[0]}
            sent = {way: cost.sent for way, cost in done[0].items()}
            print(f"  {name}, {parameters:,} parameters, {peers} peers")
            for way, taken in seconds.items():
                ratios = f"{taken / seconds['plain']:>6.2f} × time {sent[way] / sent['plain']:>6.2f} × bytes"
                each = f"({taken / peers:.4f} s, {sent[way] / peers / 4 / parameters:.3f})"
                print(f"    {way:<14}{ratios}   {each}", flush=True)


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
    parser.add_argument("--sizes", nargs="+", type=int, choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if given.only != "accuracy":
        show_cost(given.turns, given.models, given.sizes)
    if given.only != "cost":
        show_accuracy(given.peers, given.iterations, given.seeds)


if __name__ == "__main__":
    main()
