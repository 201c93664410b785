"""ε against formulas that share no code with the accountant, and the ledger's book-keeping."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr, logsumexp
from scipy.stats import norm

from marfl.dp.accounting import GaussianEvent, Observer, PrivacyLedger, Release, delta_warnings, epsilon_of
from marfl.dp.calibration import NoisePlan
from marfl.errors import BrokenPromise, InputError

PAPER_DELTA = 125**-1.1


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The least ε of the Gaussian mechanism: theorem 8 of Balle and Wang 2018, in logarithms, by bisection."""

    def exceeds(epsilon: float) -> bool:
        shift = 1 / noise_multiplier
        first = log_ndtr(shift / 2 - epsilon / shift)
        second = epsilon + log_ndtr(-shift / 2 - epsilon / shift)
        return first + np.log(-np.expm1(min(second - first, -1e-300))) > math.log(delta)

    low, high = 0.0, 1e6
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high


def renyi_epsilon(noise_multiplier: float, sampling: float, times: int, delta: float) -> float:
    """An upper bound on ε by Rényi DP of integer orders (Mironov, Talwar and Zhang 2019, section 3.3)."""
    bounds = []
    for order in range(2, 200):
        k = np.arange(order + 1)
        log_binomial = [math.lgamma(order + 1) - math.lgamma(i + 1) - math.lgamma(order - i + 1) for i in k]
        moments = k * math.log(sampling) + (order - k) * math.log1p(-sampling) + (k * k - k) / (2 * noise_multiplier**2)
        renyi = logsumexp(log_binomial + moments) / (order - 1)
        bounds.append(times * renyi + math.log(1 / delta) / (order - 1))
    return min(bounds)


def spent(release: Release, times: int, observer: Observer, delta: float = PAPER_DELTA) -> float:
    return PrivacyLedger().add(release, times).epsilon(observer, delta)


@pytest.mark.parametrize(
    ("times", "observer", "oracle"),
    [
        (30, Observer.OUTSIDER, 28.3),
        (30, Observer.INSIDER, 2032),
        (100, Observer.OUTSIDER, 74.9),
        (100, Observer.INSIDER, 6538),
    ],
)
def test_oracle_values_of_the_papers_setting(times, observer, oracle):
    assert spent(NoisePlan(1.0, 125).release(125), times, observer) == pytest.approx(oracle, rel=1e-3)


@given(st.floats(0.2, 12), st.integers(1, 3000), st.sampled_from([1e-9, 1e-5, PAPER_DELTA, 0.1]))
@settings(max_examples=40)
def test_full_participation_is_the_exact_gaussian_mechanism(noise_multiplier, times, delta):
    exact = gaussian_epsilon(noise_multiplier / math.sqrt(times), delta)
    counted = spent(NoisePlan(noise_multiplier, 125).release(125), times, Observer.OUTSIDER, delta)
    assert exact * (1 - 1e-6) - 1e-9 <= counted <= exact * 1.01 + 1e-4


@pytest.mark.parametrize(("noise_multiplier", "times", "delta"), [(1.0, 1, 1e-2), (4.0, 30, 1e-5), (0.3, 7, 1e-3)])
def test_the_formula_without_sampling_is_what_loss_distributions_come_to(noise_multiplier, times, delta):
    formula = epsilon_of(((GaussianEvent(noise_multiplier), times),), delta)
    distribution = epsilon_of(((GaussianEvent(noise_multiplier, sampling=1 - 1e-9), times),), delta)
    assert formula * (1 - 1e-6) <= distribution <= formula * 1.003


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("sampling", "times"), [(0.01, 500), (0.1, 100), (0.5, 20)])
def test_sampled_epsilon_is_below_renyi_but_not_by_much(noise_multiplier, sampling, times):
    release = NoisePlan(noise_multiplier, 125, sampling=sampling).release(125)
    counted = spent(release, times, Observer.OUTSIDER, 1e-5)
    bound = renyi_epsilon(noise_multiplier, sampling, times, 1e-5)
    assert 0.5 * bound < counted <= bound


def test_the_moments_shortcut_is_far_below_the_truth_under_sampling():
    release = NoisePlan(0.5, 125, sampling=0.1).release(125)
    assert spent(release, 500, Observer.OUTSIDER) == pytest.approx(56.9, abs=0.05)


def test_a_masked_insider_knows_its_own_share_of_the_noise():
    release = NoisePlan(1.0, 20).release(20)
    exact = gaussian_epsilon(math.sqrt(19 / 20) / math.sqrt(5), 1e-3)
    assert spent(release, 5, Observer.INSIDER_MASKED, 1e-3) == pytest.approx(exact, rel=1e-3)
    assert spent(release, 5, Observer.OUTSIDER, 1e-3) < exact


def test_every_colluder_takes_its_share_of_the_noise_away():
    told = [spent(NoisePlan(1.0, 100, colluders=k).release(100), 30, Observer.OUTSIDER) for k in (0, 36, 99)]
    assert told[1] == pytest.approx(gaussian_epsilon(0.8 / math.sqrt(30), PAPER_DELTA), rel=1e-3)
    assert told[0] < told[1] < told[2] == spent(NoisePlan(1.0, 100).release(100), 30, Observer.INSIDER)
    masked = spent(NoisePlan(1.0, 100, colluders=35).release(100), 30, Observer.INSIDER_MASKED)
    assert masked == pytest.approx(told[1], rel=1e-6)  # the insider's own share is one more
    assert spent(NoisePlan(1.0, 100, colluders=99).release(100), 30, Observer.INSIDER_MASKED) == told[2]


def test_noise_that_did_not_arrive_does_not_count():
    lost = NoisePlan(1.0, 100).release(64)  # σ·√(64/100)
    exact = gaussian_epsilon(0.8 / math.sqrt(3), PAPER_DELTA)
    assert spent(lost, 3, Observer.OUTSIDER) == pytest.approx(exact, rel=1e-3)


def test_a_tolerated_loss_keeps_the_promise_when_it_happens_and_gives_more_when_it_does_not():
    plan = NoisePlan(1.0, 100, tolerated_loss=0.2)
    promised = gaussian_epsilon(1.0, PAPER_DELTA)
    assert spent(plan.release(80), 1, Observer.OUTSIDER) == pytest.approx(promised, rel=1e-3)
    assert spent(plan.release(100), 1, Observer.OUTSIDER) < promised
    assert spent(plan.release(79), 1, Observer.OUTSIDER) > promised
    one_share = gaussian_epsilon(1 / math.sqrt(80), PAPER_DELTA)
    assert spent(plan.release(80), 1, Observer.INSIDER) == pytest.approx(one_share, rel=1e-3)


def test_an_abandoned_iteration_costs_only_what_group_members_saw():
    abandoned = NoisePlan(1.0, 100).release(0)
    ledger = PrivacyLedger().add(abandoned)
    assert ledger.epsilon(Observer.OUTSIDER, 1e-3) == 0
    assert ledger.epsilon(Observer.INSIDER_MASKED, 1e-3) == 0
    assert ledger.epsilon(Observer.INSIDER, 1e-3) == pytest.approx(gaussian_epsilon(0.1, 1e-3), rel=1e-3)


def test_a_masked_insider_alone_with_its_victim_is_told_everything_but_the_victims_own_noise():
    both = spent(NoisePlan(0.1, 2).release(2), 1, Observer.INSIDER_MASKED)
    assert both == pytest.approx(gaussian_epsilon(0.1 * math.sqrt(1 / 2), PAPER_DELTA), rel=1e-3)
    assert spent(NoisePlan(0.1, 2).release(1), 1, Observer.INSIDER_MASKED) == math.inf


def test_releases_of_different_noise_add_up_by_their_precisions():
    ledger = PrivacyLedger().add(NoisePlan(1.0, 100).release(100)).add(NoisePlan(2.0, 100).release(100), 4)
    exact = gaussian_epsilon(1 / math.sqrt(1 + 4 / 4), 1e-4)
    assert ledger.epsilon(Observer.OUTSIDER, 1e-4) == pytest.approx(exact, rel=1e-3)


def test_releases_that_look_alike_to_an_insider_all_count():
    ledger = PrivacyLedger().add(NoisePlan(1.0, 100).release(100), 2).add(NoisePlan(1.0, 100).release(95), 3)
    exact = gaussian_epsilon(0.1 / math.sqrt(5), 1e-4)  # five times one share, whoever else arrived
    assert ledger.epsilon(Observer.INSIDER, 1e-4) == pytest.approx(exact, rel=1e-3)


def test_sampled_and_public_releases_compose():
    sampled, public = NoisePlan(1.0, 100, sampling=0.1).release(100), NoisePlan(2.0, 100).release(100)
    alone = PrivacyLedger().add(sampled, 50)
    together = alone.add(public, 3)
    unsampled = PrivacyLedger().add(NoisePlan(1.0, 100).release(100), 50).add(public, 3)
    epsilons = [each.epsilon(Observer.OUTSIDER, 1e-4) for each in (alone, together, unsampled)]
    assert epsilons == sorted(epsilons)
    assert epsilons[1] > epsilons[0] * 1.05


@given(st.lists(st.tuples(st.sampled_from([0.7, 1.0, 3.0]), st.integers(30, 100)), max_size=12))
@settings(max_examples=25)
def test_the_order_of_releases_does_not_matter_and_no_release_is_free(steps):
    ledger, epsilons = PrivacyLedger(), [0.0]
    for noise_multiplier, arrived in steps:
        ledger = ledger.add(NoisePlan(noise_multiplier, 100).release(arrived))
        epsilons.append(ledger.epsilon(Observer.OUTSIDER, 1e-3))
    assert all(later > earlier for earlier, later in pairwise(epsilons))
    backwards = PrivacyLedger()
    for noise_multiplier, arrived in reversed(steps):
        backwards = backwards.add(NoisePlan(noise_multiplier, 100).release(arrived))
    assert backwards.epsilon(Observer.OUTSIDER, 1e-3) == pytest.approx(epsilons[-1], rel=1e-5)


def test_adding_leaves_the_earlier_ledger_as_it_was():
    before = PrivacyLedger().add(NoisePlan(1.0, 100).release(100))
    before.add(NoisePlan(1.0, 100).release(100))
    assert before.entries == ((Release(1.0, 100, 100), 1),)


def test_equal_releases_are_counted_not_listed():
    ledger = PrivacyLedger()
    for _ in range(1000):
        ledger = ledger.add(NoisePlan(1.0, 100).release(100))
    assert ledger.entries == ((Release(1.0, 100, 100), 1000),)


def test_a_ledger_survives_a_checkpoint():
    ledger = PrivacyLedger().add(NoisePlan(1.0, 100, tolerated_loss=0.1).release(95), 3)
    ledger = ledger.add(NoisePlan(1.0, 100, sampling=0.5).release(100))
    assert PrivacyLedger.from_rows(json.loads(json.dumps(ledger.to_rows()))) == ledger


def test_hardly_any_noise_protects_from_nothing_and_fills_no_memory():
    ledger = PrivacyLedger().add(NoisePlan(1e-9, 100).release(100))
    assert ledger.epsilons(0.01) == dict.fromkeys(Observer, math.inf)
    little = PrivacyLedger().add(NoisePlan(5e-4, 100).release(100)).epsilon(Observer.OUTSIDER, 0.01)
    assert little == pytest.approx(0.5 / 5e-4**2 + 2.3263 / 5e-4, rel=1e-4)  # mean of the loss and 2.33 deviations


def test_an_empty_ledger_gave_nothing_away():
    assert PrivacyLedger().epsilons(0.01) == dict.fromkeys(Observer, 0.0)


def test_a_noise_so_large_that_delta_covers_it_costs_no_epsilon():
    assert spent(NoisePlan(100.0, 2000).release(2000), 1, Observer.OUTSIDER, 0.1) == 0


@pytest.mark.parametrize("delta", [0.0, 0.5, 1.0, -0.1, math.nan])
def test_a_delta_that_means_nothing_is_refused(delta):
    with pytest.raises(InputError, match=r"delta = .*: must be above 0 and below 0.5"):
        PrivacyLedger().epsilon(Observer.OUTSIDER, delta)


def test_impossible_releases_are_refused():
    with pytest.raises(InputError, match="sampling = 0: must be above 0 and at most 1"):
        NoisePlan(1.0, 100, sampling=0.0).release(100)
    with pytest.raises(BrokenPromise, match="-1 shares of noise arrived"):
        NoisePlan(1.0, 100).release(-1)


def test_more_shares_than_the_noise_was_cut_for_protect_the_better():
    few, many = (PrivacyLedger().add(NoisePlan(1.0, 100).release(arrived)) for arrived in (100, 120))
    assert many.epsilon(Observer.OUTSIDER, 0.01) < few.epsilon(Observer.OUTSIDER, 0.01)
    assert many.epsilon(Observer.INSIDER, 0.01) == few.epsilon(Observer.INSIDER, 0.01)


# --- one record as the unit ---

GRID = [
    (sigma, rate, times, delta)
    for sigma, rate, times in (
        (0.6, 0.005, 200), (0.8, 0.0128, 100), (1.0, 0.0128, 1000), (1.0, 0.1, 30), (2.0, 0.05, 500), (0.5, 0.3, 5),
    )
    for delta in (1e-5, 1e-8)
]  # fmt: skip


@pytest.mark.parametrize(("sigma", "rate", "times", "delta"), GRID)
def test_sampled_records_are_accounted_as_dp_accounting_does_to_half_a_percent(sigma, rate, times, delta):
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4)
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    accountant.compose(event, times)
    counted = spent(NoisePlan(sigma, 16, adaptive=False, sampling=rate).release(16), times, Observer.OUTSIDER, delta)
    assert counted == pytest.approx(accountant.get_epsilon(delta), rel=5e-3)


@pytest.mark.parametrize("rate", [1.0, 0.02], ids=["peer", "record"])
@pytest.mark.parametrize(
    ("observer", "colluders", "shares"),  # of 16, of which 14 arrived: those that the observer does not know
    [
        (Observer.OUTSIDER, 0, 14), (Observer.OUTSIDER, 3, 11), (Observer.INSIDER_MASKED, 0, 13),
        (Observer.INSIDER_MASKED, 3, 10), (Observer.INSIDER_MASKED, 15, 1), (Observer.INSIDER, 3, 1),
    ],
)  # fmt: skip
def test_both_units_and_all_observers_are_accounted_as_dp_accounting_does(rate, observer, colluders, shares):
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3)
    gaussian = dp_event.GaussianDpEvent(4.0 * math.sqrt(shares / 16))
    accountant.compose(gaussian if rate == 1 else dp_event.PoissonSampledDpEvent(rate, gaussian), 60)
    plan = NoisePlan(4.0, 16, adaptive=False, sampling=rate, colluders=colluders)
    assert spent(plan.release(14), 60, observer, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=5e-3)


def test_sixteen_hospitals_hide_a_patient_behind_the_noise_that_hides_no_hospital():
    patient = NoisePlan(1.0, 16, adaptive=False, sampling=64 / 5000).release(16)
    hospital = NoisePlan(1.0, 16).release(16)
    assert spent(patient, 100, Observer.OUTSIDER, 1e-6) == pytest.approx(1.192, abs=2e-3)
    assert spent(hospital, 100, Observer.OUTSIDER, 1e-6) == pytest.approx(96.7, abs=0.1)


def test_an_insider_without_masks_sees_one_peers_sum_under_one_share_but_does_not_know_the_sample():
    release = NoisePlan(4.0, 16, adaptive=False, sampling=0.01).release(16)
    alone = NoisePlan(1.0, 16, adaptive=False, sampling=0.01).release(16)
    assert spent(release, 50, Observer.INSIDER, 1e-5) == pytest.approx(spent(alone, 50, Observer.OUTSIDER, 1e-5))


def test_replacing_all_of_a_peers_data_moves_twice_as_far_as_zeroing_it():
    ledger = PrivacyLedger().add(NoisePlan(2.0, 16).release(16), 10)
    exact = gaussian_epsilon(1.0 / math.sqrt(10), 1e-5)
    assert ledger.epsilon(Observer.OUTSIDER, 1e-5, replacing=True) == pytest.approx(exact, rel=1e-3)


def test_replacing_a_record_is_worth_what_its_two_mixtures_come_to():
    sigma, rate, delta = 1.0, 0.2, 1e-3
    ledger = PrivacyLedger().add(NoisePlan(sigma, 16, adaptive=False, sampling=rate).release(16))
    epsilon = ledger.epsilon(Observer.OUTSIDER, delta, replacing=True)
    x = np.linspace(-14, 14, 400_001)
    base = (1 - rate) * norm.pdf(x, scale=sigma)
    one, other = (base + rate * norm.pdf(x, loc=at, scale=sigma) for at in (1, -1))
    exact = np.clip(one - math.exp(epsilon) * other, 0, None).sum() * (x[1] - x[0])
    assert exact == pytest.approx(delta, rel=0.02)
    assert exact <= delta * (1 + 1e-6)
    assert epsilon > ledger.epsilon(Observer.OUTSIDER, delta)


@pytest.mark.parametrize(("delta", "units", "said"), [(0.02, 10, "above 0.01"), (1e-3, 5000, "above 1 in 5,000")])
def test_a_delta_that_says_little_is_warned_of(delta, units, said):
    assert said in delta_warnings(delta, units, "record")[0]
    assert delta_warnings(1e-6, units, "record") == []
