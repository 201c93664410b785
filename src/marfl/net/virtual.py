"""A network in memory, in virtual time: deterministic, seeded, and as fast as the machine can compute.

`VirtualLoop` is an asyncio event loop whose clock jumps to the next timer when everybody waits. `VirtualNetwork` joins
any number of peers with links (bandwidth, latency, jitter, loss), meters every byte, and can crash, hang, slow down,
cut off (in one direction, too) or bring back any of them. The same protocol code runs over it and over real sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from marfl.errors import BrokenPromise, NetError, PeerGone
from marfl.net.base import Parcel, PeerId
from marfl.net.virtual_clock import VirtualLoop, run_virtual
from marfl.net.virtual_door import GONE, VirtualNet
from marfl.net.virtual_links import Delivery, Event, Link, Port, View

T = TypeVar("T")

Stored = tuple[float, bytes, float]  # when it was announced, what, and when it expires
VERSIONS = 8  # of a record, for those who see old ones

# Called before a message leaves (or a DHT operation starts); may crash or hang peers, and change the delivery.
Interceptor = Callable[["VirtualNetwork", Event, Delivery], None]


class VirtualNetwork:
    """The world that virtual peers share."""

    def __init__(self, seed: int = 0, link: Link | None = None, *, log: bool = True) -> None:
        self.link = link or Link()
        self.random = random.Random(seed)
        self.ports: dict[PeerId, Port] = {}
        self.dht: dict[str, dict[PeerId, tuple[bytes, float]]] = defaultdict(dict)
        self._told: dict[tuple[str, PeerId], list[Stored]] = {}  # the last few records under each subkey
        self.cuts: dict[tuple[PeerId, PeerId], float] = {}  # (from, to): until when nothing passes
        self.events: list[Event] | None = [] if log else None
        self.intercept: Interceptor | None = None

    @property
    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def join(self, peer: PeerId, link: Link | None = None) -> VirtualNet:
        """A door to the network for this peer; a crashed peer comes back the same way."""
        known = self.ports.get(peer)
        if known and not known.dead:
            raise BrokenPromise(f"{peer} is on the network already")
        net = VirtualNet(self, peer, link or (known.link if known else self.link), known.island if known else 0)
        self.ports[peer] = net.port
        return net

    def spawn(self, peer: PeerId, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a peer's own task; it dies with the peer."""
        task = asyncio.get_running_loop().create_task(work)
        self.own(self.ports[peer], task)
        return task

    def crash(self, peer: PeerId) -> None:
        """The process is gone: its tasks end where they are, and connections to it break."""
        port = self.ports[peer]
        port.dead = True
        for task in list(port.tasks):
            task.cancel()
        _break(port.calls, PeerGone, f"{peer} vanished")

    def alive(self, peer: PeerId) -> bool:
        return peer in self.ports and not self.ports[peer].dead

    def hang(self, peer: PeerId, seconds: float) -> None:
        """The process stands still: nothing it awaits comes back, and nobody gets an answer, for so long."""
        self.ports[peer].awake_at = self.time + seconds

    def silence_dht(self, peer: PeerId, seconds: float) -> None:
        """The DHT answers this peer nothing for so long; messages still pass."""
        self.ports[peer].dht_back_at = self.time + seconds

    def blur_dht(
        self, peer: PeerId, seconds: float, *, lag: float = 0.0, hidden: Iterable[PeerId] = (), refuses: bool = False
    ) -> None:
        """For so long the DHT shows this peer old records, or not everybody's, or takes none of its own."""
        self.ports[peer].view = View(self.time + seconds, lag, frozenset(hidden), refuses)

    def sever(self, peer: PeerId, seconds: float) -> None:
        """The peer's own daemon is gone for so long: its streams break; its process and memory live on."""
        port = self.ports[peer]
        port.daemon_back_at = max(port.daemon_back_at, self.time + seconds)
        _break(port.calls, PeerGone, f"{peer} vanished")
        _break(port.asked, NetError, GONE)

    def cut(self, pairs: Iterable[tuple[PeerId, PeerId]], seconds: float) -> None:
        """For so long nothing passes from the first to the second of each pair; the other way it does."""
        until = self.time + seconds
        self.cuts |= {pair: max(until, self.cuts.get(pair, 0.0)) for pair in pairs}

    def skew(self, peer: PeerId, *, rate: float, offset: float) -> None:
        port = self.ports[peer]
        port.rate, port.offset = rate, offset

    def relink(self, peer: PeerId, link: Link) -> None:
        """Give a peer another link; what queued for the old one no longer holds up the new one."""
        port = self.ports[peer]
        port.link, port.up_free, port.down_free = link, self.time, self.time

    def partition(self, island: Mapping[PeerId, int]) -> None:
        for peer, port in self.ports.items():
            port.island = island.get(peer, 0)

    def heal(self) -> None:
        self.partition({})

    def reachable(self, one: PeerId, other: PeerId) -> bool:
        """Whether two peers are on one island: then they find each other's records, by way of others."""
        return one in self.ports and other in self.ports and self.ports[one].island == self.ports[other].island

    def passes(self, source: PeerId, dest: PeerId) -> bool:
        """Whether a message from the one gets to the other now."""
        if not self.reachable(source, dest) or not self.online(source) or not self.online(dest):
            return False
        return self.cuts.get((source, dest), 0.0) <= self.time

    def online(self, peer: PeerId) -> bool:
        """Whether a peer that lives has its daemon."""
        return self.ports[peer].daemon_back_at <= self.time

    def store(self, key: str, peer: PeerId, value: bytes, expires: float) -> None:
        """Keep a record in the DHT, and for those who see old ones the last few that it replaces."""
        self.dht[key][peer] = value, expires
        told = self._told.setdefault((key, peer), [])
        told.append((self.time, value, expires))
        del told[:-VERSIONS]

    def find(self, key: str, peer: PeerId) -> dict[PeerId, bytes]:
        """What this peer sees under a key."""
        view, now = self.ports[peer].view, self.time
        found = dict(self.dht[key])
        if view.until > now:
            old = {owner: self._as_of(key, owner, now - view.lag) for owner in found if owner not in view.hidden}
            found = {owner: stored for owner, stored in old.items() if stored}
        return {p: value for p, (value, expires) in found.items() if expires > now and self.reachable(peer, p)}

    def _as_of(self, key: str, owner: PeerId, when: float) -> tuple[bytes, float] | None:
        told = self._told.get((key, owner), ())
        return next(((value, expires) for since, value, expires in reversed(told) if since <= when), None)

    def own(self, port: Port, task: asyncio.Task[Any]) -> None:
        port.tasks.add(task)
        task.add_done_callback(port.tasks.discard)

    def depart(self, event: Event, parcel: Parcel) -> Delivery:
        """Log one message and let the fault injector have its way with it."""
        delivery = Delivery(parcel)
        if self.intercept:
            self.intercept(self, event, delivery)
        if self.events is not None:
            self.events.append(event)
        return delivery

    def transit(self, source: PeerId, dest: PeerId, size: int) -> tuple[float, float]:
        """When a message of this size has left its sender, and when it arrives, on the real queues of both links."""
        out, into, now = self.ports[source], self.ports[dest], self.time
        start = max(now, out.up_free)
        gone = start + size / out.link.up
        latency = out.link.latency + into.link.latency
        jitter = out.link.jitter + into.link.jitter
        if jitter:
            latency += self.random.random() * jitter
        loss = 1 - (1 - out.link.loss) * (1 - into.link.loss)
        while loss and self.random.random() < loss:
            latency += out.link.retransmit
        # The downlink is taken for the bytes' own time only: a slow sender does not hold up the others.
        into.down_free = max(into.down_free, now + latency) + size / into.link.down
        out.up_free = gone
        return gone, max(gone + latency, into.down_free)


def _break(waits: Iterable[asyncio.Future[Parcel]], error: type[NetError], why: str) -> None:
    for waiting in list(waits):
        if not waiting.done():
            waiting.set_exception(error(why))


__all__ = ["Delivery", "Event", "Interceptor", "Link", "VirtualLoop", "VirtualNet", "VirtualNetwork", "run_virtual"]
