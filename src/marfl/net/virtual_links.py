"""What joins virtual peers: their links, the messages on them, and the log that counts every byte."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from marfl.byte_kinds import ByteKind
from marfl.net.base import Parcel, PeerId, Tag

if TYPE_CHECKING:
    from marfl.net.virtual_door import VirtualNet


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
class View:
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
    view: View = View()
    rate: float = 1.0  # of its clock
    offset: float = 0.0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    calls: set[asyncio.Future[Parcel]] = field(default_factory=set)  # others wait for its answers
    asked: set[asyncio.Future[Parcel]] = field(default_factory=set)  # it waits for others' answers
    dead: bool = False
