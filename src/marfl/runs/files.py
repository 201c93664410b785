"""Writes files that are whole or not there, keeps each directory to one writer, and reports a full disk in one line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marfl.errors import InputError
from marfl.system import hold, sync


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into one line that names the file and the reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path}: cannot be written ({reason}); make room or choose another directory") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A fresh file to fill, beside `path`; it takes the place of `path` once it is whole and on the disk.

    Whatever goes wrong before that, `path` is what it was.
    """
    fresh = path.with_name(f"{path.name}.new")
    with writing(path):
        try:
            yield fresh
            sync(fresh)
            os.replace(fresh, path)
            sync(path.parent)
        finally:
            fresh.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes) -> None:
    """Put `content` at `path`, all of it or nothing."""
    with replacing(path) as fresh:
        fresh.write_bytes(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Put `content` at `path` as JSON that every parser reads."""
    write_atomic(path, (json.dumps(plain(content), indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any | None:
    """What a JSON file holds, or None when there is no such file; anything else is one clear line."""
    try:
        return parsed(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error}); restore it or repeat the run") from error


def parsed(text: bytes) -> Any:
    """What a JSON text says; ValueError for what is not JSON, also for the NaN and Infinity that Python would take."""
    return json.loads(text, parse_constant=_refuse)


def plain(value: Any) -> Any:
    """JSON's own types for numbers of numpy and torch; a float that is not finite is null, as JSON has no NaN."""
    match value:
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case float():
            return float(value) if math.isfinite(value) else None
        case _ if hasattr(value, "item"):
            return plain(value.item())
    return value


def take_lock(path: Path, taken: str | None = None) -> int:
    """Become the one writer that holds `path`, until the returned descriptor is closed or the process ends.

    `taken` is what to say when another one holds it; ``{pid}`` in it is that process.
    """
    with writing(path):
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            hold(lock, wait=False)
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        except OSError as error:
            holder = os.read(lock, 20).decode(errors="replace") or "unknown"
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            other = f"{path.parent}: another process (pid {{pid}}) writes here; wait for it or choose another --out"
            raise InputError((taken or other).replace("{pid}", holder)) from error
    return lock


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
