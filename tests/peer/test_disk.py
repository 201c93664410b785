"""A peer whose disk is full or read-only says so in one line, and what it kept before is still there."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there, or this is skipped
from marfl.cli import main
from marfl.peer.logs import LogFile
from stages.disk import mounted
from stages.processes import SMALL, Process, Stage


def fill(file: Path, process: Process) -> None:
    """Take all room that there is, again and again until the process has ended: replacing a file frees some."""
    with file.open("ab", buffering=0) as filler:
        while process.popen.poll() is None:
            with contextlib.suppress(OSError):  # it is full
                filler.write(bytes(4096))


def test_a_full_disk_ends_a_peer_with_one_line_and_its_last_checkpoint_is_whole(disk: Path):
    stage = Stage(disk, peers=1, iterations=100_000)
    try:
        process = stage.start(0)
        process.until("iteration 2:")
        fill(disk / "filler", process)
        said = process.popen.stderr.read().splitlines()
        assert process.popen.returncode == 2
        assert said[-1].startswith(f"marfl: {disk / '0'}/")
        assert "No space left on device" in said[-1]
        assert said[-1].endswith("make room or choose another directory")
        assert not [line for line in said if "Traceback" in line or "Logging error" in line]
        rows = len(stage.rows(0))
        (disk / "filler").unlink()
        patient = ("--network", "minority_timeout=0.1")  # its vote may be cast
        again = stage.start(0, *patient).until(": 1 of 1 known averaged")
        assert int(again.split("iteration ")[1].split(":")[0]) in (rows, rows + 1)  # the last row may be ahead
    finally:
        for each in stage.processes:
            each.close()


def test_a_read_only_state_directory_is_one_line_and_stays_as_it_was(tmp_path: Path, disk: Path, capsys):
    (disk / "peer").mkdir()
    (disk / "peer" / "checkpoint.safetensors").write_text("old")
    mounted(disk, "remount", "ro")
    place = ["--state-dir", str(disk / "peer")]
    assert main(["peer", *SMALL, "--index", "0", "--of", "1", *place]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"marfl: state directory {disk / 'peer'}: ")
    assert "Read-only file system" in said[0]
    assert os.listdir(disk / "peer") == ["checkpoint.safetensors"]
    assert (disk / "peer" / "checkpoint.safetensors").read_text() == "old"


def test_a_line_that_the_log_has_no_room_for_is_no_traceback(capsys):
    log = logging.getLogger("marfl.test")
    file = LogFile("/dev/full")
    log.addHandler(file)
    try:
        log.error("a line")
    finally:
        log.removeHandler(file)
        with contextlib.suppress(OSError):
            file.close()
    assert capsys.readouterr().err == ""
