"""Many peers of a small MLP at once: one batched matmul per layer over a stack [peers, …].

For heads where the pooled shortcut does not apply (several batches, or each peer from its own start). The same as one
by one up to rounding, not bit for bit; a peer whose data is broken spoils only its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from marfl.errors import InputError
from marfl.learn.data import Batch, join, take
from marfl.learn.dropout import SeededDropout, dropout_context
from marfl.learn.loader import MiniBatch
from marfl.learn.task import PoolableTask, row_loss_obstacle
from marfl.learn.update import Optimizer
from marfl.learn.worker import Worker


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


class _Stack(nn.Module):
    """N copies of a Sequential, as views into one flat matrix [N, P] and one gradient matrix; rows are peer-major."""

    def __init__(self, worker: Worker, thetas: Tensor) -> None:
        super().__init__()
        self.peers = len(thetas)
        self.flat = thetas.clone(memory_format=torch.contiguous_format)
        self.gradient = torch.zeros_like(self.flat)
        self._layers = tuple(worker.module.named_children())
        self._leaves: dict[str, Tensor] = {}
        for slot in worker.layout.slots:
            part = slice(slot.offset, slot.offset + slot.length)
            # A leaf on the view's storage: autograd adds into the gradient matrix instead of scattering slices.
            leaf = self.flat[:, part].view(self.peers, *slot.shape).detach().requires_grad_()
            leaf.grad = self.gradient[:, part].view(self.peers, *slot.shape)
            self._leaves[slot.name] = leaf

    def forward(self, inputs: Tensor) -> Tensor:
        for name, layer in self._layers:
            inputs = self._linear(name, inputs) if isinstance(layer, nn.Linear) else layer(inputs)
        return inputs

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        stacked = inputs.view(self.peers, -1, inputs.shape[-1])
        weights = self._leaves[f"{name}.weight"].transpose(1, 2)
        bias = self._leaves.get(f"{name}.bias")
        outputs = stacked @ weights if bias is None else torch.baddbmm(bias[:, None], stacked, weights)
        return outputs.flatten(0, 1)


def batched_update(
    worker: Worker, thetas: Tensor, momenta: Tensor, steps: Sequence[Sequence[MiniBatch]], optimizer: Optimizer
) -> BatchedResult:
    """Step every peer i from row i of θ and m [peers, P] over `steps[0][i]`, `steps[1][i]`, …

    Holds about five such matrices: give it peers in chunks. A common start is `theta.expand(peers, -1)`.
    """
    obstacle = batching_obstacle(worker)
    if obstacle or not isinstance(worker.task, PoolableTask):
        raise InputError(f"batched update: {obstacle}")
    if not steps or any(len(step) != len(thetas) for step in steps):
        raise InputError(f"batched update: needs at least one step, each with {len(thetas)} mini-batches")
    stack = _Stack(worker, thetas)
    velocities = momenta.clone(memory_format=torch.contiguous_format)
    deltas = torch.zeros_like(stack.flat)
    losses = torch.zeros(len(thetas))
    for number, step in enumerate(steps):
        if number:
            torch.add(thetas, deltas, out=stack.flat)
        losses += _differentiate(stack, worker.task, step)
        optimizer.descend(velocities, stack.gradient, deltas)
    finite = torch.isfinite(losses) & torch.isfinite(deltas).all(dim=1)
    return BatchedResult(deltas, velocities, losses / len(steps), finite)


def _differentiate(stack: _Stack, task: PoolableTask, step: Sequence[MiniBatch]) -> Tensor:
    """The gradient of every peer's own mean loss, left in the stack; returns the losses [peers]."""
    batch, keys, coefficients = _padded(step)
    stack.gradient.zero_()
    with dropout_context(keys):
        losses = (task.sample_losses(stack, batch) * coefficients).view(stack.peers, -1).sum(dim=1)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    return losses.detach()


def _padded(step: Sequence[MiniBatch]) -> tuple[Batch, Tensor, Tensor]:
    """All batches in one, each filled up to the longest by repeating its first row at coefficient 0."""
    rows = torch.tensor([minibatch.rows for minibatch in step])
    position = torch.arange(int(rows.max()))
    filled = position < rows[:, None]
    source = ((rows.cumsum(0) - rows)[:, None] + torch.where(filled, position, 0)).flatten()
    coefficients = torch.where(filled, 1 / rows[:, None], 0.0).flatten()
    batch = join([minibatch.batch for minibatch in step])
    keys = torch.cat([minibatch.keys for minibatch in step])
    return take(batch, source), keys[source], coefficients
