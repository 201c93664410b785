"""What a peer does in an iteration: one async function over `Net`, and the answers it gives to others.

The steps: announce, be sealed into a roster (propose, ack, publish), exchange, finish, commit. Each iteration is one
Paxos decision (see `roster`): a peer that acks attempt `a` never finishes an earlier one; a result that anybody may
have committed is adopted by every later attempt; (roster, hash) is committed once a majority of the roster holds the
data and a majority of the electors voted for it. Whoever is late, hung or cut off finds out and syncs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from marfl.errors import InputError, SyncError, WireError
from marfl.net.base import Ledger, Net, Parcel, PeerId
from marfl.protocol.access import Answer, guarded, judged
from marfl.protocol.ballot import voted
from marfl.protocol.exchange import VOID
from marfl.protocol.fixed_point import can_carry
from marfl.protocol.incarnations import Incarnations
from marfl.protocol.instance import Accepted, Contribution, Instance, weighted
from marfl.protocol.leader import drive
from marfl.protocol.masking import answer_masked, answer_share
from marfl.protocol.masks import KIND
from marfl.protocol.member import answer_resend, answer_seal
from marfl.protocol.readiness import NOT_YET, Notices, announce_ready, answer_ready, answer_vouch, first_turn
from marfl.protocol.roster import Elector, Record, Roster
from marfl.protocol.settings import Settings
from marfl.protocol.speaker import Speaker
from marfl.protocol.sync import Allowance, Caught, answer_sync, fetch, given_up
from marfl.protocol.terms import CHANNEL, Terms, answer_terms, met
from marfl.protocol.unmask import answer_held, answer_pledge, answer_reveal
from marfl.protocol.verdict import answer_decided, answer_finish, answer_heavier, decision, tell_decided
from marfl.protocol.voting import answer_endorse, answer_propose
from marfl.protocol.wire import pack, unpack
from marfl.state import Snapshot

T = TypeVar("T")
Advance: TypeAlias = Callable[[Snapshot, Tensor, Roster], Snapshot]  # the agreed state, the mean update: the next state

ANSWERS: dict[str, Answer] = {
    "propose": answer_propose, "seal": answer_seal, "finish": answer_finish, "endorse": answer_endorse,
    "decided": answer_decided, "heavier": answer_heavier, "resend": answer_resend, "sync": answer_sync,
    "share": answer_share, "masked": answer_masked, "held": answer_held, "pledge": answer_pledge,
    "reveal": answer_reveal, "ready": answer_ready, "vouch": answer_vouch, CHANNEL: answer_terms,
}  # fmt: skip
ANSWER_KINDS = {  # what the bytes behind an answer's header are for, where there are any
    "resend": "repair", "masked": "repair", "sync": "sync",
    "propose": KIND, "share": KIND, "held": KIND, "reveal": KIND,
}  # fmt: skip

MOST_ACKED = 64  # states
ABANDONED = "the iteration was abandoned: nobody brought an update, too few did, or masks cannot be taken off"


@dataclass(frozen=True)
class Outcome:
    """How an iteration ended for one peer. Churn is data: whoever is missing is named here."""

    iteration: int
    status: str  # "committed", "stale" (others are elsewhere: sync), "undecided" (no majority in time)
    hash: bytes | None = None
    attempt: int = -1
    exchange: str = ""
    present: tuple[PeerId, ...] = ()
    missing: dict[PeerId, str] = field(default_factory=dict)
    holds: bool = False  # this peer holds the committed state
    discarded: int = 0  # committed iterations that were given up for others'
    sent: Ledger = field(default_factory=Ledger)  # since the last outcome: also catch-up, votes and late verdicts
    received: Ledger = field(default_factory=Ledger)
    seconds: float = 0.0


class Participant(Speaker):
    """A peer of one run: the agreed state it holds, its votes, and its answers to the others."""

    def __init__(
        self, net: Net, settings: Settings, index: int, layout: bytes, state: Snapshot, record: Record, advance: Advance
    ) -> None:
        if state.hash != record.hash:
            raise InputError("the state does not belong to the record: their hashes differ")
        super().__init__(net, settings)
        self.index, self.layout = index, layout
        self.state, self.record, self.advance = state, record, advance
        self.instance: Instance | None = None
        self.barred = -1  # after a restart: the iteration it may have voted in before, and never votes in again
        self.last_mean: tuple[bytes, Tensor | None] | None = None  # (from which state, the update to mine)
        self.last_roster: Roster | None = None  # of the last exchange that began here
        self.history: dict[int, Record] = {}
        self.donors: dict[PeerId, None] = {}  # who has shown that it is ahead, newest last
        self.discarded = 0
        self.helped: dict[int, Roster] = {}  # by iteration, the one that this peer has helped to unmask
        self.fetched = False  # my state came from others: they may have gone on meanwhile
        self.notices = Notices()
        self.allowance = Allowance()
        self.incarnation = 0  # which process of its key this is, and the others'
        self.incarnations = Incarnations()
        self.acked: dict[bytes, set[tuple[bytes, int]]] = {}  # by state: lineages and attempts that this process acked
        self.terms = Terms(settings.terms)
        self.untold: set[PeerId] = set()  # who may not know yet what was decided under my lead
        self.leaving = asyncio.Event()
        self._aside: set[asyncio.Task[Any]] = set()
        self._billed = Ledger(), Ledger()
        for channel, answer in ANSWERS.items():
            net.serve(channel, partial(guarded, self, channel, answer), kind=ANSWER_KINDS.get(channel, "control"))
        self.judge_anew()

    # --- one iteration ---

    async def run_iteration(self, mine: Contribution | None) -> Outcome:
        """Take part in the next iteration: with a contribution, or (None) as a witness that only votes."""
        if mine is not None and not usable(mine, self.settings):
            mine = None  # a sender checks its own update: what nobody could use never leaves
        if mine is not None and (self.behind or mine.base != self.record.hash):
            sent, received = self._bill()  # others went on while it was made
            return Outcome(self.record.iteration + 1, "stale", sent=sent, received=received)
        started = self.net.now()
        instance = self.enter()
        instance.mine, instance.begun = mine, True
        instance.entered = started
        instance.patience = first_turn(self, instance)
        role, weight = ("member", mine.weight) if mine else ("witness", 0.0)
        work = announce_ready(self, role, weight), drive(self, instance)
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await self.until(instance.over, started + self.settings.iteration_timeout)
        finally:
            for task in tasks:
                task.cancel()
        instance.begun = False
        await self._settle(instance)
        instance.release()
        if instance.record is not None:
            self.net.forget(instance.iteration)
        return self._outcome(instance, self.net.now() - started)

    def enter(self) -> Instance:
        """The decision that follows the last one known; votes cast before entering are kept."""
        if self.instance is None or self.instance.base != self.record.hash:
            if self.instance:
                self.instance.stop()
                self.instance.keep_nothing()
            self.net.forget(self.record.iteration)
            self.instance = Instance.after(self.settings.run, self.record, self.net.now())
        elif self.instance.stale:  # it could not sync: try again with the votes it has
            self.instance.stale = False
            self.instance.over.clear()
        return self.instance

    async def _settle(self, instance: Instance) -> None:
        """After the decision: tell latecomers where the head is, and fetch the result if it was missed here."""
        record = instance.record
        if record is None or record.roster is None:
            return
        if instance.leading >= 0:
            await tell_decided(self, instance, record, [witness.id for witness in record.roster.witnesses])
            late = {peer for peer in record.roster.ids if instance.finishes.get(peer) != record.hash}
            if late := late - {self.net.me}:
                self.aside(self._tell_late(decision(instance, record), late))
        if instance.leading >= 0 or self.net.me in record.roster.ids[:2]:
            self.aside(self.announce_head(record))  # nobody who took part waits for it
        if instance.mine is not None and self.state.hash != record.hash:
            try:
                self.install(await fetch(self, self._donors(instance), record.hash))
            except SyncError:
                self.donors.update(dict.fromkeys(instance.holders))  # stale for now: the next catch-up goes on

    async def _tell_late(self, notice: Parcel, late: set[PeerId]) -> None:
        """Tell members what was decided that do not ask for it a phase later: they still wait for what nobody sends."""
        self.untold |= late
        await self.until(self.leaving, self.net.now() + self.settings.phase_timeout)
        await asyncio.gather(*(self.ask(peer, "decided", notice) for peer in sorted(late & self.untold)))
        self.untold -= late

    def _donors(self, instance: Instance) -> list[PeerId]:
        """Who holds the result; those who let me wait for their part of it come last."""
        attempt = instance.attempt
        late = {attempt.roster.members[rank].id for rank in attempt.overdue} if attempt else set()
        return sorted((peer for peer in instance.holders if peer != self.net.me), key=late.__contains__)

    async def announce_head(self, record: Record | None = None) -> None:
        """Say where I am (or which commit I know of): whoever is behind, or joins, starts from it.

        Where the DHT does not listen it is told again, aside.
        """
        at = record or self.record
        where = {"iteration": at.iteration, "hash": at.hash, "mass": at.mass, "lineage": at.lineage}
        head = pack("head", **where, terms=self.terms.digest)
        if not await self.announce("head", head):
            self.aside(self.repeat("head", head))

    def _bill(self) -> tuple[Ledger, Ledger]:
        """What was sent and received since the last outcome: so outcomes add up to the net's own meter."""
        before = self._billed
        self._billed = self.net.sent.copy(), self.net.received.copy()
        return self._billed[0].minus(before[0]), self._billed[1].minus(before[1])

    def _outcome(self, instance: Instance, seconds: float) -> Outcome:
        record, (sent, received) = instance.record, self._bill()
        if record is None or record.roster is None:
            status = "stale" if instance.stale else "undecided"
            return Outcome(instance.iteration, status, sent=sent, received=received, seconds=seconds)
        roster = record.roster
        present, missing = roster.ids, dict(roster.omitted)
        if roster.exchange == VOID:
            present, missing = (), missing | dict.fromkeys(roster.ids, ABANDONED)
        return Outcome(
            instance.iteration, "committed", record.hash, roster.attempt, roster.exchange, present, missing,
            self.state.hash == record.hash, self.discarded, sent, received, seconds,
        )  # fmt: skip

    # --- catch-up ---

    @property
    def behind(self) -> bool:
        return self.state.hash != self.record.hash

    async def catch_up(self) -> bool:
        """Fetch the winning head's state if it is not mine; whether this peer now holds the newest it knows of.

        The next leader is told that this peer trains now. Where it goes on without it, what comes of that is fetched as
        well: else whoever was late once would be late again and again.
        """
        newest = await self._fetch_newest()
        limit = self.net.now() + self.settings.iteration_timeout
        while newest is None and self.net.now() < limit:
            late_for = await announce_ready(self, NOT_YET)
            if late_for is None or not await self._follow(late_for, limit):
                return True
        return newest is not False

    async def _fetch_newest(self) -> bool | None:
        """None: a newer state is here now. Otherwise whether mine is the newest that I know of."""
        heads = await self.heads()
        better = [p for p, mass, digest in heads if not self.record.beats(mass, digest)]
        donors = [p for p in dict.fromkeys([*better, *reversed(self.donors)]) if p != self.net.me]
        if self.behind and self.record.roster:
            donors += [p for p in self.record.roster.ids if p not in donors and p != self.net.me]
        try:
            self.install(await fetch(self, donors, None))
        except SyncError:
            return not self.behind and not any(d != self.record.hash for p, m, d in heads if p in better)
        self.donors.clear()
        return None

    async def _follow(self, leader: PeerId, limit: float) -> bool:
        """Fetch what comes of an iteration that is under way without me; False if nothing does in time."""
        pause = self.settings.poll
        while self.net.now() < limit:
            await self.net.sleep_until(self.net.now() + pause)
            try:
                self.install(await fetch(self, [leader], None))
                return True
            except SyncError:
                if pause >= self.settings.takeover and await self._fetch_newest() is None:
                    return True  # the leader may be gone
            pause = min(2 * pause, self.settings.takeover)
        return False

    async def heads(self) -> list[tuple[PeerId, int, bytes]]:
        """Every head that was announced by a peer with my settings, the winning lineage first."""
        found = []
        for peer, value in (await self.look_up("head")).items():
            try:
                fields = unpack("head", value)
            except WireError:
                continue  # not a record of ours: it announces nothing
            if met(self, peer, fields["terms"]):
                found.append((peer, fields["mass"], fields["hash"]))
        return sorted(found, key=lambda head: (-head[1], head[2]))

    def install(self, caught: Caught) -> None:
        """Replace my state by a verified one; what was committed here and is not there is given up, and counted."""
        record = caught.record
        assert record is not None
        lost = given_up(self.commits, caught.commits)
        if record.lineage != self.record.lineage:
            founded = [since for since in (self.record.since, record.since) if since]  # 0: the lineage of the beginning
            lost = max(lost, self.record.iteration - min(founded, default=1) + 1)
        self.discarded = lost or self.discarded
        self.last_mean = (self.state.hash, caught.mean) if caught.mean is not None else None
        self.state, self.record, self.fetched = caught.state, record, True
        past = {at: known for at, known in self.history.items() if at < record.iteration}
        same = {at: known for at, known in past.items() if caught.commits.get(at, known.hash) == known.hash}
        self.history = same | {record.iteration: record}
        self.judge_anew()

    @property
    def commits(self) -> dict[int, bytes]:
        """The last iterations that were committed here, and what came of them."""
        return {at: record.hash for at, record in self.history.items()} | {self.record.iteration: self.record.hash}

    # --- decisions ---

    def accept(self, instance: Instance, result: Accepted) -> None:
        """Vote for a result. After this, no earlier attempt's result is ever voted for."""
        instance.ballot = voted(instance.ballot, result)

    def note_ack(self, instance: Instance, attempt: int) -> None:
        """Remember that this very process gave its word for an attempt."""
        self.acked.setdefault(instance.base, set()).add((instance.lineage, attempt))
        if len(self.acked) > MOST_ACKED:
            del self.acked[next(iter(self.acked))]

    def decide(self, instance: Instance, record: Record, holders: tuple[PeerId, ...]) -> None:
        """This iteration is committed: move on to its state if I hold it, else remember who does."""
        roster = record.roster
        if instance.over.is_set() or roster is None or roster.base != instance.base:
            return
        mine = instance.accepted
        if mine is not None and mine.hash == record.hash and mine.state is not None:
            self.last_mean = (self.state.hash, mine.mean)
            self.state = mine.state
        if record.lineage != self.record.lineage:
            self.discarded = 0
        self.record, self.fetched = record, False
        self.history = {t: r for t, r in self.history.items() if t > record.iteration - 8} | {record.iteration: record}
        self.helped = {t: roster for t, roster in self.helped.items() if t > record.iteration - 8}
        self.notices.seen(record.iteration, (*roster.ids, *(witness.id for witness in roster.witnesses)))
        instance.record, instance.holders = record, holders
        instance.keep_nothing()
        self.judge_anew()
        instance.over.set()
        instance.progress.set()

    def judge_anew(self) -> None:
        """Messages that wait may be somebody's now: the roster is here, or another iteration."""
        self.net.admit(partial(judged, self))

    def gone_elsewhere(self, donor: PeerId | None) -> None:
        """Others hold a state that wins over mine: end the iteration and sync."""
        if donor is not None:
            self.donors.pop(donor, None)
            self.donors[donor] = None
        if self.instance is not None and not self.instance.over.is_set():
            self.instance.stale = True
            self.instance.over.set()
            self.instance.progress.set()

    def may_help(self, roster: Roster) -> bool:
        """Whether to help unmask this roster: the first of its iteration that I am asked for, and no other."""
        return self.helped.setdefault(roster.iteration, roster).digest == roster.digest

    def aside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do something that no iteration waits for, or that must not stop half-way when one is cancelled."""
        task = asyncio.create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        return task

    async def compute(self, work: Callable[[], T]) -> T:
        """Do what takes long; a real peer answers the others meanwhile, in virtual time it takes none."""
        return work()

    async def rest(self, seconds: float | None = None) -> None:
        """Wait for what is done aside: before a peer leaves."""
        if self._aside:
            await asyncio.wait(self._aside, timeout=seconds)

    def drop_asides(self) -> None:
        """Once a peer has left, nothing goes on in its name."""
        for task in self._aside:
            task.cancel()

    def wait_for_leader(self, instance: Instance, seconds: float) -> None:
        """Let the present leader work for so long; then it is the next elector's turn, in rank order."""
        rank = instance.rank(self.net.me)
        size = max(1, len(instance.electors))
        turn = size if rank is None else (rank - instance.promised - 1) % size
        instance.patience = self.net.now() + seconds + turn * self.settings.takeover


def usable(mine: Contribution, settings: Settings) -> bool:
    """Whether this contribution may leave."""
    if not 0 <= mine.weight <= settings.max_weight:
        allowed = f"a number from 0 to {settings.max_weight:g}, which is the run's max_weight"
        raise InputError(f"weight: {mine.weight} must be {allowed}")
    return mine.weight == 0 or can_carry(settings.wire, weighted(mine))


def genesis(state: Snapshot, founders: tuple[tuple[PeerId, int], ...] = ()) -> Record:
    """The record of the beginning: everybody starts from this state; founders are named where they are known."""
    return Record(None, state.hash, 0, 0, tuple(Elector(peer, index) for peer, index in founders))
