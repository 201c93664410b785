"""The gradients of single records of plain networks, from one pass over a slice of them: two to three times faster.

The gradient of a linear layer for one record is the outer product of its output's gradient and its input, that of a
convolution the product of two matrices (Goodfellow 2015; Rochette, Manoel and Tramel 2019). One forward and one
backward pass over the slice gives both for all records. Nothing may mix records on the way, so only networks are taken
that are made of layers known not to, with the plain cross entropy of a classifier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from marfl.learn.data import Batch
from marfl.learn.models import Cnn, SeededDropout, dropout_context
from marfl.learn.task import ClassificationTask
from marfl.learn.worker import Worker

KNOWN = (  # exactly these types: they take every row by itself
    nn.Sequential, Cnn, nn.Linear, nn.Conv2d, SeededDropout, nn.Dropout, nn.Identity, nn.Flatten, nn.ReLU, nn.LeakyReLU,
    nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.SiLU, nn.MaxPool2d, nn.AvgPool2d,
)  # fmt: skip


class Outer(NamedTuple):
    """The gradients of a linear layer's weights: for every record an outer product, which need not be written out."""

    left: Tensor  # [records, outputs]
    right: Tensor  # [records, inputs]

    @property
    def values(self) -> int:
        return self.left.shape[1] * self.right.shape[1]


Layer: TypeAlias = Tensor | Outer  # the gradients of one layer, by record


class _Call(NamedTuple):
    """What went through a layer."""

    given: Tensor
    result: Tensor


class LayerGradients:
    """Of a worker whose network is `plain`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._owners = [slot.name.rpartition(".")[::2] for slot in worker.layout.slots]  # (module, weight or bias)

    def of_slice(self, batch: Batch, keys: Tensor) -> list[Layer]:
        """The gradients of every record, by layer in the order of the flat vector."""
        worker, calls = self._worker, dict[str, _Call]()
        assert isinstance(worker.task, ClassificationTask)
        with _listening(worker.module, calls), dropout_context(keys):
            loss = worker.task.sample_losses(worker.module, batch).sum()
        names = list(dict.fromkeys(name for name, _ in self._owners))
        backward = torch.autograd.grad(loss, [calls[name].result for name in names])
        passed = dict(zip(names, backward, strict=True))
        return [self._layer(name, kind, calls[name].given, passed[name]) for name, kind in self._owners]

    def _layer(self, name: str, kind: str, given: Tensor, passed: Tensor) -> Layer:
        module = self._worker.module.get_submodule(name)
        if isinstance(module, nn.Linear):
            return Outer(passed, given.detach()) if kind == "weight" else passed
        assert isinstance(module, nn.Conv2d)
        if kind == "bias":
            return passed.flatten(2).sum(dim=2)
        seen = _windows(module, given.detach())
        by_place = passed.permute(0, 2, 3, 1).flatten(1, 2)
        weights = torch.bmm(by_place.transpose(1, 2), seen)  # [records, out, places of the kernel · channels]
        return weights.view(*weights.shape[:2], -1, module.in_channels).transpose(2, 3).flatten(1)


def _windows(layer: nn.Conv2d, given: Tensor) -> Tensor:
    """What the kernel sees at each place, channels last: [records, places, places of the kernel · channels].

    That copies whole runs of channels, which takes half the time of torch's own unfold.
    """
    (high, wide), (down, right), (above, beside) = layer.kernel_size, layer.stride, _pair(layer.padding)
    rows = functional.pad(given, (beside, beside, above, above)).permute(0, 2, 3, 1)
    found = rows.unfold(1, high, down).unfold(2, wide, right)  # [records, down, right, channels, high, wide]
    return found.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)


def _pair(padding: object) -> tuple[int, int]:
    assert isinstance(padding, tuple)  # `plain` has seen to it
    above, beside = padding
    return above, beside


def plain(worker: Worker) -> bool:
    """Whether the network and its loss take every record by itself, for sure."""
    task, modules = worker.task, [type(module) for module in worker.module.modules()]
    if not isinstance(task, ClassificationTask) or any(kind not in KNOWN for kind in modules):
        return False
    usual = (ClassificationTask.sample_losses, ClassificationTask.logits)
    if (type(task).sample_losses, type(task).logits) != usual or _tied(worker.module) or _hooked(worker.module):
        return False
    return all(_usual(module) for module in worker.module.modules() if isinstance(module, nn.Conv2d))


def _tied(network: nn.Module) -> bool:
    """Whether two layers share a parameter: its gradient comes from both."""
    return len(list(network.parameters())) < len(list(network.named_parameters(remove_duplicate=False)))


def _hooked(network: nn.Module) -> bool:
    """Whether something of the user's own is called on the way, which may mix records."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in network.modules()
    )


def _usual(layer: nn.Conv2d) -> bool:
    alone = layer.groups == 1 and layer.dilation == (1, 1)
    return alone and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


@contextmanager
def _listening(module: nn.Module, calls: dict[str, _Call]) -> Iterator[None]:
    """Note what goes through every layer with parameters; `ValueError` for what is not as expected."""

    def hook(name: str, layer: nn.Module, given: tuple[Tensor], result: Tensor) -> None:
        if name in calls or (isinstance(layer, nn.Linear) and given[0].dim() != 2):
            raise ValueError("a layer is used twice, or on more than one vector of a record")
        calls[name] = _Call(given[0], result)

    handles = [
        layer.register_forward_hook(lambda layer, given, result, name=name: hook(name, layer, given, result))
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
