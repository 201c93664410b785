"""Processes for tests that do not import what another has imported: Python with torch and hivemind, forked for each.

    python warm.py FD

A peer takes two seconds to import what it needs, and most tests let it work for less. What is forked is a process like
any other: a session, streams, an environment and a directory of its own; it runs a program as Python's command line
does, and its exit code is its own. Tests in which the command line itself matters start a cold one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

LONGEST = 1 << 20  # bytes of an order
MESSAGES = (socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a pid and an exit code that come together stay two


class WarmProcess:
    """Of `subprocess.Popen` as much as the tests use: PIPE is the only stream that is made, text the only kind."""

    def __init__(
        self, program: Sequence[str], *, limit: float, env: Mapping[str, object] | None = None,
        cwd: Path | None = None, **streams: Any,
    ) -> None:  # fmt: skip
        """`program` is what follows `python`; after `limit` seconds the process is ended."""
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        places = {name: str(value) for name, value in (os.environ if env is None else env).items()}
        order = {"program": list(program), "limit": limit, "env": places, "cwd": str(cwd or os.getcwd())}
        self._news, told = socket.socketpair(*MESSAGES)
        with contextlib.ExitStack() as given, told:
            fds = [self._stream(given, name, streams.get(name)) for name in ("stdin", "stdout", "stderr")]
            socket.send_fds(forker().orders, [json.dumps(order).encode()], [*fds, told.fileno()])
        self.pid = self._hear()

    def _stream(self, given: contextlib.ExitStack, name: str, kind: Any) -> int:
        """The other side's end of a stream, closed here when it was given away."""
        if kind is None:
            return {"stdin": 0, "stdout": 1, "stderr": 2}[name]
        if kind != subprocess.PIPE:
            return int(kind.fileno())
        reads, writes = os.pipe()
        theirs, mine, mode = (reads, writes, "w") if name == "stdin" else (writes, reads, "r")
        given.callback(os.close, theirs)
        setattr(self, name, os.fdopen(mine, mode))
        return theirs

    def _hear(self, how: int = 0) -> int:
        said = self._news.recv(64, how)
        assert said, "who forks has ended"
        return int(said)

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            self.wait(socket.MSG_DONTWAIT)
        return self.returncode

    def wait(self, how: int = 0) -> int:
        if self.returncode is None:
            self.returncode = self._hear(how)
            self._news.close()
        return self.returncode


class Forker:
    """The process that has imported everything; started when it is first needed, ended with the tests."""

    def __init__(self) -> None:
        self.orders, theirs = socket.socketpair(*MESSAGES)
        command = [sys.executable, __file__, str(theirs.fileno())]
        with theirs:
            self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def close(self) -> None:
        self.orders.close()
        self._popen.wait()


forker = functools.cache(Forker)


def close() -> None:
    if forker.cache_info().currsize:
        forker().close()


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork for each order, and tell who gave it the pid, later the exit code; in what was forked, return the order."""
    waiting = selectors.DefaultSelector()
    waiting.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not orders:
                waiting.unregister(key.fileobj)
                _tell_end(key.fd, *key.data)
                continue
            told, fds, *_ = socket.recv_fds(orders, LONGEST, 4)
            if not told:
                return None
            pid = os.fork()
            if pid == 0:
                waiting.close()
                orders.close()
                return {**json.loads(told), "fds": fds}
            os.write(fds[3], str(pid).encode())
            for fd in fds[:3]:
                os.close(fd)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, fds[3]))


def _tell_end(pidfd: int, pid: int, listener: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(pidfd)
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know
        os.write(listener, str(code).encode())
    os.close(listener)


def become(order: dict[str, Any]) -> None:
    """Run a program as a process of its own, as `python PROGRAM …` or `python -m MODULE …` would."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(int(order["limit"]))
    for fd, place in zip(order["fds"], (0, 1, 2), strict=False):
        os.dup2(fd, place)
    for fd in order["fds"]:
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(order["env"].get("PYTHONDONTWRITEBYTECODE"))
    program = order["program"]
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # tests find nothing here that users do not
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the tests, which then end what they have started
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
        import marfl.peer.daemon  # noqa: F401 - for those that are forked
    if mine := serve(socket.socket(fileno=int(sys.argv[1]))):
        become(mine)
