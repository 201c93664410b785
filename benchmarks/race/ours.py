"""marfl's simulator: the engine by name.

    python ours.py cnn|small ITERATIONS bitwise|fast
"""

from __future__ import annotations

import os
import sys

from workload import Stopwatch, arguments

from marfl.config import load
from marfl.learn.worker import keep_freed_memory
from marfl.sim.engine import Simulation


def main() -> None:
    workload, iterations = arguments()
    settings = {
        "iterations": iterations, "peers": workload.peers, "batch": workload.batch, "engine": sys.argv[3],
        "test_every": 10 * iterations, "checkpoint_every": 10 * iterations, "workers": os.cpu_count(),
    }  # fmt: skip
    if workload.name == "cnn":
        config = load("exact-mnist", overrides=settings)
    else:
        options = {"samples": 20 * workload.peers}
        config = load(overrides=settings | {"task": "synthetic", "task_options": options, "group_size": 10})
    keep_freed_memory()
    rows = Simulation(config).rows()
    watch = Stopwatch()
    for row in rows:
        watch.lap(row["train_loss"])


if __name__ == "__main__":
    main()
