"""How the slices of an exchange become bytes: values as they are in memory, or integers packed in a few bits.

A peer adds up what it decoded, whole: what is packed are only the messages. How wide a field is follows from the plan:
from how many contributions a partial sum may have after so many rounds. The sum over the whole roster is rounded where
it is made, by whoever makes it (see `marfl.wire.packing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from marfl.errors import BadPayload
from marfl.net.base import Buffer
from marfl.plan.cost import contributions_in, format_of
from marfl.plan.grid import Plan
from marfl.protocol.tensors import MAX_PAYLOAD, raw, vector_from
from marfl.wire.packing import BLOCK, IntegerWire, SliceFormat, largest, pack_slice, round_back, unpack_slice


class SliceCodec(Protocol):
    """How slices travel; `done` is after how many rounds a partial sum is sent."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the values in memory."""

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
        return torch.int16 if self.wire.masked and self.wire.mask_width(self.circle) == 16 else torch.int32

    def format(self, done: int) -> SliceFormat:
        return self.wire.partial(1, self.circle) if self.wire.masked else format_of(self.plan, done, self.wire)

    def each(self, piece: int, done: int) -> int:
        return self.format(done).fitting(piece)

    def encode(self, value: Tensor, done: int) -> Buffer:
        return pack_slice(value.numpy(), self.format(done)).data.cast("B")

    def decode(self, payload: Buffer, count: int, done: int) -> Tensor:
        view = memoryview(payload)
        if view.nbytes > MAX_PAYLOAD:
            raise BadPayload(f"a chunk of {view.nbytes} bytes")
        values = unpack_slice(np.frombuffer(view, dtype=np.uint8), count, self.format(done))
        return torch.from_numpy(values).to(self.dtype)

    def rounded(self, total: Tensor) -> Tensor:
        """The sum over the whole roster as everybody gets it."""
        return total if self.wire.down == 32 else torch.from_numpy(round_back(total.numpy(), self.wire.down))

    def check(self, value: Tensor, done: int) -> None:
        """`BadPayload` for what a partial sum after so many rounds cannot be; a rounded one may lie a little beyond."""
        if self.wire.up == 32:
            return  # they may have brought anything
        last = done == len(self.plan.rounds)
        limit = contributions_in(self.plan, done) * largest(self.wire.up) * (2 if last else 1)
        if value.numel() and (int(value.max()) > limit or int(value.min()) < -limit):
            raise BadPayload("a sum that its members cannot have brought")


def packed_delta(total: Tensor, down: int) -> tuple[str, Buffer]:
    """A sum over a whole roster for somebody who missed it: under which name, and packed without a loss."""
    values = total.numpy()
    form = SliceFormat(down, rounded=True)
    if not np.array_equal(round_back(values, down), values):
        form = SliceFormat(32)  # while there are no scales, sums are not rounded
    return _NAMES[form.width], pack_slice(values, form).data.cast("B")


def unpacked_delta(name: str, payload: Buffer, count: int) -> Tensor:
    """The sum in these bytes, or `BadPayload`."""
    width = next(width for width, known in _NAMES.items() if known == name)
    form = SliceFormat(width, rounded=width != 32)
    if not count >= 0 or memoryview(payload).nbytes != form.size(count):
        raise BadPayload("a sum of another length")
    return torch.from_numpy(unpack_slice(np.frombuffer(payload, dtype=np.uint8), count, form))


_NAMES = {4: "sum4", 8: "sum8", 16: "sum16", 32: "sum32"}  # by bits
DELTAS = tuple(_NAMES.values())
