"""What was run, small enough for the repository: a line for each run, from which another machine makes the page.

A line holds the summary, and of the rows what figures need, column by column; a column that never changes is one
value. Models, losses and wall-clock times of rows stay in the run directory. Each line is sealed: one that was changed
by hand is refused. Whoever has the file goes on from it: what is in it is not run again. (Runs of an earlier version
have a summary only, which says `rows_kept = false`.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from marfl.errors import InputError
from marfl.runs.files import parsed, plain, write_atomic
from marfl.runs.reader import Run
from marfl.runs.rows import BYTE_FIELDS, Row, parse_row, parse_summary

Line = Mapping[str, Any]
COLUMNS = (
    "participants", "aggregators", "test_accuracy", "messages", *BYTE_FIELDS, "virtual_seconds", "disagreement",
    "epsilon_outsider", "epsilon_insider", "epsilon_insider_masked",
)  # fmt: skip
SEAL = "sha256"


@dataclass(frozen=True)
class KeptRuns:
    """The lines of a file, by the run's key; no file is no lines."""

    path: Path

    @property
    def lines(self) -> Mapping[str, Line]:
        return _read(self.path, self.path.stat().st_mtime_ns) if self.path.is_file() else {}

    def run(self, key: str, config: Mapping[str, Any]) -> Run:
        """A run as its directory would give it, as far as it was kept."""
        line = self.lines[key]
        path = self.path.parent / str(line["directory"])
        return Run(path, config, tuple(_rows(line)), parse_summary(line["summary"]), None)

    def write(self, lines: Iterable[Line]) -> None:
        """These lines and no others, by key."""
        ordered = sorted(lines, key=lambda line: str(line["key"]))
        write_atomic(self.path, "".join(f"{_text(line)}\n" for line in ordered).encode())


def kept_line(
    key: str, directory: str, settings: Mapping[str, Any], summary: Mapping[str, Any], rows: Iterable[Row]
) -> Line:
    """What is kept of a run, sealed; a calculation has no rows."""
    table = list(rows)
    columns = {name: _packed([row[name] for row in table]) for name in COLUMNS} if table else {}
    kept = {name: column for name, column in columns.items() if column != [None]}
    line = {"key": key, "directory": directory, "settings": settings, "summary": summary}
    line = dict(plain({**line, "iterations": len(table), "columns": kept}))
    return {**line, SEAL: _seal(line)}


def _text(line: Line) -> str:
    return json.dumps(line, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _seal(line: Line) -> str:
    return hashlib.sha256(_text({name: value for name, value in line.items() if name != SEAL}).encode()).hexdigest()


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> Mapping[str, Line]:
    """The lines of a file that was changed then; each must be as it was written."""
    found = {}
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = parsed(text)
            good = line[SEAL] == _seal(line)
        except (ValueError, TypeError, KeyError):
            good = False
        if not good:
            raise InputError(f"{path}, line {number}: was changed after it was made; restore it, or remove the line")
        found[line["key"]] = line
    return found


def _packed(column: list[Any]) -> list[Any]:
    """A column that never changes as its one value; one with gaps as the places and the values beside each other."""
    first = column[0]
    if all(value == first for value in column):
        return [first]
    there = [place for place, value in enumerate(column) if value is not None]
    if len(there) < len(column) // 2:
        return [there, [_short(column[place]) for place in there]]
    return [_short(value) for value in column]


def _short(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _unpacked(column: list[Any], length: int) -> list[Any]:
    if len(column) == 1:
        return column * length
    if isinstance(column[0], list):
        values = dict(zip(*column, strict=True))
        return [values.get(place) for place in range(length)]
    return column


def _rows(line: Line) -> Iterable[Row]:
    """The rows; what was not kept of them is null."""
    length = int(line["iterations"])
    columns = {name: _unpacked(line["columns"].get(name, [None]), length) for name in COLUMNS}
    totals = accumulate(sum(row) for row in zip(*(columns[name] for name in BYTE_FIELDS), strict=True))
    absent = ("train_loss", "test_loss", "wall_seconds", "update_seconds", "aggregate_seconds", "model_hash", "clip")
    for place, total in enumerate(totals):
        known = {name: column[place] for name, column in columns.items()}
        yield parse_row({"iteration": place + 1, "bytes_total": total, "checks": [], **dict.fromkeys(absent), **known})
