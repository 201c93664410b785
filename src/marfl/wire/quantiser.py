"""Updates as integers of a few bits: stochastic rounding to agreed scales, with what is left kept for the next time.

A peer sends q = ⌊u/s + r⌋, cut off at ±Q, where u is what it has learned plus what was left the last time, s the
agreed scale of the block and r uniform in [0, 1). What is left is u − s·q (error feedback: Seide et al. 2014;
Karimireddy et al. 2019). Scales are powers of two, and everything is a multiple of 2⁻³⁸ and small enough for a
float64, so all of this is exact: what was sent plus what is left is what was learned, to the last bit.

The scales are part of the agreed state. The next ones follow from the sum alone, which everybody has: from its root
mean square a peer's own is guessed, as if peers were independent; it is to be a sixth of Q (int4) or a sixteenth
(int8). A block in which nothing was sent keeps its scale; one that is too fine grows at once, one that is too coarse
shrinks by half. At the beginning there are no scales: the first iteration that sends something does it in 32 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marfl.rng import numpy_stream
from marfl.wire.packing import AT_A_TIME, BLOCK, Integers, IntegerWire, blocks_of, in_rows, largest, spans

Floats: TypeAlias = NDArray[np.float64]
Exponents: TypeAlias = NDArray[np.int32]  # of the scales, one for each block

SCALES = "scales"  # the vector of the agreed state that holds the exponents, as fp32
UNIT = 2.0**-38  # everything that is sent or left is a multiple of it
LARGEST = 2.0**12  # of one value: with the unit it leaves a float64 two bits to spare
UNSET = 64  # the exponent of every block at the beginning
FIRST = -20  # the exponent while there is none
FINEST, COARSEST = -38, 12  # exponents
HEADROOM = {8: 16, 4: 6}  # by bits: the largest contribution over the root mean square; less cuts off, and delays
_TO_UNIT = 1.5 * UNIT * 2**52  # adding and subtracting this rounds to the unit
_EXACT = 2**21  # the squares of a block of smaller integers add up exactly, in whichever order
_DRAW = 2.0**-8  # r is an odd multiple of half of this


class Quantised(NamedTuple):
    """What a peer sends of what it has, and what is left."""

    sent: Integers
    left: Floats


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


def can_quantise(learned: NDArray[np.float32], left: Floats | None) -> bool:
    """Whether an update may leave: finite, and small enough for the arithmetic, with what is left of earlier ones."""
    return all(_is_bounded(values) for values in (learned, left) if values is not None)


def _is_bounded(values: NDArray[np.float32] | Floats) -> bool:
    # One pass in the common case: where the squares add up to no more than that of the largest, none is larger.
    if np.einsum("i,i->", values, values) <= LARGEST**2:
        return True
    return bool(np.abs(values).max(initial=0.0) <= LARGEST)  # a NaN compares as false


def quantise(
    learned: NDArray[np.float32], left: Floats | None, exponents: Exponents, limit: int, dice: np.random.Generator
) -> Quantised:
    """Round what was learned, and what was left before, to integers of the agreed scales; see `can_quantise`."""
    sent, rest = np.empty(learned.size, dtype=np.int32), np.empty(learned.size)
    scales = scales_of(exponents)
    kind: Any = np.float32 if limit < 2**15 else np.float64  # of what only chooses an integer, and need not be exact
    room, units, drawn = np.empty(AT_A_TIME), np.empty(AT_A_TIME, dtype=kind), np.empty(AT_A_TIME, dtype=kind)
    for where, blocks in spans(learned.size):
        size = where.stop - where.start
        whole, scale, rows = room[:size], scales[blocks][:, None], in_rows(units[:size])
        np.add(learned[where], _TO_UNIT, out=whole, dtype=np.float64)  # rounds it to the unit
        if left is not None:
            whole += left[where]
        whole -= _TO_UNIT
        np.copyto(units[:size], whole, casting="same_kind")
        rows *= (1 / scale).astype(kind)
        np.copyto(drawn[:size], _draws(dice, size))
        drawn[:size] += kind(0.5)
        drawn[:size] *= kind(_DRAW)
        units[:size] += drawn[:size]
        np.floor(units[:size], out=units[:size])
        np.clip(units[:size], -limit, limit, out=units[:size])
        np.copyto(sent[where], units[:size], casting="unsafe")
        rows *= scale.astype(kind)
        np.subtract(whole, units[:size], out=rest[where])
    return Quantised(sent, rest)


def _draws(dice: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """So many numbers of 8 bits."""
    return dice.bit_generator.random_raw(-(-count // 8)).view(np.uint8)[:count]


def rounding_dice(seed: int, peer: int, iteration: int) -> np.random.Generator:
    """Where a peer's rounding of an iteration is drawn from: the same again, should the attempt be repeated."""
    return numpy_stream(seed, peer, iteration, "rounding")


def scales_of(exponents: Exponents) -> Floats:
    """s of every block."""
    return np.ldexp(1.0, np.where(exponents == UNSET, FIRST, exponents))


def dequantise(total: Integers, exponents: Exponents, weight: float) -> NDArray[np.float32]:
    """The mean that a sum of integers stands for."""
    mean = np.empty(total.size, dtype=np.float32)
    factors = scales_of(exponents) / weight
    for where, blocks in spans(total.size):
        rows, into = in_rows(total[where]), in_rows(mean[where])
        np.multiply(rows, factors[blocks][:, None], out=into, dtype=np.float64, casting="same_kind")
    return mean


def next_exponents(total: Integers, exponents: Exponents, contributions: int, bits: int) -> Exponents:
    """The scales of the next iteration, from the sum of so many contributions."""
    first, following = is_first(exponents), np.where(exponents == UNSET, FIRST, exponents)
    energy, silent = _energy(total)
    if silent.all():
        return exponents
    sizes = np.full(exponents.size, BLOCK)
    sizes[-1] = total.size - BLOCK * (exponents.size - 1)
    excess = energy * HEADROOM[bits] ** 2 / (sizes * float(contributions * largest(bits) ** 2))
    _, steps = np.frexp(excess)
    steps = steps // 2  # the nearest power of two of a root
    if not first:
        steps = np.maximum(steps, -1)
    following = np.where(silent, following, following + steps)
    if first and silent.any():
        following[silent] = following[~silent].sum() // int((~silent).sum())  # as the others are on average
    return np.clip(following, FINEST, COARSEST).astype(np.int32)


def _energy(total: Integers) -> tuple[Floats, NDArray[np.bool_]]:
    """By blocks: the sum of squares, the same bits everywhere, and whether it is zero."""
    energy = np.empty(blocks_of(total.size))
    for where, blocks in spans(total.size):
        rows, spare = in_rows(total[where]), np.zeros(1, dtype=np.int32)
        if max(int(rows.max()), -int(rows.min())) >= _EXACT:
            _, length = np.frexp(np.maximum(rows.max(axis=1), -rows.min(axis=1).astype(np.int64)).astype(np.float64))
            spare = np.maximum(length - _EXACT.bit_length() + 1, 0)
            rows = rows >> spare[:, None]
        values = rows.astype(np.float64)
        energy[blocks] = np.ldexp(np.einsum("ij,ij->i", values, values), 2 * spare)
    return energy, energy == 0
