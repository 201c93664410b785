"""One peer's door to the virtual network: how it sends, receives, calls and answers, by its own clock."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from marfl.byte_kinds import ByteKind
from marfl.errors import BrokenPromise, DeadlineExceeded, NetError, PeerGone, WireError
from marfl.net.base import (
    BAD_QUESTION,
    NOT_ENTITLED,
    PATIENCE,
    Handler,
    Judge,
    Ledger,
    Parcel,
    PeerId,
    Tag,
    Verdict,
)
from marfl.net.virtual_links import Delivery, Event, Link, Port

if TYPE_CHECKING:
    from marfl.net.virtual import VirtualNetwork

REFUSED = b"\xc1refused"  # 0xc1 is never valid msgpack: no handler can answer this
GONE = "this peer's own daemon is gone"


class VirtualNet:
    """One peer's door to a `VirtualNetwork`: implements `marfl.net.base.Net`."""

    def __init__(self, network: VirtualNetwork, me: PeerId, link: Link, island: int) -> None:
        self.network = network
        self.me = me
        self.port = Port(self, link, island=island)  # its own for good: once dead, it stays dead
        self.sent = Ledger()
        self.received = Ledger()
        self.refused: Counter[str] = Counter()
        self.handlers: dict[str, tuple[Handler, ByteKind]] = {}
        self._judge: Judge | None = None
        self._waiting: dict[tuple[PeerId, Tag], Parcel] = {}  # messages that nobody can judge yet
        self._inbox: dict[int, dict[tuple[PeerId, Tag], Parcel | asyncio.Future[Parcel] | None]] = defaultdict(dict)

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

    def _meter_dht(self, op: str, key: str, size: int, ledger: Ledger) -> None:
        event = Event(self.network.time, op, self.me, key, Tag(key.split("/")[0]), ByteKind.CONTROL, len(key) + size, 0)
        self.network.depart(event, Parcel(b""))
        ledger.control += len(key) + size
        self.sent.dht += 1

    # --- messages ---

    async def send(
        self, to: PeerId, tag: Tag, parcel: Parcel, *, kind: ByteKind = ByteKind.PAYLOAD, deadline: float
    ) -> None:
        await self._awake()
        network = self.network
        if not await self._connect(to, deadline):
            raise PeerGone(f"{to} cannot be reached")
        delivery = self._leave("send", to, tag, parcel, kind)
        await self._awake()  # a fault may have struck just now
        left = 0.0
        for late in delivery.arrivals(0.0):
            left, arrives = network.transit(self.me, to, parcel.size)
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

    def arrived(self, source: PeerId, tag: Tag) -> bool:
        """Whether a message waits to be received."""
        return isinstance(self._inbox[tag.iteration].get((source, tag)), tuple)

    async def call(
        self, to: PeerId, channel: str, parcel: Parcel, *, kind: ByteKind = ByteKind.CONTROL, deadline: float
    ) -> Parcel:
        await self._awake()
        if not await self._connect(to, deadline):
            raise PeerGone(f"{to} cannot be reached")
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

    # --- how messages move ---

    async def _connect(self, to: PeerId, deadline: float) -> bool:
        """A dead peer refuses at once; one that nothing reaches is only given up at the deadline."""
        self._online()
        network = self.network
        there = network.ports.get(to)
        if there is None or there.dead or not network.online(to):
            await asyncio.sleep(2 * self.port.link.latency)
            await self._awake()
            return False
        if not network.passes(self.me, to):
            await asyncio.sleep(max(0.0, self._loop_time(deadline) - network.time))
            await self._awake()
            return False
        return True

    def _leave(self, op: str, to: PeerId, tag: Tag, parcel: Parcel, kind: ByteKind) -> Delivery:
        payload = memoryview(parcel.payload).nbytes
        event = Event(self.network.time, op, self.me, to, tag, kind, len(parcel.header), payload)
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
            self.refused[NOT_ENTITLED] += 1
        return verdict

    def _give_up(self, source: PeerId, tag: Tag) -> None:
        if self._waiting.pop((source, tag), None) is not None:
            self.refused[NOT_ENTITLED] += 1

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
            self.refused[BAD_QUESTION] += 1
            answer = Parcel(REFUSED)
        await self._awake()
        if not self.network.online(self.me):
            return  # the stream on which it was asked is broken
        delivery = self._leave("answer", caller.me, Tag(channel), answer, kind)
        await self._awake()
        if not delivery.copies:
            return
        _, arrives = self.network.transit(self.me, caller.me, answer.size)
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
