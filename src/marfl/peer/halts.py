"""Moments of a peer at which it stops itself (SIGSTOP), so that `marfl swarm` hits it there (--kill, --stop).

From outside a short state is easily missed: small models train for milliseconds, and a busy machine asks too late.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from marfl.errors import InputError

PHASES = ("training", "exchanging")  # states of a peer at which it can be hit, instead of as soon as it is there
FAR = 0.01  # seconds between two looks while the moment is iterations away


@dataclass(frozen=True)
class Moment:
    """When a peer works on this iteration. With a state also in a later one: not every iteration has it."""

    iteration: int
    phase: str | None = None

    def __str__(self) -> str:
        return f"{self.iteration}:{self.phase}" if self.phase else f"{self.iteration}"

    def has_come(self, iteration: int, state: str) -> bool:
        """Whether a peer that is there has reached this moment."""
        return iteration >= self.iteration and self.phase in (None, state)


def parse_moment(text: str) -> Moment:
    """`3`: as soon as iteration 3 begins; `3:exchanging`: in that state."""
    match = re.fullmatch(rf"(\d+)(?::({'|'.join(PHASES)}))?", text)
    if match is None:
        raise InputError(f"--halt-at {text}: must be ITERATION or ITERATION:STATE, such as 3 or 3:exchanging")
    return Moment(int(match[1]), match[2])


class Working(Protocol):
    """A peer at work, as it is seen here."""

    begun: int  # the iteration that it works on

    @property
    def doing(self) -> str: ...


async def halt_at(moments: Iterable[Moment], peer: Working) -> None:
    """Stop this process at each of these moments, in this order; whoever stopped it makes it go on, or ends it.

    Near a moment it looks in every turn of the event loop: a state that others can see lasts for a turn at least.
    """
    for moment in moments:
        while not moment.has_come(peer.begun, peer.doing):
            await asyncio.sleep(FAR if peer.begun + 1 < moment.iteration else 0)
        os.kill(os.getpid(), signal.SIGSTOP)
