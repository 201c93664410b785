"""Bytes and virtual time to a target accuracy, for every technique and several N: a table and two figures.

    python benchmarks/to_target.py [--task digits] [--target 0.8] [--peers 16 64 125 1000] [--links wifi]
                                   [--iterations 150] [--techniques mar fedavg …]
                                   [--results FILE.json [--budget SECONDS]] [--figures DIR]

Group sizes make perfect grids (16 = 4², 64 = 4³, 125 = 5³, 1000 = 10³), as in the paper. Techniques with an exact
average run in exact semantics on the `fast` engine; those without one only exist in paper semantics. "mar (paper)" is
MAR-FL as published: whole models and momenta to the whole group. Where all end on the exact mean, the models are the
same by construction: one run is trained, and the messages and seconds of the others are computed for its iterations.
With --results every run that is done is kept; with --budget no run begins after so many seconds: run it again to go on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kept import Kept, Result
from matplotlib.figure import Figure
from rich.filesize import decimal

from marfl.config import Config, load
from marfl.report.figures import Drawing, byte_ticks, canvas, legend, plot, styled, time_ticks
from marfl.report.series import LINE_STYLES, Line, look_of
from marfl.reproduce.shared import Replayed, training_of
from marfl.runs import Run, RunDir, open_run
from marfl.runs.config_file import config_hash
from marfl.sim.engine import Simulation

TECHNIQUES: dict[str, dict[str, str]] = {
    "mar": {},
    "mar (paper)": {"technique": "mar", "semantics": "paper"},
    "fedavg": {},
    "arfl": {},
    "rdfl": {},
    "ring": {},
    "butterfly": {},
    "saps": {"semantics": "paper"},
    "braintorrent": {"semantics": "paper"},
    "gossip": {"semantics": "paper"},
}
GROUP_SIZES = {16: 4, 64: 4, 125: 5, 1000: 10}
COLUMNS = ("iterations_to_target", "bytes_to_target", "seconds_to_target", "final_accuracy")


@dataclass
class Bench:
    """Runs techniques to the target; models that are the same by construction are trained once."""

    settings: dict[str, Any]
    folder: Path
    trained: dict[str, Run] = field(default_factory=dict)

    def run(self, name: str, peers: int) -> Result:
        """One technique to the target, or to its last iteration."""
        settings = self.settings
        overrides = {
            "technique": name, "task": settings["task"], "peers": peers, "group_size": GROUP_SIZES.get(peers, 5),
            "batch": 16, "iterations": settings["iterations"], "links": settings["links"], "engine": "fast",
            "target_accuracy": settings["target"], "test_every": 5, **TECHNIQUES[name],
        }  # fmt: skip
        config = load(overrides=overrides)
        training = training_of(config)
        world = None if training == config else Replayed(config, self._models(training))
        simulation = Simulation(config, world=world)
        for _ in simulation.rows():
            pass
        summary = simulation.summary()
        return {column: summary[column] for column in COLUMNS}

    def _models(self, config: Config) -> Run:
        """A finished run of this config, made when it is first asked for."""
        name = config_hash(config.as_dict())
        if name not in self.trained:
            with RunDir.create(self.folder / name, config.as_dict()) as run:
                for _ in Simulation(config, run).rows():
                    pass
            self.trained[name] = open_run(self.folder / name)
        return self.trained[name]


def line(name: str, peers: int, result: Result) -> str:
    start = f"{name:14} {peers:6,}"
    if result["iterations_to_target"] is None:
        return f"{start} {'–':>10} {'–':>12} {'–':>11} {result['final_accuracy']:9.1%}"
    iterations, sent, seconds, accuracy = (result[column] for column in COLUMNS)
    return f"{start} {iterations:10} {decimal(sent):>12} {seconds:9,.1f} s {accuracy:9.1%}"


def draw(found: dict[tuple[str, int], Result], column: str, what: str) -> Figure:
    """One price of the target against the number of peers, on logarithmic axes; runs that missed it are left out."""
    lines = []
    for name in TECHNIQUES:
        points = [(peers, r[column]) for (who, peers), r in found.items() if who == name and r[column] is not None]
        if points:
            x, y = zip(*sorted(points), strict=True)
            look = look_of(name.split()[0])
            label = name.replace(name.split()[0], look.name)
            lines.append(Line(label, look, LINE_STYLES["(" in name], x=x, y=y))
    figure, axes = canvas(lines)
    plot(axes, lines, log_x=True, log_y=True)
    (byte_ticks if column.startswith("bytes") else time_ticks)(axes.yaxis)
    counts = sorted({peers for _, peers in found})
    axes.minorticks_off()
    axes.set_xticks(counts, [f"{peers:,}" for peers in counts])
    axes.set_xlabel("peers N (log scale)")
    axes.set_ylabel(f"{what} (log scale)")
    legend(figure, lines)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--peers", type=int, nargs="+", default=list(GROUP_SIZES))
    parser.add_argument("--links", default="wifi")
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--techniques", nargs="+", default=list(TECHNIQUES), choices=list(TECHNIQUES))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("task", "target", "links", "iterations")}
    kept = Kept(options.results, settings, options.budget)
    print(f"{options.task}, to {options.target:.0%} accuracy, at most {options.iterations} iterations, {options.links}")
    print(f"{'technique':14} {'peers':>6} {'iterations':>10} {'bytes':>12} {'virtual':>11} {'accuracy':>9}")
    found = {}
    with TemporaryDirectory() as folder:
        bench = Bench(settings, Path(folder))
        for peers, name in product(options.peers, options.techniques):
            result = kept.get(f"{name}, {peers} peers", partial(bench.run, name, peers))
            if result is not None:
                found[name, peers] = result
                print(line(name, peers, result), flush=True)
    if options.figures is not None and any(result["bytes_to_target"] for result in found.values()):
        options.figures.mkdir(parents=True, exist_ok=True)
        prices = {"bytes": ("bytes_to_target", "bytes to the target"), "time": ("seconds_to_target", "virtual time")}
        for name, price in prices.items():
            with styled():
                picture = Drawing(name, "", draw(found, *price)).rendered("png")
            (options.figures / f"to_target-{name}.png").write_bytes(picture)
    if kept.missing:
        print(f"{kept.missing} runs are still to be done: run it again to go on")


if __name__ == "__main__":
    main()
