"""The local update: damped momentum SGD (Reddi et al. 2020) on flat vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from marfl.errors import InputError
from marfl.learn.data import MiniBatch
from marfl.learn.worker import Worker
from marfl.settings import Optimizer
from marfl.state import all_finite

Correction: TypeAlias = Callable[[Tensor, Tensor], None]  # changes a gradient in place; also given: Δ so far
BLOCK = 1 << 15  # values: a block of four vectors stays in a core's cache between two operations


@dataclass(frozen=True, eq=False)
class LocalResult:
    """What a local update (of one peer, or the mean of many) came to."""

    start: Tensor  # θ before: the caller's own vector, not a copy
    delta: Tensor  # Δ: minus η times the sum of the momenta; for buffers the change that the forward passes made
    momentum: Tensor  # m after; 0 for buffers, which have no gradient
    loss: float  # mean over the samples
    samples: int  # trained on, repeats included
    finite: bool  # False: the loss or Δ holds a NaN or an infinity, and Δ must not be used
    home: Tensor | None = None  # the peer's personal layers after it, where it has any
    news: Tensor | None = None  # what travels behind Δ, where a strategy has peers remember something

    @property
    def theta(self) -> Tensor:
        """θ after: start + Δ, a fresh vector."""
        return self.start + self.delta


def local_update(
    worker: Worker,
    theta: Tensor,
    momentum: Tensor,
    minibatches: Iterable[MiniBatch],
    optimizer: Optimizer,
    correct: Correction | None = None,
    into: Tensor | None = None,
) -> LocalResult:
    """Step from (θ, m) over the mini-batches, one step each. The inputs are left as they are.

    A NaN or an infinity is reported in the result and never raised. Floating buffers are part of Δ: whatever the
    momentum holds for them is ignored. Δ is a fresh vector, or `into`, whose values do not matter.
    """
    worker.load(theta)
    velocity, delta = torch.empty_like(momentum), torch.empty_like(theta) if into is None else into
    if correct is not None:  # it reads Δ, also before the first step
        velocity.copy_(momentum)[worker.trainable :] = 0
        delta.zero_()
    state, began = LocalResult(theta, delta, velocity, 0.0, 0, True), momentum if correct is None else None
    steps = ((minibatch, None) for minibatch in minibatches)
    loss, samples = walk(worker, state, steps, optimizer, correct, began)
    if not samples:
        raise InputError("a local update needs at least one mini-batch")
    finite = math.isfinite(loss) and all_finite(delta)
    return LocalResult(theta, delta, velocity, loss / samples, samples, finite)


def walk(
    worker: Worker,
    state: LocalResult,
    steps: Iterable[tuple[MiniBatch, Callable[[], Tensor] | None]],
    optimizer: Optimizer,
    correct: Correction | None = None,
    began: Tensor | None = None,
) -> tuple[float, int]:
    """One step for every (mini-batch, loss on it or None for the task's), from the θ + Δ that the worker holds.

    Δ and m change in place; `correct` may change the gradient of each step before. With `began`, the momentum to begin
    with, what Δ and m hold before the first step does not matter: Δ is 0 then. Returns the sum of the losses over the
    samples, and how many samples there were.
    """
    theta, delta, buffers = state.start, state.delta, slice(worker.trainable, None)
    total, samples = 0.0, 0
    for minibatch, loss in steps:
        if samples:
            torch.add(theta, delta, out=worker.flat)
        total += worker.differentiate(minibatch, loss) * minibatch.rows
        samples += minibatch.rows
        worker.track_buffers()
        if correct is not None:
            correct(worker.grad, delta)
        if began is not None:
            first_step(optimizer, began, worker.grad, state)
            state.momentum[buffers], began = 0, None
        else:
            optimizer.descend(state.momentum, worker.grad, delta)
        torch.sub(worker.flat[buffers], theta[buffers], out=delta[buffers])
        if worker.home:
            worker.home.descend(optimizer)
    return total, samples


def first_step(optimizer: Optimizer, began: Tensor, gradient: Tensor, state: LocalResult) -> None:
    """`Optimizer.descend` on a copy of a momentum and on a Δ of zeros, bit for bit, in two walks instead of nine.

    0 − η·m is never written −η·m: the two differ in the sign of a zero.
    """
    zero = torch.zeros(())
    for start in range(0, len(gradient), BLOCK):
        part = slice(start, start + BLOCK)
        velocity = torch.mul(began[part], optimizer.decay, out=state.momentum[part])
        velocity.add_(gradient[part], alpha=1 - optimizer.decay)
        torch.add(zero, velocity, alpha=-optimizer.learning_rate, out=state.delta[part])


def derive_momentum(
    previous: Tensor, mean_delta: Tensor, *, learning_rate: float, batches: int = 1, share: float = 1.0
) -> Tensor:
    """The mean momentum from the mean update alone: m = (1−u)·m_prev − Δ̄/(η·B), because Δ = −η·m.

    Exact for one batch B and a common start; for more batches it only tracks it. `share` is u, the weight share of
    those aggregators that updated. What it says for buffers means nothing, and `local_update` ignores it.
    """
    derived = torch.mul(mean_delta, -1 / (learning_rate * batches))
    return derived if share == 1 else derived.add_(previous, alpha=1 - share)
