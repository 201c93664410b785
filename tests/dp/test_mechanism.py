"""The sound mechanism on small vectors worked by hand, and its noise measured."""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marfl.dp.calibration import NoisePlan
from marfl.dp.mechanism import Adaptation, blur, bound_contribution, privatise, public_step, settle
from marfl.dp.noise import derived_noise, os_noise
from marfl.errors import InputError
from marfl.learn.update import derive_momentum
from marfl.settings import Optimizer

FLOATS = st.floats(-1e6, 1e6, width=32)


def silence(count):
    return torch.zeros(count)


def ones(count):
    return torch.ones(count)


def vector(*values):
    return torch.tensor(values, dtype=torch.float32)


def test_an_update_beyond_the_bound_is_scaled_to_it_and_says_that_it_did_not_fit():
    torch.testing.assert_close(bound_contribution(vector(3, 4), 1.0), vector(0.6, 0.8, -0.5))


def test_an_update_within_the_bound_stays_as_it_is():
    assert bound_contribution(vector(3, 4), 5.0).tolist() == [3, 4, 0.5]


@given(st.lists(FLOATS, min_size=1, max_size=50), st.floats(1e-6, 1e3))
def test_a_clipped_norm_never_exceeds_the_bound_not_even_by_rounding(values, bound):
    clipped = bound_contribution(vector(*values), bound)[:-1]
    assert float(torch.linalg.vector_norm(clipped, dtype=torch.float64)) <= bound


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_counts_as_zero_that_did_not_fit(bad):
    assert bound_contribution(vector(1, bad), 1.0).tolist() == [0, 0, -0.5]


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_cannot_scale_noise_is_refused(bound):
    with pytest.raises(InputError, match=r"clip = .*: must be a number above 0"):
        bound_contribution(vector(1, 2), bound)


def test_noise_is_scaled_for_the_update_and_the_indicator_apart():
    plan = NoisePlan(1.0, 20, tolerated_loss=0.2)  # shares: z·C/4 = 0.0288675 and σ_b/4 = 0.25
    noised = blur(vector(0.5, -0.5, 0.5), 0.1, plan, ones)
    torch.testing.assert_close(noised, vector(0.5288675, -0.4711325, 0.75))


def test_what_is_sent_is_the_bounded_contribution_plus_noise_and_nothing_more():
    sent = privatise(vector(3, 4), 1.0, NoisePlan(1.0, 20), silence)
    torch.testing.assert_close(sent, vector(0.6, 0.8, -0.5))


def test_the_callers_update_is_left_as_it_is():
    fresh = vector(3, 4)
    privatise(fresh, 1.0, NoisePlan(1.0, 20), ones)
    privatise(fresh, 10.0, NoisePlan(1.0, 20), ones)
    assert fresh.tolist() == [3, 4]


def test_settling_adds_the_public_step_and_moves_the_bound():
    settled = settle(vector(1, 2, -0.5), vector(1, 1), 0.1, Adaptation())  # b̃ = −½ + ½ = 0: nothing fitted
    assert settled.mean_delta.tolist() == [2, 3]
    assert settled.bound == pytest.approx(0.1 * math.exp(0.1))


@pytest.mark.parametrize(("indicator", "factor"), [(1.0, 0.9048374180359595), (0.5, 1.0), (0.25, 1.0512710963760241)])
def test_the_bound_follows_the_share_of_updates_that_fit(indicator, factor):
    assert Adaptation().next_bound(0.1, indicator) == pytest.approx(0.1 * factor, rel=1e-15)


def test_wrong_adaptation_settings_are_refused():
    with pytest.raises(InputError, match=r"target_quantile = 1\.5: must be between 0 and 1"):
        Adaptation(target_quantile=1.5)
    with pytest.raises(InputError, match="clip step = -1: must be at least 0"):
        Adaptation(step=-1)


def test_the_public_step_of_one_batch_is_mu_times_the_last_mean_update():
    mean_delta = vector(0.5, -0.25, 2)
    momentum = derive_momentum(torch.zeros(3), mean_delta, learning_rate=0.1)
    public = public_step(momentum, learning_rate=0.1, decay=0.9, batches=1, trainable=3)
    torch.testing.assert_close(public, 0.9 * mean_delta)


def test_the_public_step_of_two_batches_is_worked_by_hand():
    public = public_step(vector(1, -2), learning_rate=0.1, decay=0.9, batches=2, trainable=2)
    torch.testing.assert_close(public, vector(-0.171, 0.342))  # −0.1·(0.9 + 0.81)·m


@pytest.mark.parametrize("batches", [1, 2, 7])
def test_a_local_update_with_zero_gradients_has_no_fresh_part(batches):
    momentum = torch.randn(50, generator=torch.Generator().manual_seed(1))
    velocity, delta = momentum.clone(), torch.zeros(50)
    for _ in range(batches):
        Optimizer(0.1, 0.9).descend(velocity, torch.zeros(50), delta)
    public = public_step(momentum, learning_rate=0.1, decay=0.9, batches=batches, trainable=50)
    torch.testing.assert_close(delta, public)
    assert bound_contribution(delta - public, 1e-5)[-1] == 0.5


def test_momentum_does_not_move_buffers():
    public = public_step(vector(1, 1, 1), learning_rate=0.1, decay=0.9, batches=1, trainable=2)
    torch.testing.assert_close(public, vector(-0.09, -0.09, 0))


def test_the_means_noise_has_the_promised_deviation_within_3_percent():
    peers, size, bound, loss = 40, 20_000, 0.5, 0.2
    plan = NoisePlan(1.5, peers, tolerated_loss=loss)
    generator = np.random.default_rng(7)
    total = torch.zeros(size + 1)
    for _ in range(peers):
        total += privatise(torch.zeros(size), bound, plan, derived_noise(generator))
    mean = settle(total / peers, torch.zeros(size), bound, Adaptation()).mean_delta
    promised = plan.update_multiplier * bound / (peers * math.sqrt(1 - loss))
    assert float(mean.std()) == pytest.approx(promised, rel=0.03)
    assert abs(float(mean.mean())) < 4 * promised / math.sqrt(size)


def test_the_indicators_noise_has_the_promised_deviation_within_3_percent():
    plan = NoisePlan(1.5, 40, tolerated_loss=0.2)
    source = derived_noise(np.random.default_rng(8))
    seen = torch.stack([privatise(torch.zeros(1), 0.5, plan, source)[-1] for _ in range(20_000)])
    assert float(seen.std()) == pytest.approx(2 / math.sqrt(32), rel=0.03)
    assert float(seen.mean()) == pytest.approx(0.5, abs=0.02)


def test_noise_from_the_os_cannot_be_repeated_by_any_seed():
    def draw():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        return os_noise(64)

    assert not torch.equal(draw(), draw())


def test_noise_from_the_os_is_standard_normal(monkeypatch):
    monkeypatch.setattr(os, "urandom", np.random.default_rng(3).bytes)
    draws = os_noise(100_001)
    assert draws.dtype == torch.float32
    assert draws.shape == (100_001,)
    assert stats.kstest(draws.numpy(), "norm").pvalue > 0.01
    half = len(draws) // 2
    assert abs(np.corrcoef(draws[:half], draws[half + 1 :])[0, 1]) < 0.02


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_noise_from_the_os_is_finite_for_the_rarest_bytes(monkeypatch, byte):
    monkeypatch.setattr(os, "urandom", lambda count: byte * count)
    assert bool(torch.isfinite(os_noise(4)).all())


def test_derived_noise_repeats_by_name_and_differs_between_names():
    def draw(seed):
        return derived_noise(np.random.default_rng(seed))(16)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
