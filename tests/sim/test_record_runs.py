"""Runs that hide single records: one mechanism in every engine, its ledger, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from marfl.cli import main
from marfl.config import Config, load
from marfl.dp import private_agreement
from marfl.dp.accounting import ADJACENCY_OF_RECORDS, Observer, PrivacyLedger
from marfl.dp.calibration import NoisePlan
from marfl.errors import InputError
from marfl.learn.record_gradients import RecordGradients
from marfl.peer.trainer import Trainer
from marfl.plan.cost import cost
from marfl.plan.grid import plan
from marfl.sim.engine import Simulation, simulate

SMALL = {"features": 12, "hidden": [6], "classes": 4, "samples": 900, "test_samples": 200}
BASE = {"task": "synthetic", "task_options": SMALL, "peers": 12, "group_size": 3, "iterations": 4, "batch": 8}
RECORD = {"privacy.noise_multiplier": 1.0, "privacy.unit": "record", "privacy.records": 80, "privacy.delta": 1e-4}


def config(**overrides: Any) -> Config:
    return load(overrides=BASE | {"test_every": 2} | RECORD | overrides)


def run(given: Config) -> tuple[Any, list[dict[str, Any]]]:
    simulation = Simulation(given)
    found = list(simulation.rows())
    return simulation.world, found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"technique": "fedavg"},
        {"privacy.masks": True},
        {"churn.participation": 0.75, "churn.dropout": 0.2, "iterations": 6},
    ],
    ids=["grid", "fedavg", "masks", "churn"],
)
def test_the_protocol_ends_on_the_bits_epsilons_and_bytes_of_the_default_engine(given):
    one, other = (run(config(**given, engine=engine))[1] for engine in ("bitwise", "protocol"))
    for field in ("model_hash", "clip", "bytes_payload", "aggregators", *(f"epsilon_{each}" for each in Observer)):
        assert [row[field] for row in one] == [row[field] for row in other], field
    assert {row["clip"] for row in one} == {1.0}


def test_no_indicator_travels_because_the_bound_is_fixed():
    world, rows = run(config())
    assert rows[0]["bytes_payload"] == cost("grid", plan(12, 3), world.length).bytes_total


@pytest.mark.parametrize("masks", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize(
    ("exchange", "batch", "noise", "bits"),
    [("grid", 8, 1.0, 32), ("chunked", 8, 1.0, 32), ("full", 8, 1.0, 32), ("grid", 64, 3.0, 32), ("grid", 79, 5e4, 64)],
)
def test_marfl_plan_shows_the_width_and_the_very_bytes_of_a_run(capsys, exchange, batch, noise, bits, masks):
    """Wide noise takes a wide field. What masks add to an iteration is control, and a figure of its own."""
    more = {"exchange": exchange, "batch": batch, "privacy.noise_multiplier": noise, "privacy.masks": masks}
    world, rows = run(config(engine="protocol", iterations=1, **more))
    size = ("--peers", "12", "--group-size", "3", "--exchange", exchange, "--model-bytes", str(4 * world.length))
    unit = ("--unit", "record", "--records", "80", "--batch", str(batch), "--noise-multiplier", str(noise))
    assert main(["plan", *size, *unit, *(["--masks"] if masks else []), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["wire"] == {"name": "fixed", "bits_up": bits, "bits_down": bits}
    assert (rows[0]["bits_up"], rows[0]["bits_down"]) == (bits, bits)
    assert shown["bytes_total"][exchange] == rows[0]["bytes_payload"]
    assert shown["bytes_down"][exchange] == rows[0].get("payload_down", 0)
    if masks:
        assert shown["masks"]["value_bytes"] == bits // 8
    assert main(["plan", *size, *unit]) == 0
    assert f"Private integers of {bits} bits" in capsys.readouterr().out


def test_every_row_holds_the_epsilons_of_a_secret_sample():
    _, rows = run(config(**{"privacy.colluders": 3}))
    noise = NoisePlan(1.0, 12, adaptive=False, sampling=0.1, colluders=3)
    ledger = PrivacyLedger()
    for row in rows:
        ledger = ledger.add(noise.release(12))
        assert [row[f"epsilon_{each}"] for each in Observer] == [ledger.epsilon(each, 1e-4) for each in Observer]
    assert rows[-1]["epsilon_insider"] > rows[-1]["epsilon_insider_masked"] > rows[-1]["epsilon_outsider"]


def test_a_target_ends_the_run_before_it_is_exceeded():
    target = {"privacy.target_epsilon": 3.0, "privacy.target_observer": "insider_masked", "iterations": 200}
    summary = simulate(config(**target))
    assert summary["stopped_because"].startswith("target epsilon 3 for the insider_masked")
    assert 1 < summary["iterations"] < 200
    assert 2 < summary["privacy"]["epsilon_insider_masked"] <= 3


def test_without_noise_and_clipping_it_is_a_step_on_all_records(monkeypatch):
    """Rate 1 and a bound that nothing reaches: the mean of the peers' sums of gradients, over the expected batch."""
    monkeypatch.setattr(private_agreement, "blur", lambda total, lattice, words: total)
    given = config(iterations=1, batch=80, **{"privacy.clip": 50.0, "partition.kind": "iid"})
    world, _ = run(given)
    start = private_agreement.agreement_of(given, world.local_work, world.length).start(world.local.worker.flat.clone())
    gradient = torch.zeros(world.length)
    first = Simulation(given).world
    for peer in range(12):
        loader = first.local.loader(peer)
        batch = loader.records(np.arange(loader.samples))
        first.local.worker.grad.zero_()
        task = first.local.task
        first.local.worker.accumulate(
            torch.arange(loader.samples),
            lambda task=task, batch=batch: task.sample_losses(first.local.worker.module, batch).sum(),
        )
        gradient += first.local.worker.grad / 12 / 80
    expected = first.state.vectors["theta"] - 0.1 * 0.1 * gradient
    torch.testing.assert_close(world.state.vectors["theta"], expected, rtol=1e-3, atol=2e-5)
    assert start.version == 0


def test_a_private_run_of_records_learns():
    given = {"batch": 40, "iterations": 40, "optimizer.learning_rate": 1.0, "test_every": 40}
    before, after = (simulate(config(**given | {"iterations": count}))["final_accuracy"] for count in (1, 40))
    assert after > before + 0.2


def test_a_real_peers_sample_and_noise_follow_from_no_seed():
    trainer = Trainer(config(), 0)
    result = trainer.update(trainer.start, 1, 0)
    one, other = (trainer.privatised(result, trainer.start, 1) for _ in range(2))
    share = NoisePlan(1.0, 12, adaptive=False).update_share(trainer.agreement.lattice(len(one)).steps)
    assert float((one - other).double().std()) > 0.8 * 2**0.5 * share  # the samples differ, too
    assert trainer.records.way == "gradients of single records, 32 at a time"


@pytest.mark.parametrize("bound", [math.nan, 0.0, 1e-300, math.inf])
def test_a_bound_in_the_agreed_state_that_would_tell_how_many_records_there_are_is_refused(bound):
    """0/0 and ∞ become one and the same integer, far beyond the noise: their sum counts the batch."""
    trainer = Trainer(config(), 0)
    result = trainer.update(trainer.start, 1, 0)
    state = replace(trainer.start, scalars={private_agreement.CLIP: bound})
    with pytest.raises(InputError, match=r"clip = .*: must be at least 1e-10"):
        trainer.privatised(result, state, 1)


def test_a_records_dropout_masks_are_secret_and_its_own(monkeypatch):
    """Masks that followed from the place in the batch would be others for all records after one that is removed."""
    seen: list[list[int]] = []
    real = RecordGradients.slices

    def spy(self, batch, keys):
        seen.append(keys.tolist())
        return real(self, batch, keys)

    monkeypatch.setattr(RecordGradients, "slices", spy)
    run(config(iterations=1))
    drawn = [key for keys in seen for key in keys if key]  # 0: of the record that was tried out
    assert len(set(drawn)) == len(drawn) > 50


def test_a_peer_without_a_sampled_record_sends_noise_like_everybody():
    _, rows = run(config(batch=1, **{"privacy.records": 10**4}))
    assert {row["aggregators"] for row in rows} == {12}


def test_the_summary_says_what_is_hidden_and_that_a_simulation_hides_nothing(capsys):
    told = simulate(config(**{"privacy.delta": 0.02}))["privacy"]
    assert (told["unit"], told["adjacency"], told["sampling_rate"]) == ("record", ADJACENCY_OF_RECORDS, 0.1)
    assert "delta = 0.02 is above 0.01" in told["warnings"][0]
    assert "all noise follows from the run's seed" in told["warnings"][1]
    _, rows = run(config(iterations=1, **{"privacy.delta": 0.02}))
    assert "above 0.01" in rows[0]["privacy_warnings"][0]
    flags = "--task synthetic --peers 6 --iterations 1 --batch 8 --unit record --records 90 --noise-multiplier 1"
    assert main(["simulate", *flags.split()]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of one record: outsider" in shown
    assert "this model is not private" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"privacy.records": None}, "privacy.unit = record: needs privacy.records, a public number of records"),
        ({"privacy.records": 7}, "batch = 8: must be at most privacy.records = 7"),
        ({"local_batches": 2}, "local_batches = 2: must be 1 with privacy.unit = record, because a second step"),
        ({"momentum": "local"}, "momentum = local: must be derive with privacy.unit = record"),
        ({"privacy.clip_step": 0.2}, "privacy.clip_step = 0.2: must be 0 with privacy.unit = record"),
        ({"privacy.noise_multiplier": None}, "privacy.unit = record: needs privacy.noise_multiplier"),
        ({"privacy.clip": 1e-12}, "clip = 1e-12: must be at least 1e-10"),
        (
            {"distill.iterations": 1, "distill.teacher": "previous"},
            "distill.iterations = 1: must be 0 with privacy.unit",
        ),
    ],
)
def test_what_does_not_go_with_records_is_refused_in_one_line_with_the_reason(given, said):
    with pytest.raises(InputError) as refusal:
        config(**given)
    assert str(refusal.value).startswith(said)
    assert "\n" not in str(refusal.value)
