"""Networks of our own: peers reach each other, are cut off, heal, are slowed down; and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time

import pytest

from marfl.errors import NetError
from marfl.swarm.namespaces import FOLDER, Namespaces, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}; nothing tested here")
PORT = 7777


def ours() -> list[str]:
    return [name for name in os.listdir(FOLDER) if name.startswith(f"marfl-{os.getpid()}-")]


def listen(net: Namespaces, peer: int) -> socket.socket:
    server = net.socket(peer)
    server.bind((net.address(peer), PORT))
    server.listen()
    return server


def reaches(net: Namespaces, source: int, target: int) -> bool:
    with net.socket(source) as client:
        client.settimeout(1.0)
        try:
            client.connect((net.address(target), PORT))
        except OSError:
            return False
        return True


def test_a_split_cuts_the_sides_from_each_other_and_healing_joins_them():
    with Namespaces(3) as net, listen(net, 0), listen(net, 2):
        assert reaches(net, 1, 0)
        assert reaches(net, 1, 2)
        net.split([0, 0, 1])
        assert reaches(net, 1, 0)
        assert not reaches(net, 1, 2)
        net.split([0, 0, 0])
        assert reaches(net, 1, 2)


def test_nothing_is_left_when_the_block_ends_with_an_error():
    with contextlib.suppress(RuntimeError), Namespaces(2):
        made = ours()
        raise RuntimeError("on purpose")
    assert len(made) == 3
    assert ours() == []


def test_nothing_is_left_when_it_cannot_be_set_up():
    with pytest.raises(NetError, match="tbf"), Namespaces(2, "notarate"):
        pass
    assert ours() == []


def test_the_network_of_the_machine_stays_as_it_is():
    def links() -> str:
        return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout

    before = links()
    with Namespaces(2):
        assert links() == before
    assert links() == before


def test_a_limited_link_carries_no_more_than_its_rate():
    data = bytes(1_000_000)  # at 8 mbit a second's worth
    with Namespaces(2, "8mbit") as net, listen(net, 1) as server, net.socket(0) as client:
        client.connect((net.address(1), PORT))
        taken, _ = server.accept()
        begun = time.monotonic()
        with taken:
            client.setblocking(False)
            left = memoryview(data)
            received = 0
            while received < len(data):
                if left:
                    with contextlib.suppress(BlockingIOError):
                        left = left[client.send(left) :]
                received += len(taken.recv(65536))
        assert time.monotonic() - begun > 0.5  # a limit from below holds on a busy machine as well
