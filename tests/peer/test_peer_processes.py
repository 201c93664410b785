"""Library peers in processes of their own, over real sockets: what only happens between processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest

pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
from stages.library import LibraryProcess
from stages.processes import Stage, new_stage

stage = new_stage
QUICK: dict[str, Any] = {"run": "test", "ready_timeout": 10.0, "expected": 2, "join_patience": 10.0}


def test_peers_that_took_the_same_seed_meet_and_one_whose_p2p_daemon_is_killed_goes_on_taking_part():
    """All these programs take one seed, as users' do; no two of them draw the same name for it."""
    options = QUICK | {"expected": 3}
    with LibraryProcess(**options) as one:
        first = one.hear()
        with (
            LibraryProcess(join=first["addresses"], **options) as two,
            LibraryProcess(join=first["addresses"], **options) as three,
        ):
            peers = (one, two, three)
            names = sorted([first["id"], two.hear()["id"], three.hear()["id"]])
            for killed in (None, one, two):  # the one that all have joined, too
                if killed:
                    kill_daemon(killed)
                for peer in peers:
                    peer.tell("aggregate")
                outcomes = [peer.hear() for peer in peers]
                assert [outcome["status"] for outcome in outcomes] == ["committed"] * 3
                assert [outcome["present"] for outcome in outcomes] == [names] * 3, [peer.said for peer in peers]
            states = [peer.ask("state") for peer in peers]
            assert [state["refused"].get("p2p daemon died") for state in states] == [1, 1, None]
            assert states[0]["addresses"] == first["addresses"]
            assert "the p2p daemon of this peer died (signal 9); starting it again" in one.said
            assert [peer.quit() for peer in peers] == [0, 0, 0]
            assert all("Task" not in peer.said and "Traceback" not in peer.said for peer in peers)


def kill_daemon(peer: LibraryProcess) -> None:
    """Returns when another one runs: for those who cannot be reached the others do not wait long."""
    killed, limit = peer.ask("state")["daemon"], time.monotonic() + 60
    os.kill(killed, signal.SIGKILL)
    while peer.ask("state")["daemon"] in (killed, None):
        assert time.monotonic() < limit, peer.said
        time.sleep(0.1)


def take_port(address: str) -> socket.socket:
    """The port of a daemon that still runs; no other daemon will be started there."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the daemon does
    taken.bind(("127.0.0.1", int(address.split("/")[4])))
    return taken


@pytest.mark.slow
def test_a_peer_whose_p2p_daemon_cannot_be_started_again_says_so():
    with LibraryProcess(**QUICK) as peer:
        me = peer.hear()
        with take_port(me["addresses"][0]):
            os.kill(me["daemon"], signal.SIGKILL)
            outcome = peer.ask("aggregate")
        assert outcome["error"] == "NetError"
        assert "own p2p daemon is gone: started 5 times in vain" in outcome["says"]
        assert peer.popen.wait() == 1


@pytest.mark.parametrize("stage", [(2, 4)], indirect=True)
def test_a_daemon_whose_p2p_daemon_cannot_be_started_again_ends_with_one_line(stage: Stage):
    process = stage.start(0)
    process.until("waiting for 2 peers")
    pid = stage.status(0)["pid"]
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        daemon = int(file.read().split()[0])
    with take_port(stage.read(0, "address").split()[0]):
        os.kill(daemon, signal.SIGKILL)
        line = process.until("marfl: ")
        assert process.popen.wait() == 2
    assert "own p2p daemon is gone: started 5 times in vain" in line
    assert process.popen.stderr.read() == ""
