"""Writing a run directory: one writer, nothing overwritten unasked, and a kill at any moment leaves it usable."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from marfl.errors import InputError
from marfl.rundir.config import Config, config_hash, dumps, flattened
from marfl.rundir.events import FILE_PREFIX, Events
from marfl.rundir.fields import SUMMARY_FIELDS, in_order
from marfl.rundir.files import plain, take_lock, write_atomic, write_json, writing
from marfl.rundir.reader import (
    CONFIG,
    ROWS,
    SPLIT,
    SUMMARY,
    checked_split,
    holds_run,
    read_config,
    summary_problem,
)
from marfl.rundir.rows import Row, RowLog, read_rows

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT, EVENTS, LOCK = "checkpoint.safetensors", "events", ".lock"
MARK = "# The resolved settings of a marfl run.\n"  # by this line we know a config.toml that we may replace


class RunDir:
    """The one writer of a run directory; `create` makes one. Close it, or use it as a context manager."""

    def __init__(self, path: Path, config: Config, lock: int) -> None:
        self.path = path
        self.config_hash = config_hash(config)
        self._config = config
        self._lock = lock
        self._rows = RowLog(path / ROWS)
        self._events = Events(path / EVENTS, fresh=self._rows.last < 0)

    @classmethod
    def create(cls, path: Path, config: Config, *, overwrite: bool = False, resume: bool = False) -> RunDir:
        """Start a run in `path`, or go on with the one that is there.

        A directory that holds a run is refused unless `overwrite` (its files of ours are removed, others are never
        touched) or `resume` (the settings that decide the result must be the same).
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

        The row has every name of `ROW_FIELDS`; numbers that are not finite become null.
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

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Say what came out, with every name of `SUMMARY_FIELDS`; the config's hash is filled in.

        A finished run's accuracies and bytes must be those of its rows; an interruption may fall between the two.
        """
        whole = in_order(plain({"config_hash": self.config_hash, **summary}), SUMMARY_FIELDS)
        problem = summary_problem(whole, self._config, self.rows())
        if problem:
            raise ValueError(f"a summary {problem}")
        write_json(self.path / SUMMARY, whole)

    def write_split(self, labels: Iterable[object], counts: Iterable[Iterable[int]]) -> None:
        """Say who holds which samples: `counts[peer][k]` of `labels[k]`."""
        split = checked_split(labels, counts)
        write_json(self.path / SPLIT, {"labels": split.labels, "counts": split.counts})

    def save_checkpoint(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Keep a state to resume from; the one before stays until this one, and every row so far, is on the disk."""
        from marfl.rundir import checkpoint  # here, because it waits for torch

        self._rows.sync()
        checkpoint.save(self.path / CHECKPOINT, tensors, meta, self.config_hash)

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest complete state, or None when there is none yet; a damaged one is refused."""
        from marfl.rundir import checkpoint  # here, because it waits for torch

        return checkpoint.load(self.path / CHECKPOINT, self.config_hash)

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
    old, new = flattened(there), flattened(config)
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
