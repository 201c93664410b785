"""Library peers for tests: in this process, or in processes of their own that are ended whatever happens.

    python library.py '{"seed": 42, "clock": 0.0, "options": {"run": "test", …}}'

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
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import nn

T = TypeVar("T")
QUICK: dict[str, Any] = {"run": "test", "ready_timeout": 10.0, "refresh": 600.0}
LIMIT = 100  # seconds: then a hanging process is ended, and its test fails


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    first = nn.Linear(4, 6)
    return nn.Sequential(first, nn.BatchNorm1d(6), nn.Linear(6, 2))


def train(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
    optimizer.step()
    optimizer.zero_grad()


def together(*calls: Callable[[], T]) -> list[T]:
    """What these calls return, made at the same time."""
    results: dict[int, T] = {}

    def keep(place: int, call: Callable[[], T]) -> None:
        results[place] = call()

    threads = [threading.Thread(target=keep, args=(place, call)) for place, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return [results[place] for place in range(len(calls))]


class LibraryProcess:
    """One peer in a process of its own, told what to do line by line; use it as a context."""

    def __init__(self, *, seed: int = 42, clock: float = 0.0, limit: float = LIMIT, **options: Any) -> None:
        from stages.warm import WarmProcess  # here, because the program does not find it

        told = json.dumps({"seed": seed, "clock": clock, "options": options})
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
        self.popen = WarmProcess([__file__, told], limit=limit, **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
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

    def aggregate(self) -> dict[str, Any]:
        return self.ask("aggregate")

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
        if not self.popen.stdout.closed:
            self.popen.stdout.read()  # its end: nobody of the group holds it any more
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

        import marfl
        import marfl.peer.api
    torch.set_num_threads(1)
    random.seed(told["seed"])
    np.random.seed(told["seed"])
    model = small_model(told["seed"])
    try:
        with marfl.Peer(model, **told["options"]) as peer:
            net = peer._peer._discovery.net
            _answer(id=peer.id, iteration=peer.iteration, addresses=peer.addresses, pid=os.getpid(),
                    daemon=net.daemon_pid, scratch=str(net._daemon.scratch))  # fmt: skip
            for line in sys.stdin:
                match line.split():
                    case ["aggregate"]:
                        outcome = peer.aggregate()
                        _answer(status=outcome.status, present=sorted(outcome.present), missing=outcome.missing,
                                iteration=outcome.iteration, hash=outcome.hash.hex(), known=outcome.known,
                                warning=outcome.warning, seconds=outcome.seconds)  # fmt: skip
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
