"""`--help` and `-h`: every command explains every flag in a sentence, under a title."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from rich.text import Text

from marfl.cli import app, main

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FLAGS = [(name, flag) for name, command in COMMANDS.items() for flag in command.params if "--help" not in flag.opts]


@pytest.mark.parametrize(("command", "flag"), FLAGS, ids=[f"{name} {flag.opts[0]}" for name, flag in FLAGS])
def test_a_flag_is_explained_in_a_sentence(command: str, flag: Any) -> None:
    shown = flag.help or ""
    assert shown.endswith((".", "…")), shown
    assert not re.match("[a-z]{2}", shown) or shown.startswith("20ng"), shown


@pytest.mark.parametrize("command", ["simulate", "swarm", "peer"])
def test_settings_stand_under_titles(command: str) -> None:
    panels = {flag.rich_help_panel for name, flag in FLAGS if name == command}
    assert {"What is learned", "How peers average", "Distillation", "Privacy", "Any setting"} <= panels
    learned = next(flag for name, flag in FLAGS if name == command and "--task" in flag.opts)
    assert learned.rich_help_panel == "What is learned"


@pytest.mark.parametrize("arguments", [["-h"], ["simulate", "-h"], ["swarm-key", "-h"]])
def test_h_is_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: marfl" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_on_a_terminal_of_80_columns_no_flag_is_cut_off_and_no_text_is_lost(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    flags = [each for name, each in FLAGS if name == command and each.opts[0].startswith("--") and not each.hidden]
    assert [each.opts[0] for each in flags if not re.search(f"{each.opts[0]}[ ,]", shown)] == []
    kinds = [
        line for line in shown.splitlines() if "--" in line and re.search(r"<(bool|str|path|int|float|list)", line)
    ]
    assert kinds == [], "what a flag takes is said in words, not in Python's types"
    for each in flags:
        assert Text.from_markup(each.help).plain == each.help, "rich takes words in brackets for its own"
