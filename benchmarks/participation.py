"""What partial participation does to accuracy on MNIST: paper semantics beside exact, several seeds.

    python benchmarks/participation.py [--peers 16] [--group-size 4] [--iterations 40] [--seeds 3] [--task mnist]
                                       [--results FILE.json [--budget SECONDS]] [--figure FILE.png]

Full participation, 50 %, and 50 % with a dropout likelihood of 20 %; the same model, data, batches, seeds and casts.
Both semantics average exactly here (plan = exact), so what differs is where a peer starts from: the agreed model, or
the one it was left with. At full participation the two are one by construction, so that case is run once.
With --results every run that is done is kept; with --budget no run begins after so many seconds: run it again to go on.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kept import Kept, Result
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from marfl.config import load
from marfl.report.figures import Drawing, styled
from marfl.sim.engine import simulate


@dataclass(frozen=True)
class Case:
    """Who takes part, and where they start from."""

    name: str
    semantics: str
    churn: dict[str, float]


CASES = (
    Case("full", "exact", {}),
    Case("50 %", "exact", {"churn.participation": 0.5}),
    Case("50 %", "paper", {"churn.participation": 0.5}),
    Case("50 %, 20 % drop", "exact", {"churn.participation": 0.5, "churn.dropout": 0.2}),
    Case("50 %, 20 % drop", "paper", {"churn.participation": 0.5, "churn.dropout": 0.2}),
)
COLOURS = {"exact": "#0072B2", "paper": "#D55E00"}


def run(case: Case, seed: int, settings: dict[str, Any]) -> Result:
    """One run's accuracy at every test, and what it sent."""
    overrides = {
        **settings, "seed": seed, "semantics": case.semantics, "plan": "exact", "batch": 64, **case.churn,
        "test_every": max(1, settings["iterations"] // 2),
    }  # fmt: skip
    accuracies: list[tuple[int, float]] = []

    def note(row: dict[str, Any]) -> None:
        if row["test_accuracy"] is not None:
            accuracies.append((row["iteration"], row["test_accuracy"]))

    summary = simulate(load(overrides=overrides), note)
    sent = summary["bytes_per_peer_iteration"] / summary["model_bytes"]
    return {"accuracies": accuracies, "final_accuracy": summary["final_accuracy"], "models_sent": sent}


def collect(kept: Kept, seeds: int) -> list[list[Result]]:
    """The results of each case; seed by seed, so that a first seed is whole before a second begins."""
    found: list[list[Result]] = [[] for _ in CASES]
    for seed in range(seeds):
        for case, results in zip(CASES, found, strict=True):
            name = f"{case.name}, {case.semantics}, seed {seed}"
            result = kept.get(name, partial(run, case, seed, kept.settings))
            if result is not None:
                results.append(result)
    return found


def line(case: Case, results: list[Result]) -> str:
    final = [result["final_accuracy"] for result in results]
    sent = statistics.mean(result["models_sent"] for result in results)
    spread = f"{min(final):.1%} … {max(final):.1%}, {len(final)} seeds"
    return f"  {case.name:16} {case.semantics:6} {statistics.mean(final):6.1%}  ({spread})  {sent:6.2f} S"


def draw(found: list[list[Result]]) -> Figure:
    """The accuracy of every seed over the iterations, a colour for each semantics, a panel for each case."""
    names = list(dict.fromkeys(case.name for case in CASES))
    figure = Figure(figsize=(3.0 * len(names), 3.4))
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        for case, results in zip(CASES, found, strict=True):
            for number, result in enumerate(results if case.name == name else ()):
                label = case.semantics if number == 0 else None
                style = "o-" if case.semantics == "exact" else "s--"
                axes.plot(*zip(*result["accuracies"], strict=True), style, color=COLOURS[case.semantics], label=label)
        axes.set_title(name, fontsize=11)
        axes.set_xlabel("iteration")
        if axes.lines:
            axes.legend(loc="lower right")
    figure.axes[0].set_ylabel("test accuracy")
    figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("task", "peers", "group_size", "iterations")}
    kept = Kept(options.results, settings, options.budget)
    found = collect(kept, options.seeds)
    print(f"{options.task}, {options.peers} peers, {options.iterations} iterations: accuracy, models a peer sends")
    for case, results in zip(CASES, found, strict=True):
        if results:
            print(line(case, results))
    if options.figure is not None and any(found):
        with styled():
            options.figure.write_bytes(Drawing("participation", "", draw(found)).rendered("png"))
    if kept.missing:
        print(f"{kept.missing} runs are still to be done: run it again to go on")


if __name__ == "__main__":
    main()
