"""Privacy of one record: which of them are in a batch, and the sum of their clipped gradients in integers.

Every record is in its peer's batch with one public probability, in secret and whatever the others are (Poisson
sampling); the size of a batch varies, and may be 0. The gradient of each record is clipped to a norm of C and
**truncated towards zero by itself**, then they are added: so a record that is added or removed changes the sum by a
vector of integers with a norm of at most L (`lattice`). Truncating the sum instead could change every value of it by
one more. Nobody divides by its own number of records: what the sum is divided by is public, and the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marfl.dp.discrete_gaussian import Words
from marfl.errors import InputError

MOST_STEPS_POWER = 20  # of L: up to 16 records' values add up exactly in fp32
BLOCK = 4096  # values whose squares are added in fp32, with a relative error below 4098·2⁻²⁴ = 2⁻¹¹·⁹
NORM_ROOM = 1 - 2.0**-11  # for that error, half of it being in the norm, and for the rounding of factors and products
CACHED = 2**16  # values that stay in the cache
LEAST_BOUND = 1e-10  # squares of smaller values vanish in fp32


@dataclass(frozen=True)
class Sampling:
    """How records come into a batch: public numbers."""

    batch: int  # records that are expected, of a peer with so many as below
    records: int

    def __post_init__(self) -> None:
        if self.batch > self.records:
            raise InputError(f"batch = {self.batch}: must be at most privacy.records = {self.records}, a sample")

    @property
    def rate(self) -> float:
        """q: the probability with which a record is in the batch."""
        return self.batch / self.records

    def draw(self, count: int, words: Words) -> NDArray[np.int64]:
        """Which of so many records are in the batch. The rate is rounded down to a multiple of 2⁻⁶⁴."""
        if self.batch == self.records:
            return np.arange(count)
        limit = (self.batch << 64) // self.records
        return np.nonzero(words(count) < np.uint64(limit))[0]


def check_record_bound(bound: float) -> None:
    """Refuse a bound for records that fp32 cannot compare a norm with."""
    if not LEAST_BOUND <= bound < math.inf:
        raise InputError(f"clip = {bound:g}: must be at least {LEAST_BOUND:g} with privacy.unit = record")


def add_records(slices: Iterable[list[Tensor]], bound: float, steps: int, out: Tensor) -> None:
    """Add the gradients of single records to `out`, each clipped and truncated by itself.

    A slice holds the gradients of at most 16 records by layer, [records, values] each; they are changed in place.
    A record whose gradient is not finite counts as zero.
    """
    for layers in slices:
        norms = _norms(layers)
        finite = torch.isfinite(norms)
        if not bool(finite.all()):
            layers, norms = [layer[finite] for layer in layers], norms[finite]
        factors = (steps * NORM_ROOM / norms.clamp_(min=bound)).to(torch.float32).unsqueeze(1)
        start = 0
        for layer in layers:
            _add_layer(layer, factors, out[start : start + layer.shape[1]])
            start += layer.shape[1]


def _norms(layers: list[Tensor]) -> Tensor:
    """The norm of each record, in float64; `NORM_ROOM` leaves room for its error, whatever the order of adding."""
    squares = torch.zeros(len(layers[0]), dtype=torch.float64)
    for layer in layers:
        whole = layer.shape[1] // BLOCK * BLOCK
        blocks = torch.linalg.vector_norm(layer[:, :whole].reshape(len(layer), -1, BLOCK), dim=2)
        squares += blocks.to(torch.float64).square_().sum(dim=1)
        squares += torch.linalg.vector_norm(layer[:, whole:], dim=1).to(torch.float64).square_()
    return squares.sqrt_()


def _add_layer(layer: Tensor, factors: Tensor, out: Tensor) -> None:
    """A block at a time, which stays in the cache; sums of integers below 2²⁴ are exact in fp32."""
    width = max(1, CACHED // max(1, len(layer)))
    for start in range(0, len(out), width):
        part, total = layer[:, start : start + width], out[start : start + width]
        total += part.mul_(factors).trunc_().sum(dim=0).to(torch.int64)
