"""A library peer in a process of its own, for tests: started, told what to do line by line, and ended whatever happens.

    python library_process.py '{"seed": 42, "clock": 0.0, "options": {"run": "test", …}}'

It reads ``aggregate``, ``clock SECONDS`` (shift the wall clock), ``state`` and ``quit``, and answers each with one line
of JSON; the first line says who it is. What it logs goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any, Self

LIMIT = 100  # seconds: then a hanging process is ended, and its test fails


class LibraryProcess:
    """One peer; use it as a context."""

    def __init__(self, *, seed: int = 42, clock: float = 0.0, limit: float = LIMIT, **options: Any) -> None:
        told = json.dumps({"seed": seed, "clock": clock, "options": options})
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        command = ["timeout", "--signal=KILL", str(limit), sys.executable, __file__, told]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
                                      text=True, start_new_session=True)  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._said.close()

    def tell(self, words: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{words}\n")
        self.popen.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next answer."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"it said nothing more, but:\n{self.said}"
        return json.loads(line)

    def ask(self, words: str) -> dict[str, Any]:
        self.tell(words)
        return self.hear()

    @property
    def said(self) -> str:
        """All that it has logged."""
        self._said.seek(0)
        return self._said.read()

    def quit(self) -> int:
        """End in peace; its exit code."""
        self.tell("quit")
        return self.popen.wait()

    def kill(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()


def main(told: dict[str, Any]) -> None:
    real, shift = time.time, [told["clock"]]
    time.time = lambda: real() + shift[0]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
        import numpy as np
        import torch

        import marfl
        import marfl.peer.api
    torch.set_num_threads(1)
    random.seed(told["seed"])
    np.random.seed(told["seed"])
    torch.manual_seed(told["seed"])
    model = torch.nn.Linear(4, 2)
    try:
        with marfl.Peer(model, **told["options"]) as peer:
            net = peer._peer._discovery.net
            _answer(id=peer.id, addresses=peer.addresses, pid=os.getpid(), daemon=net.daemon_pid,
                    scratch=str(net._daemon.scratch))  # fmt: skip
            for line in sys.stdin:
                match line.split():
                    case ["aggregate"]:
                        outcome = peer.aggregate()
                        _answer(status=outcome.status, present=sorted(outcome.present), missing=outcome.missing,
                                iteration=outcome.iteration, hash=outcome.hash.hex())  # fmt: skip
                    case ["clock", seconds]:
                        shift[0] = float(seconds)
                        _answer(clock=shift[0])
                    case ["state"]:
                        _answer(refused=peer.refused, daemon=net.daemon_pid, addresses=peer.addresses)
                    case _:
                        break
    except marfl.errors.MarflError as error:
        _answer(error=type(error).__name__, says=str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
