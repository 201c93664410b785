"""Real swarms on loopback: the same bits as the simulator, nobody lost without a word, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from marfl.cli import main
from marfl.errors import NetError
from marfl.runs import open_run
from marfl.swarm import Orders, Swarm
from stages.swarms import BULKY, QUICK, TINY, begin, nothing_left, simulated, swarm, until_it_has_rows


@pytest.mark.parametrize("peers", [3, pytest.param(5, marks=pytest.mark.slow)])  # a pair, or a square, and a spare
def test_real_peers_end_on_the_model_and_the_bytes_of_the_simulator(tmp_path, peers):
    flags = ("--peers", str(peers), "--group-size", "2", "--iterations", "4", "--seed", "7", *TINY)
    expected = simulated(*flags)
    result = swarm(tmp_path / "run", *flags)
    assert result.summary["model_hash"] == expected["model_hash"]
    assert sum(row["bytes_payload"] for row in result.rows()) == expected["bytes_total"]
    assert result.summary["final_accuracy"] == expected["final_accuracy"]
    assert [row["disagreement"] for row in result.rows()] == [0.0] * 4
    assert len(set(result.daemons)) == peers
    assert len(set(result.pids)) == peers
    assert result.summary["missing"] == {}
    assert open_run(tmp_path / "run").summary["engine"] == "swarm"  # it reads as any other run does


def test_a_peer_killed_in_an_exchange_is_named_and_comes_back_to_the_same_model(tmp_path):
    flags = ("--peers", "3", "--iterations", "4", *BULKY, *QUICK, "--network", "ready_timeout=3")
    result = swarm(tmp_path / "run", *flags, "--kill", "2@2:exchanging", "--restart", "12")  # they do not wait so long
    summary = result.summary
    assert summary["agreed"]
    assert {process["model_hash"] for process in summary["processes"]} == {summary["model_hash"]}
    assert [len(process["daemons"]) for process in summary["processes"]] == [1, 1, 2]
    assert summary["notes"][0].startswith("peer 2: killed in iteration")
    assert any(result.name(2) in row["missing"] for row in result.peer_rows(0).values())


def test_a_peer_that_dies_at_its_start_says_why(tmp_path):
    async def scene() -> None:
        with Swarm(Orders(peers=2, folder=tmp_path / "peers", arguments=("--task", "no-such-task"))) as both:
            await both.run(lambda _: None)

    with pytest.raises(NetError, match=r"peer 0 ended at its start \(code 2\): .*no-such-task"):
        asyncio.run(scene())
    assert nothing_left(tmp_path, os.getpid()) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_swarm_that_is_ended_early_leaves_no_process_and_a_readable_run(tmp_path, number):
    out = tmp_path / "run"
    with begin(out, "--peers", "2", "--iterations", "100000", *TINY) as process:
        try:
            until_it_has_rows(process, out)
            process.send_signal(number)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert nothing_left(out, process.pid) == []
    assert open_run(out).rows
    if number != signal.SIGKILL:
        assert process.returncode == 130, "as a shell says of a program that Ctrl-C has ended"
        assert "stopped by Ctrl-C; all 2 peers have ended" in said
        assert open_run(out).summary["stopped_because"] == "interrupted"


def test_a_swarm_is_resumed_by_its_directory_alone_and_prolonged_to_the_model_of_the_simulator(tmp_path, capsys):
    flags = ("--peers", "3", "--group-size", "2", "--seed", "7", *TINY)
    out = tmp_path / "run"
    swarm(out, *flags, "--iterations", "2")
    names = [json.loads((out / f"peers/{peer}/summary.json").read_text())["peer"] for peer in range(3)]
    assert main(["swarm", "--resume", "--out", str(out), "--iterations", "4"]) == 0
    run = open_run(out)
    assert run.summary["model_hash"] == simulated(*flags, "--iterations", "4")["model_hash"]
    assert [row.iteration for row in run.rows] == [1, 2, 3, 4]
    assert [row.aggregators for row in run.rows] == [3] * 4
    assert [process["name"] for process in run.summary["processes"]] == names, "they are the same peers"
    assert main(["swarm", "--resume", "--out", str(tmp_path / "no"), "--json"]) == 2
    assert "holds no swarm to go on with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--kill", "9@1"), "--kill: peer 9 does not exist; there are 0 to 3"),
        (("--semantics", "paper"), "No such option: --semantics"),
        (("--technique", "gossip"), "technique = gossip: has no exact average"),
        (("--network", "poll=-1"), "--network poll=-1: network.poll must be a number, above 0"),
        (("--partition", "iid", "--partition", "dirichlet"), "--partition iid dirichlet: at most one way"),
        (("--preset", "paper-mnist"), "semantics = paper: is simulated"),
    ],
)
def test_wrong_input_is_one_line_and_starts_nobody(tmp_path, capsys, arguments, complaint):
    out = tmp_path / "run"
    assert main(["swarm", "--out", str(out), "--json", "--peers", "4", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
    assert not list(out.glob("peers/*/pid"))


def test_files_that_are_not_of_a_run_are_never_replaced(tmp_path, capsys):
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "precious").write_text("mine")
    assert main(["swarm", "--out", str(tmp_path), "--overwrite"]) == 2
    assert "is there already, but not of a run" in capsys.readouterr().err
    assert (tmp_path / "peers" / "precious").read_text() == "mine"
