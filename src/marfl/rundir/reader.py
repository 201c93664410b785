"""Reading a run directory: finished, under way or killed; what was edited by hand is refused in one line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marfl.errors import InputError
from marfl.rundir.config import config_hash
from marfl.rundir.files import read_json
from marfl.rundir.rows import Row, read_rows

CONFIG, ROWS, SUMMARY, SPLIT = "config.toml", "metrics.jsonl", "summary.json", "split.json"

SUMMARY_FIELDS = (
    "technique",
    "semantics",
    "exchange",
    "plan",
    "task",
    "peers",
    "iterations",
    "final_accuracy",
    "best_accuracy",
    "bytes_total",
    "bytes_per_peer_iteration",
    "model_bytes",
    "disagreement",
    "model_hash",
    "wall_seconds",
    "virtual_seconds",
    "engine",
    "engine_reason",
    "seed",
    "config_hash",
    "target_accuracy",
    "iterations_to_target",
    "bytes_to_target",
    "seconds_to_target",
    "finished",
    "stopped_because",
)


@dataclass(frozen=True)
class Split:
    """Who holds which samples: `counts[peer][k]` samples of `labels[k]`."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Run:
    """What a run directory holds."""

    path: Path
    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    summary: Mapping[str, Any] | None  # None while the run is under way, or when it was killed
    split: Split | None

    @property
    def finished(self) -> bool:
        return self.summary is not None and bool(self.summary["finished"])


def open_run(path: Path) -> Run:
    """Read a run directory, whatever state it is in; a torn last row does not count, anything else wrong is refused."""
    if not path.is_dir():
        raise InputError(f"{path}: there is no such run directory")
    if not holds_run(path):
        raise InputError(f"{path}: is not a run directory, as it has no {CONFIG}")
    config = read_config(path)
    return Run(path, config, read_rows(path / ROWS), _summary(path, config), _split(path))


def holds_run(path: Path) -> bool:
    """Whether a run was started in this directory."""
    return (path / CONFIG).is_file()


def find_runs(path: Path) -> list[Path]:
    """`path` when it is a run directory, else the run directories directly below it, by name; never none."""
    if holds_run(path) or not path.is_dir():
        return [path]  # opening it says what is wrong with it
    found = sorted(child for child in path.iterdir() if holds_run(child))
    if not found:
        raise InputError(f"{path}: is not a run directory and has none below it, as there is no {CONFIG}")
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The settings of the run in this directory."""
    try:
        return tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path / CONFIG}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path / CONFIG}: is not valid TOML ({error}); restore it or repeat the run") from error


def _summary(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    summary = read_json(path / SUMMARY)
    if summary is None:
        return None
    missing = set(SUMMARY_FIELDS) - (summary.keys() if isinstance(summary, dict) else set())
    if missing:
        raise InputError(f"{path / SUMMARY}: lacks {', '.join(sorted(missing))}; restore it or repeat the run")
    if summary["config_hash"] != config_hash(config):
        raise InputError(f"{path / CONFIG}: was changed after the run; restore it or repeat the run")
    return dict(summary)


def _split(path: Path) -> Split | None:
    split = read_json(path / SPLIT)
    if split is None:
        return None
    try:
        return checked_split(split["labels"], split["counts"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path / SPLIT}: must hold labels, and counts[peer][label]; restore it") from error


def checked_split(labels: Any, counts: Any) -> Split:
    """A split whose every peer has a count of every label, else ValueError."""
    split = Split(tuple(str(label) for label in labels), tuple(tuple(int(n) for n in row) for row in counts))
    if not split.labels or not split.counts or any(len(row) != len(split.labels) for row in split.counts):
        raise ValueError(f"a split needs at least one peer, and {len(split.labels)} counts for each")
    return split
