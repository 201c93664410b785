"""Real swarms for tests: run from the command line, and looked at afterwards: is anything left of them?"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from marfl.cli import main
from marfl.swarm.namespaces import FOLDER
from marfl.swarm.processes import command_name

pytest.importorskip("hivemind", reason="hivemind is not installed: no real peer can be tested")

MARK = "MARFL_TEST_SWARM"  # in the environment of everything a test starts
GONE_TIMEOUT = 20
RUN_TIMEOUT = 240  # seconds: a run that hangs fails, with what its peers said last
QUICK = ("--network", "poll=0.1", "--network", "ready_timeout=8", "--network", "phase_timeout=4",
         "--network", "call_timeout=3", "--network", "takeover=1")  # fmt: skip
TINY = ("--task", "synthetic", "--option", "features=16", "--option", "hidden=[8]", "--option", "classes=4",
        "--option", "samples=400", "--option", "test_samples=40", "--batch", "8")  # fmt: skip
# a model whose exchange takes long enough to be hit in the middle of it
BULKY = ("--task", "synthetic", "--option", "features=512", "--option", "hidden=[1024]", "--option", "classes=4",
         "--option", "samples=400", "--option", "test_samples=40", "--batch", "8")  # fmt: skip
# and one whose slices are longer than a message: 2.6 million parameters
HUGE = ("--task", "synthetic", "--option", "features=512", "--option", "hidden=[1024,1024,1024]",
        "--option", "classes=4", "--option", "samples=400", "--option", "test_samples=40", "--batch", "8")  # fmt: skip
HUGE_VALUES = (512 + 1) * 1024 + 2 * (1024 + 1) * 1024 + (1024 + 1) * 4


@dataclass(frozen=True)
class Result:
    """What a swarm left."""

    summary: dict[str, Any]
    out: Path

    def rows(self) -> list[dict[str, Any]]:
        return _rows(self.out / "metrics.jsonl")

    def peer_rows(self, index: int) -> dict[int, dict[str, Any]]:
        return {row["iteration"]: row for row in _rows(self.out / "peers" / str(index) / "metrics.jsonl")}

    def name(self, index: int) -> str:
        """What other peers call it."""
        others = [p["name"] for p in self.summary["processes"] if p["index"] == index]
        return str(others[0])

    @property
    def daemons(self) -> list[int]:
        return [pid for process in self.summary["processes"] for pid in process["daemons"]]

    @property
    def pids(self) -> list[int]:
        return [pid for process in self.summary["processes"] for pid in process["pids"]]


def swarm(out: Path, *arguments: str) -> Result:
    """Run `marfl swarm` to its end in this process, its peers in theirs, and check that nothing of it is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(out))
        code, printed = say(*command(out, *arguments))
    assert code == 0, last_words(out)
    result = Result(json.loads(printed), out)
    assert not [pid for pid in result.pids + result.daemons if command_name(pid) in ("p2pd", "python", "python3")]
    assert nothing_left(out, os.getpid()) == []
    return result


def say(*arguments: str) -> tuple[int, str]:
    """Run a command in this process: its exit code, and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return main(arguments), printed.getvalue()


def begin(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `marfl swarm`; whatever it starts inherits a mark, by which it is found again."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    marked = {**os.environ, MARK: str(out)}
    line = [sys.executable, "-m", "marfl", *command(out, *arguments)]
    return subprocess.Popen(line, start_new_session=True, env=marked, **pipes)


def command(out: Path, *arguments: str) -> list[str]:
    limits = ["--json", "--timeout", str(RUN_TIMEOUT)]
    return ["swarm", "--out", str(out), *limits, *arguments]


def simulated(*arguments: str) -> dict[str, Any]:
    """The summary of `marfl simulate` with the same flags."""
    code, printed = say("simulate", "--json", *arguments)
    assert code == 0
    summary: dict[str, Any] = json.loads(printed)
    return summary


def until_it_has_rows(process: subprocess.Popen[str], out: Path) -> None:
    """Wait for the first row of a swarm that has begun."""
    rows, limit = out / "metrics.jsonl", time.monotonic() + RUN_TIMEOUT
    while not (rows.exists() and rows.stat().st_size):
        assert process.poll() is None, last_words(out)
        assert time.monotonic() < limit, last_words(out)
        time.sleep(0.05)  # its peers need the processor


def nothing_left(out: Path, swarm: int) -> list[str]:
    """Processes and namespaces of the swarm in `out`, which the process `swarm` ran, that do not go away."""
    limit = time.monotonic() + GONE_TIMEOUT
    while (left := _left(out, swarm)) and time.monotonic() < limit:
        time.sleep(0.05)  # the kernel takes a moment to end them
    return left


def _left(out: Path, swarm: int) -> list[str]:
    found = [f"process {pid}" for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _mentions(pid, out)]
    return found + [f"namespace {name}" for name in _namespaces() if name.startswith(f"marfl-{swarm}-")]


def last_words(out: Path) -> str:
    tails = [f"{log}:\n{log.read_text()[-600:]}" for log in sorted(out.glob("peers/*/output"))]
    return "\n".join(tails)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _mentions(pid: int, out: Path) -> bool:
    try:
        return any(str(out).encode() in Path(f"/proc/{pid}/{file}").read_bytes() for file in ("cmdline", "environ"))
    except OSError:
        return False


def _namespaces() -> list[str]:
    return os.listdir(FOLDER) if os.path.isdir(FOLDER) else []
