"""The gradients of single records: those of a plain step, whatever their company."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from marfl.errors import InputError
from marfl.learn import initial_model
from marfl.learn.data import MiniBatch
from marfl.learn.layer_gradients import plain
from marfl.learn.models import Cnn, SeededDropout
from marfl.learn.record_gradients import RecordGradients, written_out
from marfl.learn.task import ClassificationTask
from marfl.learn.worker import Worker


class Given(ClassificationTask):
    """A classifier without data."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def model(self) -> nn.Module:
        return self._model

    def test_set(self):
        raise NotImplementedError


class Stubborn(nn.Module):
    """A model that vmap cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, inputs):
        return self.linear(inputs) * (1.0 if float(inputs.sum()) > 0 else 2.0)


def tied(first, second):
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.Linear(12, 4))


torch.manual_seed(0)
MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 9), nn.ReLU(), SeededDropout(0.3), nn.Linear(9, 4)),
    "cnn": lambda: Cnn(side=12, channels=(3, 5), hidden=7),
    "strided": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(108, 4, bias=False)
    ),
    "used twice": lambda: nn.Sequential(shared := nn.Linear(12, 12), nn.ReLU(), shared, nn.Linear(12, 4)),
    "tied": lambda: tied(nn.Linear(12, 12), nn.Linear(12, 12)),
    "normalised": lambda: nn.Sequential(nn.Linear(12, 8), nn.GroupNorm(2, 8), nn.Linear(8, 4)),
    "stubborn": Stubborn,
}


def made(name, rows=21):
    task = Given(MODELS[name]())
    torch.manual_seed(1)
    inputs = torch.randn(rows, 1, 12, 12) if name in ("cnn", "strided") else torch.randn(rows, 12)
    batch = inputs, torch.randint(0, 4, (rows,))
    worker = Worker(task, initial_model(task, 1))
    keys = torch.randint(0, 2**62, (rows,))
    return worker, batch, keys, RecordGradients(worker, (batch[0][:1], batch[1][:1]))


def flat(slices):
    return torch.cat([torch.cat([written_out(layer) for layer in layers], dim=1) for layers in slices])


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_each_record_is_that_of_a_step_on_it_alone(name):
    worker, batch, keys, gradients = made(name)
    found = flat(gradients.slices(batch, keys)).clone()
    for row in range(len(keys)):
        alone = tuple(part[row : row + 1] for part in batch)
        worker.differentiate(MiniBatch(alone, keys[row : row + 1]))
        torch.testing.assert_close(found[row], worker.grad, rtol=1e-4, atol=1e-6)


def test_plain_networks_take_the_fast_way_and_it_gives_what_vmap_gives():
    for name in ("mlp", "cnn", "strided"):
        worker, batch, keys, gradients = made(name)
        assert plain(worker)
        fast = flat(gradients.slices(batch, keys)).clone()
        gradients._of_slice = gradients._vmapped()
        torch.testing.assert_close(fast, flat(gradients.slices(batch, keys)), rtol=1e-4, atol=1e-6)
    assert not plain(made("normalised")[0])


class Centred(nn.Linear):
    """A layer that mixes records, and says nothing of it."""

    def forward(self, inputs):
        return super().forward(inputs - inputs.mean(dim=0))


def test_a_network_that_may_mix_records_does_not_take_the_fast_way():
    task = Given(nn.Sequential(Centred(12, 4)))
    worker = Worker(task, task.model())
    assert not plain(worker)
    batch = torch.randn(3, 12), torch.zeros(3, dtype=torch.int64)
    gradients = RecordGradients(worker, (batch[0][:1], batch[1][:1]))
    found = flat(gradients.slices(batch, torch.arange(3)))
    assert float(found[:, :48].abs().max()) == 0  # each is its own mean: there is no company


def test_a_hook_of_the_users_own_that_mixes_records_sees_one_at_a_time():
    task = Given(nn.Sequential(nn.Linear(12, 4)))
    worker = Worker(task, task.model())
    worker.module[0].register_forward_pre_hook(lambda layer, given: (given[0] - given[0].mean(dim=0),))
    batch = torch.randn(3, 12), torch.zeros(3, dtype=torch.int64)
    gradients = RecordGradients(worker, (batch[0][:1], batch[1][:1]))
    found = flat(gradients.slices(batch, torch.arange(3)))
    assert float(found[:, :48].abs().max()) == 0


@pytest.mark.parametrize("name", ["mlp", "cnn", "strided", "normalised"])
def test_a_records_gradient_is_the_same_to_the_bit_in_any_company_and_any_place(name):
    _, batch, keys, gradients = made(name, 40)
    found = flat(gradients.slices(batch, keys))
    for chosen in ([5], [7, 5, 1], list(range(39, -1, -1)), [5, *range(20, 37)]):
        some = tuple(part[chosen] for part in batch)
        again = flat(gradients.slices(some, keys[chosen]))
        for place, row in enumerate(chosen):
            assert torch.equal(again[place], found[row])


def test_a_model_that_vmap_cannot_take_goes_one_record_at_a_time_and_says_so():
    gradients = made("stubborn")[3]
    assert gradients.at_once == 1
    assert gradients.way.startswith("gradients one record at a time, because vmap cannot take the model: ")
    assert made("mlp")[3].way == "gradients of single records, 32 at a time"


def test_a_batch_without_records_has_no_gradients():
    _, batch, keys, gradients = made("mlp")
    assert list(gradients.slices(tuple(part[:0] for part in batch), keys[:0])) == []


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)), "privacy.unit = record: 1 normalises over a batch"),
        (nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4, track_running_stats=False)), "1 normalises over a batch"),
    ],
)
def test_layers_that_mix_records_are_refused(model, said):
    task = Given(model)
    with pytest.raises(InputError, match=said):
        RecordGradients(Worker(task, model), (torch.randn(1, 12), torch.zeros(1, dtype=torch.int64)))


def test_buffers_made_from_data_are_refused():
    model = nn.Sequential(nn.Linear(12, 4))
    model.register_buffer("seen", torch.zeros(3))
    task = Given(model)
    with pytest.raises(InputError, match="floating buffers, which are made from all records together"):
        RecordGradients(Worker(task, model), (torch.randn(1, 12), torch.zeros(1, dtype=torch.int64)))


def test_a_task_without_losses_of_single_records_is_refused():
    class Whole(Given):
        def loss(self, model, batch):
            return super().loss(model, batch)

    model = nn.Sequential(nn.Linear(12, 4))
    with pytest.raises(InputError, match="has its own loss"):
        RecordGradients(Worker(Whole(model), model), (torch.randn(1, 12), torch.zeros(1, dtype=torch.int64)))
