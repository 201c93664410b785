"""A network in memory, in virtual time: deterministic, seeded, and as fast as the machine can compute.

`VirtualNetwork` joins any number of peers with links (bandwidth, latency, jitter, loss), meters every byte, and can
crash, hang, slow down, cut off (in one direction, too) or bring back any of them. `VirtualNet` is one peer's end
of it: how it sends, receives, calls and answers, by its own clock. Time is that of a `VirtualLoop`. The same protocol
code runs over it and over real sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from marfl.byte_kinds import ByteKind
from marfl.errors import BrokenPromise, DeadlineExceeded, NetError, PeerGone, Unreachable, WireError
from marfl.net.base import (
    BAD_QUESTION,
    NOT_ENTITLED,
    PATIENCE,
    Handler,
    Judge,
    Parcel,
    PeerId,
    Refusals,
    Tag,
    Traffic,
    Verdict,
)
from marfl.net.virtual_clock import VirtualLoop, run_virtual

T = TypeVar("T")

Stored = tuple[float, bytes, float]  # when it was announced, what, and when it expires
VERSIONS = 8  # of a record, for those who see old ones
REFUSED = b"\xc1refused"  # 0xc1 is never valid msgpack: no handler can answer this
GONE = "this peer's own daemon is gone"

# Called before a message leaves (or a DHT operation starts); may crash or hang peers, and change the delivery.
Interceptor = Callable[["VirtualNetwork", "Departure", "Delivery"], None]


@dataclass(frozen=True)
class Link:
    """A peer's access to the network. Bytes per second, seconds, and the share of messages sent twice over."""

    up: float = float("inf")
    down: float = float("inf")
    latency: float = 0.0  # one way, this end
    jitter: float = 0.0  # up to so much more, uniformly
    loss: float = 0.0  # a lost message is sent again after a time-out, as a reliable transport does
    retransmit: float = 0.2


class Departure(NamedTuple):
    """One line of the network's log: bytes that left a peer."""

    time: float
    op: str  # "send", "call", "answer", "announce", "lookup"
    source: PeerId
    dest: PeerId
    tag: Tag
    kind: ByteKind
    header: int
    payload: int


@dataclass
class Delivery:
    """What becomes of one message: a fault injector may change it."""

    parcel: Parcel
    copies: int = 1
    delay: float = 0.0
    later: float = 0.0  # each further copy arrives so much after the one before

    def arrivals(self, first: float) -> list[float]:
        """When its copies arrive, if the first would without a fault."""
        return [first + self.delay + copy * self.later for copy in range(self.copies)]


@dataclass(frozen=True)
class DhtView:
    """What a peer sees of the DHT where its replicas are behind."""

    until: float = 0.0
    lag: float = 0.0  # it sees what was there so many seconds ago
    hidden: frozenset[PeerId] = frozenset()  # whose records it does not find
    refuses: bool = False  # no node takes its announcements


@dataclass
class Port:
    """What the network knows of one peer."""

    net: VirtualNet
    link: Link
    up_free: float = 0.0
    down_free: float = 0.0
    island: int = 0  # partitions: only peers of one island reach each other
    awake_at: float = 0.0
    dht_back_at: float = 0.0
    daemon_back_at: float = 0.0  # until then its process lives without a network
    view: DhtView = DhtView()
    rate: float = 1.0  # of its clock
    offset: float = 0.0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    calls: set[asyncio.Future[Parcel]] = field(default_factory=set)  # others wait for its answers
    asked: set[asyncio.Future[Parcel]] = field(default_factory=set)  # it waits for others' answers
    dead: bool = False


class VirtualNetwork:
    """The world that virtual peers share."""

    def __init__(self, seed: int = 0, link: Link | None = None, *, log: bool = True) -> None:
        self.link = link or Link()
        self.random = random.Random(seed)
        self.ports: dict[PeerId, Port] = {}
        self.dht: dict[str, dict[PeerId, tuple[bytes, float]]] = defaultdict(dict)
        self._told: dict[tuple[str, PeerId], list[Stored]] = {}  # the last few records under each subkey
        self.cuts: dict[tuple[PeerId, PeerId], float] = {}  # (from, to): until when nothing passes
        self.events: list[Departure] | None = [] if log else None
        self.intercept: Interceptor | None = None
        self.tokens: dict[PeerId, bytes] = {}  # of a closed run: who may take part, and what shows it

    @property
    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def join(self, peer: PeerId, link: Link | None = None) -> VirtualNet:
        """The `Net` of this peer; a crashed peer comes back the same way."""
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
        _break(port.calls, Unreachable, f"{peer} vanished")

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
        self.ports[peer].view = DhtView(self.time + seconds, lag, frozenset(hidden), refuses)

    def sever(self, peer: PeerId, seconds: float) -> None:
        """The peer's own daemon is gone for so long: its streams break; its process and memory live on."""
        port = self.ports[peer]
        port.daemon_back_at = max(port.daemon_back_at, self.time + seconds)
        _break(port.calls, Unreachable, f"{peer} vanished")
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

    def depart(self, event: Departure, parcel: Parcel) -> Delivery:
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


@lru_cache(maxsize=16_384)
def _key(peer: PeerId) -> Ed25519PrivateKey:
    """A virtual peer's key follows from its name: whoever knows the name can check what it signed."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"virtual peer " + peer.encode()).digest())


@lru_cache(maxsize=16_384)
def _public_key(peer: PeerId) -> Ed25519PublicKey:
    return _key(peer).public_key()


@lru_cache(maxsize=16_384)
def _is_signed(peer: PeerId, digest: bytes, signature: bytes) -> bool:
    """Cached: peers of one process look at a signature once."""
    try:
        _public_key(peer).verify(signature, digest)
    except InvalidSignature:
        return False
    return True


class VirtualNet:
    """One peer's end of a `VirtualNetwork`: implements `marfl.net.base.Net`."""

    def __init__(self, network: VirtualNetwork, me: PeerId, link: Link, island: int) -> None:
        self.network = network
        self.me = me
        self.port = Port(self, link, island=island)  # its own for good: once dead, it stays dead
        self.sent = Traffic()
        self.received = Traffic()
        self.refused = Refusals()
        self.handlers: dict[str, tuple[Handler, ByteKind]] = {}
        self._judge: Judge | None = None
        self._waiting: dict[tuple[PeerId, Tag], Parcel] = {}  # messages that nobody can judge yet
        self._inbox: dict[int, dict[tuple[PeerId, Tag], Parcel | asyncio.Future[Parcel] | None]] = defaultdict(dict)
        self._arrivals: dict[PeerId, float] = {}  # when a peer's last message is here whole

    # --- keys ---

    def sign(self, digest: bytes) -> bytes:
        return _key(self.me).sign(digest)

    def verify(self, peer: PeerId, digest: bytes, signature: bytes) -> bool:
        return _is_signed(peer, digest, signature)

    @property
    def token(self) -> bytes:
        return self.network.tokens.get(self.me, b"")

    def entitled(self, peer: PeerId, token: bytes) -> bool:
        """The tokens of a closed run are given to the network; without any the run is open."""
        return not self.network.tokens or (token != b"" and token == self.network.tokens.get(peer))

    # --- time ---

    def now(self) -> float:
        port = self.port
        return self.network.time * port.rate + port.offset

    def _loop_time(self, mine: float) -> float:
        port = self.port
        return (mine - port.offset) / port.rate + 1e-6  # a deadline has surely passed on the peer's own clock as well

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, self._loop_time(when) - self.network.time))
        await self._awake()

    async def _awake(self) -> None:
        """Come back only when this process runs: not while it hangs, and never once it is dead."""
        port = self.port
        while port.awake_at and not port.dead and port.awake_at > self.network.time:
            await asyncio.sleep(port.awake_at - self.network.time)
        if port.dead:
            raise asyncio.CancelledError

    def _online(self) -> None:
        if self.port.daemon_back_at > self.network.time:
            raise NetError(GONE)

    # --- the DHT ---

    async def announce(self, key: str, value: bytes, *, ttl: float) -> None:
        await self._awake()
        self._online()
        self._meter_dht("announce", key, len(value), self.sent)
        await self._hop()
        view = self.port.view
        if view.refuses and view.until > self.network.time:
            raise NetError(f"no node of the DHT takes {key}")
        self.network.store(key, self.me, value, self.network.time + ttl)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        await self._awake()
        self._online()
        await self._hop()
        found = self.network.find(key, self.me)
        self._meter_dht("lookup", key, sum(map(len, found.values())), self.received)
        return found

    async def _hop(self) -> None:
        """A DHT operation takes a few network hops."""
        link = self.port.link
        if link.latency:
            await asyncio.sleep(4 * link.latency)
        await self._awake()
        self._online()
        if self.port.dht_back_at > self.network.time:
            raise DeadlineExceeded("the DHT does not answer")

    def _meter_dht(self, op: str, key: str, size: int, ledger: Traffic) -> None:
        event = Departure(
            self.network.time, op, self.me, key, Tag(key.split("/")[0]), ByteKind.CONTROL, len(key) + size, 0
        )
        self.network.depart(event, Parcel(b""))
        ledger.control += len(key) + size
        self.sent.dht += 1

    # --- messages ---

    async def send(
        self, to: PeerId, tag: Tag, parcel: Parcel, *, kind: ByteKind = ByteKind.PAYLOAD, deadline: float
    ) -> None:
        await self._awake()
        network = self.network
        await self._connect(to, deadline)
        delivery = self._leave("send", to, tag, parcel, kind)
        await self._awake()  # a fault may have struck just now
        left = 0.0
        for late in delivery.arrivals(0.0):
            left, arrives = network.transit(self.me, to, parcel.size)
            network.ports[to].net._expect(self.me, arrives)
            self._schedule(arrives + late, network.ports[to].net._deliver, self.me, tag, delivery.parcel)
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
        finally:
            if box.get((source, tag)) is waiting:
                del box[source, tag]  # it may be asked for again
            del waiting  # see `_bounded`

    @property
    def boxes(self) -> tuple[int, ...]:
        """Iterations of which something is kept."""
        return tuple(self._inbox)

    async def call(
        self, to: PeerId, channel: str, parcel: Parcel, *, kind: ByteKind = ByteKind.CONTROL, deadline: float
    ) -> Parcel:
        await self._awake()
        await self._connect(to, deadline)
        network = self.network
        delivery = self._leave("call", to, Tag(channel), parcel, kind)
        await self._awake()
        waiting: asyncio.Future[Parcel] = asyncio.get_running_loop().create_future()
        for waits in (network.ports[to].calls, self.port.asked):
            waits.add(waiting)
            waiting.add_done_callback(waits.discard)
        _, arrives = network.transit(self.me, to, parcel.size)
        for when in delivery.arrivals(arrives):
            self._schedule(when, network.ports[to].net._answer, self, channel, delivery.parcel, waiting)
        try:
            answer = await self._bounded(waiting, deadline, f"{channel} answered by {to}")
        finally:
            del waiting  # see `_bounded`
        if answer.header == REFUSED:
            raise PeerGone(f"{to} does not answer {channel}")
        return answer

    def serve(self, channel: str, handler: Handler, *, kind: ByteKind = ByteKind.CONTROL) -> None:
        self.handlers[channel] = (handler, kind)

    def admit(self, judge: Judge | None) -> None:
        self._judge = judge
        waiting, self._waiting = self._waiting, {}
        for (source, tag), parcel in waiting.items():
            self._admitted(source, tag, parcel)

    def forget(self, iteration: int) -> None:
        for old in [key for key in self._inbox if key <= iteration]:
            del self._inbox[old]

    def last_heard(self, peer: PeerId) -> float:
        when = self._arrivals.get(peer)
        if when is None:
            return -math.inf
        return min(self.network.time, when) * self.port.rate + self.port.offset

    # --- how messages move ---

    def _expect(self, source: PeerId, arrives: float) -> None:
        """A message of this peer is on its way: until it is here, its bytes keep coming."""
        self._arrivals[source] = max(arrives, self._arrivals.get(source, arrives))

    async def _connect(self, to: PeerId, deadline: float) -> None:
        """`PeerGone` if it fails: a dead peer refuses at once; one that nothing reaches is given up at the deadline."""
        self._online()
        network = self.network
        there = network.ports.get(to)
        if there is None or there.dead or not network.online(to):
            await asyncio.sleep(2 * self.port.link.latency)
            await self._awake()
            raise Unreachable(f"{to} cannot be reached")
        if not network.passes(self.me, to):
            await asyncio.sleep(max(0.0, self._loop_time(deadline) - network.time))
            await self._awake()
            raise PeerGone(f"{to} cannot be reached")

    def _leave(self, op: str, to: PeerId, tag: Tag, parcel: Parcel, kind: ByteKind) -> Delivery:
        payload = memoryview(parcel.payload).nbytes
        event = Departure(self.network.time, op, self.me, to, tag, kind, len(parcel.header), payload)
        delivery = self.network.depart(event, parcel)
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
        if self.port.awake_at and self.port.awake_at > self.network.time:
            self._schedule(self.port.awake_at, callback, *args)
            return True
        return False

    def _deliver(self, source: PeerId, tag: Tag, parcel: Parcel) -> None:
        network = self.network
        if self.port.dead or not network.passes(source, self.me):
            return
        if self._postponed(self._deliver, source, tag, parcel):
            return
        verdict = self._admitted(source, tag, parcel)
        if verdict is Verdict.LATER:
            self._schedule(network.time + PATIENCE, self._give_up, source, tag)

    def _admitted(self, source: PeerId, tag: Tag, parcel: Parcel) -> Verdict:
        """Take a message, or do with it what the judge says."""
        verdict = self._judge(source, tag) if self._judge else Verdict.TAKE
        if verdict is Verdict.TAKE:
            self._take(source, tag, parcel)
        elif verdict is Verdict.LATER:
            self._waiting.setdefault((source, tag), parcel)
        elif verdict is Verdict.DROP:
            self.received.add(tag.kind, parcel)
        else:
            self.refused.note(NOT_ENTITLED, source)
        return verdict

    def _give_up(self, source: PeerId, tag: Tag) -> None:
        if self._waiting.pop((source, tag), None) is not None:
            self.refused.note(NOT_ENTITLED, source)

    def _take(self, source: PeerId, tag: Tag, parcel: Parcel) -> None:
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
        self.received.add(tag.kind, parcel)

    def _answer(self, caller: VirtualNet, channel: str, parcel: Parcel, waiting: asyncio.Future[Parcel]) -> None:
        network = self.network
        if self.port.dead or not network.passes(caller.me, self.me):
            return
        if self._postponed(self._answer, caller, channel, parcel, waiting):
            return
        self.received.add(ByteKind.CONTROL, parcel)
        task = asyncio.get_running_loop().create_task(self._handle(caller, channel, parcel, waiting))
        network.own(self.port, task)

    async def _handle(self, caller: VirtualNet, channel: str, parcel: Parcel, waiting: asyncio.Future[Parcel]) -> None:
        handler, kind = self.handlers.get(channel, (_refuse, ByteKind.CONTROL))
        try:
            answer = await handler(caller.me, parcel)
        except WireError:
            self.refused.note(BAD_QUESTION, caller.me)
            answer = Parcel(REFUSED)
        await self._awake()
        if not self.network.online(self.me):
            return  # the stream on which it was asked is broken
        delivery = self._leave("answer", caller.me, Tag(channel), answer, kind)
        await self._awake()
        if not delivery.copies:
            return
        _, arrives = self.network.transit(self.me, caller.me, answer.size)
        caller._expect(self.me, arrives)
        for when in delivery.arrivals(arrives):
            self._schedule(when, caller._resolve, self.me, waiting, delivery.parcel, kind)

    def _resolve(self, source: PeerId, waiting: asyncio.Future[Parcel], answer: Parcel, kind: ByteKind) -> None:
        if waiting.done() or not self.network.passes(source, self.me):
            return
        if not self._postponed(self._resolve, source, waiting, answer, kind):
            self.received.add(kind, answer)
            waiting.set_result(answer)

    async def _bounded(self, waiting: asyncio.Future[Parcel], deadline: float, what: str) -> Parcel:
        """Wait for a future, but only until the deadline on this peer's clock."""
        loop = asyncio.get_running_loop()
        timer = loop.call_at(max(self._loop_time(deadline), loop.time()), _expire, waiting, f"no {what} in time")
        try:
            return await waiting
        finally:
            timer.cancel()
            if not waiting.done():
                waiting.cancel()
            del waiting  # its error names this frame, and every frame above: they would keep each other
            await self._awake()

    async def _until(self, when: float, deadline: float) -> None:
        """Back-pressure: wait until the link has taken a message, or give up at the deadline."""
        limit = self._loop_time(deadline)
        await asyncio.sleep(max(0.0, min(when, limit) - self.network.time))
        if when > limit:
            raise DeadlineExceeded("the link is too slow")


def _expire(waiting: asyncio.Future[Parcel], why: str) -> None:
    if not waiting.done():
        waiting.set_exception(DeadlineExceeded(why))


async def _refuse(_: PeerId, __: Parcel) -> Parcel:
    return Parcel(REFUSED)


def _break(waits: Iterable[asyncio.Future[Parcel]], error: type[NetError], why: str) -> None:
    for waiting in list(waits):
        if not waiting.done():
            waiting.set_exception(error(why))


__all__ = ["Delivery", "Departure", "Interceptor", "Link", "VirtualLoop", "VirtualNet", "VirtualNetwork", "run_virtual"]
