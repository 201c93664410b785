"""Batched matmuls: a stack of small MLPs steps like its members one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from marfl.errors import InputError
from marfl.learn import (
    ClassificationTask,
    MiniBatch,
    Optimizer,
    SeededDropout,
    Worker,
    batched_update,
    batching_obstacle,
    local_update,
)
from marfl.learn.data import row_keys

PEERS = 9


class Mlp(ClassificationTask):
    """A task around any Sequential."""

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers

    def model(self) -> nn.Module:
        return nn.Sequential(*self.layers)

    def test_set(self) -> Dataset[Any]:
        raise NotImplementedError


def worker_for(*layers: nn.Module) -> Worker:
    task = Mlp(*layers)
    return Worker(task, task.model())


def deep() -> Worker:
    """Three layers, one without a bias, dropout at the input and inside, and inputs that must be flattened."""
    return worker_for(
        nn.Flatten(), SeededDropout(0.2), nn.Linear(6, 16), nn.ReLU(), SeededDropout(0.5),
        nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def step(number: int, rows: list[int]) -> list[MiniBatch]:
    generator = torch.Generator().manual_seed(number)
    return [
        MiniBatch(
            (torch.randn(count, 2, 3, generator=generator), torch.randint(0, 3, (count,), generator=generator)),
            row_keys(0, peer, 0, number, count),
        )
        for peer, count in enumerate(rows)
    ]


def stack(worker: Worker, seed: int) -> Tensor:
    """A different model, or momentum, for every peer."""
    return 0.3 * torch.randn(PEERS, len(worker.flat), generator=torch.Generator().manual_seed(seed))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("rows", [[5] * PEERS, [1, 5, 3, 5, 2, 4, 5, 1, 5]], ids=["equal", "unequal"])
@pytest.mark.parametrize("count", [1, 3])
def test_every_peer_ends_where_it_ends_alone(rows: list[int], count: int) -> None:
    worker = deep()
    thetas, momenta = stack(worker, 1), stack(worker, 2)
    before = thetas.clone(), momenta.clone()
    steps = [step(number, rows) for number in range(count)]
    found = batched_update(worker, thetas, momenta, steps, Optimizer())
    assert torch.equal(thetas, before[0])
    assert torch.equal(momenta, before[1])
    assert found.finite.all()
    for peer in range(PEERS):
        alone = local_update(worker, thetas[peer], momenta[peer], [part[peer] for part in steps], Optimizer())
        assert distance(found.deltas[peer], alone.delta) < 1e-5
        assert distance(found.momenta[peer], alone.momentum) < 1e-5
        assert found.losses[peer].item() == pytest.approx(alone.loss, rel=1e-4)


def test_a_common_start_can_be_given_without_copies() -> None:
    worker = deep()
    theta, momentum = stack(worker, 1)[0], stack(worker, 2)[0]
    steps = [step(number, [4] * PEERS) for number in range(2)]
    shared = batched_update(worker, theta.expand(PEERS, -1), momentum.expand(PEERS, -1), steps, Optimizer())
    copied = batched_update(worker, theta.repeat(PEERS, 1), momentum.repeat(PEERS, 1), steps, Optimizer())
    assert distance(shared.deltas, copied.deltas) < 1e-6
    assert shared.deltas.is_contiguous()


def test_a_broken_peer_spoils_only_its_own_row() -> None:
    worker = deep()
    thetas, momenta = stack(worker, 1), stack(worker, 2)
    clean = [step(number, [4] * PEERS) for number in range(2)]
    expected = batched_update(worker, thetas, momenta, clean, Optimizer())
    broken = [step(number, [4] * PEERS) for number in range(2)]
    broken[0][3].batch[0][1] = float("nan")
    found = batched_update(worker, thetas, momenta, broken, Optimizer())
    assert found.finite.tolist() == [peer != 3 for peer in range(PEERS)]
    others = found.finite
    assert torch.equal(found.deltas[others], expected.deltas[others])


def test_padding_carries_no_weight() -> None:
    worker = deep()
    thetas, momenta = stack(worker, 1), stack(worker, 2)
    found = batched_update(worker, thetas, momenta, [step(0, [1] * 8 + [6])], Optimizer())
    alone = batched_update(worker, thetas[:8], momenta[:8], [step(0, [1] * 8)], Optimizer())
    assert distance(found.deltas[:8], alone.deltas) < 1e-6


def test_models_that_cannot_be_stacked_are_named() -> None:
    assert batching_obstacle(deep()) is None
    assert "layer 1 is Tanh" in (batching_obstacle(worker_for(nn.Linear(6, 3), nn.Tanh())) or "")
    assert "layer 1 is Dropout" in (batching_obstacle(worker_for(nn.Linear(6, 3), nn.Dropout())) or "")
    assert "frozen" in (batching_obstacle(worker_for(nn.Linear(6, 3).requires_grad_(False), nn.Linear(3, 3))) or "")
    assert "not an nn.Sequential" in (batching_obstacle(Worker(Mlp(), nn.Linear(6, 3))) or "")
    with pytest.raises(InputError, match="batched update: layer 0 is Tanh"):
        batched_update(worker_for(nn.Tanh(), nn.Linear(6, 3)), torch.zeros(1, 21), torch.zeros(1, 21), [], Optimizer())


def test_inputs_that_are_not_flat_are_refused() -> None:
    worker = worker_for(nn.Linear(3, 3))
    zeros = torch.zeros(2, len(worker.flat))
    with pytest.raises(InputError, match=r"layer 0 got 3 dimensions"):
        batched_update(worker, zeros, zeros, [step(0, [4, 4])], Optimizer())


@pytest.mark.parametrize("count", [0, 8])
def test_a_step_needs_one_mini_batch_for_every_peer(count: int) -> None:
    worker = deep()
    steps = [step(0, [4] * count)] if count else []
    with pytest.raises(InputError, match="at least one step, each with 9 mini-batches"):
        batched_update(worker, stack(worker, 1), stack(worker, 2), steps, Optimizer())
