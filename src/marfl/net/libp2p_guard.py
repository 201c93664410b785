"""A daemon that ends with its peer, however that ends, and that a Ctrl-C in a terminal does not take from it.

hivemind starts the daemon itself, so a few lines of Python come first and become it. A peer that is killed would leave
its daemon behind, on the port that its successor wants; and a Ctrl-C reaches every process of the terminal, so the
daemon would be gone before its peer can say goodbye. Without a terminal the two stay in one group.
"""

from __future__ import annotations

import os
import sys

BECOME = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if sys.argv[1] == "apart":
    os.setpgid(0, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def guarded(command: list[str]) -> list[str]:
    """The same command, for a child of this process."""
    return [sys.executable, "-I", "-S", "-c", BECOME, "apart" if _in_a_terminal() else "together", *command]


def _in_a_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True
