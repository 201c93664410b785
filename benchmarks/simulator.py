"""The simulator beside plain PyTorch: `bitwise` on the paper's CNN, `fast` from 125 to 10,000 peers.

    python benchmarks/simulator.py [--iterations 3] [--skip-mnist] [--skip-scale]

The floor of `bitwise` is what 125 plain one-thread PyTorch steps would take if they spread perfectly over the cores;
both are timed in one run, taking turns. MNIST comes from $MARFL_DATA; without it, the CNN sees random images.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time

import torch
from local_step import PlainDropoutCnn, plain_step

from marfl.config import load
from marfl.learn.memory import keep_freed_memory
from marfl.sim.engine import Simulation

PEERS = 125


def seconds_of_plain_steps(count: int) -> float:
    """Plain PyTorch, one after the other on one thread."""
    torch.set_num_threads(1)
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    step = plain_step(PlainDropoutCnn())
    step(images, labels)
    begun = time.perf_counter()
    for _ in range(count):
        step(images, labels)
    return time.perf_counter() - begun


def mnist(iterations: int) -> None:
    cores = os.cpu_count() or 1
    config = load(
        "exact-mnist", overrides={"iterations": 2 * iterations + 2, "test_every": 10_000, "checkpoint_every": 10_000}
    )
    simulation = Simulation(config)
    rows = simulation.rows()
    next(rows)  # the workers load their data
    ours, floors = [], []
    for _ in range(iterations):
        floors.append(seconds_of_plain_steps(PEERS) / cores)
        begun = time.perf_counter()
        row = next(rows)
        ours.append(time.perf_counter() - begun)
    rows.close()
    ratios = [one / floor for one, floor in zip(ours, floors, strict=True)]
    print(f"MNIST, the paper's CNN, {PEERS} peers, B = 1, engine bitwise, {cores} cores")
    print(
        f"  seconds an iteration ÷ ({PEERS} plain steps ÷ {cores}): {statistics.median(ratios):.3f}, median"
    )
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"  each: {each}; of the last, the aggregation took {row['aggregate_seconds'] / ours[-1]:.1%}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(
        f"  peak memory: {peak:.2f} GiB here, {children:.2f} GiB in the largest worker (shared matrices count in both)"
    )


def scale(iterations: int) -> None:
    print("\n20NG-sized head (56,828 parameters), batch 16, engine fast")
    one_by_one = _seconds(PEERS, iterations, "bitwise")
    print(f"  {PEERS:6,} peers one by one (bitwise)  1.00")
    times = {}
    for peers in (125, 1_000, 10_000):
        times[peers] = _seconds(peers, iterations, "fast")
        print(f"  {peers:6,} peers                      {times[peers] / one_by_one:.2f}")
    print(f"  10,000 peers ÷ 1,000 peers: {times[10_000] / times[1_000]:.1f}")
    print(f"  peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def _seconds(peers: int, iterations: int, engine: str) -> float:
    overrides = {
        "task": "synthetic", "task_options": {"samples": 20 * peers}, "peers": peers, "group_size": 10, "batch": 16,
        "engine": engine, "iterations": iterations + 1, "test_every": 10_000, "workers": 1,
    }  # fmt: skip
    rows = Simulation(load(overrides=overrides)).rows()
    next(rows)
    times = []
    for _ in range(iterations):
        begun = time.perf_counter()
        next(rows)
        times.append(time.perf_counter() - begun)
    rows.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--skip-mnist", action="store_true")
    parser.add_argument("--skip-scale", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    if not options.skip_mnist and os.environ.get("MARFL_DATA"):
        mnist(options.iterations)
    elif not options.skip_mnist:
        print("MNIST: skipped, because MARFL_DATA is not set")
    if not options.skip_scale:
        scale(options.iterations)


if __name__ == "__main__":
    main()
