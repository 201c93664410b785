"""The way into a swarm and back: keep trying, say who is here, remember who was met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from marfl.errors import DeadlineExceeded, InputError, NetError, PeerGone
from marfl.net.base import Parcel, PeerId
from marfl.peer.network import NetworkConfig
from marfl.peer.voter import LAYOUT_CHANNEL

if TYPE_CHECKING:
    from marfl.net.libp2p import Libp2pNet

RETRY = 2.0  # seconds between two rounds of knocking
LOOK_AGAIN = 1.0  # seconds between two looks at who is here
SHOWN = 3  # addresses named in a line
MAX_ADDRESSES = 16  # of one peer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Presence:
    """What a peer says of itself in the DHT, beside the records of the protocol."""

    index: int
    layout: bytes
    addresses: tuple[str, ...]
    here: bool = True  # False: it has left

    @property
    def encoded(self) -> bytes:
        data: bytes = msgpack.packb([self.index, self.layout, self.addresses, self.here])
        return data


def decode_presence(data: bytes) -> Presence | None:
    """What these bytes say, or None: a record that is not ours says nothing."""
    try:
        index, layout, addresses, here = msgpack.unpackb(data, raw=False, max_ext_len=0)
        if not isinstance(addresses, list) or not isinstance(layout, bytes) or not isinstance(here, bool):
            return None
        return Presence(int(index), layout, tuple(str(each) for each in addresses[:MAX_ADDRESSES]), here)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        return None


@dataclass
class Link:
    """One peer's place in a swarm."""

    net: Libp2pNet
    run: str
    network: NetworkConfig
    say: Say
    met: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)  # addresses of peers seen, newest last
    keep_met: Callable[[Mapping[PeerId, tuple[str, ...]]], None] = lambda _: None  # hears whenever that changes
    here: dict[PeerId, Presence] = field(default_factory=dict)  # who says that it is here
    _turn: int = 0

    async def enter(self, given: Sequence[str], *, patience: float | None = None) -> None:
        """Get to know the swarm through `given` addresses or peers met before; a first peer has neither.

        Given addresses are tried until one answers, or until `patience` is over (`PeerGone`).
        """
        known = [where for peer, places in self.met.items() if peer != self.net.me for where in places]
        addresses = [a for a in dict.fromkeys([*given, *known]) if not a.endswith(f"/p2p/{self.net.me}")]
        begun, said = self.net.now(), ""
        while addresses:
            failed = await self.net.join(addresses)
            if len(failed) < len(addresses):
                await self._knock(a for a in addresses if a not in failed)
                break
            line = "; ".join(f"{where}: {why}" for where, why in list(failed.items())[:SHOWN])
            if not given:
                self.say(f"nobody met before answers ({line}); going on, and looking out for them")
                break
            if patience is not None and self.net.now() - begun > patience:
                raise PeerGone(f"join: nobody answers; {line}")
            if line != said:
                said = line
                self.say(f"waiting for a peer of the swarm to answer, trying every {RETRY:g} seconds ({line})")
            await asyncio.sleep(RETRY)

    async def _knock(self, addresses: Iterable[str]) -> None:
        """`InputError` if a peer that is there does not let me in: alone in the DHT, this peer would wait for ever."""
        for address in addresses:
            peer, limit = address.rpartition("/p2p/")[2], self.net.now() + self.network.call_timeout
            try:
                await self.net.call(peer, LAYOUT_CHANNEL, Parcel(b""), deadline=limit)
            except PeerGone as error:
                if "not allowed" in str(error) or "token" in str(error):
                    needs = "the run is closed: it needs the authority's --token for this peer, and --authority"
                    raise InputError(f"join: {address} refuses this peer; {needs}") from None
            except DeadlineExceeded:
                continue  # it is slow: that is not a refusal

    async def announce(self, presence: Presence) -> None:
        await self.net.announce(self._key, presence.encoded, ttl=self.network.record_ttl)

    async def look(self) -> dict[PeerId, Presence]:
        """Everybody who says that it is here, myself included if I did."""
        found = {peer: decode_presence(value) for peer, value in (await self.net.lookup(self._key)).items()}
        self.here = {peer: presence for peer, presence in found.items() if presence is not None and presence.here}
        seen = {peer: p.addresses for peer, p in self.here.items() if peer != self.net.me and p.addresses}
        if any(self.met.get(peer) != addresses for peer, addresses in seen.items()):
            self.met = {peer: old for peer, old in self.met.items() if peer not in seen} | seen
            self.keep_met(self.met)
        return self.here

    async def wait_for(self, count: int, role: str) -> None:
        """Until so many peers are here, or `start_timeout` is over; whoever comes later still joins."""
        limit, said = self.net.now() + self.network.start_timeout, -1
        while len(await self.look()) < count and self.net.now() < limit:
            if said != len(self.here):
                said = len(self.here)
                self.say(f"waiting for {count} peers {role}: {said} here")
            await asyncio.sleep(LOOK_AGAIN)

    async def stay(self, mine: Presence) -> None:
        """For ever: say that I am here, look who is, and knock at those who were here and are not, and at one more."""
        renewed = self.net.now()
        while True:
            await asyncio.sleep(self.network.refresh)
            try:
                if self.net.now() - renewed > self.network.record_ttl / 3:
                    await self.announce(mine)
                    renewed = self.net.now()
                await self.look()
                await self.net.join(_first(self.met, self.met.keys() - self.here.keys()))
                await self.net.join(self._next_door())
            except NetError as error:
                self.say(f"the DHT does not answer ({error}); trying again")

    def _next_door(self) -> list[str]:
        """One peer met, in turn, here or not: a record outlives a link, so only a knock tells that a network healed."""
        self._turn += 1
        return [self.met[peer][0] for peer in sorted(self.met)[self._turn % len(self.met) :][:1]] if self.met else []

    @property
    def _key(self) -> str:
        return f"peers/{self.run}"


def _first(met: Mapping[PeerId, tuple[str, ...]], peers: Iterable[PeerId]) -> list[str]:
    return [met[peer][0] for peer in sorted(peers)[:SHOWN]]


def layouts(here: Mapping[PeerId, Presence], me: PeerId) -> dict[PeerId, dict[str, Any]]:
    """The layout that every other peer announces."""
    return {peer: {"layout": presence.layout} for peer, presence in here.items() if peer != me}
