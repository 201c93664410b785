"""During a run: what it has given away so far, the columns of its rows, and when its budget ends it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from marfl.config import Config
from marfl.dp.accounting import (
    ADJACENCY,
    ADJACENCY_OF_RECORDS,
    Observer,
    PrivacyLedger,
    Release,
    delta_warnings,
)
from marfl.dp.calibration import least_arrived
from marfl.dp.paper import WARNING
from marfl.dp.privacy_settings import delta_of, noise_of, shares_of, units_of

SIMULATED = (
    "simulated: all noise follows from the run's seed, so whoever knows it can take it off, and this model is not "
    "private; the epsilons are those of a real swarm with these settings"
)


def affordable(
    ledger: PrivacyLedger, upcoming: Release, target_epsilon: float, observer: Observer, delta: float
) -> bool:
    """Whether the observer's ε is still within the target after one more such release: a run stops when it is not."""
    return ledger.add(upcoming).epsilon(observer, delta) <= target_epsilon


class Spending:
    """The ledger of a run in sound mode, for a peer that took part in everything that is added to it."""

    def __init__(self, config: Config, saved: Iterable[Mapping[str, Any]] = ()) -> None:
        self.noise = noise_of(config, shares_of(config))
        self.delta = delta_of(config)
        self.target = config.privacy.target_epsilon
        self.observer = Observer(config.privacy.target_observer or Observer.INSIDER)
        self.iterations = config.iterations
        self.warnings = delta_warnings(self.delta, units_of(config), config.privacy.unit)
        self.ledger = PrivacyLedger.from_rows(saved).told_by(self.noise.colluders)

    def add(self, arrived: int) -> None:
        """Account for an iteration whose total holds so many shares of noise; 0: it was abandoned."""
        self.ledger = self.ledger.add(self.noise.release(arrived))

    def affords(self, iteration: int | None, expected: int | None = None, pending: int | None = None) -> bool:
        """Whether this iteration, the next one, stays within the target if no more is lost than tolerated or expected.

        The horizon is the same for all peers; an own ledger can only end a peer's part earlier. Without an iteration
        there is no horizon. `pending` are the shares in a total that is still to be added.
        """
        if self.target is None:
            return True
        if iteration is not None and iteration > self.horizon:
            return False
        upcoming = self.noise.release(self.least if expected is None else min(self.least, expected))
        ledger = self.ledger if pending is None else self.ledger.add(self.noise.release(pending))
        return affordable(ledger, upcoming, self.target, self.observer, self.delta)

    def fewest(self) -> int:
        """The fewest shares of noise with which the next total stays within the target; 0 without one.

        Ask where `affords` said yes: then those that arrive when no more is lost than tolerated are enough.
        """
        if self.target is None:
            return 0
        low, high = 0, self.least
        while high - low > 1:
            middle = (low + high) // 2
            release = self.noise.release(middle)
            fits = affordable(self.ledger, release, self.target, self.observer, self.delta)
            low, high = (low, middle) if fits else (middle, high)
        return high

    @property
    def least(self) -> int:
        """Shares that arrive when as much is lost as is tolerated."""
        return least_arrived(self.noise.peers, self.noise.tolerated_loss)

    @cached_property
    def horizon(self) -> int:
        """The last iteration that the target affords to everybody: public, so that no peer goes on alone.

        For a peer that takes part in all, while no more noise is lost than is tolerated.
        """
        release = self.noise.release(self.least)

        def within(iterations: int) -> bool:
            assert self.target is not None
            return PrivacyLedger().add(release, iterations).epsilon(self.observer, self.delta) <= self.target

        low, high = 0, 1
        while high <= self.iterations and within(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return min(low, self.iterations)

    @property
    def why_stopped(self) -> str:
        return f"target epsilon {self.target:g} for the {self.observer}: one more iteration would exceed it"

    def columns(self) -> dict[str, float]:
        """ε for the three observers, as rows have it; infinite where nothing protects."""
        return {f"epsilon_{observer}": epsilon for observer, epsilon in self.ledger.epsilons(self.delta).items()}

    def checks(self, arrived: int) -> list[str]:
        """What a reader of the row should know about its iteration."""
        found = []
        if 0 < arrived < self.least:
            found.append(f"only {arrived} shares of noise arrived, {self.least} are needed for the noise multiplier")
        if arrived == 1:
            found.append("epsilon_insider_masked is infinite: one share alone leaves a masked insider nothing unknown")
        return found


def promised(
    config: Config, columns: Mapping[str, float | None], *, simulated: bool = False
) -> dict[str, Any] | None:
    """What a run promises to whom, in words and numbers, for summary.json; an infinite ε is null there."""
    if config.privacy.mode == "paper":
        return {"mode": "paper", "warning": WARNING}
    if config.privacy.mode != "sound":
        return None
    noise, delta = noise_of(config, shares_of(config)), delta_of(config)
    return {
        "mode": "sound",
        "unit": config.privacy.unit,
        "adjacency": ADJACENCY_OF_RECORDS if config.privacy.unit == "record" else ADJACENCY,
        "warnings": delta_warnings(delta, units_of(config), config.privacy.unit) + ([SIMULATED] if simulated else []),
        "delta": delta,
        "meaning": "whatever an observer looks for, it finds with at most e^epsilon times the probability, plus "
        f"delta = {delta:.3g}, that it would have in a neighbouring run",
        "noise_multiplier": noise.noise_multiplier,
        "sampling_rate": noise.sampling,
        "colluders": noise.colluders,
        "shares": noise.peers,
        "tolerated_loss": noise.tolerated_loss,
        "target_epsilon": config.privacy.target_epsilon,
        "target_observer": config.privacy.target_observer,
        **{name: value if value is not None and math.isfinite(value) else None for name, value in columns.items()},
    }
