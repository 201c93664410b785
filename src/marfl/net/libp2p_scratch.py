"""A private directory for one net's sockets; the directories of peers that were killed go when the next one starts.

Whoever lives holds a lock (flock) in its directory. The kernel lets go of it however a process ends, and it is seen
from other containers that share the place, where a process number would say nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "marfl-net-"
LOCK = "lock"
BIRTH = 3600.0  # seconds: a directory without a lock is not about to get one any more
LONGEST = 60  # characters: the path of a socket has 107 at most
SHORT = "/tmp"


class Scratch:
    """One directory, for this user alone."""

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        place = place if len(place) <= LONGEST else SHORT
        sweep(Path(place))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            lock = _locked(self.path, os.O_CREAT | os.O_EXCL)
            if lock is not None:
                break  # else somebody swept it away between two of these lines
        self._lock = lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(place: Path) -> None:
    """Remove what dead processes of this user have left here, and nothing that a live one uses."""
    for path in place.glob(f"{PREFIX}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            if not (path / LOCK).exists() and time.time() - status.st_mtime < BIRTH:
                continue  # it is just being made
            lock = _locked(path, os.O_CREAT)
        except OSError:
            continue  # gone by now
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(path: Path, flags: int) -> int | None:
    """The lock of a directory; None when somebody else holds it, or has removed it."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # it is held
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return lock
    os.close(lock)
    return None
