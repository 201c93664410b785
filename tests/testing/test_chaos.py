"""The checks of `make chaos` can fail: forged logs that break each promise. And a short run of the real thing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from marfl.testing import chaos
from marfl.testing.chaos_checks import (
    DESCRIPTORS,
    GROWTH,
    MIB,
    Commit,
    Usage,
    bounded,
    nothing_left,
    one_commit,
    read_commits,
    said_nothing_wrong,
    settled,
)


def row(iteration: int, digest: str, status: str = "committed", lineage: str = "aa") -> str:
    return json.dumps({"iteration": iteration, "status": status, "model_hash": digest, "lineage": lineage})


def commits(peer: str, *digests: str, first: int = 1, lineage: str = "aa") -> list[Commit]:
    return [Commit(peer, lineage, first + place, digest) for place, digest in enumerate(digests)]


def test_two_models_of_one_iteration_in_one_lineage_are_a_double_commit() -> None:
    one = read_commits("daemon0", [row(1, "x"), row(2, "y")])
    other = read_commits("library1", [row(1, "x"), row(2, "z"), row(3, "w", status="stale"), '{"iteration": 4, "st'])
    assert one_commit([*one, *other]) == [
        "iteration 2 of lineage aa: committed as y by daemon0 and z by library1"
    ]
    assert one_commit([*one, *one]) == []


def test_two_lineages_may_differ_and_one_peer_must_not_change_its_mind() -> None:
    assert one_commit([*commits("a", "x"), *commits("b", "y", lineage="bb")]) == []
    assert len(one_commit([*commits("a", "x"), *commits("a", "y")])) == 1


def test_peers_that_hold_one_model_after_the_calm_are_together() -> None:
    assert settled({"a": commits("a", "x", "y", "z"), "b": commits("b", "x", "y", "z")}) == []
    # one has written a row more than the other when it is looked at
    assert settled({"a": commits("a", "x", "y", "z", "w"), "b": commits("b", "x", "y", "z")}) == []


def test_of_a_lineage_that_lost_only_the_model_that_replaced_it_counts() -> None:
    lost = [*commits("a", "p", "q", "r", lineage="bb"), *commits("a", "x", "y", "z")]
    assert settled({"a": lost, "b": commits("b", "x", "y", "z")}) == []
    assert settled({"a": lost[:3], "b": commits("b", "x", "y", "z")}) == [
        "live peers hold 2 models of iteration 3 after the calm: a at 3, b at 3"
    ]


@pytest.mark.parametrize("far", [(), ("x",), ("x", "y")])
def test_a_live_peer_that_does_not_go_on_is_stuck(far: tuple[str, ...]) -> None:
    (line,) = settled({"a": commits("a", *far), "b": commits("b", "x", "y", "z")})
    assert line.startswith("a: stuck")


def test_peers_that_went_on_apart_are_not_together() -> None:
    (line,) = settled({"a": commits("a", "x", "y", "z"), "b": commits("b", "p", "q", "r", first=10)})
    assert "no iteration in common" in line
    assert settled({}) == ["nobody lives"]


def test_a_process_that_grows_or_keeps_descriptors_is_named() -> None:
    well = Usage("daemon0, life 1", 300 * MIB, 300 * MIB + GROWTH, DESCRIPTORS)
    young = Usage("daemon0, life 2", 0, 5000 * MIB, 3)  # it was never at work: its start is no growth
    assert bounded([well, young]) == []
    fat = Usage("library1, life 3", 300 * MIB, 301 * MIB + GROWTH, 3)
    leaky = Usage("library1, life 3, p2pd", 70 * MIB, 70 * MIB, DESCRIPTORS + 1)
    assert [line.split(":")[0] for line in bounded([well, fat, leaky])] == [fat.process, leaky.process]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Traceback (most recent call last):\n  File x\n    do()\nValueError: no\n", "ValueError: no"),
        ("Task was destroyed but it is pending!\ntask: <Task pending name='Task-3'>\n", "task: <Task pending"),
        ("Future exception was never retrieved\nfuture: <Future finished>\n", "future: <Future"),
    ],
)
def test_what_a_peer_should_never_say_is_found(said: str, shown: str) -> None:
    (line,) = said_nothing_wrong({"a": "iteration 1: 5 of 5 averaged\n", "b": f"fine so far\n{said}and on it went\n"})
    assert line.startswith("b: wrote ")
    assert shown in line


def test_processes_and_files_that_are_left_are_named() -> None:
    assert nothing_left({}, []) == []
    assert len(nothing_left({7: "p2pd"}, ["/tmp/marfl-x"])) == 2


def test_a_process_of_the_run_is_found_by_its_environment_wherever_it_hides() -> None:
    setting = f"TMPDIR=/nowhere/{os.getpid()}"
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, "TMPDIR": setting.partition("=")[2]},
        start_new_session=True,
    )
    try:
        while not (found := list(chaos._with_environment(setting))):
            assert child.poll() is None
        assert found == [child.pid]
    finally:
        child.kill()
        child.wait()
    assert list(chaos._with_environment(setting)) == []


@pytest.mark.slow
def test_real_peers_bear_a_minute_of_chaos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = chaos.main(["--minutes", "0.5", "--seed", "5", "--no-namespaces", "--out", str(tmp_path)])
    assert code == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_ctrl_c_ends_all_that_was_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "marfl.testing.chaos", "--minutes", "5", "--no-namespaces", "--out", str(tmp_path)]
    with tempfile.TemporaryDirectory() as scratch:  # a short path: sockets are in it
        child = subprocess.Popen(command, env={**os.environ, "TMPDIR": scratch}, stdout=subprocess.DEVNULL)
        try:
            limit = time.monotonic() + 90
            while not (started := list(Path(scratch).glob("marfl-chaos-*/*"))) and time.monotonic() < limit:
                assert child.poll() is None
                time.sleep(0.2)
            assert started
            child.send_signal(signal.SIGINT)
            assert child.wait(90) != 0
        finally:
            child.kill()  # its peers die with it
            child.wait()
        assert os.listdir(scratch) == []
        assert [pid for place in started for pid in chaos._with_environment(f"TMPDIR={place.parent}")] == []
