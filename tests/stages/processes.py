"""Real `marfl peer` processes for tests: started, read line by line, and ended whatever happens."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stages.warm import WarmProcess

SMALL = ["--task", "synthetic", "--batch", "8", "--test-every", "100"]
SMALL_CONFIG = {"task": "synthetic", "batch": 8, "test_every": 100}
PROGRAMS = Path(__file__).parent / "programs"  # peers that do one thing wrong, or are watched
LIMIT = 100  # seconds: then a hanging process is ended, and its test fails
MARFL = ("-m", "marfl")  # what Python runs


class Process:
    """One `marfl peer`, read line by line: a test waits for what it says, not for time."""

    def __init__(self, *arguments: str, program: Sequence[str] = MARFL, limit: float = LIMIT, **options: Any) -> None:
        """`program` is what Python runs; other options are those of `WarmProcess`."""
        self.popen = self._begin([*program, "peer", *arguments], limit, **options)
        self.said: list[str] = []

    def _begin(self, program: list[str], limit: float, **options: Any) -> WarmProcess | subprocess.Popen[str]:
        return WarmProcess(program, limit=limit, stderr=subprocess.PIPE, **options)

    def until(self, words: str) -> str:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.said.append(line)
            if words in line:
                return line
        pytest.fail(f"it never said {words!r}, but:\n{''.join(self.said)}")

    def signal(self, number: signal.Signals) -> int:
        os.killpg(self.popen.pid, number)
        return self.popen.wait()

    def close(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
        assert self.popen.stderr is not None
        self.popen.stderr.close()


class ColdProcess(Process):
    """One that is started from the command line, as users do."""

    def _begin(self, program: list[str], limit: float, **options: Any) -> WarmProcess | subprocess.Popen[str]:
        command = ["timeout", "--signal=KILL", str(limit), sys.executable, *program]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, **options)


class Stage:
    """Processes of one run, and their state directories."""

    def __init__(self, path: Path, peers: int, iterations: int) -> None:
        self.path, self.peers, self.iterations = path, peers, iterations
        self.processes: list[Process] = []

    def start(self, index: int, *more: str, **options: Any) -> Process:
        place = self.path / str(index)
        sizes = ["--index", str(index), "--of", str(self.peers), "--iterations", str(self.iterations)]
        here = ["--state-dir", str(place), "--status-port", "0"]
        return self._keep(Process(*SMALL, *sizes, *here, *more, **options))

    def type(self, line: str, index: int) -> Process:
        """Start another peer by the line that one has printed, filled in."""
        mine = {"I": str(index), "DIR": str(self.path / str(index))}
        words = shlex.split(line.partition("marfl peer ")[2])
        return self._keep(ColdProcess(*(mine.get(word, word) for word in words)))

    def _keep(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def read(self, index: int, name: str) -> str:
        return (self.path / str(index) / name).read_text()

    def summary(self, index: int) -> dict[str, Any]:
        return json.loads(self.read(index, "summary.json"))

    def rows(self, index: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read(index, "metrics.jsonl").splitlines()]

    def get(self, index: int, path: str = "") -> str:
        port = self.read(index, "status").strip()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return answer.read().decode()

    def status(self, index: int) -> dict[str, Any]:
        return json.loads(self.get(index))


@pytest.fixture
def new_stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(tmp_path, *request.param)
    try:
        yield made
    finally:
        for process in made.processes:
            process.close()
