"""The agreed state of exact semantics (the global model), and how a mean update moves it (FedOpt's server update).

No server computes it: every engine and every peer applies this one rule to the same mean. The state is (t, θ, m). What
travels is Δ; with ``momentum = "send"`` the peers' momenta travel behind it. With "derive", m follows from the mean
update alone (−Δ̄/(η·B), because Δ = −η·m); with "local" each peer keeps its own and the agreed state holds
θ only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marfl.learn.local_work import LocalWork
from marfl.learn.update import LocalResult, derive_momentum
from marfl.settings import Optimizer
from marfl.state import Snapshot, new_vector


@dataclass(frozen=True)
class Agreement:
    """What peers send of a local update, and the state that all of them reach with the mean of it."""

    local_work: LocalWork
    momentum: str = "derive"  # "derive", "send" or "local"

    @property
    def optimizer(self) -> Optimizer:
        return self.local_work.optimizer

    @property
    def vectors(self) -> int:
        """How many vectors of the model's length travel."""
        return 2 if self.momentum == "send" else 1

    def values(self, length: int) -> int:
        """How many values travel for a model of this length."""
        return self.vectors * length

    def start(self, theta: Tensor) -> Snapshot:
        """Everybody begins with θ⁰ and m⁰ = 0."""
        vectors = (
            {"theta": theta} if self.momentum == "local" else {"theta": theta, "momentum": torch.zeros_like(theta)}
        )
        return Snapshot(0, vectors, {})

    def outgoing(self, result: LocalResult) -> Tensor:
        """What a peer sends of its local update."""
        return torch.cat((result.delta, result.momentum)) if self.momentum == "send" else result.delta

    def advance(self, state: Snapshot, mean: Tensor) -> Snapshot:
        """The next agreed state. Everyone computes it from the same bits, so everyone ends on the same bits."""
        theta = state.vectors["theta"]
        delta = mean[: theta.numel()]
        vectors = {"theta": torch.add(theta, delta, out=new_vector(theta.numel()))}
        if self.momentum == "send":
            vectors["momentum"] = mean[theta.numel() :].clone()
        elif self.momentum == "derive":
            vectors["momentum"] = derive_momentum(
                state.vectors["momentum"],
                delta,
                learning_rate=self.optimizer.learning_rate,
                batches=self.local_work.steps(state.version + 1),
            )
        return Snapshot(state.version + 1, vectors, {})
