"""Paper semantics under `engine = fast`: batched matmuls, the same up to rounding as one peer at a time."""

from __future__ import annotations

from typing import Any

import pytest

from marfl.config import load
from marfl.sim.engine import Simulation

RUN: dict[str, Any] = {
    "task": "synthetic", "task_options": {"samples": 400, "features": 12, "hidden": [8]}, "semantics": "paper",
    "peers": 9, "group_size": 3, "iterations": 5, "batch": 8, "test_every": 2, "test_on": "shards",
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"local_batches": 3, "global_batch": 58},
        {"churn.participation": 0.6, "churn.dropout": 0.3},
        {"distill.iterations": 2, "distill.batches": 4},
        {"distill.iterations": 2, "distill.batches": 4, "distill.match_local_steps": True},
        {"distill.iterations": 2, "distill.teacher": "previous"},
        {"optimizer.slow_above": 0.05, "optimizer.slow_rate": 0.001},
        {"privacy.noise_multiplier": 0.2, "privacy.mode": "paper"},
    ],
)
def test_fast_paper_semantics_is_the_same_up_to_rounding(more: dict[str, Any]) -> None:
    runs = []
    for engine in ("bitwise", "fast"):
        simulation = Simulation(load(overrides=RUN | more | {"engine": engine}))
        rows = list(simulation.rows())
        runs.append((simulation.world.matrices.theta.clone(), rows, simulation.summary()))  # type: ignore[attr-defined]
    (one, rows, slow), (two, others, fast) = runs
    assert float((one - two).abs().max()) < 1e-4 * float(one.abs().max())
    assert [row.bytes_total for row in rows] == [row.bytes_total for row in others]
    assert slow.steps_total == fast.steps_total
    assert "batched matmuls: the same up to rounding" in str(fast.engine_reason)
