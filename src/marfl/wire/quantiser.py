"""Updates as integers of a few bits: stochastic rounding to agreed scales, with what is left kept for the next time.

A peer sends q = ⌊u/s + r⌋, cut off at ±Q, where u is what it has learned plus what was left the last time, s the
agreed scale of the block and r uniform in [0, 1). What is left is u − s·q (error feedback: Seide et al. 2014;
Karimireddy et al. 2019).

The arithmetic is fp32, and exact. Scales are powers of two. What was learned is rounded to a fixed point, a small part
of the scale (`STEPS`); after that nothing is: what is left has fewer than 24 bits, and so has its sum with what comes
next, unless a scale grows by more than 2⁸ at once or a value is some hundred times its field. So what was sent plus
what is left is what was learned, to the last bit of the fixed point; beyond these bounds, of fp32.

The scales are part of the agreed state. The next ones follow from the sum alone, which everybody has: from its root
mean square a peer's own is guessed, as if peers were independent; it is to be a sixth of Q (int4) or a sixteenth
(int8). A block in which nothing was sent keeps its scale; one that is too fine grows at once, one that is too coarse
shrinks by half. At the beginning there are no scales: the first iteration that sends something does it in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from marfl.rng import byte_stream
from marfl.wire.packing import AT_A_TIME, BLOCK, IntegerWire, blocks_of, largest
from marfl.wire.rounded_sum import FEW, MANY, rows_of, spans_of

Exponents: TypeAlias = NDArray[np.int32]  # of the scales, one for each block
Dice: TypeAlias = Callable[[int], bytes]  # so many random bytes

SCALES = "scales"  # the vector of the agreed state that holds the exponents, as fp32
LARGEST = 2.0**12  # of one value
UNSET = 64  # the exponent of every block at the beginning
FIRST = -20  # the exponent while there is none
FINEST, COARSEST = -38, 12  # exponents
HEADROOM = {8: 16, 4: 6}  # by bits: the largest contribution over the root mean square; less cuts off, and delays
STEPS = 2.0**12  # of the fixed point in a scale
_TO_STEP = 1.5 * 2**23 / STEPS  # adding and subtracting this rounds an fp32 number of a smaller size to whole steps
_EXACT = 2**21  # the squares of a block of smaller integers add up exactly in fp64, in whichever order
_DRAW = 2.0**-8  # r is an odd multiple of this
_ODD = np.uint64(0x0101010101010101)


class Quantised(NamedTuple):
    """What a peer sends of what it has, and what is left."""

    sent: Tensor  # of 8 bits, or of 32 where there are no scales
    left: Tensor  # fp32


def unset(length: int) -> Exponents:
    """The exponents of the beginning."""
    return np.full(blocks_of(length), UNSET, dtype=np.int32)


def exponents_in(stored: NDArray[np.float32]) -> Exponents:
    """The exponents as the agreed state holds them."""
    return stored.astype(np.int32)


def is_first(exponents: Exponents) -> bool:
    """Whether there are no scales yet."""
    return bool(exponents.size) and int(exponents[0]) == UNSET


def wire_at(wire: IntegerWire, exponents: Exponents) -> IntegerWire:
    """How updates travel from a state with these scales."""
    return wire.first if is_first(exponents) else wire


def can_quantise(learned: Tensor, public: Tensor | None = None) -> bool:
    """Whether an update may leave, less its public part: finite, and small enough to be sent some time."""
    if public is not None:
        room = torch.empty(AT_A_TIME)
        parts = zip(torch.split(learned, AT_A_TIME), torch.split(public, AT_A_TIME), strict=True)
        return all(can_quantise(torch.sub(new, known, out=room[: new.numel()])) for new, known in parts)
    # One pass in the common case: where the squares add up to no more than that of the largest, none is larger.
    if float(torch.dot(learned, learned)) <= LARGEST**2:
        return True
    low, high = (float(each) for each in torch.aminmax(learned))
    return low >= -LARGEST and high <= LARGEST  # a NaN compares as false


def quantise(
    learned: Tensor, left: Tensor | None, exponents: Exponents, limit: int, dice: Dice, public: Tensor | None = None
) -> Quantised:
    """Round what was learned, less its public part, and what was left before, to integers of the agreed scales.

    See `can_quantise`. A few blocks at a time, so that they stay in the cache, and in place. All of them are rounded
    by the same draws, each time from another one on: any two values have independent ones, but for one pair in 32,768.
    Every product is with a power of two, and exact.
    """
    small, length = limit <= largest(8), learned.numel()
    sent, rest = torch.empty(length, dtype=torch.int8 if small else torch.int32), torch.empty(length)
    draws = _draws(dice, 2 * AT_A_TIME).to(torch.float32 if small else torch.float64).mul_(_DRAW)
    turns = (np.frombuffer(dice(2 * blocks_of(length)), dtype=np.uint16) % AT_A_TIME).tolist()
    scales = torch.from_numpy(scales_of(exponents)).to(torch.float32)[:, None]
    columns = scales * _TO_STEP, (1 / scales).to(draws.dtype), -scales.to(draws.dtype)
    spans = spans_of(learned)
    before = spans_of(left) if left is not None else [None] * len(spans)
    known = spans_of(public) if public is not None else [None] * len(spans)
    firsts = turns[:: AT_A_TIME // BLOCK] if length % BLOCK == 0 else [*turns[: -1 : AT_A_TIME // BLOCK], turns[-1]]
    room, more = torch.empty(AT_A_TIME), torch.empty(AT_A_TIME, dtype=draws.dtype)
    windows = draws.as_strided((AT_A_TIME, FEW, BLOCK), (1, BLOCK, 1))  # of a whole span, from every draw on
    whole, chosen, usual = room, more, windows.shape[1:]
    around = zip(spans, known, before, spans_of(sent), spans_of(rest), firsts, strict=True)
    for part, steps, scale, back in zip(around, *(rows_of(column, length) for column in columns), strict=True):
        new, public_part, last, out, after, turn = part
        if new.shape != whole.shape:
            whole, chosen = _rows_like(new, room), _rows_like(new, more)
        fresh = new if public_part is None else torch.sub(new, public_part, out=whole)
        torch.add(fresh, steps, out=whole).sub_(steps)
        if last is not None:
            whole.add_(last)
        exact = whole if small else whole.to(draws.dtype)
        drawn = windows[turn] if new.shape == usual else _rows_like(new, draws, turn)
        torch.addcmul(drawn, exact, scale, out=chosen)
        out.copy_(chosen.floor_().clamp_(-limit, limit))
        torch.addcmul(exact, chosen, back, out=after)
    return Quantised(sent, rest)


def _rows_like(rows: Tensor, room: Tensor, start: int = 0) -> Tensor:
    """The values of a vector from `start` on, in as many rows."""
    return room.as_strided(rows.shape, (rows.shape[1], 1), start)


def _draws(dice: Dice, count: int) -> Tensor:
    """So many odd numbers of 8 bits: these are symmetric in their range."""
    drawn = np.frombuffer(dice(-(-count // 8) * 8), dtype=np.uint64) | _ODD
    return torch.from_numpy(drawn.view(np.uint8)[:count])


def rounding_dice(seed: int, peer: int, iteration: int) -> Dice:
    """Where a peer's rounding of an iteration is drawn from: the same again, should the attempt be repeated."""
    return byte_stream(seed, peer, iteration, "rounding")


def scales_of(exponents: Exponents) -> NDArray[np.float64]:
    """s of every block."""
    return np.ldexp(1.0, np.where(exponents == UNSET, FIRST, exponents))


class Dequantised(NamedTuple):
    """What a sum of integers stands for, and the scales of the next iteration."""

    mean: Tensor  # the sum in fp32, times s/w in fp32
    exponents: Exponents


def dequantise(
    total: Tensor, exponents: Exponents, weight: float, contributions: int, wire: IntegerWire
) -> Dequantised:
    """The mean and the next scales, from the sum of so many contributions as everybody gets it."""
    mean = torch.empty(total.numel())
    energy, down = np.zeros(exponents.size), wire_at(wire, exponents).down
    factors = torch.from_numpy(scales_of(exponents) / weight).to(torch.float32)[:, None]
    first = 0
    spans = (spans_of(total, MANY), spans_of(mean, MANY), rows_of(factors, total.numel(), MANY))
    for values, out, factor in zip(*spans, strict=True):
        out.copy_(values)
        last = first + values.shape[0]
        energy[first:last] = _energy(out if down <= 8 else values)
        out.mul_(factor)
        first = last
    return Dequantised(mean, _next_exponents(energy, total.numel(), exponents, contributions, wire.up))


def _next_exponents(
    energy: NDArray[np.float64], length: int, exponents: Exponents, contributions: int, bits: int
) -> Exponents:
    first, following = is_first(exponents), np.where(exponents == UNSET, FIRST, exponents)
    silent = energy == 0
    if silent.all():
        return exponents
    sizes = np.full(exponents.size, BLOCK)
    sizes[-1] = length - BLOCK * (exponents.size - 1)
    excess = energy * HEADROOM[bits] ** 2 / (sizes * float(contributions * largest(bits) ** 2))
    _, steps = np.frexp(excess)
    steps = steps // 2  # the nearest power of two of a root
    if not first:
        steps = np.maximum(steps, -1)
    following = np.where(silent, following, following + steps)
    if first and silent.any():
        following[silent] = following[~silent].sum() // int((~silent).sum())  # as the others are on average
    return np.clip(following, FINEST, COARSEST).astype(np.int32)


def _energy(values: Tensor) -> NDArray[np.float64]:
    """Sums of squares by blocks, the same bits everywhere: they are exact, in whichever order they are added.

    Of a sum that was rounded to 8 bits or fewer, the squares of a block add up to at most 2²⁴ times a power of two, so
    fp32 has room for them. Of others the highest bits count.
    """
    rows = values.numpy()
    if values.dtype == torch.float32:
        single: NDArray[np.float64] = np.vecdot(rows, rows).astype(np.float64)
        return single
    _, length = np.frexp(np.maximum(rows.max(axis=1), -rows.min(axis=1).astype(np.int64)).astype(np.float64))
    spare = np.maximum(length - _EXACT.bit_length() + 1, 0)
    wide = (rows.astype(np.int32) >> spare[:, None]).astype(np.float64)
    found: NDArray[np.float64] = np.ldexp(np.vecdot(wide, wide), 2 * spare)
    return found
