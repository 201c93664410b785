"""One reusable model whose parameters and gradients are views into two flat vectors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from marfl.errors import BrokenPromise, InputError
from marfl.learn.data import MiniBatch
from marfl.learn.device import Elsewhere
from marfl.learn.models import dropout_context
from marfl.learn.task import Task
from marfl.rng import seeded_torch
from marfl.settings import Optimizer
from marfl.state import flatten, layout_of, personal_names, trainable_values, travelling

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the names of the two settings in glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


class Worker:
    """Steps any number of peers, one after the other, on one model.

    `flat` is the model (trainable parameters, then floating buffers: the order of `marfl.state`) and `grad` the
    gradient; the module's tensors are views of them, so an update is a few vector operations and nothing is gathered.
    The same inputs give the same bits in any process on one CPU type, provided that torch runs on one thread: calling
    `torch.set_num_threads(1)` is the caller's duty. With a `device`, the module is there, and its tensors are views of
    copies of the two vectors.
    """

    def __init__(self, task: Task, module: nn.Module, device: torch.device | None = None) -> None:
        self.task = task
        self.module = module
        self.layout = layout_of(module)
        self.flat = flatten(module)
        self.grad = torch.zeros_like(self.flat)
        self._elsewhere = Elsewhere(module, self.flat, device) if device is not None else None
        flat, grad = (self._elsewhere.flat, self._elsewhere.grad) if self._elsewhere else (self.flat, self.grad)
        self.trainable = trainable_values(module)  # those before the buffers
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        names = travelling(module)
        for slot, tensor in zip(self.layout.slots, names.values(), strict=True):
            if tensor.dtype != torch.float32:
                raise InputError(f"layer {slot.name} is {slot.dtype}: local training needs float32 layers")
            part = slice(slot.offset, slot.offset + slot.length)
            # `.data =` keeps each tensor's own version counter: a change of one never looks like a change of another.
            tensor.data = flat[part].view(slot.shape)
            if isinstance(tensor, nn.Parameter):
                tensor.grad = grad[part].view(slot.shape)
                self._gradients.append((tensor, tensor.grad))
            else:
                owner, _, name = slot.name.rpartition(".")
                self._buffers.append((module.get_submodule(owner), name, tensor))
        self.home = PersonalLayers(module)
        here = names.keys() | personal_names(module)
        stays = [(name, tensor) for name, tensor in module.named_buffers() if name not in here]
        self._untravelled = [(tensor, tensor.clone()) for _, tensor in stays]

    def load(self, theta: Tensor) -> None:
        """Become the model θ. Buffers that do not travel start afresh: nothing leaks from one peer to the next."""
        if theta.shape != self.flat.shape:
            raise InputError(f"the flat vector has shape {list(theta.shape)}, this model needs {list(self.flat.shape)}")
        self.flat.copy_(theta)
        self._send()
        for tensor, fresh in self._untravelled:
            tensor.copy_(fresh)

    def layers(self) -> dict[str, Tensor]:
        """The trainable layers by name, in the order of the flat vector: views of it."""
        return {
            slot.name: self.flat[slot.offset : slot.offset + slot.length].view(slot.shape)
            for slot in self.layout.slots
            if slot.offset < self.trainable
        }

    def differentiate(self, minibatch: MiniBatch, loss: Callable[[], Tensor] | None = None) -> float:
        """The task's loss (or another) on a mini-batch; leaves its gradient in `grad`."""
        self.grad.zero_()
        self.home.grad.zero_()
        return self.accumulate(minibatch.keys, loss or (lambda: self.task.loss(self.module, minibatch.batch)))

    def accumulate(self, keys: Tensor, loss: Callable[[], Tensor]) -> float:
        """Add the gradient of `loss()` to `grad`, with the dropout masks that `keys` name; returns the loss."""
        self._send()
        with dropout_context(keys), seeded_torch(int(keys[0]), "plain dropout"):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        if self._elsewhere is not None:
            self._elsewhere.add_gradient(self.grad)
        for parameter, view in (*self._gradients, *self.home.gradients):
            if parameter.grad is not view:
                raise BrokenPromise("the task's loss replaced a parameter's .grad: its gradient cannot be found")
        return value.item()

    def _send(self) -> None:
        """Let the copy on another device, if there is one, be the model in `flat`, without a gradient."""
        if self._elsewhere is not None:
            self._elsewhere.flat.copy_(self.flat)
            self._elsewhere.grad.zero_()

    def track_buffers(self) -> None:
        """Take buffers that the forward pass replaced, rather than changed in place, back into `flat`."""
        for owner, name, view in (*self._buffers, *self.home.buffers):
            current = owner.get_buffer(name)
            if current is not view:
                view.copy_(current.detach())
                setattr(owner, name, view)
        if self._elsewhere is not None:
            self.flat[self.trainable :] = self._elsewhere.flat[self.trainable :].to(self.flat.device)


class PersonalLayers:
    """The layers of a worker's model that never travel: values and gradients as views of two flat vectors of their own.

    What a peer has at home is one vector, its values and then their momentum. `Worker.load` leaves it as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        names = personal_names(module)
        tensors = {name: t for name, t in (*module.named_parameters(), *module.named_buffers()) if name in names}
        self.flat = torch.cat([t.detach().reshape(-1) for t in tensors.values()]) if tensors else torch.empty(0)
        self.grad, self.velocity = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        offset = 0
        for name, tensor in tensors.items():
            part = slice(offset, offset := offset + tensor.numel())
            tensor.data = self.flat[part].view(tensor.shape)
            if isinstance(tensor, nn.Parameter):
                tensor.grad = self.grad[part].view(tensor.shape)
                self.gradients.append((tensor, tensor.grad))
            else:
                owner, _, last = name.rpartition(".")
                self.buffers.append((module.get_submodule(owner), last, tensor))
        self._start = self.flat.clone()

    def __bool__(self) -> bool:
        return bool(self.flat.numel())

    def move_in(self, kept: Tensor | None) -> None:
        """Become the layers of one peer; None: as they were at the beginning."""
        values, velocity = (self._start, torch.zeros_like(self.flat)) if kept is None else kept.view(2, -1)
        self.flat.copy_(values)
        self.velocity.copy_(velocity)

    def kept(self) -> Tensor:
        """What the peer has at home now: a fresh vector."""
        return torch.cat((self.flat, self.velocity))

    def descend(self, optimizer: Optimizer) -> None:
        """One step; buffers have no gradient, and stay as the forward pass left them."""
        optimizer.descend(self.velocity, self.grad, self.flat)


def keep_freed_memory() -> bool:
    """Ask glibc not to return freed memory to the system; False where there is no glibc, and nothing was done.

    A training step allocates and frees the same large tensors every time. A page that was returned must be cleared by
    the kernel when it is used again, at more than a tenth of a step on the paper's CNN (benchmarks/local_step.py). The
    setting is for the whole process and costs its peak in memory, so the processes that do nothing but train call it,
    and a library user decides for himself.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
