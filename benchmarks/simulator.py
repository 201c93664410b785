"""The simulator beside plain PyTorch: `bitwise` on the paper's CNN, `fast` from 125 to 10,000 peers.

    python benchmarks/simulator.py [--iterations 3] [--local-batches 1] [--skip-mnist] [--skip-scale]

The floor of `bitwise` is what 125 plain one-thread PyTorch steps would take if they spread perfectly over the cores;
both are timed in one run, taking turns. MNIST comes from $MARFL_DATA; without it, the CNN sees random images.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
from local_step import PlainDropoutCnn, plain_step

from marfl.config import load
from marfl.learn.worker import keep_freed_memory
from marfl.sim.engine import Simulation

PEERS = 125
SIZES = (125, 1_000, 10_000)


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
    print(f"  seconds an iteration ÷ ({PEERS} plain steps ÷ {cores}): {statistics.median(ratios):.3f}, median")
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"  each: {each}; of the last, the aggregation took {row['aggregate_seconds'] / ours[-1]:.1%}")
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(
        f"  peak memory: {_peak_gib():.2f} GiB here, {children:.2f} GiB in the largest worker (shared matrices in both)"
    )


def scale(rounds: int, local_batches: int) -> None:
    """All sizes are stepped in turn, so that a busy machine hits them alike."""
    way = "one pooled batch" if local_batches == 1 else "batched matmuls"
    print(f"\n20NG-sized head (56,828 parameters), batch 16, B = {local_batches}, engine fast: {way}")
    plain = _running(PEERS, "bitwise", local_batches)
    sizes = {peers: _running(peers, "fast", local_batches) for peers in SIZES}
    times: dict[int, list[float]] = {peers: [] for peers in SIZES}
    floors = []
    for _ in range(rounds):
        floors.append(_seconds(plain, 8))
        for peers, rows in sizes.items():
            times[peers].append(_seconds(rows, max(1, 10_000 // peers // 4)))
    floor = statistics.median(floors)
    print(f"  {PEERS:6,} peers one by one (bitwise)  {1:6.2f}")
    for peers, found in times.items():
        print(f"  {peers:6,} peers                      {statistics.median(found) / floor:6.2f}")
    ratios = [large / small for small, large in zip(times[1_000], times[10_000], strict=True)]
    each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    print(f"  10,000 peers ÷ 1,000 peers: {statistics.median(ratios):.1f}, median of {each}")
    print(f"  peak memory of all sizes together: {_peak_gib():.2f} GiB")
    for rows in (plain, *sizes.values()):
        rows.close()


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _running(peers: int, engine: str, local_batches: int) -> Generator[dict[str, Any], None, None]:
    """A simulation that has done its first iteration, in which it loads its data."""
    settings = {
        "task": "synthetic", "task_options": {"samples": 20 * peers}, "peers": peers, "group_size": 10, "batch": 16,
        "engine": engine, "iterations": 100_000, "test_every": 100_000, "workers": 1,
        "local_batches": local_batches,
    }  # fmt: skip
    rows = Simulation(load(overrides=settings)).rows()
    next(rows)
    return rows


def _seconds(rows: Iterator[dict[str, Any]], iterations: int) -> float:
    """Of one iteration: the median of some."""
    times = []
    for _ in range(iterations):
        begun = time.perf_counter()
        next(rows)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--local-batches", type=int, default=1, help="of the head; from 2 on it cannot be pooled")
    parser.add_argument("--skip-mnist", action="store_true")
    parser.add_argument("--skip-scale", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    if not options.skip_mnist and os.environ.get("MARFL_DATA"):
        mnist(options.iterations)
    elif not options.skip_mnist:
        print("MNIST: skipped, because MARFL_DATA is not set")
    if not options.skip_scale:
        scale(options.iterations, options.local_batches)


if __name__ == "__main__":
    main()
