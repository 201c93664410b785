"""The agreed state of exact semantics (the global model), and how a mean update moves it (FedOpt's server update).

No server computes it: every engine and every peer applies this one rule to the same mean. The state is (t, θ, m) and
what the strategy keeps (`marfl.learn.strategy`), which says what the mean does to θ. What travels is Δ; with
``momentum = "send"`` the peers' momenta travel behind it, and a strategy's news behind those. With "derive", m follows
from the mean update alone (−Δ̄/(η·B), because Δ = −η·m): it is the momentum of the local steps, whatever the strategy
makes of the mean. With "local" each peer keeps its own and the agreed state has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from marfl.learn.local_work import LocalWork
from marfl.learn.strategy import Plain, Strategy, StrategyStep, begin, moved_by, part_of
from marfl.learn.update import LocalResult, derive_momentum
from marfl.settings import Optimizer
from marfl.state import Snapshot, new_vector


@dataclass(frozen=True)
class Agreement:
    """What peers send of a local update, and the state that all of them reach with the mean of it."""

    local_work: LocalWork
    momentum: str = "derive"  # "derive", "send" or "local"
    trainable: int | None = field(default=None, kw_only=True)  # values before the buffers; None: all of them
    peers: int = field(default=0, kw_only=True)  # of the run; 0 where nobody knows

    @property
    def optimizer(self) -> Optimizer:
        return self.local_work.optimizer

    @property
    def strategy(self) -> Strategy:
        return self.local_work.strategy

    @property
    def vectors(self) -> int:
        """How many vectors of the model's length travel."""
        return 1 + (self.momentum == "send") + self.strategy.remembers

    def values(self, length: int) -> int:
        """How many values travel for a model of this length."""
        return self.vectors * length

    def start(self, theta: Tensor) -> Snapshot:
        """Everybody begins with θ⁰ and m⁰ = 0."""
        vectors = (
            {"theta": theta} if self.momentum == "local" else {"theta": theta, "momentum": torch.zeros_like(theta)}
        )
        return Snapshot(0, vectors | begin(self.strategy, theta[: self.trainable]), {})

    def outgoing(self, result: LocalResult) -> Tensor:
        """What a peer sends of its local update."""
        parts = [result.delta]
        parts += [result.momentum] if self.momentum == "send" else []
        parts += [result.news] if result.news is not None else []
        return torch.cat(parts) if len(parts) > 1 else result.delta

    def advance(self, state: Snapshot, mean: Tensor, contributions: int) -> Snapshot:
        """The next agreed state. Everyone computes it from the same bits, so everyone ends on the same bits."""
        theta = state.vectors["theta"]
        delta = mean[: theta.numel()]
        vectors = {"theta": torch.add(theta, delta, out=new_vector(theta.numel()))}
        if not isinstance(self.strategy, Plain):
            vectors |= self._moved(state, mean, contributions, vectors["theta"])
        if self.momentum == "send":
            vectors["momentum"] = mean[theta.numel() : 2 * theta.numel()].clone()
        elif self.momentum == "derive":
            vectors["momentum"] = derive_momentum(
                state.vectors["momentum"],
                delta,
                learning_rate=self.optimizer.learning_rate,
                batches=self.local_work.steps(state.version + 1),
            )
        return Snapshot(state.version + 1, vectors, {})

    def _moved(self, state: Snapshot, mean: Tensor, contributions: int, theta: Tensor) -> dict[str, Tensor]:
        """What the strategy keeps; the trainable part of the new θ is as it says, and buffers are averaged."""
        trained, length = slice(self.trainable), theta.numel()
        news = mean[-length:][trained] if self.strategy.remembers else None
        step = StrategyStep(
            state.vectors["theta"][trained], mean[:length][trained], part_of(state.vectors), state.version + 1,
            contributions, self.peers, news,
        )  # fmt: skip
        theta[trained], kept = moved_by(self.strategy, step)
        return kept
