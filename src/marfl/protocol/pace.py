"""How long a phase of an exchange may take: as long as its bytes take on the slowest link that is expected.

Three times count. A peer that shows no sign of life for the usual time (`phase_timeout`) is given up, however much has
to travel. One whose bytes keep coming, or that answers, has until the phase ends; and a phase ends when the busiest
peer's bytes could have passed a link of `slowest_link`. So a hung peer is noticed as fast with a large model as with a
small one, and who drips bytes holds nobody up for longer than an honest peer on such a link would.

Where all that travels fits into half of the usual time, a phase takes that, and nothing here makes a difference.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from marfl.errors import DeadlineExceeded
from marfl.net.base import Net, Parcel, PeerId

BYTES_PER_MBIT = 125_000


@dataclass(frozen=True)
class Pace:
    """The times of one attempt, in seconds."""

    usual: float  # without a sign of life a peer is given up
    extra: float = 0.0  # by which a phase is longer than that
    rate: float = math.inf  # bytes a second of the slowest link

    @property
    def phase(self) -> float:
        return self.usual + self.extra

    def message(self, size: int, beside: int) -> float:
        """What a message of so many bytes may take on a link that so many others are on."""
        return size * (1 + beside) / self.rate


def pace_for(usual: float, mbit: float, load: int) -> Pace:
    """The pace of phases in which a peer sends or receives at most so many bytes, on links of so many Mbit/s."""
    rate = mbit * BYTES_PER_MBIT
    return Pace(usual, max(0.0, load / rate - usual / 2), rate)


def vectors_in_phase(exchange: str, members: int, group_size: int, *, meets: bool = False) -> int:
    """How many whole vectors a peer sends or receives in one phase at most: never too few."""
    within = {"grid": 1, "chunked": 1, "full": group_size}.get(exchange, members)  # a server hears everybody
    return max(within, group_size if meets else 0)


class LifeSigns:
    """When each peer of an attempt last showed that it lives; without extra time nobody asks."""

    def __init__(self, net: Net, pace: Pace) -> None:
        self._net, self._pace = net, pace
        self._seen: dict[PeerId, float] = {}
        self.last = -math.inf  # of anybody: whoever exchanges slowly is not alone

    def note(self, peer: PeerId) -> None:
        """It sent a piece, or answered."""
        if self._pace.extra:
            self._seen[peer] = self.last = self._net.now()

    def heard(self, peer: PeerId) -> float:
        """When something of it last came; the bytes of a message that is not whole yet count as well."""
        return max(self._seen.get(peer, -math.inf), self._net.last_heard(peer))

    def silent(self, peer: PeerId, since: float, share: float = 1.0) -> bool:
        """Whether it has shown nothing since then for a share of the usual time, where a phase is longer than that."""
        if not self._pace.extra:
            return False
        heard = self.heard(peer)
        self.last = max(self.last, heard)
        return self._net.now() - max(heard, since) >= share * self._pace.usual


async def called(net: Net, to: PeerId, channel: str, request: Parcel, usual: float, extra: float) -> Parcel:
    """What a peer answers, as `Net.call`; in the extra time for a long answer only while bytes of it come."""
    since = net.now()
    work = net.call(to, channel, request, deadline=since + usual + extra)
    if not extra:
        return await work
    asking = asyncio.create_task(work)
    try:
        while not asking.done():
            clock = asyncio.create_task(net.sleep_until(max(since, net.last_heard(to)) + usual))
            await asyncio.wait({asking, clock}, return_when=asyncio.FIRST_COMPLETED)
            clock.cancel()
            if not asking.done() and net.now() - max(since, net.last_heard(to)) >= usual:
                raise DeadlineExceeded(f"no {channel} of {to}: it is silent")
        return await asking
    finally:
        asking.cancel()
