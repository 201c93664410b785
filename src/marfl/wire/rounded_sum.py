"""The sum over a roster on its way back: rounded to a few bits, with one shift for each block, and packed.

Rounding is a pure function of the sum: it does not matter who rounds which slice, in which exchange and attempt, and
twice is as good as once. Sums over at most 2¹⁶ members stay below 2²⁴, so fp32 holds them exactly.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marfl.errors import BadPayload
from marfl.wire.packing import AT_A_TIME, BLOCK, Bytes, SliceFormat, blocks_of, largest, pack, unpack

MOST_SHIFT = 24  # bits: no sum that is rounded is longer
FEW, MANY = AT_A_TIME // BLOCK, 4 * AT_A_TIME // BLOCK  # blocks of a span: where much is done to it, and little


def spans_of(vector: Tensor, blocks: int = FEW) -> list[Tensor]:
    """A vector so many blocks at a time, a row for each block; a short block comes by itself."""
    whole = vector.numel() // BLOCK
    found = _split(vector[: whole * BLOCK].view(-1, BLOCK), blocks)
    return found if whole * BLOCK == vector.numel() else [*found, vector[whole * BLOCK :].view(1, -1)]


def rows_of(column: Tensor, length: int, blocks: int = FEW) -> list[Tensor]:
    """What goes with the spans of a vector of so many values: of a column with one row for each of its blocks."""
    whole = length // BLOCK
    found = _split(column[:whole], blocks)
    return found if whole == len(column) else [*found, column[whole:]]


def _split(rows: Tensor, each: int) -> list[Tensor]:
    """So many rows at a time. `torch.split` would give the same, in twice the time."""
    times, rest = divmod(len(rows), each)
    return list(torch.split_with_sizes(rows, [each] * times + [rest] * (rest > 0)))


def shifts_of(top: NDArray[np.float64], bits: int) -> NDArray[np.int32]:
    """For each of these largest values the fewest bits by which it is shifted to fit; never less than none."""
    _, length = np.frexp(top)  # in bits
    shifts: NDArray[np.int32] = np.maximum(length - (bits - 1), 0)
    shifts += np.rint(np.ldexp(top, -shifts)) > largest(bits)  # it may round up
    return shifts


def _shifts(rows: Tensor, bits: int) -> NDArray[np.int32]:
    values = rows.numpy()
    return shifts_of(np.maximum(values.max(axis=1), -values.min(axis=1).astype(np.float64)), bits)


def _powers(exponents: NDArray[np.int32]) -> Tensor:
    """2 to these exponents, a row for each."""
    return torch.from_numpy(np.ldexp(np.float32(1), exponents))[:, None]


def round_back(total: Tensor, bits: int) -> Tensor:
    """The sum over a roster as everybody gets it: to the nearest multiple of a power of two by blocks, half to even."""
    rounded = torch.empty(total.numel(), dtype=torch.int32)
    for values, out in zip(spans_of(total), spans_of(rounded), strict=True):
        rows = values.to(torch.float32)
        shifts = _shifts(rows, bits)
        if shifts.any():
            rows.mul_(_powers(-shifts)).round_().mul_(_powers(shifts))
        out.copy_(rows)
    return rounded


def pack_slice(values: Tensor, form: SliceFormat) -> Bytes:
    """A slice that begins with a block, as it travels; a rounded one has been through `round_back`."""
    if not form.rounded:
        return pack(values.numpy(), form.width)
    small = torch.empty(values.numel(), dtype=torch.int8 if form.width <= 8 else torch.int16)
    shifts = np.empty(blocks_of(values.numel()), dtype=np.uint8)
    first = 0
    for rows, out in zip(spans_of(values, MANY), spans_of(small, MANY), strict=True):
        shift = _shifts(rows, form.width)
        shifts[first : first + len(rows)] = shift
        # what is shifted out is zero: the values are multiples of these powers
        out.copy_(rows >> torch.from_numpy(shift).to(rows.dtype)[:, None] if shift.any() else rows)
        first += len(rows)
    return np.concatenate([shifts, pack(small.numpy(), form.width)])


def unpack_slice(data: Bytes, count: int, form: SliceFormat, most_shift: int = MOST_SHIFT) -> Tensor:
    """The slice of so many values in these bytes, or `BadPayload`; `most_shift` is what an honest sum can need."""
    if not form.rounded:
        return torch.from_numpy(unpack(data, count, form.width))
    if data.size != form.size(count):
        raise BadPayload(f"a chunk of {data.size} bytes where {form.size(count)} were expected")
    shifts = data[: blocks_of(count)].astype(np.int32)
    if shifts.size and int(shifts.max()) > most_shift:
        raise BadPayload("a block that is shifted out of its range")
    wide = torch.int16 if form.width + most_shift <= 16 else torch.int32
    small = torch.from_numpy(unpack(data[shifts.size :], count, form.width))
    if not shifts.any():
        return small.to(wide)
    values = torch.empty(count, dtype=wide)
    powers = torch.from_numpy(1 << shifts).to(wide)[:, None]
    spans = zip(spans_of(small, MANY), spans_of(values, MANY), rows_of(powers, count, MANY), strict=True)
    for rows, out, power in spans:
        out.copy_(rows).mul_(power)
    return values
