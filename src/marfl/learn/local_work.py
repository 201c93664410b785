"""The local work of an iteration: what a peer computes besides averaging, which is its local steps and distillation.

Written once for every engine and every real peer, so that all take the same batches and masks in the same order. An
iteration takes its batches in this order from the peer's stream: B for the local steps, then those of distillation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from marfl.learn.data import Loader
from marfl.learn.distillation import Distilled, Epochs, distill
from marfl.learn.strategy import Plain, Strategy, Vectors
from marfl.learn.update import LocalResult, local_update
from marfl.learn.worker import Worker
from marfl.settings import Distill, Optimizer
from marfl.state import all_finite

NOTHING: Vectors = MappingProxyType({})


class Start(NamedTuple):
    """Where a peer's local update begins."""

    theta: Tensor
    momentum: Tensor
    agreed: Vectors = NOTHING  # the strategy's part of the agreed state
    own: Tensor | None = None  # what the peer remembers for the strategy; None: nothing yet
    home: Tensor | None = None  # its personal layers, where there are any; None: as at the beginning


@dataclass(frozen=True)
class LocalWork:
    """What every peer computes in every iteration, and how much of it."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    batches: int = 1  # B
    distill: Distill | None = None
    rounds: int = 0  # G, where a peer distils or matches distillation on its own: the rounds of a full roster
    matched: bool = False  # no distillation, but as many local steps instead: the baseline of the same compute
    strategy: Strategy = field(default_factory=Plain)

    def active(self, iteration: int) -> bool:
        return self.distill is not None and self.distill.active(iteration)

    def in_groups(self, iteration: int) -> bool:
        """Whether the groups of this iteration exchange models before they average."""
        return self.active(iteration) and not self.matched and self._settings.teacher == "group"

    def steps(self, iteration: int) -> int:
        """Gradient steps that a peer takes on its own, before it meets a group."""
        alone = self.active(iteration) and not self.in_groups(iteration)
        return self.batches + (self.extra_steps if alone else 0)

    @property
    def extra_steps(self) -> int:
        """Gradient steps of distillation in one iteration: G·E·|B|."""
        return self.rounds * self._settings.epochs * self._settings.batches

    def steps_of(self, iteration: int, whole_batches: int) -> int:
        """Gradient steps of a peer in an iteration, distillation included, whose shard has so many batches."""
        if not self.active(iteration):
            return self.batches
        return self.batches + self.rounds * self._settings.epochs * min(self._settings.batches, whole_batches)

    def work(self, iteration: int, group_size: int) -> float:
        """Everything that a peer computes, in gradient steps; a model that is only asked costs a third of one."""
        if not self.active(iteration) or self.matched:
            return float(self.steps(iteration))
        asked = group_size if self.in_groups(iteration) else 2  # the candidates and the student
        return self.batches + self.extra_steps + self.rounds * self._settings.batches * asked / 3

    def consumes(self, iteration: int) -> int:
        """Mini-batches that an iteration takes from a peer's stream."""
        if not self.active(iteration):
            return self.batches
        return self.batches + (self.extra_steps if self.matched else self._settings.batches)

    def update(
        self,
        worker: Worker,
        loader: Loader,
        start: Start,
        iteration: int,
        consumed: int,
        into: Tensor | None = None,
    ) -> LocalResult:
        """The local update; with the previous model as the teacher, its distillation follows at once.

        Its Δ is a fresh vector, or may be written to `into`.
        """
        count = self.steps_of(iteration, loader.whole_batches) if self.matched else self.batches
        batches, theta = loader.minibatches(consumed, iteration, count), start.theta
        guide = _Guide(self.strategy, start, worker.trainable) if self.strategy.is_local else None
        correct = guide.correct if guide else None
        worker.home.move_in(start.home)
        result = local_update(worker, theta, start.momentum, batches, self.optimizer, correct, into)
        if guide and self.strategy.remembers:
            result = replace(result, news=guide.news(theta.numel()))
        if worker.home:
            home = worker.home.kept()
            result = replace(result, home=home, finite=result.finite and all_finite(home))
        if result.finite and self.active(iteration) and not self.matched and self._settings.teacher == "previous":
            for round in range(self.rounds):
                result = self.distill_round(worker, loader, result, [theta], iteration, consumed, round).result
        return result

    def distill_round(
        self,
        worker: Worker,
        loader: Loader,
        before: LocalResult,
        candidates: Sequence[Tensor],
        iteration: int,
        consumed: int,
        round: int,
    ) -> Distilled:
        """One round (counted from 0) of distillation from these models, in an iteration that began at `consumed`."""
        epochs = self._epochs(loader, iteration, consumed + self.batches, round)
        return distill(worker, before, candidates, epochs, self._settings, iteration, self.optimizer)

    def _epochs(self, loader: Loader, iteration: int, first: int, round: int) -> Epochs:
        """The round's batches, as many as the shard has; each step has a number, which decides its dropout masks."""
        settings = self._settings
        count = min(settings.batches, loader.whole_batches)
        begin = self.batches + round * settings.epochs * settings.batches
        return [
            [loader.minibatch(first + b, iteration, begin + epoch * settings.batches + b) for b in range(count)]
            for epoch in range(settings.epochs)
        ]

    @property
    def _settings(self) -> Distill:
        assert self.distill is not None
        return self.distill


class _Guide:
    """What a strategy does in the local steps of one peer. Buffers have no gradient, and are none of its business."""

    def __init__(self, strategy: Strategy, start: Start, trainable: int) -> None:
        self._strategy, self._start, self._trained = strategy, start, slice(trainable)
        own = start.own
        if strategy.remembers and own is None:
            own = torch.zeros(trainable)
        self._own, self._steps = own, 0
        self._total = torch.zeros(trainable) if strategy.remembers else None  # of the gradients

    def correct(self, gradient: Tensor, delta: Tensor) -> None:
        raw = gradient[self._trained]
        if self._total is not None:
            self._total += raw
            self._steps += 1
        raw += self._strategy.drift(delta[self._trained], self._start.agreed, self._own)

    def news(self, length: int) -> Tensor:
        """What travels behind Δ, as long as Δ."""
        assert self._total is not None
        assert self._own is not None
        whole = torch.zeros(length)
        whole[self._trained] = self._strategy.news(self._total / self._steps, self._own)
        return whole
