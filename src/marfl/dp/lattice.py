"""How a private contribution becomes integers: their scale, their noise and their field follow from public numbers.

The clipping bound C is worth L steps, so a value v travels as v·L/C, truncated towards zero: no norm grows. A peer's
share of the noise on each integer is an exact discrete Gaussian of variance V. The clipping indicator 2b − 1 travels as
±L_b behind them, under the same noise. What one peer can change is then a vector of integers with a norm of at most
Δ = √(L² + L_b²), and V = σ²Δ²/((1−f)n) + R, rounded up. Sums are modulo 2^w: values wrap, and are never clamped.

**What it is worth.** No observer learns more from k shares than from continuous Gaussian noise of variance k(V − R),
but for a factor e^±x on every probability, x ≤ d·(5(k−1)·e^(−π²V) + 5η) for d values, η = 2.1·e^(−2π²R):

1. The sum of k discrete Gaussians is one of variance kV but for a factor e^±5Σ_j exp(−2π²V·j/(j+1)) at every integer
   (Kairouz, Liu and Steinke 2021, theorem 9 and its induction).
2. A discrete Gaussian of variance kV around an integer μ is a continuous one of variance kV − R around μ, rounded at
   random: y goes to the integer x with probability in proportion to exp(−(x − y)²/2R). These add up to √(2πR)·(1 ± η)
   over all x for every y, by Poisson summation, and the rounding does not know μ: so it is post-processing, but for
   the factor 1 ± η there and in the sum over the integers of the Gaussian itself.

Both hold value by value, so in any number of dimensions. An (ε, δ) of the continuous mechanism, composed over T
iterations and sampled or not, is then (ε + 2Tx, δ·e^Tx) of this one. Scales at which x matters are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from marfl.dp.calibration import NoisePlan
from marfl.dp.discrete_gaussian import LARGEST_VARIANCE
from marfl.errors import InputError
from marfl.wire.packing import NoiseRoom

ROUNDING_VARIANCE = 16  # R
STEPS_PER_VALUE = 256  # of the root mean square of an update's values, so that truncation does not eat the signal
LEAST_DEVIATION = 1024  # of a share of noise, in steps: R is then a 65,000th of its variance
LARGEST_EXCESS = 1e-30  # x of one iteration: 2Tx is nothing in any run
MOST_POWER = 30  # of L: squares add up in 64 bits
WIDTHS = (16, 32, 64)  # bits of the field
GROWTH = 2  # a field has room for so many times the shares: a roster may grow


@dataclass(frozen=True)
class Lattice:
    """The integers of one run. Every number here is public, and none depends on data."""

    steps: int  # L: what the bound is worth
    indicator_steps: int  # L_b: what the indicator is worth; 0: none travels
    variance: int  # V of one share, on every value
    values: int  # d
    shares: int  # n
    units: int = 1  # what a share holds: one peer's update, or so many records that the field must have room for

    def __post_init__(self) -> None:
        if self.variance > LARGEST_VARIANCE or self.width > WIDTHS[-1]:
            raise InputError(f"noise_multiplier: so much noise on {self.values} values that it does not fit 64 bits")
        if self.excess > LARGEST_EXCESS:
            raise InputError(f"{self.steps} steps for the bound: too few to account for, their noise is not Gaussian")

    @property
    def excess(self) -> float:
        """x: the logarithm of the factor by which a probability may differ from what is accounted, per iteration."""
        if self.variance <= ROUNDING_VARIANCE:
            return math.inf
        of_sum = 5 * self.shares * math.exp(-(math.pi**2) * self.variance)
        of_rounding = 5 * 2.1 * math.exp(-2 * math.pi**2 * ROUNDING_VARIANCE)
        return self.values * (of_sum + of_rounding)

    @property
    def width(self) -> int:
        """w: the narrowest field in which a sum over all shares does not wrap, but with a probability below 2⁻¹⁰⁰."""
        members = GROWTH * self.shares
        return next((width for width in WIDTHS if self.room.holds(members, width)), 2 * WIDTHS[-1])

    @property
    def room(self) -> NoiseRoom:
        """What a field must have room for."""
        return NoiseRoom(self.units * self.steps, self.variance)


def lattice_of(noise: NoisePlan, length: int, *, units: int = 1, most_power: int = MOST_POWER) -> Lattice:
    """The integers for a model of so many values under this noise; L is at most 2^most_power."""
    power = min(most_power, math.ceil(math.log2(STEPS_PER_VALUE * math.sqrt(length))))
    while noise.update_share(1 << power) < LEAST_DEVIATION and power < most_power:
        power += 1
    while noise.update_share(1 << power) > math.sqrt(LARGEST_VARIANCE) / 2 and power > 1:
        power -= 1  # so much noise that the signal is lost in it anyway
    steps = 1 << power
    indicator = math.floor(steps * noise.indicator_weight)
    exact = noise.noise_multiplier**2 * (steps**2 + indicator**2) / noise.survivors
    variance = math.ceil(exact * (1 + 2.0**-40)) + ROUNDING_VARIANCE
    return Lattice(steps, indicator, variance, length + (indicator > 0), noise.peers, units)
