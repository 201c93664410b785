"""One iteration's decision, as one peer sees it: what it promised, what it finished, whom it waits for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from marfl.net.base import PeerId
from marfl.protocol.attempt import Attempt
from marfl.protocol.masks import Masking
from marfl.protocol.meetings import Prepare
from marfl.protocol.roster import Elector, Record, Roster, quorum, ranked
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
    promised: int = -1
    known: int = -1  # the highest attempt heard of, promised or not
    accepted: Accepted | None = None
    founder: PeerId | None = None  # set while this peer follows somebody who founds a new lineage
    attempt: Attempt | None = None  # the exchange under way, or the last one
    task: asyncio.Task[None] | None = None
    working: int = -1  # the attempt that task belongs to
    interrupted: bool = False  # the last attempt was given up for a later one, not failed here
    tries: int = 0  # rosters sealed so far, as seen here
    patience: float = 0.0  # before this time others lead
    gathered: float | None = None  # when a majority of the electors was first seen to be there
    heard: float = 0.0  # when a leader last showed that it has a majority
    finishes: dict[PeerId, bytes | None] = field(default_factory=dict)  # as the leader: who reported which hash
    leading: int = -1
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
        self.promised, self.known, self.accepted, self.working = -1, -1, None, -1

    def promise(self, attempt: int) -> None:
        """Vote for an attempt: whatever earlier one is under way here is given up."""
        if attempt > self.promised:
            self.promised = attempt
            if self.working < attempt:
                self.interrupted = self.interrupted or self.busy
                self.stop()

    def stop(self) -> None:
        if self.task:
            self.task.cancel()
            self.task = None
        self.leading = -1
        self.progress.set()

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way here."""
        return self.task is not None and not self.task.done() and self.accepted is None

    def finished(self, peer: PeerId, digest: bytes | None) -> None:
        """As the leader: note a member's hash, or that it could not finish."""
        self.finishes[peer] = digest
        self.progress.set()

    def decided_hash(self, roster: Roster, endorsers: Collection[PeerId]) -> tuple[bytes | None, bool]:
        """The hash that a majority of the roster holds, and whether a majority of the electors voted for it.

        A result that is adopted may have lost its roster: then a majority of the electors may hold it instead.
        """
        members = tuple(Elector(m.id, m.index) for m in roster.members)
        for digest in set(self.finishes.values()) - {None}:
            holders = {peer for peer, got in self.finishes.items() if got == digest}
            if quorum(members, holders) or (self.leading > roster.attempt and quorum(self.electors, holders)):
                return digest, quorum(self.electors, holders | set(endorsers))
        return None, False

    def blame(self) -> dict[str, Any]:
        """Whom this peer waits for in vain or caught sending bad data, and what holds it up itself."""
        attempt = self.attempt
        if attempt is None or self.accepted is not None:  # it was never told to begin, or is done
            return {"blamed": [], "waits": attempt is None, "unsent": []}
        name = attempt.roster.members
        proven = [[name[rank].id, reason, True] for rank, reason in attempt.tainted.items()]
        waiting = [[name[rank].id, "its data did not arrive", False] for rank in sorted(attempt.overdue)]
        unsent = [name[rank].id for rank in sorted(attempt.unsent)]
        return {"blamed": proven + waiting, "waits": bool(attempt.waiting) or self.interrupted, "unsent": unsent}


def culprits(acks: dict[PeerId, dict[str, Any]], *, patient: bool) -> dict[PeerId, str]:
    """Who must be left out of the next roster, and why: peers caught with bad data, and the roots of the waiting.

    A peer that is waited for, but waits for somebody itself, is excused, unless its link is bad. If everybody waits
    for each other, nobody is blamed while there is patience; after that whoever the most peers wait for.
    """
    proven: dict[PeerId, str] = {}
    waits: Counter[PeerId] = Counter()
    for ack in acks.values():
        for peer, reason, caught in _complaints(ack["blamed"]):
            if caught:
                proven[peer] = reason
            else:
                waits[peer] += 1
    slow = _bad_links(acks)
    roots = {p for p in waits if p in slow or (p in acks and not acks[p]["waits"] and acks[p]["accepted"] is None)}
    if not roots and not proven and waits and not patient:
        most = max(waits.values())
        roots = {max(p for p, count in waits.items() if count == most)}
    return dict.fromkeys(roots, "its data did not arrive") | proven


def _bad_links(acks: dict[PeerId, dict[str, Any]]) -> set[PeerId]:
    """The fewest peers that explain all the messages that could not be sent between peers that live."""
    stuck = {(sender, to) for sender, ack in acks.items() for to in ack["unsent"] if isinstance(to, str) and to in acks}
    found: set[PeerId] = set()
    while stuck:
        ends = Counter(end for pair in stuck for end in pair)
        senders = {sender for sender, _ in stuck}
        worst = max(ends, key=lambda peer: (ends[peer], peer in senders, peer))
        found.add(worst)
        stuck = {pair for pair in stuck if worst not in pair}
    return found


def _complaints(rows: Iterable[Any]) -> list[tuple[PeerId, str, bool]]:
    """The well-formed ones among the complaints in an ack."""
    return [
        (row[0], row[1][:200], row[2])
        for row in rows
        if isinstance(row, list) and [type(v) for v in row] == [str, str, bool]
    ]
