"""The simulator: one model whichever engine, the same curve whichever technique, and an honest ledger."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from marfl.config import Config, load
from marfl.errors import InputError
from marfl.runs import RunDir
from marfl.sim.churn import participation
from marfl.sim.engine import Simulation, simulate
from marfl.sim.links import links

SMALL = {"features": 12, "hidden": [6], "classes": 4, "samples": 900, "test_samples": 200}
EXACT = ("mar", "fedavg", "arfl", "rdfl", "ring", "butterfly")


def config(**overrides: Any) -> Config:
    base = {"task": "synthetic", "task_options": SMALL, "peers": 9, "group_size": 3, "iterations": 4, "batch": 8}
    return load(overrides=base | {"test_every": 2} | overrides)


def theta(given: Config) -> torch.Tensor:
    simulation = Simulation(given)
    for _ in simulation.rows():
        pass
    world: Any = simulation.world
    if given.engine == "protocol":
        return world._newest().state.vectors["theta"]
    return world.state.vectors["theta"] if given.semantics == "exact" else world.matrices.theta[world.fresh[0]]


def rows(given: Config) -> list[dict[str, Any]]:
    return list(Simulation(given).rows())


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("peers", [16, 27, *(pytest.param(many, marks=pytest.mark.slow) for many in (64, 97, 125))])
def test_all_techniques_with_a_global_average_follow_one_curve(peers: int) -> None:
    models = {name: theta(config(technique=name, peers=peers, engine="bitwise")) for name in EXACT}
    for name, model in models.items():
        assert relative(model, models["mar"]) < 1e-5, name


@pytest.mark.parametrize("exchange", ["grid", "chunked", "full"])
@pytest.mark.parametrize("peers", [1, 5, 9, 14])
def test_the_protocol_ends_on_the_bits_and_bytes_of_the_default_engine(exchange: str, peers: int) -> None:
    given = {"peers": peers, "exchange": exchange}
    one, other = rows(config(**given)), rows(config(**given, engine="protocol"))
    assert [row["model_hash"] for row in one] == [row["model_hash"] for row in other]
    assert [row["bytes_payload"] for row in one] == [row["bytes_payload"] for row in other]


@pytest.mark.parametrize("technique", EXACT)
def test_every_exact_technique_runs_over_the_network_on_the_same_bits(technique: str) -> None:
    one, other = (rows(config(technique=technique, peers=7, engine=e)) for e in ("bitwise", "protocol"))
    assert [row["model_hash"] for row in one] == [row["model_hash"] for row in other]
    assert [row["bytes_payload"] for row in one] == [row["bytes_payload"] for row in other]


@pytest.mark.parametrize("momentum", ["derive", "send"])
def test_absentees_catch_up_and_both_engines_count_the_same_bytes(momentum: str) -> None:
    given = {"churn.participation": 0.5, "churn.dropout": 0.2, "iterations": 8, "peers": 12, "momentum": momentum}
    one, other = rows(config(**given)), rows(config(**given, engine="protocol"))
    for field in ("model_hash", "bytes_payload", "bytes_sync", "aggregators", "participants"):
        assert [row[field] for row in one] == [row[field] for row in other], field
    assert sum(row["bytes_sync"] for row in one) > 0


def test_worker_processes_give_the_bits_of_one_process() -> None:
    assert torch.equal(theta(config(workers=1)), theta(config(workers=2)))


@pytest.mark.slow
def test_workers_that_die_of_a_script_without_a_guard_are_one_line(tmp_path: Path) -> None:
    """Spawned processes read the script again; where it starts a simulation at once, they die of it."""
    script = tmp_path / "script.py"
    options = "{'samples': 90, 'features': 4, 'hidden': [3]}"
    settings = f"{{'task': 'synthetic', 'task_options': {options}, 'peers': 4, 'iterations': 1, 'workers': 2}}"
    script.write_text(
        "from marfl.config import load\nfrom marfl.sim.engine import simulate\n"
        f"simulate(load(overrides={settings}))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "BrokenPromise: a worker process died" in done.stderr.splitlines()[-1]
    assert "if __name__ == '__main__'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("overrides", "way"),
    [
        ({}, "pooled"),
        ({"local_batches": 3}, "batched"),
        ({"momentum": "send"}, "batched"),
        ({"momentum": "local"}, "batched"),
    ],
)
def test_the_fast_engine_is_the_same_up_to_rounding_and_says_how(overrides: dict[str, Any], way: str) -> None:
    fast = Simulation(config(engine="fast", **overrides))
    assert way in fast.world.reason
    assert relative(theta(config(engine="fast", **overrides)), theta(config(**overrides))) < 1e-5


def test_bytes_are_those_of_the_paper() -> None:
    paper = {"semantics": "paper", "peers": 125, "group_size": 5, "iterations": 1}
    mar, arfl, rdfl = (rows(config(technique=t, **paper))[0]["bytes_payload"] for t in ("mar", "arfl", "rdfl"))
    assert arfl == rdfl == mar * 124 / 12
    grid, fedavg = (
        rows(config(technique=t, peers=125, group_size=5, iterations=1))[0]["bytes_payload"] for t in ("mar", "fedavg")
    )
    assert grid * 125 == fedavg * 124


def test_momentum_derived_equals_momentum_sent_for_one_batch() -> None:
    assert (
        relative(theta(config(momentum="derive", iterations=10)), theta(config(momentum="send", iterations=10))) < 1e-4
    )


def test_own_momentum_is_the_agreed_one_while_all_take_part_and_another_when_not() -> None:
    whole = {"iterations": 6}  # one batch each: the mean of the momenta is the momentum of the mean
    assert relative(theta(config(momentum="local", **whole)), theta(config(**whole))) < 1e-6
    part = {"iterations": 6, "churn.participation": 0.5}
    assert relative(theta(config(momentum="local", **part)), theta(config(**part))) > 1e-4


def test_paper_semantics_equals_exact_semantics_at_full_participation() -> None:
    given = {"iterations": 10, "peers": 9, "group_size": 3}
    assert relative(theta(config(semantics="paper", **given)), theta(config(**given))) < 1e-4


def test_in_paper_semantics_an_absentee_trains_from_its_own_stale_model() -> None:
    simulation = Simulation(config(semantics="paper", plan="exact", **{"churn.participation": 0.5}, iterations=1))
    world: Any = simulation.world
    start = world.matrices.theta.clone()
    list(simulation.rows())
    moved = [not torch.equal(world.matrices.theta[p], start[p]) for p in range(9)]
    assert sum(moved) == 4  # round(0.5 · 9): whoever took part, and nobody else
    taken = [p for p in range(9) if moved[p]]
    assert all(torch.equal(world.matrices.theta[p], world.matrices.theta[taken[0]]) for p in taken)


def test_in_exact_semantics_everybody_starts_from_the_agreed_model() -> None:
    simulation = Simulation(config(**{"churn.participation": 0.5}, iterations=6))
    world: Any = simulation.world
    for _ in simulation.rows():
        assert max(world.held.values()) == world.state.version
    assert len(set(world.held.values())) > 1  # some are stale, and would catch up first


def test_separate_rates_give_helpers_no_weight() -> None:
    given = {"churn.update_participation": 0.5, "churn.aggregate_participation": 1.0}
    one, other = rows(config(**given)), rows(config(**given, engine="protocol"))
    assert [row["model_hash"] for row in one] == [row["model_hash"] for row in other]
    assert all(row["aggregators"] == 9 for row in one)


class Poisoned:
    """A task in which one peer's data is NaN."""

    def __init__(self) -> None:
        from marfl.learn import load_task

        self.inner: Any = load_task("synthetic", **SMALL)
        self.sample_losses = self.inner.sample_losses

    def model(self) -> Any:
        return self.inner.model()

    def shard(self, peer: int, peers: int, rng: Any) -> Any:
        shard = self.inner.shard(peer, peers, rng)
        if peer != 3:
            return shard
        inputs = torch.stack([shard[i][0] for i in range(len(shard))]) * math.nan
        return torch.utils.data.TensorDataset(inputs, torch.stack([shard[i][1] for i in range(len(shard))]))

    def loss(self, model: Any, batch: Any) -> Any:
        return self.inner.loss(model, batch)

    def evaluate(self, model: Any) -> Any:
        return self.inner.evaluate(model)


@pytest.mark.parametrize("engine", ["bitwise", "fast", "protocol"])
def test_a_peer_whose_data_yield_nan_does_not_poison_the_run(engine: str) -> None:
    found = rows(config(task=f"{__name__}:Poisoned", task_options={}, engine=engine))
    assert all(row["aggregators"] == 8 and "peer 3" in row["checks"][0] for row in found)
    assert math.isfinite(found[-1]["test_loss"])


def test_a_resumed_run_ends_on_the_hash_of_an_uninterrupted_one(tmp_path: Path) -> None:
    cases = {"exact": {}, "paper": {"semantics": "paper"}, "protocol": {"engine": "protocol"}}
    for name, case in cases.items():
        given = config(**case, iterations=9, checkpoint_every=2, **{"churn.participation": 0.6})
        whole = simulate(given)
        run = RunDir.create(tmp_path / name, given.as_dict())
        broken = Simulation(given, run)
        iterator = broken.rows()
        for _ in range(5):
            next(iterator)
        iterator.close()
        run.close()
        run = RunDir.create(tmp_path / name, given.as_dict(), resume=True)
        resumed = Simulation(given, run, resume=True)
        assert [row["iteration"] for row in resumed.rows()] == [5, 6, 7, 8, 9]
        run.close()
        assert resumed.summary()["model_hash"] == whole["model_hash"]
        assert resumed.summary()["bytes_total"] == whole["bytes_total"]


def test_links_give_virtual_seconds_and_a_slower_profile_takes_longer() -> None:
    fast, slow = (simulate(config(links=name))["virtual_seconds"] for name in ("lan", "nb-iot"))
    assert 0 < fast < slow


def test_deaths_are_paid_for_and_named() -> None:
    found = rows(config(**{"churn.death": 0.1}, iterations=10, peers=16))
    hit = [row for row in found if row["bytes_repair"]]
    assert hit
    assert all(row["aggregators"] < 16 and "died during the exchange" in row["checks"][0] for row in hit)


@pytest.mark.parametrize(
    ("links", "exchange"), [pytest.param(None, "grid", marks=pytest.mark.slow), ("lte", "grid"), (None, "chunked")]
)
def test_in_the_protocol_engine_peers_really_die_and_the_survivors_agree(links: str | None, exchange: str) -> None:
    given = config(**{"churn.death": 0.04}, iterations=12, peers=12, engine="protocol", links=links, exchange=exchange)
    simulation = Simulation(given)
    world: Any = simulation.world
    found, died = [], 0
    for row in simulation.rows():
        found.append(row)
        gone = [check for check in row["checks"] if "died during the exchange" in check]
        died += bool(gone)
        if gone:
            assert row["aggregators"] <= 12
        newest = {p.state.hash for p in world.people if p.index not in world.unsure}
        assert len(newest) == 1
        assert newest == {bytes.fromhex(row["model_hash"])}
    assert died >= 3
    assert sum(row["aggregators"] < 12 for row in found) >= 1  # some died before their update had arrived
    assert sum(row["bytes_sync"] for row in found) > 0  # whoever came back caught up
    assert all(row["bytes_payload"] > 0 and row["bytes_control"] > 0 for row in found)
    assert found[-1]["test_loss"] < found[1]["test_loss"]


def test_a_run_stops_at_its_target_or_when_it_no_longer_gains() -> None:
    reached = simulate(config(iterations=60, target_accuracy=0.3, test_every=1))
    assert reached["iterations_to_target"] < 60
    assert reached["bytes_to_target"] == reached["bytes_total"]
    assert "target" in reached["stopped_because"]
    bored = simulate(config(iterations=200, patience=2, test_every=1, **{"optimizer.learning_rate": 1e-6}))
    assert bored["iterations"] < 200


def test_a_run_that_reached_its_target_does_not_go_on_when_resumed(tmp_path: Path) -> None:
    given = config(iterations=60, target_accuracy=0.3, test_every=1)
    for resume in (False, True):
        run = RunDir.create(tmp_path / "run", given.as_dict(), resume=resume)
        simulation = Simulation(given, run, resume=resume)
        count = len(list(simulation.rows()))
        run.close()
        assert (count == 0) == resume
        assert "target" in simulation.summary()["stopped_because"]


def test_the_last_iteration_is_always_tested() -> None:
    assert rows(config(iterations=3, test_every=50))[-1]["test_accuracy"] is not None


def test_techniques_without_a_global_average_need_paper_semantics() -> None:
    with pytest.raises(InputError, match="has no exact average"):
        simulate(config(technique="gossip", technique_options={"fanout": 2}))


@pytest.mark.parametrize(
    ("technique", "options"), [("gossip", {"fanout": 2}), ("saps", {"compression": 4}), ("braintorrent", {})]
)
def test_techniques_without_a_global_average_keep_disagreeing(technique: str, options: dict[str, int]) -> None:
    found = rows(config(technique=technique, technique_options=options, semantics="paper", iterations=6))
    assert found[-1]["disagreement"] > 0
    assert all(row["bytes_payload"] >= 0 for row in found)
    assert sum(row["bytes_payload"] for row in found) > 0


def test_saps_prefers_fast_links_when_it_is_told_them() -> None:
    found = links("mixed", 32, 0)

    def mean_speed(profile: str | None) -> float:
        given = config(technique="saps", semantics="paper", peers=32, iterations=1, links=profile)
        simulation = Simulation(given)
        speeds: list[float] = []
        for iteration in range(1, 21):
            step = simulation.world.step(iteration, participation(simulation.churn, 32, iteration, 0))
            speeds += [
                found.speed(*ends) for phase in step.phases for ends in zip(phase.source, phase.dest, strict=True)
            ]
        return math.fsum(speeds) / len(speeds)

    assert mean_speed("mixed") > 1.3 * mean_speed(None)


def test_approximate_averaging_costs_a_third_less_and_nearly_agrees() -> None:
    given = {"semantics": "paper", "peers": 125, "iterations": 2}
    exact = rows(config(group_size=5, **given))[-1]
    near = rows(config(group_size=3, rounds=4, **given))[-1]
    assert near["bytes_payload"] / exact["bytes_payload"] == pytest.approx(7.94 / 12, abs=0.01)
    assert 0 < near["disagreement"] < 0.1
