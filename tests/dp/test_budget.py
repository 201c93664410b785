"""What is refused, the noise for a budget, and the report."""

from __future__ import annotations

import json
import math

import pytest

from marfl.dp.accounting import Observer, PrivacyLedger
from marfl.dp.budget import check_sound, default_delta, noise_for_budget, privacy_report
from marfl.dp.calibration import NoisePlan, least_arrived
from marfl.dp.ledger import affordable
from marfl.errors import InputError

SOUND = {"exact_plan": True, "teacher": None, "momentum": "derive"}


@pytest.mark.parametrize("change", [{}, {"teacher": "previous"}, {"momentum": "local"}])
def test_settings_with_a_guarantee_pass(change):
    check_sound(**SOUND | change)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"exact_plan": False}, "privacy with an approximate plan: the plan must be exact, because"),
        ({"teacher": "peers"}, "distill.teacher = peers with privacy: must be previous, because"),
        ({"momentum": "send"}, "momentum = send with privacy: must be derive or local, because"),
    ],
)
def test_settings_without_a_guarantee_are_refused_with_the_reason(change, complaint):
    with pytest.raises(InputError) as refusal:
        check_sound(**SOUND | change)
    assert str(refusal.value).startswith(complaint)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("observer", [Observer.OUTSIDER, Observer.INSIDER_MASKED])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_the_noise_for_a_budget_meets_it_and_hardly_less_noise_would_not(observer, loss):
    plan = noise_for_budget(3.0, 30, NoisePlan(1.0, 125, None, loss), delta=default_delta(125), observer=observer)

    def epsilon(noise_multiplier: float) -> float:
        release = NoisePlan(noise_multiplier, 125, None, loss).release(least_arrived(125, loss))
        return PrivacyLedger().add(release, 30).epsilon(observer, default_delta(125))

    assert epsilon(plan.noise_multiplier) <= 3.0
    assert epsilon(plan.noise_multiplier * 0.999) > 3.0


def test_a_budget_for_insiders_can_be_met_by_many_peers():
    plan = noise_for_budget(8.0, 10, NoisePlan(1.0, 2000), delta=default_delta(2000))
    assert 10 < plan.noise_multiplier < 200
    assert PrivacyLedger().add(plan.release(2000), 10).epsilon(Observer.INSIDER, default_delta(2000)) <= 8.0


def test_a_budget_that_needs_more_noise_than_the_indicators_is_refused():
    with pytest.raises(
        InputError, match=r"needs noise_multiplier = 54\.75, but indicator_noise = 6 allows only less than 12"
    ):
        noise_for_budget(3.0, 30, NoisePlan(1.0, 125, 6.0), delta=default_delta(125))


def test_a_run_stops_before_its_budget_is_exceeded():
    release, ledger, done = NoisePlan(2.0, 125).release(125), PrivacyLedger(), 0
    while affordable(ledger, release, 4.0, Observer.OUTSIDER, 0.01):
        ledger, done = ledger.add(release), done + 1
    assert done > 1
    assert ledger.epsilon(Observer.OUTSIDER, 0.01) <= 4.0 < ledger.add(release).epsilon(Observer.OUTSIDER, 0.01)


def test_the_report_of_the_papers_setting_holds_the_oracle_values():
    report = privacy_report(NoisePlan(1.0, 125), 30)
    assert report["epsilon_outsider"] == pytest.approx(28.3, rel=1e-3)
    assert report["epsilon_insider"] == pytest.approx(2032, rel=1e-3)
    assert report["epsilon_outsider"] < report["epsilon_insider_masked"] < report["epsilon_outsider"] * 1.01
    assert report["delta"] == pytest.approx(125**-1.1)
    assert report["noise_to_clip_ratio"] == pytest.approx(1.0032154 * math.sqrt(1_199_882) / 125)
    assert "replaced by zero" in report["adjacency"]
    assert json.loads(json.dumps(report)) == report


def test_the_report_says_what_the_exchange_shows_and_claims_nothing_for_parts():
    full, grid = (privacy_report(NoisePlan(1.0, 125), 30, exchange=exchange) for exchange in ("full", "grid"))
    assert full["epsilon_insider"] == grid["epsilon_insider"]
    assert any("group of 5" in line and "indicator whole" in line for line in full["assumptions"])
    assert any("one may hold the whole norm" in line for line in grid["assumptions"])


def test_the_report_counts_on_the_tolerated_loss():
    calm, stormy = privacy_report(NoisePlan(1.0, 100), 30), privacy_report(NoisePlan(1.0, 100, None, 0.2), 30)
    assert stormy["epsilon_outsider"] == pytest.approx(calm["epsilon_outsider"], rel=1e-4)
    assert stormy["epsilon_insider"] < calm["epsilon_insider"]
    assert any("at least 80 of 100 shares" in line for line in stormy["assumptions"])


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: privacy_report(NoisePlan(1.0, 125), 0), "iterations = 0: must be at least 1"),
        (lambda: privacy_report(NoisePlan(0.05, 1), 5), "peers = 1: must be at least 2"),
        (lambda: privacy_report(NoisePlan(1.0, 125), 5, delta=0.5), "delta = 0.5: must be above 0 and below 0.5"),
        (lambda: privacy_report(NoisePlan(1.0, 125), 5, group_size=1), "group_size = 1: must be at least 2"),
        (lambda: privacy_report(NoisePlan(1.0, 125), 5, exchange="post"), "exchange = post: must be one of full"),
        (lambda: privacy_report(NoisePlan(1.0, 125), 5, parameters=0), "parameters = 0: must be at least 1"),
        (lambda: noise_for_budget(0.0, 5, NoisePlan(1.0, 125), delta=0.1), "target_epsilon = 0: must be a number"),
        (lambda: noise_for_budget(math.inf, 5, NoisePlan(1.0, 125), delta=0.1), "target_epsilon = inf: must be"),
        (lambda: noise_for_budget(1.0, 5, NoisePlan(1.0, 125), delta=0.0), "delta = 0: must be above 0 and below 0.5"),
        (
            lambda: noise_for_budget(1.0, 5, NoisePlan(1.0, 4, None, 0.8), delta=0.1, observer=Observer.INSIDER_MASKED),
            "tolerated_loss = 0.8: must leave a masked insider one other peer of 4",
        ),
    ],
)
def test_wrong_questions_are_refused_in_one_line(call, complaint):
    with pytest.raises(InputError) as refusal:
        call()
    assert str(refusal.value).startswith(complaint)
    assert "\n" not in str(refusal.value)
