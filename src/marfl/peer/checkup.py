"""What may keep a peer from taking part, looked for before it tries: each finding is one line.

All checks run side by side, within one budget. Whatever has not answered by then gets a line that says so. The budget
counts from the start of the process, also while libraries load, which takes long on a busy machine. So this file
imports none that is slow, the network waits in `checkup_network`, and what may hang runs in threads that end with us.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeVar

from marfl.settings import Network
from marfl.system import seconds_since_start

LIMIT = 20.0  # seconds of the whole command, its start and its end included
LEAVING = 3.0  # of them to stop our own daemon, or to leave it to end with this process
ENDING = 1.0  # and for Python to end
ROOM = 200 * 2**20  # bytes: a checkpoint is written beside the one before
LIBRARIES = ("torch", "hivemind", "numpy", "cryptography")
EXTRA = "real peers need the extra swarm: pip install 'marfl[swarm]' (Linux and macOS)"
Value = TypeVar("Value")
_unanswered: set[Future[Any]] = set()  # what threads are at work on


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    subject: str
    good: bool
    says: str

    def __str__(self) -> str:
        return f"{'ok     ' if self.good else 'PROBLEM'}  {self.subject}: {self.says}"


@dataclass(frozen=True)
class Patient:
    """The peer that would be started."""

    run: str
    listen: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    state_dir: Path | None = None
    identity: Path | None = None
    token: Path | None = None
    authority: str | None = None
    network: Network = field(default_factory=Network)

    @property
    def key(self) -> Path | None:
        return self.identity or (self.state_dir / "identity" if self.state_dir else None)


class Checks:
    """Checks that run side by side, each with its subject and what it looks at, and what they have found so far."""

    def __init__(self) -> None:
        self._found: asyncio.Queue[Finding | BaseException | None] = asyncio.Queue()
        self._open: dict[asyncio.Task[None], tuple[str, str]] = {}

    def begin(self, subject: str, what: str, findings: AsyncIterator[Finding]) -> None:
        async def run() -> None:
            async for finding in findings:
                self._found.put_nowait(finding)

        task = asyncio.get_running_loop().create_task(run())
        self._open[task] = subject, what
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        self._found.put_nowait(None if task.cancelled() else task.exception())  # whoever waits looks again

    async def findings(self, seconds: float) -> AsyncIterator[Finding]:
        """Findings as they come; then one for every check that is not over after so many seconds."""
        end = asyncio.get_running_loop().time() + seconds
        while self._open or not self._found.empty():
            try:
                async with asyncio.timeout_at(end):
                    found = await self._found.get()
            except TimeoutError:
                break
            if isinstance(found, BaseException):
                raise found
            if found is not None:
                yield found
        for subject, what in list(self._open.values()):
            yield Finding(subject, False, f"{what} did not answer within {seconds:.0f} seconds")

    async def end(self, close: Callable[[], Any] | None, seconds: float = LEAVING) -> None:
        """Give up what is not over, and close what was opened, in so many seconds."""
        for task in list(self._open):
            task.cancel()
        leaving = [*self._open, *([asyncio.ensure_future(close())] if close else [])]
        if leaving:
            await asyncio.wait(leaving, timeout=seconds)


async def examine(patient: Patient, seconds: float = LIMIT) -> AsyncIterator[Finding]:
    """All findings, as they come; after so many seconds one for each check that has not answered."""
    yield _versions()
    checks, visits = Checks(), []

    async def network() -> AsyncIterator[Finding]:
        """Load what takes a network; its checks begin when it is there."""
        try:
            slow = await in_thread(lambda: import_module("marfl.peer.checkup_network"))
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "hivemind":
                raise
            yield Finding("libraries", False, EXTRA)
            return
        visits.append(slow.Visit(patient))
        visits[0].begin(checks)

    if patient.state_dir is not None:
        checks.begin("disk", str(patient.state_dir), _disk(patient.state_dir))
    checks.begin("libraries", "this machine is too busy to look at the network: torch and hivemind", network())
    try:
        async for finding in checks.findings(seconds):
            yield finding
    finally:
        await checks.end(visits[0].close if visits else None)


async def in_thread(work: Callable[[], Value]) -> Value:
    """What `work` returns or raises, from a thread that does not keep the process when it hangs."""
    answer: Future[Value] = Future()
    answer.set_running_or_notify_cancel()  # nobody takes the future from the thread, when the answer is given up

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001 - it is for whoever waits
            answer.set_exception(error)

    _unanswered.add(answer)
    answer.add_done_callback(_unanswered.discard)
    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(answer)


def anything_hangs() -> bool:
    """Whether a check of this process is still at work, though it was given up."""
    return bool(_unanswered)


def _versions() -> Finding:
    parts = [f"Python {platform.python_version()}", *(f"{name} {version_of(name)}" for name in LIBRARIES)]
    good = sys.version_info >= (3, 11)
    return Finding("versions", good, f"marfl {version_of('marfl')}, {', '.join(parts)}")


def version_of(name: str) -> str:
    """The version of a distribution that is installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


async def _disk(folder: Path) -> AsyncIterator[Finding]:
    """Whether the state directory can be written, and has room. A disk that is elsewhere may hang."""
    yield await in_thread(lambda: _look_at(folder))


def _look_at(folder: Path) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".doctor"
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("disk", False, f"{folder} cannot be written ({error.strerror})")
    says = f"{folder} can be written, {free / 2**30:,.1f} GiB are free"
    return Finding("disk", free >= ROOM, says if free >= ROOM else f"{says}: too little for checkpoints")


async def run_doctor(patient: Patient, say: Callable[[Finding], None], limit: float = LIMIT) -> bool:
    """Say every finding as it comes; whether all is well. The limit counts from the start of this process."""
    well = True
    async for found in examine(patient, max(0.0, limit - seconds_since_start() - LEAVING - ENDING)):
        say(found)
        well = well and found.good
    return well
