"""What a Ray cluster costs on one machine: an iteration on Ray's workers, over one on our own processes.

    python benchmarks/cluster.py [--peers 125] [--iterations 3] [--workers 2]

MNIST with the paper's CNN (1,199,882 parameters), batch 64, exact semantics: both take turns, iteration by iteration,
and must end on the same hash. The first iteration, in which workers load the task, counts as start-up. CPU seconds are
those of all processes that each side started, from the times that the system keeps for them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

from marfl.config import load
from marfl.runs.rows import Row
from marfl.sim.engine import Simulation

GOAL = 1.25
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(ours: set[int]) -> float:
    """CPU time of these processes and all below them."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            pid = int(entry.name)
            parents[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    found = {pid for pid in parents if _below(pid, parents, ours)}
    return sum(used[pid] for pid in found)


def _below(pid: int, parents: dict[int, int], ours: set[int]) -> bool:
    while pid and pid not in ours:
        pid = parents.get(pid, 0)
    return pid in ours


class Side:
    """One of the two that take turns."""

    def __init__(self, name: str, settings: dict[str, object]) -> None:
        before = _children()
        begun = time.perf_counter()
        self.name = name
        self.simulation = Simulation(load(overrides=settings))
        self.rows: Iterator[Row] = self.simulation.rows()
        next(self.rows)
        self.start = time.perf_counter() - begun
        self.processes = _children() - before
        self.clock = self.cpu = 0.0

    def turn(self) -> bool:
        begun, used = time.perf_counter(), cpu_seconds(self.processes) + time.process_time()
        row = next(self.rows, None)
        self.clock += time.perf_counter() - begun
        self.cpu += cpu_seconds(self.processes) + time.process_time() - used
        return row is not None


def _children() -> set[int]:
    path = Path(f"/proc/{os.getpid()}/task")
    return {int(pid) for task in path.iterdir() for pid in (task / "children").read_text().split()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=125)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    settings: dict[str, object] = {
        "task": "mnist", "peers": options.peers, "batch": 64, "iterations": options.iterations + 2,
        "workers": options.workers, "test_every": options.iterations + 2,  # nothing is tested
    }  # fmt: skip
    sides = [Side("our processes", settings), Side("Ray", settings | {"cluster": "local"})]
    for _ in range(options.iterations):
        for side in sides:
            side.turn()
    summaries = [side.simulation.summary() for side in sides]
    ours, rays = sides
    for side in sides:
        print(f"  {side.name:14} {side.clock / ours.clock:5.2f} × the clock, {side.cpu / ours.cpu:5.2f} × CPU", end="")
        each = side.clock / options.iterations, side.cpu / options.iterations
        print(f"   ({each[0]:.1f} s and {each[1]:.1f} CPU s an iteration, {side.start:.0f} s to start)")
    stored = summaries[1]["cluster"]["stored_bytes"] / (options.iterations + 1)
    print(f"  the object store took {stored / 1e6:,.0f} MB an iteration; hashes are ", end="")
    print("the same" if summaries[0]["model_hash"] == summaries[1]["model_hash"] else "NOT the same")
    print(f"promised: at most {GOAL} × the clock: {'kept' if rays.clock <= GOAL * ours.clock else 'NOT kept'}")
    for side in sides:
        side.rows.close()  # type: ignore[attr-defined]
        side.simulation.world.close()


if __name__ == "__main__":
    main()
