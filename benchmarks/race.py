"""The race: one federated workload in our two engines, in Flower's simulation and in Apple's pfl, over plain PyTorch.

    python benchmarks/race.py --flower PYTHON --pfl PYTHON [--workloads cnn,small] [--turns 3] [--iterations 4]

Each rival runs in an environment of its own, named by its Python (`flwr[simulation]`; `pfl` with `dp-accounting<0.6`;
both with torch). Entrants take turns: one after the other runs a few iterations with all cores for itself, and then all
do so again. The first iteration of a turn warms up and is told with the start, not with the rest. pfl runs in two ways,
one process of many threads and many processes of one thread; the faster counts. "passes alone" is no entrant: it is
what `bitwise` would take if nothing but its forward and backward passes took time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "race"
CORES = os.cpu_count() or 1
TIMEOUT = 3_600
TITLES = {
    "cnn": "MNIST, the paper's CNN, 125 peers, a batch of 64",
    "small": "a head of 56,828 parameters, 1,000 peers, a batch of 16",
}


@dataclass
class Entrant:
    """One system, and what its turns took."""

    name: str
    command: list[str]
    environment: dict[str, str]
    iterations: list[float] = field(default_factory=list)  # seconds each, without the first of a turn
    starts: list[float] = field(default_factory=list)  # seconds from the start of the process to the end of the first

    def turn(self, workload: str, iterations: int) -> None:
        """Run so many iterations after a first one."""
        begun = time.perf_counter()
        command = [part.format(workload=workload, iterations=iterations + 1) for part in self.command]
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        laps = [json.loads(line)["lap"] for line in done.stdout.splitlines() if line.startswith('{"lap"')]
        if len(laps) != iterations + 1:  # the code at the end says nothing: pfl's processes may abort when all is done
            raise SystemExit(f"{self.name}: {len(laps)} of {iterations + 1} iterations\n{done.stderr[-2000:]}")
        self.iterations += laps[1:]
        self.starts.append(time.perf_counter() - begun - sum(laps[1:]))

    @property
    def seconds(self) -> float:
        return statistics.median(self.iterations)


def entrants(options: argparse.Namespace) -> list[Entrant]:
    one, all_threads = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": str(CORES)}
    last = ["{workload}", "{iterations}"]
    here = [sys.executable]
    found = [
        Entrant("plain PyTorch", [*here, str(FOLDER / "plain.py"), *last], one),
        Entrant("marfl bitwise", [*here, str(FOLDER / "ours.py"), *last, "bitwise"], {}),
        Entrant("marfl fast", [*here, str(FOLDER / "ours.py"), *last, "fast"], {}),
        Entrant("passes alone", [*here, str(FOLDER / "passes.py"), *last], one),
    ]
    if options.flower:
        found.append(Entrant("Flower", [options.flower, str(FOLDER / "flower.py"), *last], {}))
    if options.pfl:
        spread = [options.pfl, "-m", "torch.distributed.run", "--nproc-per-node", str(CORES), "--master-addr=127.0.0.1"]
        found += [
            Entrant("pfl, threads", [options.pfl, str(FOLDER / "apple_pfl.py"), *last], all_threads),
            Entrant("pfl, processes", [*spread, str(FOLDER / "apple_pfl.py"), *last], one),
        ]
    return found


def report(workload: str, found: list[Entrant]) -> None:
    floor = found[0].seconds
    print(f"{TITLES[workload]}; {CORES} cores")
    print(f"  {'':16} {'an iteration':>22} {'of plain':>10} {'start':>8}")
    for one in found:
        spread = f"{min(one.iterations):.2f} … {max(one.iterations):.2f}"
        start = statistics.median(one.starts)
        print(f"  {one.name:16} {one.seconds:7.2f} s {spread:>13} {one.seconds / floor:9.2f} × {start:6.1f} s")
    times = {one.name: one.seconds for one in found}
    pfl = min((seconds for name, seconds in times.items() if name.startswith("pfl")), default=None)
    rivals = {"Flower": times.get("Flower"), "pfl": pfl}
    for name in ("marfl bitwise", "marfl fast", "passes alone"):
        told = [f"{seconds / times[name]:.2f} times as fast as {rival}" for rival, seconds in rivals.items() if seconds]
        print(f"  {name}: {', '.join(told) or 'no rival given'}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", help="the Python of an environment with flwr[simulation] and torch")
    parser.add_argument("--pfl", help="the Python of an environment with pfl and torch")
    parser.add_argument("--workloads", default="cnn,small")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4)
    options = parser.parse_args()
    for workload in options.workloads.split(","):
        found = entrants(options)
        for turn in range(options.turns):
            for one in found:
                one.turn(workload, options.iterations)
                print(f"  turn {turn + 1}: {one.name}", file=sys.stderr, flush=True)
            report(workload, found)  # of all turns so far: a race that is stopped has told what it saw


if __name__ == "__main__":
    main()
