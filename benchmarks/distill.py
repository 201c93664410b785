"""What Moshpit-KD buys per byte: beside plain averaging, and beside as many local steps without any distillation.

    python benchmarks/distill.py [--task digits] [--peers 9] [--group-size 3] [--iterations 100] [--distill 8,40]
                                 [--semantics paper] [--batch 16] [--option name=value …] [--target 0.8] [--seeds 3]
                                 [--test-every 5] [--results FILE.json [--budget SECONDS]]

Same model, data, split and seeds; K is the number of iterations that distil. "MKD" learns from the models of its groups
(arXiv 2512.05234), "previous" from the model before (no bytes), "matched" takes as many local steps instead.
S: models that a peer has sent. With --results every run that is done is kept; with --budget no run begins after so many
seconds: run it again to go on.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kept import Kept, Result

from marfl.commands.flags import parse_options
from marfl.config import load
from marfl.sim.engine import simulate

LOOKS = 4  # columns of the table: so many equally spaced iterations


@dataclass(frozen=True)
class Case:
    """How peers learn, besides their local step."""

    name: str
    settings: dict[str, Any]


def cases(ks: list[int]) -> Iterator[Case]:
    yield Case("plain", {"momentum": "send"})
    for k in ks:
        given = {"distill.iterations": k, "momentum": "send"}
        yield Case(f"MKD {k}", given)
        yield Case(f"previous {k}", given | {"distill.teacher": "previous"})
        yield Case(f"matched {k}", given | {"distill.match_local_steps": True})


def run(case: Case, seed: int, settings: dict[str, Any]) -> Result:
    """(iteration, accuracy, models sent by a peer so far) at every test of one run."""
    looks: list[tuple[int, float, float]] = []
    rows: list[dict[str, Any]] = []
    summary = simulate(load(overrides=settings | case.settings | {"seed": seed}), rows.append)
    for row in rows:
        if row["test_accuracy"] is not None:
            sent = row["bytes_total"] / summary["model_bytes"] / summary["peers"]
            looks.append((row["iteration"], row["test_accuracy"], sent))
    return {"looks": looks}


def collect(kept: Kept, chosen: list[Case], seeds: int) -> dict[str, list[Result]]:
    """The results of each case; seed by seed, so that a first seed is whole before a second begins."""
    found: dict[str, list[Result]] = {case.name: [] for case in chosen}
    for seed in range(seeds):
        for case in chosen:
            result = kept.get(f"{case.name}, seed {seed}", partial(run, case, seed, kept.settings))
            if result is not None:
                found[case.name].append(result)
    return found


def line(name: str, results: list[Result], wanted: list[int], target: float) -> str:
    """Mean accuracy and models sent at some iterations, the spread at the end, and the price of the target."""
    cells = []
    for iteration in wanted:
        seen = [next(look for look in r["looks"] if look[0] >= iteration) for r in results]
        cells.append(f"{statistics.mean(s[1] for s in seen):6.1%} {statistics.mean(s[2] for s in seen):7,.0f} S")
    final = [result["looks"][-1][1] for result in results]
    reached = [next((sent for _, accuracy, sent in r["looks"] if accuracy >= target), None) for r in results]
    prices = [sent for sent in reached if sent is not None]
    price = f"{statistics.mean(prices):7,.0f} S" if len(prices) == len(reached) else f"{len(prices)} of {len(reached)}"
    return f"  {name:12} {'  '.join(cells)}  ({min(final):.1%} … {max(final):.1%})  {price:>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--option", action="append")
    parser.add_argument("--semantics", default="paper")
    parser.add_argument("--peers", type=int, default=9)
    parser.add_argument("--group-size", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--distill", default="8,40")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--test-every", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--budget", type=float)
    options = parser.parse_args()
    names = ("task", "semantics", "peers", "group_size", "iterations", "batch", "test_every")
    settings = {name: getattr(options, name) for name in names}
    settings["task_options"] = parse_options(options.option) or {}
    chosen = list(cases([int(k) for k in options.distill.split(",")]))
    kept = Kept(options.results, settings, options.budget)
    found = collect(kept, chosen, options.seeds)
    even = [options.iterations * part // LOOKS for part in range(1, LOOKS + 1)]
    wanted = [min(options.iterations, -(-one // options.test_every) * options.test_every) for one in even]  # tested
    print(
        f"{options.task}, {options.peers} peers in groups of {options.group_size}, {options.semantics} semantics, "
        f"seeds: {options.seeds}; accuracy and models sent by a peer after {', '.join(map(str, wanted))} iterations, "
        f"spread at the end, models sent to reach {options.target:.0%}"
    )
    for name, results in found.items():
        if results:
            print(line(name, results, wanted, options.target))
    if kept.missing:
        print(f"{kept.missing} runs are still to be done: run it again to go on")


if __name__ == "__main__":
    main()
