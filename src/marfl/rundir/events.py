"""The rows once more, for TensorBoard: written when it is installed, never needed."""

from __future__ import annotations

import functools
import importlib
import logging
import time
from pathlib import Path
from typing import Any

from marfl.rundir.fields import ROW_FIELDS
from marfl.rundir.files import writing
from marfl.rundir.rows import Row

FILE_PREFIX = "events.out.tfevents."  # how TensorBoard knows its files

_PROTO = "tensorboard.compat.proto"


class Events:
    """One file of TensorBoard events, flushed row by row, without a thread that a forked worker would inherit.

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
        step = row["iteration"]
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
