"""A guarded daemon goes when its peer goes, and stays through a Ctrl-C that was meant for the peer."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time

PARENT = """
import subprocess, sys
from marfl.net.libp2p.cleanup import guarded
child = subprocess.Popen(guarded(["/bin/sleep", "100"]))
print("child", child.pid, flush=True)
try:
    child.wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()
    child.kill()
"""


def test_it_dies_with_a_peer_that_is_killed():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        wait_for(lambda: command_of(child) == ["/bin/sleep", "100"])  # until then it is not yet what it becomes
        assert os.getpgid(child) == os.getpgid(parent.pid)  # no terminal: one signal reaches both
        parent.kill()
        parent.communicate()
    wait_for(lambda: command_of(child) == [])


def test_a_ctrl_c_in_the_terminal_is_for_the_peer_alone():
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", PARENT])
    said = ""
    while not (child := re.search(r"child (\d+)", said)):
        said += os.read(terminal, 1000).decode()
    number = int(child[1])
    wait_for(lambda: command_of(number) == ["/bin/sleep", "100"])
    os.write(terminal, b"\x03")
    while "interrupted" not in said:
        said += os.read(terminal, 1000).decode()
    assert os.getpgid(number) == number != os.getpgid(pid)  # so the terminal's signal was not for it
    assert command_of(number) == ["/bin/sleep", "100"]
    os.write(terminal, b"\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    wait_for(lambda: command_of(number) == [])


def command_of(pid: int) -> list[str]:
    """Nothing for a process that is gone, and for a zombie."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode().split("\0")[:-1]
    except FileNotFoundError:
        return []


def wait_for(condition) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
