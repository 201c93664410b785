"""Made-up runs for the tests of run directories and reports: whole directories, written the way real ones are."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from marfl.errors import InputError
from marfl.runs import ROW_FIELDS, RunDir

MODEL_BYTES = 4_000
COST = {  # what a peer sends in an iteration, in models, as a function of the number of peers
    "mar": lambda peers: 2 * (peers - 1) / peers,
    "fedavg": lambda peers: 2,
    "arfl": lambda peers: peers - 1,
    "rdfl": lambda peers: peers - 1,
    "ring": lambda peers: 2 * (peers - 1) / peers,
    "butterfly": lambda peers: 2 * (peers - 1) / peers,
    "saps": lambda peers: 0.01,
    "braintorrent": lambda peers: 0.9,
    "gossip": lambda peers: 1.0,
}
HOPS = {"rdfl": 124, "ring": 248}  # the others need few


def config_of(**settings: Any) -> dict[str, Any]:
    """A resolved config as the simulator has it, with some settings replaced."""
    config = {
        "task": "digits",
        "technique": "mar",
        "semantics": "exact",
        "exchange": "grid",
        "plan": "exact",
        "peers": 125,
        "iterations": 30,
        "optimizer": {"learning_rate": 0.1, "decay": 0.9},
        "churn": {"participation": 1.0, "dropout": 0.0, "trace": None},
        "seed": 0,
        "workers": 2,
        "checkpoint_every": 10,
    }
    return config | settings


def row_of(iteration: int, **fields: Any) -> dict[str, Any]:
    """A row with nothing in it but what is given."""
    empty = {field: None if "or null" in kind else 0 for field, kind in ROW_FIELDS.items()} | {"checks": []}
    return empty | {"iteration": iteration} | fields


def rows_of(config: dict[str, Any], *, test_every: int = 5) -> list[dict[str, Any]]:
    """A learning curve that only the seed and the semantics bend, at the bytes and the time of the technique."""
    technique, peers = config["technique"], config["peers"]
    each = round(COST[technique](peers) * peers * MODEL_BYTES)
    slow = 1.6 if config["semantics"] == "paper" or technique in {"saps", "braintorrent", "gossip"} else 1.0
    rows = []
    for iteration in range(1, config["iterations"] + 1):
        tested = iteration % test_every == 0 or iteration == config["iterations"]
        wave = 0.01 * math.sin(iteration + config["seed"]) + 0.01 * config["seed"]
        accuracy = 0.1 + 0.8 * (1 - math.exp(-iteration / (8 * slow))) + wave
        rows.append(
            row_of(
                iteration,
                participants=peers,
                aggregators=peers,
                train_loss=2.3 * math.exp(-iteration / 10),
                test_accuracy=accuracy if tested else None,
                bytes_payload=each,
                bytes_control=50 * peers,
                bytes_total=(each + 50 * peers) * iteration,
                virtual_seconds=0.2 + 0.05 * HOPS.get(technique, 3),
                wall_seconds=0.1,
                disagreement=0.0,
                model_hash=f"{config['seed']:02x}" * 32,
            )
        )
    return rows


def summary_of(config: dict[str, Any], rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """What the rows come to."""
    tested = [row["test_accuracy"] for row in rows if row["test_accuracy"] is not None]
    total = rows[-1]["bytes_total"] if rows else 0
    grouped = config["technique"] == "mar"
    return {
        **{name: config[name] for name in ("technique", "semantics", "task", "peers", "seed")},
        "exchange": config["exchange"] if grouped else None,
        "plan": config["plan"] if grouped else None,
        "iterations": len(rows),
        "final_accuracy": tested[-1] if tested else None,
        "best_accuracy": max(tested, default=None),
        "bytes_total": total,
        "bytes_per_peer_iteration": total / config["peers"] / max(1, len(rows)),
        "model_bytes": MODEL_BYTES,
        "disagreement": 0.0,
        "model_hash": "ab" * 32,
        "wall_seconds": 0.1 * len(rows),
        "virtual_seconds": sum(row["virtual_seconds"] or 0.0 for row in rows),
        "engine": "bitwise",
        "engine_reason": None,
        **dict.fromkeys(("target_accuracy", "iterations_to_target", "bytes_to_target", "seconds_to_target")),
        "finished": True,
        "stopped_because": "all iterations done",
        **fields,
    }


def make_run(path: Path, *, until: int | None = None, split: bool = False, **settings: Any) -> Path:
    """Write a run to `path`: to its end, or killed after iteration `until`, without a summary."""
    config = config_of(**settings)
    rows = rows_of(config)[:until]
    with RunDir.create(path, config) as run:
        if split:
            counts = [[(7 * peer * label + peer) % 13 for label in range(10)] for peer in range(config["peers"])]
            run.write_split(range(10), counts)
        for row in rows:
            run.append_row(row)
        if until is None:
            run.write_summary(summary_of(config, rows))
    return path


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    """The message of an error, which must be one line."""
    assert "\n" not in str(error.value)
    return str(error.value)


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, which sees the helpers of the tests."""
    source = f"import sys; sys.path[:0] = {[*sys.path, str(Path(__file__).parents[1])]!r}\n{script}"
    return subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True)
