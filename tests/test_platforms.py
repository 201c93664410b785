"""The simulator where there is no hivemind and no Unix: what real peers need must not be in its way."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from marfl import system

ROOT = Path(__file__).parents[1]
ELSEWHERE = """
import asyncio, ctypes, multiprocessing, os, signal, subprocess, sys, typer, torch  # they are themselves elsewhere
for name in ("hivemind", "fcntl", "pwd", "grp", "resource", "termios"):  # what Windows has not, or is not installed
    sys.modules[name] = None
for name in ("fork", "sched_getaffinity", "killpg", "setsid"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGSTOP", "SIGCONT"):
    if hasattr(signal, name):
        delattr(signal, name)
real = ctypes.CDLL
def library(name, *more, **options):
    if name is None:
        raise TypeError("there is no such library here")
    return real(name, *more, **options)
ctypes.CDLL = library
class Msvcrt:  # as much of it as is used
    LK_LOCK, LK_NBLCK = 1, 2
    @staticmethod
    def locking(descriptor, kind, count): pass
sys.modules["msvcrt"] = Msvcrt
from marfl.cli import main
sys.exit(main(sys.argv[1:]))
"""
TINY = ["--task", "synthetic", "--option", "features=6", "--option", "hidden=[4]", "--option", "classes=3",
        "--option", "samples=200", "--option", "test_samples=50", "--peers", "6", "--iterations", "2"]  # fmt: skip


def elsewhere(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("engine", ["bitwise", "protocol"])
def test_a_simulation_ends_on_the_same_model_without_hivemind_and_unix(engine: str, tmp_path: Path):
    done = elsewhere("simulate", *TINY, "--engine", engine, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    here = [sys.executable, "-m", "marfl", "simulate", *TINY, "--engine", engine, "--json"]
    whole = json.loads(subprocess.run(here, capture_output=True, text=True, timeout=120, check=True).stdout)
    there = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert there["model_hash"] == whole["model_hash"]


@pytest.mark.parametrize(
    "arguments", [["plan", "--peers", "9", "--group-size", "3"], ["swarm", "-h"], ["reproduce", "list"]]
)
def test_other_commands_work_there_too(arguments: list[str]):
    done = elsewhere(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [["peers", "/ip4/127.0.0.1/tcp/1/p2p/12D3"], ["peer", "--index", "0", "--of", "1"], ["doctor"]]
)
def test_real_peers_without_hivemind_are_one_line_that_names_the_extra(arguments: list[str], tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import sys; sys.modules['hivemind'] = None\n"
         "from marfl.cli import main; sys.exit(main(sys.argv[1:]))", *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "marfl[swarm]" in line


def test_hivemind_is_an_extra_and_everybody_else_does_without():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [each for each in project["dependencies"] if each.startswith("hivemind")]
    assert any(each.startswith("hivemind") for each in project["optional-dependencies"]["swarm"])


def test_a_lock_is_held_by_one(tmp_path: Path):
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as two:
        system.hold(one.fileno(), wait=False)
        with pytest.raises(BlockingIOError):
            system.hold(two.fileno(), wait=False)
    assert system.cores() >= 1
    system.sync(tmp_path)
