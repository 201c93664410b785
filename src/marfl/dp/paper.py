"""Algorithm 4 of MAR-FL (arXiv 2512.05234) to the letter, for comparison: it gives no guarantee.

A peer prepares what travels (`prepare`), MAR averages all four parts, and every peer updates its own clipping bound
with noise of its own (`next_bound`), so the bounds drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from marfl.dp.calibration import NoisePlan
from marfl.dp.mechanism import Adaptation, check_bound, clip
from marfl.dp.noise import NoiseSource

WARNING = (
    "privacy.mode = paper gives no privacy guarantee: the momentum travels neither clipped nor noised, clipping "
    "indicators are averaged in the clear, and group members see single updates under a small share of the noise"
)


@dataclass(frozen=True)
class PaperRule:
    """The paper's constants."""

    smoothing: float = 0.9  # β
    step: float = 0.1  # η_u
    adaptation: Adaptation = field(default_factory=Adaptation)  # γ and η_C


@dataclass(frozen=True, eq=False)
class Obtained:
    """What the peer got from the last aggregation it was in; others may hold something else."""

    theta: Tensor  # θ̄_i
    smoothed: Tensor | None  # Δ̄_i; None before the first aggregation


@dataclass(frozen=True, eq=False)
class Travelling:
    """What MAR averages, each part by itself."""

    theta: Tensor  # θ̂_i
    momentum: Tensor  # m_i, as it is
    indicator: float  # b_i, as it is
    smoothed: Tensor  # Δ̄_i


def prepare(
    theta: Tensor,
    momentum: Tensor,
    last: Obtained,
    bound: float,
    noise: NoisePlan,
    source: NoiseSource,
    rule: PaperRule,
) -> Travelling:
    """Lines 1 to 9: clip Δ_i to the peer's own C, add N(0, z²C²/n), smooth with β, step from the last model."""
    check_bound(bound)
    clipped, fits = clip(theta - last.theta, bound)
    noised = source(clipped.numel()).mul_(noise.update_share(bound)).add_(clipped)
    smoothed = noised if last.smoothed is None else noised.add_(last.smoothed, alpha=rule.smoothing)
    return Travelling(last.theta + rule.step * smoothed, momentum, float(fits), smoothed)


def next_bound(bound: float, mean_indicator: float, noise: NoisePlan, source: NoiseSource, rule: PaperRule) -> float:
    """The last two lines: b̃ = b̄ + N(0, σ_b²)/n with the peer's own noise, then C·exp(−η_C(b̃ − γ))."""
    blurred = mean_indicator + float(source(1)) * noise.indicator_deviation / noise.peers
    return rule.adaptation.next_bound(bound, blurred)
