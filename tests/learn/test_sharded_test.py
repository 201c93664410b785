"""Every peer tested on its own shard of the test set, and what follows from it in a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from marfl.config import load
from marfl.errors import InputError
from marfl.learn import Metrics, ShardedTest, initial_model, load_task
from marfl.sim.engine import Simulation

RUN: dict[str, Any] = {"peers": 6, "group_size": 3, "iterations": 8, "batch": 16, "test_every": 2, "test_on": "shards"}


def test_the_shards_are_the_test_set_and_weigh_every_peer_alike() -> None:
    task = load_task("digits")
    model, sharded = initial_model(task, 0), ShardedTest(task, 5, 0)
    each = [sharded.of_peer(model, peer) for peer in range(5)]
    whole, mean = task.evaluate(model), sharded.of_all(model)
    assert sum(shard.count for shard in each) == whole.count == mean.count
    assert mean.accuracy == pytest.approx(sum(shard.accuracy for shard in each) / 5)
    assert mean.loss == pytest.approx(sum(shard.loss for shard in each) / 5, rel=1e-5)
    weighted = sum(shard.accuracy * shard.count for shard in each) / whole.count
    assert weighted == pytest.approx(whole.accuracy)
    assert mean.accuracy != whole.accuracy  # shards of a Dirichlet split differ in size


def test_a_task_that_evaluates_itself_and_too_few_samples_are_refused() -> None:
    class Own(type(load_task("digits"))):  # type: ignore[misc]
        def evaluate(self, model: torch.nn.Module) -> Metrics:
            return Metrics(0.0, 1.0, 1)

    with pytest.raises(InputError, match="evaluates its models itself"):
        ShardedTest(Own(), 5, 0)
    with pytest.raises(InputError, match="too few for 1000 peers"):
        ShardedTest(load_task("digits"), 1000, 0)


@pytest.mark.parametrize("more", [{}, {"semantics": "paper"}, {"engine": "fast"}])
def test_a_run_says_the_mean_over_shards_and_trains_as_before(more: dict[str, Any]) -> None:
    rows = {on: list(Simulation(load(overrides=RUN | more | {"test_on": on})).rows()) for on in ("shards", "whole")}
    assert [row.model_hash for row in rows["shards"]] == [row.model_hash for row in rows["whole"]]
    assert rows["shards"][-1].test_accuracy != rows["whole"][-1].test_accuracy


def test_a_peer_that_is_good_enough_takes_smaller_steps() -> None:
    slow = {"semantics": "paper", "optimizer.slow_above": 0.01, "optimizer.slow_rate": 1e-9}
    rows = list(Simulation(load(overrides=RUN | slow)).rows())
    plain = list(Simulation(load(overrides=RUN | {"semantics": "paper"})).rows())
    assert [row.model_hash for row in rows[:2]] == [row.model_hash for row in plain[:2]]
    assert rows[2].model_hash != plain[2].model_hash  # the first test was after the second iteration
    losses = [row.train_loss or 0.0 for row in rows]
    assert losses[-1] > (plain[-1].train_loss or 0.0)


@pytest.mark.parametrize("settings", [{}, {"test_on": "whole", "semantics": "paper"}])
def test_slowing_needs_peers_with_models_and_shards_of_their_own(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="needs semantics = paper and test_on = shards"):
        load(overrides=RUN | {"optimizer.slow_above": 0.5} | settings)


def test_a_global_batch_is_shared_as_the_papers_code_does() -> None:
    of_64 = ((64, 4000, [62] * 32 + [63] * 32), (64, 1000, [15] * 24 + [16] * 40))
    for peers, together, sizes in (*of_64, (16, 1600, [100] * 16)):
        config = load(overrides={"peers": peers, "global_batch": together})
        assert [config.batch_of(peer) for peer in range(peers)] == sizes
        assert config.batch == sizes[0]
    with pytest.raises(InputError, match="must be at least 16, a row for each peer"):
        load(overrides={"global_batch": 15})


def test_the_papers_presets_train_on_as_many_rows_for_every_number_of_peers() -> None:
    for task, rows in (("mnist", 8000), ("20ng", 2000)):
        for name in (f"paper-{task}", f"paper-{task}-64", f"paper-{task}-16"):
            config = load(name)
            assert config.local_batches * sum(map(config.batch_of, range(config.peers))) == rows
            assert config.test_on == "shards"
