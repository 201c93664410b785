"""How a peer talks to the others: patiently, and never surprised by silence."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from marfl.errors import DeadlineExceeded, NetError, PeerGone
from marfl.net.base import Net, Parcel, PeerId
from marfl.protocol.settings import Settings


class Speaker:
    """A net, and the patience with which it is used."""

    def __init__(self, net: Net, settings: Settings) -> None:
        self.net, self.settings = net, settings

    def key(self, name: str) -> str:
        """A name of this run in the DHT."""
        return f"{name}/{self.settings.run}"

    async def announce(self, name: str, value: bytes) -> bool:
        """Tell the DHT; whether it listened. A DHT that is silent for a moment is churn, not an error."""
        try:
            await self.net.announce(self.key(name), value, ttl=self.settings.record_ttl)
        except NetError:
            return False
        return True

    async def look_up(self, name: str) -> Mapping[PeerId, bytes]:
        """What the DHT knows under a name; nothing while it is silent."""
        try:
            return await self.net.lookup(self.key(name))
        except NetError:
            return {}

    async def until(self, event: asyncio.Event, when: float) -> None:
        """Wait for an event, at most until `when` on this peer's clock."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self.net.sleep_until(when))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def ask(self, peer: PeerId, channel: str, parcel: Parcel, kind: str = "control") -> Parcel | None:
        """A small request, sent again when it or its answer is lost; None when there is no answer in time."""
        limit = self.net.now() + self.settings.call_timeout
        refusals = 0
        while self.net.now() < limit:
            try:
                deadline = min(limit, self.net.now() + self.settings.call_timeout / 3)
                return await self.net.call(peer, channel, parcel, kind=kind, deadline=deadline)
            except DeadlineExceeded:
                continue
            except PeerGone:  # also an answer to a request that arrived spoilt: worth a second try
                refusals += 1
                if refusals == 2:
                    return None
                await self.net.sleep_until(min(limit, self.net.now() + self.settings.poll))
        return None
