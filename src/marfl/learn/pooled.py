"""The pooled shortcut: with a common start and one batch each, N local steps are ONE gradient on the joined batch.

Every peer's m is μ·m + (1−μ)·g_i from the same (θ, m), so the weighted mean of the updates is the update by the
weighted mean of the gradients, and that is the gradient of Σ_i w_i/(Σw·batch_i) Σ_rows loss. No [N, P] state at all.
The same as one by one up to rounding, not bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from marfl.errors import InputError
from marfl.learn.loader import MiniBatch, joined
from marfl.learn.task import PoolableTask, row_loss_obstacle
from marfl.learn.update import LocalResult
from marfl.learn.worker import Worker
from marfl.settings import Optimizer
from marfl.state import all_finite

_PLAIN_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, eq=False)
class PooledGradient:
    """The weighted mean gradient of many peers."""

    gradient: Tensor  # flat; a view of the worker's, valid until its next step
    losses: Tensor  # float64 [peers]: the mean loss of each peer's batch, which tells whose data is broken
    samples: int
    finite: bool


def pooling_obstacle(worker: Worker) -> str | None:
    """Why the pooled shortcut would not be the same as one by one, or None. (`functional.dropout` cannot be seen.)"""
    obstacle = row_loss_obstacle(worker.task)
    if obstacle:
        return obstacle
    if worker.trainable < worker.layout.length:
        return "the model has floating buffers, which depend on the batch"
    for name, module in worker.module.named_modules():
        if isinstance(module, _BATCH_NORM):
            return f"{name} normalises over the batch"
        if isinstance(module, _PLAIN_DROPOUT):
            return f"{name} is a plain dropout: SeededDropout gives every engine the same masks"
    return None


def pooled_gradient(
    worker: Worker, theta: Tensor, minibatches: Iterable[MiniBatch], weights: Sequence[float], *, max_rows: int = 512
) -> PooledGradient:
    """Σ w_i·g_i / Σ w_i at θ, in joined batches of about `max_rows` rows: bounded memory, also for an endless many.

    `minibatches` hold the peers in the order of `weights`, one or several each. Leave peers of weight 0 out.
    """
    task = worker.task
    obstacle = pooling_obstacle(worker)
    if obstacle or not isinstance(task, PoolableTask):
        raise InputError(f"pooling: {obstacle}")
    worker.load(theta)
    worker.grad.zero_()
    shares = _shares(weights)
    losses: list[Tensor] = []
    peers = samples = 0
    for chunk in _chunks(minibatches, max_rows):
        rows = torch.tensor(chunk.rows_of_peers)
        first, peers = peers, peers + len(rows)
        if peers > len(shares):
            break
        losses.append(_accumulate(worker, task, chunk, rows, shares[first:peers] / rows))
        samples += chunk.rows
    if peers != len(shares):
        raise InputError(f"pooling: {peers} mini-batches for {len(shares)} weights; there must be one for each")
    per_peer = torch.cat(losses)
    finite = all_finite(per_peer) and all_finite(worker.grad)
    return PooledGradient(worker.grad, per_peer, samples, finite)


def _accumulate(
    worker: Worker, task: PoolableTask, chunk: MiniBatch, rows: Tensor, coefficients: Tensor
) -> Tensor:
    """Add the gradient of Σ coefficient_i·Σ_rows loss to the worker's; returns each peer's mean loss."""
    row_coefficients = coefficients.to(torch.float32).repeat_interleave(rows)
    kept: list[Tensor] = []

    def loss() -> Tensor:
        row_losses = task.sample_losses(worker.module, chunk.batch)
        kept.append(row_losses.detach())
        return row_losses @ row_coefficients

    worker.accumulate(chunk.keys, loss)
    owners = torch.arange(len(rows)).repeat_interleave(rows)
    return torch.zeros(len(rows), dtype=torch.float64).index_add_(0, owners, kept[0].to(torch.float64)) / rows


def _shares(weights: Sequence[float]) -> Tensor:
    """Weights that add up to 1, in float64."""
    total = math.fsum(weights)
    if not (math.isfinite(total) and total > 0):
        raise InputError(f"pooling: the weights add up to {total}; their sum must be above 0")
    return torch.tensor(weights, dtype=torch.float64) / total


def _chunks(minibatches: Iterable[MiniBatch], max_rows: int) -> Iterator[MiniBatch]:
    chunk: list[MiniBatch] = []
    rows = 0
    for minibatch in minibatches:
        if chunk and rows + minibatch.rows > max_rows:
            yield joined(chunk)
            chunk, rows = [], 0
        chunk.append(minibatch)
        rows += minibatch.rows
    if chunk:
        yield joined(chunk)


def pooled_update(
    worker: Worker,
    theta: Tensor,
    momentum: Tensor,
    minibatches: Iterable[MiniBatch],
    weights: Sequence[float],
    optimizer: Optimizer,
) -> LocalResult:
    """The weighted mean of the local updates of all peers from a common (θ, m), one mini-batch each."""
    pooled = pooled_gradient(worker, theta, minibatches, weights)
    velocity, delta = momentum.clone(), torch.zeros_like(theta)
    optimizer.descend(velocity, pooled.gradient, delta)
    loss = float(pooled.losses @ _shares(weights))
    return LocalResult(theta, delta, velocity, loss, pooled.samples, pooled.finite)
