"""Where local work runs: the CPU, or another device beside it.

Whatever peers agree on stays on the CPU in fp32: the flat vectors, the optimizer's steps, losses and metrics. Another
device holds a copy of the model, which runs forward and backward; `Elsewhere` carries vectors there and gradients back.
A task needs to know nothing of it, as long as it calls its model as a whole: inputs go to the device, and outputs come
back to the CPU. This was never run on such a device: tests use a copy on the CPU, and the meta device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from marfl.errors import InputError
from marfl.learn.data import map_tensors


def find_device(name: str) -> torch.device | None:
    """The device of a setting, None for the CPU; `InputError` for one that is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cpu":
        return None
    device = torch.device(name)
    count = torch.cuda.device_count() if device.type == "cuda" else int(torch.backends.mps.is_available())
    if (device.index or 0) >= count:
        raise InputError(f"device = {name}: there is no such device here; torch sees {count} of {device.type}")
    return device


class Elsewhere:
    """A module's tensors on another device, as two flat vectors like those on the CPU."""

    def __init__(self, module: nn.Module, flat: Tensor, device: torch.device) -> None:
        module.to(device)
        self.device = device
        self.flat = flat.to(device, copy=True)
        self.grad = torch.zeros_like(self.flat)
        module.register_forward_pre_hook(self._bring, with_kwargs=True)
        module.register_forward_hook(self._fetch)

    def _bring(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        there = [_moved(each, self.device) for each in arguments]
        return tuple(there), {name: _moved(each, self.device) for name, each in named.items()}

    def _fetch(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        return _moved(output, torch.device("cpu"))

    def add_gradient(self, grad: Tensor) -> None:
        """Add what a backward pass left there to the gradient on the CPU."""
        grad += self.grad.to(grad.device)


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, also those in tuples, lists and mappings, on another device; whatever else it is stays as it is."""
    if isinstance(value, Tensor | tuple | list | dict):
        return map_tensors(lambda tensor: tensor.to(device), value)
    return value
