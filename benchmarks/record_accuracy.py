"""Accuracy against ε where single records are hidden, and beside it Opacus, which has all data in one place.

    python benchmarks/record_accuracy.py [--tasks mnist 20ng] [--seeds 3] [--opacus PYTHON] [--opacus-noise 1]
                                         [--results FOLDER [--budget SECONDS]] [--figure FILE.png]

16 peers under masks, batches of 64 (20NG: 16) at a public rate; ε is that of a masked insider at δ = 1e-5. "none" is
the same run without privacy. With --opacus, an interpreter that has Opacus and torch, all 16 peers' data are trained on
in one place, from the same first model, with the same noise, rate, bound, step and iterations (`opacus_central.py`).
With --results every run that is done is kept; with --budget no run begins after so many seconds: run it again to go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kept import Kept, Result
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch.utils.data import Dataset

from marfl.config import load
from marfl.learn import initial_model, load_task
from marfl.learn.data import gather, size_of
from marfl.learn.worker import keep_freed_memory
from marfl.report.figures import Drawing, styled
from marfl.sim.engine import simulate

PEERS, DELTA = 16, 1e-5
MINILM = {"encoder": "all-MiniLM-L6-v2-fp16", "pooling": "mean"}
CENTRAL = Path(__file__).with_name("opacus_central.py")


@dataclass(frozen=True)
class Bench:
    """One task of the paper among 16 peers that hide single records."""

    task: str
    batch: int
    records: int  # what a peer has, about; public
    iterations: int
    noise: tuple[float, ...]
    learning_rate: float
    plain_rate: float  # η without privacy, where nothing is clipped
    clip: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()  # of the task

    def settings(self, noise: float | None, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "task": self.task, "batch": self.batch, "peers": PEERS, "group_size": 4, "seed": seed, "workers": 1,
            "iterations": self.iterations, "test_every": self.iterations // 5, "task_options": dict(self.options),
            "optimizer.learning_rate": self.plain_rate if noise is None else self.learning_rate,
        }  # fmt: skip
        if noise is not None:
            found |= {
                "privacy.unit": "record", "privacy.records": self.records, "privacy.noise_multiplier": noise,
                "privacy.delta": DELTA, "privacy.masks": True, "privacy.clip": self.clip,
            }  # fmt: skip
        return found


BENCHES = (
    Bench("mnist", 64, 3750, 30, (1.0, 2.0, 4.0), 3.0, 0.1, options=(("dropout", False),)),  # as in the paper's code
    Bench("20ng", 16, 700, 150, (1.0, 2.0, 4.0), 2.0, 2.0, options=tuple(MINILM.items())),
)
Found = dict[str, list[Result]]  # by kind of run, seed after seed


def run(bench: Bench, noise: float | None, seed: int) -> Result:
    """One run: ε of a masked insider and accuracy at every test."""
    points: list[tuple[float | None, float]] = []

    def note(row: dict[str, Any]) -> None:
        if row["test_accuracy"] is not None:
            points.append((row.get("epsilon_insider_masked"), row["test_accuracy"]))

    summary = simulate(load(overrides=bench.settings(noise, seed)), note)
    told = summary["privacy"] or {}
    return {
        "points": points, "accuracy": summary["final_accuracy"], "epsilon": told.get("epsilon_insider_masked"),
        "epsilon_outsider": told.get("epsilon_outsider"),
    }  # fmt: skip


# --- Opacus, with all data in one place ---


def central(python: str, bench: Bench, noise: float, seed: int) -> Result:
    """The same training by Opacus; `python` is an interpreter that has it."""
    config = load(overrides=bench.settings(noise, seed))
    task = load_task(config.task, **config.task_options)
    settings = {
        "task": bench.task, "noise": noise, "seed": seed, "rate": bench.batch / bench.records, "clip": bench.clip,
        "expected": bench.batch * PEERS, "iterations": bench.iterations, "learning_rate": bench.learning_rate,
        "decay": config.optimizer.decay,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.pt"
        model = initial_model(task, seed)
        content = {
            "theta": torch.nn.utils.parameters_to_vector(model.parameters()).detach(),
            "train": _tensors(task.train_set()), "test": _tensors(task.test_set()), "settings": settings,
        }  # fmt: skip
        torch.save(content, file)
        done = subprocess.run([python, CENTRAL, "train", file], check=True, stdout=subprocess.PIPE, text=True)
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def _tensors(dataset: Dataset[Any]) -> list[torch.Tensor]:
    batch = gather(dataset, torch.arange(size_of(dataset)))
    return [tensor.clone() for tensor in batch]


# --- what is shown ---


def collect(bench: Bench, kept: Kept, given: argparse.Namespace) -> Found:
    """By kind of run. What is compared with Opacus comes first, seed by seed, then all other noise."""
    found: Found = {}
    kinds = kinds_of(bench, given)
    for late in (False, True):
        for seed in range(given.seeds):
            for kind, (noise, way) in kinds.items():
                if late == (noise in (None, *given.opacus_noise)):
                    continue
                result = kept.get(f"{kind}, seed {seed}", partial(way, bench, noise, seed))
                if result is not None:
                    found.setdefault(kind, []).append(result)
    return {kind: found[kind] for kind in kinds if kind in found}


def kinds_of(bench: Bench, given: argparse.Namespace) -> dict[str, tuple[float | None, Callable[..., Result]]]:
    """What is run of a task, by name: its noise, and who trains."""
    kinds: dict[str, tuple[float | None, Callable[..., Result]]] = {"none": (None, run)}
    for noise in bench.noise:
        kinds[f"{noise:g}"] = (noise, run)
        if given.opacus is not None and noise in given.opacus_noise:
            kinds[f"{noise:g}, Opacus"] = (noise, partial(central, given.opacus))
    return kinds


def lines(bench: Bench, found: Found) -> Iterator[str]:
    yield f"{bench.task}: {PEERS} peers, {bench.iterations} iterations, batch {bench.batch} of {bench.records}"
    yield "       σ         ε masked insider   ε outsider   accuracy"
    for kind, results in found.items():
        accuracies = [result["accuracy"] for result in results]
        epsilons = [results[0].get(name) for name in ("epsilon", "epsilon_outsider")]
        shown = "".join("            –" if epsilon is None else f"{epsilon:>13.2f}" for epsilon in epsilons)
        spread = f"{min(accuracies):.1%} … {max(accuracies):.1%}, {len(accuracies)} seeds"
        yield f"  {kind:<16}{shown}        {statistics.mean(accuracies):6.1%}  ({spread})"


def draw(shown: dict[Bench, Found]) -> Figure:
    """A panel for each task: accuracy over ε while the runs go on, a line for each seed."""
    figure = Figure(figsize=(4.6 * len(shown), 3.6))
    colours = ("#0072B2", "#009E73", "#D55E00")
    for axes, (bench, found) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        for noise, colour in zip(bench.noise, colours, strict=True):
            for number, result in enumerate(found.get(f"{noise:g}", ())):
                label = f"σ = {noise:g}" if number == 0 else None
                axes.plot(*zip(*result["points"], strict=True), "o-", color=colour, label=label, markersize=3)
        plain = statistics.mean(result["accuracy"] for result in found["none"])
        axes.axhline(plain, linestyle="--", color="#555555", label="without privacy, at the end")
        axes.set_title(f"{bench.task}, {PEERS} peers", fontsize=11)
        axes.set_xlabel("ε of one record, masked insider, δ = 1e-5")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(loc="lower right", fontsize=8)
    figure.axes[0].set_ylabel("test accuracy")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[bench.task for bench in BENCHES], default=["mnist", "20ng"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--opacus", metavar="PYTHON", help="An interpreter that has opacus and torch.")
    parser.add_argument("--opacus-noise", nargs="+", type=float, default=[1.0])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    shown: dict[Bench, Found] = {}
    missing = 0
    for bench in (each for each in BENCHES if each.task in given.tasks):
        file = None if given.results is None else given.results / f"records_{bench.task}.json"
        settings = {"peers": PEERS, "delta": DELTA, **json.loads(json.dumps(asdict(bench)))}
        kept = Kept(file, settings, given.budget)
        shown[bench] = collect(bench, kept, given)
        missing += kept.missing
        print("\n".join(lines(bench, shown[bench])))
    drawn = {bench: found for bench, found in shown.items() if "none" in found}
    if given.figure is not None and drawn:
        with styled():
            given.figure.write_bytes(Drawing("records", "", draw(drawn)).rendered("png"))
    if missing:
        print(f"{missing} runs are still to be done: run it again to go on")


if __name__ == "__main__":
    main()
