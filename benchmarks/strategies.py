"""What strategies buy: iterations, bytes and virtual seconds to a target accuracy, on wifi and on lte.

    python benchmarks/strategies.py run --seeds 0,1,2     # hours on one core; goes on where it was stopped
    python benchmarks/strategies.py run --only goal       # the demo, and what beats it
    python benchmarks/strategies.py run --only small      # the same among 25 peers, with overlap
    python benchmarks/strategies.py run --only calm       # smaller steps, which overlap bears
    python benchmarks/strategies.py run --only skewed     # 25 peers with few labels each (Dirichlet 0.1), 30 iterations
    python benchmarks/strategies.py run --only mnist      # MNIST, 125 peers, 16 rows a batch, one hidden layer
    python benchmarks/strategies.py table                 # of what there is

Every run is a simulation of the demo (`digits`, 125 peers, 16 rows a batch) or of MNIST. A run is made once for both
kinds of links: they change the clock and nothing else. Results go to results/strategies.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from marfl.config import load
from marfl.learn.tasks.mnist import Mnist
from marfl.sim.churn import Participation
from marfl.sim.engine import Simulation
from marfl.sim.iteration import IterationResult
from marfl.sim.links import Links, links

FILE = Path(__file__).parent / "results" / "strategies.json"
KINDS = ("wifi", "lte")
OUTER = {"learning_rate": 1.0, "momentum": 0.8}
TARGETS = {"digits": 0.94, "mnist": 0.90}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"preset": "demo", "iterations": 150},
    "mnist": {"preset": "exact-mnist", "batch": 16, "engine": "fast"},
}
CALM = {"strategy_options.learning_rate": 0.7, "strategy_options.momentum": 0.0}  # what overlap bears
MOST = {1: 120, 4: 60, 16: 25, 64: 10}  # iterations on MNIST, by local steps


class SmallMnist(Mnist):
    """MNIST for one hidden layer of 64 units: the paper's network would take days here."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case by its name, the most telling first."""
    yield "goal/demo", {"task": "digits"}
    for wire in ("fp32", "int4"):
        yield f"goal/diloco-4/{wire}", {"task": "digits", **diloco(4, 0.5), "wire": wire}
        yield f"goal/plain-tuned/{wire}", {"task": "digits", "optimizer.learning_rate": 0.5, "wire": wire}
    yield from small_cases()
    for steps, wire in product((16, 64), ("fp32", "int4")):
        yield f"goal/{named(steps)}/{wire}", {"task": "digits", **diloco(steps, 0.5), "wire": wire}
    yield from mnist_cases()
    skewed = {"task": "digits", "partition.alpha": 0.1, "local_batches": 16, "peers": 25, "iterations": 30}
    yield "skewed/plain", skewed
    yield "skewed/fedprox", skewed | {"strategy": "fedprox"}
    yield "skewed/scaffold", skewed | {"strategy": "scaffold"}


def small_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Among 25 peers: `small` with the steps of `goal`, `calm` with smaller ones."""
    for steps, wire, overlap in product((1, 4, 16, 64), ("fp32", "int4"), (False, True)):
        chosen = diloco(steps, 0.5) if steps > 1 else {"optimizer.learning_rate": 0.5}
        more = {"task": "digits", "peers": 25, "iterations": 60, "wire": wire, "overlap": overlap}
        yield f"small/{named(steps)}/{wire}{'/overlap' if overlap else ''}", more | chosen
    for steps, overlap in product((1, 4), (False, True)):
        chosen = diloco(steps, 0.2) | CALM if steps > 1 else {"optimizer.learning_rate": 0.2}
        more = {"task": "digits", "peers": 25, "iterations": 150, "overlap": overlap}
        yield f"calm/{named(steps)}/fp32{'/overlap' if overlap else ''}", more | chosen


def mnist_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """On MNIST: `diloco` with an outer momentum of 0.8, `calm` with none and a smaller outer step."""
    for wire, overlap, steps in product(("fp32", "int4"), (False, True), (1, 4, 16, 64)):
        more = {"task": "mnist", "iterations": MOST[steps], "wire": wire, "overlap": overlap}
        name = f"{wire}{'/overlap' if overlap else ''}"
        if steps == 1:
            yield f"mnist/plain/{name}", more | {"optimizer.learning_rate": 0.1}
            yield f"mnist/plain-tuned/{name}", more | {"optimizer.learning_rate": 0.5}
        else:
            yield f"mnist/diloco-{steps}/{name}", more | diloco(steps, 0.1)
            yield f"mnist/calm-{steps}/{name}", more | diloco(steps, 0.1) | CALM


def named(steps: int) -> str:
    return f"diloco-{steps}" if steps > 1 else "plain"


def diloco(steps: int, rate: float) -> dict[str, Any]:
    outer = {f"strategy_options.{name}": value for name, value in OUTER.items()}
    return {"strategy": "diloco", "local_batches": steps, "optimizer.learning_rate": rate, **outer}


class OnAllLinks(Simulation):
    """A simulation whose clock runs on several kinds of links at once."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.kinds: dict[str, Links] = {kind: links(kind, settings.peers, settings.seed) for kind in KINDS}
        self.clocks = dict.fromkeys(KINDS, 0.0)
        self.ahead: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS}

    def _virtual_seconds(self, iteration: int, step: IterationResult, who: Participation) -> float | None:
        taken = None
        for kind, each in self.kinds.items():
            self.links, self.progress.head_start = each, self.ahead[kind]
            taken = super()._virtual_seconds(iteration, step, who)
            self.clocks[kind] += taken or 0.0
            self.ahead[kind] = self.progress.head_start
        return taken


def measured(name: str, more: dict[str, Any], seed: int) -> dict[str, Any]:
    task = more["task"]
    given = {**TASKS[task], **more, "seed": seed, "test_every": 1, "target_accuracy": TARGETS[task], "links": "wifi"}
    preset = given.pop("preset")
    if task == "mnist":
        given["task"] = f"{Path(__file__).stem}:{SmallMnist.__name__}"
    simulation = OnAllLinks(load(preset, overrides=given))
    for _ in simulation.rows():
        pass
    found = simulation.summary()
    return {
        "reached": "iterations_to_target" in found and found["iterations_to_target"] is not None,
        "iterations": found["iterations"],
        "accuracy": found["final_accuracy"],
        "best": found["best_accuracy"],
        "bytes": found["bytes_total"],
        "seconds": simulation.clocks,
        "engine": found["engine_reason"],
    }


def results() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def run(seeds: list[int], only: str) -> None:
    for seed in seeds:
        for name, more in cases():
            key = f"{name}@{seed}"
            if key in results() or not name.startswith(only):
                continue
            print(key, flush=True)
            result = measured(name, more, seed)
            found = results() | {key: result}  # others may have written meanwhile
            FILE.parent.mkdir(exist_ok=True)
            FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            print("  ", found[key], flush=True)


def table() -> None:
    found = results()
    heads = ("run", "seeds", "reached", "iterations", "MB", "s on wifi", "s on lte", "accuracy")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name, _ in cases():
        rows = [row for key, row in found.items() if key.rpartition("@")[0] == name]
        if rows:
            cells = [f"{name}", str(len(rows)), str(sum(row["reached"] for row in rows))]
            cells += [_mean(row["iterations"] for row in rows), _mean(row["bytes"] / 1e6 for row in rows)]
            cells += [_mean(row["seconds"][kind] for row in rows) for kind in KINDS]
            cells.append(_mean(100 * row["accuracy"] for row in rows))
            print(f"| {' | '.join(cells)} |")


def _mean(values: Any) -> str:
    known = list(values)
    return f"{sum(known) / len(known):,.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    asked = parser.parse_args()
    table() if asked.what == "table" else run([int(seed) for seed in asked.seeds.split(",")], asked.only)
