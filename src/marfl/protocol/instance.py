"""One iteration's decision, as one peer sees it: what it promised, what it finished, whom it waits for."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from marfl.net.base import PeerId
from marfl.protocol import ballot
from marfl.protocol.acks import LATE, Decision
from marfl.protocol.attempt import Attempt
from marfl.protocol.ballot import Ballot
from marfl.protocol.masks import Masking
from marfl.protocol.meetings import Prepare
from marfl.protocol.roster import Elector, Record, Roster, ranked
from marfl.state import Snapshot


@dataclass(frozen=True)
class Contribution:
    """What a peer brings to an iteration: its update, and how much it counts (0: it only helps to aggregate)."""

    base: bytes  # hash of the agreed state that the update starts from
    delta: Tensor  # 1-D fp32
    weight: float = 1.0
    fewest: int = 0  # it is only ever in a sum of at least so many contributions (see `trimming`)
    prepare: Prepare | None = None  # makes the update to bring once the roster is sealed, from what its groups show


def weighted(mine: Contribution) -> Tensor:
    """w·Δ, rounded once, by its owner. A weight of zero brings exact zeros, whatever Δ is."""
    if mine.weight == 1.0:
        return mine.delta
    return mine.delta * mine.weight if mine.weight else mine.delta.new_zeros(mine.delta.shape)


@dataclass(frozen=True)
class Accepted:
    """A result this peer has finished: after that it never finishes an earlier attempt's."""

    attempt: int
    roster: Roster
    hash: bytes
    state: Snapshot | None  # None: endorsed the hash without holding the data
    mean: Tensor | None

    @property
    def holds(self) -> bool:
        return self.state is not None


@dataclass
class Instance:
    """The decision of one iteration. Votes outlive a call of `run_iteration`; they end with the decision."""

    run: str
    iteration: int
    base: bytes
    lineage: bytes
    electors: tuple[Elector, ...]  # in the order in which they lead
    entered: float
    mine: Contribution | None = None
    begun: bool = False  # this peer takes part; before that it trains, or may be about to bring something
    ballot: Ballot[Accepted] = field(default_factory=Ballot)  # what this peer has promised and voted for
    known: int = -1  # the highest attempt heard of, promised or not
    foundings: int = 0  # times that this peer has tried to found one
    founder: PeerId | None = None  # set while this peer follows somebody who founds a new lineage
    attempt: Attempt | None = None  # the exchange under way, or the last one
    task: asyncio.Task[None] | None = None
    working: int = -1  # the attempt that task belongs to
    interrupted: bool = False  # the last attempt was given up for a later one, not failed here
    tries: int = 0  # rosters sealed so far, as seen here
    patience: float = 0.0  # before this time others lead
    gathered: float | None = None  # when a majority of the electors was first seen to be there
    heard: float = -math.inf  # when a leader last showed that it has a majority; a clock may begin below 0
    finishes: dict[PeerId, bytes | None] = field(default_factory=dict)  # as the leader: who reported which hash
    keepers: set[PeerId] = field(default_factory=set)  # and which voters it asked to fetch the result
    doubted: dict[PeerId, str] = field(default_factory=dict)  # and whose last vote does not count, and why
    seen: set[PeerId] = field(default_factory=set)  # who said that it is ready to go on from the same state
    closed: bool = False  # as the leader: it waits for nobody any more, whoever comes now is late
    leading: int = -1
    led: Roster | None = None  # as the leader: the roster of that attempt
    sealed: dict[bytes, Roster] = field(default_factory=dict)  # rosters of this iteration that were begun or led here
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    record: Record | None = None  # the decision
    holders: tuple[PeerId, ...] = ()
    stale: bool = False  # others are elsewhere: this peer must sync
    masks: Masking = field(default_factory=Masking)

    @classmethod
    def after(cls, run: str, record: Record, now: float) -> Instance:
        """The iteration that follows a committed one."""
        iteration = record.iteration + 1
        electors = ranked(run, iteration, record.electors)
        return cls(run, iteration, record.hash, record.lineage, electors, entered=now)

    @property
    def decision(self) -> Decision:
        """Which decision this is: rosters of another one are none of its business."""
        return self.run, self.iteration, self.base, self.lineage

    @property
    def promised(self) -> int:
        return self.ballot.promised

    @property
    def accepted(self) -> Accepted | None:
        return self.ballot.accepted

    def leader(self, attempt: int) -> PeerId | None:
        """Only this elector may propose that attempt: so no two rosters share one."""
        if self.founder is not None and attempt == 0:
            return self.founder
        return self.electors[attempt % len(self.electors)].id if self.electors else None

    def rank(self, peer: PeerId) -> int | None:
        return next((rank for rank, elector in enumerate(self.electors) if elector.id == peer), None)

    def next_attempt(self, rank: int) -> int:
        """The lowest attempt above everything promised that the elector of this rank leads."""
        size = len(self.electors)
        highest = max(self.promised, self.known)
        lowest = highest + 1 if self.founder is None else max(1, highest + 1)
        return lowest + (rank - lowest) % size

    def found(self, lineage: bytes, founder: PeerId) -> None:
        """Leave the lineage without a majority and follow a founder: no vote is ever cast in the old one again."""
        self.stop()
        self.lineage, self.founder, self.electors = lineage, founder, ()
        self.ballot, self.known, self.working = Ballot(), -1, -1

    def promise(self, attempt: int) -> None:
        """Vote for an attempt: whatever earlier one is under way here is given up."""
        if attempt > self.promised:
            self.ballot = ballot.promise(self.ballot, attempt)
            if self.working < attempt:
                self.interrupted = self.interrupted or self.busy
                self.stop()

    def stop(self) -> None:
        if self.task:
            self.task.cancel()
            self.task = None
        self.leading = -1
        self.progress.set()

    def release(self) -> None:
        """Let go of the vectors that nobody needs once this is over. What is undecided keeps them: its votes stand."""
        if self.over.is_set():
            self.mine = self.attempt = None
        if self.record is not None:
            self.ballot, self.masks.total = Ballot(self.promised), None

    def keep_nothing(self) -> None:
        """Once it is decided nobody needs what this peer holds of others' inputs."""
        if self.attempt is not None:
            self.attempt.drop()

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way here."""
        return self.task is not None and not self.task.done() and self.accepted is None

    def finished(self, peer: PeerId, digest: bytes | None) -> None:
        """As the leader: note a member's hash, or that it could not finish."""
        self.finishes[peer] = digest
        self.progress.set()

    def blame(self) -> dict[str, Any]:
        """Whom this peer waits for in vain or caught sending bad data, and what holds it up itself."""
        attempt = self.attempt
        if attempt is None or self.accepted is not None:  # it was never told to begin, or is done
            return {"blamed": [], "waits": attempt is None, "unsent": []}
        name = attempt.roster.members
        proven = [[name[rank].id, reason[:200], True] for rank, reason in attempt.tainted.items()]
        waiting = [[name[rank].id, LATE, False] for rank in sorted(attempt.overdue)]
        unsent = [name[rank].id for rank in sorted(attempt.unsent)]
        return {"blamed": proven + waiting, "waits": bool(attempt.waiting) or self.interrupted, "unsent": unsent}
