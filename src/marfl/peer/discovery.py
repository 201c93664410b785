"""The way into a swarm and back (discovery): keep trying, say who is here, remember who was met, compare clocks.

Records in the DHT expire by the wall clock, so a peer whose wall clock is wrong finds nobody there. Peers therefore
compare wall clocks when they meet, and now and then afterwards. Each also watches its machine's monotonic clock, which
never jumps: it tells whether this peer's wall clock was moved in between, or the other's.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack

from marfl.errors import DeadlineExceeded, InputError, NetError, PeerGone, WireError
from marfl.net.base import Net, Parcel, PeerId
from marfl.net.libp2p.admission import NotAdmitted
from marfl.net.libp2p.connection import CLOCK_SKEW
from marfl.peer.compatibility import LAYOUT_CHANNEL
from marfl.protocol.roster import NO_HASH
from marfl.protocol.speaker import Dht
from marfl.settings import Network

if TYPE_CHECKING:
    from marfl.net.libp2p.transport import Libp2pNet

RETRY = 2.0  # seconds between two rounds of knocking
LOOK_AGAIN = 1.0  # seconds between two looks at who is here
SAY_AGAIN = 10.0  # seconds between two lines of a wait for the expected peers
COMPARED = 3  # clocks at a time
SHOWN = 3  # addresses named in a line
MAX_ADDRESSES = 16  # of one peer

CLOCK_CHANNEL = "clock"
CLOCKS_KEPT = 16  # peers whose clocks are remembered, the newest
_TIME = struct.Struct(">d")
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while a laptop sleeps, as the wall clock does

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Presence:
    """What a peer says of itself in the DHT, beside the records of the protocol."""

    index: int
    layout: bytes
    addresses: tuple[str, ...]
    terms: bytes = NO_HASH  # the digest of its settings
    here: bool = True  # False: it has left

    @property
    def encoded(self) -> bytes:
        data: bytes = msgpack.packb([self.index, self.layout, self.addresses, self.terms, self.here])
        return data


def decode_presence(data: bytes) -> Presence | None:
    """What these bytes say, or None: a record that is not ours says nothing."""
    try:
        index, layout, addresses, terms, here = msgpack.unpackb(data, raw=False, max_ext_len=0)
        if not isinstance(addresses, list) or not isinstance(here, bool):
            return None
        if not isinstance(layout, bytes) or not isinstance(terms, bytes):
            return None
        return Presence(int(index), layout, tuple(str(each) for each in addresses[:MAX_ADDRESSES]), terms, here)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        return None


# --- clocks ---


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
        if len(self._others) > CLOCKS_KEPT:
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

    net.serve(CLOCK_CHANNEL, tell)


async def ask_clock(net: Net, peer: PeerId, deadline: float) -> float:
    """By how many seconds another peer's clock is ahead of mine. `NetError`, or `WireError`."""
    begun = time.time()
    answer = await net.call(peer, CLOCK_CHANNEL, Parcel(b""), deadline=deadline)
    middle = (begun + time.time()) / 2
    if len(answer.header) != _TIME.size:
        raise WireError("clock: not a time")
    (theirs,) = _TIME.unpack(answer.header)
    ahead = float(theirs - middle)
    if not abs(ahead) < 1e12:  # also not a number
        raise WireError(f"clock: {theirs} is not a time")
    return ahead


# --- the swarm ---


class Wait(NamedTuple):
    """A wait for the expected peers, while it lasts."""

    line: str  # in words
    waited: float  # seconds
    patience: float


@dataclass
class Discovery:
    """One peer's place in a swarm: whom it has met, who is here, and that the others know of it."""

    net: Libp2pNet
    dht: Dht
    run: str
    network: Network
    say: Say
    met: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)  # addresses of peers seen, newest last
    keep_met: Callable[[Mapping[PeerId, tuple[str, ...]]], None] = lambda _: None  # hears whenever that changes
    here: dict[PeerId, Presence] = field(default_factory=dict)  # who says that it is here
    _turn: int = 0
    _heard: float = -math.inf  # when the DHT last took my presence
    clock: Clock = field(default_factory=Clock)
    _said_of_clocks: set[str] = field(default_factory=set)
    wait: Wait | None = None

    def __post_init__(self) -> None:
        self.dht.say = self.say
        self.dht.astray = self.clock.astray
        serve_clock(self.net)
        self.net.acquaintances = lambda: [places[0] for places in self.met.values() if places]

    async def enter(self, given: Sequence[str], *, patience: float | None = None) -> None:
        """Get to know the swarm through `given` addresses or peers met before; a first peer has neither.

        Given addresses are tried until one answers, or until `patience` is over (`PeerGone`). `InputError` when those
        who answer do not let this peer in, or when its clock is not that of most of them: it would find nobody.
        """
        known = [where for peer, places in self.met.items() if peer != self.net.me for where in places]
        addresses = [a for a in dict.fromkeys([*given, *known]) if not a.endswith(f"/p2p/{self.net.me}")]
        begun, said = self.net.now(), ""
        while addresses:
            failed = await self.net.join(addresses)
            if len(failed) < len(addresses):
                there = [a for a in addresses if a not in failed]
                await self._knock(there)
                await self.compare_clocks([a.rpartition("/p2p/")[2] for a in there])
                if wrong := far_off(self.clock.ahead):
                    raise InputError(f"clock: {in_words(*wrong)}; set it right: records expire by it")
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
            except NotAdmitted:
                needs = "the run is closed: it needs a token of its authority for this peer (token, authority)"
                raise InputError(f"join: {address} refuses this peer; {needs}") from None
            except (PeerGone, DeadlineExceeded):
                continue  # it is gone by now, or slow: that is not a refusal

    async def compare_clocks(self, peers: Iterable[PeerId]) -> None:
        """Ask these what time it is, and say whose clock is wrong: mine, if most differ."""
        found: dict[PeerId, float] = {}
        for peer in list(peers)[:COMPARED]:
            try:
                found[peer] = await ask_clock(self.net, peer, self.net.now() + self.network.call_timeout)
            except (NetError, WireError):
                continue  # it does not say
            self.clock.note(peer, found[peer])
        if wrong := far_off(self.clock.ahead):
            self._say_once("mine", f"{in_words(*wrong)}: it finds no records of the others, and decides nothing alone")
            return
        self._said_of_clocks.discard("mine")
        for peer, seconds in found.items():
            if abs(seconds) > CLOCK_SKEW:
                self._say_once(peer, in_words(peer, seconds))

    def _say_once(self, subject: str, line: str) -> None:
        if subject not in self._said_of_clocks:
            self._said_of_clocks.add(subject)
            self.say(line)

    async def announce(self, presence: Presence) -> None:
        """Say that I am here, or gone; where the DHT does not listen, `stay` says it again."""
        if await self.dht.announce(self._key, presence.encoded, self.network.record_ttl):
            self._heard = self.net.now()

    async def look(self) -> dict[PeerId, Presence]:
        """Everybody who says that it is here, myself included if I did; as before while the DHT is silent."""
        records = await self.dht.look_up(self._key)
        if records is None:
            return self.here
        found = {peer: decode_presence(value) for peer, value in records.items()}
        self.here = {peer: presence for peer, presence in found.items() if presence is not None and presence.here}
        seen = {peer: p.addresses for peer, p in self.here.items() if peer != self.net.me and p.addresses}
        if any(self.met.get(peer) != addresses for peer, addresses in seen.items()):
            self.met = {peer: old for peer, old in self.met.items() if peer not in seen} | seen
            self.keep_met(self.met)
        return self.here

    async def wait_for(self, count: int, role: str) -> int:
        """Until so many are here, or `start_timeout` is over; how many there are. Whoever comes later still joins."""
        begun, patience, said, say_at = self.net.now(), self.network.start_timeout, -1, 0.0
        while len(await self.look()) < count and (waited := self.net.now() - begun) < patience:
            line = f"waiting for {count} peers {role}: {len(self.here)} here, {waited:.0f} of {patience:.0f} s"
            self.wait = Wait(line, waited, patience)
            if said != len(self.here) or waited >= say_at:
                said, say_at = len(self.here), waited + SAY_AGAIN
                self.say(line)
            await asyncio.sleep(LOOK_AGAIN)
        self.wait = None
        if len(self.here) < count:
            self.say(f"only {len(self.here)} of {count} peers came in {patience:g} s: going on without the others")
        return len(self.here)

    async def stay(self, mine: Presence) -> None:
        """Run for ever: announce this peer, look who is here, dial those who have gone, and one peer more in turn."""
        while True:
            unheard = self.net.now() - self._heard > self.network.record_ttl / 3
            await self._pause(min(RETRY, self.network.refresh) if unheard else self.network.refresh)
            if self.net.now() - self._heard > self.network.record_ttl / 3:
                await self.announce(mine)
            await self.look()
            await self.compare_clocks(self._next_clocks())
            await self.net.join(_first(self.met, self.met.keys() - self.here.keys()))
            await self.net.join(self._next_door())

    async def _pause(self, seconds: float) -> None:
        """So long, or until something has happened after which nobody may know that I am here.

        That is a daemon which died and is back, or a clock that was moved.
        """
        limit = self.net.now() + seconds
        while (left := limit - self.net.now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_AGAIN)):
                    await self.net.returned.wait()
            moved = self.clock.jump()
            if moved:
                self.say(f"this peer's clock was moved by {moved:+.0f} seconds while it ran")
            if moved or self.net.returned.is_set():
                self.net.returned.clear()
                self._heard = -math.inf
                return

    def _next_clocks(self) -> list[PeerId]:
        """A few others, in turn."""
        others = sorted((self.met.keys() | self.here.keys()) - {self.net.me})
        first = self._turn % len(others) if others else 0
        return [*others[first:], *others[:first]][:COMPARED]

    def _next_door(self) -> list[str]:
        """One peer met, in turn, here or not: a record outlives a link, so only a knock tells that a network healed."""
        self._turn += 1
        return [self.met[peer][0] for peer in sorted(self.met)[self._turn % len(self.met) :][:1]] if self.met else []

    @property
    def _key(self) -> str:
        return f"peers/{self.run}"


async def unless_lost(
    net: Libp2pNet, work: Coroutine[Any, Any, T], broken: asyncio.Future[InputError] | None = None
) -> T:
    """Do something, or raise `NetError` as soon as this peer has lost its own p2p daemon for good.

    `broken` is done when something else ends it, such as a strategy that cannot go on.
    """
    task = asyncio.create_task(work)
    try:
        either: set[asyncio.Future[Any]] = {task, net.lost, broken or net.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if broken is not None and broken.done():
            raise broken.result()
        if not task.done():
            raise NetError(net.lost.result())
    finally:
        task.cancel()
    return await task


def _first(met: Mapping[PeerId, tuple[str, ...]], peers: Iterable[PeerId]) -> list[str]:
    return [met[peer][0] for peer in sorted(peers)[:SHOWN]]


def layouts(here: Mapping[PeerId, Presence], me: PeerId) -> dict[PeerId, bytes]:
    """The hash of the layout that every other peer announces."""
    return {peer: presence.layout for peer, presence in here.items() if peer != me}


def terms_shown(here: Mapping[PeerId, Presence], me: PeerId) -> dict[PeerId, bytes]:
    """The digest of every other peer's settings."""
    return {peer: presence.terms for peer, presence in here.items() if peer != me}
