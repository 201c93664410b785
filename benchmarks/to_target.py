"""Bytes and virtual time to a target accuracy, for every technique and several N: a table and a figure's data.

    python benchmarks/to_target.py [--task digits] [--target 0.8] [--peers 16 64 125 1000] [--links wifi] [--out DIR]

With --out, run directories are written, and `marfl report` draws them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from marfl.config import load
from marfl.errors import InputError
from marfl.rundir import RunDir
from marfl.sim.engine import Simulation

TECHNIQUES: dict[str, dict[str, object]] = {
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 64, 125])
    parser.add_argument("--links", default="wifi")
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(f"{options.task}, to {options.target:.0%} accuracy, links {options.links}; – was not reached")
    print(f"{'technique':16} {'peers':>6} {'iterations':>10} {'bytes':>12} {'virtual s':>10} {'accuracy':>9}")
    for peers in options.peers:
        for name, overrides in TECHNIQUES.items():
            settings = {
                "technique": name, "task": options.task, "peers": peers, "group_size": 10 if peers == 1000 else 5,
                "batch": 16, "iterations": options.iterations, "links": options.links, "engine": "fast",
                "target_accuracy": options.target, "test_every": 5, **overrides,
            }  # fmt: skip
            print(_line(name, peers, settings, options.out), flush=True)


def _line(name: str, peers: int, settings: dict[str, object], out: Path | None) -> str:
    try:
        config = load(overrides=settings)
        where = None if out is None else RunDir.create(out / f"{name}-{peers}", config.as_dict(), overwrite=True)
        simulation = Simulation(config, where)
    except InputError as error:
        return f"{name:16} {peers:6} {error}"
    for _ in simulation.rows():
        pass
    if where is not None:
        where.close()
    s = simulation.summary()
    reached = s["iterations_to_target"] is not None
    cells = (s["iterations_to_target"], s["bytes_to_target"], s["seconds_to_target"]) if reached else None
    shown = f"{cells[0]:10} {cells[1]:12.3e} {cells[2]:10.1f}" if cells else f"{'–':>10} {'–':>12} {'–':>10}"
    return f"{name:16} {peers:6} {shown} {s['final_accuracy']:9.1%}"


if __name__ == "__main__":
    main()
