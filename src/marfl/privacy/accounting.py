"""What was given away, and the ε it comes to, for three observers (privacy loss distributions, by dp-accounting).

The mechanism emits one `Release` per iteration; a `Ledger` counts equal ones. ε and δ mean: whatever an observer
looks for, it finds with at most e^ε times the probability (plus δ) that it would have with a neighbouring run.

Why each observer sees what is accounted:

- The outsider sees totals, so all shares of noise that arrived protect a peer from it.
- The insider sees a peer's own noised vector, protected by one share only. The exchanges `chunked` and `grid` show it
  a part, but one part may hold the whole norm. Later totals add nothing: they are that vector plus what does not
  depend on the peer. An abandoned iteration cost the insider's victims as much as a finished one.
- The masked insider sees totals too, but knows the share that it drew itself, and can subtract it.

Gaussian releases compose exactly: the squares of their 1/σ add up (Dong, Roth and Su 2022, corollary 3.3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeAlias

from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.privacy_accountant import NeighboringRelation

from marfl.errors import BrokenPromise, InputError

LossDistribution: TypeAlias = Any  # pld.PrivacyLossDistribution, which comes without type information

ADJACENCY = (
    "zero-out: two runs are neighbours when everything one peer computes from its data, its clipped update and its "
    "clipping indicator of every iteration, is replaced by zero in one of them; the roster and all noise stay"
)
STEPS_PER_DEVIATION = 200  # of the loss grid: the error in ε is at most about 0.2 %, and always upwards
EPSILON_PRECISION = 1e-6  # relative, upwards


class Observer(StrEnum):
    """Who tries to learn something about one peer."""

    OUTSIDER = "outsider"  # sees the global models and clipping bounds, nothing else
    INSIDER = "insider"  # a group member that sees a peer's noised update and indicator whole, in every iteration
    INSIDER_MASKED = "insider_masked"  # the same member when sums are masked: sees totals, knows its own noise


@dataclass(frozen=True)
class Release:
    """What one iteration gave away, with the noise that really arrived.

    Sampling amplifies privacy only while nobody can tell who was sampled. A roster is public, so who is in it and who
    is not amplifies nothing: leave `sampling` at 1 for partial participation.
    """

    noise_multiplier: float  # σ that the shares of noise were cut for
    peers: int  # n that they were cut for
    arrived: int  # shares in the published total; 0: the iteration was abandoned after the exchange began
    tolerated_loss: float = 0.0  # f that they were cut for
    sampling: float = 1.0  # q < 1: each member tosses a secret coin, and sends noise alone unless it shows heads

    def __post_init__(self) -> None:
        if not 0 < self.sampling <= 1:
            raise InputError(f"sampling = {self.sampling:g}: must be above 0 and at most 1")
        if not 0 <= self.arrived <= self.peers:
            raise BrokenPromise(f"{self.arrived} shares of noise arrived from a roster of {self.peers}")

    def event(self, observer: Observer) -> Event | None:
        """What it is to one observer, or None if that one saw nothing."""
        if observer is not Observer.INSIDER and not self.arrived:
            return None
        unknown = {Observer.OUTSIDER: self.arrived, Observer.INSIDER: 1, Observer.INSIDER_MASKED: self.arrived - 1}
        share = unknown[observer] / ((1 - self.tolerated_loss) * self.peers)
        return Event(self.noise_multiplier * math.sqrt(share), self.sampling)


class Event(NamedTuple):
    """A Gaussian mechanism, run on a secret Poisson sample if `sampling` is below 1."""

    noise_multiplier: float  # standard deviations of noise per unit of what one peer can change
    sampling: float = 1.0


@dataclass(frozen=True)
class Ledger:
    """Every release so far, for a peer that took part in all of them. Immutable: `add` gives the next ledger.

    A peer that missed iterations lost less than this says; its own ledger holds its own iterations only.
    """

    entries: tuple[tuple[Release, int], ...] = ()  # distinct releases and how often each happened

    def add(self, release: Release, times: int = 1) -> Ledger:
        """The ledger after `times` more of this release."""
        counts = dict(self.entries)
        counts[release] = counts.get(release, 0) + times
        return Ledger(tuple(counts.items()))

    def epsilon(self, observer: Observer, delta: float) -> float:
        """The ε that this observer's view satisfies at δ: an upper bound, infinite where nothing protects."""
        check_delta(delta)
        events = self._events(observer)
        if any(event.noise_multiplier == 0 for event in events):
            return math.inf
        return _epsilon(_compact(events), delta)

    def epsilons(self, delta: float) -> dict[Observer, float]:
        """ε for all three observers."""
        return {observer: self.epsilon(observer, delta) for observer in Observer}

    def to_rows(self) -> list[dict[str, Any]]:
        """For a checkpoint: a peer that forgot its ledger would spend its budget twice."""
        return [{"release": asdict(release), "times": times} for release, times in self.entries]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """The inverse of `to_rows`."""
        return cls(tuple((Release(**row["release"]), row["times"]) for row in rows))

    def _events(self, observer: Observer) -> Counter[Event]:
        counts: Counter[Event] = Counter()
        for release, times in self.entries:
            event = release.event(observer)
            if event is not None:
                counts[event] += times
        return counts


Composition: TypeAlias = tuple[tuple[Event, int], ...]  # distinct events and their counts, hashable


def check_delta(delta: float) -> None:
    """Refuse a δ that means nothing."""
    if not 0 < delta < 1:
        raise InputError(f"delta = {delta:g}: must be above 0 and below 1")


def _compact(counts: Mapping[Event, int]) -> Composition:
    """The same composition with all unsampled Gaussians as one: 1/σ² = Σ 1/σ_t², exactly."""
    plain = [(event, count) for event, count in counts.items() if event.sampling == 1]
    sampled = [(event, count) for event, count in counts.items() if event.sampling < 1]
    if not plain:
        return tuple(sampled)
    precision = math.fsum(count / event.noise_multiplier**2 for event, count in plain)
    return ((Event(1 / math.sqrt(precision)), 1), *sampled)


@lru_cache(maxsize=1024)
def _epsilon(composition: Composition, delta: float) -> float:
    if not composition:
        return 0.0
    step = max(_grid_step(event) for event, _ in composition)
    total = pld.identity(value_discretization_interval=step)
    for event, count in composition:
        one = _loss_distribution(event, step)
        total = total.compose(one if count == 1 else one.self_compose(count))
    return _smallest_epsilon(total, delta)


def _grid_step(event: Event) -> float:
    """A step of the loss grid in proportion to the deviation of one event's loss, 1/σ without sampling."""
    # Sampling shrinks a loss about in proportion to q, but composition widens it again.
    return math.sqrt(event.sampling) / event.noise_multiplier / STEPS_PER_DEVIATION


@lru_cache(maxsize=64)
def _loss_distribution(event: Event, step: float) -> LossDistribution:
    return pld.from_gaussian_mechanism(
        event.noise_multiplier,
        sampling_prob=event.sampling,
        value_discretization_interval=step,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
    )


def _smallest_epsilon(total: LossDistribution, delta: float) -> float:
    """The smallest ε with δ(ε) ≤ δ, by bisection, rounded up.

    The library's own inverse sums exp(−loss), which is 0 in floating point for losses above 745.
    """
    if total.get_delta_for_epsilon(math.inf) > delta:
        return math.inf
    if total.get_delta_for_epsilon(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while total.get_delta_for_epsilon(high) > delta:
        low, high = high, 2 * high
    while high - low > EPSILON_PRECISION * high:
        middle = (low + high) / 2
        if total.get_delta_for_epsilon(middle) > delta:
            low = middle
        else:
            high = middle
    return high
