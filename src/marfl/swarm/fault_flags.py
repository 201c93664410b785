"""What a swarm does to its own peers: whom it kills, stops or cuts off, and when (--kill, --stop, --partition)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from marfl.errors import InputError
from marfl.peer.halts import PHASES, Moment

T = TypeVar("T")


@dataclass(frozen=True)
class Kill:
    """SIGKILL to a peer and its daemon."""

    peer: int
    when: Moment

    def __str__(self) -> str:
        return f"--kill {self.peer}@{self.when}"


@dataclass(frozen=True)
class Stop:
    """SIGSTOP to a peer and its daemon, and SIGCONT after so many seconds: it hangs, and comes back."""

    peer: int
    when: Moment
    seconds: float

    def __str__(self) -> str:
        return f"--stop {self.peer}@{self.when}:{self.seconds:g}"


@dataclass(frozen=True)
class NetworkSplit:
    """The peers fall into sides, in the order of their indices, when any peer comes to this iteration."""

    sides: tuple[int, ...]  # how many peers each side has
    iteration: int
    seconds: float

    def __str__(self) -> str:
        return f"--partition {'+'.join(map(str, self.sides))}@{self.iteration}:{self.seconds:g}"

    def side_of(self, peer: int) -> int:
        """The side of this peer; a server beyond the last index is on the first."""
        end = 0
        for side, size in enumerate(self.sides):
            end += size
            if peer < end:
                return side
        return 0


@dataclass(frozen=True)
class Faults:
    """Everything that will be done to a swarm."""

    kills: tuple[Kill, ...] = ()
    stops: tuple[Stop, ...] = ()
    partition: NetworkSplit | None = None
    restart: float | None = None  # killed peers come back after so many seconds

    def check(self, peers: int, iterations: int) -> None:
        """`InputError` for a fault that can never happen in a run of this size."""
        for flag, faults in (("--kill", self.kills), ("--stop", self.stops)):
            for fault in faults:
                _within(flag, "peer", fault.peer, 0, peers - 1)
                _within(flag, "iteration", fault.when.iteration, 1, iterations)
        if self.partition is not None:
            _within("--partition", "iteration", self.partition.iteration, 1, iterations)
            if sum(self.partition.sides) != peers:
                sides = "+".join(map(str, self.partition.sides))
                raise InputError(f"--partition {sides}: the sides must add up to {peers} peers")
        if self.restart is not None and not self.kills:
            raise InputError(f"--restart {self.restart:g}: nobody is killed; name peers with --kill, such as 2@3")


def parse_kills(text: str | None) -> tuple[Kill, ...]:
    """`2@3,5@4:exchanging`: peer 2 in iteration 3, peer 5 in iteration 4 while it exchanges."""
    expected = "must be PEER@ITERATION, comma-separated, such as 2@3,5@4 or 2@3:exchanging"
    pattern = re.compile(rf"(\d+)@(\d+)(?::({'|'.join(PHASES)}))?")
    return tuple(_each("--kill", text, pattern, expected, lambda p, t, phase: Kill(int(p), Moment(int(t), phase))))


def parse_stops(text: str | None) -> tuple[Stop, ...]:
    """`2@3:20`: peer 2 hangs for 20 seconds from iteration 3 on."""
    expected = "must be PEER@ITERATION:SECONDS, comma-separated, such as 2@3:20"
    pattern = re.compile(r"(\d+)@(\d+):(\d+(?:\.\d+)?)")
    return tuple(_each("--stop", text, pattern, expected, lambda p, t, s: Stop(int(p), Moment(int(t)), float(s))))


def parse_partition(text: str | None) -> NetworkSplit | None:
    """`5+3@2:30`: peers 0 to 4 and 5 to 7 cannot reach each other for 30 seconds from iteration 2 on."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\+\d+)+)@(\d+):(\d+(?:\.\d+)?)", text)
    sides = tuple(int(size) for size in match[1].split("+")) if match else ()
    if match is None or not all(sides):
        raise InputError(f"--partition {text}: must be SIZE+SIZE@ITERATION:SECONDS, such as 5+3@2:30")
    return NetworkSplit(sides, int(match[2]), float(match[3]))


def _each(
    flag: str, text: str | None, pattern: re.Pattern[str], expected: str, make: Callable[..., T]
) -> Iterator[T]:
    for part in text.split(",") if text else ():
        match = pattern.fullmatch(part.strip())
        if match is None:
            raise InputError(f"{flag} {part}: {expected}")
        yield make(*match.groups())


def _within(flag: str, what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InputError(f"{flag}: {what} {value} does not exist; there are {low} to {high}")
