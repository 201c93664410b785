"""Writing a run directory: one writer, nothing overwritten unasked, and a kill at any moment leaves it usable."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from marfl.errors import InputError
from marfl.runs.config_file import PROLONGS, Config, config_hash, dumps, flattened, state_hash
from marfl.runs.files import plain, take_lock, write_atomic, write_json, writing
from marfl.runs.reader import (
    CONFIG,
    ROWS,
    SPLIT,
    SUMMARY,
    checked_split,
    checked_summary,
    holds_run,
    next_row,
    read_config,
    read_rows,
)
from marfl.runs.rows import ROW_FIELDS, Row, Summary

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT, EVENTS, LOCK = "checkpoint.safetensors", "events", ".lock"
MARK = "# The resolved settings of a marfl run.\n"  # by this line we know a config.toml that we may replace


FILE_PREFIX = "events.out.tfevents."  # how TensorBoard knows its files

_PROTO = "tensorboard.compat.proto"


class RunDir:
    """The one writer of a run directory; `create` makes one. Close it, or use it as a context manager."""

    def __init__(self, path: Path, config: Config, lock: int) -> None:
        self.path = path
        self.config_hash = config_hash(config)
        self._config = config
        self._lock = lock
        self._rows = RowLog(path / ROWS)
        self._events = EventFile(path / EVENTS, fresh=self._rows.last < 0)

    @classmethod
    def create(cls, path: Path, config: Config, *, overwrite: bool = False, resume: bool = False) -> RunDir:
        """Start a run in `path`, or go on with the one that is there.

        A directory that holds a run is refused unless `overwrite` (its files of ours are removed, others are never
        touched) or `resume` (the settings that decide the result must be the same, but the run may end later).
        """
        text = MARK + dumps(config)
        cls.check(path, config, overwrite=overwrite, resume=resume)  # before anything is created
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path / LOCK)
        try:
            _admit(path, config, overwrite=overwrite, resume=resume)  # another process may have come between
            if not resume:
                _remove_run(path)
                write_atomic(path / CONFIG, text.encode())
            elif config_hash(read_config(path)) != config_hash(config):
                with writing(path / SUMMARY):
                    (path / SUMMARY).unlink(missing_ok=True)  # of the shorter run
                write_atomic(path / CONFIG, text.encode())
            return cls(path, config, lock)
        except BaseException:
            os.close(lock)
            raise

    @staticmethod
    def check(path: Path, config: Config, *, overwrite: bool = False, resume: bool = False) -> None:
        """Refuse what `create` would refuse, without touching anything."""
        if overwrite and resume:
            raise InputError("--overwrite and --resume: choose one")
        _admit(path, config, overwrite=overwrite, resume=resume)

    def append_row(self, row: Row) -> None:
        """Add the row of an iteration, later than all before; it survives a kill. A summary of fewer rows is removed.

        Numbers that are not finite become null.
        """
        with writing(self.path / SUMMARY):
            (self.path / SUMMARY).unlink(missing_ok=True)
        self._events.add(self._rows.append(row))

    def rows(self) -> tuple[Row, ...]:
        """All rows so far."""
        return read_rows(self.path / ROWS)

    def keep_rows(self, through: int) -> None:
        """Forget the rows after iteration `through`: a resumed run computes them again from its checkpoint."""
        self._rows.keep(through)

    def write_summary(self, summary: Summary) -> None:
        """Say what came out; the config's hash is filled in.

        A finished run's accuracies and bytes must be those of its rows; an interruption may fall between the two.
        """
        whole = plain({"config_hash": self.config_hash, **summary})
        try:
            write_json(self.path / SUMMARY, checked_summary(whole, self._config, self.rows()))
        except ValueError as error:
            raise ValueError(f"a summary {error}") from error

    def write_split(self, labels: Iterable[object], counts: Iterable[Iterable[int]]) -> None:
        """Say who holds which samples: `counts[peer][k]` of `labels[k]`."""
        split = checked_split(labels, counts)
        write_json(self.path / SPLIT, {"labels": split.labels, "counts": split.counts})

    def save_checkpoint(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Keep a state to resume from; the one before stays until this one, and every row so far, is on the disk."""
        from marfl.runs import checkpoint  # here, because it waits for torch

        self._rows.sync()
        checkpoint.save(self.path / CHECKPOINT, tensors, meta, state_hash(self._config))

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest complete state, or None when there is none yet; a damaged one is refused."""
        from marfl.runs import checkpoint  # here, because it waits for torch

        return checkpoint.load(self.path / CHECKPOINT, state_hash(self._config), self.config_hash)

    def close(self) -> None:
        """Let go of the files and of the lock."""
        self._events.close()
        self._rows.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _admit(path: Path, config: Config, *, overwrite: bool, resume: bool) -> None:
    """Refuse a directory in which this run must not start, before touching it."""
    if not holds_run(path):
        foreign = [name for name in (CONFIG, ROWS, SUMMARY, SPLIT, CHECKPOINT) if (path / name).exists()]
        if foreign:
            raise InputError(f"{path}: holds {foreign[0]} but no run; move it away or choose another --out")
        if resume:
            raise InputError(f"{path}: holds no run to resume; leave out --resume to start one")
    elif resume:
        _admit_resume(path, config)
    elif not _is_ours(path / CONFIG):
        raise InputError(f"{path}: {CONFIG} was not written by marfl; move it away or choose another --out")
    elif not overwrite:
        raise InputError(
            f"{path}: holds a run already; --resume goes on with it, --overwrite replaces it, or choose another --out"
        )


def _is_ours(config: Path) -> bool:
    try:
        return config.read_bytes().startswith(MARK.encode())
    except OSError as error:
        raise InputError(f"{config}: cannot be read ({error.strerror}); choose another --out") from error


def _admit_resume(path: Path, config: Config) -> None:
    there = read_config(path)
    if config_hash(there) == config_hash(config):
        return
    if state_hash(there) == state_hash(config):
        done = max((row.iteration for row in read_rows(path / ROWS)), default=0)
        if config.get("iterations", done) < done:
            raise InputError(f"{path}: --iterations {config['iterations']}: the run has {done} already; give more")
        return
    old, new = ({n: v for n, v in flattened(tree).items() if n not in PROLONGS} for tree in (there, config))
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    shown = ", ".join(f"{name} was {old.get(name)!r}, now {new.get(name)!r}" for name in changed[:3])
    raise InputError(f"{path}: --resume needs the settings of the run; {shown or 'the types of some values differ'}")


def _remove_run(path: Path) -> None:
    """Remove what an earlier run of ours left, and nothing else; its config goes last, by being replaced."""
    with writing(path):
        for name in (SUMMARY, CHECKPOINT, f"{CHECKPOINT}.new", ROWS, SPLIT):
            (path / name).unlink(missing_ok=True)
        for file in (path / EVENTS).glob(f"{FILE_PREFIX}*.marfl"):
            file.unlink()


class RowLog:
    """metrics.jsonl, open for appending; opening it cuts off a torn last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = read_rows(path)
        self.last = rows[-1].iteration if rows else -1  # the newest iteration that has a row
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            content = path.read_bytes()
            os.ftruncate(self._file, content.rfind(b"\n") + 1)

    def append(self, row: Row) -> Row:
        """Write one row and hand it to the kernel; return it as written. A full disk leaves the rows before it."""
        try:
            written = next_row(plain(row), self.last)
        except ValueError as error:
            raise ValueError(f"a row of metrics.jsonl {error}") from error
        line = json.dumps(dict(written), allow_nan=False, ensure_ascii=False).encode() + b"\n"
        with writing(self._path):
            self._write_whole(line)
        self.last = written.iteration
        return written

    def keep(self, through: int) -> None:
        """Drop the rows after iteration `through`: they will be computed again."""
        kept = [row.iteration for row in read_rows(self._path) if row.iteration <= through]
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


class EventFile:
    """The rows once more, for TensorBoard: a file of events, flushed row by row.

    It has no thread, which a forked worker would inherit.
    `fresh` is False when a run goes on: TensorBoard then forgets what an earlier file says from this iteration on.
    """

    def __init__(self, folder: Path, *, fresh: bool) -> None:
        self._folder = folder
        self._fresh = fresh
        self._file: Any = None  # opened with the first row, so that a run that never starts leaves nothing

    def add(self, row: Row) -> None:
        """Write every number of a row; `bytes_total` becomes `bytes/total`, so that TensorBoard groups them."""
        if not _installed():
            return
        step = row.iteration
        values = [
            {"tag": name.replace("_", "/", 1), "simple_value": float(row[name])}
            for name in ROW_FIELDS
            if name != "iteration" and isinstance(row[name], int | float)
        ]
        with writing(self._folder):
            if self._file is None:
                self._open(step)
            self._write(step=step, summary=importlib.import_module(f"{_PROTO}.summary_pb2").Summary(value=values))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, step: int) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{FILE_PREFIX}{time.time_ns()}.marfl"
        record_writer = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._file = record_writer.RecordWriter(path.open("xb"))
        self._write(file_version="brain.Event:2")
        if not self._fresh:
            log = importlib.import_module(f"{_PROTO}.event_pb2").SessionLog
            self._write(step=step, session_log=log(status=log.START))

    def _write(self, **fields: Any) -> None:
        event = importlib.import_module(f"{_PROTO}.event_pb2").Event(wall_time=time.time(), **fields)
        self._file.write(event.SerializeToString())


@functools.cache  # so that the notice appears once
def _installed() -> bool:
    try:
        importlib.import_module("tensorboard.summary.writer.record_writer")
    except ModuleNotFoundError:
        logging.getLogger("marfl").warning(
            "no TensorBoard events are written: tensorboard is not installed (pip install 'marfl[plots]')"
        )
        return False
    return True
