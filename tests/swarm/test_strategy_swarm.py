"""Strategies among real peers: the simulator's model, also after a kill, and one clear line when one cannot go on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import marfl
from marfl.cli import main
from marfl.config import load
from stages.processes import PROGRAMS
from stages.rosters import models_of
from stages.swarms import QUICK, TINY, simulated, swarm

STEPS = ("--peers", "4", "--group-size", "3", "--iterations", "4", "--local-batches", "3", *TINY)


class Breaks(marfl.Strategy):
    """Is not finite from the second iteration on."""

    def apply(self, step: marfl.StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta + (step.delta if step.iteration < 2 else torch.inf), {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        ("--strategy", "diloco", "--set", "strategy.momentum=0.5"),
        ("--strategy", "fedyogi"),
        ("--strategy", "fedprox", "--set", "strategy.mu=1"),
        ("--strategy", "scaffold"),
        ("--set", "local=2.*"),
        ("--strategy", "diloco", "--overlap"),
        ("--overlap", "--participation", "0.75"),
    ],
    ids=" ".join,
)
def test_real_peers_end_on_the_model_of_the_simulator(tmp_path: Path, strategy: tuple[str, ...]) -> None:
    expected, virtual = simulated(*STEPS, *strategy), simulated(*STEPS, *strategy, "--engine", "protocol")
    result = swarm(tmp_path / "run", *STEPS, *strategy)
    assert result.summary["model_hash"] == expected["model_hash"] == virtual["model_hash"]
    assert sum(row["bytes_payload"] for row in result.rows()) == expected["bytes_by_kind"]["payload"]


@pytest.mark.slow
def test_a_peer_that_is_killed_with_work_under_way_trains_anew(tmp_path: Path) -> None:
    hurt = ("--overlap", "--iterations", "8", "--kill", "2@3:exchanging", "--restart", "2", *QUICK)
    summary = swarm(tmp_path / "hurt", *STEPS, *hurt).summary
    assert summary["agreed"]
    assert summary["iterations"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["reduce", "gather"])
def test_a_death_in_an_overlapped_average_leaves_the_delayed_work_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Peer 2 of 5 kills itself in the third average, while all train for the fourth iteration."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROGRAMS / "lethal"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MARFL_TEST_DEATH", f"2:3:{phase}")
    five = {"peers": 5, "group_size": 3, "iterations": 6, "local_batches": 2, "batch": 8, "task": "synthetic"}
    shape = {"features": 16, "hidden": [8], "classes": 4, "samples": 400, "test_samples": 40}
    flags = ("--peers", "5", "--group-size", "3", "--iterations", "6", "--local-batches", "2", *TINY, *QUICK)
    result = swarm(tmp_path / "hurt", *flags, "--overlap")
    assert set(result.summary["missing"]) == {"2"}
    indices = {result.name(index): index for index in range(5)}
    present = [[indices[name] for name in row["present"]] for row in result.peer_rows(0).values()]
    assert [len(each) for each in present[:2]] == [5, 5]
    assert all(2 not in each for each in present[3:])
    delayed, plain = (
        models_of(load(overrides={**five, "task_options": shape, "overlap": overlap}), present)
        for overlap in (True, False)
    )
    assert [row["model_hash"] for row in result.rows()] == delayed != plain


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["diloco", "scaffold"])
def test_peers_that_are_away_or_killed_come_back_with_the_strategys_state(tmp_path: Path, strategy: str) -> None:
    away = ("--participation", "0.75", "--dropout", "0.2", "--strategy", strategy, "--iterations", "6")
    assert swarm(tmp_path / "away", *STEPS, *away).summary["model_hash"] == simulated(*STEPS, *away)["model_hash"]
    hurt = ("--strategy", strategy, "--iterations", "8", "--kill", "2@3", "--restart", "2", *QUICK)
    summary = swarm(tmp_path / "hurt", *STEPS, *hurt).summary
    assert summary["agreed"]
    assert summary["iterations"] == 8


@pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")  # hivemind's own
def test_a_strategy_that_breaks_ends_a_peer_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone = ("--index", "0", "--of", "1", "--state-dir", str(tmp_path / "peer"), "--task", "synthetic")
    assert main(["peer", *alone, "--strategy", "test_strategy_swarm:Breaks"]) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last == "marfl: strategy test_strategy_swarm:Breaks: θ is not finite after iteration 2; take smaller steps"
