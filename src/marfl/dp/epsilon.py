"""The ε of composed Gaussian events.

Gaussians without sampling compose to one, whose ε has a formula (Balle and Wang 2018, theorem 8): that is exact, and a
thousand times faster. With sampling it takes privacy loss distributions, from dp-accounting. Both libraries take long
to import, so each is imported when somebody asks for an ε that needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

LossDistribution: TypeAlias = Any  # pld.PrivacyLossDistribution, which comes without type information
STEPS_PER_DEVIATION = 200  # of the loss grid: the error in ε is at most about 0.2 %, and always upwards
LEAST_NOISE = 1e-4  # below it ε is above fifty million, which protects from nothing: infinite
STEPS_TO_MEAN = 100_000  # at most: where that binds, the error is 0.001 %
EPSILON_PRECISION = 1e-6  # relative, upwards


class GaussianEvent(NamedTuple):
    """A Gaussian mechanism, run on a secret Poisson sample if `sampling` is below 1."""

    noise_multiplier: float  # standard deviations of noise per unit of what one peer can change
    sampling: float = 1.0


Composition: TypeAlias = tuple[tuple[GaussianEvent, int], ...]  # distinct events and their counts, hashable


@lru_cache(maxsize=1024)
def epsilon_of(composition: Composition, delta: float) -> float:
    """The smallest ε that the composition of these events satisfies at δ.

    Exact without sampling, else an upper bound by at most about 0.2 %.
    """
    if not composition:
        return 0.0
    if any(event.noise_multiplier < LEAST_NOISE for event, _ in composition):
        return math.inf
    if all(event.sampling == 1 for event, _ in composition):
        spread = math.sqrt(sum(count / event.noise_multiplier**2 for event, count in composition))
        return _smallest_epsilon(partial(gaussian_delta, spread), delta)
    return _sampled_epsilon(composition, delta)


def _sampled_epsilon(composition: Composition, delta: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld

    step = max(_grid_step(event) for event, _ in composition)
    total = pld.identity(value_discretization_interval=step)
    for event, count in composition:
        one = _loss_distribution(event, step)
        total = total.compose(one if count == 1 else one.self_compose(count))
    if total.get_delta_for_epsilon(math.inf) > delta:
        return math.inf
    return _smallest_epsilon(total.get_delta_for_epsilon, delta)


def gaussian_delta(spread: float, epsilon: float) -> float:
    """δ(ε) of Gaussian noise of deviation 1 on something that one peer changes by `spread`."""
    from scipy.special import log_ndtr

    first = log_ndtr(spread / 2 - epsilon / spread)
    second = epsilon + log_ndtr(-spread / 2 - epsilon / spread)  # e^ε by itself would overflow
    return float(-math.exp(first) * math.expm1(second - first))


def _grid_step(event: GaussianEvent) -> float:
    """A step of the loss grid in proportion to the deviation of one event's loss, 1/σ without sampling."""
    # Sampling shrinks a loss about in proportion to q, but composition widens it again.
    step = math.sqrt(event.sampling) / event.noise_multiplier / STEPS_PER_DEVIATION
    # With hardly any noise the mean loss, 1/2σ², is so many deviations away that the grid would fill the memory.
    return max(step, 0.5 / event.noise_multiplier**2 / STEPS_TO_MEAN)


@lru_cache(maxsize=64)
def _loss_distribution(event: GaussianEvent, step: float) -> LossDistribution:
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.privacy_accountant import NeighboringRelation

    return pld.from_gaussian_mechanism(
        event.noise_multiplier,
        sampling_prob=event.sampling,
        value_discretization_interval=step,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
    )


def _smallest_epsilon(delta_at: Callable[[float], float], delta: float) -> float:
    """The smallest ε with δ(ε) ≤ δ, by bisection, rounded up.

    The library's own inverse sums exp(−loss), which is 0 in floating point for losses above 745.
    """
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_at(high) > delta:
        low, high = high, 2 * high
    while high - low > EPSILON_PRECISION * high:
        middle = (low + high) / 2
        if delta_at(middle) > delta:
            low = middle
        else:
            high = middle
    return high
