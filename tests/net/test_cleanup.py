"""What killed peers leave on disk goes when the next one starts; what live ones use stays."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
from marfl.net.libp2p.cleanup import BIRTH, LOCK, PREFIX, Scratch, sweep
from stages.library import LibraryProcess
from stages.processes import Stage, new_stage

stage = new_stage
QUICK: dict[str, Any] = {"run": "test", "expected": 1}
NOISE = ("Task was destroyed", "Traceback", "never retrieved", "Exception ignored", "Event loop is closed")
HOLDER = """
from marfl.net.libp2p.cleanup import Scratch
print(Scratch().path, flush=True)
input()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files that nobody else uses, with a short name: sockets are made there."""
    path = Path(f"/tmp/swept-{os.getpid()}-{time.monotonic_ns() % 10**6}")
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield path
    for scratch in path.iterdir():
        for file in scratch.iterdir():
            file.unlink()
        scratch.rmdir()
    path.rmdir()


def hold() -> tuple[subprocess.Popen[str], Path]:
    """Another process that has a directory."""
    command = [sys.executable, "-c", HOLDER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_directory_is_private_and_gone_when_it_is_removed(place: Path):
    scratch = Scratch()
    assert stat.S_IMODE(scratch.path.stat().st_mode) == 0o700
    assert scratch.path.parent == place
    scratch.remove()
    scratch.remove()
    assert list(place.iterdir()) == []


def test_the_dead_are_swept_away_and_the_living_are_not(place: Path):
    (dead, left), (live, used) = hold(), hold()
    try:
        (left / "streams").write_bytes(b"")
        sweep(place)
        assert left.exists(), "it lives"
        end(dead)
        mine = Scratch()
        assert sorted(place.iterdir()) == sorted([used, mine.path])
        sweep(place)
        assert mine.path.exists(), "this process's own"
        mine.remove()
    finally:
        end(live)
        end(dead)


def test_what_is_not_a_dead_peers_directory_is_left_alone(place: Path, tmp_path: Path):
    newborn, old, foreign = (place / name for name in (f"{PREFIX}newborn", f"{PREFIX}old", "marfl-swarm-mine"))
    for path in (newborn, old, foreign):
        path.mkdir()
    os.utime(old, (time.time() - 2 * BIRTH,) * 2)
    (tmp_path / "file").write_text("kept")
    (place / f"{PREFIX}link").symlink_to(tmp_path, target_is_directory=True)
    (foreign / LOCK).write_bytes(b"")
    sweep(place)
    assert sorted(place.iterdir()) == sorted([newborn, foreign, place / f"{PREFIX}link"])
    assert (tmp_path / "file").exists()
    (place / f"{PREFIX}link").unlink()


def noise(said: str) -> list[str]:
    """The lines that no peer should say at its end."""
    return [line for line in said.splitlines() if any(word in line for word in NOISE)]


def test_nothing_is_left_of_peers_that_were_killed_once_another_starts(place: Path):
    with LibraryProcess(**QUICK) as live:
        used = Path(live.hear()["scratch"])
        for _ in range(2):
            with LibraryProcess(**QUICK) as doomed:
                left = Path(doomed.hear()["scratch"])
            assert left.exists(), "it was killed"
        sockets = sorted(used.iterdir())
        with LibraryProcess(**QUICK) as last:
            mine = Path(last.hear()["scratch"])
            assert sorted(place.iterdir()) == sorted([used, mine])
            assert sorted(used.iterdir()) == sockets
            assert last.ask("aggregate")["status"] == "committed"
            assert last.quit() == 0
            assert noise(last.said) == [], last.said
        assert live.ask("aggregate")["status"] == "committed"
        assert live.quit() == 0
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "how", ["without its daemon", "interrupted while it averages", pytest.param("interrupted", marks=pytest.mark.slow)]
)
def test_a_library_peer_ends_without_noise_and_leaves_nothing(how: str, place: Path):
    averages = "averages" in how
    with LibraryProcess(**QUICK | {"expected": 2 if averages else 1}) as peer:
        me = peer.hear()
        assert averages or peer.ask("aggregate")["status"] == "committed"
        if how == "without its daemon":
            os.kill(me["daemon"], signal.SIGKILL)
        if averages:
            peer.tell("aggregate")
            while "waiting for 2 peers" not in peer.said:
                time.sleep(0.05)
        if "interrupted" in how:
            os.kill(me["pid"], signal.SIGINT)
            assert peer.popen.wait() == 130
        else:
            assert peer.quit() == 0
        assert noise(peer.said) == [], peer.said
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("stage", [(1, 500)], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_daemon_ends_without_noise_also_without_p2pd(stage: Stage, place: Path, number: signal.Signals):
    process = stage.start(0)
    process.until("iteration 2:")
    pid = stage.status(0)["pid"]
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        os.kill(int(file.read().split()[0]), signal.SIGKILL)
    code, said = process.signal(number), process.popen.stderr.read()
    assert code == 0, said
    assert "left: told to leave" in said
    assert noise(said) == [], said
    assert list(place.iterdir()) == []
