"""Integers as bytes: fields of 4, 8, 16 or 32 bits, and how many bits a sum of so many contributions takes.

A vector is cut in blocks of 1,024 values, and every slice of it that travels begins with a block. A slice is its values
in fields of one width, one after the other, little-endian, two's complement; in 4 bits the first half of the values has
the lower halves of the bytes, the second half of them the upper ones. The sum over the whole roster goes back rounded
(`rounded_sum`): before its values there is one byte for each block, by how many bits its values were shifted.

Nothing here needs torch: `marfl plan` counts bytes with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marfl.errors import BadPayload, InputError

BLOCK = 1024  # values that share a scale
WIDTHS = (4, 8, 16, 32)  # bits of a field
MOST_MEMBERS = 2**16  # of a roster whose sum integers hold
TAIL = 12  # deviations: noise beyond them has a probability below 2⁻¹⁰⁰
AT_A_TIME = 32 * BLOCK  # values that are worked on together: they stay in the cache
Integers: TypeAlias = NDArray[np.signedinteger[Any]]  # of 8, 16 or 32 bits: a sum has its own, see `narrowest`
Bytes: TypeAlias = NDArray[np.uint8]
_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<i1"), 16: np.dtype("<i2"), 32: np.dtype("<i4")}


def largest(bits: int) -> int:
    """Q: how far from zero an integer of so many bits goes, the same on both sides."""
    return (1 << (bits - 1)) - 1


def narrowest(limit: int, widths: Sequence[int] = WIDTHS) -> int:
    """The narrowest field that holds ±limit; 0 where none does."""
    return next((width for width in widths if largest(width) >= limit), 0)


def blocks_of(length: int) -> int:
    """How many blocks a vector of so many values has; the last one may be short."""
    return -(-length // BLOCK)


class SliceFormat(NamedTuple):
    """How the values of a slice travel."""

    width: int  # bits of a value
    rounded: bool = False  # the sum over the whole roster, rounded: a byte of shift for each block

    def size(self, values: int) -> int:
        """The bytes of a slice of so many values that begins with a block."""
        return -(-values * self.width // 8) + (blocks_of(values) if self.rounded else 0)

    def sizes(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of many slices."""
        extra = -(-values // BLOCK) if self.rounded else 0
        return -(-values * self.width // 8) + extra

    def fitting(self, size: int) -> int:
        """How many values fit in so many bytes: whole blocks, and at least one."""
        return max(1, size // self.size(BLOCK)) * BLOCK


class NoiseRoom(NamedTuple):
    """What the field of a private sum must hold: contributions, and their noise but for a chance below 2⁻¹⁰⁰."""

    each: int  # the largest contribution without its noise
    variance: int  # of the noise on it

    def largest(self, members: int) -> int:
        """A sum over so many members is not further from zero."""
        return members * self.each + TAIL * math.isqrt(members * self.variance)

    def holds(self, members: int, width: int) -> bool:
        """Whether a sum over so many members does not wrap in a field of so many bits."""
        return self.largest(members) < 1 << (width - 1)


@dataclass(frozen=True)
class IntegerWire:
    """How updates travel as integers of so many bits: up to whoever adds them, and the sum back down."""

    up: int  # bits of a contribution
    down: int  # bits of the sum on its way back
    masked: bool = False  # under masks all fields have one width, and the sum is rounded where the masks came off

    @property
    def first(self) -> IntegerWire:
        """How they travel while there are no scales yet: in 32 bits (see `quantiser`)."""
        return IntegerWire(32, 32, self.masked)

    def limit(self, contributions: int) -> int:
        """Q: the largest of so many contributions; of 32 bits, a power of two, so that these hold the sum."""
        if self.up < 32:
            return largest(self.up)
        return 1 << (largest(32) // contributions).bit_length() - 1  # what is cut off at a power of two stays exact

    def partial(self, contributions: int, members: int) -> SliceFormat:
        """How a sum of so many contributions travels, in a roster of so many members."""
        if self.masked:
            return SliceFormat(self.mask_width(members))
        return SliceFormat(32 if self.up == 32 else narrowest(contributions * largest(self.up)))

    def result(self, members: int) -> SliceFormat:
        """How the sum over the whole roster travels."""
        return self.partial(members, members) if self.masked or self.down == 32 else SliceFormat(self.down, True)

    def mask_width(self, members: int) -> int:
        """The bits of a masked value: masks are added modulo 2¹⁶ where that holds the sum, else modulo 2³²."""
        return 32 if self.up == 32 else narrowest(members * largest(self.up), (16, 32))


class FieldBits(NamedTuple):
    """In how many bits a value travels."""

    up: int  # of a peer's own contribution
    down: int  # of the sum over the roster on its way back


def small_bits(wire: IntegerWire, members: int) -> FieldBits:
    """The fields of this wire among so many members."""
    return FieldBits(wire.partial(1, members).width, wire.result(members).width)


BITS = {"int8": 8, "int4": 4}  # of the wires of few bits, by name
MASKED = "masked-"  # before the name of a wire: the same under masks


def is_small(wire: str) -> bool:
    """Whether values travel in a few bits, under masks or not."""
    return wire.removeprefix(MASKED) in BITS


def integer_wire(wire: str, down: int | None) -> IntegerWire | None:
    """The wire of this name, with so many bits on the way back; None for one of another kind."""
    if not is_small(wire):
        return None
    up = BITS[wire.removeprefix(MASKED)]
    return IntegerWire(up, down or up, wire.startswith(MASKED))


def check_down(wire: str, down: int | None) -> None:
    """`InputError` for bits of the way back that there are not."""
    if down is not None and not is_small(wire):
        raise InputError(f"wire_down = {down}: is for wire = int8 or int4, not for {wire}")
    if down is not None and down not in (4, 8, 16):
        raise InputError(f"wire_down = {down}: must be 4, 8 or 16")


def check_members(wire: str, members: int) -> None:
    """`InputError` for a roster whose sum these integers may not hold."""
    if wire != "fp32" and members > MOST_MEMBERS:
        raise InputError(
            f"peers: {members:,} take part at once, and sums of integers (wire = {wire}) are over at most "
            f"{MOST_MEMBERS:,}; choose wire = fp32, or fewer peers"
        )


# --- fields ---


def pack(values: Integers, width: int) -> Bytes:
    """Values that fit in so many bits each, as bytes; their own memory, where they have that width already."""
    if width == 4:
        small = np.ascontiguousarray(values, dtype=np.int8).view(np.uint8)
        half = -(-small.size // 2)
        packed = np.bitwise_and(small[:half], np.uint8(0x0F))  # of an odd number nobody reads the last upper half
        packed[: small.size - half] |= small[half:] * np.uint8(16)  # a shift, which numpy does one by one
        return packed
    return np.ascontiguousarray(values, dtype=_DTYPES[width]).view(np.uint8)


def unpack(data: Bytes, count: int, width: int) -> Integers:
    """The values in these bytes, or `BadPayload` when they are another number; not a copy, where that can be."""
    expected = -(-count * width // 8)
    if data.size != expected:
        raise BadPayload(f"a chunk of {data.size} bytes where {expected} were expected")
    if width == 4:
        halves, signed = np.empty(count, dtype=np.int8), data.view(np.int8)
        lower, upper = halves[: data.size], halves[data.size :]
        np.multiply(signed, np.int8(16), out=lower)  # which leaves the lower half of a byte in its upper one
        np.right_shift(lower, np.int8(4), out=lower)  # a shift of signed numbers keeps the sign
        np.right_shift(signed[: upper.size], np.int8(4), out=upper)
        return halves
    return np.ascontiguousarray(data).view(_DTYPES[width])
