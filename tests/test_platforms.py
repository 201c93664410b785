"""The simulator where there is no hivemind and no Unix: what real peers need must not be in its way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from marfl import system
from marfl.cli import main

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
import json
from marfl.cli import main
print(json.dumps([main(arguments) for arguments in json.loads(sys.argv[1])]))
"""
WITHOUT_HIVEMIND = """
import json, sys
sys.modules["hivemind"] = None
from marfl.cli import main
print(json.dumps([main(arguments) for arguments in json.loads(sys.argv[1])]))
"""
TINY = ["--task", "synthetic", "--option", "features=6", "--option", "hidden=[4]", "--option", "classes=3",
        "--option", "samples=200", "--option", "test_samples=50", "--peers", "6", "--iterations", "2"]  # fmt: skip


def ran(program: str, commands: list[list[str]], folder: Path) -> tuple[list[int], str]:
    """The exit codes of these commands, all in one process, and what they complained of."""
    command = [sys.executable, "-W", "ignore", "-c", program, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_simulator_ends_on_the_same_model_without_hivemind_and_unix(tmp_path: Path, capsys):
    runs = [["simulate", *TINY, "--engine", engine, "--out", engine] for engine in ("bitwise", "protocol")]
    others = [["plan", "--peers", "9", "--group-size", "3"], ["swarm", "-h"], ["reproduce", "list"]]
    codes, said = ran(ELSEWHERE, [*runs, *others], tmp_path)
    assert codes == [0] * 5, said
    for engine in ("bitwise", "protocol"):
        assert main(["simulate", *TINY, "--engine", engine, "--json"]) == 0
        here = json.loads(capsys.readouterr().out)
        there = json.loads((tmp_path / engine / "summary.json").read_text())
        assert there["model_hash"] == here["model_hash"]


def test_real_peers_without_hivemind_are_one_line_that_names_the_extra(tmp_path: Path):
    commands = [["peers", "/ip4/127.0.0.1/tcp/1/p2p/12D3"], ["peer", "--index", "0", "--of", "1"]]
    codes, said = ran(WITHOUT_HIVEMIND, commands, tmp_path)
    assert codes == [2] * 2
    assert [line for line in said.splitlines() if "marfl[swarm]" not in line] == []
    assert len(said.splitlines()) == 2


def test_the_doctor_without_hivemind_finds_that_it_is_missing(tmp_path: Path):
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_HIVEMIND, json.dumps([["doctor"]])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    *_, last, codes = done.stdout.splitlines()
    assert json.loads(codes) == [1], done.stderr
    assert last.startswith("PROBLEM  libraries: real peers need the extra swarm")


def test_hivemind_is_an_extra_and_everybody_else_does_without():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [each for each in project["dependencies"] if each.startswith("hivemind")]
    assert any(each.startswith("hivemind") for each in project["optional-dependencies"]["swarm"])


def test_nothing_of_the_package_is_ignored_by_git_or_it_would_be_missing_from_the_wheel():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout is here: what .gitignore keeps out of a wheel cannot be listed")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stdout.split() == [], "hatchling leaves out what .gitignore names: anchor it with a leading slash"


def test_a_process_knows_its_age():
    command = [sys.executable, "-c", "from marfl import system; print(system.seconds_since_start())"]
    begun = time.monotonic()
    age = float(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert age <= time.monotonic() - begun + 0.01, "in hundredths of a second"
    assert age > 0 or sys.platform != "linux"


def test_a_lock_is_held_by_one(tmp_path: Path):
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open("w") as two:
        system.hold(one.fileno(), wait=False)
        with pytest.raises(BlockingIOError):
            system.hold(two.fileno(), wait=False)
    assert system.cores() >= 1
    system.sync(tmp_path)
