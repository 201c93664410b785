"""One iteration's decision as one peer sees it (Paxos: an instance): what it promised, what it works on, what it leads.

Nothing here talks. Each part has one owner: `Work` is the member's, `Lead` the leader's, `Masking` that of the masked
rounds; the ballot changes by the rules of `ballot` alone.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from marfl.net.base import PeerId
from marfl.protocol import ballot
from marfl.protocol.attempt import Attempt
from marfl.protocol.ballot import LATE, Acceptor, Ballot, Value
from marfl.protocol.exchange import Contribution
from marfl.protocol.mask_pledges import Masking, Pledged
from marfl.protocol.messages import LONGEST_REASON, Ack, Complaint
from marfl.protocol.roster import DecisionId, Elector, Record, Roster, ranked
from marfl.protocol.seniority import Arrival
from marfl.protocol.statements import Cast, SignedPromise, SignedSeal, cast, link_of
from marfl.state import Snapshot


@dataclass(frozen=True)
class Accepted:
    """A vote (Paxos: an accepted proposal): after it this peer never votes for an earlier attempt's result."""

    attempt: int
    roster: Roster
    hash: bytes
    state: Snapshot | None  # None: endorsed the hash without holding the data
    mean: Tensor | None

    @property
    def holds(self) -> bool:
        return self.state is not None

    @property
    def value(self) -> Value:
        return Value(self.roster.digest, self.hash)


NOTED = 8  # lost attempts of an iteration that are remembered


def _without_data(vote: Accepted | None) -> Accepted | None:
    return replace(vote, state=None, mean=None) if vote is not None else None


class Binding(NamedTuple):
    """What binds a peer in a decision that is open: if it leaves it and comes back it must not have forgotten."""

    lineage: bytes
    founder: PeerId | None
    electors: tuple[Elector, ...]
    ballot: Ballot[Accepted]
    cast: set[tuple[int, tuple[bytes, bytes]]]
    seals: dict[int, SignedSeal]
    given: dict[int, Ack]
    promises: dict[int, dict[PeerId, SignedPromise]]
    left: set[bytes]
    bound: dict[bytes, bytes]  # of masks: see `Masking`
    pledge: Pledged | None
    sent_in: bytes | None


class Turns(NamedTuple):
    """What is known of a leader of a decision."""

    ended: int = 0  # attempts of others that it ended, before their time was over
    first: float = math.inf  # when it was first promised an attempt while I had something to bring
    last: float = -math.inf  # when it was answered


class Blame(NamedTuple):
    """What a peer says of the attempt that its next vote ends."""

    complaints: tuple[Complaint, ...] = ()  # whom it waits for in vain or caught sending bad data
    waits: bool = False
    unsent: tuple[PeerId, ...] = ()  # who has not taken its data


@dataclass
class Work:
    """A member's part: the exchange under way, or the last one."""

    exchange: Attempt | None = None
    task: asyncio.Task[None] | None = None
    attempt: int = -1  # that the task belongs to
    interrupted: bool = False  # the last attempt was given up for a later one, not failed here
    tries: int = 0  # rosters sealed so far, as seen here

    def stop(self) -> None:
        if self.task:
            self.task.cancel()
            self.task = None


@dataclass
class Lead:
    """A leader's part: whom it has seen, and what members reported to it."""

    attempt: int = -1  # that is led now; -1: none
    roster: Roster | None = None  # of the attempt led last
    finishes: dict[PeerId, bytes | None] = field(default_factory=dict)  # who reported which hash
    votes: dict[tuple[PeerId, bytes], bytes] = field(default_factory=dict)  # by voter and hash: its signature
    ahead: dict[bytes, set[PeerId]] = field(default_factory=dict)  # records of this iteration: who says it is decided
    keepers: set[PeerId] = field(default_factory=set)  # voters that were asked to fetch the result
    doubted: dict[PeerId, str] = field(default_factory=dict)  # whose last vote does not count, and why
    seen: set[PeerId] = field(default_factory=set)  # who said that it is ready to go on from the same state
    gathered: float | None = None  # when a majority of the electors was first seen to be there
    brought: float = -math.inf  # when somebody was first seen that brings something
    most_there: float | None = None  # when half of the electors were done
    all_others: float | None = None  # when all were there but those who said when they are done
    awaited: set[PeerId] = field(default_factory=set)  # whom it waits for
    unanswered: dict[PeerId, float] = field(default_factory=dict)  # who was asked where it is, and since when in vain
    answered: set[PeerId] = field(default_factory=set)  # who was asked where it is, and is there
    idle: float | None = None  # since when it waits for those who train, because nobody else brings anything
    closed: bool = False  # it waits for nobody any more, whoever comes now is late
    foundings: int = 0  # times that this peer has tried to found a lineage

    def signatures(self, digest: bytes) -> dict[PeerId, bytes]:
        """The signed votes for a hash that were heard."""
        return {peer: vote for (peer, got), vote in self.votes.items() if got == digest}

    def begin(self, attempt: int, roster: Roster) -> None:
        self.attempt, self.roster = attempt, roster
        self.finishes, self.votes, self.keepers = {}, {}, set()


class Led(NamedTuple):
    """An attempt that this peer leads, or led to a decision, and the votes that members signed in it."""

    iteration: int
    attempt: int
    before: Record
    roster: Roster
    votes: dict[tuple[PeerId, bytes], bytes]  # by voter and hash: its signature

    def vote(self, digest: bytes) -> Cast:
        """The vote for this hash in it, as a member signs it."""
        return cast(self.roster, self.attempt, self.before, digest)


@dataclass
class Instance:
    """The decision of one iteration. Votes outlive a call of `run_iteration`; they end with the decision."""

    run: str
    iteration: int
    base: bytes
    before: Record  # that it follows
    lineage: bytes
    electors: tuple[Elector, ...]  # in the order in which they lead
    entered: float
    mine: Contribution | None = None
    begun: bool = False  # this peer takes part; before that it trains, or may be about to bring something
    ballot: Ballot[Accepted] = field(default_factory=Ballot)  # what this peer has promised and voted for
    known: int = -1  # the highest attempt heard of, promised or not
    founder: PeerId | None = None  # set while this peer follows somebody who founds a new lineage
    patience: float = 0.0  # before this time others lead
    until: float = -math.inf  # until when the present leader has its time
    turns: dict[PeerId, Turns] = field(default_factory=dict)  # of whoever has led here
    idle: set[PeerId] = field(default_factory=set)  # electors that do not lead: they are gone, or train for long
    absent: set[PeerId] = field(default_factory=set)  # electors that refused a connection: nobody waits for them
    heard: float = -math.inf  # when a leader last showed that it has a majority; a clock may begin below 0
    slow: list[str] = field(default_factory=list)  # attempts that were lost here because something was slow
    lost: deque[str] = field(default_factory=lambda: deque(maxlen=NOTED))  # the last that gave nothing here, and why
    work: Work = field(default_factory=Work)
    lead: Lead = field(default_factory=Lead)
    masks: Masking = field(default_factory=Masking)
    sealed: dict[bytes, Roster] = field(default_factory=dict)  # rosters of this iteration that were begun or led here
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    record: Record | None = None  # the decision
    holders: tuple[PeerId, ...] = ()
    stale: bool = False  # others are elsewhere: this peer must sync
    cast: set[tuple[int, tuple[bytes, bytes]]] = field(default_factory=set)  # my votes: attempt and value
    justified: set[tuple[int, Value | None]] = field(default_factory=set)  # attempts, and what they adopt, seen to be
    barred: bool = False  # this peer may have voted in it before a restart, and never does again
    seals: dict[int, SignedSeal] = field(default_factory=dict)  # by attempt, what its leader sealed as far as is known
    given: dict[int, Ack] = field(default_factory=dict)  # by attempt, my signed ack: nobody is given another one
    promises: dict[int, dict[PeerId, SignedPromise]] = field(default_factory=dict)  # by attempt, what was promised
    left: set[bytes] = field(default_factory=set)  # lineages that this peer has left: it never votes in them again
    arrivals: dict[tuple[PeerId, int], Arrival] = field(default_factory=dict)  # by newcomer and attempt, verified
    needed: bool = False  # it is decided, but not surely: its votes stand (see `commits`)

    @classmethod
    def after(cls, run: str, record: Record, now: float) -> Instance:
        """The iteration that follows a committed one."""
        iteration = record.iteration + 1
        electors = ranked(run, iteration, record.electors)
        return cls(run, iteration, record.hash, record, record.lineage, electors, entered=now)

    @property
    def decision(self) -> DecisionId:
        return DecisionId(self.run, self.iteration, self.base, self.lineage)

    @property
    def signed_id(self) -> DecisionId:
        """The same as it is signed: by the record before. Another record may have led to the same state."""
        return DecisionId(self.run, self.iteration, link_of(self.before), self.lineage)

    @property
    def promised(self) -> int:
        return self.ballot.promised

    @property
    def accepted(self) -> Accepted | None:
        return self.ballot.accepted

    def acceptor(self, *, barred: bool) -> Acceptor[Accepted]:
        """What this peer's answers depend on, for the rules."""
        under_way = self.work.attempt if self.busy else None
        return Acceptor(
            self.iteration, self.base, self.lineage, self.electors, self.founder, self.ballot, barred, under_way
        )

    def vote(self, roster: Roster, attempt: int, digest: bytes) -> Cast:
        """The vote for what came of a roster, as an elector of this decision signs it."""
        return cast(roster, attempt, self.before, digest)

    def leader(self, attempt: int) -> PeerId | None:
        return ballot.leader_of(self.electors, self.founder, attempt)

    def rank(self, peer: PeerId) -> int | None:
        return next((rank for rank, elector in enumerate(self.electors) if elector.id == peer), None)

    @property
    def led(self) -> Led | None:
        """The attempt that this peer leads now, or that led to the decision."""
        lead = self.lead
        if lead.roster is None or lead.attempt < 0:
            return None
        return Led(self.iteration, lead.attempt, self.before, lead.roster, lead.votes)

    def next_attempt(self, rank: int) -> int:
        """The lowest attempt above everything promised or heard of that the elector of this rank leads."""
        return ballot.next_attempt(self.electors, self.founder, rank, max(self.promised, self.known))

    def found(self, lineage: bytes, founder: PeerId) -> None:
        """Leave the lineage without a majority and follow a founder (see `ballot.founded`)."""
        self.stop()
        self.left.add(self.lineage)
        self.lineage, self.founder, self.electors = lineage, founder, ()
        self.ballot, self.known, self.work.attempt = Ballot(), -1, -1
        self.arrivals.clear()
        self.turns.clear()
        self.seals.clear()
        self.given.clear()
        self.promises.clear()

    def promise(self, attempt: int) -> None:
        """Give one's word for an attempt: whatever earlier one is under way here is given up."""
        if attempt > self.promised:
            self.ballot = ballot.promise(self.ballot, attempt)
            if self.work.attempt < attempt:
                if self.busy:
                    self.note_lost(self.work.attempt, f"given up for attempt {attempt}")
                self.work.interrupted = self.work.interrupted or self.busy
                self.stop()

    def note_lost(self, attempt: int, why: str) -> None:
        """An attempt gave no result here: why, and where its exchange stood."""
        exchange = self.work.exchange
        mine = exchange is not None and self.work.attempt == attempt and exchange.roster.attempt == attempt
        where = f"; {exchange.standstill()}" if exchange is not None and mine else ""
        self.lost.append(f"attempt {attempt} was lost: {why}{where}")

    def stop(self) -> None:
        self.work.stop()
        self.lead.attempt = -1
        self.progress.set()

    def end(self) -> None:
        """The iteration is over: whoever waits for it goes on."""
        self.over.set()
        self.progress.set()

    def reopen(self, now: float) -> None:
        """What was taken for its decision is none: it goes on, with all that was promised and voted here."""
        self.record, self.holders, self.stale, self.needed, self.begun = None, (), False, False, False
        self.entered = self.patience = self.heard = now
        self.over.clear()

    def release(self) -> None:
        """Let go of the vectors that nobody needs once this is over. What is undecided keeps them: its votes stand.

        The vote itself is kept: who forgets it could be asked for another one in the same attempt.
        """
        if self.over.is_set():
            self.mine = self.work.exchange = None
        if self.record is not None and not self.needed:
            self.ballot, self.masks.total = Ballot(self.promised, _without_data(self.accepted)), None

    def word(self) -> Binding:
        """What binds this peer here, without any vector."""
        return Binding(
            self.lineage, self.founder, self.electors, Ballot(self.promised, _without_data(self.accepted)), self.cast,
            self.seals, self.given, self.promises, self.left, self.masks.bound, self.masks.pledge, self.masks.lineage,
        )  # fmt: skip

    def take_up(self, word: Binding) -> None:
        """Go on where this peer had left this very decision."""
        self.lineage, self.founder, self.electors, self.ballot, self.cast = word[:5]
        self.seals, self.given, self.promises, self.left = word[5:9]
        self.masks.bound, self.masks.pledge, self.masks.lineage = word[9:]

    def keep_nothing(self) -> None:
        """Once it is decided nobody needs what this peer holds of others' inputs."""
        if self.work.exchange is not None:
            self.work.exchange.drop()

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way here."""
        task = self.work.task
        return task is not None and not task.done() and self.accepted is None

    @property
    def last_sign(self) -> float:
        """When a slow attempt that is under way here last showed that others live; −∞ where it is not slow."""
        task, exchange = self.work.task, self.work.exchange
        return exchange.signs.last if exchange is not None and task is not None and not task.done() else -math.inf

    @property
    def leads_slowly(self) -> bool:
        """Whether this peer leads an attempt whose phases are long."""
        return self.lead.attempt >= 0 and self.work.exchange is not None and self.work.exchange.pace.extra > 0

    @property
    def in_company(self) -> float:
        """When this peer was last known not to be alone."""
        return max(self.entered, self.heard, self.last_sign)

    def finished(self, peer: PeerId, digest: bytes | None, signature: bytes = b"") -> None:
        """As the leader: note a member's hash and its signed vote, or that it could not finish."""
        self.lead.finishes[peer] = digest
        if digest is not None:
            self.lead.votes[peer, digest] = signature
        self.progress.set()

    def blame(self) -> Blame:
        """Whom this peer waits for in vain or caught sending bad data, and what holds it up itself."""
        attempt = self.work.exchange
        if attempt is None or self.accepted is not None:  # it was never told to begin, or is done
            return Blame(waits=attempt is None)
        name = attempt.roster.members
        proven = [Complaint(name[rank].id, why[:LONGEST_REASON], True) for rank, why in attempt.tainted.items()]
        waiting = [Complaint(name[rank].id, LATE, False) for rank in sorted(attempt.overdue)]
        unsent = tuple(name[rank].id for rank in sorted(attempt.unsent))
        return Blame((*proven, *waiting), bool(attempt.waiting) or self.work.interrupted, unsent)


def passed_by(state: Snapshot, roster: Roster) -> Snapshot:
    """The state after an iteration in which nothing was summed.

    Two lineages may part in it: then their states are told apart, or nobody could say which one wins. By the salt of
    their names: the rest of a name follows from the record before, which masks make another one in every run.
    """
    name = {"lineage": float(int.from_bytes(roster.lineage[-6:]))} if roster.electors else {}
    return Snapshot(state.version + 1, state.vectors, dict(state.scalars) | name)
