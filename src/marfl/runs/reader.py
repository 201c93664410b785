"""Reading a run directory: finished, under way or killed; what was edited by hand is refused in one line."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marfl.errors import InputError
from marfl.runs.config_file import config_hash
from marfl.runs.files import parsed, read_json
from marfl.runs.rows import Row, Summary, parse_row, parse_summary

CONFIG, ROWS, SUMMARY, SPLIT = "config.toml", "metrics.jsonl", "summary.json", "split.json"


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
    summary: Summary | None  # None while the run is under way, or when it was killed
    split: Split | None

    @property
    def finished(self) -> bool:
        return self.summary is not None and self.summary.finished


def open_run(path: Path) -> Run:
    """Read a run directory, whatever state it is in; a torn last row does not count, anything else wrong is refused."""
    if not path.is_dir():
        raise InputError(f"{path}: there is no such run directory")
    if not holds_run(path):
        raise InputError(f"{path}: is not a run directory, as it has no {CONFIG}")
    config = read_config(path)
    rows = read_rows(path / ROWS)
    return Run(path, config, rows, _summary(path, config, rows), _split(path))


def holds_run(path: Path) -> bool:
    """Whether a run was started in this directory."""
    return (path / CONFIG).is_file()


def find_runs(path: Path) -> list[Path]:
    """`path` when it is a run directory, else all run directories below it, by name; never none.

    What is below a run, such as the states of a swarm's peers, is part of it.
    """
    if holds_run(path) or not path.is_dir():
        return [path]  # opening it says what is wrong with it
    found: list[Path] = []
    for folder, below, files in os.walk(path):
        if CONFIG in files:
            found.append(Path(folder))
            below.clear()
    found.sort()
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


def read_rows(path: Path) -> tuple[Row, ...]:
    """All rows whose line is complete: a last line without its end was torn by a kill and does not count."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    return tuple(_rows(path, content))


def _rows(path: Path, content: bytes) -> Iterator[Row]:
    last = -1
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        where = f"{path}, line {number}"
        try:
            found = parsed(line)
        except ValueError as error:
            raise InputError(f"{where}: is not valid JSON; restore it or repeat the run") from error
        try:
            row = next_row(found, last)
        except ValueError as error:
            raise InputError(f"{where}: {error}; restore it or repeat the run") from error
        last = row.iteration
        yield row


def next_row(found: object, last: int) -> Row:
    """The row that may follow iteration `last`; ValueError says in a few words why this is none."""
    row = parse_row(found)
    if row.iteration <= last:
        raise ValueError(f"iteration {row.iteration} comes after iteration {last}")
    return row


def checked_summary(found: object, config: Mapping[str, Any], rows: Sequence[Row]) -> Summary:
    """The summary of this config and these rows; ValueError says in a few words why it cannot be."""
    summary = parse_summary(found)
    if summary.config_hash != config_hash(config):
        raise ValueError(f"is of other settings than {CONFIG} has")
    tested = [row.test_accuracy for row in rows if row.test_accuracy is not None]
    expected = {
        "final_accuracy": tested[-1] if tested else None,
        "best_accuracy": max(tested, default=None),
        "bytes_total": rows[-1].bytes_total if rows else 0,
    }
    wrong = [name for name, value in expected.items() if summary[name] != value]
    if wrong and summary.finished:  # an interruption may fall between a row and what is counted from it
        raise ValueError(f"{wrong[0]} is {summary[wrong[0]]!r}, but {ROWS} says {expected[wrong[0]]!r}")
    return summary


def _summary(path: Path, config: Mapping[str, Any], rows: Sequence[Row]) -> Summary | None:
    found = read_json(path / SUMMARY)
    try:
        return None if found is None else checked_summary(found, config, rows)
    except ValueError as error:
        raise InputError(f"{path / SUMMARY}: {error}; restore what was changed, or repeat the run") from error


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
