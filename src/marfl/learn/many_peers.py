"""The local updates of many peers at once, in two ways, both the same as one by one up to rounding, not bit for bit.

**Pooled**: with a common start and one batch each, N local steps are ONE gradient on the joined batch. Every peer's m
is μ·m + (1−μ)·g_i from the same (θ, m), so the weighted mean of the updates is the update by the weighted mean of the
gradients, and that is the gradient of Σ_i w_i/(Σw·batch_i) Σ_rows loss. No [N, P] state at all.

**Batched**: one batched matmul per layer over a stack [peers, …] of small MLPs, where pooling does not apply (several
batches, or each peer from its own start). A peer whose data is broken spoils only its own row. The backward pass is
written out: m ← μ·m + (1−μ)·g is then one matrix product that adds into m, and the gradients, which would be the
largest matrix of all, never exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from marfl.errors import InputError
from marfl.learn.data import Batch, MiniBatch, join, joined, take
from marfl.learn.models import SeededDropout, dropout_context
from marfl.learn.task import PoolableTask, row_loss_obstacle
from marfl.learn.update import LocalResult
from marfl.learn.worker import Worker
from marfl.settings import Optimizer
from marfl.state import Layout, all_finite

MOST_ROWS = 512  # of a joined batch
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


def best_rows(worker: Worker) -> int:
    """Rows of a joined batch: large convolutions are fastest while their activations fit the cache."""
    convolves = any(isinstance(module, nn.Conv2d) for module in worker.module.modules())
    return 128 if convolves and worker.trainable > 500_000 else MOST_ROWS


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
    pooled = pooled_gradient(worker, theta, minibatches, weights, max_rows=best_rows(worker))
    velocity, delta = momentum.clone(), torch.zeros_like(theta)
    optimizer.descend(velocity, pooled.gradient, delta)
    loss = float(pooled.losses @ _shares(weights))
    return LocalResult(theta, delta, velocity, loss, pooled.samples, pooled.finite)


@dataclass(frozen=True, eq=False)
class BatchedResult:
    """The local updates of a stack of peers, one row each."""

    deltas: Tensor  # [peers, P]
    momenta: Tensor  # [peers, P]
    losses: Tensor  # [peers]: mean over each peer's steps
    finite: Tensor  # bool [peers]: False where the loss or Δ holds a NaN or an infinity


def batching_obstacle(worker: Worker) -> str | None:
    """Why the model or the task cannot be stacked, or None."""
    obstacle = row_loss_obstacle(worker.task)
    if obstacle:
        return obstacle
    if not isinstance(worker.module, nn.Sequential):
        return "the model is not an nn.Sequential"
    for name, layer in worker.module.named_children():
        if not isinstance(layer, (nn.Linear, nn.ReLU, nn.Flatten, SeededDropout)):
            return f"layer {name} is {type(layer).__name__}, not Linear, ReLU, Flatten or SeededDropout"
    if any(not parameter.requires_grad for parameter in worker.module.parameters()):
        return "the model has frozen parameters"
    return None


def batched_update(
    worker: Worker, thetas: Tensor, momenta: Tensor, steps: Sequence[Sequence[MiniBatch]], optimizer: Optimizer
) -> BatchedResult:
    """Step every peer i from row i of θ and m [peers, P] over `steps[0][i]`, `steps[1][i]`, …

    Holds two or three more such matrices: give it peers in chunks, which also suits the cache.
    A common start is `theta.expand(peers, -1)`.
    """
    obstacle = batching_obstacle(worker)
    if obstacle or not isinstance(worker.task, PoolableTask):
        raise InputError(f"batched update: {obstacle}")
    if not steps or any(len(step) != len(thetas) for step in steps):
        raise InputError(f"batched update: needs at least one step, each with {len(thetas)} mini-batches")
    velocities = momenta.clone(memory_format=torch.contiguous_format)
    deltas = torch.zeros_like(velocities)
    losses = torch.zeros(len(thetas))
    for number, step in enumerate(steps):
        stack = _Stack(worker, thetas + deltas if number else thetas, velocities, optimizer.decay)
        losses += stack.descend(worker.task, step)
        deltas.add_(velocities, alpha=-optimizer.learning_rate)
    finite = torch.isfinite(losses) & torch.tensor([all_finite(delta) for delta in deltas])
    return BatchedResult(deltas, velocities, losses / len(steps), finite)


class _Stack(nn.Module):
    """Copies of a Sequential, one per row of θ [peers, P]; takes a joined batch whose rows are peer-major."""

    def __init__(self, worker: Worker, thetas: Tensor, momenta: Tensor, decay: float) -> None:
        super().__init__()
        self._peers = len(thetas)
        self._decay = decay
        self._children = tuple(worker.module.named_children())
        self._weights = _views(worker.layout, thetas)
        self._momenta = _views(worker.layout, momenta)
        self._tape: list[Callable[[Tensor], Tensor]] = []  # output gradient to input gradient, layer by layer

    def descend(self, task: PoolableTask, step: Sequence[MiniBatch]) -> Tensor:
        """m ← μ·m + (1−μ)·g for every peer, g the gradient of its own mean loss; returns the losses [peers]."""
        batch, keys, coefficients = _padded(step)
        with dropout_context(keys):
            losses = (task.sample_losses(self, batch) * coefficients).view(self._peers, -1).sum(dim=1)
        (gradient,) = torch.autograd.grad(losses.sum(), self._logits)
        for backward in reversed(self._tape):
            gradient = backward(gradient)
        return losses.detach()

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            for name, layer in self._children:
                inputs = self._linear(name, inputs) if isinstance(layer, nn.Linear) else self._pointwise(layer, inputs)
        self._logits = inputs.requires_grad_()
        return self._logits

    def _pointwise(self, layer: nn.Module, inputs: Tensor) -> Tensor:
        if isinstance(layer, nn.ReLU):
            self._tape.append((inputs > 0).mul)
        elif isinstance(layer, SeededDropout) and layer.active:
            mask = layer.mask(inputs)
            self._tape.append(mask.mul)
            return inputs * mask
        outputs: Tensor = layer(inputs)
        return outputs

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        if inputs.dim() != 2:
            raise InputError(f"batched update: layer {name} got {inputs.dim()} dimensions, only [rows, features] works")
        stacked = inputs.view(self._peers, -1, inputs.shape[1])
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        first = not self._tape

        def backward(gradient: Tensor) -> Tensor:
            gradient = gradient.view(self._peers, -1, gradient.shape[1])
            self._momenta[f"{name}.weight"].baddbmm_(
                gradient.transpose(1, 2), stacked, beta=self._decay, alpha=1 - self._decay
            )
            if bias is not None:
                self._momenta[f"{name}.bias"].mul_(self._decay).add_(gradient.sum(dim=1), alpha=1 - self._decay)
            return gradient if first else (gradient @ weight).flatten(0, 1)  # nobody asks for the input's gradient

        self._tape.append(backward)
        outputs = stacked @ weight.transpose(1, 2)
        return (outputs if bias is None else outputs.add_(bias[:, None])).flatten(0, 1)


def _views(layout: Layout, stack: Tensor) -> dict[str, Tensor]:
    return {
        slot.name: stack[:, slot.offset : slot.offset + slot.length].view(len(stack), *slot.shape)
        for slot in layout.slots
    }


def _padded(step: Sequence[MiniBatch]) -> tuple[Batch, Tensor, Tensor]:
    """All batches in one, each filled up to the longest by repeating its first row at coefficient 0."""
    rows = torch.tensor([minibatch.rows for minibatch in step])
    position = torch.arange(int(rows.max()))
    filled = position < rows[:, None]
    coefficients = torch.where(filled, 1 / rows[:, None], 0.0).flatten()
    batch = join([minibatch.batch for minibatch in step])
    keys = torch.cat([minibatch.keys for minibatch in step])
    if filled.all():
        return batch, keys, coefficients
    source = ((rows.cumsum(0) - rows)[:, None] + torch.where(filled, position, 0)).flatten()
    return take(batch, source), keys[source], coefficients
