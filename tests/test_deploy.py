"""The files in deploy/ fit the program: their flags and extras exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from marfl.cli import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def unknown_flags(words: list[str]) -> list[str]:
    """The flags in a command line of marfl that its command does not have."""
    known = {flag for parameter in COMMANDS[words[0]].params for flag in parameter.opts}
    return [word for word in words[1:] if word.startswith("--") and word not in known]


def test_the_peers_of_the_compose_file_are_three_of_one_run_with_flags_that_exist():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    commands = [service["command"].split() for service in services.values()]
    assert [unknown_flags(command) for command in commands] == [[], [], []]
    assert [command[command.index("--index") + 1] for command in commands] == ["0", "1", "2"]
    shared = [
        {flag: command[command.index(flag) + 1] for flag in ("--of", "--task", "--iterations", "--run")}
        for command in commands
    ]
    assert shared == [{"--of": "3", "--task": "digits", "--iterations": "20", "--run": "compose"}] * 3
    assert len({service["volumes"][0] for service in services.values()}) == 3


def test_the_command_that_makes_the_first_key_can_be_typed_before_there_is_one():
    text = (DEPLOY / "compose.yaml").read_text()
    (command,) = re.findall(r"^#   (.+ run --rm first .+)$", text, re.MULTILINE)
    given = {word.partition("=")[0] for word in command.split() if "=" in word}
    assert set(re.findall(r"\$\{(\w+):\?", text)) == given  # compose refuses every command without these
    assert unknown_flags(command.partition("first ")[2].split()) == []


def test_the_image_installs_an_extra_that_exists_and_copies_what_is_there():
    text = (DEPLOY / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(\w+)\]'", text)) <= extras.keys()
    for names in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in names.split())
    steps = [line.split(" ")[0] for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert steps[0] == "FROM"
    assert "USER" in steps


def test_the_service_has_flags_that_exist_and_systemd_takes_it():
    text = (DEPLOY / "marfl-peer@.service").read_text()
    for line in re.findall(r"^ExecStart(?:Pre)?=\S+/marfl (.+)$", text, re.MULTILINE):
        assert unknown_flags(line.split()) == []
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: the service is not verified")
    command = ["systemd-analyze", "verify", str(DEPLOY / "marfl-peer@.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if "marfl-peer" in line]
    assert all("is not executable" in line for line in complaints), "marfl is not installed where it will be"
