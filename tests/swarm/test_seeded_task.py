"""A task that seeds every generator there is, as trainers do: its peers are still told apart, and meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.swarms import simulated, swarm

TASK = """
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from marfl import ClassificationTask


def seed_everything():
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)


seed_everything()


class Seeded(ClassificationTask):
    def __init__(self):
        seed_everything()

    def model(self):
        seed_everything()
        return nn.Linear(4, 3)

    def train_set(self):
        seed_everything()
        return self._points(90)

    def test_set(self):
        seed_everything()
        return self._points(30)

    def _points(self, count):
        found = torch.randn(count, 4)
        return TensorDataset(found, found.argmax(1) % 3)
"""


def test_peers_of_a_task_that_seeds_meet_and_end_on_the_model_of_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "seeded_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    flags = ("--task", "seeded_task:Seeded", "--peers", "3", "--iterations", "3", "--batch", "8")
    result = swarm(tmp_path / "run", *flags)
    assert [row["aggregators"] for row in result.rows()] == [3] * 3, "nobody trains alone"
    assert len({process["name"] for process in result.summary["processes"]}) == 3
    assert result.summary["model_hash"] == simulated(*flags)["model_hash"]
