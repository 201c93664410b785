"""Algorithm 4 of the paper, line by line, and the drift of its clipping bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from marfl.dp.calibration import NoisePlan
from marfl.dp.lattice import lattice_of
from marfl.dp.mechanism import Adaptation, privatise, settle
from marfl.dp.noise import derived_noise, derived_words
from marfl.dp.paper import WARNING, Obtained, PaperRule, next_bound, prepare


def vector(*values):
    return torch.tensor(values, dtype=torch.float32)


def ones(count):
    return torch.ones(count)


PLAN = NoisePlan(1.0, 20, published=True)  # z = 1.1547005, σ_b = 1
SHARE = 1.1547005 / math.sqrt(20)  # of the noise at C = 1


def test_the_first_aggregation_starts_without_smoothing():
    last = Obtained(vector(1, 1), None)
    sent = prepare(vector(4, 5), vector(7, 7), last, 1.0, PLAN, ones, PaperRule())  # Δ = (3, 4), clipped to (0.6, 0.8)
    torch.testing.assert_close(sent.smoothed, vector(0.6 + SHARE, 0.8 + SHARE))
    torch.testing.assert_close(sent.theta, vector(1 + 0.1 * (0.6 + SHARE), 1 + 0.1 * (0.8 + SHARE)))
    assert sent.indicator == 0.0


def test_later_ones_add_beta_times_the_smoothed_update_last_obtained():
    last = Obtained(vector(1, 1), vector(10, -10))
    sent = prepare(vector(1.3, 1.4), vector(7, 7), last, 1.0, PLAN, ones, PaperRule())  # Δ = (0.3, 0.4) fits
    torch.testing.assert_close(sent.smoothed, vector(9 + 0.3 + SHARE, -9 + 0.4 + SHARE))
    torch.testing.assert_close(sent.theta, vector(1 + 0.1 * (9.3 + SHARE), 1 + 0.1 * (-8.6 + SHARE)))
    assert sent.indicator == 1.0
    assert last.smoothed.tolist() == [10, -10]


def test_the_momentum_travels_as_it_is():
    momentum = vector(123, -456)
    sent = prepare(vector(4, 5), momentum, Obtained(vector(1, 1), None), 1.0, PLAN, ones, PaperRule())
    assert torch.equal(sent.momentum, momentum)
    assert "momentum travels neither clipped nor noised" in WARNING


def test_the_bound_moves_by_the_mean_indicator_and_ones_own_noise():
    moved = next_bound(0.1, 0.75, PLAN, ones, PaperRule())  # b̃ = 0.75 + 1·σ_b/n = 0.8
    assert moved == pytest.approx(0.1 * math.exp(-0.2 * 0.3))


def test_bounds_drift_apart_in_paper_mode_and_stay_one_in_sound_mode():
    peers, plan = 20, NoisePlan(1.0, 20, published=True)
    lattice = lattice_of(plan, 2)
    sources = [derived_noise(np.random.default_rng(peer)) for peer in range(peers)]
    words = [derived_words(np.random.default_rng(peer)) for peer in range(peers)]
    drifting, sound = [0.1] * peers, [0.1] * peers
    for _ in range(200):
        drifting = [next_bound(c, 0.5, plan, each, PaperRule()) for c, each in zip(drifting, sources, strict=True)]
        total = torch.zeros(3, dtype=torch.int64)
        for bound, each in zip(sound, words, strict=True):
            total += privatise(vector(0.06, 0.08), bound, lattice, each)
        sound = [settle(total / peers, torch.zeros(2), bound, lattice, Adaptation()).bound for bound in sound]
    assert max(drifting) / min(drifting) > 1.3
    assert len(set(sound)) == 1
    assert sound[0] != 0.1
