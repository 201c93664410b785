"""`marfl sweep`: every combination once, finished runs reused, and one line for a file that cannot be."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from marfl.cli import main
from marfl.errors import InputError
from marfl.reproduce import run_grid as sweep
from marfl.reproduce.runner import Bundle, _sharing
from marfl.sim.engine import Simulation, simulate

SETTINGS = """
[settings]
task = "synthetic"
task_options = {samples = 200, test_samples = 40, features = 8, hidden = [4]}
peers = 4
iterations = 2
batch = 8
"""
GRID = """
[grid]
technique = ["mar", "fedavg"]
churn.participation = [1.0, 0.5]
seed = [0, 1]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SETTINGS + GRID)
    return path


def run(file: Path, *more: str) -> int:
    return main(["sweep", str(file), "--out", str(file.parent / "out"), "--workers", "1", *more])


def test_a_grid_is_every_combination_and_nothing_is_left_to_chance(file: Path) -> None:
    points = sweep.read_sweep(file)
    assert [point.name for point in points[:3]] == [
        "technique=mar churn.participation=1.0 seed=0",
        "technique=mar churn.participation=1.0 seed=1",
        "technique=mar churn.participation=0.5 seed=0",
    ]
    assert len(points) == 8
    last = points[-1].config
    assert (last.technique, last.churn.participation, last.seed, last.task_options["hidden"]) == ("fedavg", 0.5, 1, [4])


@pytest.mark.parametrize(("workers", "each"), [(2, 1), (8, 1), (32, 4)])
def test_runs_at_a_time_share_the_cores(file: Path, workers: int, each: int) -> None:
    todo = [Bundle(point.config) for point in sweep.read_sweep(file)]
    assert {bundle.first.workers for bundle in _sharing(todo, workers)} == {each}  # type: ignore[union-attr]


def test_a_sweep_ends_in_a_table_a_csv_and_a_report_and_a_second_call_computes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(file) == 0
    shown = capsys.readouterr().out
    assert [line.split()[:3] for line in shown.splitlines()[2:6]] == [
        ["mar", "1.0", "2"], ["mar", "0.5", "2"], ["fedavg", "1.0", "2"], ["fedavg", "0.5", "2"],
    ]  # fmt: skip
    out = file.parent / "out"
    assert (out / "index.html").is_file()
    with (out / "runs.csv").open() as table:
        rows = list(csv.DictReader(table))
    alone = {point.name: simulate(point.config)["model_hash"] for point in sweep.read_sweep(file)}
    assert sorted(row["model_hash"] for row in rows) == sorted(alone.values())

    monkeypatch.setattr(Simulation, "rows", lambda self: pytest.fail("a finished run is computed again"))
    assert run(file, "--json") == 0
    assert [row["model_hash"] for row in json.loads(capsys.readouterr().out)] == list(alone.values())


def test_a_stopped_sweep_goes_on(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    whole = Simulation.rows

    def stopped(self: Simulation) -> Any:
        made.append(self.config.seed)
        if len(made) == 4:
            raise KeyboardInterrupt
        yield from whole(self)

    monkeypatch.setattr(Simulation, "rows", stopped)
    assert run(file) == 130
    assert "stopped by Ctrl-C; 5 of 8 runs are left, and the same command goes on" in capsys.readouterr().err
    assert run(file, "--dry-run") == 0
    assert "8 runs, 3 of them finished" in capsys.readouterr().out
    assert run(file) == 0
    assert made == [0] * 5 + [1] * 4  # the first seed of all before the second of any


def test_a_dry_run_writes_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(file, "--dry-run") == 0
    assert capsys.readouterr().out.count("seed=") == 8
    assert not (file.parent / "out").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('grids = 1', "grids is no part of a sweep; did you mean grid?"),
        ("[grid]\nparticipation = [1.0]", "config: participation is not a setting"),
        ('[grid]\n"churn.participatoin" = [1.0]', "churn.participatoin is not a setting; did you mean participation?"),
        ("[grid]\nseed = 3", "grid.seed must be a list of values, not 3"),
        ("[grid]\nseed = []", "grid.seed must be a list of values"),
        ("[grid]\nseed = [1, 1]", "grid.seed names a value twice"),
        ("[grid]\nworkers = [1, 2]", "grid.workers: changes nothing"),
        ('[grid]\npeers = ["many"]', "peers = 'many': must be a whole number"),
        ('[grid]\ntechnique = ["gossip"]', "has no exact average"),
        ("preset = 1", "preset = 1: must be text"),
        ("settings = 1", r"\[settings\] must be a table"),
        ("[grid]\nseed = [0]\nwire = ['fp32']\nlinks = ['moon']", "moon"),
        ("[grid", "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as error:
        sweep.read_sweep(path)
    assert "\n" not in str(error.value)




def test_a_missing_file_is_one_line_without_a_flag_that_nobody_gave(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "nowhere.toml"]) == 2
    assert capsys.readouterr().err == "marfl: nowhere.toml: cannot be read (No such file or directory)\n"


def test_a_run_that_cannot_be_made_is_named_and_the_others_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.toml"
    path.write_text(SETTINGS.replace("peers = 4\n", "") + "[grid]\npeers = [4, 300]\n")
    assert run(path) == 2
    out, error = capsys.readouterr()
    assert error.splitlines()[-1].startswith("marfl: 1 of 2 runs could not be made, first: ")
    assert len(out.splitlines()) == 4
