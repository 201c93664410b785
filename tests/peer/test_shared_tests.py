"""Daemons that share their tests: everybody's accuracy travels along with the update, and the model stays the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marfl.config import Config, load
from marfl.errors import InputError
from marfl.learn import Metrics
from marfl.peer.trainer import Trainer
from stages.swarms import TINY, simulated, swarm

SMALL = {"features": 6, "hidden": [4], "classes": 3, "samples": 200, "test_samples": 50}


def config(**overrides: Any) -> Config:
    given = {"task": "synthetic", "task_options": SMALL, "peers": 2, "share_tests": True}
    return load(overrides=given | overrides)


def moved(given: Config, tests: list[Metrics]) -> tuple[bytes, dict[str, float]]:
    """The hash of the state after one iteration of two peers, and what they know of each other's tests."""
    trainers = [Trainer(given, index) for index in range(2)]
    for trainer, tested in zip(trainers, tests, strict=True):
        trainer.share(tested)
    first, second = (t.outgoing(t.update(t.start, 1, 0)) for t in trainers)
    both: Any = SimpleNamespace(contributions=2)  # all that is asked of a roster here
    state = trainers[0].advance(trainers[0].start, torch.add(first, second).div_(2), both)
    assert trainers[0].nothing().shape == first.shape
    return state.hash, trainers[0].shared_in(1)


@pytest.mark.parametrize("momentum", ["derive", "send", "local"])
def test_everybodys_tests_are_averaged_and_are_no_part_of_the_model(momentum: str) -> None:
    tests = [Metrics(loss=1.0, accuracy=0.5, count=10), Metrics(loss=2.0, accuracy=0.75, count=30)]
    digest, shared = moved(config(momentum=momentum), tests)
    assert shared == {"loss": 1.75, "accuracy": 0.6875}, "weighed by what they were tested on"
    assert (digest, {}) == moved(config(momentum=momentum, share_tests=False), tests)


def test_a_test_that_came_to_nothing_is_left_out() -> None:
    tests = [Metrics(loss=float("inf"), accuracy=0.5, count=10), Metrics(loss=2.0, accuracy=0.75, count=10)]
    assert moved(config(), tests)[1] == {"loss": 2.0, "accuracy": 0.625}


@pytest.mark.parametrize("more", [{"privacy.noise_multiplier": 1.0}, {"wire": "int8"}])
def test_where_they_would_tell_too_much_or_cannot_travel_they_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="share_tests = true: needs"):
        config(**more)


@pytest.mark.slow
def test_a_real_swarm_that_shares_its_tests_ends_on_the_model_of_the_simulator(tmp_path: Path) -> None:
    flags = ("--peers", "3", "--iterations", "4", "--test-every", "1", *TINY)
    result = swarm(tmp_path / "run", *flags, "--share-tests")
    assert result.summary["model_hash"] == simulated(*flags)["model_hash"]
    rows = result.peer_rows(0)
    assert [rows[t].get("swarm_accuracy") is None for t in (1, 2, 3, 4)] == [True, False, False, False]
    assert rows[3]["swarm_accuracy"] == pytest.approx(rows[2]["test_accuracy"])
