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
from marfl.learn.layer_gradients import Layer, Outer

MOST_STEPS_POWER = 19  # of L: up to 32 records' values add up exactly in fp32
BLOCK = 2048  # values whose squares are added in fp32, with a relative error below 2050·2⁻²⁴ < 2⁻¹²
NORM_ROOM = 1 - 2.0**-11  # for twice that error, half of it being in the norm, and for the rounding of the products
CACHED = 2**16  # values that stay in the cache
LEAST_BOUND = 1e-10  # values whose squares vanish in fp32 are then truncated to zero
LARGEST_SQUARE = 1e38  # of the norm of either side of an outer product: no product of it overflows in fp32


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


def add_records(slices: Iterable[list[Layer]], bound: float, steps: int, out: Tensor) -> None:
    """Add the gradients of single records to `out`, each clipped and truncated by itself.

    A slice holds the gradients of at most 32 records by layer; they are changed in place. A record whose gradient is
    not finite counts as zero.
    """
    for layers in slices:
        norms = torch.stack([_squares(layer) for layer in layers]).sum(dim=0).sqrt_()
        finite = torch.isfinite(norms)
        if not bool(finite.all()):
            layers, norms = [_some(layer, finite) for layer in layers], norms[finite]
        factors = (steps * NORM_ROOM / norms.clamp_(min=bound)).to(torch.float32).unsqueeze(1)
        start = 0
        for layer in layers:
            if isinstance(layer, Outer):
                _add_products(Outer(layer.left * factors, layer.right), out[start : start + layer.values])
                start += layer.values
            else:
                _add_layer(layer, factors, out[start : start + layer.shape[1]])
                start += layer.shape[1]


def _some(layer: Layer, rows: Tensor) -> Layer:
    return Outer(layer.left[rows], layer.right[rows]) if isinstance(layer, Outer) else layer[rows]


def _squares(layer: Layer) -> Tensor:
    """The squared norm of each record, in float64; `NORM_ROOM` leaves room for its error, whatever the order of adding.

    That of an outer product is the product of two, all in float64: one side's squares may vanish in fp32 where the
    other side is so large that the product counts.
    """
    if isinstance(layer, Outer):
        return _side(layer.left) * _side(layer.right)
    whole = layer.shape[1] // BLOCK * BLOCK
    blocks = torch.linalg.vector_norm(layer[:, :whole].reshape(len(layer), -1, BLOCK), dim=2)
    rest = torch.linalg.vector_norm(layer[:, whole:], dim=1)
    found: Tensor = blocks.to(torch.float64).square_().sum(dim=1) + rest.to(torch.float64).square_()
    return found


def _side(values: Tensor) -> Tensor:
    """The squared norm of each record's side of an outer product; infinite where it is too large."""
    squares: Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square_()
    return squares.masked_fill_(squares > LARGEST_SQUARE, math.inf)


def _add_products(layer: Outer, out: Tensor) -> None:
    """Some outputs at a time, whose products stay in the cache, and one record after the other."""
    inputs = layer.right.shape[1]
    width, totals = max(1, 2 * CACHED // inputs), out.view(-1, inputs)
    for start in range(0, len(totals), width):
        total = torch.zeros_like(totals[start : start + width], dtype=torch.float32)
        product = torch.empty_like(total)
        for left, right in zip(layer.left[:, start : start + width], layer.right, strict=True):
            torch.mul(left.unsqueeze(1), right, out=product)
            total += product.trunc_()
        totals[start : start + width] += total.to(torch.int64)


def _add_layer(layer: Tensor, factors: Tensor, out: Tensor) -> None:
    """A block at a time, which stays in the cache; sums of integers below 2²⁴ are exact in fp32."""
    width = max(1, CACHED // max(1, len(layer)))
    for start in range(0, len(out), width):
        part, total = layer[:, start : start + width], out[start : start + width]
        total += part.mul_(factors).trunc_().sum(dim=0).to(torch.int64)
