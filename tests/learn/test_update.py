"""The local update: damped momentum on flat vectors, the same bits wherever it runs."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from marfl.errors import BrokenPromise, InputError
from marfl.learn import ClassificationTask, Loader, MiniBatch, Optimizer, Worker, initial_model, local_update, shard_of
from marfl.learn.data import row_keys
from marfl.learn.tasks.digits import Digits
from marfl.learn.update import BLOCK, LocalResult, first_step
from marfl.state import flatten, vector_hash

IN_A_FRESH_PROCESS = """
import torch
torch.set_num_threads(1)
from marfl.learn import Loader, Optimizer, Worker, initial_model, local_update, shard_of
from marfl.learn.tasks.digits import Digits
from marfl.state import vector_hash
task = Digits()
worker = Worker(task, initial_model(task, seed=7))
loader = Loader(shard_of(task, 3, 10, seed=7), seed=7, peer=3, batch_size=32)
theta = worker.flat.clone()
result = local_update(worker, theta, 0.01 * theta, loader.minibatches(4, 5, 3), Optimizer())
print(vector_hash(result.theta, result.momentum, result.delta).hex())
"""


class Toy(ClassificationTask):
    """A task around any model of four inputs and three classes."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def model(self) -> nn.Module:
        return self._model

    def test_set(self) -> Dataset[Any]:
        return TensorDataset(*data(8).batch)


def data(rows: int, seed: int = 0) -> MiniBatch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 4, generator=generator)
    return MiniBatch((inputs, torch.randint(0, 3, (rows,), generator=generator)), row_keys(0, seed, 0, 0, rows))


def worker_for(model: nn.Module | None = None) -> Worker:
    task = Toy(model)
    return Worker(task, task.model())


def start(worker: Worker) -> tuple[Tensor, Tensor]:
    """A (θ, m) with m ≠ 0."""
    theta = worker.flat.clone()
    return theta, 0.1 * torch.randn(len(theta), generator=torch.Generator().manual_seed(9))


def batches(count: int, rows: int = 6) -> list[MiniBatch]:
    return [data(rows, seed) for seed in range(count)]


def test_the_update_is_damped_momentum_as_written_in_the_paper() -> None:
    worker = worker_for()
    theta, momentum = start(worker)
    result = local_update(worker, theta, momentum, batches(3), Optimizer(learning_rate=0.2, decay=0.7))
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    parameters = list(reference.parameters())
    lengths = [parameter.numel() for parameter in parameters]
    velocities = [part.double().clone() for part in momentum.split(lengths)]
    for parameter, part in zip(parameters, theta.split(lengths), strict=True):
        parameter.data = part.double().view(parameter.shape)
    losses = []
    for inputs, labels in (minibatch.batch for minibatch in batches(3)):
        loss = functional.cross_entropy(reference(inputs.double()), labels)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, parameters)
        for index, gradient in enumerate(gradients):
            velocities[index] = 0.7 * velocities[index] + 0.3 * gradient.flatten()
            parameters[index].data -= 0.2 * velocities[index].view(gradient.shape)
    expected = torch.cat([parameter.data.flatten() for parameter in parameters])
    assert torch.allclose(result.theta.double(), expected, rtol=0, atol=1e-6)
    assert torch.allclose(result.delta.double(), expected - theta.double(), rtol=0, atol=1e-6)
    assert torch.allclose(result.momentum.double(), torch.cat(velocities), rtol=0, atol=1e-6)
    assert result.loss == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert (result.samples, result.finite) == (18, True)


def test_the_inputs_stay_as_they_were_and_the_result_shares_nothing_with_the_worker() -> None:
    worker = worker_for()
    theta, momentum = start(worker)
    before = vector_hash(theta, momentum)
    result = local_update(worker, theta, momentum, batches(2), Optimizer())
    after = vector_hash(result.theta, result.delta, result.momentum)
    local_update(worker, 3 * theta, momentum, batches(1), Optimizer())
    assert vector_hash(theta, momentum) == before
    assert vector_hash(result.theta, result.delta, result.momentum) == after


def test_parameters_and_gradients_are_views_so_nothing_is_gathered() -> None:
    worker = worker_for()
    worker.load(torch.arange(float(len(worker.flat))))
    worker.differentiate(data(5))
    assert torch.equal(flatten(worker.module), worker.flat)
    gradients = [parameter.grad.flatten() for parameter in worker.module.parameters()]  # type: ignore[union-attr]
    assert torch.equal(torch.cat(gradients), worker.grad)
    assert worker.grad.abs().max() > 0


def test_a_second_batch_does_not_see_the_gradient_of_the_first() -> None:
    worker = worker_for()
    worker.differentiate(data(5, seed=1))
    first = worker.grad.clone()
    worker.differentiate(data(5, seed=2))
    worker.differentiate(data(5, seed=1))
    assert torch.equal(worker.grad, first)


def test_another_process_and_a_used_worker_give_the_same_bits() -> None:
    task = Digits()
    worker = Worker(task, initial_model(task, seed=7))
    theta = worker.flat.clone()
    for peer in (0, 1):
        other = Loader(shard_of(task, peer, 10, seed=7), seed=7, peer=peer, batch_size=32)
        local_update(worker, theta, theta, other.minibatches(0, 0, 2), Optimizer())
    loader = Loader(shard_of(task, 3, 10, seed=7), seed=7, peer=3, batch_size=32)
    result = local_update(worker, theta, 0.01 * theta, loader.minibatches(4, 5, 3), Optimizer())
    there = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == vector_hash(result.theta, result.momentum, result.delta).hex()


def test_a_plain_dropout_is_seeded_by_peer_and_iteration_not_by_what_ran_before() -> None:
    worker = worker_for(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)))
    theta, momentum = start(worker)
    first = local_update(worker, theta, momentum, [data(6, seed=1)], Optimizer())
    torch.manual_seed(1234)
    state = torch.get_rng_state()
    again = local_update(worker, theta, momentum, [data(6, seed=1)], Optimizer())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.delta, again.delta)
    elsewhere = MiniBatch(data(6, seed=1).batch, row_keys(0, 1, 1, 0, 6))
    assert not torch.equal(local_update(worker, theta, momentum, [elsewhere], Optimizer()).delta, first.delta)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_broken_data_is_reported_and_does_not_reach_the_next_peer(poison: float) -> None:
    worker = worker_for()
    theta, momentum = start(worker)
    clean = local_update(worker, theta, momentum, batches(2), Optimizer())
    broken = data(6, seed=1)
    broken.batch[0][2, 1] = poison
    result = local_update(worker, theta, momentum, [data(6), broken], Optimizer())
    assert not result.finite
    again = local_update(worker, theta, momentum, batches(2), Optimizer())
    assert again.finite
    assert torch.equal(again.delta, clean.delta)


def test_a_loss_that_is_not_finite_is_reported_even_when_the_gradient_is() -> None:
    class Shifted(Toy):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, batch) + float("inf")

    task = Shifted()
    worker = Worker(task, task.model())
    result = local_update(worker, *start(worker), batches(1), Optimizer())
    assert torch.isfinite(result.delta).all()
    assert not result.finite


def test_the_update_is_not_a_difference_of_models_so_it_loses_no_digits() -> None:
    worker = worker_for(nn.Linear(4, 3, bias=False))
    theta = torch.full_like(worker.flat, 4096.0)
    result = local_update(worker, theta, torch.zeros_like(theta), batches(1), Optimizer())
    assert torch.equal(result.delta, result.momentum * -0.1)
    assert not torch.equal(result.theta - theta, result.delta)


def test_tied_layers_are_stepped_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.same = self.inner
            self.head = nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.head(self.same(self.inner(inputs)))
            return logits

    worker = worker_for(Tied())
    result = local_update(worker, *start(worker), batches(2), Optimizer())
    assert len(result.delta) == 4 * 4 + 4 + 4 * 3 + 3
    assert result.finite


def test_a_frozen_layer_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    worker = worker_for(model)
    result = local_update(worker, *start(worker), batches(2), Optimizer())
    assert len(result.delta) == 8 * 3 + 3
    assert torch.equal(model[0].weight, frozen)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_is_not_float32_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"layer weight is .*: local training needs float32"):
        worker_for(nn.Linear(4, 3).to(dtype))


def test_a_loss_that_replaces_gradients_is_a_broken_promise() -> None:
    class Clearing(Toy):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            model.zero_grad(set_to_none=True)
            return super().loss(model, batch)

    task = Clearing()
    worker = Worker(task, task.model())
    with pytest.raises(BrokenPromise, match=r"replaced a parameter's \.grad"):
        worker.differentiate(data(3))


def test_a_vector_of_another_length_is_refused() -> None:
    worker = worker_for()
    with pytest.raises(InputError, match=r"has shape \[3\], this model needs \[67\]"):
        worker.load(torch.zeros(3))


def test_an_update_without_data_is_refused() -> None:
    def nothing() -> Iterator[MiniBatch]:
        yield from ()

    worker = worker_for()
    with pytest.raises(InputError, match="at least one mini-batch"):
        local_update(worker, *start(worker), nothing(), Optimizer())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate = 0.0: must be a finite number, above 0"),
        ({"learning_rate": float("inf")}, "learning_rate = inf"),
        ({"decay": 1.0}, "decay = 1.0: must be a number, at least 0, below 1"),
        ({"decay": -0.1}, "decay = -0.1"),
    ],
)
def test_wrong_optimizer_settings_are_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Optimizer(**settings)


@pytest.mark.parametrize("length", [1, 15, BLOCK - 1, BLOCK, 2 * BLOCK + 77])
def test_a_first_step_has_the_bits_of_a_step_on_copies(length: int) -> None:
    """Also those of zeros, which have a sign: a momentum that is derived is −0 wherever the mean did not move."""
    generator = torch.Generator().manual_seed(length)
    momentum, gradient = torch.randn(2, length, generator=generator).unbind()
    momentum[::3], gradient[::2] = -0.0, 0.0
    gradient[::6] = -0.0
    momentum[1::5] = 1e-42  # what is that small rounds on the way
    velocity, delta = momentum.clone(), torch.zeros(length)
    Optimizer().descend(velocity, gradient, delta)
    given = torch.full((2, length), torch.nan)
    result = LocalResult(torch.zeros(length), *given.unbind(), 0.0, 0, True)
    first_step(Optimizer(), momentum, gradient, result)
    assert torch.equal(result.momentum.view(torch.int32), velocity.view(torch.int32))
    assert torch.equal(result.delta.view(torch.int32), delta.view(torch.int32))


def test_an_update_is_written_where_it_is_asked_for() -> None:
    worker = worker_for()
    theta, momentum = start(worker)
    fresh = local_update(worker, theta, momentum, batches(3), Optimizer())
    row = torch.full((2, len(theta)), torch.nan)[1]
    result = local_update(worker, theta, momentum, batches(3), Optimizer(), into=row)
    assert result.delta.data_ptr() == row.data_ptr()
    assert torch.equal(row, fresh.delta)
