"""Slow peers in the simulator: what they learned is in a later average, once, and every engine has the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marfl.config import Config, load
from marfl.errors import InputError
from marfl.peer.loop import read_parts
from marfl.runs import RunDir
from marfl.runs.files import write_json
from marfl.settings import Churn
from marfl.sim.churn import participation
from marfl.sim.engine import Simulation
from marfl.swarm.record import parts_of
from stages.swarms import TINY, simulated, swarm

SMALL = {"features": 6, "hidden": [4], "classes": 3, "samples": 200, "test_samples": 50}
SLOW = ("--slow", "0.4", "--slowness", "3", "--momentum", "send")


def config(**overrides: Any) -> Config:
    given = {"task": "synthetic", "task_options": SMALL, "peers": 6, "iterations": 7, "batch": 8, "momentum": "send"}
    return load(overrides=given | {"churn.slow": 0.4, "churn.slowness": 3} | overrides)


def rows(given: Config) -> list[dict[str, Any]]:
    return list(Simulation(given).rows())


def test_a_slow_peer_begins_an_update_and_brings_it_iterations_later() -> None:
    churn = Churn(slow=0.4, slowness=3)
    drawn = {t: participation(churn, 5, t, seed=1) for t in range(1, 8)}
    slow = drawn[3].ages.keys()
    assert len(slow) == 2
    assert {t: dict(who.ages) for t, who in drawn.items() if who.ages} == dict.fromkeys((3, 6), dict.fromkeys(slow, 2))
    assert [t for t, who in drawn.items() if slow <= who.updaters] == [1, 4, 7]
    assert [t for t, who in drawn.items() if slow <= who.aggregators] == [3, 6]
    assert all(who.updaters - slow == who.aggregators - slow == set(range(5)) - slow for who in drawn.values())


def test_somebody_is_always_quick() -> None:
    assert len(participation(Churn(slow=0.99, slowness=2), 3, 1, seed=0).aggregators) == 1


@pytest.mark.parametrize("wire", ["fp32", "fixed"])
def test_the_protocol_has_the_bits_of_the_default_engine_with_ages_too(wire: str) -> None:
    one, other = rows(config(wire=wire)), rows(config(wire=wire, engine="protocol"))
    assert [row["model_hash"] for row in one] == [row["model_hash"] for row in other]
    assert [row["train_loss"] for row in one] == [row["train_loss"] for row in other]
    assert [row["aggregators"] for row in one] == [4, 4, 6, 4, 4, 6, 4]
    assert sum("2 iterations late" in check for row in one for check in row["checks"]) == 4
    assert sum("2 iterations late" in check for row in other for check in row["checks"]) == 4


def test_what_slow_peers_learned_counts() -> None:
    quick_alone = rows(config(**{"churn.slow": 0.4, "churn.slowness": 100}))
    assert rows(config())[2]["model_hash"] != quick_alone[2]["model_hash"]
    assert rows(config())[1]["model_hash"] == quick_alone[1]["model_hash"]


@pytest.mark.parametrize("engine", ["bitwise", "protocol"])
def test_a_resumed_run_brings_what_slow_peers_had_learned_before(tmp_path: Path, engine: str) -> None:
    given = config(engine=engine, checkpoint_every=1)
    whole = rows(given)
    with RunDir.create(tmp_path / "run", given.as_dict()) as out:
        begun = iter(Simulation(given, out).rows())
        for _ in range(2):
            next(begun)
        begun.close()
    with RunDir.create(tmp_path / "run", given.as_dict(), resume=True) as out:
        resumed = list(Simulation(given, out, resume=True).rows())
    assert [row["model_hash"] for row in resumed] == [row["model_hash"] for row in whole[2:]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"momentum": "derive"}, "set momentum = send or local"),
        ({"churn.participation": 0.5}, "without other churn"),
        ({"churn.death": 0.1}, "without other churn"),
        ({"semantics": "paper"}, "late updates need exact semantics"),
        ({"wire": "int8"}, "wire = fp32 or fixed"),
        ({"privacy.noise_multiplier": 1.0}, "no privacy"),
        ({"churn.slow": 1.0}, "churn.slow"),
        ({"churn.slowness": 1}, "churn.slowness"),
    ],
)
def test_what_cannot_come_late_is_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        config(**settings)


def test_real_peers_are_told_who_is_slow(tmp_path: Path) -> None:
    given = config()
    write_json(tmp_path / "parts.json", parts_of(given))
    slow = min(participation(given.churn, 6, 3, given.seed).ages)
    parts = read_parts(tmp_path / "parts.json", slow)
    assert [tuple(parts.part(t)) for t in (1, 2, 3, 4)] == [
        (True, False, 0, True), (False, False, 0, False), (False, True, 2, False), (True, False, 0, True),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_real_swarm_with_slow_peers_ends_on_the_model_of_the_simulator(tmp_path: Path) -> None:
    flags = ("--peers", "5", "--iterations", "7", *SLOW, *TINY)
    result = swarm(tmp_path / "run", *flags)
    assert result.summary["model_hash"] == simulated(*flags)["model_hash"]
