"""How a peer talks to the others: patiently, and never surprised by silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from marfl.byte_kinds import ByteKind
from marfl.errors import DeadlineExceeded, NetError, Unreachable
from marfl.net.base import Net, Parcel, PeerId
from marfl.protocol.pace import Pace, called
from marfl.protocol.protocol_settings import Settings

T = TypeVar("T")

DHT_FAILED = "DHT operations failed"  # counted in `Net.refused`


class Compute(Protocol):
    """Does what takes long."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class Reached(NamedTuple):
    """What came of a request."""

    answer: Parcel | None  # None: there was none in time
    gone: bool = False  # nobody is there: its connection was refused or closed, twice


class Dht:
    """The DHT as a peer uses it: one that is silent for a moment is churn, not an error.

    Every failure is counted, and the first of several in a row is said. This is the only place that decides so: a net
    raises `NetError`.
    """

    def __init__(self, net: Net) -> None:
        self.net = net
        self.say: Callable[[str], None] = lambda _: None  # hears of a silence when it begins
        self.astray: Callable[[], bool] = lambda: False  # whether I know that I am the one who finds nobody there
        self._silent = False

    async def announce(self, key: str, value: bytes, ttl: float) -> bool:
        """Whether the DHT has taken it."""
        try:
            await self.net.announce(key, value, ttl=ttl)
        except NetError as error:
            self._note(error)
            return False
        self._silent = False
        return True

    async def look_up(self, key: str) -> Mapping[PeerId, bytes] | None:
        """What lies under a key; None when the DHT does not say."""
        try:
            found = await self.net.lookup(key)
        except NetError as error:
            self._note(error)
            return None
        self._silent = False
        return found

    def _note(self, error: NetError) -> None:
        self.net.refused[DHT_FAILED] += 1
        if not self._silent:
            self._silent = True
            self.say(f"the DHT did not do what was asked ({error}); trying again")


async def at_once(work: Callable[[], T]) -> T:
    """Do what takes long here and now: in virtual time it takes none."""
    return work()


class Speaker:
    """A net, the patience with which it is used, and what is done aside."""

    def __init__(self, net: Net, settings: Settings) -> None:
        self.net, self.settings = net, settings
        self.dht = Dht(net)
        self.compute: Compute = at_once  # a real peer answers the others meanwhile
        self._words: dict[str, bytes] = {}  # my last word on every subject
        self._aside: set[asyncio.Task[Any]] = set()

    def key(self, name: str) -> str:
        """A name of this run in the DHT."""
        return f"{name}/{self.settings.run}"

    async def announce(self, name: str, value: bytes) -> bool:
        """Tell the DHT; whether it listened."""
        self._words[_subject(name)] = value
        return await self.dht.announce(self.key(name), value, self.settings.record_ttl)

    async def insist(self, name: str, value: bytes) -> None:
        """Tell the DHT, again until it listens."""
        if not await self.announce(name, value):
            await self.repeat(name, value)

    async def repeat(self, name: str, value: bytes) -> None:
        """Tell the DHT what it did not hear, until it listens or I have something newer to say on the subject."""
        while True:
            await self.net.sleep_until(self.net.now() + self.settings.takeover)
            if self._words[_subject(name)] is not value:
                return
            if await self.dht.announce(self.key(name), value, self.settings.record_ttl):
                return

    async def look_up(self, name: str) -> Mapping[PeerId, bytes]:
        """What the DHT knows under a name; nothing while it is silent."""
        return await self.dht.look_up(self.key(name)) or {}

    async def call_long(
        self, to: PeerId, channel: str, request: Parcel, pace: Pace, more: float | None = None
    ) -> Parcel:
        """Ask for much: see `called`."""
        usual = pace.usual + (self.settings.call_timeout if more is None else more)
        return await called(self.net, to, channel, request, usual, pace.extra)

    async def until(self, event: asyncio.Event, when: float) -> None:
        """Wait for an event, at most until `when` on this peer's clock."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self.net.sleep_until(when))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def within(self, work: Iterable[asyncio.Task[Any]], when: float) -> None:
        """Wait for all of these, at most until `when` on this peer's clock; what is not done then goes on."""
        pending, clock = set(work), asyncio.create_task(self.net.sleep_until(when))
        try:
            while pending and not clock.done():
                done, _ = await asyncio.wait({*pending, clock}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
        finally:
            clock.cancel()

    async def ask(self, peer: PeerId, channel: str, parcel: Parcel, kind: ByteKind = ByteKind.CONTROL) -> Parcel | None:
        """A small request, sent again when it or its answer is lost; None when there is no answer in time."""
        return (await self.reach(peer, channel, parcel, kind)).answer

    async def reach(self, peer: PeerId, channel: str, parcel: Parcel, kind: ByteKind = ByteKind.CONTROL) -> Reached:
        """A small request as in `ask`, and whether anybody is there to answer it."""
        limit = self.net.now() + self.settings.call_timeout
        refusals = 0
        while self.net.now() < limit:
            try:
                deadline = min(limit, self.net.now() + self.settings.call_timeout / 3)
                return Reached(await self.net.call(peer, channel, parcel, kind=kind, deadline=deadline))
            except DeadlineExceeded:
                continue
            except NetError as error:  # also a request that arrived spoilt, or my own daemon is gone: once more
                refusals += 1
                if refusals == 2:
                    return Reached(None, isinstance(error, Unreachable))
                await self.net.sleep_until(min(limit, self.net.now() + self.settings.poll))
        return Reached(None)

    # --- what no iteration waits for ---

    def aside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do something that no iteration waits for, or that must not stop half-way when one is cancelled."""
        task = asyncio.create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        return task

    async def rest(self, seconds: float | None = None) -> None:
        """Wait for what is done aside: before a peer leaves."""
        if self._aside:
            await asyncio.wait(self._aside, timeout=seconds)

    def drop_asides(self) -> None:
        """Once a peer has left, nothing goes on in its name."""
        for task in self._aside:
            task.cancel()


def _subject(name: str) -> str:
    """What a name is about: a later iteration's word on it makes the ones before old."""
    return name.partition("/")[0]
