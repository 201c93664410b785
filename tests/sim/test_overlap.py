"""Overlap: peers train on while their last updates are averaged; one model in every engine, also under churn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from marfl.config import Config, load
from marfl.errors import InputError
from marfl.learn.local_work import Start
from marfl.runs import RunDir
from marfl.sim.churn import Participation
from marfl.sim.engine import Simulation, simulate
from marfl.sim.iteration import IterationResult
from stages.rosters import models_of

SMALL = {"features": 12, "hidden": [6], "classes": 4, "samples": 900, "test_samples": 200}


def config(**overrides: Any) -> Config:
    base = {"task": "synthetic", "task_options": SMALL, "peers": 6, "group_size": 3, "iterations": 5, "batch": 8}
    return load(overrides=base | {"test_every": 5, "local_batches": 2, "overlap": True} | overrides)


def rows(given: Config) -> list[dict[str, Any]]:
    return list(Simulation(given).rows())


def hashes(given: Config) -> list[str]:
    return [row["model_hash"] for row in rows(given)]


def test_every_mean_is_of_work_that_began_one_state_before() -> None:
    """By hand: u1 and u2 begin from S0, u3 from S1, u4 from S2; S_t = S_{t-1} + mean(u_t)."""
    simulation = Simulation(config(iterations=4))
    world: Any = simulation.world
    states = [world.state]
    for _ in simulation.rows():
        states.append(world.state)
    local, work = world.local, world.local_work
    for iteration, start in ((1, 0), (2, 0), (3, 1), (4, 2)):
        began, total = states[start].vectors, torch.zeros(world.length)
        for peer in range(6):
            given = Start(began["theta"], began["momentum"])
            total += work.update(local.worker, local.loader(peer), given, iteration, 2 * (iteration - 1)).delta
        expected = states[iteration - 1].vectors["theta"] + total / 6
        torch.testing.assert_close(states[iteration].vectors["theta"], expected)
        # Δ = −η·B·m holds wherever an update began: the momentum that is derived is that of these very updates.
        torch.testing.assert_close(states[iteration].vectors["momentum"], total / 6 / -(0.1 * 2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"churn.participation": 0.7, "churn.dropout": 0.2, "iterations": 7},
        {"momentum": "send", "churn.participation": 0.8},
        {"strategy": "diloco", "wire": "int4", "churn.participation": 0.8},
        {"wire": "int4", "churn.participation": 0.7, "churn.dropout": 0.2, "iterations": 7},
        {"wire": "int8", "momentum": "send"},
        {"privacy.masks": True},
        {"churn.update_participation": 0.6, "churn.aggregate_participation": 0.8, "iterations": 7},
    ],
    ids=str,
)
def test_both_engines_end_on_one_model(more: dict[str, Any]) -> None:
    one, other = hashes(config(**more)), hashes(config(**more, engine="protocol"))
    assert one == other
    assert one != hashes(config(**more, overlap=False))


def test_peers_that_die_lose_what_is_under_way_and_the_rest_goes_on() -> None:
    """Deaths in the middle of exchanges on the virtual network: every mean is that of the survivors' delayed work."""
    given = {"iterations": 8, "peers": 9, "churn.death": 0.1}
    simulation = Simulation(config(**given, engine="protocol"))
    world: Any = simulation.world
    step, rosters = world.step, []

    def noting(iteration: int, who: Participation) -> IterationResult:
        result: IterationResult = step(iteration, who)
        rosters.append(result.members)
        return result

    world.step = noting
    found = [row["model_hash"] for row in simulation.rows()]
    assert min(map(len, rosters)) < 9  # somebody died
    assert any(set(later) - set(earlier) for earlier, later in pairwise(rosters))  # and came back, with nothing
    assert found == models_of(config(**given), rosters)
    assert found != models_of(config(**given, overlap=False), rosters)


@pytest.mark.parametrize("momentum", ["derive", "send"])
def test_four_bits_bear_it(momentum: str) -> None:
    """They lose no more of what is learned than without overlap: it is not drowned by momenta of two states."""

    def lost(*, overlap: bool) -> float:
        found = []
        for wire in ("fp32", "int4"):
            simulation = Simulation(config(wire=wire, overlap=overlap, momentum=momentum, iterations=40))
            world: Any = simulation.world
            begin = world.state.vectors["theta"]
            list(simulation.rows())
            found.append(world.state.vectors["theta"] - begin)
        return float((found[1] - found[0]).norm() / found[0].norm())

    assert lost(overlap=True) < 1.5 * lost(overlap=False)


@pytest.mark.parametrize("wire", ["fp32", "int4"])
@pytest.mark.parametrize("engine", ["bitwise", "protocol"])
def test_a_resumed_run_goes_on_with_what_was_under_way(engine: str, wire: str, tmp_path: Path) -> None:
    given = {"engine": engine, "churn.participation": 0.8, "checkpoint_every": 2, "links": "lte", "wire": wire}
    whole = rows(config(**given))
    short, longer = config(**given, iterations=3), config(**given)
    with RunDir.create(tmp_path / "run", short.as_dict()) as run:
        list(Simulation(short, run).rows())
    with RunDir.create(tmp_path / "run", longer.as_dict(), resume=True) as run:
        rest = list(Simulation(longer, run, resume=True).rows())
    for field in ("model_hash", "virtual_seconds")[: 1 + (engine == "bitwise")]:  # a new network has its own clock
        assert [row[field] for row in rest] == [row[field] for row in whole[3:]], field


def test_the_clock_runs_for_the_longer_of_training_and_averaging() -> None:
    """A slow computer hides the averaging, a slow link the training; the first iteration hides nothing."""
    for seconds, links in ((0.0, "lte"), (5.0, "lte")):
        given = {"links": links, "compute_seconds": seconds, "iterations": 6, "local_batches": 1}
        with_it, without = ([row["virtual_seconds"] for row in rows(config(**given, overlap=o))] for o in (True, False))
        assert with_it[0] == without[0]
        averaging = rows(config(**given | {"compute_seconds": 0.0}))[1]["virtual_seconds"]
        slowest = without[1] - averaging  # about: phases wait for whoever is late
        for taken in with_it[1:]:
            assert max(averaging, slowest) - 0.05 <= taken <= max(averaging, slowest) + 0.5 * averaging + 0.05
        assert sum(with_it) <= sum(without)


def test_the_fast_engine_follows_the_same_curve() -> None:
    models = []
    for engine in ("bitwise", "fast"):
        simulation = Simulation(config(engine=engine, **{"churn.participation": 0.8}))
        list(simulation.rows())
        world: Any = simulation.world
        models.append(world.state.vectors["theta"].double())
    assert "overlap" in world.reason
    assert float((models[0] - models[1]).norm() / models[0].norm()) < 1e-4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"semantics": "paper"}, "choose semantics = exact"),
        ({"privacy.noise_multiplier": 1.0}, "leave privacy out"),
        ({"distill.iterations": 2}, "leave distill.iterations out"),
        ({"momentum": "local"}, "choose momentum = derive or send"),
        ({"local": ("2.*",)}, "leave local out"),
        ({"strategy": "scaffold"}, "leave overlap out, or choose fedprox"),
    ],
)
def test_what_does_not_go_with_it_is_refused_with_what_to_choose(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        simulate(config(**settings))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
