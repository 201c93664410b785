"""Strategies: each against a computation by hand, and what a strategy of one's own is refused for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from marfl import DiLoCo, FedAdam, FedProx, FedYogi, Scaffold, Strategy, StrategyStep
from marfl.errors import InputError
from marfl.learn import Agreement, LocalWork, Optimizer, Worker
from marfl.learn.data import MiniBatch
from marfl.learn.local_work import Start
from marfl.learn.strategy import load_strategy, part_of, strategy_terms
from marfl.state import Snapshot

THETA = torch.tensor([1.0, -2.0, 0.5])
MEANS = (torch.tensor([0.5, 0.25, -1.0]), torch.tensor([-0.25, 0.5, 0.0]), torch.tensor([1.0, 1.0, 1.0]))


def states(strategy: Strategy, means: tuple[Tensor, ...] = MEANS, **more: Any) -> list[Snapshot]:
    """The agreed states after these means."""
    agreement = Agreement(LocalWork(strategy=strategy), momentum="local", **more)
    found = [agreement.start(THETA.clone())]
    for mean in means:
        found.append(agreement.advance(found[-1], mean, contributions=2))
    return found


def near(one: Tensor, other: Any) -> None:
    np.testing.assert_allclose(one.numpy(), np.asarray(other), rtol=2e-6, atol=1e-7)


def test_diloco_is_nesterov_on_the_mean() -> None:
    theta, velocity = THETA.double().numpy(), np.zeros(3)
    for state, mean in zip(states(DiLoCo(learning_rate=0.7, momentum=0.9))[1:], MEANS, strict=True):
        gradient = -mean.double().numpy()  # the outer gradient of DiLoCo's Algorithm 1
        velocity = 0.9 * velocity + gradient
        theta = theta - 0.7 * (gradient + 0.9 * velocity)  # as torch.optim.SGD(nesterov=True) steps
        near(state.vectors["theta"], theta)
        near(state.vectors["strategy.velocity"], -velocity)


def test_diloco_makes_the_steps_of_torchs_own_nesterov() -> None:
    parameter = nn.Parameter(THETA.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for mean in MEANS:
        parameter.grad = -mean
        optimizer.step()
    near(states(DiLoCo())[-1].vectors["theta"], parameter.detach())


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_fedadam_and_fedyogi_are_algorithm_2_of_adaptive_federated_optimization(kind: type) -> None:
    theta, first, second = THETA.double().numpy(), np.zeros(3), np.full(3, 0.1**2)
    made = kind(learning_rate=0.5, beta1=0.8, beta2=0.75, tau=0.1)
    for state, mean in zip(states(made)[1:], MEANS, strict=True):
        delta = mean.double().numpy()
        first = 0.8 * first + 0.2 * delta
        if kind is FedAdam:
            second = 0.75 * second + 0.25 * delta**2
        else:
            second = second - 0.25 * delta**2 * np.sign(second - delta**2)
        theta = theta + 0.5 * first / (np.sqrt(second) + 0.1)
        near(state.vectors["theta"], theta)
        near(state.vectors["strategy.second"], second)


# --- local steps: on losses ½·a·(w − x)², whose gradients anybody can write down ---


class Bowl:
    """A task with one value to learn: half of a times the squared distance to the batch."""

    def model(self) -> nn.Module:
        module = nn.Module()
        module.w = nn.Parameter(torch.zeros(2))
        return module

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (batch[1] * (model.w - batch[0]) ** 2).sum() / 2

    def shard(self, *_: Any) -> Any: ...

    def evaluate(self, *_: Any) -> Any: ...


class Batches:
    """A peer whose batches are known: points and slopes."""

    def __init__(self, *batches: tuple[list[float], float]) -> None:
        self.batches = batches

    def minibatches(self, consumed: int, iteration: int, count: int) -> list[MiniBatch]:
        keys = torch.zeros(1, dtype=torch.int64)
        return [MiniBatch((torch.tensor(x), torch.tensor(a)), keys) for x, a in self.batches[:count]]


PEERS = (Batches(([1.0, 0.0], 1.0), ([2.0, 1.0], 0.5)), Batches(([-1.0, 3.0], 2.0), ([0.0, 2.0], 1.0)))


def worker() -> Worker:
    task: Any = Bowl()
    return Worker(task, task.model())


def test_fedprox_draws_every_step_back_to_where_it_began() -> None:
    work = LocalWork(Optimizer(learning_rate=0.1, decay=0.5), 2, strategy=FedProx(mu=0.3))
    theta, momentum = torch.tensor([0.5, 0.5]), torch.tensor([0.2, -0.1])
    loader: Any = PEERS[0]
    found = work.update(worker(), loader, Start(theta, momentum), 1, 0)
    w, m = np.array([0.5, 0.5]), np.array([0.2, -0.1])
    for x, a in PEERS[0].batches:
        gradient = a * (w - np.array(x)) + 0.3 * (w - np.array([0.5, 0.5]))
        m = 0.5 * m + 0.5 * gradient
        w = w - 0.1 * m
    near(found.delta, w - np.array([0.5, 0.5]))
    near(found.momentum, m)


def test_fedprox_with_one_local_step_is_plain_averaging() -> None:
    theta, loader = torch.tensor([0.5, 0.5]), PEERS[0]
    given: Any = loader
    plain, drawn = (
        LocalWork(Optimizer(), 1, strategy=each).update(worker(), given, Start(theta, torch.zeros(2)), 1, 0)
        for each in (load_strategy("plain"), FedProx(mu=5))
    )
    assert torch.equal(plain.delta, drawn.delta)


def test_scaffold_is_algorithm_1_with_option_ii_when_one_peer_is_away() -> None:
    """Both peers, then one of the two, then both: the paper's own formula, in float64."""
    rate, steps = 0.1, 2
    work = LocalWork(Optimizer(learning_rate=rate, decay=0.0), steps, strategy=Scaffold(learning_rate=0.9))
    agreement = Agreement(work, momentum="local", trainable=2, peers=2)
    state = agreement.start(torch.tensor([0.5, 0.5]))
    own: dict[int, Tensor] = {}
    x, c, variates = np.array([0.5, 0.5]), np.zeros(2), [np.zeros(2), np.zeros(2)]
    for present in ((0, 1), (1,), (0, 1)):
        sent, moves, changes = [], [], []
        for peer in present:
            loader: Any = PEERS[peer]
            start = Start(state.vectors["theta"], torch.zeros(2), part_of(state.vectors), own.get(peer))
            result = work.update(worker(), loader, start, 1, 0)
            assert result.news is not None
            own[peer] = own.get(peer, torch.zeros(2)) + result.news
            sent.append(agreement.outgoing(result))
            y = x.copy()
            for point, slope in PEERS[peer].batches:
                y = y - rate * (slope * (y - np.array(point)) - variates[peer] + c)
            after = variates[peer] - c + (x - y) / (steps * rate)
            changes.append(after - variates[peer])
            moves.append(y - x)
            variates[peer] = after
        state = agreement.advance(state, torch.stack(sent).mean(dim=0), len(present))
        x, c = x + 0.9 * np.mean(moves, axis=0), c + np.sum(changes, axis=0) / 2
        near(state.vectors["theta"], x)
        near(state.vectors["strategy.control"], c)
        near(state.vectors["strategy.control"], sum(own.get(p, torch.zeros(2)) for p in (0, 1)) / 2)
    assert agreement.values(2) == 4, "control variates cost as many bytes as the update"


def test_buffers_are_averaged_whatever_the_strategy() -> None:
    state = states(FedYogi(learning_rate=5.0), trainable=2)[-1]
    assert float(state.vectors["theta"][2]) == float(THETA[2] + sum(mean[2] for mean in MEANS))
    assert state.vectors["strategy.second"].shape == (2,)


def test_a_derived_momentum_is_that_of_the_local_steps_whatever_the_strategy() -> None:
    work = LocalWork(Optimizer(learning_rate=0.1), 2, strategy=DiLoCo())
    plain, outer = (
        Agreement(each, "derive").advance(Agreement(each, "derive").start(THETA), MEANS[0], 2)
        for each in (LocalWork(Optimizer(learning_rate=0.1), 2), work)
    )
    assert torch.equal(plain.vectors["momentum"], outer.vectors["momentum"])
    assert not torch.equal(plain.vectors["theta"], outer.vectors["theta"])


# --- one's own ---


@dataclass(frozen=True)
class Halved(Strategy):
    share: float = 0.5

    def apply(self, step: StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta + step.delta * self.share, {}


class NotFinite(Strategy):
    def apply(self, step: StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta * torch.nan, {}


class WrongShape(Strategy):
    def apply(self, step: StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta[1:], {}


class Dicing(Strategy):
    def apply(self, step: StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta + torch.rand(3), {}


class InPlace(Strategy):
    def apply(self, step: StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta.add_(step.delta), {}


class Failing(Strategy):
    def apply(self, step: StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        raise KeyError("velocity")


class NoTensor(Strategy):
    def apply(self, step: StrategyStep) -> Any:
        return [1.0], {}


class NewVector(Strategy):
    def apply(self, step: StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta, {"late": step.delta}


class WrongType(Strategy):
    def init(self, theta: Tensor) -> Mapping[str, Tensor]:
        return {"count": torch.zeros(1, dtype=torch.float64)}


def test_a_strategy_of_ones_own_is_found_by_module_and_class() -> None:
    made = load_strategy("test_strategies:Halved", {"share": 0.25})
    assert part_of(states(made)[-1].vectors) == {}
    near(states(made, MEANS[:1])[-1].vectors["theta"], THETA + MEANS[0] / 4)
    terms = strategy_terms(made)
    assert (terms["strategy"], terms["strategy_options"]) == ("test_strategies:Halved", {"share": 0.25})
    assert len(terms["strategy_source"]) == 16, "peers compare its text, too"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (NotFinite, "θ is not finite after iteration 1; take smaller steps"),
        (WrongShape, r"apply gave θ as torch.float32 [2]; it must be float32 [3]"),
        (Dicing, "apply gave two results for one mean; it must be deterministic"),
        (InPlace, "apply changed its arguments in place; it must return new vectors"),
        (Failing, "apply failed (KeyError: 'velocity')"),
        (NoTensor, "apply failed (AttributeError: 'list' object has no attribute 'detach')"),
        (NewVector, "apply gave the vectors late [3]; init began none"),
        (WrongType, "init gave count as torch.float64 [1]; it must be a float32 vector"),
    ],
)
def test_what_peers_could_not_agree_on_is_one_clear_line(kind: type[Strategy], says: str) -> None:
    with pytest.raises(InputError) as caught:
        states(kind())
    assert str(caught.value) == f"strategy test_strategies:{kind.__name__}: {says}"


@pytest.mark.parametrize(
    ("spec", "options", "says"),
    [
        ("dilocco", {}, "strategy 'dilocco': unknown. Did you mean diloco? There are diloco, fedadam, fedprox"),
        ("diloco", {"momentum": 1.5}, "strategy.momentum = 1.5: must be a number, at least 0, below 1"),
        ("diloco", {"momentun": 0.5}, "config: strategy.momentun is not a setting; did you mean momentum?"),
        ("plain", {"mu": 1}, "strategy plain: got an unexpected keyword argument 'mu'; it takes no options"),
        ("test_strategies:Halved", {"shore": 1}, "strategy test_strategies:Halved: got an unexpected keyword argument"),
        ("test_strategies:Bowl", {}, "strategy test_strategies:Bowl: Bowl is no marfl.Strategy"),
        ("test_strategies:None_", {}, "strategy test_strategies:None_: test_strategies has no class 'None_'"),
        ("no_such_module:Mine", {}, "strategy no_such_module:Mine: cannot import no_such_module"),
    ],
)
def test_what_is_no_strategy_is_one_clear_line(spec: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        load_strategy(spec, options)
    assert str(caught.value).startswith(says)
