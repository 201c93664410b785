"""How the slices of an exchange become bytes: values as they are in memory, or integers packed in a few bits.

A peer adds up what it decoded, whole: what is packed are only the messages. How wide a field is follows from the plan:
from how many contributions a partial sum may have after so many rounds. The sum over the whole roster is rounded where
it is made, by whoever makes it (see `marfl.wire.packing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from marfl.errors import BadPayload
from marfl.net.base import Buffer
from marfl.plan.cost import contributions_in, format_of
from marfl.plan.grid import Plan
from marfl.protocol.tensors import MAX_PAYLOAD, raw, vector_from
from marfl.wire.packing import BLOCK, IntegerWire, SliceFormat, largest
from marfl.wire.rounded_sum import MOST_SHIFT, pack_slice, round_back, shifts_of, unpack_slice


class SliceCodec(Protocol):
    """How slices travel; `done` is after how many rounds a partial sum is sent."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the result in memory."""

    def dtype_of(self, done: int) -> torch.dtype:
        """Of partial sums after so many rounds in memory: it holds all that they can be."""

    @property
    def unit(self) -> int:
        """Slices begin at a multiple of this."""

    def each(self, piece: int, done: int) -> int:
        """How many values a message of so many bytes holds."""

    def encode(self, value: Tensor, done: int) -> Buffer: ...

    def decode(self, payload: Buffer, count: int, done: int) -> Tensor:
        """Exactly so many values, or `BadPayload`."""


@dataclass(frozen=True)
class PlainCodec:
    """Values as they are in memory."""

    dtype: torch.dtype = torch.float32
    unit: int = 1

    def dtype_of(self, done: int) -> torch.dtype:
        return self.dtype

    def each(self, piece: int, done: int) -> int:
        return piece // self.dtype.itemsize

    def encode(self, value: Tensor, done: int) -> Buffer:
        return raw(value)

    def decode(self, payload: Buffer, count: int, done: int) -> Tensor:
        return vector_from(payload, count, self.dtype)


@dataclass(frozen=True)
class PackedCodec:
    """Integers of a few bits over one plan. Under masks, `circle` counts everybody whose masks are in the sum."""

    wire: IntegerWire
    plan: Plan
    circle: int

    unit: int = BLOCK

    @property
    def dtype(self) -> torch.dtype:
        if self.wire.masked:
            return _DTYPES[self.wire.mask_width(self.circle)]
        return torch.int16 if self.wire.down + self._most_shift <= 16 else torch.int32

    def dtype_of(self, done: int) -> torch.dtype:
        last = done == len(self.plan.rounds)
        return self.dtype if self.wire.masked or last else _DTYPES[max(8, self.format(done).width)]

    def format(self, done: int) -> SliceFormat:
        return self.wire.partial(1, self.circle) if self.wire.masked else format_of(self.plan, done, self.wire)

    def each(self, piece: int, done: int) -> int:
        return self.format(done).fitting(piece)

    def encode(self, value: Tensor, done: int) -> Buffer:
        return pack_slice(value, self.format(done)).data.cast("B")

    def decode(self, payload: Buffer, count: int, done: int) -> Tensor:
        view = memoryview(payload)
        if view.nbytes > MAX_PAYLOAD:
            raise BadPayload(f"a chunk of {view.nbytes} bytes")
        data = np.frombuffer(bytearray(view) if view.readonly else view, dtype=np.uint8)
        return unpack_slice(data, count, self.format(done), self._most_shift)

    @cached_property
    def _most_shift(self) -> int:
        """Of a rounded sum that its members can have brought; without scales they may have brought anything."""
        if self.wire.up == 32:
            return MOST_SHIFT
        return int(shifts_of(np.array([float(self._limit(len(self.plan.rounds)))]), self.wire.down)[0])

    def _limit(self, done: int) -> int:
        """How large a sum after so many rounds can be."""
        return contributions_in(self.plan, done) * largest(self.wire.up)

    def rounded(self, total: Tensor) -> Tensor:
        """The sum over the whole roster as everybody gets it."""
        return total if self.wire.down == 32 else round_back(total, self.wire.down)

    def check(self, value: Tensor, done: int) -> None:
        """`BadPayload` for what a partial sum after so many rounds cannot be; of rounded ones, shifts are checked."""
        if self.wire.up == 32 or not value.numel() or self.format(done).rounded:
            return  # without scales they may have brought anything
        low, high = (int(each) for each in torch.aminmax(value))
        if max(high, -low) > self._limit(done):
            raise BadPayload("a sum that its members cannot have brought")


def added(one: Tensor, other: Tensor, room: Tensor) -> Tensor:
    """The sum of two, in `room`, whose type holds it: theirs may be narrower."""
    if one.dtype == other.dtype == room.dtype:
        return torch.add(one, other, out=room)
    into = room.numpy()
    np.add(one.numpy(), other.numpy(), out=into, dtype=into.dtype)  # torch would add in the narrow type
    return room


def delta_form(total: Tensor, down: int) -> SliceFormat:
    """How a sum over a whole roster travels to somebody who missed it: rounded, where that loses nothing."""
    low, high = (int(each) for each in torch.aminmax(total)) if total.numel() else (0, 0)
    if max(high, -low) < 2**MOST_SHIFT and torch.equal(round_back(total, down), total.to(torch.int32)):
        return SliceFormat(down, rounded=True)
    return SliceFormat(32)  # while there are no scales, sums are not rounded


def packed_delta(total: Tensor, down: int) -> tuple[str, Buffer]:
    """A sum over a whole roster for somebody who missed it: under which name, and packed without a loss."""
    form = delta_form(total, down)
    return _NAMES[form.width], pack_slice(total, form).data.cast("B")


def unpacked_delta(name: str, payload: Buffer, count: int) -> Tensor:
    """The sum in these bytes, or `BadPayload`."""
    width = next(width for width, known in _NAMES.items() if known == name)
    form = SliceFormat(width, rounded=width != 32)
    if not count >= 0 or memoryview(payload).nbytes != form.size(count):
        raise BadPayload("a sum of another length")
    return unpack_slice(np.frombuffer(bytearray(payload), dtype=np.uint8), count, form)


_DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}  # by bits
_NAMES = {4: "sum4", 8: "sum8", 16: "sum16", 32: "sum32"}  # by bits
DELTAS = tuple(_NAMES.values())
