"""Everything that can go wrong, as a vocabulary: a `Strike` says what befalls whom, in which phase of which iteration.

The `Injector` listens to the virtual network and strikes at the moment the victim (or, for faults without one, anybody)
reaches that phase. Nothing in the protocol knows about it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

import torch

from marfl.net.base import Parcel, PeerId
from marfl.net.virtual import Delivery, Event, Link, VirtualNetwork
from marfl.protocol.wire import pack, raw, tensor_parcel, unpack


class Fault(Enum):
    """What befalls a peer or a message."""

    CRASH_BEFORE = "the process dies before its first message of the phase"
    CRASH_HALFWAY = "the process dies half-way through its messages of the phase"
    CRASH_AFTER = "the process dies after its last message of the phase"
    HANG = "the process stands still for a while, then goes on"
    SLOW_LINK = "the peer's link becomes too slow for the phase deadlines"
    LOST = "a message is lost"
    DUPLICATED = "a message arrives twice"
    REORDERED = "messages arrive late and in another order"
    PARTITION = "the network falls in two, and heals"
    SEALER_DIES = "whoever leads the attempt dies"
    TWO_ROSTERS = "a second elector leads at the same time"
    CORRUPT = "a message holds NaN, infinity, too few bytes, another layout, another roster, or garbage"
    CLOCK_SKEW = "the peer's clock runs faster or slower, from another origin"
    LATE_JOINER = "a new peer arrives"
    STALE_REJOIN = "the process dies and comes back later with the state it had saved"


PHASES = ("sync", "announce", "seal", "reduce", "gather", "commit")  # in the order of an iteration
MASKED_PHASES = ("sync", "announce", "seal", "shares", "reduce", "gather", "unmask", "commit")  # where sums are masked
DEADLY = (Fault.CRASH_BEFORE, Fault.CRASH_HALFWAY, Fault.CRASH_AFTER, Fault.SEALER_DIES)
ON_MESSAGES = (Fault.LOST, Fault.DUPLICATED, Fault.REORDERED)  # nobody's process is at fault
NOT_IN_SYNC = (  # they need a phase with several messages, or a leader
    Fault.CRASH_HALFWAY, Fault.CRASH_AFTER, Fault.SEALER_DIES, Fault.TWO_ROSTERS, Fault.LATE_JOINER,
)  # fmt: skip

SLOW = 3000.0  # bytes per second: small requests pass, a vector does not
SLOW_LENGTH = 8000  # of the vectors that this is too slow for

_PHASE_OF = {
    "sync": "sync", "ready": "announce", "propose": "seal", "seal": "seal", "reduce": "reduce", "gather": "gather",
    "shares": "shares", "held": "unmask", "pledge": "unmask", "reveal": "unmask",
    "finish": "commit", "endorse": "commit", "head": "commit",
}  # fmt: skip


def strikeable(fault: Fault, phase: str, exchange: str) -> bool:
    """Whether this fault can strike in this phase: a zero in the soak's table then means that it was not tested."""
    if fault is Fault.CLOCK_SKEW:
        return phase == "announce"  # clocks differ from the start
    if phase == "sync":
        return fault not in NOT_IN_SYNC
    if fault in (Fault.CRASH_HALFWAY, *ON_MESSAGES, Fault.CORRUPT) and phase == "announce":
        return False  # an announcement is one DHT record, not a message between two peers
    if fault is Fault.SEALER_DIES and phase == "announce":
        return False  # nobody leads yet
    return not (exchange == "full" and phase == "gather")  # only a spare's last step


@dataclass(frozen=True)
class Strike:
    """One fault to come."""

    fault: Fault
    phase: str
    iteration: int  # or the next one, if the moment does not come in this one
    victim: PeerId | None  # None: whoever gets there first (messages), or whoever leads
    seconds: float = 30.0  # how long it lasts, where it lasts
    skip: int = 0  # messages of the phase that its sender has sent before
    others: int = 0  # messages of the phase that anybody has sent before

    @property
    def last(self) -> int:
        """After this iteration it can no longer strike."""
        return self.iteration + 1


@dataclass
class Hooks:
    """What only the harness can do."""

    restart: Callable[[PeerId, float], None]
    join: Callable[[], None]
    rival: Callable[[PeerId, int], None]
    faulty: Callable[[PeerId], None]
    until: Callable[[float], None]  # a fault lasts until then


@dataclass
class Injector:
    """Strikes when the moment comes. Plug into `VirtualNetwork.intercept`."""

    strikes: list[Strike]
    random: Random
    hooks: Hooks
    masked: bool = False  # then nobody can tell a wrong value from a right one
    hits: Counter[tuple[Fault, str]] = field(default_factory=Counter)
    _iteration: dict[PeerId, int] = field(default_factory=dict)
    _passed: Counter[tuple[PeerId | None, int, str]] = field(default_factory=Counter)
    _leader: PeerId | None = None

    def set_clocks(self, network: VirtualNetwork) -> None:
        """Clocks differ from the start: a monotonic clock never jumps."""
        for strike in [s for s in self.strikes if s.fault is Fault.CLOCK_SKEW]:
            assert strike.victim is not None
            network.skew(strike.victim, rate=self.random.uniform(0.8, 1.25), offset=self.random.uniform(-1e4, 1e4))
            self.hooks.faulty(strike.victim)
            self.hits[strike.fault, strike.phase] += 1
            self.strikes.remove(strike)

    def __call__(self, network: VirtualNetwork, event: Event, delivery: Delivery) -> None:
        if event.op == "announce" and event.tag.channel == "ready":
            self._iteration[event.source] = int(event.dest.split("/")[1])
        if event.op == "call" and event.tag.channel == "propose":
            self._leader = event.source
        phase = _PHASE_OF.get(event.tag.channel)
        if phase is None or event.op == "lookup":
            return
        # Whoever syncs is at another iteration than the rest: any will do.
        iteration = 0 if phase == "sync" else event.tag.iteration or self._iteration.get(event.source, 0)
        for strike in [s for s in self.strikes if self._due(s, event, phase, iteration)]:
            self.strikes.remove(strike)
            self._strike(network, strike, event, delivery)
        for sender in (event.source, None):  # None: anybody
            self._passed[sender, iteration, phase] += 1

    def _due(self, strike: Strike, event: Event, phase: str, iteration: int) -> bool:
        if not strike.iteration <= iteration <= strike.last and phase != "sync":
            return False
        if strike.fault in (*ON_MESSAGES, Fault.CORRUPT) and event.op not in ("send", "call", "answer"):
            return False
        if strike.fault is Fault.SEALER_DIES and self._leader is None:
            return False
        if strike.victim is not None and strike.victim != event.source:
            return False
        if strike.fault is Fault.CRASH_AFTER:
            return MASKED_PHASES.index(phase) > MASKED_PHASES.index(strike.phase) or (strike.phase == phase == "commit")
        passed = self._passed[event.source, iteration, phase], self._passed[None, iteration, phase]
        return strike.phase == phase and passed[0] >= strike.skip and passed[1] >= strike.others

    def _strike(self, network: VirtualNetwork, strike: Strike, event: Event, delivery: Delivery) -> None:
        self.hits[strike.fault, strike.phase] += 1
        victim = self._leader if strike.fault is Fault.SEALER_DIES else (strike.victim or event.source)
        assert victim is not None
        if strike.fault not in (*ON_MESSAGES, Fault.LATE_JOINER):
            self.hooks.faulty(victim)
        if strike.fault in DEADLY or strike.fault is Fault.STALE_REJOIN:
            if victim == event.source:
                delivery.copies = 0
            network.crash(victim)
            if strike.fault is Fault.STALE_REJOIN:
                self.hooks.restart(victim, strike.seconds)
        elif strike.fault in (Fault.LOST, Fault.DUPLICATED, Fault.REORDERED, Fault.CORRUPT):
            self._tamper(strike.fault, event, delivery)
        else:
            self._disturb(network, strike, victim, delivery)

    def _tamper(self, fault: Fault, event: Event, delivery: Delivery) -> None:
        """Change one message on its way."""
        if fault is Fault.LOST:
            delivery.copies = 0
        elif fault is Fault.DUPLICATED:
            delivery.copies = 2
        elif fault is Fault.REORDERED:
            delivery.delay = self.random.uniform(0.05, 1.0)
        else:
            delivery.parcel = self._spoilt(event, delivery.parcel)

    def _spoilt(self, event: Event, parcel: Parcel) -> Parcel:
        if event.tag.channel == "shares":
            return Parcel(parcel.header, self.random.randbytes(len(parcel.payload)))
        return corrupted(parcel, event.op == "send", self.random, WAYS[2:] if self.masked else WAYS)

    def _disturb(self, network: VirtualNetwork, strike: Strike, victim: PeerId, delivery: Delivery) -> None:
        """Change a peer or the whole network for a while."""
        end = network.time + strike.seconds
        loop = asyncio.get_running_loop()
        if strike.fault is Fault.HANG:
            network.hang(victim, strike.seconds)
            self.hooks.until(end)
        elif strike.fault is Fault.SLOW_LINK:
            network.relink(victim, Link(up=SLOW, down=SLOW, latency=network.link.latency))
            loop.call_at(end, network.relink, victim, network.link)
            self.hooks.until(end)
        elif strike.fault is Fault.PARTITION:
            peers = sorted(network.ports)
            away = set(self.random.sample(peers, max(1, self.random.randint(1, len(peers) // 2))))
            for peer in away:
                self.hooks.faulty(peer)
            network.partition({peer: int(peer in away) for peer in peers})
            loop.call_at(end, network.heal)
            self.hooks.until(end)
        elif strike.fault is Fault.TWO_ROSTERS:
            self.hooks.rival(victim, strike.iteration)
        elif strike.fault is Fault.LATE_JOINER:
            self.hooks.join()


WAYS = ("nan", "inf", "short", "layout", "roster", "garbage")  # to spoil a message


def corrupted(parcel: Parcel, data: bool, random: Random, ways: Sequence[str] = WAYS) -> Parcel:
    """A message spoilt in one of the ways that a receiver must notice."""
    if not data and not (parcel.payload and random.random() < 0.5):
        return Parcel(random.randbytes(random.randint(0, 60)), parcel.payload)
    vector = torch.frombuffer(bytearray(parcel.payload), dtype=torch.float32)
    if not data:  # a state with one wrong number: only its hash tells
        vector[random.randrange(vector.numel())] += 1.0
        return Parcel(parcel.header, raw(vector))
    fields = unpack("data", parcel.header)
    way = random.choice(ways)
    if way in ("nan", "inf"):
        vector[random.randrange(vector.numel())] = math.nan if way == "nan" else -math.inf
    elif way == "short":
        vector = vector[:-1]
    elif way == "layout":
        fields["layout"] = bytes(31) + b"x"
    elif way == "roster":
        fields["digest"] = bytes(31) + b"x"
    else:
        return Parcel(random.randbytes(20), parcel.payload)
    spoilt = tensor_parcel(vector, fields["digest"], fields["layout"])
    return Parcel(pack("data", **{**fields, "count": vector.numel()}), spoilt.payload)
