"""A network in memory, in virtual time: deterministic, seeded, and as fast as the machine can compute.

`VirtualLoop` is an asyncio event loop whose clock jumps to the next timer when everybody waits. `VirtualNetwork` joins
any number of peers with links (bandwidth, latency, jitter, loss), meters every byte, and can crash, hang, slow down,
cut off or bring back any of them. The same protocol code runs over it and over real sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from marfl.errors import BrokenPromise, PeerGone
from marfl.net.base import Parcel, PeerId
from marfl.net.virtual_clock import VirtualLoop, run_virtual
from marfl.net.virtual_door import VirtualNet
from marfl.net.virtual_links import Delivery, Event, Link, Port

T = TypeVar("T")

# Called before a message leaves (or a DHT operation starts); may crash or hang peers, and change the delivery.
Interceptor = Callable[["VirtualNetwork", Event, Delivery], None]


class VirtualNetwork:
    """The world that virtual peers share."""

    def __init__(self, seed: int = 0, link: Link | None = None, *, log: bool = True) -> None:
        self.link = link or Link()
        self.random = random.Random(seed)
        self.ports: dict[PeerId, Port] = {}
        self.dht: dict[str, dict[PeerId, tuple[bytes, float]]] = defaultdict(dict)
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
        for waiting in list(port.calls):
            if not waiting.done():
                waiting.set_exception(PeerGone(f"{peer} vanished"))

    def alive(self, peer: PeerId) -> bool:
        return peer in self.ports and not self.ports[peer].dead

    def hang(self, peer: PeerId, seconds: float) -> None:
        """The process stands still: nothing it awaits comes back, and nobody gets an answer, for so long."""
        self.ports[peer].awake_at = self.time + seconds

    def silence_dht(self, peer: PeerId, seconds: float) -> None:
        """The DHT answers this peer nothing for so long; messages still pass."""
        self.ports[peer].dht_back_at = self.time + seconds

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
        return one in self.ports and other in self.ports and self.ports[one].island == self.ports[other].island

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


__all__ = ["Delivery", "Event", "Interceptor", "Link", "VirtualLoop", "VirtualNet", "VirtualNetwork", "run_virtual"]
