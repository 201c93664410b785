"""Strategies in whole runs: one model in every engine, also when peers come and go, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import marfl
from marfl.commands.flags import parse_pair
from marfl.config import Config, load
from marfl.errors import InputError
from marfl.runs import RunDir, config_hash
from marfl.sim.engine import Simulation, simulate

SMALL = {"features": 12, "hidden": [6], "classes": 4, "samples": 900, "test_samples": 200}
ALL = ("diloco", "fedadam", "fedyogi", "fedprox", "scaffold")


@dataclass(frozen=True)
class Twice(marfl.Strategy):
    """Goes twice as far, and keeps a count."""

    def init(self, theta: Tensor) -> Mapping[str, Tensor]:
        return {"count": torch.zeros(1)}

    def apply(self, step: marfl.StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta + 2 * step.delta, {"count": step.state["count"] + 1}


@dataclass(frozen=True)
class Breaks(marfl.Strategy):
    """Is not finite from an iteration on."""

    at: int = 2

    def apply(self, step: marfl.StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        return step.theta + (step.delta if step.iteration < self.at else torch.inf), {}


def config(**overrides: Any) -> Config:
    base = {"task": "synthetic", "task_options": SMALL, "peers": 7, "group_size": 3, "iterations": 4, "batch": 8}
    return load(overrides=base | {"test_every": 4, "local_batches": 3} | overrides)


def rows(given: Config) -> list[dict[str, Any]]:
    return list(Simulation(given).rows())


def column(given: Config, name: str = "model_hash") -> list[Any]:
    return [row[name] for row in rows(given)]


@pytest.mark.parametrize("strategy", [*ALL, "test_strategy_runs:Twice"])
def test_every_strategy_ends_on_one_model_in_every_engine_while_peers_come_and_go(strategy: str) -> None:
    given = {"strategy": strategy, "churn.participation": 0.7, "churn.dropout": 0.2, "iterations": 6}
    one, other = rows(config(**given)), rows(config(**given, engine="protocol"))
    for field in ("model_hash", "bytes_payload", "bytes_sync", "aggregators"):
        assert [row[field] for row in one] == [row[field] for row in other], field
    assert sum(row["bytes_sync"] for row in one) > 0
    assert column(config(**given | {"strategy": "plain"}))[-1] != one[-1]["model_hash"]


@pytest.mark.parametrize("strategy", ["diloco", "fedadam"])
def test_the_fast_engine_follows_the_same_curve(strategy: str) -> None:
    for batches in (1, 3):  # pooled, and batched
        given = {"strategy": strategy, "local_batches": batches}
        one, fast = (Simulation(config(**given, engine=engine)) for engine in ("bitwise", "fast"))
        models = []
        for simulation in (one, fast):
            list(simulation.rows())
            world: Any = simulation.world
            models.append(world.state.vectors["theta"].double())
        assert float((models[0] - models[1]).norm() / models[0].norm()) < 1e-4


def test_control_variates_travel_and_are_counted() -> None:
    plain, scaffold = (sum(column(config(strategy=name), "bytes_payload")) for name in ("plain", "scaffold"))
    assert scaffold == 2 * plain


@pytest.mark.parametrize("engine", ["bitwise", "protocol"])
@pytest.mark.parametrize("strategy", ["diloco", "scaffold"])
def test_a_resumed_run_has_the_strategys_state(strategy: str, engine: str, tmp_path: Path) -> None:
    given = {"strategy": strategy, "engine": engine, "churn.participation": 0.8, "checkpoint_every": 2}
    whole = column(config(**given))
    short = config(**given, iterations=2)
    with RunDir.create(tmp_path / "run", short.as_dict()) as run:
        list(Simulation(short, run).rows())
    longer = config(**given)
    with RunDir.create(tmp_path / "run", longer.as_dict(), resume=True) as run:
        rest = [row["model_hash"] for row in Simulation(longer, run, resume=True).rows()]
    assert rest == whole[2:]
    other = config(**given | {"strategy": "plain"})
    with pytest.raises(InputError, match=f"strategy was '{strategy}', now None"):
        RunDir.create(tmp_path / "run", other.as_dict(), resume=True)


def test_runs_of_versions_without_strategies_can_be_resumed() -> None:
    tree = config().as_dict()
    assert not {"strategy", "strategy_options"} & tree.keys(), "so an old run's settings have the hash that they had"
    assert config_hash(tree) != config_hash(config(strategy="diloco").as_dict())
    assert load(overrides=tree) == config()


@pytest.mark.parametrize("engine", ["bitwise", "protocol"])
def test_a_strategy_that_breaks_on_the_way_ends_the_run_with_one_line(engine: str) -> None:
    with pytest.raises(InputError, match="strategy test_strategy_runs:Breaks: θ is not finite after iteration 2"):
        rows(config(strategy="test_strategy_runs:Breaks", engine=engine, peers=3))


PRIVATE = {"privacy.noise_multiplier": 0.5}


@pytest.mark.parametrize(
    "settings",
    [
        {"wire": "int4"},
        {"wire": "fixed"},
        {"privacy.masks": True},
        {"momentum": "send"},
        {"distill.iterations": 1, "distill.teacher": "previous"},
        PRIVATE,
        {"audit": 0.5, "engine": "protocol"},
        {"technique": "fedavg"},
    ],
    ids=str,
)
def test_what_a_strategy_goes_with(settings: dict[str, Any]) -> None:
    found = column(config(strategy="diloco", iterations=2, **settings))
    if "engine" not in settings:
        assert found == column(config(strategy="diloco", iterations=2, engine="protocol", **settings))
    assert found != column(config(iterations=2, **settings))


@pytest.mark.parametrize("settings", [{"wire": "fixed"}, {"privacy.masks": True}, {"momentum": "send"}], ids=str)
def test_what_control_variates_go_with(settings: dict[str, Any]) -> None:
    one, other = (column(config(strategy="scaffold", engine=engine, **settings)) for engine in ("bitwise", "protocol"))
    assert one == other


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"strategy": "diloco", "semantics": "paper"}, "choose semantics = exact"),
        ({"strategy": "fedprox", "distill.iterations": 2}, "choose one, or diloco, fedadam or fedyogi"),
        ({"strategy": "scaffold", **PRIVATE}, "sends a second vector, which is not noised; choose fedprox"),
        ({"strategy": "scaffold", "wire": "int8"}, "choose wire = fp32 or fixed, not int8"),
        ({"strategy": "scaffold", "on_fraud": "rollback"}, "choose on_fraud = go on"),
        (
            {"strategy": "fedprox", "privacy.unit": "record", "privacy.records": 400, "local_batches": 1, **PRIVATE},
            "choose diloco, fedadam or fedyogi",
        ),
    ],
)
def test_what_cannot_hold_is_refused_with_what_to_choose(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        simulate(config(**settings))
    assert str(caught.value).startswith(f"strategy = {settings['strategy']}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_option_is_set_by_the_strategys_name() -> None:
    assert parse_pair("strategy.mu=0.5") == ("strategy_options.mu", 0.5)
    assert parse_pair("technique.fanout=2") == ("technique_options.fanout", 2)
    with pytest.raises(InputError, match=r"strategie\.mu is not a setting"):
        parse_pair("strategie.mu=1")
