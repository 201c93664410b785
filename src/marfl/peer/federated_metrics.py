"""Numbers that all peers average along with the model: a loss, an accuracy, whatever a loop wants to know of everybody.

Each number has two values behind the model's in what travels: Σ n·x and Σ n, where n is how much a peer's own x counts.
So they are summed as the update is: exactly, under masks where it is, and in the same roster. Whoever has nothing to
say brings 0 for both. What comes of them is in the agreed state: everybody reads the same bits, latecomers too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from marfl.errors import InputError
from marfl.protocol.fixed_point import LARGEST
from marfl.protocol.tensors import LARGEST_INPUT
from marfl.state import LayerSlot, Layout, Snapshot

PREFIX = "metrics/"  # of their names in a state


class FederatedMetrics:
    """One peer's numbers, by the names that all peers of the run have agreed on."""

    def __init__(self, names: tuple[str, ...], wire: str) -> None:
        self.names = names
        self._largest = LARGEST_INPUT if wire == "fp32" else LARGEST
        self._mine: dict[str, tuple[float, float]] = {}  # n·x and n

    def layout(self, model: Layout) -> Layout:
        """With the numbers behind the model: peers that average others are not averaged with."""
        if not self.names:
            return model
        shape = (2 * len(self.names),)
        return Layout((*model.slots, LayerSlot(f"metrics ({', '.join(self.names)})", shape, "float32", model.length)))

    def note(self, values: Mapping[str, float], weight: float) -> list[str]:
        """Bring these to the next average; which of them cannot be, because they are no finite numbers."""
        if not isinstance(values, Mapping):
            raise InputError(f"mean: {values!r:.50} must be a dict of numbers by name")
        if not 0 <= weight <= self._largest:
            raise InputError(f"mean: weight = {weight}: must be from 0 to {self._largest:g}")
        unknown = [name for name in values if name not in self.names]
        if unknown:
            known = ", ".join(self.names) or "none"
            raise InputError(f"mean: {unknown[0]!r} is not in metrics = {known}: name it when the peer is made")
        numbers = {name: number(f"mean: {name}", value) for name, value in values.items()}
        for name, value in numbers.items():
            if math.isfinite(value) and abs(value) * weight > self._largest:
                raise InputError(f"mean: {name} = {value:g} times weight {weight:g} is beyond ±{self._largest:g}")
        self._mine |= {name: (value * weight, weight) for name, value in numbers.items() if math.isfinite(value)}
        return [name for name, value in numbers.items() if not math.isfinite(value)]

    def brought(self, delta: Tensor, weight: float) -> Tensor:
        """An update with this peer's numbers behind it; the sum counts it so many times."""
        if not self.names:
            return delta
        pairs = [self._mine.get(name, (0.0, 0.0)) for name in self.names]
        share = 1 / weight if weight else 0.0
        return torch.cat((delta, torch.tensor([part * share for pair in pairs for part in pair])))

    def forget(self) -> None:
        """What was said is of no use for another iteration."""
        self._mine.clear()

    def told(self, mean: Tensor, model: int) -> dict[str, float]:
        """What an average of so many values of the model says of the numbers: those that somebody brought."""
        if not self.names:
            return {}
        tail = mean[model:].tolist()
        pairs = zip(self.names, tail[::2], tail[1::2], strict=True)
        return {PREFIX + name: total / count for name, total, count in pairs if count > 0}


def number(name: str, value: Any) -> float:
    """A number that a user's loop gives, also as a tensor of one element; `InputError` for anything else."""
    try:
        return float("text" if isinstance(value, str) else value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} = {value!r:.50}: must be a number") from None


def metrics_of(state: Snapshot) -> dict[str, float]:
    """The numbers in an agreed state."""
    return {name.removeprefix(PREFIX): value for name, value in state.scalars.items() if name.startswith(PREFIX)}


def checked_names(names: tuple[str, ...], *, private: bool, small: bool) -> tuple[str, ...]:
    """The names of a peer's metrics, or `InputError`."""
    if len(set(names)) != len(names) or not all(names):
        raise InputError(f"Peer: metrics = {list(names)}: each needs a name of its own")
    if names and private:
        raise InputError("Peer: metrics would tell of the data beside what is noised: with privacy there are none")
    if names and small:
        raise InputError("Peer: metrics need a wire that carries whole numbers: fp32 or fixed, not int8 or int4")
    return names
