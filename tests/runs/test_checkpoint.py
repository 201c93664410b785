"""Checkpoints that are whole or refused, a full disk, and the rows once more for TensorBoard."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from marfl.errors import InputError
from marfl.runs import RunDir
from marfl.runs import writer as writer_module
from stages.made_up_runs import config_of, one_line, python, row_of

TENSORS = {
    "model": torch.arange(12, dtype=torch.float32).reshape(3, 4).T,  # not contiguous
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "flag": torch.tensor(True),
    "nothing": torch.zeros(0, 5),
    "count": torch.tensor([2**40]),
}
META = {"iteration": 7, "loss": 0.1, "names": ["a", "ü"], "world": {"versions": [1, 2]}}


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path):
    shared = TENSORS | {"again": TENSORS["half"]}
    with RunDir.create(tmp_path, config_of()) as run:
        assert run.load_checkpoint() is None
        run.save_checkpoint({"old": torch.zeros(3)}, {})
        run.save_checkpoint(shared, META)
        tensors, meta = run.load_checkpoint()
    assert meta == META
    assert tensors.keys() == shared.keys()
    for name, tensor in shared.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert not list(tmp_path.glob("*.new"))


def checkpointed(path: Path) -> Path:
    with RunDir.create(path, config_of()) as run:
        run.save_checkpoint(TENSORS, META)
    return path / "checkpoint.safetensors"


def load(path: Path, **settings: Any) -> Any:
    with RunDir.create(path, config_of(**settings), resume=True) as run:
        return run.load_checkpoint()


def test_a_torn_checkpoint_is_refused_wherever_it_was_torn(tmp_path):
    file = checkpointed(tmp_path)
    whole = file.read_bytes()
    for length in range(0, len(whole), 13):
        file.write_bytes(whole[:length])
        with pytest.raises(InputError) as error:
            load(tmp_path)
        assert "checkpoint.safetensors: the checkpoint is damaged; restore a copy, or remove it" in one_line(error)


def test_a_flipped_bit_in_a_checkpoint_is_never_believed(tmp_path):
    file = checkpointed(tmp_path)
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(InputError, match="damaged"):
            load(tmp_path)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    theirs = checkpointed(tmp_path / "theirs").read_bytes()
    with RunDir.create(tmp_path / "mine", config_of(seed=1)):
        (tmp_path / "mine" / "checkpoint.safetensors").write_bytes(theirs)
    with pytest.raises(InputError, match="is of a run with other settings"):
        load(tmp_path / "mine", seed=1)


def test_a_full_disk_leaves_the_old_checkpoint_the_rows_and_one_clear_line(tmp_path):
    script = """
import resource
from pathlib import Path
import torch
from stages.made_up_runs import config_of, row_of
from marfl.errors import InputError
from marfl.runs import RunDir
run = RunDir.create(Path(sys.argv[1]), config_of())
run.append_row(row_of(1))
run.save_checkpoint({"model": torch.ones(3)}, {"iteration": 1})
size = (Path(sys.argv[1]) / "metrics.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))  # files end here: a row fits in part
for write in (
    lambda: run.append_row(row_of(2)),
    lambda: run.save_checkpoint({"model": torch.zeros(10_000)}, {"iteration": 2}),
    lambda: run.write_split(range(100), [range(100)]),
):
    try:
        write()
    except InputError as error:
        print(error)
"""
    said = python(script, str(tmp_path / "run"))
    assert said.stderr == ""
    assert [line.split(":")[0].rsplit("/")[-1] for line in said.stdout.splitlines()] == [
        "metrics.jsonl",
        "checkpoint.safetensors",
        "split.json",
    ]
    assert all("cannot be written" in line for line in said.stdout.splitlines())
    assert not list((tmp_path / "run").glob("*.new"))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes().endswith(b"}\n")  # the part of a row that fit is gone
    with RunDir.create(tmp_path / "run", config_of(), resume=True) as run:
        tensors, meta = run.load_checkpoint()
        assert (tensors["model"].tolist(), meta) == ([1.0, 1.0, 1.0], {"iteration": 1})
        assert [row["iteration"] for row in run.rows()] == [1]


# --- TensorBoard ---


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's reader, not our writer
def test_tensorboard_reads_the_rows_and_forgets_those_that_were_computed_again(tmp_path):
    with RunDir.create(tmp_path, config_of()) as run:
        for iteration in range(1, 5):
            tested = iteration / 8 if iteration % 2 else None
            run.append_row(row_of(iteration, test_accuracy=tested, messages=iteration))
    assert scalars(tmp_path / "events", "test/accuracy") == [(1, 0.125), (3, 0.375)]
    with RunDir.create(tmp_path, config_of(), resume=True) as run:
        run.keep_rows(2)
        run.append_row(row_of(3, messages=30))
    assert scalars(tmp_path / "events", "messages") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_without_tensorboard_rows_are_written_and_one_notice_is_given(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    monkeypatch.setattr(writer_module, "_installed", functools.cache(writer_module._installed.__wrapped__))
    with caplog.at_level(logging.WARNING), RunDir.create(tmp_path, config_of()) as run:
        run.append_row(row_of(1))
        run.append_row(row_of(2))
        assert len(run.rows()) == 2
    assert [record.message for record in caplog.records] == [
        "no TensorBoard events are written: tensorboard is not installed (pip install 'marfl[plots]')"
    ]
    assert not (tmp_path / "events").exists()


def test_reading_and_writing_rows_does_not_wait_for_torch(tmp_path):
    script = """
from pathlib import Path
from stages.made_up_runs import make_run
from marfl.runs import open_run
assert open_run(make_run(Path(sys.argv[1]))).finished
print("torch" in sys.modules)
"""
    assert python(script, str(tmp_path / "run")).stdout == "False\n"
