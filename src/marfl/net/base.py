"""`Net`: everything that a peer can do to the network.

The protocol is written against this interface alone. `net/virtual.py` implements it in memory with virtual time,
`net/libp2p` over real sockets; one contract suite (`tests/stages/net_contract.py`) runs over both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from marfl.byte_kinds import ByteKind

PeerId: TypeAlias = str  # the name a transport knows a peer by (libp2p: the hash of its public key)
_KINDS = frozenset(ByteKind)
Buffer: TypeAlias = bytes | memoryview  # raw bytes; a sender must not change them after `send`


class Tag(NamedTuple):
    """What a message is about. Sender and tag together name one message: the first to arrive counts."""

    channel: str  # "reduce", "gather", "distill" carry tensors; "propose", "seal", "finish", "sync", … are requests
    iteration: int = 0
    attempt: int = 0
    round: int = 0
    part: int = 0
    piece: int = 0  # of a vector that is too long for one message

    @property
    def kind(self) -> ByteKind:
        """What the tensor bytes under this tag are for: as the channel says, else an exchange's payload."""
        return ByteKind(self.channel) if self.channel in _KINDS else ByteKind.PAYLOAD


class Parcel(NamedTuple):
    """One message: a small msgpack header and, apart from it, raw tensor bytes (never joined, so never copied)."""

    header: bytes
    payload: Buffer = b""

    @property
    def size(self) -> int:
        return len(self.header) + memoryview(self.payload).nbytes


NOT_ENTITLED = "not entitled"  # asked or sent by somebody whose turn or part it is not: counted in `Net.refused`
BAD_QUESTION = "bad question"  # one that its handler could not read: counted in `Net.refused`
MOST_NAMED = 1000  # senders that refusals are remembered of


@dataclass(slots=True)
class Traffic:
    """Bytes by what they were for. Headers, rosters and DHT records are control; the rest are tensor bytes."""

    payload: int = 0
    control: int = 0
    repair: int = 0
    sync: int = 0
    distill: int = 0
    masks: int = 0  # keys, shares, seeds and signatures of masked sums
    messages: int = 0
    dht: int = 0  # DHT operations
    down: int = 0  # of the payload, what went back from whoever had added it up

    def add(self, kind: ByteKind, parcel: Parcel) -> None:
        """Count one message whose tensor bytes are of this kind."""
        self.control += len(parcel.header)
        nbytes = memoryview(parcel.payload).nbytes
        if nbytes:
            setattr(self, kind, getattr(self, kind) + nbytes)
        self.messages += 1

    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[ByteKind, int]:
        """The bytes of each kind."""
        return {kind: getattr(self, kind) for kind in ByteKind}

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def minus(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def copy(self) -> Traffic:
        return replace(self)


class Refusals(Counter[str]):
    """What was not taken, by reason; and by whom it was sent, for as many senders as are remembered.

    A sender is known by its authenticated stream or its signature, so nobody is named for another's lie. That it is
    named proves nothing: an honest peer that is late may ask for what it must not have any more.
    """

    def __init__(
        self, counts: Mapping[str, int] | None = None, admits: Callable[[PeerId], bool] = lambda _: True
    ) -> None:
        super().__init__(counts)
        self.senders: dict[PeerId, Counter[str]] = {}
        self.known: Callable[[PeerId], bool] = lambda _: False  # whether somebody takes part now: see `note`
        self._admits = admits

    def note(self, reason: str, sender: PeerId) -> None:
        """One more of this reason, from this peer.

        Names cost nothing, so after `MOST_NAMED` only reasons count; strangers without a token never fill the list. In
        an open run anybody can: there the name of whoever takes part pushes out one that does not.
        """
        self[reason] += 1
        room = MOST_NAMED if self._admits(sender) else MOST_NAMED // 2
        if sender not in self.senders and len(self.senders) >= room and self.known(sender):
            self.senders.pop(next((name for name in self.senders if not self.known(name)), ""), None)
        if sender in self.senders or len(self.senders) < room:
            self.senders.setdefault(sender, Counter())[reason] += 1

    def named(self) -> dict[PeerId, dict[str, int]]:
        """What was not taken of whom, as plain data."""
        return {sender: dict(counts) for sender, counts in self.senders.items()}


class Verdict(Enum):
    """What becomes of a message."""

    TAKE = "take"
    DROP = "drop"  # it comes too late to be of use: read and forgotten
    LATER = "later"  # nobody can tell yet: it waits, and is refused when its time is over
    REFUSE = "refuse"  # counted as `NOT_ENTITLED`


Judge: TypeAlias = Callable[[PeerId, Tag], Verdict]  # who sends what: is it taken?
PATIENCE = 10.0  # seconds for which a message waits to be judged, unless a transport has limits of its own
Handler: TypeAlias = Callable[[PeerId, Parcel], Awaitable[Parcel]]  # who asks, what: the answer


class Net(Protocol):
    """All that a peer can do to the network. Times are the peer's own monotonic seconds (`now`)."""

    me: PeerId
    sent: Traffic
    received: Traffic
    refused: Refusals  # what was not taken, by reason and by sender

    async def announce(self, key: str, value: bytes, *, ttl: float) -> None:
        """Store `value` in the DHT under `key`, with my id as the subkey."""

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        """Every subkey under `key` that has not expired, in one look-up."""

    async def send(
        self, to: PeerId, tag: Tag, parcel: Parcel, *, kind: ByteKind = ByteKind.PAYLOAD, deadline: float
    ) -> None:
        """Hand one message over. Raises PeerGone, or DeadlineExceeded. Returning does not mean it was used."""

    async def recv(self, source: PeerId, tag: Tag, *, deadline: float) -> Parcel:
        """The message with this tag from this peer, once. Raises DeadlineExceeded."""

    async def call(
        self, to: PeerId, channel: str, parcel: Parcel, *, kind: ByteKind = ByteKind.CONTROL, deadline: float
    ) -> Parcel:
        """Ask a peer and wait for its answer. Raises PeerGone, or DeadlineExceeded."""

    def serve(self, channel: str, handler: Handler, *, kind: ByteKind = ByteKind.CONTROL) -> None:
        """Answer calls on a channel, also from peers never seen before. `kind` names the answer's tensor bytes.

        A handler raises `WireError` for a question that it cannot read: that is refused, and counted.
        """

    def admit(self, judge: Judge | None) -> None:
        """From now on take only the messages that this judge lets in, and ask it again about those that wait.

        Without a judge every message is taken. What a judge goes by may change: then it is given again.
        """

    def forget(self, iteration: int) -> None:
        """Drop messages of this iteration and of all before it that nobody received."""

    def sign(self, digest: bytes) -> bytes:
        """My signature (Ed25519, 64 bytes) of 32 bytes: whoever knows my id can check it."""

    def verify(self, peer: PeerId, digest: bytes, signature: bytes) -> bool:
        """Whether this peer signed these 32 bytes."""

    @property
    def token(self) -> bytes:
        """What shows others that I may take part; empty in an open run."""

    def entitled(self, peer: PeerId, token: bytes) -> bool:
        """Whether a peer with this token may take part; in an open run everybody may."""

    def last_heard(self, peer: PeerId) -> float:
        """When bytes of a message or an answer of this peer last came, also of one that is not whole yet; or −∞."""

    def now(self) -> float: ...

    async def sleep_until(self, when: float) -> None: ...
