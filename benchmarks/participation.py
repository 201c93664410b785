"""What partial participation does to accuracy on MNIST: paper semantics beside exact, several seeds.

    python benchmarks/participation.py [--iterations 100] [--seeds 3] [--peers 125] [--task mnist]

Full participation, 50 %, and 50 % with a dropout likelihood of 20 %; the same model, data, batches and seeds.
"""

from __future__ import annotations

import argparse
import statistics

from marfl.config import load
from marfl.sim.engine import simulate

CASES: dict[str, dict[str, float]] = {
    "full": {},
    "50 %": {"churn.participation": 0.5},
    "50 %, 20 % drop": {"churn.participation": 0.5, "churn.dropout": 0.2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", type=int, default=125)
    parser.add_argument("--task", default="mnist")
    options = parser.parse_args()
    print(
        f"{options.task}, {options.peers} peers, {options.iterations} iterations, {options.seeds} seeds: final accuracy"
    )
    for case, churn in CASES.items():
        for semantics in ("paper", "exact"):
            found, sent = [], []
            for seed in range(options.seeds):
                settings = {
                    "task": options.task, "peers": options.peers, "iterations": options.iterations, "seed": seed,
                    "semantics": semantics, "batch": 64 if options.task == "mnist" else 16, "test_every": 10_000,
                    "engine": "fast" if semantics == "exact" else "bitwise", **churn,
                }  # fmt: skip
                summary = simulate(load(overrides=settings))
                found.append(summary["final_accuracy"])
                sent.append(summary["bytes_per_peer_iteration"] / summary["model_bytes"])
            spread = f"{min(found):.1%} … {max(found):.1%}"
            mean, price = statistics.mean(found), statistics.mean(sent)
            print(f"  {case:16} {semantics:6} {mean:6.1%}  ({spread})  {price:6.2f} S a peer and iteration", flush=True)


if __name__ == "__main__":
    main()
