"""Ends a peer's p2pd daemon and removes the private directory of its sockets, however the peer ends.

The directory. A living peer holds a lock (flock) on a file in its directory. The kernel releases the lock however the
process ends. Other containers that share the file system see the lock, too, where a process number would tell them
nothing. So the next peer that starts can remove the directories of peers that were killed.

The daemon. hivemind starts it, so we have hivemind start a few lines of Python, which then become the daemon. Without
them two things would go wrong. A peer that is killed would leave its daemon behind, on the port that its successor
wants. And Ctrl-C reaches every process of the terminal, so the daemon would be gone before its peer can say goodbye.
Without a terminal the two stay in one process group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

PREFIX = "marfl-net-"
LOCK = "lock"
BIRTH = 3600.0  # seconds: a directory without a lock is not about to get one any more
LONGEST = 60  # characters: the path of a socket has 107 at most
SHORT = "/tmp"
BECOME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if sys.argv[1] == "apart":
    os.setpgid(0, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


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


def guarded(command: list[str]) -> list[str]:
    """The same command, for a child that ends with this process and that a Ctrl-C does not take from it."""
    return [sys.executable, "-I", "-S", "-c", BECOME, "apart" if _in_a_terminal() else "together", *command]


def _in_a_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True
