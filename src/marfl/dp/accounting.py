"""What was given away, and the ε it comes to, for three observers.

The mechanism emits one `Release` per iteration; a `PrivacyLedger` counts equal ones. ε and δ mean: whatever an
observer looks for, it finds with at most e^ε times the probability (plus δ) that it would have with a neighbouring run.

Why each observer sees what is accounted:

- The outsider sees totals, so all shares of noise that arrived protect a peer from it.
- The insider sees a peer's own noised vector, protected by one share only. The exchanges `chunked` and `grid` show it
  a part, but one part may hold the whole norm. Later totals add nothing: they are that vector plus what does not
  depend on the peer. An abandoned iteration cost the insider's victims as much as a finished one.
- The masked insider sees totals too, but knows the share that it drew itself, and can subtract it.

Gaussian releases compose exactly: the squares of their 1/σ add up (Dong, Roth and Su 2022, corollary 3.3). So without
sampling they compose to one, whose ε has a formula (Balle and Wang 2018, theorem 8): that is exact, and a thousand
times faster. With sampling it takes privacy loss distributions, from dp-accounting. Both libraries take long to import,
so each is imported when somebody asks for an ε that needs it. Noise is of integers: what it is worth is at least what
is accounted here, for sampled and composed releases alike, but for less than 10⁻¹⁰⁰ (see `lattice`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self, TypeAlias

from marfl.errors import BrokenPromise, InputError

LARGEST_DELTA = 0.5
MEANINGLESS_DELTA = 0.01  # above it one guess in a hundred may be certain
SECOND_DELTA = 1e-5  # at which every answer has a second ε, to compare runs by

ADJACENCY_OF_RECORDS = (
    "one record added or removed: two runs are neighbours when one peer has one record more in one of them, whatever "
    "it is; all other records, the roster and all noise stay"
)

ADJACENCY = (
    "zero-out: two runs are neighbours when everything one peer computes from its data, its clipped update and its "
    "clipping indicator of every iteration, is replaced by zero in one of them; the roster and all noise stay"
)

LossDistribution: TypeAlias = Any  # pld.PrivacyLossDistribution, which comes without type information
STEPS_PER_DEVIATION = 200  # of the loss grid: the error in ε is at most about 0.2 %, and always upwards
LEAST_NOISE = 1e-4  # below it ε is above fifty million, which protects from nothing: infinite
STEPS_TO_MEAN = 100_000  # at most: where that binds, the error is 0.001 %
EPSILON_PRECISION = 1e-6  # relative, upwards


class Observer(StrEnum):
    """Who tries to learn something about one peer."""

    OUTSIDER = "outsider"  # sees the global models and clipping bounds, nothing else
    INSIDER = "insider"  # a group member that sees a peer's noised update and indicator whole, in every iteration
    INSIDER_MASKED = "insider_masked"  # the same member when sums are masked: sees totals, knows its own noise


COLUMNS = tuple(f"epsilon_{observer}" for observer in Observer)  # of a run's rows


class GaussianEvent(NamedTuple):
    """A Gaussian mechanism, run on a secret Poisson sample if `sampling` is below 1."""

    noise_multiplier: float  # standard deviations of noise per unit of what one peer or record can change
    sampling: float = 1.0
    replaced: bool = False  # under a sample: neighbours differ in what a record is, not in whether it is there


Composition: TypeAlias = tuple[tuple[GaussianEvent, int], ...]  # distinct events and their counts, hashable


@dataclass(frozen=True)
class Release:
    """What one iteration gave away, with the noise that really arrived.

    Sampling amplifies privacy only while nobody can tell who was sampled. Which records are in a batch is its peer's
    secret. A roster is public, so who is in it and who is not amplifies nothing.
    """

    noise_multiplier: float  # σ that the shares of noise were cut for
    peers: int  # n that they were cut for; more may arrive, and then protect the better
    arrived: int  # shares in the published total; 0: the iteration was abandoned after the exchange began
    tolerated_loss: float = 0.0  # f that they were cut for
    sampling: float = 1.0  # q < 1: each record is in its peer's batch with this probability, in secret
    colluders: int = 0  # peers whose shares the observer knows

    def __post_init__(self) -> None:
        if not 0 < self.sampling <= 1:
            raise InputError(f"sampling = {self.sampling:g}: must be above 0 and at most 1")
        if self.arrived < 0:
            raise BrokenPromise(f"{self.arrived} shares of noise arrived")

    def event(self, observer: Observer, *, replacing: bool = False) -> GaussianEvent | None:
        """What it is to one observer, or None if that one saw nothing.

        Replacing moves twice as far as zeroing. Where records are sampled, both the old and the new one may be there.
        """
        if observer is not Observer.INSIDER and not self.arrived:
            return None
        share = self._unknown(observer) / ((1 - self.tolerated_loss) * self.peers)
        noise = self.noise_multiplier * math.sqrt(share)
        if replacing and self.sampling == 1:
            return GaussianEvent(noise / 2)
        return GaussianEvent(noise, self.sampling, replacing)

    def _unknown(self, observer: Observer) -> int:
        """Shares of noise that the observer does not know: those that arrived, without its own and its colluders'."""
        if observer is Observer.INSIDER:
            return 1
        others = self.arrived - (observer is Observer.INSIDER_MASKED)
        return max(min(others, 1), others - self.colluders)  # the victim's own share is always among them


@dataclass(frozen=True)
class PrivacyLedger:
    """Every release so far, for a peer that took part in all of them. Immutable: `add` gives the next ledger.

    A peer that missed iterations lost less than this says; its own ledger holds its own iterations only.
    """

    entries: tuple[tuple[Release, int], ...] = ()  # distinct releases and how often each happened

    def add(self, release: Release, times: int = 1) -> PrivacyLedger:
        """The ledger after `times` more of this release."""
        counts = dict(self.entries)
        counts[release] = counts.get(release, 0) + times
        return PrivacyLedger(tuple(counts.items()))

    def told_by(self, colluders: int) -> PrivacyLedger:
        """The same releases before an observer with so many colluders: who they are is assumed now, not then."""
        found = PrivacyLedger()
        for release, times in self.entries:
            found = found.add(replace(release, colluders=colluders), times)
        return found

    def epsilon(self, observer: Observer, delta: float, *, replacing: bool = False) -> float:
        """The ε that this observer's view satisfies at δ: an upper bound, infinite where nothing protects.

        `replacing`: for neighbours in which the data of the peer, or the record, is replaced by any other.
        """
        check_delta(delta)
        events = self._events(observer, replacing)
        if any(event.noise_multiplier == 0 for event in events):
            return math.inf
        return epsilon_of(_compact(events), delta)

    def epsilons(self, delta: float, *, replacing: bool = False) -> dict[Observer, float]:
        """ε for all three observers."""
        return {observer: self.epsilon(observer, delta, replacing=replacing) for observer in Observer}

    def to_rows(self) -> list[dict[str, Any]]:
        """For a checkpoint: a peer that forgot its ledger would spend its budget twice."""
        return [{"release": asdict(release), "times": times} for release, times in self.entries]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """The inverse of `to_rows`."""
        return cls(tuple((Release(**row["release"]), row["times"]) for row in rows))

    def _events(self, observer: Observer, replacing: bool) -> Counter[GaussianEvent]:
        counts: Counter[GaussianEvent] = Counter()
        for release, times in self.entries:
            event = release.event(observer, replacing=replacing)
            if event is not None:
                counts[event] += times
        return counts


def check_delta(delta: float) -> None:
    """Refuse a δ that means nothing."""
    if not 0 < delta < LARGEST_DELTA:
        raise InputError(f"delta = {delta:g}: must be above 0 and below {LARGEST_DELTA:g}")


def delta_warnings(delta: float, units: int, unit: str) -> list[str]:
    """What is wrong with a δ at which the promise says little; `units` peers or records are protected."""
    if delta > MEANINGLESS_DELTA:
        return [f"delta = {delta:.3g} is above {MEANINGLESS_DELTA:g}: so often nothing at all may be hidden"]
    if delta > 1 / units:
        return [f"delta = {delta:.3g} is above 1 in {units:,}: to give away one {unit} whole would be allowed"]
    return []


def _compact(counts: Mapping[GaussianEvent, int]) -> Composition:
    """The same composition with all unsampled Gaussians as one: 1/σ² = Σ 1/σ_t², exactly."""
    plain = [(event, count) for event, count in counts.items() if event.sampling == 1]
    sampled = [(event, count) for event, count in counts.items() if event.sampling < 1]
    if not plain:
        return tuple(sampled)
    precision = math.fsum(count / event.noise_multiplier**2 for event, count in plain)
    return ((GaussianEvent(1 / math.sqrt(precision)), 1), *sampled)


# --- the ε of composed Gaussian events ---


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
    return _smallest_epsilon(total.get_delta_for_epsilon, delta, total.get_epsilon_for_delta(delta))


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

    relation = NeighboringRelation.REPLACE_ONE if event.replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    return pld.from_gaussian_mechanism(
        event.noise_multiplier,
        sampling_prob=event.sampling,
        value_discretization_interval=step,
        neighboring_relation=relation,
    )


def _smallest_epsilon(delta_at: Callable[[float], float], delta: float, guess: float = 0.0) -> float:
    """The smallest ε with δ(ε) ≤ δ, by bisection, rounded up.

    A guess saves most of the work: the library's own inverse. It sums exp(−loss), which is 0 in floating point for
    losses above 745, so a guess is believed where δ(ε) on both sides of it bears it out, and changes no result.
    """
    least, most = guess * (1 - EPSILON_PRECISION / 2), guess * (1 + EPSILON_PRECISION / 2)
    if not (0 < guess < math.inf and delta_at(most) <= delta < delta_at(least)):
        least, most = -1.0, math.inf

    def exceeds(epsilon: float) -> bool:
        return epsilon <= least or (epsilon < most and delta_at(epsilon) > delta)

    if not exceeds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while exceeds(high):
        low, high = high, 2 * high
    while high - low > EPSILON_PRECISION * high:
        middle = (low + high) / 2
        if exceeds(middle):
            low = middle
        else:
            high = middle
    return high
