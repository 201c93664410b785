"""Everything that can go wrong with a virtual swarm, and which of it happens in the world of a seed.

A `Fault` is a kind of failure. A `Strike` is one failure to come: which fault hits whom, in which phase and iteration.
`schedule` draws the strikes of a world from its seed, `conditions` draws its size, its clocks and who takes part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from random import Random

import torch

from marfl.net.base import Parcel, PeerId
from marfl.protocol.messages import Data, SignedData
from marfl.protocol.protocol_settings import EXCHANGES
from marfl.protocol.tensors import CLAIM, raw


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
    PARTITION = "the network falls in two or three, half-way in others, and heals"
    SEALER_DIES = "whoever leads the attempt dies"
    TWO_ROSTERS = "other electors lead at the same time"
    CORRUPT = "the peer's messages hold NaN, infinity, too few bytes, another layout, another roster, or garbage"
    CLOCK_SKEW = "the peer's clock runs faster or slower, from another origin"
    LATE_JOINER = "a new peer arrives"
    STALE_REJOIN = "the process dies and comes back later with the state it had saved; in a power cut, many do"
    DHT_SILENT = "the DHT does not answer the peer for a while"
    STRAGGLER = "the peer trains for so long that the others go on without it"
    ONE_WAY = "the peer hears others that do not hear it, or the other way round, for a while"
    PARTIAL_CUT = "some pairs of peers cannot talk for a while, all others can"
    LOSSY = "for a while every message, or every one of the peer's, may be lost"
    ECHO = "for a while every message may come again, seconds later"
    LATE = "for a while every message, or every one of the peer's, may come seconds late"
    DHT_STALE = "for a while the DHT shows the peer old records, or not everybody's, or takes none of its own"
    DAEMON_DIES = "the peer's own daemon is gone for a while; its process lives on"
    OLD_BACKUP = "the process dies and comes back with an older state than it had saved, and perhaps with older votes"


class Backup(Enum):
    """What a process comes back with."""

    LAST = "the state that it saved last, and all its votes"
    STATE = "an older state, and all its votes"
    WHOLE = "an older state, and the votes as they were then"


PHASES = ("sync", "announce", "seal", "reduce", "gather", "commit")  # in the order of an iteration
MASKED_PHASES = ("sync", "announce", "seal", "shares", "reduce", "gather", "unmask", "commit")  # where sums are masked
DEADLY = (Fault.CRASH_BEFORE, Fault.CRASH_HALFWAY, Fault.CRASH_AFTER, Fault.SEALER_DIES)
ON_MESSAGES = (Fault.LOST, Fault.DUPLICATED, Fault.REORDERED)  # nobody's process is at fault
WEATHER = (Fault.LOSSY, Fault.ECHO, Fault.LATE)  # what befalls messages again and again
FIRST_FAULTS = tuple(Fault)[:17]  # all that the dice of the first seeds knew
NOT_IN_SYNC = (  # they need a phase with several messages, or a leader
    Fault.CRASH_HALFWAY, Fault.CRASH_AFTER, Fault.SEALER_DIES, Fault.TWO_ROSTERS, Fault.LATE_JOINER,
)  # fmt: skip

SLOW = 3000.0  # bytes per second: small requests pass, a vector does not
SLOW_LENGTH = 8000  # of the vectors that this is too slow for
WAYS = ("nan", "inf", "short", "layout", "roster", "garbage")  # in which a message is spoilt

PHASE_OF = {  # a message's channel
    "sync": "sync", "ready": "announce", "propose": "seal", "seal": "seal", "reduce": "reduce", "gather": "gather",
    "shares": "shares", "held": "unmask", "pledge": "unmask", "reveal": "unmask",
    "finish": "commit", "endorse": "commit", "head": "commit",
}  # fmt: skip


def strikeable(fault: Fault, phase: str, exchange: str) -> bool:
    """Whether this fault can strike in this phase: a zero in the soak's table then means that it was not tested."""
    if fault in (Fault.CLOCK_SKEW, Fault.STRAGGLER):
        return phase == "announce"  # clocks differ from the start, and training comes before
    if fault in (Fault.DHT_SILENT, Fault.DHT_STALE):
        return phase in ("announce", "commit")  # when the DHT is used
    if phase == "sync":
        return fault not in NOT_IN_SYNC
    if fault is Fault.CRASH_HALFWAY and phase == "announce":
        return False  # an announcement is one message
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


def corrupted(parcel: Parcel, data: bool, way: str, random: Random) -> Parcel:
    """A message spoilt in one of the `WAYS`, each of which a receiver must notice."""
    if not data and not (parcel.payload and random.random() < 0.5):
        return Parcel(random.randbytes(random.randint(0, 60)), parcel.payload)
    vector = torch.frombuffer(bytearray(parcel.payload), dtype=torch.float32)
    if not data:  # a state with one wrong number: only its hash tells
        vector[random.randrange(vector.numel())] += 1.0
        return Parcel(parcel.header, raw(vector))
    header = (SignedData if parcel.header.startswith(CLAIM) else Data).decode(parcel.header)
    if way in ("nan", "inf"):
        vector[random.randrange(vector.numel())] = math.nan if way == "nan" else -math.inf
    elif way == "short":
        vector = vector[:-1]
    elif way == "layout":
        header = replace(header, layout=bytes(31) + b"x")
    elif way == "roster":
        header = replace(header, digest=bytes(31) + b"x")
    else:
        return Parcel(random.randbytes(20), parcel.payload)
    return replace(header, count=vector.numel()).parcel(raw(vector))


# --- which faults strike a world ---

PHASES_OF = {"fp32": PHASES, "fixed": PHASES, "masked": MASKED_PHASES}  # by how values travel
LATEST = 12  # the last iteration in which something may begin, in the longest worlds
WITNESS, IDLE, MEMBER = "only votes", "helps to aggregate", "brings an update"  # a peer's part in an iteration

First = tuple[Fault, str, str]  # the fault, phase and exchange that a seed stands for


@lru_cache
def combinations(wire: str, faults: tuple[Fault, ...]) -> tuple[First, ...]:
    """Every fault in every phase where it can strike, under every exchange."""
    return tuple(
        (fault, phase, exchange)
        for exchange in EXCHANGES
        for phase in PHASES_OF[wire]
        for fault in faults
        if strikeable(fault, phase, exchange)
    )


@dataclass(frozen=True)
class Conditions:
    """What a world is like apart from its strikes. Each has dice of its own."""

    seed: int = 0
    size: int = 0  # of a large world; 0: as the seed's other dice say
    delay: int = 0  # iterations before the first strike may fall
    more: int = 0  # strikes that may fall at any time
    clocks: bool = False  # everybody's clock has its own origin, and is a little fast or slow
    watching: float = 0.0  # the share of those who only vote, in each iteration
    idle: float = 0.0  # and of those who bring nothing and help to aggregate
    empty: frozenset[int] = frozenset()  # iterations to which nobody brings anything
    slowest: float = 1.0  # how many times longer than the others a slow peer trains

    def part(self, index: int, iteration: int) -> str:
        """What a peer does in an iteration."""
        dice = Random(f"part of {index} in {iteration} of {self.seed}")
        if iteration in self.empty:
            return dice.choice([WITNESS, IDLE])
        if index == 0 or not (self.watching or self.idle):
            return MEMBER  # somebody brings something
        drawn = dice.random()
        return WITNESS if drawn < self.watching else IDLE if drawn < self.watching + self.idle else MEMBER

    def pace(self, index: int) -> float:
        """How many times longer than the quickest a peer trains: most are alike."""
        dice = Random(f"pace of {index} of {self.seed}")
        return dice.uniform(1.0, self.slowest) if dice.random() < 0.25 else 1.0


def conditions(seed: int) -> Conditions:
    """Most worlds are small, short and everybody takes part; some are not."""
    parts, later, empty = (Random(f"{what} of {seed}") for what in ("parts", "strikes", "empty iterations"))
    large = Random(f"size of {seed}")
    return Conditions(
        seed,
        size=large.choice([20, 27, 33, 40]) if large.random() < 0.02 else 0,
        delay=later.randint(1, LATEST - 3) if later.random() < 0.1 else 0,
        more=later.randint(1, 4) if later.random() < 0.1 else 0,
        clocks=Random(f"clocks of {seed}").random() < 0.3,
        watching=parts.choice([0.0, 0.0, 0.0, 0.2, 0.5]),
        idle=parts.choice([0.0, 0.0, 0.0, 0.2, 0.5]),
        empty=frozenset(empty.sample(range(1, 8), empty.randint(1, 3)) if empty.random() < 0.1 else ()),
    )


def schedule(
    random: Random, names: list[PeerId], wire: str, first: First, faults: Sequence[Fault] = tuple(Fault)
) -> list[Strike]:
    """One to four faults in the first three iterations; mostly few enough that nobody else may notice."""
    fault, phase, exchange = first
    strikes = [_strike(random, fault, phase, names, names, since=1)]
    if phase == "sync":  # somebody must come who has something to catch up with
        strikes.append(Strike(Fault.LATE_JOINER, "announce", random.choice([2, 3]), victim=None))
    spared = [name for name in names if name != strikes[0].victim]  # the first fault is to find its victim alive
    for _ in range(random.choice([0, 0, 0, 1, 2, 3])):
        strikes.append(_any(random, faults, wire, exchange, names, spared, since=strikes[0].iteration))
    return strikes


def delayed(
    seed: int, around: Conditions, strikes: list[Strike], names: list[PeerId], wire: str, exchange: str
) -> list[Strike]:
    """The same strikes later, and more of them at any time."""
    random = Random(f"more strikes of {seed}")
    late = [s if s.fault is Fault.CLOCK_SKEW else replace(s, iteration=s.iteration + around.delay) for s in strikes]
    spared = [name for name in names if name != strikes[0].victim]
    for _ in range(around.more):
        strike = _any(random, tuple(Fault), wire, exchange, names, spared, since=1)
        when = 1 if strike.fault is Fault.CLOCK_SKEW else random.randint(strikes[0].iteration, LATEST)
        late.append(replace(strike, iteration=when))
    return late


def _any(
    random: Random, faults: Sequence[Fault], wire: str, exchange: str, names: list[PeerId], victims: list[PeerId],
    *, since: int,
) -> Strike:  # fmt: skip
    another = random.choice(list(faults))
    phases = [p for p in PHASES_OF[wire] if strikeable(another, p, exchange)]
    return _strike(random, another, random.choice(phases), names, victims, since=since)


def _strike(
    random: Random, fault: Fault, phase: str, names: list[PeerId], victims: list[PeerId], *, since: int
) -> Strike:
    """A fault for one of these victims, or for whoever gets there."""
    size = len(names)
    anybody = fault in (*ON_MESSAGES, Fault.SEALER_DIES, Fault.LATE_JOINER) or phase in ("sync", "gather")
    if fault is Fault.CRASH_HALFWAY and phase == "commit":
        anybody = True  # only a leader sends more than one message there
    before = {"sync": 1, "seal": size, "reduce": 2 * size - 2, "gather": 2 * size - 2}.get(phase, 0)
    return Strike(
        fault,
        phase,
        iteration=1 if fault is Fault.CLOCK_SKEW else random.randint(since, 3),
        victim=None if anybody else random.choice(victims),
        seconds=random.choice([3.0, 15.0, 40.0, 100.0]),
        skip=int(fault is Fault.CRASH_HALFWAY),
        others=random.randint(0, before) if anybody else 0,
    )
