"""The scale of private integers, and the theorem by which their noise is worth what is accounted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from marfl.dp.calibration import NoisePlan
from marfl.dp.lattice import ROUNDING_VARIANCE, STEPS_PER_VALUE, Lattice, lattice_of
from marfl.errors import InputError

CNN = 1_199_882


def gaussian(variance, reach=60):
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * variance))
    return weights / weights.sum()


@given(st.floats(0.05, 50), st.integers(2, 1000), st.integers(1, 10**7), st.floats(0, 0.8), st.booleans())
def test_the_noise_is_never_less_than_sigma_promises_and_hardly_more(sigma, peers, length, loss, adaptive):
    plan = NoisePlan(sigma, peers, None, loss, adaptive)
    lattice = lattice_of(plan, length)
    changes = lattice.steps**2 + lattice.indicator_steps**2
    needed = sigma**2 * changes / plan.survivors
    assert needed <= lattice.variance - ROUNDING_VARIANCE <= 1.001 * needed + 1
    assert lattice.values == length + adaptive
    assert math.sqrt(lattice.variance) == pytest.approx(plan.update_share(lattice.steps), rel=0.01, abs=8)


def test_the_steps_are_fine_enough_for_a_cnn_and_its_sums_fit_32_bits():
    lattice = lattice_of(NoisePlan(1.0, 125), CNN)
    assert lattice.steps / math.sqrt(CNN) >= STEPS_PER_VALUE
    assert lattice.width == 32
    assert lattice.indicator_steps > 0


def test_the_scale_does_not_depend_on_the_bound_so_one_table_of_noise_serves_a_run():
    assert lattice_of(NoisePlan(1.0, 125), CNN) == lattice_of(NoisePlan(1.0, 125), CNN)


@pytest.mark.parametrize("variance", [0.6, 0.8, 1.5])
@pytest.mark.parametrize("shares", [2, 3, 5])
def test_a_sum_of_discrete_gaussians_is_one_but_for_the_factor_that_is_accounted(variance, shares):
    total = np.array([1.0])
    for _ in range(shares):
        total = np.convolve(total, gaussian(variance))
    expected = gaussian(shares * variance, reach=len(total) // 2)
    middle = len(total) // 2
    near = slice(middle - 4, middle + 5)
    excess = 5 * sum(math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, shares))
    measured = np.abs(np.log(total[near] / expected[near])).max()
    assert shares > 2 or measured > 0.05 * excess
    assert measured <= excess <= 5 * shares * math.exp(-(math.pi**2) * variance)


@pytest.mark.parametrize("variance", [1.2, 2.0])
def test_a_discrete_gaussian_is_a_rounded_continuous_one_but_for_the_factor_that_is_accounted(variance):
    rounding = 0.45
    everywhere = np.arange(-40, 41)

    def rounded(x):
        def density(y):
            to_all = np.exp(-((everywhere - y) ** 2) / (2 * rounding)).sum()
            return math.exp(-(y**2) / (2 * (variance - rounding)) - (x - y) ** 2 / (2 * rounding)) / to_all

        return quad(density, -12, 12, limit=400)[0] / math.sqrt(2 * math.pi * (variance - rounding))

    excess = 5 * 2.1 * math.exp(-2 * math.pi**2 * rounding)
    exact = gaussian(variance)
    for x in range(-3, 4):
        assert abs(math.log(rounded(x) / exact[60 + x])) <= excess


def test_the_factor_is_nothing_at_the_scales_that_runs_have():
    assert lattice_of(NoisePlan(1.0, 125), CNN).excess < 1e-100


@pytest.mark.parametrize("variance", [1, ROUNDING_VARIANCE])
def test_a_scale_at_which_the_factor_matters_is_refused(variance):
    with pytest.raises(InputError, match="too few to account for"):
        Lattice(1, 0, variance, 10, 5)


def test_noise_that_no_field_holds_is_refused():
    with pytest.raises(InputError, match="so much noise on 10 values"):
        Lattice(2**30, 0, 2**57, 10, 5)


def test_very_much_noise_makes_the_steps_coarser():
    assert lattice_of(NoisePlan(1e5, 20), CNN).steps < lattice_of(NoisePlan(1.0, 20), CNN).steps


@pytest.mark.parametrize(("steps", "shares", "width"), [(100, 3, 16), (100, 5, 32), (2**19, 125, 32), (2**30, 125, 64)])
def test_the_field_is_the_narrowest_that_holds_the_sum_with_its_noise(steps, shares, width):
    assert Lattice(steps, 0, 1024**2, 10, shares).width == width


def test_a_field_holds_a_roster_that_grows_to_twice_its_shares_and_no_more_than_it_has_room_for():
    lattice = lattice_of(NoisePlan(1.0, 125), CNN)
    assert lattice.width == 32
    assert lattice.room.holds(250, 32)
    most = next(members for members in range(250, 10**6) if not lattice.room.holds(members, 32)) - 1
    assert most * lattice.steps < 2**31 <= (most + 1) * (lattice.steps + 12 * 1024 * 4)
