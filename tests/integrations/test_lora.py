"""LoRA among peers: only adapters travel, and with one frozen A the average is exact."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from torch import nn

import marfl.integrations
import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there, or this is skipped
from marfl import Peer
from marfl.errors import InputError
from marfl.integrations import exact_lora
from marfl.integrations.averaging import SwarmTraining, advance
from stages.library import QUICK, small_model, together

hivemind_warnings = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")


def adapted(seed: int) -> nn.Module:
    """A frozen base, the same for all, with adapters; B is not zero, as after some training."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed: LoRA among peers is not tested")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
        torch.manual_seed(seed)
        return get_peft_model(base, LoraConfig(r=2, target_modules=["0", "2"]))


def learn(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator))


def products(model: nn.Module) -> torch.Tensor:
    """What LoRA adds to the weights."""
    parts = dict(model.named_parameters())
    names = sorted(name for name in parts if "lora_A" in name)
    return torch.stack([parts[name.replace("lora_A", "lora_B")] @ parts[name] for name in names]).detach().clone()


@hivemind_warnings
@pytest.mark.parametrize("exact", [True, False])
def test_only_adapters_travel_and_with_one_frozen_a_the_average_is_exact(exact: bool):
    models = [adapted(seed) for seed in (1, 2)]
    if exact:
        models = [exact_lora(model) for model in models]
    with Peer(models[0], expected=2, **QUICK) as one, Peer(models[1], expected=2, join=one.addresses, **QUICK) as two:
        for seed, model in enumerate(models):
            learn(model, seed)
        learned = [products(model) for model in models]
        outcomes = together(one.aggregate, two.aggregate)
        assert [outcome.status for outcome in outcomes] == ["committed"] * 2
        values = 2 * 2 * 12 * (1 if exact else 2)  # two layers, r = 2; B, or B and A
        assert sum(outcome.sent.payload for outcome in outcomes) == 2 * 4 * values
        far = (products(models[0]) - sum(learned) / 2).abs().max().item()
        assert (far < 1e-5) == exact, "mean(B)·mean(A) is not mean(B·A)"


@hivemind_warnings
def test_an_a_from_another_seed_is_refused_and_so_is_a_model_without_lora():
    with Peer(exact_lora(adapted(1), seed=1), **QUICK) as one:
        stranger = Peer(exact_lora(adapted(1), seed=2), join=one.addresses, **QUICK)
        with pytest.raises(InputError, match=r"other frozen weights: .*lora_A.* here"), stranger:
            pass
    with pytest.raises(InputError, match="has no LoRA layers"):
        exact_lora(small_model(0))


def test_averages_come_every_so_many_steps_and_never_after_the_end():
    with pytest.raises(InputError, match="every = 0: must be a whole number of steps"):
        SwarmTraining(every=0)
    averaging = SwarmTraining(every=3)
    asked: list[float] = []

    class Stub:
        iteration = 5

        def aggregate(self, weight: float) -> str:
            asked.append(weight)
            return "outcome"

        def __exit__(self, *_: object) -> None:
            asked.append(-1.0)

    averaging.peer = Stub()  # type: ignore[assignment]
    assert averaging.steps == 15
    assert [averaging.step() for _ in range(7)] == [None, None, "outcome", None, None, "outcome", None]
    averaging.end()
    averaging.end()
    assert asked == [1.0, 1.0, -1.0], "one goodbye"
    assert [averaging.step() for _ in range(3)] == [None] * 3


def test_schedules_that_count_steps_are_brought_forward_and_others_are_left():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    advance([steps, plateau], 3)
    assert steps.get_last_lr() == [0.25]


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module", name="lightning")

    monkeypatch.setattr(marfl.integrations, "import_module", absent)
    with pytest.raises(InputError, match=r"lightning is not installed \(pip install 'marfl\[lightning\]'\)"):
        marfl.integrations.__getattr__("LightningCallback")
    with pytest.raises(AttributeError):
        marfl.integrations.__getattr__("Nothing")
