"""A real swarm under differential privacy: one bound, no losses on the disk, a budget that survives kills."""

from __future__ import annotations

import json

import pytest

from marfl.dp.accounting import Observer, PrivacyLedger
from marfl.dp.calibration import NoisePlan
from stages.swarms import QUICK, TINY, swarm

pytestmark = pytest.mark.slow
PRIVATE = ("--noise-multiplier", "0.4", "--peers", "5", *TINY, *QUICK)


def test_a_private_swarm_agrees_on_the_bound_and_accounts_for_every_iteration(tmp_path):
    result = swarm(tmp_path / "run", *PRIVATE, "--iterations", "4")
    assert result.summary["agreed"]
    assert (result.summary["wire"], result.summary["bits_up"], result.summary["bits_down"]) == ("fixed", 32, 32)
    ledger = PrivacyLedger()
    for iteration, row in enumerate(result.rows(), start=1):
        ledger = ledger.add(NoisePlan(0.4, 5).release(row["aggregators"]))
        for observer in Observer:
            assert row[f"epsilon_{observer}"] == pytest.approx(ledger.epsilon(observer, 5**-1.1))
        assert {result.peer_rows(peer)[iteration]["clip"] for peer in range(5)} == {row["clip"]}
        assert row["train_loss"] is None
    assert not (result.out / "split.json").exists()
    assert result.summary["privacy"]["epsilon_insider"] == result.rows()[-1]["epsilon_insider"]


def test_two_private_swarms_of_one_seed_draw_different_noise(tmp_path):
    flags = (*PRIVATE, "--iterations", "1", "--seed", "7")
    hashes = {swarm(tmp_path / name, *flags).summary["model_hash"] for name in ("one", "other")}
    assert len(hashes) == 2


def test_the_budget_ends_the_run_also_for_a_peer_that_was_killed(tmp_path):
    flags = ("--iterations", "12", "--target-epsilon", "90", "--kill", "2@2", "--restart", "1")
    result = swarm(tmp_path / "run", *PRIVATE, *flags)
    assert result.summary["stopped_because"].startswith("target epsilon 90 for the insider: one more iteration")
    assert 1 < result.summary["iterations"] < 12
    for peer in range(5):
        account = json.loads((result.out / "peers" / str(peer) / "privacy.json").read_text())
        assert PrivacyLedger.from_rows(account["releases"]).epsilon(Observer.INSIDER, 5**-1.1) <= 90
        assert account["open"] is None


def test_a_killed_peers_missing_noise_takes_nobody_past_the_target(tmp_path):
    """A budget for two iterations of all five: with four the second would exceed it, so it goes by."""
    delta = 5**-1.1
    target = PrivacyLedger().add(NoisePlan(0.4, 5).release(5), 2).epsilon(Observer.OUTSIDER, delta) * 1.01
    flags = ("--iterations", "6", "--target-epsilon", f"{target}", "--target-observer", "outsider", "--kill", "2@2")
    result = swarm(tmp_path / "run", *PRIVATE, *flags)
    for peer in (0, 1, 3, 4):
        account = json.loads((result.out / "peers" / str(peer) / "privacy.json").read_text())
        assert 0 < PrivacyLedger.from_rows(account["releases"]).epsilon(Observer.OUTSIDER, delta) <= target
    assert [row["aggregators"] for row in result.rows()] == [5, 0]
    assert result.summary["stopped_because"].startswith("target epsilon")
