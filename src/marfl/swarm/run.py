"""A swarm of real peer processes on this machine: started, watched, hurt as asked, and ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from marfl.errors import NetError
from marfl.swarm.fault_flags import Faults, Kill, NetworkSplit, Stop
from marfl.swarm.namespaces import Namespaces
from marfl.swarm.peer_rows import Book
from marfl.swarm.peers import PeerProcess
from marfl.swarm.processes import undisturbed

POLL = 0.1  # seconds between two looks at all peers
AIM = 0.005  # and at the process of a peer that is to be hit
START_TIMEOUT = 180.0  # until a peer listens; importing torch many times at once takes a while
END_TIMEOUT = 20.0  # for a peer to end by itself before it is killed
SETTLE_TIMEOUT = 60.0  # for peers that are done on different models, after a partition, to find each other
LINGER = 86_400  # a peer that is done serves the others until it is told to end


@dataclass(frozen=True)
class Orders:
    """What a swarm is told to do."""

    peers: int  # those that hold data
    folder: Path  # the state directories are below it, by index
    arguments: tuple[str, ...]  # of `marfl peer`, the same for all
    faults: Faults = field(default_factory=Faults)
    server: bool = False  # one more peer, without data
    bandwidth: str | None = None
    timeout: float | None = None  # of the whole run, in seconds
    settles: bool = True  # whether peers that are done on different models look for each other

    @property
    def count(self) -> int:
        return self.peers + self.server

    @property
    def isolated(self) -> bool:
        """Whether peers need networks of their own."""
        return self.bandwidth is not None or self.faults.partition is not None


class Swarm:
    """All the processes of one run. A context manager: at its end no process, daemon, socket or namespace is left."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.namespaces = Namespaces(orders.count, orders.bandwidth) if orders.isolated else None
        folders = [orders.folder / str(index) for index in range(orders.count)]
        self.peers = [PeerProcess(index, folder) for index, folder in enumerate(folders)]
        self.book = Book(folders)
        self.notes: list[str] = []  # what happened to peers, in order
        self.missing: dict[int, str] = {}  # peers that are not there at the end, and why
        self.missed: list[str] = []  # faults that did not happen as they were asked for
        self._open = contextlib.ExitStack()
        self._pending: list[Kill | Stop | NetworkSplit] = [*orders.faults.kills, *orders.faults.stops]
        if orders.faults.partition is not None:
            self._pending.append(orders.faults.partition)
        self._later: list[tuple[float, Callable[[], None]]] = []  # (when, what): restarts, SIGCONTs, healing
        self._scratch = ""
        self._begun = 0.0
        self._all_done_at: float | None = None
        self.start_seconds: float | None = None  # until everybody listened

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            # for sockets: their paths must be short, and those of killed peers must go as well
            self._scratch = tempfile.mkdtemp(prefix="marfl-swarm-")
            stack.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            if self.namespaces is not None:
                stack.enter_context(self.namespaces)
            stack.callback(self._end)
            self._open = stack.pop_all()
        if self.namespaces is not None:
            for peer in self.peers:
                peer.connect = partial(self.namespaces.socket, peer.index)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.close()

    # --- the run ---

    async def run(self, on_look: Callable[[Swarm], None]) -> None:
        """Start everybody, then watch until all that are left are done; `on_look` is called after every look."""
        self._begun = time.monotonic()
        self._start(self.peers[0])
        await self._listening(self.peers[:1], on_look)
        for peer in self.peers[1:]:
            self._start(peer)
        await self._listening(self.peers[1:], on_look)
        self.start_seconds = time.monotonic() - self._begun
        while not self._finished():
            await self._look(on_look)
            self._do_what_is_due()
            await self._aim()
        self._miss(*(f"it never came to {fault}" for fault in self._pending))

    async def _listening(self, peers: list[PeerProcess], on_look: Callable[[Swarm], None]) -> None:
        """Wait until these peers listen; one that ends before that ends the run, with its last words."""
        limit = time.monotonic() + START_TIMEOUT
        while waiting := [peer for peer in peers if not peer.addresses()]:
            for peer in waiting:
                if not peer.alive:
                    code = peer.process.returncode if peer.process else None
                    raise NetError(f"peer {peer.index} ended at its start (code {code}): {peer.last_words()}")
            if time.monotonic() > limit:
                raise NetError(f"peer {waiting[0].index} does not listen after {START_TIMEOUT:g} seconds")
            await self._look(on_look)
            await asyncio.sleep(POLL)

    async def _look(self, on_look: Callable[[Swarm], None]) -> None:
        """Ask everybody how it is, and notice who died unasked."""
        await asyncio.gather(*(peer.ask() for peer in self.peers))
        self.book.read()
        for peer in self.peers:
            if peer.fate in ("starting", "running") and peer.process is not None and not peer.alive:
                why = f"ended by itself (code {peer.process.returncode}): {peer.last_words()}"
                peer.bury("died")
                self._lose(peer, why)
        on_look(self)
        if self.orders.timeout is not None and time.monotonic() - self._begun > self.orders.timeout:
            states = ", ".join(f"{peer.index} {peer.state} after {peer.committed}" for peer in self.peers)
            raise NetError(f"--timeout {self.orders.timeout:g}: the run is not over: {states}")

    def _finished(self) -> bool:
        """Whether everybody who can still be waited for is done, on one model or after long enough without."""
        left = [peer for peer in self.peers if peer.index not in self.missing]
        if not left:
            raise NetError(f"no peer is left: {'; '.join(self.notes)}")
        if self._later or not all(peer.done for peer in left):
            self._all_done_at = None
            return False
        self._all_done_at = self._all_done_at or time.monotonic()
        agreed = len({peer.status.get("hash") for peer in left}) == 1
        return agreed or not self.orders.settles or time.monotonic() > self._all_done_at + SETTLE_TIMEOUT

    # --- faults ---

    async def _aim(self) -> None:
        """Until the next look: watch those who are to be hit, closely, and hit them where they have stopped for it."""
        until = time.monotonic() + POLL
        while time.monotonic() < until:
            for fault in [fault for fault in self._pending if self._has_come(fault)]:
                self._pending.remove(fault)
                self._do(fault)
            targets = any(not isinstance(fault, NetworkSplit) for fault in self._pending)
            await asyncio.sleep(AIM if targets else POLL)

    def _has_come(self, fault: Kill | Stop | NetworkSplit) -> bool:
        if isinstance(fault, NetworkSplit):
            return any(peer.committed + 1 >= fault.iteration for peer in self.peers)
        peer = self.peers[fault.peer]
        return fault is self._coming(fault.peer)[0] and peer.halted

    def _coming(self, peer: int) -> list[Kill | Stop]:
        """What is still to be done to this peer, in order."""
        faults = [fault for fault in self._pending if not isinstance(fault, NetworkSplit) and fault.peer == peer]
        return sorted(faults, key=lambda fault: fault.when.iteration)

    def _do(self, fault: Kill | Stop | NetworkSplit) -> None:
        match fault:
            case Kill():
                peer = self.peers[fault.peer]
                state = fault.when.phase or peer.state
                peer.kill()
                self.book.read()  # what it wrote down last says where it was, to the end
                at = self.book.last(peer.index) + 1
                self._lose(peer, f"killed in iteration {at} while {state}")
                if at != fault.when.iteration and fault.when.phase is None:
                    self._miss(f"{fault}: came too late, in iteration {at}")
                if self.orders.faults.restart is not None:
                    self._after(self.orders.faults.restart, partial(self._restart, peer))
            case Stop():
                peer = self.peers[fault.peer]
                peer.hang()
                self.book.read()
                at = self.book.last(peer.index) + 1
                self.notes.append(f"peer {peer.index}: stopped in iteration {at} for {fault.seconds:g} seconds")
                self._after(fault.seconds, peer.go_on)
            case NetworkSplit():
                sides = [fault.side_of(peer.index) for peer in self.peers]
                self._split(sides)
                self.notes.append(f"partition {'+'.join(map(str, fault.sides))} for {fault.seconds:g} seconds")
                self._after(fault.seconds, partial(self._split, [0] * len(sides)))

    def _miss(self, *why: str) -> None:
        self.missed += why
        self.notes += why

    def _split(self, sides: list[int]) -> None:
        if self.namespaces is not None:
            self.namespaces.split(sides)

    def _lose(self, peer: PeerProcess, why: str) -> None:
        self.missing[peer.index] = why
        self.notes.append(f"peer {peer.index}: {why}")

    def _restart(self, peer: PeerProcess) -> None:
        self.missing.pop(peer.index)
        self.notes.append(f"peer {peer.index}: restarted")
        self._start(peer)

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, what))

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        due = [what for when, what in self._later if when <= now]
        self._later = [(when, what) for when, what in self._later if when > now]
        for what in due:
            what()

    # --- processes ---

    def _start(self, peer: PeerProcess) -> None:
        """Start a peer that joins whoever listens."""
        listening = [other for other in self.peers if other is not peer and other.alive]
        join = [address for other in listening for address in other.addresses()[:1]]
        command = [sys.executable, "-m", "marfl", "peer", *self.orders.arguments]
        command += ["--index", str(peer.index), "--of", str(self.orders.peers)]
        command += ["--state-dir", str(peer.folder), "--status-port", "0", "--linger", str(LINGER)]
        command += [word for address in join for word in ("--join", address)]
        command += [word for fault in self._coming(peer.index) for word in ("--halt-at", str(fault.when))]
        if peer.index == self.orders.peers:
            command.append("--server")
        if self.namespaces is not None:
            command += ["--listen", f"/ip4/{self.namespaces.address(peer.index)}/tcp/0"]
            command = [*self.namespaces.command(peer.index), *command]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        peer.start(command, {**threads, "TMPDIR": self._scratch, "PYTHONUNBUFFERED": "1"})

    def _end(self) -> None:
        """Ask everybody to end, wait a while, kill who has not; nobody is left."""
        with undisturbed():
            left = [peer for peer in self.peers if peer.process is not None and peer.fate not in ("killed", "died")]
            for peer in left:
                peer.ask_to_end()
            limit = time.monotonic() + END_TIMEOUT
            for peer in left:
                if not peer.wait(limit - time.monotonic()):
                    self.notes.append(f"peer {peer.index}: did not end when asked, and was killed")
                peer.bury("ended")
                peer.read_summary()
            self.book.read()
