"""Differential privacy in whole runs: one mechanism in every engine, an honest ledger, and nothing else that leaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from marfl.cli import main
from marfl.config import Config, load
from marfl.dp import private_agreement
from marfl.dp.accounting import ADJACENCY, Observer, PrivacyLedger
from marfl.dp.calibration import NoisePlan
from marfl.dp.ledger import Spending
from marfl.dp.paper import WARNING
from marfl.errors import InputError
from marfl.net.virtual import VirtualNet, VirtualNetwork
from marfl.peer.trainer import Trainer
from marfl.plan.cost import cost
from marfl.plan.grid import plan
from marfl.runs import RunDir
from marfl.sim.engine import Simulation, simulate

SMALL = {"features": 12, "hidden": [6], "classes": 4, "samples": 900, "test_samples": 200}
BASE = {"task": "synthetic", "task_options": SMALL, "peers": 12, "group_size": 3, "iterations": 4, "batch": 8}
SOUND = {"privacy.noise_multiplier": 1.0}
PAPER = SOUND | {"privacy.mode": "paper", "semantics": "paper", "peers": 27}
CHURN = {"churn.participation": 0.75, "churn.dropout": 0.2, "privacy.noise_multiplier": 0.5, "iterations": 6}


def config(**overrides: Any) -> Config:
    return load(overrides=BASE | {"test_every": 2} | SOUND | overrides)


def run(given: Config) -> tuple[Any, list[dict[str, Any]]]:
    simulation = Simulation(given)
    found = list(simulation.rows())
    return simulation.world, found


def vectors(given: Config) -> dict[str, torch.Tensor]:
    return run(given)[0].state.vectors


# --- the mechanism ---


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"exchange": "full"},
        {"technique": "fedavg"},
        {"local_batches": 3},
        CHURN,
        {"distill.iterations": 2, "distill.teacher": "previous"},
        {"privacy.masks": True},
    ],
    ids=["grid", "full", "fedavg", "three batches", "churn", "previous model as teacher", "masks"],
)
def test_the_protocol_ends_on_the_bits_epsilons_and_bytes_of_the_default_engine(given):
    one, other = (run(config(**given, engine=engine))[1] for engine in ("bitwise", "protocol"))
    for field in ("model_hash", "clip", "bytes_payload", "bytes_sync", "aggregators", *agreed_columns()):
        assert [row[field] for row in one] == [row[field] for row in other], field
    assert len({row["clip"] for row in one}) == len(one)


def agreed_columns() -> list[str]:
    return [f"epsilon_{observer}" for observer in Observer]


@pytest.mark.parametrize("batches", [1, 2])
def test_the_fast_engine_clips_every_peer_by_itself_and_is_the_same_up_to_rounding(batches):
    simulation = Simulation(config(engine="fast", local_batches=batches))
    assert "privacy, which clips every peer's update by itself" in simulation.world.reason
    list(simulation.rows())
    expected = vectors(config(local_batches=batches))
    torch.testing.assert_close(simulation.world.state.vectors["theta"], expected["theta"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # processes that import torch
def test_worker_processes_draw_the_noise_of_one_process():
    one, two = (vectors(config(workers=workers))["theta"] for workers in (1, 2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("momentum", ["derive", "local"])
def test_without_clipping_and_noise_the_mechanism_changes_nothing(batches, momentum):
    given = {"local_batches": batches, "momentum": momentum, "iterations": 6}
    unseen = {"privacy.noise_multiplier": 1e-8, "privacy.clip": 100.0, "privacy.clip_step": 0.0}
    private, plain = (vectors(config(**given, **more)) for more in (unseen, {"privacy.mode": "off"}))
    torch.testing.assert_close(private["theta"], plain["theta"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [0.0, 0.36])
def test_the_noise_on_the_mean_of_a_run_has_the_promised_deviation_within_3_percent(loss):
    big = {"task_options": SMALL | {"features": 400, "hidden": [60]}, "iterations": 1, "privacy.clip": 50.0}
    private, plain = (
        vectors(config(**big, **more)) for more in ({"privacy.tolerated_loss": loss}, {"privacy.mode": "off"})
    )
    noise = private["theta"] - plain["theta"]  # nothing is clipped at C = 50, and E is 0 at the beginning
    z = NoisePlan(1.0, 12).update_multiplier
    assert float(noise.std()) == pytest.approx(z * 50 / (12 * math.sqrt(1 - loss)), rel=0.03)


def test_every_peer_draws_noise_of_its_own_in_every_iteration(monkeypatch):
    seen: list[bytes] = []
    real = private_agreement.privatise

    def spy(fresh, bound, lattice, words):
        sent = real(torch.zeros_like(fresh), bound, lattice, words)
        seen.append(sent[:8].numpy().tobytes())
        return sent

    monkeypatch.setattr(private_agreement, "privatise", spy)
    run(config(iterations=3))
    assert len(seen) == len(set(seen)) == 36


def test_a_real_peers_noise_is_the_promised_share_and_follows_from_no_seed():
    big = config(task_options=SMALL | {"features": 400, "hidden": [60]})
    trainer = Trainer(big, 0)
    result = trainer.update(trainer.start, 1, 0)
    one, other = (trainer.privatised(result, trainer.start, 1) for _ in range(2))
    share = NoisePlan(1.0, 12).update_share(trainer.agreement.lattice(len(one) - 1).steps)
    assert float((one - other)[:-1].double().std()) == pytest.approx(math.sqrt(2) * share, rel=0.03)


def test_one_clipping_bound_is_part_of_the_state_that_all_peers_agree_on():
    world, rows = run(config(**CHURN, engine="protocol"))
    newest = [peer for peer in world.people if not peer.behind and peer.record.iteration == 6]
    bounds = {peer.state.scalars["clip"] for peer in newest}
    assert len(newest) > 2
    assert bounds == {rows[-1]["clip"]}
    assert rows[-1]["clip"] != 0.1
    assert sum(row["bytes_sync"] for row in rows) > 0  # some of them were late, and got it with the state


class Poisoned:
    """A task in which peer 3 holds NaN."""

    def __init__(self) -> None:
        from marfl.learn import load_task

        self.inner: Any = load_task("synthetic", **SMALL)

    def model(self) -> Any:
        return self.inner.model()

    def shard(self, peer: int, peers: int, rng: Any) -> Any:
        shard = self.inner.shard(peer, peers, rng)
        inputs = torch.stack([shard[i][0] for i in range(len(shard))]) * (math.nan if peer == 3 else 1.0)
        return torch.utils.data.TensorDataset(inputs, torch.stack([shard[i][1] for i in range(len(shard))]))

    def loss(self, model: Any, batch: Any) -> Any:
        return self.inner.loss(model, batch)

    def evaluate(self, model: Any) -> Any:
        return self.inner.evaluate(model)


@pytest.mark.parametrize("engine", ["bitwise", "protocol"])
def test_a_peer_whose_update_is_not_finite_sends_noise_like_everybody(engine):
    _, rows = run(config(task=f"{__name__}:Poisoned", task_options={}, engine=engine))
    assert all(row["aggregators"] == 12 and row["checks"] == [] for row in rows)
    assert math.isfinite(rows[-1]["test_loss"])


# --- what leaves a peer ---


def test_nothing_that_leaves_a_peer_depends_on_data_but_the_privatised_vector(monkeypatch):
    sent: list[tuple[object, ...]] = []
    depart, announce = VirtualNetwork.depart, VirtualNet.announce

    def spy_depart(self, event, parcel):
        sent.append((event.op, event.source, event.dest, bytes(parcel.header), bytes(parcel.payload)))
        return depart(self, event, parcel)

    async def spy_announce(self, key, value, *, ttl):
        sent.append((self.me, key, value))
        await announce(self, key, value, ttl=ttl)

    monkeypatch.setattr(VirtualNetwork, "depart", spy_depart)
    monkeypatch.setattr(VirtualNet, "announce", spy_announce)
    real = private_agreement.privatise
    monkeypatch.setattr(private_agreement, "privatise", lambda fresh, *rest: real(torch.zeros_like(fresh), *rest))

    def told(alpha: float) -> list[tuple[object, ...]]:
        sent.clear()
        run(config(engine="protocol", iterations=3, **{"partition.alpha": alpha, "churn.participation": 0.95}))
        return list(sent)

    one, other = told(0.1), told(10.0)
    assert len(one) > 100
    assert one == other


def test_a_private_run_directory_holds_no_losses_and_no_table_of_labels(tmp_path: Path):
    for name, more in (("private", {}), ("plain", {"privacy.mode": "off"})):
        given = config(**more)
        with RunDir.create(tmp_path / name, given.as_dict()) as place:
            list(Simulation(given, place).rows())
            losses = {row["train_loss"] for row in place.rows()}
        assert (losses == {None}) == (name == "private")
        assert (tmp_path / name / "split.json").exists() == (name == "plain")


def test_the_indicator_is_one_more_value_on_the_wire():
    world, rows = run(config())
    assert rows[0]["bytes_payload"] == cost("grid", plan(12, 3), world.length + 1).bytes_total  # 32 bits hold the sum
    world, rows = run(config(**{"privacy.clip_step": 0.0}))  # a fixed bound needs none
    assert rows[0]["bytes_payload"] == cost("grid", plan(12, 3), world.length).bytes_total
    assert {row["clip"] for row in rows} == {0.1}


# --- accounting ---


def test_every_row_holds_the_epsilons_of_what_arrived_so_far():
    _, rows = run(config(**CHURN))
    ledger = PrivacyLedger()
    for row in rows:
        ledger = ledger.add(NoisePlan(0.5, 9).release(row["aggregators"]))  # 9 = 12·0.75 shares; dropouts lose theirs
        for observer in Observer:
            assert row[f"epsilon_{observer}"] == ledger.epsilon(observer, 12**-1.1)
    assert any(row["aggregators"] < 9 for row in rows)
    missed = next(row for row in rows if row["aggregators"] < 9)
    assert f"only {missed['aggregators']} shares of noise arrived, 9 are needed" in missed["checks"][0]


def test_a_tolerated_loss_keeps_the_noise_multiplier_when_peers_drop_out():
    _, rows = run(config(**CHURN | {"privacy.tolerated_loss": 0.5}))
    assert all(not row["checks"] or "shares" not in row["checks"][0] for row in rows)
    promise = PrivacyLedger().add(NoisePlan(0.5, 9).release(9), 6).epsilon(Observer.OUTSIDER, 12**-1.1)
    assert rows[-1]["epsilon_outsider"] <= promise


def test_those_who_only_help_to_aggregate_bring_no_noise():
    given = {"churn.update_participation": 0.5, "churn.aggregate_participation": 1.0, "privacy.noise_multiplier": 0.5}
    for engine in ("bitwise", "protocol"):
        _, rows = run(config(**given, engine=engine))
        expected = PrivacyLedger().add(NoisePlan(0.5, 6).release(6), 4).epsilon(Observer.OUTSIDER, 12**-1.1)
        assert {row["aggregators"] for row in rows} == {12}
        assert rows[-1]["epsilon_outsider"] == expected


def test_the_summary_says_in_words_what_is_promised():
    summary = simulate(config(**{"privacy.delta": 0.01}))
    told = summary["privacy"]
    assert (told["adjacency"], told["delta"], told["shares"]) == (ADJACENCY, 0.01, 12)
    assert "at most e^epsilon times the probability, plus delta = 0.01" in told["meaning"]
    assert 0 < told["epsilon_outsider"] < told["epsilon_insider_masked"] < told["epsilon_insider"]
    assert simulate(config(**{"privacy.mode": "off"}))["privacy"] is None


@pytest.mark.parametrize(("observer", "target"), [("outsider", 5.0), ("insider_masked", 6.0), (None, 40.0)])
def test_a_run_stops_before_its_target_epsilon_is_exceeded(observer, target):
    given = config(iterations=20, **{"privacy.target_epsilon": target, "privacy.target_observer": observer})
    column = f"epsilon_{observer or 'insider'}"
    simulation = Simulation(given)
    rows = list(simulation.rows())
    assert 1 < len(rows) < 20
    assert rows[-1][column] <= target < run(config(iterations=len(rows) + 1))[1][-1][column]
    assert rows[-1]["test_accuracy"] is not None  # the last iteration is always tested
    summary = simulation.summary()
    assert summary["stopped_because"].startswith(f"target epsilon {target:g} for the {observer or 'insider'}: one more")
    assert summary["finished"]


def test_the_target_ends_every_peers_run_at_one_public_iteration():
    given = config(iterations=20, **{"privacy.target_epsilon": 40.0})
    late = Spending(given)  # has given nothing away yet
    _, rows = run(given)
    assert late.affords(len(rows))
    assert not late.affords(len(rows) + 1)


def test_a_resumed_run_has_the_hash_the_bound_and_the_ledger_of_an_uninterrupted_one(tmp_path: Path):
    for name, settings in (("sound", CHURN), ("paper", PAPER)):
        given = config(**settings | {"iterations": 6, "checkpoint_every": 2})
        whole = run(given)[1]
        with RunDir.create(tmp_path / name, given.as_dict()) as place:
            iterator = Simulation(given, place).rows()
            for _ in range(5):
                next(iterator)
            iterator.close()
        with RunDir.create(tmp_path / name, given.as_dict(), resume=True) as place:
            resumed = list(Simulation(given, place, resume=True).rows())
        for field in ("model_hash", "clip", *agreed_columns()):
            assert [row[field] for row in resumed] == [row[field] for row in whole[4:]], field


# --- the paper's mode ---


def test_in_paper_mode_the_bounds_drift_apart_and_no_epsilon_is_claimed():
    world, rows = run(config(**PAPER | {"iterations": 30}))
    spread = [row["clip_highest"] / row["clip_lowest"] for row in rows]
    assert len(set(world.privacy.bounds)) == 27
    assert spread[-1] > spread[0] > 1
    assert spread[-1] > 1.2
    assert {row[column] for row in rows for column in agreed_columns()} == {None}
    assert rows[-1]["bytes_payload"] == cost("full", plan(27, 3), 3 * world.length + 1).bytes_total


def test_paper_mode_prints_why_its_guarantee_does_not_hold(capsys):
    flags = "--task synthetic --peers 27 --group-size 3 --iterations 1 --batch 8 --semantics paper --privacy paper"
    assert main(["simulate", *flags.split(), "--noise-multiplier", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert " ".join(told.err.split()).startswith(f"warning: {WARNING}")
    assert WARNING in told.out


def test_paper_mode_ends_where_its_noise_would_be_a_complex_number():
    with pytest.raises(InputError, match=r"noise_multiplier = 1 with \d+ peers: must be below peers/10"):
        run(config(**PAPER | {"peers": 12, "churn.dropout": 0.5}))


# --- refusals ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"privacy.noise_multiplier": 0}, "privacy.noise_multiplier = 0: must be a finite number, above 0"),
        ({"privacy.noise_multiplier": -1}, "privacy.noise_multiplier = -1: must be a finite number, above 0"),
        ({"privacy.noise_multiplier": math.inf}, "privacy.noise_multiplier = inf: must be a finite number, above 0"),
        ({"wire": "fp32"}, "wire = fp32: with privacy integers travel, because noise in floating point tells what"),
        ({"privacy.delta": 0}, "privacy.delta = 0: must be a number, above 0, below 0.5"),
        ({"privacy.delta": 0.5}, "privacy.delta = 0.5: must be a number, above 0, below 0.5"),
        ({"privacy.tolerated_loss": 1}, "privacy.tolerated_loss = 1: must be a number, at least 0, below 1"),
        ({"privacy.clip": 0}, "privacy.clip = 0: must be a finite number, above 0"),
        ({"privacy.target_observer": "x"}, "privacy.target_observer = 'x': must be one of outsider, insider"),
        ({"privacy.mode": "sound", "privacy.noise_multiplier": None}, "privacy.mode = sound: needs privacy.noise_mult"),
        ({"privacy.noise_multiplier": None, "privacy.target_epsilon": 3}, "privacy.target_epsilon = 3: needs privacy."),
        ({"privacy.target_epsilon": 3}, "privacy.target_epsilon = 3 for the insider: must be at least 10.42"),
        ({"peers": 1, "privacy.indicator_noise": 9.0}, "peers = 1: must be at least 2, because one peer alone has"),
        ({"semantics": "paper"}, "semantics = paper with privacy.mode = sound: must be exact, because"),
        ({"momentum": "send"}, "momentum = send with privacy: must be derive or local, because"),
        ({"technique": "gossip"}, "technique = gossip with privacy: must have an exact average"),
        ({"technique": "saps"}, "technique = saps with privacy: must have an exact average"),
        ({"plan": "random"}, "plan = random: exact semantics needs plan = exact"),
        ({"distill.iterations": 2, "momentum": "send"}, "distill.teacher = group with privacy: must be previous, beca"),
        ({"privacy.mode": "paper"}, "privacy.mode = paper: needs semantics = paper"),
        (PAPER | {"privacy.target_epsilon": 3}, "privacy.target_epsilon = 3 with privacy.mode = paper: must not be"),
        (PAPER | {"technique": "ring"}, "technique = ring with privacy.mode = paper: must be mar or fedavg"),
        (PAPER | {"momentum": "local"}, "momentum = local with privacy.mode = paper: must be send"),
        (PAPER | {"peers": 9}, "noise_multiplier = 1 with 9 peers: must be below peers/10 = 0.9; needs at least 11"),
    ],
)
def test_settings_without_a_guarantee_are_refused_in_one_line_with_the_reason(given, said):
    with pytest.raises(InputError) as refusal:
        config(**given)
    assert str(refusal.value).startswith(said)
    assert "\n" not in str(refusal.value)


def test_noise_without_a_mode_means_sound_and_no_noise_means_off():
    assert config().privacy.mode == "sound"
    assert config(**{"privacy.noise_multiplier": None}).privacy.mode == "off"
    assert config(**{"privacy.target_epsilon": 19}).privacy.target_observer == "insider"
    masked = config(**{"privacy.target_epsilon": 19, "privacy.masks": True})
    assert masked.privacy.target_observer == "insider_masked"


def test_masks_change_not_a_bit_of_a_private_run():
    masked, plain = (run(config(**more))[1] for more in ({"privacy.masks": True}, {"wire": "fixed"}))
    assert [row["model_hash"] for row in masked] == [row["model_hash"] for row in plain]
    assert [row["epsilon_insider_masked"] for row in masked] == [row["epsilon_insider_masked"] for row in plain]
