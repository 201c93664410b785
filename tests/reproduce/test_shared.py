"""Runs that share a training: their ledgers are those of the technique itself, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marfl.config import Config, load
from marfl.reproduce.archive import SEAL, Archive
from marfl.reproduce.cases import key_of
from marfl.reproduce.runner import bundles, compute
from marfl.reproduce.shared import Replayed, training_of
from marfl.runs import Run, RunDir, open_run
from marfl.runs.writer import CHECKPOINT
from marfl.sim.engine import Simulation

BASE = {"peers": 9, "group_size": 3, "iterations": 6, "test_every": 2, "engine": "fast", "batch": 8, "workers": 1}
CHURN = {"churn.participation": 0.6, "churn.dropout": 0.3}
ALIKE = (
    "iteration", "participants", "aggregators", "messages", "bytes_payload", "bytes_control", "bytes_repair",
    "bytes_sync", "bytes_distill", "bytes_total", "virtual_seconds", "disagreement",
)  # fmt: skip


def ran(config: Config, path: Path, source: Run | None = None) -> Run:
    with RunDir.create(path, config.as_dict()) as run:
        world = None if source is None else Replayed(config, source)
        assert list(Simulation(config, run, world=world).rows())
    return open_run(path)


WORLDS = [
    (semantics, technique, churn)
    for semantics in ("exact", "paper")
    for technique in ("mar", "fedavg", "rdfl", "arfl", "ring")
    for churn in ({}, CHURN)
    if (semantics, technique, churn) != ("paper", "mar", CHURN)  # the paper's keys average nearly: nobody shares these
]


@pytest.mark.parametrize(("semantics", "technique", "churn"), WORLDS)
def test_a_replayed_run_has_the_rows_of_a_real_one(
    tmp_path: Path, semantics: str, technique: str, churn: dict[str, Any]
) -> None:
    config = load(overrides=BASE | churn | {"technique": technique, "semantics": semantics, "links": "lte"})
    training = training_of(config)
    assert key_of(training) != key_of(config)
    replayed = ran(config, tmp_path / "replayed", ran(training, tmp_path / "training"))
    real = ran(config, tmp_path / "real")
    for there, here in zip(replayed.rows, real.rows, strict=True):
        assert {name: there[name] for name in ALIKE} == {name: here[name] for name in ALIKE}
        assert (there["test_accuracy"] is None) == (here["test_accuracy"] is None)
        if here["test_accuracy"] is not None:
            assert there["test_accuracy"] == pytest.approx(here["test_accuracy"], abs=0.01)
            assert there["test_loss"] == pytest.approx(here["test_loss"], rel=1e-3)
    assert replayed.summary is not None
    assert "the models of run training" in replayed.summary["engine_reason"]


@pytest.mark.parametrize("churn", [{}, CHURN], ids=["all", "churn"])
@pytest.mark.parametrize("technique", ["mar", "fedavg"])
def test_integers_of_a_few_bits_are_trained_once_for_all_links(
    tmp_path: Path, technique: str, churn: dict[str, Any]
) -> None:
    more = {"technique": technique, "wire": "int4", "wire_down": 8, "links": "lte"}
    config = load(overrides=BASE | churn | more)
    training = training_of(config)
    assert training.wire == "int4"
    assert training.wire_down == 8
    assert key_of(training) != key_of(config)
    replayed = ran(config, tmp_path / "replayed", ran(training, tmp_path / "training"))
    real = ran(config, tmp_path / "real")
    for there, here in zip(replayed.rows, real.rows, strict=True):
        names = (*ALIKE, "payload_down", "model_hash", "test_accuracy")
        assert {name: there.get(name) for name in names} == {name: here.get(name) for name in names}


def test_a_target_ends_a_replay_and_not_its_training(tmp_path: Path) -> None:
    config = load(overrides=BASE | {"target_accuracy": 0.01, "links": "wifi"})
    replayed = ran(config, tmp_path / "replayed", ran(training_of(config), tmp_path / "training"))
    assert len(replayed.rows) == BASE["test_every"]
    assert len(open_run(tmp_path / "training").rows) == BASE["iterations"]
    assert replayed.summary is not None
    assert replayed.summary["bytes_to_target"] == replayed.rows[-1]["bytes_total"]


def test_a_replay_that_was_interrupted_starts_anew(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    config = load(overrides=BASE | {"technique": "arfl"})
    (bundle,) = bundles(archive, [config])
    compute(archive, bundle, lambda seconds: None)
    whole = archive.summary(config)
    path = archive.path(config)
    (path / SEAL).unlink()  # as a kill leaves it: rows, and perhaps a checkpoint of an earlier version
    (path / CHECKPOINT).write_bytes(b"")
    (again,) = bundles(archive, [config])
    compute(archive, again, lambda seconds: None)
    found = archive.summary(config)
    assert whole is not None
    assert found is not None
    assert found == {**whole, "wall_seconds": found["wall_seconds"]}
    assert len(archive.run(config).rows) == BASE["iterations"]


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "bitwise"},
        {"churn.death": 0.1},
        {"distill.iterations": 2, "semantics": "paper"},
        {"semantics": "paper", "peers": 10},  # no perfect grid: the keys average nearly
        {"semantics": "paper", **CHURN},
        {"momentum": "local"},
        {"privacy.noise_multiplier": 0.5},
        {"wire": "fixed"},
        {"strategy": "diloco"},
        {"overlap": True},
        {"local": ["0.*"], "momentum": "local"},
    ],
)
def test_models_that_are_not_the_same_by_construction_are_not_shared(settings: dict[str, Any]) -> None:
    config = load(overrides=BASE | settings)
    assert training_of(config) is config


def test_the_techniques_of_the_paper_share_one_training() -> None:
    configs = [
        load(overrides=BASE | {"technique": name, "semantics": semantics, "links": links})
        for name in ("mar", "fedavg", "rdfl", "arfl")
        for semantics in ("exact", "paper")
        for links in (None, "wifi")
    ]
    assert len({key_of(training_of(config)) for config in configs}) == 1
