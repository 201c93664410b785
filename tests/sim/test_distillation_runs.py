"""Moshpit-KD in whole runs: one answer in every engine, its bytes under their own name, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from marfl.cli import app
from marfl.config import Config, load
from marfl.errors import InputError
from marfl.plan.grid import plan
from marfl.runs import RunDir
from marfl.sim.engine import Simulation, simulate

TINY: dict[str, Any] = {
    "task": "synthetic",
    "task_options": {"features": 6, "hidden": [5], "classes": 3, "samples": 900, "test_samples": 40, "dropout": 0.3},
    "group_size": 3,
    "iterations": 4,
    "batch": 8,
}
DISTILL = {"distill.iterations": 3, "distill.batches": 2, "distill.epochs": 2}


def config(**overrides: Any) -> Config:
    return load(overrides=TINY | overrides)


def run(**overrides: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    return simulate(config(**overrides), rows.append), rows


@pytest.mark.parametrize(
    "given",
    [
        DISTILL,
        DISTILL | {"distill.teacher": "previous"},
        DISTILL | {"distill.match_local_steps": True},
        DISTILL | {"churn.update_participation": 0.7, "churn.aggregate_participation": 0.8},
    ],
    ids=["group", "previous", "matched", "some do not update"],
)
@pytest.mark.parametrize("peers", [7, 9])
def test_the_engine_and_the_protocol_give_the_same_model_and_the_same_distill_bytes(peers, given):
    bitwise, rows = run(peers=peers, **given)
    protocol, same = run(peers=peers, engine="protocol", **given)
    assert protocol["model_hash"] == bitwise["model_hash"]
    for name in ("bytes_distill", "bytes_payload"):
        assert [row[name] for row in same] == [row[name] for row in rows]
    assert bitwise["model_hash"] != run(peers=peers, **dict.fromkeys(DISTILL))[0]["model_hash"]


@pytest.mark.parametrize("more", [{"distill.teacher": "previous"}, {"distill.match_local_steps": True}])
def test_private_peers_learn_from_the_previous_model_and_send_one_noised_vector(more):
    given = DISTILL | more | {"peers": 30, "privacy.noise_multiplier": 1.0, "iterations": 2}
    bitwise, rows = run(**given)
    assert run(engine="protocol", **given)[0]["model_hash"] == bitwise["model_hash"]
    assert [row["bytes_distill"] for row in rows] == [0, 0]
    assert config(**given).momentum == "derive"


@pytest.mark.parametrize("peers", [7, 9])
def test_in_every_round_each_member_shows_its_model_to_the_others_until_the_kth_iteration(peers):
    summary, rows = run(peers=peers, **DISTILL)
    shown = sum(len(g) * (len(g) - 1) for groups in plan(peers, 3).rounds for g in groups) * summary["model_bytes"]
    assert [row["bytes_distill"] for row in rows] == [shown, shown, shown, 0]


def test_the_paper_pays_three_models_where_it_paid_two():
    summary, rows = run(peers=9, semantics="paper", **DISTILL)
    each = 2 * (3 - 1) * summary["model_bytes"]  # G(M−1)S
    assert [row["bytes_distill"] for row in rows] == [9 * each] * 3 + [0]
    assert [row["bytes_payload"] for row in rows] == [9 * 2 * each] * 4


def test_the_previous_model_as_teacher_costs_no_bytes():
    plain, _ = run(peers=7)
    taught, same = run(peers=7, **DISTILL | {"distill.teacher": "previous"})
    assert taught["bytes_total"] == plain["bytes_total"]
    assert [row["bytes_distill"] for row in same] == [0] * 4
    assert taught["model_hash"] != plain["model_hash"]


def test_fast_says_that_it_distils_one_peer_at_a_time_and_ends_on_the_same_bits():
    fast, _ = run(peers=7, engine="fast", **DISTILL)
    assert "distillation" in fast["engine_reason"]
    assert fast["model_hash"] == run(peers=7, **DISTILL)[0]["model_hash"]


@pytest.mark.slow
@pytest.mark.parametrize("semantics", ["exact", "paper"])
def test_worker_processes_teach_to_the_same_bits(semantics):
    given = DISTILL | {"peers": 7, "semantics": semantics}
    assert run(workers=2, **given)[0]["model_hash"] == run(**given)[0]["model_hash"]


@pytest.mark.parametrize("more", [{"plan": "random", "rounds": 2}, {"plan": "keys"}, {"momentum": "local"}])
def test_paper_semantics_distils_over_its_own_groups(more):
    given = DISTILL | {"semantics": "paper", "peers": 7, "churn.participation": 0.8} | more
    taught, rows = run(**given)
    assert all(row["bytes_distill"] > 0 for row in rows[:3])
    assert taught["model_hash"] == run(**given)[0]["model_hash"]
    assert taught["model_hash"] != run(**given | {"distill.keep": 1.0})[0]["model_hash"]


@pytest.mark.parametrize("semantics", ["exact", "paper"])
def test_a_resumed_run_distils_on_the_same_batches(tmp_path: Path, semantics):
    given = config(peers=7, semantics=semantics, checkpoint_every=2, **DISTILL)
    whole = simulate(given)
    with RunDir.create(tmp_path / "run", given.as_dict()) as out:
        iterator = Simulation(given, out).rows()
        for _ in range(3):
            next(iterator)
        iterator.close()
    with RunDir.create(tmp_path / "run", given.as_dict(), resume=True) as out:
        resumed = Simulation(given, out, resume=True)
        assert [row["iteration"] for row in resumed.rows()] == [3, 4]
    assert resumed.summary()["model_hash"] == whole["model_hash"]
    assert resumed.summary()["bytes_total"] == whole["bytes_total"]


def test_deaths_show_models_in_vain_and_the_survivors_learn_from_each_other():
    given = DISTILL | {"peers": 9, "churn.death": 0.1}
    _, rows = run(**given)
    hurt = [row for row in rows[:3] if any("retry" in check for check in row["checks"])]
    assert hurt  # of this seed
    shown = 9 * 2 * 2 * 4 * 53  # of all nine, in the attempt that failed
    assert all(row["bytes_distill"] > shown for row in hurt)


@pytest.mark.parametrize("seed", [0, 2])  # of which nobody dies so late that the protocol still counts its update
def test_survivors_of_an_exchange_end_on_the_same_model_in_the_engine_and_in_the_protocol(seed):
    given = DISTILL | {"peers": 9, "churn.death": 0.1, "seed": seed}
    bitwise, rows = run(**given)
    protocol, same = run(engine="protocol", **given)
    assert [row["aggregators"] for row in same] == [row["aggregators"] for row in rows] != [9, 9, 9, 9]
    assert protocol["model_hash"] == bitwise["model_hash"]


def test_virtual_time_counts_the_models_shown_and_the_steps_made():
    plain, _ = run(peers=9, links="lan", momentum="send")
    taught, _ = run(peers=9, links="lan", **DISTILL)
    matched, _ = run(peers=9, links="lan", **DISTILL | {"distill.match_local_steps": True})
    assert plain["virtual_seconds"] < matched["virtual_seconds"] < taught["virtual_seconds"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"distill.match_local_steps": True}, "nothing to match; set distill.iterations"),
        ({"distill.iterations": 2, "technique": "fedavg"}, "technique fedavg has no groups; take mar"),
        ({"distill.iterations": 2, "momentum": "derive"}, "momentum = derive: .* choose send"),
        ({"distill.iterations": 2, "momentum": "local"}, "momentum = local: .* choose send"),
        (
            {"distill.iterations": 2, "privacy.noise_multiplier": 1.0},
            "distill.teacher = group with privacy: must be previous",
        ),
        ({"distill.iterations": 2, "privacy.masks": True}, r"privacy\.masks"),
        ({"distill.iterations": 2, "wire": "fixed"}, "wire = fixed: .* choose fp32, or teacher = previous"),
        ({"distill.keep": 0}, r"distill\.keep = 0:"),
        ({"distill.temperature": -1}, r"distill\.temperature = -1:"),
        ({"distill.teacher": "everybody"}, r"distill\.teacher = 'everybody':"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(given, said):
    with pytest.raises(InputError, match=said) as caught:
        config(**given)
    assert "\n" not in str(caught.value)


def test_a_rival_can_be_given_the_same_compute_or_the_previous_model():
    for more in ({"distill.match_local_steps": True}, {"distill.teacher": "previous"}):
        rival, _ = run(peers=7, technique="fedavg", **DISTILL | more)
        mar, _ = run(peers=7, **DISTILL | more)
        assert rival["final_accuracy"] == pytest.approx(mar["final_accuracy"], abs=0.03)


@pytest.mark.parametrize(("preset", "iterations"), [("paper-mnist-mkd8", 8), ("paper-mnist-mkd40", 40),
                                                    ("paper-20ng-mkd6", 6), ("paper-20ng-mkd30", 30)])  # fmt: skip
def test_presets_are_the_papers(preset, iterations):
    given = load(preset)
    assert given.semantics == "paper"
    assert (given.local_batches, given.distill.batches, given.distill.epochs) == (1, 8, 1)
    assert (given.distill.iterations, given.distill.temperature, given.distill.keep) == (iterations, 3.0, 0.4)


def test_flags_set_the_table_and_a_wrong_one_leaves_nothing_behind(tmp_path: Path):
    flags = ["simulate", "--task", "synthetic", "--peers", "4", "--iterations", "2", "--option", "samples=200"]
    more = ["--distill", "2", "--distill-keep", "0.5", "--distill-temperature", "2", "--distill-epochs", "2"]
    done = CliRunner().invoke(app, [*flags, *more, "--distill-batches", "2", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    table = (tmp_path / "run" / "config.toml").read_text()
    for line in ("iterations = 2", "keep = 0.5", "temperature = 2.0", "epochs = 2", "batches = 2"):
        assert line in table.split("[distill]")[1]
    wrong = CliRunner().invoke(app, [*flags, "--local-steps-match-distill", "--out", str(tmp_path / "wrong")])
    assert wrong.exit_code != 0
    assert not (tmp_path / "wrong").exists()
