"""A statistical audit: what an attacker really learns about one peer from the mechanism's own functions.

A canary peer sends the worst it can, or (in the neighbouring run) has its contribution zeroed. The attacker knows all
the rest, scores what it sees by its likelihood ratio, and guesses. (ε, δ) allows any test only
P[hit] ≤ e^ε·P[false alarm] + δ, in both directions, so counted hits and false alarms bound ε from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from scipy.stats import beta

from marfl.dp.accounting import Observer, PrivacyLedger
from marfl.dp.calibration import NoisePlan
from marfl.dp.lattice import Lattice, lattice_of
from marfl.dp.mechanism import Adaptation, blur, bound_contribution, settle
from marfl.dp.noise import derived_noise, derived_words
from marfl.dp.paper import Obtained, PaperRule, prepare

Noise: TypeAlias = Callable[[Lattice], torch.Tensor]  # one share, on four values and an indicator

TRIALS = 4_000  # in each world
FEW_TRIALS = 2_000  # enough where far too little noise is to be caught
SHARES = 1_000  # of noise that are drawn at a time: each value of them is independent of all others
THRESHOLDS = np.linspace(-4, 4, 17)  # chosen before anything was seen
DELTA = 0.02
ADAPTATION = Adaptation()
DIRECTION = torch.tensor([0.5, -0.5, 0.5, -0.5])  # of the canary's update
SILENT = torch.zeros(4)  # everybody else's update


@dataclass(frozen=True)
class Game:
    """The canary against an attacker for some iterations, with C starting at 1 and adapting."""

    plan: NoisePlan
    iterations: int

    @cached_property
    def lattice(self) -> Lattice:
        return lattice_of(self.plan, 4)

    def claim(self, observer: Observer) -> float:
        ledger = PrivacyLedger().add(self.plan.release(self.plan.peers), self.iterations)
        return ledger.epsilon(observer, DELTA)

    def canary(self, present: bool, bound: float) -> torch.Tensor:
        """What data decides of its vector; absent, it is the zero-out neighbour: all of that is zero, noise stays."""
        contribution = bound_contribution(3 * bound * DIRECTION, bound, self.lattice)
        return contribution * present

    def evidence(self, seen: torch.Tensor, bound: float, shares: int) -> float:
        """The log likelihood ratio of the canary's vector under `shares` shares of noise."""
        wanted = self.canary(True, bound).double()
        return float(seen.double() @ wanted - wanted @ wanted / 2) / (shares * self.lattice.variance)

    def play_totals(self, present: bool, noise: Noise) -> tuple[float, float]:
        """Scores of the outsider, who sees settled models and bounds, and of an insider that sees totals."""
        bound, outsider, insider = 1.0, 0.0, 0.0
        peers, lattice = self.plan.peers, self.lattice
        silent = bound_contribution(SILENT, bound, lattice)  # an update that fits
        for _ in range(self.iterations):
            own = noise(lattice) + silent
            total = own + noise(lattice) + self.canary(present, bound)
            for _ in range(peers - 2):
                total += noise(lattice) + silent
            settled = settle(total.double() / peers, SILENT, bound, lattice, ADAPTATION)
            seen = total.double()
            seen[:-1] = settled.mean_delta.double() * peers / bound * lattice.steps
            fitting = ADAPTATION.target_quantile - math.log(settled.bound / bound) / ADAPTATION.step
            seen[-1] = (2 * fitting - 1) * peers * lattice.indicator_steps
            outsider += self.evidence(seen - (peers - 1) * silent, bound, peers)
            insider += self.evidence(seen - (peers - 2) * silent - own, bound, peers - 1)
            bound = settled.bound
        return outsider, insider

    def play_group(self, present: bool, noise: Noise) -> tuple[float]:
        """The score of a group member that sees the canary's vector itself."""
        seen = (noise(self.lattice) + self.canary(present, 1.0) for _ in range(self.iterations))
        return (sum(self.evidence(each, 1.0, 1) for each in seen),)


def play_paper(present: bool, _: Noise) -> tuple[float]:
    """The score of someone who looks only at the mean momentum of Algorithm 4."""
    plan, last, source = TOTALS.plan, Obtained(SILENT, None), derived_noise(np.random.default_rng(1))
    update = DIRECTION if present else SILENT
    sent = [prepare(each, -each, last, 1.0, plan, source, PaperRule()) for each in [update] + [SILENT] * 2]
    mean = sum(each.momentum for each in sent) / len(sent)
    return (math.copysign(10, float(mean @ -DIRECTION) - 1 / 6),)


TOTALS = Game(NoisePlan(1.5, 3, indicator_noise=2.0), iterations=2)
GROUP = Game(NoisePlan(17.0, 200), iterations=2)  # so many peers that even one share of the noise is worth something


def scores(
    play: Callable[[bool, Noise], tuple[float, ...]], trials: int = TRIALS, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """The scores of all trials with the canary and without it; `scale` below 1 sabotages the noise."""
    words = derived_words(np.random.default_rng(2024))
    drawn: list[torch.Tensor] = []

    def noise(lattice: Lattice) -> torch.Tensor:
        if not drawn:
            drawn.extend((blur(torch.zeros(5 * SHARES, dtype=torch.int64), lattice, words) * scale).long().split(5))
        return drawn.pop()

    def world(present: bool) -> np.ndarray:
        return np.array([play(present, noise) for _ in range(trials)]).T

    return world(True), world(False)


def proven_epsilon(with_canary: np.ndarray, without: np.ndarray) -> float:
    """An ε that the truth exceeds with 95 % confidence: Clopper and Pearson 1934, over all thresholds at once."""
    trials = len(without)
    level = 0.05 / (4 * len(THRESHOLDS))

    def at_least(hits: int) -> float:
        return float(beta.ppf(level, hits, trials - hits + 1)) if hits else 0.0

    def at_most(hits: int) -> float:
        return float(beta.ppf(1 - level, hits + 1, trials - hits)) if hits < trials else 1.0

    best = 0.0
    for threshold in THRESHOLDS:
        caught, alarms = int((with_canary > threshold).sum()), int((without > threshold).sum())
        for hit, false in ((caught, alarms), (trials - alarms, trials - caught)):
            best = max(best, math.log(max(at_least(hit) - DELTA, 1e-12) / at_most(false)))
    return best


def test_nobody_who_sees_totals_learns_more_than_is_claimed():
    with_canary, without = scores(TOTALS.play_totals)
    for observer, *seen in zip((Observer.OUTSIDER, Observer.INSIDER_MASKED), with_canary, without, strict=True):
        claim = TOTALS.claim(observer)
        assert claim <= 3
        assert claim / 2 < proven_epsilon(*seen) <= claim


def test_a_group_member_learns_no_more_than_is_claimed_but_more_than_an_outsider_may():
    with_canary, without = scores(GROUP.play_group)
    proven, claim = proven_epsilon(with_canary[0], without[0]), GROUP.claim(Observer.INSIDER)
    assert claim <= 3
    assert claim / 2 < proven <= claim
    assert proven > GROUP.claim(Observer.OUTSIDER)


def test_half_the_noise_is_caught():
    for seen in zip(*scores(TOTALS.play_totals, FEW_TRIALS, scale=0.5), strict=True):
        assert proven_epsilon(*seen) > TOTALS.claim(Observer.INSIDER_MASKED) > TOTALS.claim(Observer.OUTSIDER)


def test_paper_mode_is_caught_by_its_momentum():
    with_canary, without = scores(play_paper, FEW_TRIALS)
    assert proven_epsilon(with_canary[0], without[0]) > TOTALS.claim(Observer.OUTSIDER)
