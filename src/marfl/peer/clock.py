"""Whether this peer's wall clock is right. Records in the DHT expire by it: whose clock is wrong finds nobody there.

Peers compare clocks when they meet, and now and then afterwards. A clock that does not jump, the machine's own, tells
whose wall clock was moved in between: mine or another's.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from marfl.errors import WireError
from marfl.net.base import Net, Parcel, PeerId
from marfl.net.libp2p.connection import CLOCK_SKEW

CHANNEL = "clock"
KEPT = 16  # peers whose clocks are remembered, the newest
_TIME = struct.Struct(">d")
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while a laptop sleeps, as the wall clock does


def far_off(ahead: Mapping[PeerId, float], tolerance: float = CLOCK_SKEW) -> tuple[PeerId, float] | None:
    """Whether most of the clocks compared are too far from mine: then mine is wrong. One of them, and how far ahead."""
    far = sorted((seconds, peer) for peer, seconds in ahead.items() if abs(seconds) > tolerance)
    if 2 * len(far) <= len(ahead):
        return None
    seconds, peer = far[len(far) // 2]
    return peer, seconds


@dataclass
class Clock:
    """This peer's wall clock, and what is known of the others'."""

    _others: dict[PeerId, float] = field(default_factory=dict)  # their wall clocks minus my steady one, newest last
    _offset: float = field(default_factory=lambda: _offset())  # of my wall clock, when `jump` was last asked

    def note(self, peer: PeerId, ahead: float) -> None:
        """What a comparison has shown. A clock that was moved away from mine does not make mine wrong."""
        theirs = ahead + _offset()
        before = self._others.pop(peer, theirs)
        moved = abs(theirs - before) > CLOCK_SKEW and abs(ahead) > CLOCK_SKEW
        self._others[peer] = before if moved else theirs
        if len(self._others) > KEPT:
            del self._others[next(iter(self._others))]

    @property
    def ahead(self) -> dict[PeerId, float]:
        """By how many seconds the others' clocks are ahead of mine, as it is now."""
        mine = _offset()
        return {peer: theirs - mine for peer, theirs in self._others.items()}

    def astray(self) -> bool:
        """Whether this clock is known to be wrong."""
        return far_off(self.ahead) is not None

    def jump(self) -> float:
        """By how many seconds the wall clock was moved since this was last asked; 0 for little."""
        before, self._offset = self._offset, _offset()
        moved = self._offset - before
        return moved if abs(moved) > CLOCK_SKEW else 0.0


def _offset() -> float:
    return time.time() - time.clock_gettime(_STEADY)


def in_words(peer: PeerId, ahead: float) -> str:
    """What is wrong with this peer's clock."""
    way = "behind" if ahead > 0 else "ahead of"
    return f"this peer's clock is {abs(ahead):.0f} seconds {way} that of {peer}"


def serve_clock(net: Net) -> None:
    """Tell whoever asks what time it is here."""

    async def tell(_: PeerId, __: Parcel) -> Parcel:
        return Parcel(_TIME.pack(time.time()))

    net.serve(CHANNEL, tell)


async def ask_clock(net: Net, peer: PeerId, deadline: float) -> float:
    """By how many seconds another peer's clock is ahead of mine. `NetError`, or `WireError`."""
    begun = time.time()
    answer = await net.call(peer, CHANNEL, Parcel(b""), deadline=deadline)
    middle = (begun + time.time()) / 2
    if len(answer.header) != _TIME.size:
        raise WireError("clock: not a time")
    (theirs,) = _TIME.unpack(answer.header)
    ahead = float(theirs - middle)
    if not abs(ahead) < 1e12:  # also not a number
        raise WireError(f"clock: {theirs} is not a time")
    return ahead
