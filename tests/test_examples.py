"""The examples do what their first lines say."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stages.news20 import make_encoder

EXAMPLES = Path(__file__).parents[1] / "examples"
ENOUGH = ("--iterations", "1000000")  # a peer goes on until it is told to end
TIMEOUT = 180
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT,
        check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    return finished.stdout


class Lines:
    """What a process prints, read as it comes: one that nobody listens to would stop when the pipe is full."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.heard: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard.append(line)
            self._lines.put(line)
        self._lines.put("")

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines.get, "")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self._reader.join()


@contextmanager
def begun(errors: Path, *arguments: str) -> Iterator[Lines]:
    """An example's process, ended with Ctrl-C when nobody needs it any more; what it complains of goes to a file."""
    command = [sys.executable, "-u", *arguments]
    with (
        errors.open("w") as complaints,
        subprocess.Popen(
            command, cwd=EXAMPLES, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=complaints, text=True
        ) as process,
    ):
        watchdog = threading.Timer(TIMEOUT, process.kill)
        watchdog.start()
        lines = Lines(process)
        try:
            yield lines
        finally:
            watchdog.cancel()
            lines.interrupt()


def line_with(lines: Lines, pattern: str) -> re.Match[str]:
    """The next line of a process's output that matches; a watchdog ends a process that prints none."""
    for line in lines:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"it ended without {pattern!r}: {lines.heard[-5:]}")


def test_a_task_of_ones_own_learns():
    accuracy = re.search(r"accuracy ([\d.]+)% after 150 iterations among 8 peers", run("my_task.py"))
    assert accuracy is not None
    assert float(accuracy[1]) > 80


def test_a_strategy_of_ones_own_learns():
    accuracy = re.search(r"accuracy ([\d.]+)% after 40 iterations among 8 peers", run("my_strategy.py"))
    assert accuracy is not None
    assert float(accuracy[1]) > 60


def test_plain_loops_average_and_a_ctrl_c_in_one_is_no_trouble_for_either(tmp_path):
    with begun(tmp_path / "first", "plain_loop.py", *ENOUGH) as first:
        address = line_with(first, r"/ip4/\S+")[0]
        with begun(tmp_path / "second", "plain_loop.py", address, *ENOUGH, "--seed", "1") as second:
            iteration, model = line_with(second, r"iteration (\d+): .*, 2 averaged, .* model (\w+),").groups()
            line_with(first, rf"iteration {iteration}: .*, 2 averaged, without nobody, .* model {model},")
            first.interrupt()
            left = time.monotonic()
            line_with(second, r" 1 averaged, without \{'\w+': '(said goodbye|did not answer)'\}")
            assert time.monotonic() - left < 30  # a silent peer is waited for twice as long
    for errors in (tmp_path / "first", tmp_path / "second"):
        lines = errors.read_text().splitlines()
        assert lines[-1] == "KeyboardInterrupt", errors.read_text()
        assert [line for line in lines if re.match("Task|Exception|RuntimeError", line)] == []


def test_hospitals_that_hide_every_patient_learn_and_say_what_they_gave_away(tmp_path):
    three = ("--hospitals", "3", "--iterations", "8")
    with begun(tmp_path / "first", "private_records.py", *three) as first:
        address = line_with(first, r"/ip4/\S+")[0]
        with begun(tmp_path / "second", "private_records.py", address, *three, "--seed", "1"):
            told = run("private_records.py", address, *three, "--seed", "2")
    last = re.findall(r"iteration \d+: committed, 3 averaged, accuracy ([\d.]+)%, .*insider_masked ([\d.]+)", told)[-1]
    assert 0 < float(last[1]) < 8


@pytest.mark.slow
def test_a_frozen_encoder_never_travels(tmp_path):
    folder = tmp_path / "tiny"
    make_encoder(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    with begun(tmp_path / "first", "hugging_face.py", str(folder), *ENOUGH) as first:
        joined = run("hugging_face.py", str(folder), line_with(first, r"/ip4/\S+")[0], "--iterations", "4")
    together = re.findall(r"iteration \d+: .*, 2 averaged, .* sent (\d+) bytes", joined)
    assert together, joined
    assert max(map(int, together)) < size / 4


@pytest.mark.slow
def test_an_encoder_that_is_kept_in_half_precision_is_trained_without_nan(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no encoder is trained")
    folder = tmp_path / "half"
    make_encoder(folder)
    transformers.AutoModel.from_pretrained(folder, local_files_only=True).half().save_pretrained(folder)
    said = run("hugging_face.py", str(folder), "--layers", "1", "--iterations", "3")
    assert len(re.findall(r"iteration \d: committed, 1 averaged, loss [\d.]+, sent \d+ bytes\n", said)) == 3, said


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--exact",)])
def test_adapters_of_three_peers_are_averaged_and_learn_from_the_text_of_all(tmp_path, more):
    for name in ("accelerate", "peft"):
        pytest.importorskip(name, reason=f"{name} is not installed: the example with LoRA is not tested")
    with begun(tmp_path / "first", "lora_text.py", *more) as first:
        travels, everything = line_with(first, r"([\d,]+) bytes travel of ([\d,]+)").groups()
        address = line_with(first, r"/ip4/\S+")[0]
        with begun(tmp_path / "second", "lora_text.py", address, "--shard", "1", *more) as second:
            last = run("lora_text.py", address, "--shard", "2", *more)
            second.communicate(timeout=60)
        first.communicate(timeout=60)
    sent = [int(each.replace(",", "")) for each in re.findall(r"3 of 3 known averaged, ([\d,]+) bytes sent", last)]
    assert len(sent) == 10, last
    assert int(travels.replace(",", "")) < min(sent) <= max(sent) < int(everything.replace(",", "")) / 4
    assert float(re.search(r"accuracy ([\d.]+)% on the text of all 3 peers", last)[1]) > 90
