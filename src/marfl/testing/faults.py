"""Everything that can go wrong, as a vocabulary: a `Strike` says what befalls whom, in which phase and iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

import torch

from marfl.net.base import Parcel, PeerId
from marfl.protocol.messages import Data
from marfl.protocol.tensors import raw


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
    header = Data.decode(parcel.header)
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
