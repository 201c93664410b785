"""A statistical audit of single records: what an attacker really learns about one, from the mechanism's own functions.

The attacker chose the canary, knows everybody else's records and gradients, and guesses from one peer's vector whether
the canary is among its records. (ε, δ) allows any test only P[hit] ≤ e^ε·P[false alarm] + δ, in both directions, so
counted hits and false alarms bound ε from below. `test_privacy_mutants.py` breaks the mechanism in three ways: a fifth
less noise, clipping per batch, batches that are no secret. Each of them must be caught here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch.utils.data import TensorDataset

from marfl.dp import mechanism
from marfl.dp.accounting import Observer, PrivacyLedger
from marfl.dp.calibration import NoisePlan
from marfl.dp.mechanism import Adaptation
from marfl.dp.noise import derived_words
from marfl.dp.privacy_settings import Sound
from marfl.dp.private_agreement import RecordAgreement, Secret
from marfl.dp.record_level import Sampling
from marfl.learn.local_work import LocalWork
from marfl.peer.privacy_ledger import Private
from marfl.peer.record_privacy import RecordData
from marfl.peer.state_dir import StateDir

VECTORS = {1: 5_000, 16: 1_500}  # in each world, by the number of canaries: each is a trial in every vector
DELTA = 0.02
PLAN = NoisePlan(2.0, 4, adaptive=False)  # one share of four: what an insider sees is noise of once the bound
THRESHOLDS = np.linspace(-3, 4, 29)  # in bounds, chosen before anything was seen
DIRECTION = torch.tensor([0.5, -0.5, 0.5, -0.5])


@dataclass(frozen=True)
class Peer:
    """One peer whose records have these gradients, the canaries' last: it stands in for a model and its data."""

    gradients: torch.Tensor  # [records, 4 for each canary]

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
    """How far the peer's vectors went in each canary's direction, in bounds: a vector is a trial for each of them."""
    sound = Sound(NoisePlan(2.0, 4, adaptive=False, sampling=sampling.rate), Adaptation(step=0.0), 1.0)
    length = peer.gradients.shape[1]
    agreement = RecordAgreement(LocalWork(), "derive", sound=sound, trainable=length, sampling=sampling)
    words = derived_words(np.random.default_rng(seed))
    theta, steps = torch.zeros(length), agreement.lattice(length).steps
    secret = Secret(words, words)
    seen = torch.cat([agreement.of_records(peer, peer, theta, 1.0, secret) for _ in range(VECTORS[length // 4])])
    return (seen.view(-1, 4).double() @ DIRECTION.double()).numpy() / steps


def proven_epsilon(with_canary: np.ndarray, without: np.ndarray, doubt: float = 0.05) -> float:
    """An ε that the truth exceeds, but for this doubt: Clopper and Pearson 1934, over all thresholds at once."""
    level, trials = doubt / (4 * len(THRESHOLDS)), len(without)

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


def worlds(others: torch.Tensor, canaries: int) -> tuple[Peer, Peer]:
    """With and without canaries, each in four values of its own, among others that are the same for each of them."""
    blocks = torch.eye(canaries)
    around, planted = torch.kron(blocks, others), torch.kron(blocks, 100 * DIRECTION[None])
    return Peer(torch.cat((around, planted))), Peer(around)


def claimed(sampling: Sampling) -> float:
    """The ε that the ledger gives an insider for one vector."""
    release = NoisePlan(2.0, 4, adaptive=False, sampling=sampling.rate).release(4)
    return PrivacyLedger().add(release).epsilon(Observer.INSIDER, DELTA)


def audit(sampling: Sampling, others: torch.Tensor, canaries: int = 16) -> tuple[float, float]:
    """What is proven, and what is claimed for an insider that sees one vector of this peer."""
    seen = (scores(peer, sampling, seed) for seed, peer in enumerate(worlds(others, canaries)))
    return proven_epsilon(*seen), claimed(sampling)


def test_nobody_learns_more_of_a_record_than_is_claimed_where_all_are_in_the_batch():
    proven, claim = audit(Sampling(5, 5), torch.zeros(3, 4))
    assert 0.65 * claim < proven <= claim


def test_nobody_learns_more_of_a_record_than_is_claimed_whatever_the_others_are():
    """One canary alone: clipped together with others, many would hide each other."""
    proven, claim = audit(Sampling(5, 5), -0.4 * DIRECTION.repeat(3, 1), canaries=1)
    assert 0.5 * claim < proven <= claim


def test_a_secret_sample_hides_a_record_as_well_as_is_claimed():
    proven, claim = audit(Sampling(1, 4), torch.zeros(3, 4))
    whole = PrivacyLedger().add(PLAN.release(4)).epsilon(Observer.INSIDER, DELTA)
    assert 0.4 * claim < proven <= claim < 0.7 * whole


def test_a_fifth_less_noise_would_be_caught():
    """The audit can fail: what is proven of less noise is more than what is claimed."""
    scale = 0.8
    with_canary, without = (
        scores(peer, Sampling(5, 5), seed) for seed, peer in enumerate(worlds(torch.zeros(3, 4), canaries=16))
    )
    less = proven_epsilon(1 + (with_canary - 1) * scale, without * scale)
    assert less > PrivacyLedger().add(PLAN.release(4)).epsilon(Observer.INSIDER, DELTA)


# --- the same through what a library peer runs: its data set, its model, gradients by vmap, noise from the OS ---

CANARIES = 29  # each has a direction of its own, so a vector is a trial for each of them
REAL = {"unit": "record", "noise_multiplier": 2.0, "shares": 4, "clip": 1.0, "delta": DELTA}


def told_by_a_peer(records: torch.Tensor, sampling: Sampling, vectors: int, folder: Path) -> np.ndarray:
    """How far a real peer's vectors went in every canary's direction, in bounds; 1.0 where a canary is in the sum."""
    model = torch.nn.Linear(CANARIES, 1, bias=False)
    data = RecordData(TensorDataset(records), lambda network, record: -network(record[0]).sum(), sampling.batch)
    private = Private(REAL | {"records": sampling.records}, "masked", data, model)
    store = StateDir(folder, "audit")
    private.begin(store, "me")
    state, seen = private.agreement.start(torch.zeros(CANARIES)), []
    for version in range(vectors):
        found, _ = private.contribution(replace(state, version=version), torch.zeros(CANARIES))
        seen.append(-found.delta.numpy() / private.agreement.lattice(CANARIES).steps)
    store.close()
    return np.concatenate(seen)


def two_peers(folder: Path, sampling: Sampling, vectors: int = 200) -> list[np.ndarray]:
    """What a peer with the canaries tells, and one without them."""
    canaries, nothing = 100 * torch.eye(CANARIES), torch.zeros(3, CANARIES)
    return [
        told_by_a_peer(records, sampling, vectors, folder / name)
        for name, records in (("with", torch.cat((nothing, canaries))), ("without", nothing))
    ]


def audit_of_a_peer(folder: Path, sampling: Sampling, vectors: int = 200) -> tuple[float, float]:
    """What is proven with a confidence of 1 − 10⁻⁶, because this noise follows from no seed, and what is claimed."""
    return proven_epsilon(*two_peers(folder, sampling, vectors), doubt=1e-6), claimed(sampling)


def test_a_real_peers_vectors_tell_no_more_of_a_record_than_is_claimed(tmp_path):
    proven, claim = audit_of_a_peer(tmp_path, Sampling(5, 5))
    assert 0.5 * claim < proven <= claim


def test_a_real_peers_secret_sample_hides_a_record_as_well_as_is_claimed(tmp_path):
    """So few vectors prove next to nothing of a sample; their mean, 0.25 ± 0.02, shows that the canaries are in it."""
    with_canaries, without = two_peers(tmp_path, Sampling(1, 4))
    assert proven_epsilon(with_canaries, without, doubt=1e-6) <= claimed(Sampling(1, 4))
    assert 0.1 < with_canaries.mean() - without.mean() < 0.4


@pytest.mark.slow
def test_a_real_peer_with_a_fifth_less_noise_is_caught(tmp_path, monkeypatch):
    draw = mechanism.discrete_gaussian
    monkeypatch.setattr(mechanism, "discrete_gaussian", lambda n, variance, words: draw(n, variance * 16 // 25, words))
    proven, claim = audit_of_a_peer(tmp_path, Sampling(5, 5), vectors=1200)
    assert proven > claim


def test_a_real_peer_whose_batches_are_no_secret_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(Sampling, "draw", lambda self, count, words: np.arange(count))
    proven, claim = audit_of_a_peer(tmp_path, Sampling(1, 4))
    assert proven > claim
