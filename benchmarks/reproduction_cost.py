"""What the runs of `marfl reproduce` cost: the CPU times from which it works out its prices, measured at small scale.

    python benchmarks/reproduction_cost.py [--turns 8]

CPU seconds of this process on one thread, the fastest of several turns, beside the constants of
`marfl.reproduce.runner`; then CPU hours of every scale. MNIST is the paper's network (it needs `MARFL_DATA`), the head
is that of 20NG with MiniLM.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from marfl.config import load
from marfl.dp.noise import derived_words
from marfl.dp.private_agreement import PrivateAgreement, agreement_of
from marfl.learn import Optimizer, minibatch_of_many, pooled_update
from marfl.learn.update import local_update
from marfl.reproduce import runner
from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import SCALES
from marfl.reproduce.experiments import EXPERIMENTS
from marfl.reproduce.publish import costs
from marfl.rng import numpy_stream
from marfl.sim.engine import Simulation
from marfl.sim.exact_world import ExactWorld

HEAD = {"features": 384, "hidden": [72], "classes": 20, "samples": 4000, "test_samples": 7532}
TASKS = {
    "mnist": {"task": "mnist", "task_options": {"dropout": False}, "batch": 64},
    "head": {"task": "synthetic", "task_options": HEAD, "batch": 16},
}


def fastest(turns: int, work: Callable[[], object]) -> float:
    """CPU seconds of the fastest turn, after one to warm up."""
    work()
    found = []
    for _ in range(turns):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
    return min(found)


def measured(name: str, turns: int) -> dict[str, float]:
    """A local step, a peer's part of a pooled one, a test, and the noise of an update."""
    config = load(overrides=TASKS[name] | {"peers": 16, "group_size": 4, "engine": "fast"})
    world = Simulation(config).world
    assert isinstance(world, ExactWorld)
    local, theta = world.local, world.local.worker.flat.clone()
    momentum, loaders = torch.zeros_like(theta), [local.loader(peer) for peer in range(16)]
    batch = loaders[0].minibatch(0, 1)
    private = load(overrides=TASKS[name] | {"peers": 16, "group_size": 4, "privacy.noise_multiplier": 0.3})
    agreement = agreement_of(private, world.local_work, local.worker.trainable)
    assert isinstance(agreement, PrivateAgreement)
    words = derived_words(numpy_stream(0, 0, 1, "privacy"))
    pairs = [loaders[place : place + 2] for place in range(0, 16, 2)] if name == "mnist" else [loaders]
    pooled = [minibatch_of_many([(loader, 0) for loader in some], 1) for some in pairs]
    return {
        "step": fastest(turns, lambda: local_update(local.worker, theta, momentum, [batch], Optimizer())),
        "pooled": fastest(turns, lambda: pooled_update(local.worker, theta, momentum, pooled, [1.0] * 16, Optimizer()))
        / 16,
        "test": fastest(max(1, turns // 4), lambda: local.task.evaluate(local.worker.module)),
        "noise": fastest(turns, lambda: agreement.privatised(theta * 1e-3, momentum, 1, 0.1, words)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    turns = parser.parse_args().turns
    taken = {
        "mnist": {
            "step": 64 * runner.ROW_SECONDS["mnist"], "pooled": 64 * runner.ROW_SECONDS["mnist"],
            "test": runner.TEST_SECONDS["mnist"], "noise": runner.NOISE_SECONDS["mnist"],
        },
        "head": {"step": runner.STEP_SECONDS, "pooled": runner.POOLED_SECONDS, "test": 0.1,
            "noise": runner.SMALL_NOISE_SECONDS},
    }  # fmt: skip
    for name in TASKS:
        for what, seconds in measured(name, turns).items():
            print(f"{name:6} {what:7} {seconds:9.5f} CPU s measured, {taken[name][what]:9.5f} taken")
    for scale, found in costs().items():
        everything = runner.todo_of(Archive(Path("nowhere")), SCALES[scale], list(EXPERIMENTS.values()))
        hours = sum(bundle.seconds for bundle in everything) / 3600
        dearest = max(found, key=found.__getitem__)
        print(f"{scale:7} {hours:7.1f} CPU h in all, at most; {dearest} {found[dearest] / 3600:.1f}")


if __name__ == "__main__":
    main()
