"""The sound mechanism on small vectors worked by hand, and its noise measured."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marfl.dp import mechanism
from marfl.dp.calibration import NoisePlan
from marfl.dp.discrete_gaussian import discrete_gaussian
from marfl.dp.lattice import Lattice, lattice_of
from marfl.dp.mechanism import Adaptation, blur, bound_contribution, privatise, public_step, settle
from marfl.dp.noise import derived_noise, derived_words, system_words
from marfl.errors import InputError
from marfl.learn.update import derive_momentum
from marfl.settings import Optimizer

FLOATS = st.floats(-1e6, 1e6, width=32)


def silence(count):
    return np.zeros(count, dtype=np.int64)


def vector(*values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(mechanism, "discrete_gaussian", lambda count, *_: silence(count))


def words(seed):
    return derived_words(np.random.default_rng(seed))


PLAN = NoisePlan(1.0, 20)  # σ_b = 1.5 and z = 1.0607, so an indicator is worth 0.35 of the bound
LATTICE = Lattice(1000, 353, 4096**2, 3, 20)  # of two values and an indicator


def test_an_update_beyond_the_bound_is_scaled_to_it_and_says_that_it_did_not_fit():
    assert bound_contribution(vector(3, 4), 1.0, LATTICE).tolist() == [600, 800, -353]


def test_an_update_within_the_bound_stays_as_it_is():
    assert bound_contribution(vector(3, 4), 8.0, LATTICE).tolist() == [375, 500, 353]


def test_values_are_truncated_towards_zero():
    assert bound_contribution(vector(0.0019, -0.0019), 1.0, LATTICE).tolist() == [1, -1, 353]


def test_a_fixed_bound_needs_no_indicator():
    fixed = lattice_of(NoisePlan(1.0, 20, adaptive=False), 2)
    assert bound_contribution(vector(3, 4), 1.0, fixed).tolist() == [fixed.steps * 6 // 10, fixed.steps * 8 // 10]
    settled = settle(vector(1, 2), vector(0, 0), 0.1, fixed, Adaptation())
    assert settled.bound == 0.1


@given(st.lists(FLOATS, min_size=1, max_size=50), st.floats(1e-6, 1e3), st.integers(3, 30))
def test_a_norm_in_integers_never_exceeds_the_bound_not_even_by_rounding(values, bound, power):
    lattice = Lattice(1 << power, 0, 4096**2, len(values), 20)
    clipped = bound_contribution(vector(*values), bound, lattice)
    assert sum(int(x) ** 2 for x in clipped) <= (1 << power) ** 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_counts_as_zero_that_did_not_fit(bad):
    assert bound_contribution(vector(1, bad), 1.0, LATTICE).tolist() == [0, 0, -353]


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_cannot_scale_noise_is_refused(bound):
    with pytest.raises(InputError, match=r"clip = .*: must be a number above 0"):
        bound_contribution(vector(1, 2), bound, LATTICE)


def test_what_is_sent_is_the_bounded_contribution_plus_noise_and_nothing_more():
    noise = discrete_gaussian(3, LATTICE.variance, words(5))
    sent = privatise(vector(3, 4), 1.0, LATTICE, words(5))
    assert (sent - torch.from_numpy(noise)).tolist() == [600, 800, -353]


def test_noise_that_leaves_the_field_wraps_and_is_not_clamped(monkeypatch):
    huge = np.array([2**63 - 1, -(2**63), 0])
    monkeypatch.setattr(mechanism, "discrete_gaussian", lambda *_: huge.copy())
    sent = blur(torch.tensor([2, -1, 0]), LATTICE, words(1))
    assert sent.tolist() == [-(2**63) + 1, 2**63 - 1, 0]


def test_in_a_narrow_field_noised_values_are_the_same_modulo_its_size():
    narrow, update = replace(LATTICE, shares=3), torch.randn(50)
    assert narrow.width == 32
    lattice = replace(narrow, values=51)
    wide = bound_contribution(update, 1.0, lattice).to(torch.int64)
    noise = torch.from_numpy(discrete_gaussian(51, lattice.variance, words(5)))
    assert privatise(update, 1.0, lattice, words(5)).tolist() == (wide + noise).to(torch.int32).tolist()
    sent = blur(torch.full((3,), 2**31 - 1, dtype=torch.int32), replace(lattice, values=3), words(7))
    noise = torch.from_numpy(discrete_gaussian(3, lattice.variance, words(7)))
    assert sent.tolist() == (noise + 2**31 - 1).to(torch.int32).tolist()  # it wraps


def test_the_callers_update_is_left_as_it_is():
    fresh = vector(3, 4)
    privatise(fresh, 1.0, LATTICE, words(1))
    privatise(fresh, 10.0, LATTICE, words(1))
    assert fresh.tolist() == [3, 4]


def test_settling_adds_the_public_step_and_moves_the_bound():
    settled = settle(vector(500, 1000, -353), vector(1, 1), 0.1, LATTICE, Adaptation())  # 2b̃ − 1 = −1: nothing fitted
    torch.testing.assert_close(settled.mean_delta, vector(1.05, 1.1))
    assert settled.bound == pytest.approx(0.1 * math.exp(0.1))


def test_what_was_bounded_and_settled_is_what_it_was_but_for_truncation(without_noise):
    fresh = torch.randn(500, generator=torch.Generator().manual_seed(1)) / 30
    lattice = lattice_of(PLAN, 500)
    sent = privatise(fresh, 1.0, lattice, words(1))
    settled = settle(sent.float(), torch.zeros(500), 1.0, lattice, Adaptation())
    torch.testing.assert_close(settled.mean_delta, fresh, rtol=0, atol=1.01 / lattice.steps)


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
    assert bound_contribution(delta - public, 1e-5, lattice_of(PLAN, 50))[-1] > 0


def test_momentum_does_not_move_buffers():
    public = public_step(vector(1, 1, 1), learning_rate=0.1, decay=0.9, batches=1, trainable=2)
    torch.testing.assert_close(public, vector(-0.09, -0.09, 0))


def test_the_means_noise_has_the_promised_deviation_within_3_percent():
    peers, size, bound, loss = 40, 20_000, 0.5, 0.2
    plan = NoisePlan(1.5, peers, tolerated_loss=loss)
    lattice, stream = lattice_of(plan, size), words(7)
    total = torch.zeros(size + 1, dtype=torch.int64)
    for _ in range(peers):
        total += privatise(torch.zeros(size), bound, lattice, stream)
    mean = settle(total.double() / peers, torch.zeros(size), bound, lattice, Adaptation()).mean_delta
    promised = plan.update_multiplier * bound / (peers * math.sqrt(1 - loss))
    assert float(mean.std()) == pytest.approx(promised, rel=0.03)
    assert abs(float(mean.mean())) < 4 * promised / math.sqrt(size)


def test_the_indicators_noise_has_the_promised_deviation_within_3_percent():
    plan = NoisePlan(1.5, 40, tolerated_loss=0.2)  # σ_b = 2.25, and 4.5 on 2b − 1
    lattice, stream = lattice_of(plan, 1), words(8)
    seen = torch.stack([privatise(torch.zeros(1), 0.5, lattice, stream)[-1] for _ in range(20_000)]).double()
    seen /= lattice.indicator_steps
    assert float(seen.std()) == pytest.approx(4.5 / math.sqrt(32), rel=0.03)
    assert float(seen.mean()) == pytest.approx(1, abs=0.03)


def test_noise_from_the_os_cannot_be_repeated_by_any_seed():
    def draw():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        return blur(torch.zeros(64, dtype=torch.int64), Lattice(1000, 0, 4096**2, 64, 20), system_words())

    assert not torch.equal(draw(), draw())


# --- what low bits tell ---

ONE = torch.ones(2000)  # the update that the attacker looks for


def low_bits(seen, update):
    """How often values, and their distances from the update, are multiples of powers of two; also of small ones."""
    features = []
    for values in (seen, seen - update):
        for some in (values, values[np.abs(values) < update[0] / 4]):
            features += [np.mean(some % 2**power == 0) if len(some) else 0.0 for power in range(1, 12)]
    return np.array(features)


def guesses(noised, update, trials=400):
    """How often an attacker tells a noised update from noise by its low bits, after practice on as many of both."""
    worlds = [np.array([low_bits(noised(present), update) for _ in range(trials)]) for present in (False, True)]
    half = trials // 2
    nothing, something = (world[:half].mean(axis=0) for world in worlds)
    spread = np.sqrt(worlds[0][:half].var(axis=0) + worlds[1][:half].var(axis=0)) + 1e-9
    best = np.argmax(np.abs(something - nothing) / spread)
    middle, sign = (something[best] + nothing[best]) / 2, np.sign(something[best] - nothing[best])
    right = [(sign * (world[half:, best] - middle) > 0) == present for present, world in enumerate(worlds)]
    return float(np.mean(right))


def test_the_low_bits_of_what_is_sent_do_not_tell_an_update_from_nothing():
    lattice, stream = Lattice(1 << 30, 0, 1 << 54, len(ONE), 2), words(4)  # more digits than a float has
    bound = math.sqrt(len(ONE)) * 1.001
    update = bound_contribution(ONE, bound, lattice).numpy()
    seen = guesses(lambda present: privatise(ONE * present, bound, lattice, stream).numpy(), update)
    assert 0.4 < seen < 0.6  # 400 guesses: four standard errors are 0.1


def test_the_low_bits_of_noise_in_floating_point_tell_it_every_time():
    source = derived_noise(np.random.default_rng(4))

    def noised(present):
        return source(len(ONE)).mul_(3.0).add_(ONE * present).double().numpy() * 2**32

    assert guesses(noised, ONE.double().numpy() * 2**32, trials=100) == 1.0


def test_derived_words_repeat_by_name_and_differ_between_names():
    assert np.array_equal(words(1)(16), words(1)(16))
    assert not np.array_equal(words(1)(16), words(2)(16))
