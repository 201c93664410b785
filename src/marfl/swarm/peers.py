"""One real peer of a swarm, seen from outside: its process, its files, its answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from marfl.byte_kinds import ByteKind
from marfl.runs.files import read_json
from marfl.swarm.peer_rows import add_ledgers, beyond
from marfl.swarm.processes import (
    command_name,
    die_with_parent,
    group_members,
    resident_bytes,
    signal_group,
    sockets_of,
)

Status: TypeAlias = Mapping[str, Any]  # what a peer's status port says
ANSWER_TIMEOUT = 2.0  # of a status port; a busy machine may take a while
LOG_LINES = 5  # of a peer that died, to say why
DAEMON = "p2pd"


@dataclass
class PeerProcess:
    """A peer's process through all its lives. `sent` adds them up; files are in `folder`, its state directory."""

    index: int
    folder: Path
    connect: Callable[[], socket.socket] = socket.socket  # a socket from which its status port can be reached
    process: subprocess.Popen[bytes] | None = None
    status: Status = field(default_factory=dict)
    fate: str = "starting"  # what the swarm knows of it: starting, running, stopped, killed, died
    lives: int = 0
    pids: list[int] = field(default_factory=list)  # of every life
    daemons: set[int] = field(default_factory=set)  # of every life
    resident: int = 0  # bytes of memory, its daemon's included, when last looked at
    lost: dict[str, int] = field(default_factory=dict)  # sent in lives before, and forgotten by the kill
    _sockets: set[Path] = field(default_factory=set)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Begin a life. Its output goes to `output` in its folder; it dies when this process dies."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("address", "status"):  # old ones would say that it listens already
            (self.folder / name).unlink(missing_ok=True)
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # its own group: it is signalled with its daemon, and not by our Ctrl-C
                preexec_fn=die_with_parent,
            )
        self.lives += 1
        self.pids.append(self.process.pid)
        self.fate = "starting"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def halted(self) -> bool:
        """Whether it has stopped itself, to be hit."""
        if not self.alive or self.process is None or self.fate == "stopped":
            return False
        news = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return news is not None and news.si_code == os.CLD_STOPPED

    @property
    def committed(self) -> int:
        """The last iteration it knows to be decided."""
        return int(self.status.get("iteration", 0))

    @property
    def name(self) -> str | None:
        """What other peers call it."""
        return self.status.get("peer")

    @property
    def state(self) -> str:
        """What to show: what it says of itself while it runs."""
        return str(self.status.get("state", self.fate)) if self.fate == "running" else self.fate

    @property
    def done(self) -> bool:
        return self.fate == "running" and self.status.get("state") == "done"

    @property
    def sent(self) -> dict[str, int]:
        """The ledger of everything it is known to have sent, in all its lives."""
        return add_ledgers([self.lost, self.status.get("sent") or {}])

    @property
    def bytes_sent(self) -> int:
        sent = self.sent
        return sum(sent.get(kind, 0) for kind in ByteKind)

    def addresses(self) -> list[str]:
        """Where it listens: nowhere until it has said so."""
        return self._words("address")

    async def ask(self) -> None:
        """Renew `status` when it answers; a peer that does not keeps its last one."""
        port = self._words("status")
        if not port or not self.alive or self.fate == "stopped" or self.halted:
            return
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                status = await _get(self.connect(), int(port[0]))
        except (OSError, TimeoutError, ValueError):  # it hangs, or is gone in this moment: exit codes tell
            return
        if self.fate == "starting":
            self.look()
            self.lost = add_ledgers([self.lost, beyond(self.status.get("sent") or {}, status["sent"])])
        self.fate, self.status = "running", status

    def look(self) -> None:
        """Note its daemons, socket files and memory while they are there to be seen."""
        if self.process is not None:
            members = group_members(self.process.pid)
            self.resident = sum(map(resident_bytes, members))
            self.daemons |= {pid for pid in members if command_name(pid) == DAEMON}
            self._sockets |= sockets_of(members)

    def kill(self) -> None:
        """SIGKILL to it and its daemon, as if the machine had lost power."""
        self.look()
        self._signal(signal.SIGKILL)
        self.bury("killed")

    def hang(self) -> None:
        """SIGSTOP: it holds its connections and answers nothing."""
        self._signal(signal.SIGSTOP)
        self.fate = "stopped"

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self.fate = "running"

    def ask_to_end(self) -> None:
        """SIGTERM to the peer alone: it ends its daemon itself."""
        if self.alive and self.process is not None:
            self.look()
            signal_group(self.process.pid, signal.SIGCONT)
            self.process.terminate()

    def wait(self, seconds: float) -> bool:
        """Whether it ends in so many seconds."""
        try:
            if self.process is not None:
                self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def bury(self, fate: str) -> None:
        """The end of a life: nobody of its group is left afterwards, and no socket file."""
        if self.process is None:
            return
        self._signal(signal.SIGKILL)
        self.process.wait()
        while group_members(self.process.pid):
            time.sleep(0.01)
        for path in self._sockets:
            path.unlink(missing_ok=True)
        self._sockets.clear()
        self.fate = fate

    def read_summary(self) -> None:
        """After a clean end: its final word on what it sent, and on its model."""
        summary = read_json(self.folder / "summary.json")
        if summary is not None:
            self.status = {**self.status, **summary}

    def last_words(self) -> str:
        """The last lines it wrote, on one line."""
        for name in ("output", "log"):
            try:
                lines = (self.folder / name).read_text(errors="replace").strip().splitlines()
            except FileNotFoundError:
                continue
            if lines:
                return " | ".join(line.strip() for line in lines[-LOG_LINES:])
        return "it wrote nothing"

    def _words(self, file: str) -> list[str]:
        try:
            return (self.folder / file).read_text().split()
        except FileNotFoundError:
            return []

    def _signal(self, number: int) -> None:
        if self.process is not None:
            signal_group(self.process.pid, number)


async def _get(connection: socket.socket, port: int) -> Status:
    """GET / of a status port on loopback."""
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
    finally:
        writer.close()
    status = json.loads(answer.partition(b"\r\n\r\n")[2])
    if not isinstance(status, dict):
        raise ValueError("not an object")
    return status
