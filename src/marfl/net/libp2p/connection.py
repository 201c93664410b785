"""Settings of a real peer's connections: where it listens, how it is reached, and how much others may cost it."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from pydantic import Field

from marfl.errors import InputError
from marfl.net.base import PATIENCE
from marfl.settings import Network, Reach

KIB, MIB, GIB = 2**10, 2**20, 2**30
CHUNK_RANGE = (256 * KIB, MIB)
CLOCK_SKEW = 60.0  # seconds by which another peer's clock may be ahead


@dataclass(frozen=True)
class Limits:
    """What one peer may cost another. Sizes are bytes, times are seconds; nothing is allocated beyond them."""

    chunk: int = 256 * KIB  # a payload is read and written in pieces of this size
    message: int = GIB  # largest payload of one message
    header: int = 16 * MIB  # largest header: a roster of 100,000 peers fits
    sender_memory: int = GIB  # messages of one sender that wait to be received, or arrive
    memory: int = 4 * GIB  # the same for all senders together
    patience: float = PATIENCE  # how long a sender over its memory, or one that is not known yet, waits to be refused
    streams: int = 1024  # that others have open to this peer
    peer_streams: int = 64  # that one peer has open to this peer: also the requests it can have under way
    requests: int = 2000  # messages and questions of one peer in a second; as many again at once after a quiet time
    idle_streams: int = 256  # to others, kept open for the next message
    idle_seconds: float = 120.0  # a stream on which nothing is asked for so long is closed
    grace: float = 10.0  # a message may stall for so long ...
    rate: int = 4 * KIB  # ... and else comes at so many bytes a second: a narrow-band link does, a slow loris does not
    record: int = 16 * KIB  # largest DHT record
    record_ttl: float = 86_400.0  # longest life of a DHT record
    records: int = 65_536  # DHT keys that this peer stores for others

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) > 0:
                raise InputError(f"limits.{item.name}: {getattr(self, item.name)} must be more than 0")
        low, high = CHUNK_RANGE
        if not low <= self.chunk <= high:
            raise InputError(f"limits.chunk: {self.chunk} bytes; choose {low} to {high}")
        if self.peer_streams < 2:
            raise InputError(f"limits.peer_streams: {self.peer_streams} is too small; choose 2 or more")
        if self.sender_memory < self.message:
            raise InputError(f"limits.sender_memory: {self.sender_memory} is less than one message ({self.message})")


@dataclass(frozen=True)
class Libp2pSettings(Reach):
    """Where a peer listens, whom it knows at first, and how it gets through routers. The default is loopback only."""

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)  # multiaddresses; port 0 takes a free one
    join: tuple[str, ...] = ()  # /ip4/…/tcp/…/p2p/… of peers of the swarm; a first peer needs none
    identity: Path | None = None  # file with this peer's key, made when it is missing; None: a new key every time
    start_timeout: Annotated[float, Field(gt=0)] = 30.0  # of the libp2p daemon
    watches: bool = False  # only looks at a swarm: the DHT gives it nothing to keep
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.listen:
            raise InputError("listen: at least one address is needed, such as /ip4/127.0.0.1/tcp/0")
        if self.auto_relay and not self.relay:
            raise InputError("auto_relay: needs relay as well")
        if self.trusted_relays and not self.auto_relay:
            raise InputError("trusted_relays: needs auto_relay as well, or nobody uses them")

    @classmethod
    def of(cls, network: Network, listen: tuple[str, ...], identity: Path | None) -> Libp2pSettings:
        """Those of a `[network]` table; joining is done later, so that it can be tried again."""
        reach = network.reach() | ({"listen": listen} if listen else {})
        return cls(identity=identity, **reach)


def is_loopback(address: str) -> bool:
    """Whether a multiaddress is of this machine alone."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def check_free(address: str) -> None:
    """`InputError` if somebody listens there: p2pd would share the port without a word, and streams would go astray."""
    parts = re.match(r"/(ip4|ip6)/([^/]+)/(tcp|udp)/(\d+)", address)
    if parts is None or parts[4] == "0":
        return
    family = socket.AF_INET if parts[1] == "ip4" else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM if parts[3] == "tcp" else socket.SOCK_DGRAM) as probe:
        # a port that a stopped peer has just left is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(parts[3] == "tcp"))
        try:
            probe.bind((parts[2], int(parts[4])))
        except OSError as error:
            raise InputError(f"listen: {address} cannot be used: {error.strerror}") from None
