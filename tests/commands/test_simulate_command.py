"""`marfl simulate` as a user meets it: wrong input is one line and nothing is written; Ctrl-C leaves a usable run."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from marfl.cli import main
from marfl.commands.simulate import summary_table
from marfl.config import load
from marfl.runs import RunDir, open_run
from marfl.sim.engine import Simulation

TINY = ["--task", "synthetic", "--option", "features=6", "--option", "hidden=[4]", "--option", "classes=3",
        "--option", "samples=200", "--option", "test_samples=50", "--peers", "6", "--group-size", "3",
        "--iterations", "4"]  # fmt: skip


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says when it refuses: one line on stderr, code 2, nothing on stdout."""
    capsys.readouterr()
    assert main(["simulate", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("marfl: ")
    return error


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--audit", "0.01"], "audit = 0.01: simulated peers do not lie; engine = protocol"),
        (["--audit", "2"], "audit"),
        (["--audit", "0.01", "--technique", "fedavg", "--engine", "protocol"], "audit = 0.01: only sums of technique"),
        (["--on-fraud", "forgive"], "'--on-fraud': must be one of go on, rollback, not 'forgive'"),
        (["--task", "digts"], "Did you mean digits?"),
        (["--task", "no_such_module:Task"], "cannot import no_such_module"),
        (["--technique", "fedvag"], "did you mean fedavg?"),
        (["--links", "wfi"], "did you mean wifi?"),
        (["--preset", "demmo"], "did you mean demo?"),
        (["--participation", "0"], "'--participation': must be a number, above 0, at most 1, not '0'"),
        (["--participation", "1.5"], "'--participation': must be a number, above 0, at most 1, not '1.5'"),
        (["--participation", "-1"], "'--participation': must be a number, above 0, at most 1, not '-1'"),
        (["--peers", "201"], "needs 201 samples, but the training set has 200"),
        (["--trace", "none.csv"], "none.csv: cannot be read"),
        (["--device", "gpu"], "device = 'gpu': must be auto, cpu, cuda, cuda:N or mps"),
        (["--technique", "gossip"], "has no exact average"),
        (["--option", "colour=3"], "unexpected keyword argument 'colour'"),
        (["--engine", "protocol", "--momentum", "local"], "momentum = local"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_wrong_settings_are_one_line_and_touch_no_run(
    arguments: list[str], said: str, overwrite: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    if overwrite:
        assert main(["simulate", *TINY, "--out", str(out)]) == 0
    before = files(tmp_path)
    more = ["--overwrite"] if overwrite else []
    assert said in refused([*TINY, *arguments, "--out", str(out), *more], capsys)
    assert files(tmp_path) == before
    assert out.exists() == overwrite


def test_missing_mnist_files_are_named_with_where_to_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARFL_DATA", str(tmp_path / "empty"))
    said = refused(["--task", "mnist", "--out", str(tmp_path / "run")], capsys)
    assert "train-images-idx3-ubyte" in said
    assert "download" in said
    monkeypatch.delenv("MARFL_DATA")
    assert "MARFL_DATA is not set" in refused(["--task", "mnist", "--out", str(tmp_path / "run")], capsys)
    assert not files(tmp_path)


def test_an_unknown_key_of_a_config_file_is_named_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("peeers = 3\n")
    said = refused(["--config", str(file), "--out", str(tmp_path / "run")], capsys)
    assert "peeers is not a setting; did you mean peers?" in said
    assert not (tmp_path / "run").exists()


def test_a_directory_that_holds_another_run_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main(["simulate", *TINY, *out]) == 0
    before = files(tmp_path)
    assert "holds a run already" in refused([*TINY, *out], capsys)
    assert "seed was 0, now 1" in refused([*TINY, *out, "--seed", "1", "--resume"], capsys)
    assert "choose one" in refused([*TINY, *out, "--resume", "--overwrite"], capsys)
    assert files(tmp_path) == before
    assert main(["simulate", *TINY, *out, "--seed", "1", "--overwrite"]) == 0


def test_a_comparison_is_refused_before_its_first_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "runs")]
    assert "did you mean fedavg?" in refused([*TINY, *out, "--compare", "mar,fedavgg"], capsys)
    assert not (tmp_path / "runs").exists()
    assert main(["simulate", *TINY, "--technique", "fedavg", "--out", str(tmp_path / "runs" / "fedavg")]) == 0
    assert "holds a run already" in refused([*TINY, *out, "--compare", "mar,fedavg"], capsys)
    assert not (tmp_path / "runs" / "mar").exists()


def test_a_damaged_checkpoint_is_refused_and_nothing_of_the_run_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run"), "--checkpoint-every", "1"]
    assert main(["simulate", *TINY, *out]) == 0
    checkpoint = tmp_path / "run" / "checkpoint.safetensors"
    content = bytearray(checkpoint.read_bytes())
    content[-1] ^= 1
    checkpoint.write_bytes(content)
    before = files(tmp_path)
    assert "the checkpoint is damaged" in refused([*TINY, *out, "--resume"], capsys)
    assert files(tmp_path) == before


def test_ctrl_c_leaves_a_run_directory_that_can_be_read_and_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "marfl", "simulate", *TINY, "--checkpoint-every", "1", "--out", str(out)]
    with subprocess.Popen([*command, "--iterations", "1000000"], stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait_for_rows(out / "metrics.jsonl", process)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert f"stopped by Ctrl-C; go on with marfl simulate --resume --out {out}" in said
    assert "Traceback" not in said
    run = open_run(out)
    assert run.summary is not None
    assert run.summary["stopped_because"] == "interrupted"
    assert run.summary["finished"] is False
    done = len(run.rows)
    assert [row["iteration"] for row in run.rows] == list(range(1, done + 1))
    config = load(path=out / "config.toml")
    with RunDir.create(out, config.as_dict(), resume=True) as directory:
        rows = Simulation(config, directory, resume=True).rows()
        assert next(rows)["iteration"] in (done, done + 1)  # the last row may be newer than the last checkpoint
        rows.close()


def test_a_run_is_resumed_by_its_directory_alone_and_a_finished_one_is_prolonged_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    churn = ["--participation", "0.5", "--seed", "3"]
    assert main(["simulate", *TINY, *churn, "--iterations", "7", "--out", str(whole)]) == 0
    assert main(["simulate", *TINY, *churn, "--iterations", "3", "--out", str(parts)]) == 0
    assert "the run has 3 already" in refused(["--resume", "--out", str(parts), "--iterations", "2"], capsys)
    assert main(["simulate", "--resume", "--out", str(parts), "--iterations", "5"]) == 0
    assert main(["simulate", "--resume", "--out", str(parts), "--iterations", "7"]) == 0
    runs = [open_run(path) for path in (whole, parts)]
    assert [row.model_hash for row in runs[0].rows] == [row.model_hash for row in runs[1].rows]
    assert [run.summary["bytes_total"] for run in runs] == [runs[0].summary["bytes_total"]] * 2
    before = files(parts)
    assert main(["simulate", "--resume", "--out", str(parts)]) == 0, "there is nothing left to do"
    assert files(parts)["metrics.jsonl"] == before["metrics.jsonl"]


def test_a_run_that_stopped_at_its_target_goes_on_with_another(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert main(["simulate", *TINY, *out, "--test-every", "1", "--target-accuracy", "0.01"]) == 0
    assert len(open_run(tmp_path / "run").rows) == 1
    assert main(["simulate", "--resume", *out, "--target-accuracy", "1.0"]) == 0
    assert len(open_run(tmp_path / "run").rows) == 4


def test_seeds_are_runs_of_their_own_and_those_not_begun_yet_take_the_settings_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert main(["simulate", *TINY, *out, "--compare", "mar,fedavg", "--seeds", "4-5"]) == 0
    said = capsys.readouterr().out
    assert "over 2 seeds, from" in said
    assert main(["simulate", *out, "--compare", "mar,fedavg", "--seeds", "4-6", "--resume"]) == 0
    runs = [open_run(tmp_path / technique / f"seed-{seed}") for technique in ("mar", "fedavg") for seed in (4, 5, 6)]
    assert [run.config["seed"] for run in runs] == [4, 5, 6] * 2
    assert {run.config["peers"] for run in runs} == {6}
    found = [run.summary["final_accuracy"] for run in runs]
    assert found[:3] == found[3:], "all techniques average exactly"
    assert len({run.summary["model_hash"] for run in runs}) == 6


@pytest.mark.parametrize("seeds", ["", "1-", "5-3", "x", "0-5000"])
def test_seeds_that_are_none_are_refused(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be seeds such as 0-4" in refused([*TINY, f"--seeds={seeds}", "--seeds", seeds], capsys)


def test_a_long_run_without_a_terminal_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("marfl.commands.simulate.LINES_EVERY", 0.0)
    assert main(["simulate", *TINY]) == 0
    assert "mar 2/4" in capsys.readouterr().err


def _wait_for_rows(path: Path, process: subprocess.Popen[str]) -> None:
    """Until the run has written a few rows; waiting for the process paces it without sleeping."""
    while not path.exists() or path.read_bytes().count(b"\n") < 3:
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail("the run ended by itself")


def test_the_fast_engine_says_which_way_it_takes_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["simulate", *TINY, "--engine", "fast", "--local-batches", "2", "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "engine fast: batched matmuls, not pooled because of local_batches = 2" in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["engine_reason"].startswith("batched matmuls")


def test_a_config_that_a_run_wrote_repeats_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["simulate", *TINY, "--participation", "0.5", "--out", str(first)]) == 0
    assert main(["simulate", "--config", str(first / "config.toml"), "--out", str(second)]) == 0
    hashes = [json.loads((path / "summary.json").read_text())["model_hash"] for path in (first, second)]
    assert hashes[0] == hashes[1]


def test_a_long_name_of_a_technique_hides_no_number() -> None:
    run = {
        "technique": "some_module:SomeTechnique", "exchange": None, "semantics": "paper", "virtual_seconds": None,
        "final_accuracy": 0.876, "peers": 16, "iterations": 200, "bytes_total": 11_600_000, "model_bytes": 4,
        "bytes_per_peer_iteration": 12, "model_hash": "6382ab01cd", "wall_seconds": 1234.5,
    }  # fmt: skip
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table([run]))
    shown = console.export_text()
    assert all(number in shown for number in ("87.6%", "11.6 MB", "3.000", "6382ab01", "1234.5"))
