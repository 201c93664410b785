"""σ, z, σ_b and the shares of noise, against values worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.dp.calibration import NoisePlan, least_arrived
from marfl.errors import InputError


def test_z_and_the_shares_match_values_worked_by_hand():
    plan = NoisePlan(1.0, 20, indicator_noise=1.0)  # z = (1 − 1/4)^(−1/2)
    assert plan.indicator_deviation == 1.0
    assert plan.update_multiplier == pytest.approx(1.1547005383792517)
    assert plan.update_share(0.1) == pytest.approx(0.1 * 1.1547005383792517 / math.sqrt(20))
    assert plan.indicator_weight == pytest.approx(1.1547005383792517 / 2)


def test_the_indicators_default_noise_leaves_the_update_little_more_than_sigma():
    plan = NoisePlan(10.0, 125)  # 1.5σ = 15, not 125/20
    assert plan.indicator_deviation == 15.0
    assert plan.update_multiplier == pytest.approx(10 / math.sqrt(1 - 1 / 9))
    assert plan.update_multiplier < 0.65 * NoisePlan(10.0, 125, published=True).update_multiplier


def test_where_the_bound_is_fixed_all_of_sigma_is_for_the_update():
    plan = NoisePlan(10.0, 125, adaptive=False)
    assert (plan.update_multiplier, plan.indicator_weight) == (10.0, 0.0)


def test_the_papers_setting_of_125_peers_hardly_differs_from_sigma():
    plan = NoisePlan(1.0, 125)  # σ_b = 6.25, z = (1 − 1/156.25)^(−1/2)
    assert plan.indicator_deviation == 6.25
    assert plan.update_multiplier == pytest.approx(1.0032154423814)


def test_a_tolerated_loss_makes_every_share_larger():
    plan = NoisePlan(1.0, 20, indicator_noise=1.0, tolerated_loss=0.2)  # 16 of the 20 shares must do
    assert plan.update_share(0.1) == pytest.approx(0.1 * 1.1547005383792517 / 4)


def test_the_indicators_noise_can_be_set():
    plan = NoisePlan(3.0, 20, indicator_noise=2.5)  # z = (1/9 − 1/25)^(−1/2)
    assert plan.update_multiplier == pytest.approx(3.75)


def test_noise_to_clip_ratio_is_the_norm_of_the_means_noise_over_the_bound():
    assert NoisePlan(1.0, 20, 1.0).noise_to_clip_ratio(400) == pytest.approx(1.1547005383792517 * 20 / 20)
    assert NoisePlan(1.0, 20, 1.0, 0.75).noise_to_clip_ratio(400) == pytest.approx(1.1547005383792517 * 2)


@given(st.floats(0.01, 50), st.integers(1, 2000), st.floats(0, 0.9))
def test_update_and_indicator_noise_together_are_worth_sigma(noise_multiplier, peers, loss):
    plan = NoisePlan(noise_multiplier, peers, None, loss)
    worth = plan.update_multiplier**-2 + (2 * plan.indicator_deviation) ** -2
    assert worth == pytest.approx(noise_multiplier**-2)
    survivors = (1 - loss) * peers
    assert math.sqrt(survivors) * plan.update_share(1.0) == pytest.approx(plan.update_multiplier)
    noise_on_indicator = math.sqrt(survivors) * plan.update_share(1.0) / plan.indicator_weight  # of 2b − 1
    assert noise_on_indicator == pytest.approx(2 * plan.indicator_deviation)


@pytest.mark.parametrize(("peers", "legal"), [(10, False), (11, True)])
def test_the_smallest_number_of_peers_is_named_and_works_as_published(peers, legal):
    if legal:
        assert NoisePlan(1.0, peers, published=True).update_multiplier == pytest.approx((1 - 1 / 1.21) ** -0.5)
        return
    with pytest.raises(InputError) as refusal:
        NoisePlan(1.0, peers, published=True)
    assert str(refusal.value) == (
        "noise_multiplier = 1 with 10 peers: must be below peers/10 = 1; "
        "needs at least 11 peers or an indicator_noise of its own"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((0.0, 100), "noise_multiplier = 0: must be a number above 0"),
        ((-1.0, 100), "noise_multiplier = -1: must be a number above 0"),
        ((math.nan, 100), "noise_multiplier = nan: must be a number above 0"),
        ((math.inf, 100), "noise_multiplier = inf: must be a number above 0"),
        ((1.0, 0), "peers = 0: must be at least 1"),
        ((1.0, 100, 0.5), "indicator_noise = 0.5: must be a number above noise_multiplier/2 = 0.5"),
        ((1.0, 100, -5.0), "indicator_noise = -5: must be a number above"),
        ((1.0, 100, math.nan), "indicator_noise = nan: must be a number above"),
        ((1.0, 100, math.inf), "indicator_noise = inf: must be a number above"),
        ((1.0, 100, None, 1.0), "tolerated_loss = 1: must be at least 0 and below 1"),
        ((1.0, 100, None, -0.1), "tolerated_loss = -0.1: must be at least 0 and below 1"),
        ((1.0, 100, None, 0.0, True, False, 100), "colluders = 100: must be at least 0 and below the 100 shares"),
    ],
)
def test_wrong_noise_settings_are_refused_in_one_line(arguments, complaint):
    with pytest.raises(InputError) as refusal:
        NoisePlan(*arguments)
    assert str(refusal.value).startswith(complaint)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("peers", "loss", "least"), [(10, 0.0, 10), (10, 0.7, 3), (10, 0.25, 8), (125, 0.1, 113)])
def test_the_fewest_shares_that_suffice_are_rounded_up(peers, loss, least):
    assert least_arrived(peers, loss) == least
