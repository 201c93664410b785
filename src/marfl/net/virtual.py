"""A network in memory, in virtual time: deterministic, seeded, and as fast as the machine can compute.

`VirtualLoop` is an asyncio event loop whose clock jumps to the next timer when everybody waits. `VirtualNetwork` joins
any number of peers with links (bandwidth, latency, jitter, loss), meters every byte, and can crash, hang, slow down,
cut off or bring back any of them. The same protocol code runs over it and over real sockets.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from marfl.errors import BrokenPromise, DeadlineExceeded, PeerGone, WireError
from marfl.net.base import Handler, Ledger, Parcel, PeerId, Tag

T = TypeVar("T")
REFUSED = b"\xc1refused"  # 0xc1 is never valid msgpack: no handler can answer this


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


@dataclass(frozen=True)
class Link:
    """A peer's access to the network. Bytes per second, seconds, and the share of messages sent twice over."""

    up: float = float("inf")
    down: float = float("inf")
    latency: float = 0.0  # one way, this end
    jitter: float = 0.0  # up to so much more, uniformly
    loss: float = 0.0  # a lost message is sent again after a time-out, as a reliable transport does
    retransmit: float = 0.2


class Event(NamedTuple):
    """One line of the network's log: bytes that left a peer."""

    time: float
    op: str  # "send", "call", "answer", "announce", "lookup"
    source: PeerId
    dest: PeerId
    tag: Tag
    kind: str
    header: int
    payload: int


@dataclass
class Delivery:
    """What becomes of one message: a fault injector may change it."""

    parcel: Parcel
    copies: int = 1
    delay: float = 0.0


# Called before a message leaves (or a DHT operation starts); may crash or hang peers, and change the delivery.
Interceptor = Callable[["VirtualNetwork", Event, Delivery], None]


@dataclass
class _Port:
    """What the network knows of one peer."""

    net: VirtualNet
    link: Link
    up_free: float = 0.0
    down_free: float = 0.0
    island: int = 0  # partitions: only peers of one island reach each other
    awake_at: float = 0.0
    rate: float = 1.0  # of its clock
    offset: float = 0.0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    calls: set[asyncio.Future[Parcel]] = field(default_factory=set)  # others wait for its answers
    dead: bool = False


class VirtualNetwork:
    """The world that virtual peers share."""

    def __init__(self, seed: int = 0, link: Link | None = None, *, log: bool = True) -> None:
        self.link = link or Link()
        self.random = random.Random(seed)
        self.ports: dict[PeerId, _Port] = {}
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
        self.ports[peer] = net._port
        return net

    def spawn(self, peer: PeerId, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a peer's own task; it dies with the peer."""
        task = asyncio.get_running_loop().create_task(work)
        self._own(self.ports[peer], task)
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

    def _own(self, port: _Port, task: asyncio.Task[Any]) -> None:
        port.tasks.add(task)
        task.add_done_callback(port.tasks.discard)

    def _depart(self, event: Event, parcel: Parcel) -> Delivery:
        """Log one message and let the fault injector have its way with it."""
        delivery = Delivery(parcel)
        if self.intercept:
            self.intercept(self, event, delivery)
        if self.events is not None:
            self.events.append(event)
        return delivery

    def _transit(self, source: PeerId, dest: PeerId, size: int) -> tuple[float, float]:
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


class VirtualNet:
    """One peer's door to a `VirtualNetwork`: implements `marfl.net.base.Net`."""

    def __init__(self, network: VirtualNetwork, me: PeerId, link: Link, island: int) -> None:
        self.network = network
        self.me = me
        self._port = _Port(self, link, island=island)  # its own for good: once dead, it stays dead
        self.sent = Ledger()
        self.received = Ledger()
        self.handlers: dict[str, tuple[Handler, str]] = {}
        self._inbox: dict[int, dict[tuple[PeerId, Tag], Parcel | asyncio.Future[Parcel] | None]] = defaultdict(dict)

    # --- time ---

    def now(self) -> float:
        port = self._port
        return self.network.time * port.rate + port.offset

    def _loop_time(self, mine: float) -> float:
        port = self._port
        return (mine - port.offset) / port.rate + 1e-6  # a deadline has surely passed on the peer's own clock as well

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, self._loop_time(when) - self.network.time))
        await self._awake()

    async def _awake(self) -> None:
        """Come back only when this process runs: not while it hangs, and never once it is dead."""
        port = self._port
        while port.awake_at and not port.dead and port.awake_at > self.network.time:
            await asyncio.sleep(port.awake_at - self.network.time)
        if port.dead:
            raise asyncio.CancelledError

    # --- the DHT ---

    async def announce(self, key: str, value: bytes, *, ttl: float) -> None:
        await self._awake()
        self._meter_dht("announce", key, len(value), self.sent)
        await self._hop()
        self.network.dht[key][self.me] = (value, self.network.time + ttl)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        await self._awake()
        await self._hop()
        network = self.network
        found = {
            peer: value
            for peer, (value, expires) in network.dht[key].items()
            if expires > network.time and network.reachable(self.me, peer)
        }
        self._meter_dht("lookup", key, sum(map(len, found.values())), self.received)
        return found

    async def _hop(self) -> None:
        """A DHT operation takes a few network hops."""
        link = self._port.link
        if link.latency:
            await asyncio.sleep(4 * link.latency)
        await self._awake()

    def _meter_dht(self, op: str, key: str, size: int, ledger: Ledger) -> None:
        event = Event(self.network.time, op, self.me, key, Tag(key.split("/")[0]), "control", len(key) + size, 0)
        self.network._depart(event, Parcel(b""))
        ledger.control += len(key) + size
        self.sent.dht += 1

    # --- messages ---

    async def send(self, to: PeerId, tag: Tag, parcel: Parcel, *, kind: str = "payload", deadline: float) -> None:
        await self._awake()
        network = self.network
        if not await self._connect(to, deadline):
            raise PeerGone(f"{to} cannot be reached")
        delivery = self._leave("send", to, tag, parcel, kind)
        await self._awake()  # a fault may have struck just now
        left = 0.0
        for _ in range(delivery.copies):
            left, arrives = network._transit(self.me, to, parcel.size)
            self._schedule(arrives + delivery.delay, network.ports[to].net._deliver, self.me, tag, delivery.parcel)
        if left > network.time:
            await self._until(left, deadline)
            await self._awake()

    async def recv(self, source: PeerId, tag: Tag, *, deadline: float) -> Parcel:
        await self._awake()
        box = self._inbox[tag.iteration]
        held = box.get((source, tag))
        if isinstance(held, tuple):
            box[source, tag] = None
            return held
        if (source, tag) in box:
            raise BrokenPromise(f"{tag} from {source} was received before, or is awaited twice")
        waiting: asyncio.Future[Parcel] = asyncio.get_running_loop().create_future()
        box[source, tag] = waiting
        try:
            return await self._bounded(waiting, deadline, f"{tag.channel} from {source}")
        except DeadlineExceeded:
            box.pop((source, tag), None)  # it may be asked for again
            raise

    def arrived(self, source: PeerId, tag: Tag) -> bool:
        """Whether a message waits to be received."""
        return isinstance(self._inbox[tag.iteration].get((source, tag)), tuple)

    async def call(self, to: PeerId, channel: str, parcel: Parcel, *, kind: str = "control", deadline: float) -> Parcel:
        await self._awake()
        if not await self._connect(to, deadline):
            raise PeerGone(f"{to} cannot be reached")
        network = self.network
        delivery = self._leave("call", to, Tag(channel), parcel, kind)
        await self._awake()
        waiting: asyncio.Future[Parcel] = asyncio.get_running_loop().create_future()
        network.ports[to].calls.add(waiting)
        waiting.add_done_callback(network.ports[to].calls.discard)
        _, arrives = network._transit(self.me, to, parcel.size)
        for _ in range(delivery.copies):
            self._schedule(
                arrives + delivery.delay, network.ports[to].net._answer, self, channel, delivery.parcel, waiting
            )
        answer = await self._bounded(waiting, deadline, f"{channel} answered by {to}")
        if answer.header == REFUSED:
            raise PeerGone(f"{to} does not answer {channel}")
        return answer

    def serve(self, channel: str, handler: Handler, *, kind: str = "control") -> None:
        self.handlers[channel] = (handler, kind)

    def forget(self, iteration: int) -> None:
        for old in [key for key in self._inbox if key <= iteration]:
            del self._inbox[old]

    # --- how messages move ---

    async def _connect(self, to: PeerId, deadline: float) -> bool:
        """A dead peer refuses at once; one behind a partition is only given up at the deadline."""
        network = self.network
        there = network.ports.get(to)
        if there is None or there.dead:
            await asyncio.sleep(2 * self._port.link.latency)
            await self._awake()
            return False
        if there.island != self._port.island:
            await asyncio.sleep(max(0.0, self._loop_time(deadline) - network.time))
            await self._awake()
            return False
        return True

    def _leave(self, op: str, to: PeerId, tag: Tag, parcel: Parcel, kind: str) -> Delivery:
        payload = memoryview(parcel.payload).nbytes
        event = Event(self.network.time, op, self.me, to, tag, kind, len(parcel.header), payload)
        delivery = self.network._depart(event, parcel)
        self.sent.add(kind, parcel)
        return delivery

    def _schedule(self, when: float, callback: Callable[..., object], *args: object) -> None:
        loop = asyncio.get_running_loop()
        if when <= loop.time():
            loop.call_soon(callback, *args)
        else:
            loop.call_at(when, callback, *args)

    def _postponed(self, callback: Callable[..., object], *args: object) -> bool:
        """Whether something that reaches a process which hangs was put off until it wakes."""
        if self._port.awake_at and self._port.awake_at > self.network.time:
            self._schedule(self._port.awake_at, callback, *args)
            return True
        return False

    def _deliver(self, source: PeerId, tag: Tag, parcel: Parcel) -> None:
        network = self.network
        if self._port.dead or not network.reachable(self.me, source):
            return
        if self._postponed(self._deliver, source, tag, parcel):
            return
        box = self._inbox[tag.iteration]
        held = box.get((source, tag))
        if isinstance(held, asyncio.Future):
            if not held.done():
                held.set_result(parcel)
                box[source, tag] = None
        elif (source, tag) in box:
            return  # a duplicate
        else:
            box[source, tag] = parcel
        self.received.add("payload", parcel)

    def _answer(self, caller: VirtualNet, channel: str, parcel: Parcel, waiting: asyncio.Future[Parcel]) -> None:
        network = self.network
        if self._port.dead or not network.reachable(self.me, caller.me):
            return
        if self._postponed(self._answer, caller, channel, parcel, waiting):
            return
        self.received.add("control", parcel)
        task = asyncio.get_running_loop().create_task(self._handle(caller, channel, parcel, waiting))
        network._own(self._port, task)

    async def _handle(
        self, caller: VirtualNet, channel: str, parcel: Parcel, waiting: asyncio.Future[Parcel]
    ) -> None:
        handler, kind = self.handlers.get(channel, (_refuse, "control"))
        try:
            answer = await handler(caller.me, parcel)
        except WireError:
            answer = Parcel(REFUSED)
        await self._awake()
        delivery = self._leave("answer", caller.me, Tag(channel), answer, kind)
        await self._awake()
        if not delivery.copies:
            return
        _, arrives = self.network._transit(self.me, caller.me, answer.size)
        self._schedule(arrives + delivery.delay, caller._resolve, self.me, waiting, delivery.parcel, kind)

    def _resolve(self, source: PeerId, waiting: asyncio.Future[Parcel], answer: Parcel, kind: str) -> None:
        if waiting.done() or not self.network.reachable(self.me, source):
            return
        if not self._postponed(self._resolve, source, waiting, answer, kind):
            self.received.add(kind, answer)
            waiting.set_result(answer)

    async def _bounded(self, waiting: asyncio.Future[Parcel], deadline: float, what: str) -> Parcel:
        """Wait for a future, but only until the deadline on this peer's clock."""
        loop = asyncio.get_running_loop()

        def expire() -> None:
            if not waiting.done():
                waiting.set_exception(DeadlineExceeded(f"no {what} in time"))

        timer = loop.call_at(max(self._loop_time(deadline), loop.time()), expire)
        try:
            return await waiting
        finally:
            timer.cancel()
            if not waiting.done():
                waiting.cancel()
            await self._awake()

    async def _until(self, when: float, deadline: float) -> None:
        """Back-pressure: wait until the link has taken a message, or give up at the deadline."""
        limit = self._loop_time(deadline)
        await asyncio.sleep(max(0.0, min(when, limit) - self.network.time))
        if when > limit:
            raise DeadlineExceeded("the link is too slow")


async def _refuse(_: PeerId, __: Parcel) -> Parcel:
    return Parcel(REFUSED)


Work = Callable[[VirtualNet], Awaitable[None]]
