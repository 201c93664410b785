"""A statistical audit of single records: what an attacker really learns about one, from the mechanism's own functions.

The attacker chose the canary, knows everybody else's records and gradients, and guesses from one peer's vector whether
the canary is among its records. (ε, δ) allows any test only P[hit] ≤ e^ε·P[false alarm] + δ, in both directions, so
counted hits and false alarms bound ε from below. `test_privacy_mutants.py` breaks the mechanism in three ways: a fifth
less noise, clipping per batch, batches that are no secret. Each of them must be caught here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.stats import beta

from marfl.dp.accounting import Observer, PrivacyLedger
from marfl.dp.calibration import NoisePlan
from marfl.dp.mechanism import Adaptation
from marfl.dp.noise import derived_words
from marfl.dp.privacy_settings import Sound
from marfl.dp.private_agreement import RecordAgreement, Secret
from marfl.dp.record_level import Sampling
from marfl.learn.local_work import LocalWork

TRIALS = 12_000  # in each world
DELTA = 0.02
PLAN = NoisePlan(2.0, 4, adaptive=False)  # one share of four: what an insider sees is noise of once the bound
THRESHOLDS = np.linspace(-3, 4, 29)  # in bounds, chosen before anything was seen
DIRECTION = torch.tensor([0.5, -0.5, 0.5, -0.5])


@dataclass(frozen=True)
class Peer:
    """One peer whose records have these gradients, the canary's last: it stands in for a model and its data."""

    gradients: torch.Tensor  # [records, 4]

    @property
    def worker(self) -> Any:
        return SimpleNamespace(load=lambda theta: None)

    @property
    def samples(self) -> int:
        return len(self.gradients)

    def records(self, rows: np.ndarray) -> torch.Tensor:
        return self.gradients[torch.from_numpy(rows)]

    def slices(self, batch: torch.Tensor, keys: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[batch.clone()]]


def scores(peer: Peer, sampling: Sampling, seed: int) -> np.ndarray:
    """How far the peer's vectors went in the canary's direction, in bounds."""
    sound = Sound(NoisePlan(2.0, 4, adaptive=False, sampling=sampling.rate), Adaptation(step=0.0), 1.0)
    agreement = RecordAgreement(LocalWork(), "derive", sound=sound, trainable=4, sampling=sampling)
    words = derived_words(np.random.default_rng(seed))
    theta, steps = torch.zeros(4), agreement.lattice(4).steps
    secret = Secret(words, words)
    seen = torch.stack([agreement.of_records(peer, peer, theta, 1.0, secret) for _ in range(TRIALS)])
    return (seen.double() @ DIRECTION.double()).numpy() / steps


def proven_epsilon(with_canary: np.ndarray, without: np.ndarray) -> float:
    """An ε that the truth exceeds with 95 % confidence: Clopper and Pearson 1934, over all thresholds at once."""
    level = 0.05 / (4 * len(THRESHOLDS))

    def at_least(hits: int) -> float:
        return float(beta.ppf(level, hits, TRIALS - hits + 1)) if hits else 0.0

    def at_most(hits: int) -> float:
        return float(beta.ppf(1 - level, hits + 1, TRIALS - hits)) if hits < TRIALS else 1.0

    best = 0.0
    for threshold in THRESHOLDS:
        caught, alarms = int((with_canary > threshold).sum()), int((without > threshold).sum())
        for hit, false in ((caught, alarms), (TRIALS - alarms, TRIALS - caught)):
            best = max(best, math.log(max(at_least(hit) - DELTA, 1e-12) / at_most(false)))
    return best


def audit(sampling: Sampling, others: torch.Tensor) -> tuple[float, float]:
    """What is proven, and what is claimed for an insider that sees one vector of this peer."""
    canary = 100 * DIRECTION[None]
    seen = (scores(Peer(rows), sampling, seed) for seed, rows in enumerate((torch.cat((others, canary)), others)))
    release = NoisePlan(2.0, 4, adaptive=False, sampling=sampling.rate).release(4)
    return proven_epsilon(*seen), PrivacyLedger().add(release).epsilon(Observer.INSIDER, DELTA)


def test_nobody_learns_more_of_a_record_than_is_claimed_where_all_are_in_the_batch():
    proven, claim = audit(Sampling(5, 5), torch.zeros(3, 4))
    assert 0.65 * claim < proven <= claim


def test_nobody_learns_more_of_a_record_than_is_claimed_whatever_the_others_are():
    proven, claim = audit(Sampling(5, 5), -0.4 * DIRECTION.repeat(3, 1))
    assert 0.65 * claim < proven <= claim


def test_a_secret_sample_hides_a_record_as_well_as_is_claimed():
    proven, claim = audit(Sampling(1, 4), torch.zeros(3, 4))
    whole = PrivacyLedger().add(PLAN.release(4)).epsilon(Observer.INSIDER, DELTA)
    assert 0.4 * claim < proven <= claim < 0.7 * whole


def test_a_fifth_less_noise_would_be_caught():
    """The audit can fail: what is proven of less noise is more than what is claimed."""
    scale = 0.8
    peer, sampling = torch.cat((torch.zeros(3, 4), 100 * DIRECTION[None])), Sampling(5, 5)
    with_canary, without = scores(Peer(peer), sampling, 0), scores(Peer(peer[:3]), sampling, 1)
    less = proven_epsilon(1 + (with_canary - 1) * scale, without * scale)
    assert less > PrivacyLedger().add(PLAN.release(4)).epsilon(Observer.INSIDER, DELTA)
