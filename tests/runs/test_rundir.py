"""Run directories: nothing is lost by a kill, nothing is overwritten unasked, and nothing damaged is believed."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import InputError
from marfl.runs import NOT_DECISIVE, ROW_FIELDS, Run, RunDir, config_hash, find_runs, flattened, open_run
from marfl.runs.config_file import dumps
from stages.made_up_runs import config_of, make_run, one_line, python, row_of, rows_of, summary_of

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS)
VALUES = st.recursive(
    SCALARS | st.lists(SCALARS, max_size=3),
    lambda inner: st.dictionaries(TEXTS, inner | st.none(), max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)
CONFIGS = st.dictionaries(TEXTS, VALUES | st.none(), max_size=5)


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


# --- settings ---


@given(CONFIGS)
def test_a_config_reads_back_from_toml_as_it_was_but_for_what_is_not_set(config):
    assert tomllib.loads(dumps(config)) == without_none(config)


@given(CONFIGS)
def test_a_config_and_its_toml_have_the_same_hash(config):
    assert config_hash(tomllib.loads(dumps(config))) == config_hash(config)


def test_the_hash_ignores_order_and_what_does_not_decide_the_result():
    config = config_of()
    assert config_hash(dict(reversed(config.items()))) == config_hash(config)
    for name in NOT_DECISIVE:
        assert config_hash(config | {name: 77}) == config_hash(config)


@pytest.mark.parametrize("change", [{"seed": 1}, {"peers": 64}, {"churn": {"dropout": 0.5}}, {"task_options": {}}])
def test_the_hash_sees_whatever_decides_the_result(change):
    assert config_hash(config_of(**change)) != config_hash(config_of())


def test_a_setting_of_a_task_may_have_the_name_of_one_that_decides_nothing():
    assert config_hash({"task_options": {"workers": 1}}) != config_hash({"task_options": {"workers": 2}})


def test_a_value_that_toml_cannot_hold_is_refused_by_name():
    with pytest.raises(InputError, match=r"setting churn\.when: .* has no place in TOML"):
        dumps({"churn": {"when": object()}})


def test_flattened_settings_have_dotted_names():
    assert flattened({"links": {"profile": "wifi", "loss": None}, "out": "x"}) == {"links.profile": "wifi"}


# --- who may write where ---


def test_a_directory_that_holds_a_run_is_refused_with_both_ways_out(tmp_path):
    make_run(tmp_path / "run", until=3)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(InputError) as error:
        RunDir.create(tmp_path / "run", config_of())
    assert "--overwrite" in one_line(error)
    assert "--resume" in one_line(error)
    assert {path: path.read_bytes() for path in before} == before


def test_overwriting_removes_the_run_and_nothing_else(tmp_path):
    path = make_run(tmp_path / "run", split=True)
    with RunDir.create(path, config_of(), resume=True) as run:
        run.save_checkpoint({"model": torch.ones(2)}, {})
    for name in ("notes.txt", "events/mine.txt"):
        (path / name).write_text("keep me")
    with RunDir.create(path, config_of(seed=5), overwrite=True) as run:
        assert run.rows() == ()
        assert run.load_checkpoint() is None
    opened = open_run(path)
    assert (opened.rows, opened.summary, opened.split, opened.config["seed"]) == ((), None, None, 5)
    assert (path / "notes.txt").read_text() == (path / "events/mine.txt").read_text() == "keep me"
    assert [file.name for file in (path / "events").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json", "split.json"])
def test_files_of_the_same_name_that_are_not_ours_are_never_touched(tmp_path, name):
    (tmp_path / name).write_text("# mine\n")
    for flags in ({}, {"overwrite": True}):
        with pytest.raises(InputError, match=f"{name}.* choose another --out"):
            RunDir.create(tmp_path, config_of(), **flags)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "# mine\n"


def test_a_run_may_start_in_a_directory_of_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    with RunDir.create(tmp_path, config_of()):
        assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_resuming_needs_a_run(tmp_path):
    with pytest.raises(InputError, match="no run to resume; leave out --resume"):
        RunDir.create(tmp_path / "new", config_of(), resume=True)
    assert not (tmp_path / "new").exists()


def test_resuming_with_other_settings_names_them(tmp_path):
    make_run(tmp_path / "run", until=3)
    with pytest.raises(InputError) as error:
        RunDir.create(tmp_path / "run", config_of(seed=3, churn={"participation": 0.5}), resume=True)
    assert "churn.participation was 1.0, now 0.5" in one_line(error)
    assert "seed was 0, now 3" in one_line(error)


def test_resuming_may_change_what_does_not_decide_the_result(tmp_path):
    make_run(tmp_path / "run", until=3)
    with RunDir.create(tmp_path / "run", config_of(workers=9), resume=True) as run:
        assert len(run.rows()) == 3


def test_overwrite_and_resume_exclude_each_other(tmp_path):
    with pytest.raises(InputError, match="--overwrite and --resume: choose one"):
        RunDir.create(tmp_path, config_of(), overwrite=True, resume=True)


@pytest.mark.parametrize("flags", [{"resume": True}, {"overwrite": True}])
def test_two_processes_never_write_one_run(tmp_path, flags):
    script = f"""
from pathlib import Path
from stages.made_up_runs import config_of
from marfl.errors import InputError
from marfl.runs import RunDir
try:
    RunDir.create(Path(sys.argv[1]), config_of(), **{flags!r})
except InputError as error:
    print(error)
"""
    with RunDir.create(tmp_path / "run", config_of()) as run:
        run.append_row(row_of(1))
        said = python(script, str(tmp_path / "run")).stdout
        assert "another process (pid " in said
        assert len(run.rows()) == 1
    assert python(script, str(tmp_path / "run")).stdout == ""


def test_a_path_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run: cannot be written \(Not a directory\)"):
        RunDir.create(tmp_path / "file" / "run", config_of())


# --- rows ---


def test_rows_come_back_with_the_fields_in_order_and_extras_behind(tmp_path):
    with RunDir.create(tmp_path, config_of()) as run:
        run.append_row({"extra": [1], **dict(reversed(row_of(1, test_accuracy=0.5).items()))})
        assert list(run.rows()[0]) == [*ROW_FIELDS, "extra"]
        assert run.rows()[0]["test_accuracy"] == 0.5


def test_numbers_of_torch_and_numbers_that_are_not_finite_become_json(tmp_path):
    with RunDir.create(tmp_path, config_of()) as run:
        run.append_row(row_of(1, train_loss=float("nan"), test_loss=torch.tensor(0.25), clip=float("inf")))
        row = run.rows()[0]
    assert (row["train_loss"], row["test_loss"], row["clip"]) == (None, 0.25, None)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"iteration": 2}, "lacks participants, aggregators, train_loss and 21 more"),
        (row_of(2, bytes_total=1.5), "bytes_total is 1.5, not a whole number"),
        (row_of(2, test_accuracy="high"), "test_accuracy is 'high', not a number or null"),
        (row_of(1), "iteration 1 comes after iteration 1"),
    ],
)
def test_a_wrong_row_is_not_written(tmp_path, row, problem):
    with RunDir.create(tmp_path, config_of()) as run:
        run.append_row(row_of(1))
        with pytest.raises(ValueError, match=problem):
            run.append_row(row)
        assert len(run.rows()) == 1


def test_a_kill_loses_no_row_that_was_appended(tmp_path):
    script = """
import os, signal
from pathlib import Path
from stages.made_up_runs import config_of, row_of
from marfl.runs import RunDir
run = RunDir.create(Path(sys.argv[1]), config_of())
for iteration in range(1, 6):
    run.append_row(row_of(iteration))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert python(script, str(tmp_path / "run")).returncode == -9
    assert [row["iteration"] for row in open_run(tmp_path / "run").rows] == [1, 2, 3, 4, 5]
    with RunDir.create(tmp_path / "run", config_of(), resume=True) as run:  # the lock died with the process
        run.append_row(row_of(6))


@pytest.mark.parametrize("kept", range(1, 40, 6))
def test_a_torn_last_row_is_ignored_and_cut_off_when_resuming(tmp_path, kept):
    rows = make_run(tmp_path / "run", until=2) / "metrics.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(whole + whole.splitlines()[1][:kept])
    assert len(open_run(tmp_path / "run").rows) == 2
    with RunDir.create(tmp_path / "run", config_of(), resume=True) as run:
        run.append_row(row_of(3))
        assert [row["iteration"] for row in run.rows()] == [1, 2, 3]
    assert rows.read_bytes().startswith(whole)


def test_resuming_forgets_the_rows_after_the_checkpoint(tmp_path):
    make_run(tmp_path / "run", until=9)
    with RunDir.create(tmp_path / "run", config_of(), resume=True) as run:
        run.keep_rows(4)
        run.append_row(row_of(5, messages=77))
        assert [row["iteration"] for row in run.rows()] == [1, 2, 3, 4, 5]
        assert run.rows()[-1]["messages"] == 77
        run.keep_rows(0)
        run.append_row(row_of(1))
        assert len(run.rows()) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{broken", "is not valid JSON"),
        ("7", "is not an object"),
        ('{"iteration": NaN}', "is not valid JSON"),
        ('{"iteration": 2}', "lacks participants, aggregators"),
        (json.dumps(row_of(9)), "iteration 3 comes after iteration 9"),
        (json.dumps(row_of(2, virtual_seconds="long")), "virtual_seconds is 'long', not a number or null"),
    ],
)
def test_a_row_edited_by_hand_is_refused_with_file_and_line(tmp_path, line, problem):
    rows = make_run(tmp_path / "run", until=4) / "metrics.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
    with pytest.raises(InputError) as error:
        open_run(tmp_path / "run")
    number = 3 if "comes after" in problem else 2
    assert f"metrics.jsonl, line {number}: {problem}" in one_line(error)


# --- summaries and splits ---


def test_a_run_reads_back_whole(tmp_path):
    opened = open_run(make_run(tmp_path / "run", split=True))
    rows = rows_of(config_of())
    assert isinstance(opened, Run)
    assert opened.finished
    assert list(opened.rows) == rows
    assert opened.config == without_none(config_of())
    assert opened.summary == summary_of(config_of(), rows) | {"config_hash": config_hash(config_of())}
    assert opened.split.labels == tuple(map(str, range(10)))
    assert len(opened.split.counts) == 125


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bytes_total": 1}, "bytes_total is 1, but metrics.jsonl says"),
        ({"final_accuracy": 0.99}, "final_accuracy is 0.99, but"),
        ({"peers": "many"}, "peers is 'many', not a whole number"),
        ({"config_hash": "00"}, "is of other settings than config.toml has"),
    ],
)
def test_a_summary_that_contradicts_the_run_is_neither_written_nor_read(tmp_path, change, problem):
    path = make_run(tmp_path / "run")
    summary = json.loads((path / "summary.json").read_text())
    with RunDir.create(path, config_of(), resume=True) as run, pytest.raises(ValueError, match=problem):
        run.write_summary(summary | change)
    assert json.loads((path / "summary.json").read_text()) == summary
    (path / "summary.json").write_text(json.dumps(summary | change))
    with pytest.raises(InputError, match=problem):
        open_run(path)


def test_an_interrupted_run_may_have_counted_a_row_that_was_not_written(tmp_path):
    path = make_run(tmp_path / "run", until=7)
    rows = rows_of(config_of())[:8]
    with RunDir.create(path, config_of(), resume=True) as run:
        run.write_summary(summary_of(config_of(), rows, finished=False, stopped_because="interrupted"))
    assert not open_run(path).finished


def test_a_config_edited_after_the_run_is_noticed(tmp_path):
    config = make_run(tmp_path / "run") / "config.toml"
    config.write_text(config.read_text().replace("peers = 125", "peers = 64"))
    with pytest.raises(InputError, match=r"of other settings than config\.toml has; restore what was changed"):
        open_run(tmp_path / "run")


def test_a_summary_never_stays_when_rows_are_added(tmp_path):
    path = make_run(tmp_path / "run")
    with RunDir.create(path, config_of(), resume=True) as run:
        run.keep_rows(3)
        run.append_row(row_of(4))
    assert open_run(path).summary is None


@pytest.mark.parametrize("counts", [[], [[1, 2, 3]], [[1, 2], [3]]])
def test_a_split_needs_a_count_of_every_label_for_every_peer(tmp_path, counts):
    with RunDir.create(tmp_path, config_of()) as run, pytest.raises(ValueError, match="2 counts for each"):
        run.write_split(["a", "b"], counts)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("summary.json", "{", "is not valid JSON"),
        ("summary.json", "[]", "is not an object"),
        ("summary.json", "{}", "lacks technique"),
        ("split.json", '{"labels": ["a"], "counts": [[1, 2]]}', "must hold labels"),
        ("split.json", "[1]", "must hold labels"),
        ("config.toml", "peers = ", "is not valid TOML"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, text, problem):
    (make_run(tmp_path / "run") / name).write_text(text)
    with pytest.raises(InputError) as error:
        open_run(tmp_path / "run")
    assert f"{name}: {problem}" in one_line(error)


def test_runs_are_found_below_a_directory(tmp_path):
    for name in ("b", "a"):
        make_run(tmp_path / "all" / name, until=1)
    (tmp_path / "all" / "report").mkdir()
    assert find_runs(tmp_path / "all") == [tmp_path / "all" / "a", tmp_path / "all" / "b"]
    assert find_runs(tmp_path) == find_runs(tmp_path / "all"), "also where runs lie deeper"
    assert find_runs(tmp_path / "all" / "a") == [tmp_path / "all" / "a"]
    with pytest.raises(InputError, match="is not a run directory and has none below it"):
        find_runs(tmp_path / "all" / "report")
