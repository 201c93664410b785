"""The built-in strategies, each after the paper that it cites. Δ̄ is the mean of the updates, θ the agreed model.

All of them run on the agreed mean, so no server is needed: every peer makes the server's step and arrives at its bits.
Where a paper's clients take plain SGD, ours take damped momentum SGD; `optimizer.decay = 0` is the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from marfl.learn.strategy import Strategy, StrategyStep, Vectors
from marfl.schema import Checked

LearningRate = Annotated[float, Field(gt=0, allow_inf_nan=False, description="of the step that a mean makes")]


@dataclass(frozen=True)
class DiLoCo(Checked, Strategy):
    """Nesterov momentum on the mean of many local steps: v ← μ·v + Δ̄, then θ ← θ + η·(Δ̄ + μ·v).

    Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023 (arXiv 2311.08105),
    Algorithm 1, with the outer gradient −Δ̄. H, the local steps between two means, is the setting `local_batches`.
    """

    learning_rate: LearningRate = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1, description="μ: how much of the velocity stays")] = 0.9

    def init(self, theta: Tensor) -> Vectors:
        return {"velocity": torch.zeros_like(theta)}

    def apply(self, step: StrategyStep) -> tuple[Tensor, Vectors]:
        velocity = step.state["velocity"] * self.momentum + step.delta
        return step.theta + (velocity * self.momentum + step.delta) * self.learning_rate, {"velocity": velocity}


@dataclass(frozen=True)
class _Adaptive(Checked, Strategy):
    """m ← β₁·m + (1−β₁)·Δ̄, then θ ← θ + η·m/(√v + τ), with a v that the papers choose differently."""

    learning_rate: LearningRate = 0.03
    beta1: Annotated[float, Field(ge=0, lt=1, description="β₁: how much of the mean of Δ̄ stays")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="β₂: how much of the mean of Δ̄² stays")] = 0.99
    tau: Annotated[float, Field(gt=0, allow_inf_nan=False, description="τ: how far it adapts; smaller is more")] = 1e-3

    def init(self, theta: Tensor) -> Vectors:
        return {"first": torch.zeros_like(theta), "second": torch.full_like(theta, self.tau**2)}

    def apply(self, step: StrategyStep) -> tuple[Tensor, Vectors]:
        first = step.state["first"] * self.beta1 + step.delta * (1 - self.beta1)
        second = self.second_moment(step.state["second"], step.delta * step.delta)
        theta = step.theta + first * self.learning_rate / (second.sqrt() + self.tau)
        return theta, {"first": first, "second": second}

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """v after a mean whose squares these are."""
        raise NotImplementedError


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """v ← β₂·v + (1−β₂)·Δ̄².

    Reddi et al.: Adaptive Federated Optimization, ICLR 2021 (arXiv 2003.00295), Algorithm 2; v begins at τ².
    """

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        return before * self.beta2 + square * (1 - self.beta2)


@dataclass(frozen=True)
class FedYogi(_Adaptive):
    """v ← v − (1−β₂)·Δ̄²·sign(v − Δ̄²): it forgets large squares slowly.

    Reddi et al.: Adaptive Federated Optimization, ICLR 2021 (arXiv 2003.00295), Algorithm 2; v begins at τ².
    """

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        return before - square * torch.sign(before - square) * (1 - self.beta2)


@dataclass(frozen=True)
class FedProx(Checked, Strategy):
    """Every local step is drawn back to the agreed model: μ·(θ_i − θ) is added to its gradient.

    Li et al.: Federated Optimization in Heterogeneous Networks, MLSys 2020 (arXiv 1812.06127), equation 2. The first
    local step has nothing to be drawn back from: with one local step it is plain averaging.
    """

    mu: Annotated[float, Field(ge=0, allow_inf_nan=False, description="μ: how strongly")] = 0.1

    def drift(self, moved: Tensor, state: Vectors, own: Tensor | None) -> Tensor:
        return moved * self.mu


@dataclass(frozen=True)
class Scaffold(Checked, Strategy):
    """Every local step is corrected by c − c_i, so that peers with other data do not pull apart.

    Karimireddy et al.: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020 (arXiv 1910.06378),
    Algorithm 1 with option II, in which c_i becomes the mean of the peer's own gradients: with plain SGD that is
    c_i − c + (x − y_i)/(K·η). The change of c_i travels behind the update and costs as many bytes; the agreed c moves
    by the sum of the changes over all peers of the run.
    """

    learning_rate: LearningRate = 1.0
    remembers: ClassVar[bool] = True

    def init(self, theta: Tensor) -> Vectors:
        return {"control": torch.zeros_like(theta)}

    def apply(self, step: StrategyStep) -> tuple[Tensor, Vectors]:
        assert step.news is not None
        share = step.contributions / (step.peers or step.contributions)
        return step.theta + step.delta * self.learning_rate, {"control": step.state["control"] + step.news * share}

    def drift(self, moved: Tensor, state: Vectors, own: Tensor | None) -> Tensor:
        return state["control"] if own is None else state["control"] - own

    def news(self, gradient: Tensor, own: Tensor) -> Tensor:
        return gradient - own
