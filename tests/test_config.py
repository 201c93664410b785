"""Settings: presets, files and flags in order; wrong ones are one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from marfl.config import PRESETS, load, parse
from marfl.errors import InputError


def test_flags_override_the_file_which_overrides_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("peers = 64\ngroup_size = 4\n[churn]\nparticipation = 0.5\n")
    config = load("paper-mnist", file, {"group_size": 8, "churn.dropout": 0.2, "seed": None})
    assert (config.task, config.peers, config.group_size) == ("mnist", 64, 8)
    assert (config.churn.participation, config.churn.dropout, config.seed) == (0.5, 0.2, 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid(preset: str) -> None:
    assert load(preset).task in ("mnist", "digits", "20ng")


def test_semantics_decide_what_is_not_said() -> None:
    exact, paper = load(), load(overrides={"semantics": "paper"})
    assert (exact.exchange, exact.plan, exact.momentum) == ("grid", "exact", "derive")
    assert (paper.exchange, paper.plan, paper.momentum) == ("full", "keys", "send")


def test_a_resolved_config_resolves_to_itself() -> None:
    config = load("demo", overrides={"churn.sessions": {"up": 20, "down": 5}})
    assert parse(config.as_dict()).resolved() == config


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"peeers": 3}, "peeers is not a setting; did you mean peers?"),
        ({"churn": {"partcipation": 0.5}}, "churn.partcipation is not a setting; did you mean participation?"),
        ({"churn": {"participation": 0}}, "churn.participation = 0:"),
        ({"churn": {"participation": 1.5}}, "churn.participation = 1.5:"),
        ({"peers": "many"}, "peers = 'many':"),
        ({"engine": "warp"}, "engine = 'warp':"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(tree: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(tree)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {"semantics": "paper", "momentum": "derive"},
        {"plan": "random"},
        {"rounds": 4},
        {"semantics": "paper", "engine": "protocol"},
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: dict[str, object]) -> None:
    with pytest.raises(InputError):
        load(overrides=overrides)


def test_an_unknown_preset_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean paper-mnist"):
        load("paper-mnits")
    with pytest.raises(InputError, match="cannot be read"):
        load(path=tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("peers = [")
    with pytest.raises(InputError, match=r"broken\.toml: cannot be read"):
        load(path=broken)
