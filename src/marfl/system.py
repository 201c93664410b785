"""What differs between operating systems: locks on files, cores, a process's age, directories that can be synced.

Real peers need Linux or macOS; everything else, the simulator above all, runs on Windows as well.
"""

from __future__ import annotations

import os
import time

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def hold(descriptor: int, *, wait: bool) -> None:
    """Hold an open file alone until it is closed or the process ends; `BlockingIOError` where another does."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt  # of Windows alone

    os.lseek(descriptor, FAR, os.SEEK_SET)  # what is locked cannot be read by others: a byte that nobody wants
    try:
        while True:
            try:
                kind = "LK_LOCK" if wait else "LK_NBLCK"
                vars(msvcrt)["locking"](descriptor, vars(msvcrt)[kind], 1)  # its types are of Windows alone, too
                return
            except OSError as error:
                if not wait:  # it gives up after ten seconds: who waits tries again
                    raise BlockingIOError(str(error)) from None
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


FAR = 2**30  # bytes


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def seconds_since_start() -> float:
    """How long this process runs, where the system tells it (Linux); else 0."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            started = int(file.read().rpartition(")")[2].split()[19])  # in ticks since the machine was started
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until a file, or what a directory lists, is on the disk; Windows cannot open directories, and needs not."""
    if os.name == "nt" and os.path.isdir(path):
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
