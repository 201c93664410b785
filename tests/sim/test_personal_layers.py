"""Personal layers: they cost no bytes, stay at home in every engine, and are tested on the peer's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from marfl.config import Config, load
from marfl.errors import InputError
from marfl.learn.personal import apart
from marfl.runs import RunDir
from marfl.sim.engine import Simulation, simulate
from marfl.state import flatten, keep_at_home, layout_of, unflatten

SMALL = {"features": 12, "hidden": [6], "classes": 4, "samples": 900, "test_samples": 200}


def config(**overrides: Any) -> Config:
    base = {"task": "synthetic", "task_options": SMALL, "peers": 6, "group_size": 3, "iterations": 4, "batch": 8}
    return load(overrides=base | {"test_every": 2, "local_batches": 2, "local": ("2.*",)} | overrides)


def rows(given: Config) -> list[dict[str, Any]]:
    return list(Simulation(given).rows())


@pytest.mark.parametrize("more", [{}, {"strategy": "scaffold"}, {"wire": "int8"}, {"momentum": "send"}], ids=str)
def test_both_engines_end_on_one_model_and_every_peer_has_a_head_of_its_own(more: dict[str, Any]) -> None:
    given = {"churn.participation": 0.7, "churn.dropout": 0.2, **more}
    simulations = [Simulation(config(**given, engine=engine)) for engine in ("bitwise", "protocol")]
    one, other = ([dict(row) for row in simulation.rows()] for simulation in simulations)
    for field in ("model_hash", "bytes_payload", "test_accuracy", "test_loss"):
        assert [row[field] for row in one] == [row[field] for row in other], field
    homes = [simulation.world.local.homes for simulation in simulations]  # type: ignore[attr-defined]
    assert homes[0].keys() == homes[1].keys()
    assert all(torch.equal(homes[0][peer], homes[1][peer]) for peer in homes[0])
    heads = [home[: home.numel() // 2] for home in homes[0].values()]
    assert not any(torch.equal(heads[0], head) for head in heads[1:])
    assert heads[0].numel() == 6 * 4 + 4


def test_they_cost_no_bytes() -> None:
    whole, shared = simulate(config(local=())), simulate(config())
    assert shared["model_bytes"] == whole["model_bytes"] - 4 * (6 * 4 + 4)
    assert shared["bytes_total"] * whole["model_bytes"] == whole["bytes_total"] * shared["model_bytes"]


def test_what_is_tested_is_never_trained_on() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(23), torch.zeros(23))
    trained, tested = ({int(row[0]) for row in part} for part in apart(data, 0, 3))
    assert (len(trained), len(tested)) == (19, 4)
    assert not trained & tested
    with pytest.raises(InputError, match="local: peer 3 has 1 rows"):
        apart(torch.utils.data.TensorDataset(torch.zeros(1)), 0, 3)


@pytest.mark.parametrize("engine", ["bitwise", "protocol"])
def test_a_resumed_run_has_them(engine: str, tmp_path: Path) -> None:
    whole = rows(config(engine=engine))
    short = config(engine=engine, iterations=2)
    with RunDir.create(tmp_path / "run", short.as_dict()) as run:
        list(Simulation(short, run).rows())
    longer = config(engine=engine)
    with RunDir.create(tmp_path / "run", longer.as_dict(), resume=True) as run:
        rest = list(Simulation(longer, run, resume=True).rows())
    for field in ("model_hash", "test_accuracy"):
        assert [row[field] for row in rest] == [row[field] for row in whole[2:]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"local": ("head.*",)}, "local = 'head.*': matches no layer; there are 0.weight, 0.bias, 2.weight, 2.bias"),
        ({"local": ("*",)}, "local = *: matches everything that is trained: nothing would travel"),
        ({"semantics": "paper"}, "choose semantics = exact"),
        ({"distill.iterations": 2}, "leave distill.iterations out"),
    ],
)
def test_what_cannot_be_is_one_clear_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        simulate(config(**settings))
    assert says in str(caught.value)
    assert str(caught.value).startswith("local")


def test_a_flat_vector_leaves_them_out_and_a_peer_without_patterns_takes_all_again() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    whole = layout_of(model).length
    keep_at_home(model, ["1.*", "2.bias"])
    assert [slot.name for slot in layout_of(model).slots] == ["0.weight", "0.bias", "2.weight"]
    before = model[1].weight.detach().clone()
    unflatten(torch.zeros(len(flatten(model))), model)
    assert torch.equal(model[1].weight, before)
    assert not model[2].weight.any()
    keep_at_home(model, [])
    assert layout_of(model).length == whole
