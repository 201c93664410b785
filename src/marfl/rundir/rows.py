"""metrics.jsonl: a row for each iteration; a kill loses at most the row that was being written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from marfl.errors import InputError
from marfl.rundir.fields import ROW_FIELDS, in_order, problem_of
from marfl.rundir.files import parsed, plain, writing

Row = Mapping[str, Any]  # one iteration: every name of ROW_FIELDS, and whatever else the writer adds


def read_rows(path: Path) -> tuple[Row, ...]:
    """All rows whose line is complete: a last line without its end was torn by a kill and does not count."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    return tuple(_parsed(path, content))


def _parsed(path: Path, content: bytes) -> Iterator[Row]:
    last = -1
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = parsed(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: is not valid JSON; restore it or repeat the run") from error
        problem = problem_of(row, ROW_FIELDS)
        if problem is None and row["iteration"] <= last:
            problem = f"iteration {row['iteration']} comes after iteration {last}"
        if problem:
            raise InputError(f"{path}, line {number}: {problem}; restore it or repeat the run")
        last = row["iteration"]
        yield row


class RowLog:
    """metrics.jsonl, open for appending; opening it cuts off a torn last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = read_rows(path)
        self.last = rows[-1]["iteration"] if rows else -1  # the newest iteration that has a row
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            content = path.read_bytes()
            os.ftruncate(self._file, content.rfind(b"\n") + 1)

    def append(self, row: Row) -> Row:
        """Write one row and hand it to the kernel; return it as written. A full disk leaves the rows before it."""
        row = plain(in_order(row, ROW_FIELDS))
        problem = problem_of(row, ROW_FIELDS)
        if problem is None and row["iteration"] <= self.last:
            problem = f"iteration {row['iteration']} comes after iteration {self.last}"
        if problem:
            raise ValueError(f"a row of metrics.jsonl {problem}")
        line = json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        with writing(self._path):
            self._write_whole(line)
        self.last = row["iteration"]
        return row

    def keep(self, through: int) -> None:
        """Drop the rows after iteration `through`: they will be computed again."""
        kept = [row["iteration"] for row in read_rows(self._path) if row["iteration"] <= through]
        lines = self._path.read_bytes().split(b"\n")[: len(kept)]
        with writing(self._path):
            os.ftruncate(self._file, sum(len(line) + 1 for line in lines))
        self.last = kept[-1] if kept else -1

    def sync(self) -> None:
        """Wait until the rows are on the disk, so that no checkpoint is ever ahead of them."""
        with writing(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _write_whole(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise
