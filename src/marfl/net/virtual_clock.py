"""Virtual time: an event loop whose clock jumps to the next timer when everybody waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from marfl.errors import BrokenPromise

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer, moves the clock there."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise BrokenPromise("deadlock: every task waits and no timer is set")
        if timeout > 0:
            self.clock += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. It never sleeps and never touches a socket."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.clock


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, and clean up whatever it left running."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
