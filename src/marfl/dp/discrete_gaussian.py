"""Exact draws from the discrete Gaussian, in bulk (Canonne, Kamath and Steinke 2020: P[x] ∝ exp(−x²/2V), x an integer).

Rejection from a staircase: a sign, a band k with weight exp(−(kK)²/2V), a place y in it, uniform in 0 … K−1, and
x = ±(kK + y) is kept with probability exp(−y(y + 2kK)/2V), −0 never. So P[x] is in proportion to exp(−x²/2V).

Every decision compares a uniform number, of which some bits are drawn, with a real number. A table or a float decides
where the two are further apart than its error can be; else more bits are drawn, and decimals of as many digits as it
takes decide (Python's are correctly rounded). So the draws are exact, and the same on every platform for the same bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR, Context, Decimal
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = Callable[[int], NDArray[np.uint64]]  # count → so many independent uniform words of 64 bits
Integers: TypeAlias = NDArray[np.int64]

LARGEST_VARIANCE = 2**56  # what is drawn stays far below 2⁶³
_CHUNK = 1 << 14  # draws at a time: what they need stays in the cache
_GUIDE_BITS = 16  # of a word that choose the band, where they suffice
_SIGN, _PLACE = _GUIDE_BITS, _GUIDE_BITS + 1  # the bit of the sign, and the first of the place
_SLACK = 4  # units of 2⁻⁶⁴: more than the error of the table's boundaries
_ERROR = 2.0**-40  # relative: far more than that of a float's exp(−t/2V), t/2V being below 50
_DIGITS = 50  # at first, of decimals


def discrete_gaussian(count: int, variance: int, words: Words, bits: int = 64) -> NDArray[np.signedinteger[Any]]:
    """So many independent draws with P[x] ∝ exp(−x²/2V), exactly; modulo 2^bits."""
    if not 1 <= variance <= LARGEST_VARIANCE:
        raise ValueError(f"a variance of {variance}")
    staircase = _staircase(variance)
    drawn, filled = np.empty(count, dtype=f"i{bits // 8}"), 0
    while filled < count:
        some = staircase.draw(min(_CHUNK, count - filled + 64), words)[: count - filled]
        drawn[filled : filled + len(some)] = some
        filled += len(some)
    return drawn


def _cut(words: Words, count: int, bits: int) -> NDArray[np.unsignedinteger[Any]]:
    """So many words of fewer bits."""
    return words(-(-count * bits // 64)).view(f"u{bits // 8}")[:count]


@lru_cache(maxsize=8)
def _staircase(variance: int) -> Staircase:
    return Staircase(variance)


@dataclass(frozen=True)
class Staircase:
    """What the draws of one variance are rejected from."""

    variance: int  # V
    guide_bits: int = _GUIDE_BITS  # fewer in tests, which then see the exact way often
    chance_bits: int = 32  # of the uniform number that keeps or rejects
    _boundaries: dict[int, list[Decimal]] = field(default_factory=dict, repr=False)  # by their digits

    @cached_property
    def shift(self) -> int:
        """K = 2^shift, a 16th to a 32nd of the deviation: hardly anything is rejected, and there are few bands."""
        return max(0, (self.variance.bit_length() - 1) // 2 - 4)

    @cached_property
    def bits(self) -> int:
        """Of a word that gives band, sign and place: half of the usual is enough for most, and takes half the time."""
        return 32 if _PLACE + self.shift <= 32 else 64

    def draw(self, tries: int, words: Words) -> NDArray[np.signedinteger[Any]]:
        """What is kept of so many tries."""
        word = _cut(words, tries, self.bits)
        signed = np.dtype(f"i{self.bits // 8}")
        begin = self._begins(word, words)
        place = ((word >> word.dtype.type(_PLACE)) & word.dtype.type((1 << self.shift) - 1)).view(signed)
        x = begin + place
        begin += x
        kept = self._kept(begin, place, words)
        sign = (word << word.dtype.type(self.bits - 1 - _SIGN)).view(signed)
        sign >>= signed.type(self.bits - 1)  # −1 or 0
        for at in np.nonzero(x == 0)[0]:
            kept[at] &= not sign[at]  # zero has one sign
        x ^= sign
        x -= sign
        found: NDArray[np.signedinteger[Any]] = x[kept]
        return found

    # --- the band ---

    def _begins(self, word: NDArray[np.unsignedinteger[Any]], words: Words) -> NDArray[np.signedinteger[Any]]:
        """kK of each."""
        first = word & word.dtype.type((1 << self.guide_bits) - 1)
        begins = self._guide.take(first)
        (unsure,) = np.nonzero(begins < 0)
        if len(unsure):
            rest = 64 - self.guide_bits
            longer = (first[unsure].astype(np.uint64) << np.uint64(rest)) | (
                words(len(unsure)) >> np.uint64(self.guide_bits)
            )
            low, high = self._located(longer, longer)
            begins[unsure] = low << self.shift
            for at in np.nonzero(low != high)[0]:
                begins[unsure[at]] = self.band_exactly(int(longer[at]), 64, words) << self.shift
        return begins

    @cached_property
    def _guide(self) -> NDArray[np.signedinteger[Any]]:
        """By the first bits of a uniform number where its band begins, where they decide it; else −1."""
        rest = np.uint64(64 - self.guide_bits)
        first = np.arange(1 << self.guide_bits, dtype=np.uint64) << rest
        low, high = self._located(first, first + ((np.uint64(1) << rest) - np.uint64(1)))
        return np.where(low == high, low << self.shift, -1).astype(f"i{self.bits // 8}")

    def _located(self, least: NDArray[np.uint64], most: NDArray[np.uint64]) -> tuple[Integers, Integers]:
        """The bands that a number between these, in units of 2⁻⁶⁴, may be in; beyond the last boundary any may."""
        slack, top = np.uint64(_SLACK), np.uint64(2**64 - 1)
        low = np.searchsorted(self._table, np.maximum(least, slack) - slack, side="right")
        high = np.searchsorted(self._table, np.minimum(most, top - slack) + slack, side="right")
        return low, np.where(high == len(self._table), -1, high)

    @cached_property
    def _table(self) -> NDArray[np.uint64]:
        """The upper ends of the bands in units of 2⁻⁶⁴."""
        exact = Context(prec=_DIGITS, rounding=ROUND_FLOOR)
        ends = [int(exact.multiply(end, 2**64)) for end in self.boundaries(_DIGITS)]
        return np.array([end for end in ends if end < 2**64 - 2 * _SLACK], dtype=np.uint64)

    def boundaries(self, digits: int) -> list[Decimal]:
        """The upper ends of the bands, as parts of the whole, with an error below 10^(10−digits)."""
        if digits not in self._boundaries:
            exact = Context(prec=digits)
            weights: list[Decimal] = []
            while not weights or weights[-1] > Decimal(10) ** -digits:
                weights.append(exact.exp(exact.divide(-((len(weights) << self.shift) ** 2), 2 * self.variance)))
            ends = [weights[0]]
            for weight in weights[1:]:
                ends.append(exact.add(ends[-1], weight))
            self._boundaries[digits] = [exact.divide(end, ends[-1]) for end in ends]
        return self._boundaries[digits]

    def band_exactly(self, first: int, bits: int, words: Words) -> int:
        """The band of a uniform number whose first bits are these; more are drawn until they decide it."""
        digits = _DIGITS
        while True:
            exact, error = Context(prec=digits), Decimal(10) ** (10 - digits)
            low = exact.subtract(exact.divide(first, 2**bits), error)
            high = exact.add(exact.divide(first + 1, 2**bits), error)
            ends = self.boundaries(digits)
            band = bisect_right(ends, low)
            if band == bisect_right(ends, high) and high < 1 - error:
                return band
            first, bits, digits = first << 64 | int(words(1)[0]), bits + 64, digits + 40

    # --- to keep it or not ---

    def _kept(
        self, sums: NDArray[np.signedinteger[Any]], places: NDArray[np.signedinteger[Any]], words: Words
    ) -> NDArray[np.bool_]:
        """Of each y and y + 2kK, whether a uniform number is below exp(−y(y + 2kK)/2V)."""
        drawn = _cut(words, len(sums), 32) >> np.uint32(32 - self.chance_bits)
        likely = np.multiply(sums, -0.5 / self.variance)
        likely *= places
        np.exp(likely, out=likely)
        likely *= 2.0**self.chance_bits
        likely -= drawn
        room = 2.0**self.chance_bits * _ERROR
        kept: NDArray[np.bool_] = likely >= 1 + room
        doubtful = likely > -room
        doubtful ^= kept
        for at in np.nonzero(doubtful)[0]:
            distance = int(sums[at]) * int(places[at])
            kept[at] = self.kept_exactly(distance, int(drawn[at]), self.chance_bits, words)
        return kept

    def kept_exactly(self, distance: int, first: int, bits: int, words: Words) -> bool:
        """Whether a uniform number whose first bits are these is below exp(−distance/2V)."""
        digits = _DIGITS
        while True:
            exact, error = Context(prec=digits), Decimal(10) ** (10 - digits)
            limit = exact.exp(exact.divide(-distance, 2 * self.variance))
            if exact.divide(first + 1, 2**bits) <= limit - error or not distance:
                return True
            if exact.divide(first, 2**bits) >= limit + error:
                return False
            first, bits, digits = first << 64 | int(words(1)[0]), bits + 64, digits + 40
