"""A peer's log: lines for a person, or one JSON object a line for a program; on stderr and in the state directory."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from marfl.errors import InputError

FORMATS = ("text", "json")
LOGGER = "marfl"
LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}


class LogFile(logging.FileHandler):
    """Lines in a file."""

    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk a line is lost, without a traceback: the state that cannot be kept ends the peer."""


def level_of(record: logging.LogRecord) -> str:
    """The level by its usual name: other libraries rename them for the whole process."""
    return LEVELS.get(record.levelno, "info")


class Lines(logging.Formatter):
    """Date, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{when} {level_of(record).upper():7} {record.getMessage()}{error}"


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, message, and what is the same in all lines of this peer."""

    def __init__(self, same: Mapping[str, Any]) -> None:
        super().__init__()
        self._same = dict(same)

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told = {
            "time": f"{whole}.{int(record.msecs):03d}Z", "level": level_of(record), "logger": record.name,
            **self._same, "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


def log_to(path: Path, kind: str, same: Mapping[str, Any]) -> Callable[[], None]:
    """Write to stderr and to this file from now on; what to call at the end. `same` goes into every line of JSON."""
    try:
        handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr), LogFile(path, delay=False)]
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    log = logging.getLogger(LOGGER)
    before = log.level, log.propagate
    for handler in handlers:
        handler.setFormatter(JsonLines(same) if kind == "json" else Lines())
        log.addHandler(handler)
    log.setLevel(logging.INFO)

    def end() -> None:
        log.setLevel(before[0])
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()

    return end
