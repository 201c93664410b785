"""Processes as Linux knows them: whole groups are signalled and looked at, so that no daemon is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)

def die_with_parent() -> None:
    """In a child before it starts: be killed when the parent is, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def group_members(group: int) -> list[int]:
    """The pids of a process group that are still running; zombies are not."""
    stats = ((pid, *_stat(pid)) for pid in _pids())
    return [pid for pid, state, leader in stats if leader == str(group) and state not in ("Z", "X")]


def signal_group(group: int, number: int) -> None:
    """Signal every process of a group; one that is gone already is none."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Finish what is inside, whatever key is pressed: a second Ctrl-C must not leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def command_name(pid: int) -> str:
    """The name of a process, empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def sockets_of(pids: list[int]) -> set[Path]:
    """Files of the Unix sockets that these processes hold: they stay behind when a process is killed."""
    return {path for pid in pids for path in _sockets(pid)}


def resident_bytes(pid: int) -> int:
    """The resident memory of a process, 0 when it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _sockets(pid: int) -> Iterator[Path]:
    held = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(entry.path))
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and fields[7].startswith("/") and f"socket:[{fields[6]}]" in held:
                yield Path(fields[7])


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, str]:
    """(state, group) of a process; empty strings when it is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[2]
    return "", ""
