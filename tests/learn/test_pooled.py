"""The pooled shortcut: one gradient on the joined batch stands for N local steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from marfl.errors import InputError
from marfl.learn import (
    ClassificationTask,
    Loader,
    MiniBatch,
    Optimizer,
    SeededDropout,
    Worker,
    initial_model,
    local_update,
    pooled_gradient,
    pooled_update,
    pooling_obstacle,
    shard_of,
)
from marfl.learn.tasks.digits import Digits
from marfl.learn.tasks.synthetic import Synthetic

PEERS = 30


@pytest.fixture(scope="module")
def worker() -> Worker:
    task = Digits()
    return Worker(task, initial_model(task, seed=0))


@pytest.fixture(scope="module")
def minibatches(worker: Worker) -> list[MiniBatch]:
    """Batches of different sizes: some shards are smaller than 64."""
    loaders = [Loader(shard_of(worker.task, p, PEERS, 0), seed=0, peer=p, batch_size=64) for p in range(PEERS)]
    return [loader.minibatch(2, iteration=2) for loader in loaders]


WEIGHTS = [1.0 + peer % 7 for peer in range(PEERS)]


def start(worker: Worker) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return worker.flat.clone(), 0.01 * torch.randn(len(worker.flat), generator=generator)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_the_pooled_update_is_the_weighted_mean_of_the_local_ones_with_dropout_on(
    worker: Worker, minibatches: list[MiniBatch]
) -> None:
    assert len({minibatch.rows for minibatch in minibatches}) > 3
    theta, momentum = start(worker)
    pooled = pooled_update(worker, theta, momentum, minibatches, WEIGHTS, Optimizer())
    single = [local_update(worker, theta, momentum, [minibatch], Optimizer()) for minibatch in minibatches]
    share = [weight / sum(WEIGHTS) for weight in WEIGHTS]
    for name in ("delta", "momentum"):
        expected = sum(w * getattr(result, name).double() for w, result in zip(share, single, strict=True))
        assert distance(getattr(pooled, name), expected) < 1e-5  # type: ignore[arg-type]
    assert pooled.loss == pytest.approx(sum(w * result.loss for w, result in zip(share, single, strict=True)), rel=1e-5)
    assert pooled.samples == sum(result.samples for result in single)
    assert pooled.finite


def test_dropout_really_was_on(worker: Worker, minibatches: list[MiniBatch]) -> None:
    theta, _ = start(worker)
    gradient = pooled_gradient(worker, theta, minibatches, WEIGHTS).gradient.clone()
    other_masks = [MiniBatch(minibatch.batch, minibatch.keys + 1) for minibatch in minibatches]
    assert distance(pooled_gradient(worker, theta, other_masks, WEIGHTS).gradient, gradient) > 0.01


def test_the_size_of_a_chunk_bounds_the_rows_in_a_pass_and_changes_nothing_else(
    worker: Worker, minibatches: list[MiniBatch]
) -> None:
    theta, _ = start(worker)
    whole = pooled_gradient(worker, theta, minibatches, WEIGHTS, max_rows=10_000)
    expected, losses = whole.gradient.clone(), whole.losses
    seen: list[int] = []
    hook = worker.module.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    try:
        found = pooled_gradient(worker, theta, iter(minibatches), WEIGHTS, max_rows=100)
    finally:
        hook.remove()
    assert max(seen) <= 100
    assert sum(seen) == found.samples
    assert distance(found.gradient, expected) < 1e-5
    assert torch.allclose(found.losses, losses, rtol=1e-5)


def test_a_batch_larger_than_a_chunk_is_a_chunk_of_its_own(worker: Worker, minibatches: list[MiniBatch]) -> None:
    theta, _ = start(worker)
    expected = pooled_gradient(worker, theta, minibatches, WEIGHTS).gradient.clone()
    assert distance(pooled_gradient(worker, theta, minibatches, WEIGHTS, max_rows=1).gradient, expected) < 1e-5


def test_broken_data_is_reported_with_the_name_of_its_peer(worker: Worker, minibatches: list[MiniBatch]) -> None:
    theta, _ = start(worker)
    images, labels = minibatches[4].batch
    broken = MiniBatch((torch.full_like(images, float("nan")), labels), minibatches[4].keys)
    found = pooled_gradient(worker, theta, [*minibatches[:4], broken, *minibatches[5:]], WEIGHTS)
    assert not found.finite
    assert torch.isfinite(found.losses).logical_not().nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize(
    ("count", "weights", "message"),
    [
        (3, [1.0, 1.0], "3 mini-batches for 2 weights"),
        (2, [1.0, 1.0, 1.0], "2 mini-batches for 3 weights"),
        (2, [0.0, 0.0], "weights add up to 0.0"),
        (2, [1.0, float("nan")], "weights add up to nan"),
        (0, [], "weights add up to 0"),
    ],
)
def test_weights_must_match_and_add_up(
    worker: Worker, minibatches: list[MiniBatch], count: int, weights: list[float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        pooled_gradient(worker, worker.flat.clone(), minibatches[:count], weights)


def obstacle(*layers: nn.Module, task: type[ClassificationTask] = Synthetic) -> str | None:
    return pooling_obstacle(Worker(task(), nn.Sequential(*layers)))


class OwnLoss(Synthetic):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


def test_models_for_which_it_would_be_wrong_are_named() -> None:
    assert obstacle(nn.Linear(3, 3), SeededDropout(0.5), nn.GroupNorm(1, 3)) is None
    assert obstacle(nn.Linear(3, 3), nn.Dropout(0.5)) == (
        "1 is a plain dropout: SeededDropout gives every engine the same masks"
    )
    assert "floating buffers" in (obstacle(nn.BatchNorm1d(3)) or "")
    assert "normalises over the batch" in (obstacle(nn.BatchNorm1d(3, track_running_stats=False)) or "")
    assert "its own loss()" in (obstacle(nn.Linear(3, 3), task=OwnLoss) or "")


def test_a_model_for_which_it_would_be_wrong_is_refused(minibatches: list[MiniBatch]) -> None:
    worker = Worker(Synthetic(), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    with pytest.raises(InputError, match="pooling: 1 is a plain dropout"):
        pooled_gradient(worker, worker.flat.clone(), minibatches, WEIGHTS)
