"""How well the paper's head learns 20 Newsgroups on a frozen encoder: full participation, the laptop scale's schedule.

    python benchmarks/news20.py [--encoder all-MiniLM-L6-v2-fp16] [--seeds 3]

The accuracy must be above 55 % with MiniLM. Beside it stands what the majority class would get.
"""

from __future__ import annotations

import argparse

from marfl.config import load
from marfl.learn import load_task
from marfl.learn.data import labels_of
from marfl.reproduce.cases import SCALES
from marfl.sim.engine import simulate

LEAST = 0.55


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2-fp16")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    bench = SCALES["laptop"].text
    task = {"encoder": options.encoder, "pooling": "mean"}
    labels = labels_of(load_task("20ng", **task).test_set())  # type: ignore[attr-defined]
    print(f"{options.encoder}, {bench.crowd.peers} peers, {bench.iterations} iterations; most frequent group: ", end="")
    print(f"{max((labels == label).mean() for label in set(labels.tolist())):.1%}")
    for seed in range(options.seeds):
        found = simulate(load(overrides=bench.settings() | {"task_options": task, "seed": seed}))
        verdict = "above" if found["final_accuracy"] > LEAST else "NOT above"
        print(f"  seed {seed}: {found['final_accuracy']:.1%}, {verdict} {LEAST:.0%}", flush=True)


if __name__ == "__main__":
    main()
