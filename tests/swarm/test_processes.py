"""One peer seen from outside, played by a small script: what the swarm learns of it, and what is left after a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest

from marfl.swarm.peers import ANSWER_TIMEOUT, PeerProcess
from marfl.swarm.processes import command_name, group_members

ACTOR = """
import http.server, json, pathlib, socket, subprocess, sys
folder = pathlib.Path(sys.argv[1])
door = socket.socket(socket.AF_UNIX)
door.bind(str(folder / "door"))
child = subprocess.Popen(["sleep", "600"])

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        page = {"iteration": 4, "state": "training", "sent": {"payload": int(sys.argv[2])}}
        self.wfile.write(json.dumps(page).encode())

server = http.server.HTTPServer(("127.0.0.1", 0), Page)
(folder / "status").write_text(str(server.server_address[1]))
server.serve_forever()
"""


@pytest.fixture
def peer(tmp_path):
    peer = PeerProcess(0, tmp_path)
    yield peer
    peer.bury("ended")


def begin(peer: PeerProcess, sent: int) -> None:
    """Start a life, and wait until it answers."""
    peer.start([sys.executable, "-c", ACTOR, str(peer.folder), str(sent)], {})
    limit = time.monotonic() + 60
    while peer.fate != "running":
        assert peer.alive, peer.last_words()
        assert time.monotonic() < limit
        asyncio.run(peer.ask())


def test_a_killed_peer_leaves_no_child_and_no_socket(peer, tmp_path):
    begin(peer, 1)
    group = group_members(peer.pids[0])
    assert sorted(command_name(pid) for pid in group)[-1] == "sleep"
    assert (tmp_path / "door").exists()
    peer.kill()
    assert group_members(peer.pids[0]) == []
    assert not (tmp_path / "door").exists()
    assert (peer.fate, peer.alive) == ("killed", False)


def test_a_peer_that_has_stopped_itself_is_seen_and_not_asked(peer):
    begin(peer, 1)
    assert not peer.halted
    os.kill(peer.pids[0], signal.SIGSTOP)
    limit = time.monotonic() + 60
    while not peer.halted:
        assert time.monotonic() < limit
    begun = time.monotonic()
    asyncio.run(peer.ask())
    assert time.monotonic() - begun < ANSWER_TIMEOUT, "it would not answer"
    peer.hang()
    assert not peer.halted, "it was hit"
    peer.go_on()
    while peer.halted:
        assert time.monotonic() < limit


def test_bytes_that_a_kill_made_a_peer_forget_are_remembered(peer):
    begin(peer, 100)
    peer.kill()
    assert peer.sent == {"payload": 100}
    begin(peer, 70)  # it came back from a checkpoint that knew of 70
    assert peer.sent == {"payload": 100}
    assert (peer.lives, len(peer.pids)) == (2, 2)


def test_a_stopped_peer_is_not_asked_and_goes_on_afterwards(peer):
    begin(peer, 1)
    peer.hang()
    asyncio.run(peer.ask())
    assert peer.state == "stopped"
    peer.go_on()
    asyncio.run(peer.ask())
    assert (peer.state, peer.committed) == ("training", 4)


def test_the_last_words_of_a_peer_are_its_last_lines(peer):
    peer.start([sys.executable, "-c", "print('first')\nfor i in range(9): print(i)\nexit(3)"], {})
    assert peer.wait(60)
    assert peer.process is not None
    assert peer.process.returncode == 3
    assert peer.last_words() == "4 | 5 | 6 | 7 | 8"
