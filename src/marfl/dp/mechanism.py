"""The sound mechanism: adaptive clipping (Andrew et al. 2021) with the noise cut into shares that peers add themselves.

In an iteration every peer subtracts what is public from its update, bounds the rest, makes integers of it (`lattice`),
blurs it and sends one vector: P values of the update and, where the bound adapts, its clipping indicator as one more.
Nothing else computed from data leaves it. All peers settle the same total into the same update and the same bound.

The noise of an iteration is drawn once: a retry sends the very same vector again, because two vectors with fresh noise
would be two releases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal

import torch
from torch import Tensor

from marfl.dp.discrete_gaussian import Words, discrete_gaussian
from marfl.dp.lattice import Lattice
from marfl.errors import InputError

ROUNDING_ROOM = 1 - 2.0**-22  # the factor and the products are rounded to fp32: a clipped norm still never exceeds C
EXACT = Context(prec=40)
EXACT_BELOW = 2.0**53  # whole numbers that a float64 adds up exactly
AT_A_TIME = 1 << 15  # values that are worked on together: they stay in the cache
DTYPES = {16: torch.int16, 32: torch.int32, 64: torch.int64}  # by the bits of a field


@dataclass(frozen=True)
class Adaptation:
    """How the clipping bound follows the updates: C ← C·exp(−η_C(b̃ − γ))."""

    target_quantile: float = 0.5  # γ: the part of the updates that should fit the bound
    step: float = 0.2  # η_C

    def __post_init__(self) -> None:
        if not 0 <= self.target_quantile <= 1:
            raise InputError(f"target_quantile = {self.target_quantile:g}: must be between 0 and 1")
        if not 0 <= self.step < 100:
            raise InputError(f"clip step = {self.step:g}: must be at least 0 and below 100")

    def next_bound(self, bound: float, mean_indicator: float) -> float:
        """C of the next iteration, the same to the bit on every platform."""
        # A C library may round exp either way; decimal's is correctly rounded everywhere.
        factor = EXACT.exp(Decimal(-self.step * (mean_indicator - self.target_quantile)))
        return bound * float(factor)


def public_step(momentum: Tensor, *, learning_rate: float, decay: float, batches: int, trainable: int) -> Tensor:
    """E: what Δ would be with zero gradients, −η·Σ_{k=1…B} μ^k·m, from the agreed momentum alone.

    For one batch, where m = −Δ̄/η, that is μ·Δ̄ of the iteration before. Values from `trainable` on are buffers,
    which momentum does not move.
    """
    velocity = momentum.clone()
    velocity[trainable:] = 0
    travelled = torch.zeros_like(velocity)
    for _ in range(batches):
        travelled.add_(velocity.mul_(decay))
    return travelled.mul_(-learning_rate)


def bound_contribution(fresh: Tensor, bound: float, lattice: Lattice) -> Tensor:
    """The clipped fresh part in integers, and the clipping indicator ±L_b behind it: all that data decides of a vector.

    The indicator is positive if F_i fitted. An update with a NaN or an infinity counts as zero that did not fit:
    abstaining instead would tell everybody something about the data.
    """
    check_bound(bound)
    contribution = torch.empty(lattice.values, dtype=DTYPES[lattice.width])
    norm = float(torch.linalg.vector_norm(fresh, dtype=torch.float64))
    if math.isfinite(norm):
        truncate(fresh, max(norm, bound), lattice.steps, out=contribution[: fresh.numel()])
    else:
        contribution.zero_()
    if lattice.indicator_steps:
        contribution[-1] = lattice.indicator_steps if norm <= bound else -lattice.indicator_steps
    return contribution


def truncate(values: Tensor, whole: float, steps: int, *, out: Tensor) -> None:
    """The values in units of whole/steps, truncated towards zero, with a norm of at most `steps`, exactly.

    `whole` is no less than the norm of the values, but for rounding.
    """
    scale = steps / whole
    while _truncated(values, scale, out) > steps**2:
        scale *= ROUNDING_ROOM


def _truncated(values: Tensor, scale: float, out: Tensor) -> int:
    """Write the scaled values, truncated; their sum of squares, exactly."""
    squares = 0
    for start in range(0, values.numel(), AT_A_TIME):
        part = values[start : start + AT_A_TIME].to(torch.float64).mul_(scale).trunc_()
        out[start : start + AT_A_TIME] = part
        squares += _squares(part)
    return squares


def _squares(part: Tensor) -> int:
    """The sum of squares of whole numbers, exactly."""
    found = float(torch.dot(part, part))
    if found < EXACT_BELOW:
        return int(found)  # and so was every sum on the way
    whole = part.to(torch.int64)
    return int(whole @ whole)


def clip(update: Tensor, bound: float) -> tuple[Tensor, bool]:
    """The update times min(1, C/‖update‖), and whether it fitted as it was; zero if it is not finite."""
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if norm <= bound:
        return update, True
    if not math.isfinite(norm):
        return torch.zeros_like(update), False
    return update * (bound / norm * ROUNDING_ROOM), False


def blur(contribution: Tensor, lattice: Lattice, words: Words) -> Tensor:
    """The bounded contribution plus this peer's share of the noise, modulo the size of their field."""
    share = torch.from_numpy(discrete_gaussian(contribution.numel(), lattice.variance, words, lattice.width))
    return share.add_(contribution)


def privatise(fresh: Tensor, bound: float, lattice: Lattice, words: Words) -> Tensor:
    """All that a peer sends in an iteration: its fresh part F_i = Δ_i − E, bounded and blurred."""
    return blur(bound_contribution(fresh, bound, lattice), lattice, words)


@dataclass(frozen=True, eq=False)
class Settled:
    """What every peer makes of the mean."""

    mean_delta: Tensor  # Δ̄ = E + ΣF̃_i/n
    bound: float  # C of the next iteration


def settle(
    mean: Tensor, public: Tensor, bound: float, lattice: Lattice, adaptation: Adaptation, scale: float = 1.0
) -> Settled:
    """The mean update and the next clipping bound from the mean of the noised integers: post-processing only.

    `scale` is what becomes of a bounded vector in the update: public, and the same for all.
    """
    moved, factor = torch.empty_like(public), bound * scale / lattice.steps
    for start in range(0, public.numel(), AT_A_TIME):
        here = slice(start, min(start + AT_A_TIME, public.numel()))
        torch.add(mean[here].to(torch.float64).mul_(factor).to(torch.float32), public[here], out=moved[here])
    following = bound
    if lattice.indicator_steps:
        mean_indicator = (float(mean[-1]) / lattice.indicator_steps + 1) / 2  # of 2b − 1
        following = adaptation.next_bound(bound, mean_indicator)
    return Settled(moved, following)


def check_bound(bound: float) -> None:
    """Refuse a clipping bound that cannot scale noise."""
    if not 0 < bound < math.inf:
        raise InputError(f"clip = {bound:g}: must be a number above 0")
