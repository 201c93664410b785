"""Local work on another device: a copy on the CPU stands in for one, and the meta device shows where things are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from marfl.config import load
from marfl.errors import InputError
from marfl.learn import Worker, device, initial_model, load_task
from marfl.learn.device import find_device
from marfl.sim import executor
from marfl.sim.engine import simulate

APART = torch.device("cpu")  # as a device of its own: the model is a copy beside the flat vectors
SMALL: dict[str, Any] = {"task": "digits", "peers": 4, "group_size": 2, "iterations": 2, "batch": 8}
RUNS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "dropout and two batches": {"task": "synthetic", "task_options": {"samples": 200, "dropout": 0.3},
                                "local_batches": 2},
    "buffers": {"task": "stages.slow_task:SlowTask", "task_options": {"normalised": True}},
    "dropout of torch": {"task": "stages.slow_task:SlowTask"},
    "distilled": {"distill.iterations": 1},
    "private": {"privacy.noise_multiplier": 1.0},
    "protocol": {"engine": "protocol"},
    "as published": {"semantics": "paper"},
    "pooled": {"engine": "fast"},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_copy_of_the_model_beside_the_agreed_vectors_gives_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(overrides=SMALL | RUNS[name])
    here = simulate(config)
    monkeypatch.setattr(executor, "find_device", lambda name: APART)
    there = simulate(config)
    assert there["model_hash"] == here["model_hash"]
    assert there["final_accuracy"] == here["final_accuracy"]


def test_only_the_model_goes_to_the_device() -> None:
    task = load_task("digits")
    worker = Worker(task, initial_model(task, 0), torch.device("meta"))
    assert {tensor.device.type for tensor in worker.module.parameters()} == {"meta"}
    assert (worker.flat.device.type, worker.grad.device.type) == ("cpu", "cpu")
    worker.load(torch.ones_like(worker.flat))
    assert bool((worker.flat == 1).all())


class Asked(nn.Module):
    """Notes where its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[str] = []

    def forward(self, inputs: dict[str, Tensor], scale: Tensor, plain: float = 1.0) -> Tensor:
        self.seen += [inputs["x"].device.type, scale.device.type]
        return torch.zeros(2)


def test_inputs_of_every_shape_go_to_the_device() -> None:
    module = Asked()
    elsewhere = device.Elsewhere(module, torch.zeros(6), torch.device("meta"))
    module({"x": torch.ones(2)}, scale=torch.ones(2), plain=2.0)
    assert module.seen == ["meta", "meta"]
    assert elsewhere.flat.device.type == "meta"


class FakeCuda:
    """As if torch saw two of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)


def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device("auto") is None
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_device("auto") == torch.device("mps")
    FakeCuda(monkeypatch)
    assert find_device("auto") == torch.device("cuda")
    assert find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InputError, match="device = cuda:2: there is no such device here; torch sees 2 of cuda"):
        find_device("cuda:2")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device": "tpu"}, "device = 'tpu': must be auto, cpu, cuda, cuda:N or mps"),
        ({"device": "cuda:x"}, "must be auto, cpu, cuda, cuda:N or mps"),
        ({"device": "auto", "cluster": "auto"}, "nodes of a cluster"),
        ({"device": "mps", "privacy.unit": "record", "privacy.noise_multiplier": 1.0}, "need device = cpu"),
    ],
)
def test_a_device_that_cannot_be_is_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        load(overrides=settings)


def test_a_device_that_is_not_here_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="device = cuda: there is no such device here"):
        simulate(load(overrides=SMALL | {"device": "cuda"}))
