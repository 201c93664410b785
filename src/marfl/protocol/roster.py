"""Who takes part: the roster of an attempt, the record of a committed iteration, and what a majority is.

One iteration is one decision, made as in Paxos (Lamport 1998). Its acceptors are the *electors*: everybody who voted
for the last committed roster. An attempt is a ballot; the value decided is (roster, hash of the new state). Attempt
`a` may only be led by the elector of rank ``a mod len(electors)``, so no two rosters share an attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgpack

from marfl.net.base import PeerId
from marfl.plan.grid import order

NO_HASH = bytes(32)
PIECE = 2**20  # bytes of a slice that travel as one message
LEAST_PIECE = 8  # one value, however it travels


class Member(NamedTuple):
    """A peer as rosters name it."""

    id: PeerId
    index: int  # type: ignore[assignment]  # its shard, its random streams, its place; tuple.index is never needed here
    weight: float


class Elector(NamedTuple):
    """A peer that may vote."""

    id: PeerId
    index: int  # type: ignore[assignment]


@dataclass(frozen=True)
class Roster:
    """Exactly who is summed in one attempt, in plan order, and how. Its digest is in every data message."""

    run: str
    iteration: int
    attempt: int
    lineage: bytes
    base: bytes  # hash of the state that every member starts from
    layout: bytes
    exchange: str
    group_size: int
    members: tuple[Member, ...]
    witnesses: tuple[Elector, ...]  # voted, but bring no data
    electors: tuple[Elector, ...]  # only when the roster founds a lineage: who decides from here on
    omitted: tuple[tuple[PeerId, str], ...]  # who was known and is not in, and why
    wire: str = "fp32"  # how values travel: see `fixed`
    masks: bytes = b""  # which masks hide the values: the epoch, see `marfl.privacy.masks.session`
    circle: tuple[PeerId, ...] = ()  # everybody in that epoch, where some of them are not members any more
    piece: int = PIECE  # longer slices travel in pieces of so many bytes

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def encoded(self) -> bytes:
        told = [getattr(self, field.name) for field in fields(self)[:-1]]
        data: bytes = msgpack.packb([*told, *self.unusual], use_bin_type=True)
        return data

    @property
    def unusual(self) -> tuple[int, ...]:
        """The last field, which is written only where it is not what it always is."""
        return () if self.piece == PIECE else (self.piece,)

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encoded).digest()

    @property
    def part(self) -> int:
        """What the tags of this roster's messages carry of its digest."""
        return int.from_bytes(self.digest[:6])

    @cached_property
    def ranks(self) -> dict[PeerId, int]:
        return {member.id: rank for rank, member in enumerate(self.members)}

    @cached_property
    def ids(self) -> tuple[PeerId, ...]:
        return tuple(member.id for member in self.members)

    @cached_property
    def weight(self) -> float:
        """The sum of the weights, added in plan order so that every peer gets the same bits."""
        total = 0.0
        for member in self.members:
            total += member.weight
        return total

    @cached_property
    def contributions(self) -> int:
        """How many updates are summed: members that only help to aggregate bring none."""
        return sum(member.weight > 0 for member in self.members)

    @cached_property
    def voters(self) -> tuple[Elector, ...]:
        """The electors of the next iteration: whoever voted for this roster."""
        return (*(Elector(m.id, m.index) for m in self.members), *self.witnesses)


@dataclass(frozen=True)
class Record:
    """One committed iteration: what a peer must know to vote in the next one, and to check a state it is given."""

    roster: Roster | None  # None: the beginning
    hash: bytes  # of the state after it
    mass: int  # members of all committed rosters of the lineage, added up: the heavier lineage wins
    since: int = 0  # the iteration that founded the lineage
    founders: tuple[Elector, ...] = ()  # the electors at the beginning, where they are known

    @property
    def iteration(self) -> int:
        return self.roster.iteration if self.roster else 0

    @property
    def lineage(self) -> bytes:
        return self.roster.lineage if self.roster else NO_HASH

    @property
    def electors(self) -> tuple[Elector, ...]:
        return self.roster.voters if self.roster else self.founders

    def after(self, roster: Roster, digest: bytes) -> Record:
        """The record of this roster's commit on top of this one."""
        since = self.since if roster.lineage == self.lineage else roster.iteration
        gain = len(roster.members) if any(member.weight for member in roster.members) else 1  # nothing was summed
        return Record(roster, digest, self.mass + gain, since)

    def beats(self, mass: int, digest: bytes) -> bool:
        """Whether this lineage wins over a head of that mass and hash: heavier first, then the lower hash."""
        return (-self.mass, self.hash) < (-mass, digest)

    @cached_property
    def encoded(self) -> bytes:
        return self.packed(self.roster.encoded if self.roster else b"")

    def packed(self, roster: bytes) -> bytes:
        """The record with its roster in these bytes (see `roster_code.brief_record`)."""
        data: bytes = msgpack.packb([roster, self.hash, self.mass, self.since, self.founders])
        return data


def quorum(electors: Sequence[Elector], voters: Collection[PeerId]) -> bool:
    """More than half; exactly half counts when it holds the first elector. Any two quorums share a peer."""
    if not electors:
        return False
    votes = sum(elector.id in voters for elector in electors)
    return 2 * votes + (electors[0].id in voters) > len(electors)


@lru_cache(maxsize=16)
def ranked(run: str, iteration: int, electors: tuple[Elector, ...]) -> tuple[Elector, ...]:
    """Electors in the order in which they lead the attempts of an iteration (also the order of plans).

    Cached: peers of one process share the tuple, or a thousand of them would hold a million electors.
    """
    return tuple(Elector(peer, index) for index, peer in order(run, iteration, [(e.index, e.id) for e in electors]))
