"""A peer of one run: its parts put together, and one iteration from its beginning to its outcome.

The steps of an iteration: announce, be sealed into a roster (propose, ack, publish), exchange, finish, commit. Each
iteration is one Paxos decision (see `ballot`). Whoever is late, hung or cut off finds out and catches up.

    Standing        the agreed state, the decision under way, what is known of the others
    Readiness       who is there for the next iteration
    Voting          what this peer promises and votes for
    StateTransfer   states and slices that others miss
    Membership      its part in sealed attempts; Verdicts: what was decided
    Leader          its turns as a leader
    MaskedRounds    its part in masked sums
    Audits          its part in audits, and what it knows of liars
    Gatekeeper      who may ask what
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from marfl.byte_kinds import ByteKind
from marfl.errors import InputError, SyncError
from marfl.net.base import Net, Parcel, PeerId, Traffic
from marfl.protocol.access import Answer, Gatekeeper
from marfl.protocol.audit import AuditCounts
from marfl.protocol.ballot import SILENT
from marfl.protocol.exchange import Contribution, weighted
from marfl.protocol.fixed_point import can_carry, field_bits
from marfl.protocol.instance import Instance
from marfl.protocol.leader import Leader
from marfl.protocol.mask_pledges import KIND
from marfl.protocol.masked_rounds import MaskedRounds
from marfl.protocol.member import Membership, Verdicts
from marfl.protocol.messages import LEFT, MEMBER, NOT_YET, WITNESS
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.readiness import Readiness
from marfl.protocol.roster import Elector, Record, Roster
from marfl.protocol.seniority import hasty
from marfl.protocol.speaker import Speaker
from marfl.protocol.standing import Advance, Standing
from marfl.protocol.terms import CHANNEL, Terms
from marfl.protocol.transfer import Sight, StateTransfer
from marfl.protocol.voting import Voting
from marfl.state import Snapshot
from marfl.wire.packing import FieldBits, IntegerWire, is_small

ANSWER_KINDS = {  # what the bytes behind an answer's header are for, where there are any
    "resend": ByteKind.REPAIR, "masked": ByteKind.REPAIR, "audit": ByteKind.REPAIR, "sync": ByteKind.SYNC,
    "propose": KIND, "share": KIND, "held": KIND, "pledge": KIND, "reveal": KIND,
}  # fmt: skip

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
    sent: Traffic = field(default_factory=Traffic)  # since the last outcome: also catch-up, votes and late verdicts
    received: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0
    tainted: tuple[int, ...] = ()  # iterations of which it became known since the last outcome that somebody lied
    audits: AuditCounts = field(default_factory=AuditCounts)  # of this peer, since the last outcome
    restored: int | None = None  # the iteration whose state the run went back to
    hasty: tuple[PeerId, ...] = ()  # newcomers that vote from now on because too few seniors are left
    bits: FieldBits | None = None  # of a value on its way, where something was summed
    slow: tuple[str, ...] = ()  # attempts that were lost here because something was slow, and what to change
    lost: tuple[str, ...] = ()  # other attempts that gave nothing here: in which phase, and who was waited for


class Participant:
    """A peer of one run."""

    def __init__(
        self, net: Net, settings: Settings, index: int, layout: bytes, state: Snapshot, record: Record, advance: Advance
    ) -> None:
        self.net, self.settings, self.talk = net, settings, Speaker(net, settings)
        self.standing = Standing(self.talk, index, layout, state, record, advance)
        self.readiness = Readiness(self.standing)
        self.transfer = StateTransfer(self.standing, self.readiness)
        self.voting = Voting(self.standing, self.readiness, self.transfer)
        self.verdicts = Verdicts(self.standing, self.transfer)
        self.masked = MaskedRounds(self.standing, self.voting)
        self.member = Membership(self.voting, self.transfer, self.verdicts, self.masked)
        self.audits = self.member.audits
        self.leader = Leader(self.standing, self.readiness, self.voting, self.member)
        self._billed = Traffic(), Traffic()
        refusals = {"propose": self.voting.unknown_leader, "sync": self.transfer.nothing_to_give}
        access = Gatekeeper(self.standing, refusals)
        for channel, answer in self._answers().items():
            kind = ANSWER_KINDS.get(channel, ByteKind.CONTROL)
            net.serve(channel, partial(access.guarded, channel, answer), kind=kind)

    def _answers(self) -> dict[str, Answer]:
        """By channel: what is asked for there, and who answers."""
        return {
            "propose": self.voting.answer_propose,
            "seal": self.member.answer_seal,
            "finish": self.verdicts.answer_finish,
            "endorse": self.voting.answer_endorse,
            "decided": self.verdicts.answer_decided,
            "overtaken": self.verdicts.answer_overtaken,
            "resend": self.transfer.answer_resend,
            "sync": self.transfer.answer_sync,
            "audit": self.audits.answer_audit,
            "recall": self.audits.answer_recall,
            "fraud": self.audits.answer_fraud,
            "share": self.masked.answer_share,
            "masked": self.masked.answer_masked,
            "held": self.masked.answer_held,
            "pledge": self.masked.answer_pledge,
            "reveal": self.masked.answer_reveal,
            "ready": self.readiness.answer_ready,
            "vouch": self.readiness.answer_vouch,
            CHANNEL: self._answer_terms,
        }

    async def _answer_terms(self, sender: PeerId, request: Parcel) -> Parcel:
        return await self.standing.terms.answer(sender, request)

    # --- where it stands ---

    @property
    def state(self) -> Snapshot:
        return self.standing.state

    @property
    def record(self) -> Record:
        return self.standing.record

    @property
    def history(self) -> dict[int, Record]:
        return self.standing.history

    @property
    def instance(self) -> Instance | None:
        return self.standing.instance

    @property
    def behind(self) -> bool:
        return self.standing.behind

    @property
    def index(self) -> int:
        return self.standing.index

    @property
    def terms(self) -> Terms:
        return self.standing.terms

    @terms.setter
    def terms(self, terms: Terms) -> None:
        self.standing.terms = terms

    @property
    def helped(self) -> dict[int, Roster]:
        """By iteration, the roster that this peer has helped to unmask."""
        return self.standing.helped

    @property
    def last_roster(self) -> Roster | None:
        """Of the last exchange that began here."""
        return self.standing.last_roster

    @property
    def discarded(self) -> int:
        """Commits that were given up for others', until somebody sets it to 0."""
        return self.standing.discarded

    @discarded.setter
    def discarded(self, count: int) -> None:
        self.standing.discarded = count

    @property
    def exchanging(self) -> bool:
        """Whether an attempt that others count on is under way here."""
        instance = self.instance
        task = instance.work.task if instance and not instance.over.is_set() else None
        return task is not None and not task.done()

    # --- one iteration ---

    async def run_iteration(self, mine: Contribution | None) -> Outcome:
        """Take part in the next iteration: with a contribution, or (None) as a witness that only votes."""
        standing = self.standing
        if mine is not None and not usable(mine, self.settings):
            mine = None  # a sender checks its own update: what nobody could use never leaves
        if mine is not None and (self.behind or mine.base != self.record.hash):
            standing.late = True
            sent, received = self._bill()  # others went on while it was made
            return Outcome(self.record.iteration + 1, "stale", sent=sent, received=received)
        started = self.net.now()
        small = None if self.behind else self.settings.integers  # whoever is behind does not know the scales
        integers = small and standing.wire_now(small)
        instance = standing.enter()
        instance.mine, instance.begun = mine, True
        instance.entered = started
        instance.patience = self.readiness.first_turn(instance)
        role, weight = (MEMBER, mine.weight) if mine else (WITNESS, 0.0)
        announcing = asyncio.create_task(self.readiness.announce(role, weight))
        driving = asyncio.create_task(self.leader.drive(instance))
        tasks = [announcing, driving]
        for peer, head in standing.notices.claims(self.record.iteration).items():
            known = standing.commits.get(head.iteration, head.hash)  # what is long past cannot be judged any more
            if head.iteration > self.record.iteration or known != head.hash:
                self.talk.aside(self.transfer.look_after(peer, peer, head.hash))  # it can prove that it is ahead
        if not standing.proofs.settled:
            tasks.append(asyncio.create_task(self._doubt(instance)))
        try:
            await self._until_over(instance, started + self.settings.iteration_timeout)
        finally:
            for task in tasks:
                task.cancel()
        instance.begun = False
        await self._settle(instance)
        instance.release()
        if instance.record is not None:
            self.net.forget(instance.iteration)
        outcome = self._outcome(instance, self.net.now() - started)
        return replace(outcome, bits=_bits(instance, integers), slow=tuple(instance.slow), lost=tuple(instance.lost))

    async def _until_over(self, instance: Instance, limit: float) -> None:
        """Wait for the decision; a slow exchange that goes on is not given up at the limit."""
        while not instance.over.is_set() and self.net.now() < limit:
            await self.talk.until(instance.over, limit)
            limit = max(limit, instance.last_sign + self.settings.phase_timeout)
            if instance.leads_slowly:
                limit = max(limit, instance.patience)

    async def _doubt(self, instance: Instance) -> None:
        """Give up the record that this iteration builds on, if nobody can show it to be certified for long enough.

        Its leader lied, or all who saw the certificate are gone: then the decision before is made again.
        """
        standing, record = self.standing, self.record
        while not standing.proofs.settled and not instance.over.is_set():
            await self.talk.until(instance.over, self.net.now() + self.settings.ready_timeout)
            if instance.over.is_set() or await self.transfer.settle() or standing.record is not record:
                return
            standing.step_back()

    async def _settle(self, instance: Instance) -> None:
        """After the decision: tell latecomers where the head is, and fetch the result if it was missed here."""
        record, lead = instance.record, instance.lead
        if record is None or record.roster is None:
            return
        self.audits.settled(instance)
        if lead.attempt >= 0:
            await self.verdicts.tell(instance, record, [witness.id for witness in record.roster.witnesses])
            late = {peer for peer in record.roster.ids if lead.finishes.get(peer) != record.hash}
            if not record.roster.electors:  # of the same lineage: a vote may have been lost on its way
                late |= {peer for peer, why in record.roster.omitted if why == SILENT}
            if late := late - {self.net.me}:
                self.verdicts.tell_late(instance, record, late)
        if lead.attempt >= 0 or self.net.me in record.roster.ids[:2]:
            self.talk.aside(self.standing.announce_head(record))  # nobody who took part waits for it
        if instance.mine is not None and self.state.hash != record.hash:
            try:
                self.standing.install(await self.transfer.fetch(self._donors(instance), record.hash))
            except SyncError:  # stale for now: the next catch-up goes on
                self.standing.donors.update(dict.fromkeys(instance.holders))

    def _donors(self, instance: Instance) -> list[PeerId]:
        """Who holds the result; those who let me wait for their part of it come last."""
        attempt = instance.work.exchange
        late = {attempt.roster.members[rank].id for rank in attempt.overdue | attempt.waiting} if attempt else set()
        return sorted((peer for peer in instance.holders if peer != self.net.me), key=late.__contains__)

    def _bill(self) -> tuple[Traffic, Traffic]:
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
        if not roster.is_sum:
            why = ABANDONED if roster.restores is None else f"the run went back to iteration {roster.restores}"
            present, missing = (), missing | dict.fromkeys(roster.ids, why)
        return Outcome(
            instance.iteration, "committed", record.hash, roster.attempt, roster.exchange, present, missing,
            self.state.hash == record.hash, self.discarded, sent, received, seconds, *self.audits.news(),
            roster.restores, hasty(instance.before, roster, self.settings.seniority),
        )  # fmt: skip

    def may_carry(self, mine: Contribution) -> bool:
        """Whether an update that came too late may be brought once more, to a later iteration: it counts nowhere yet.

        Nobody may have it who was not offered it, so no roster that was ever sealed has it.
        """
        return self.standing.carries and mine.base not in self.standing.offered and not mine.age

    # --- catch-up ---

    async def catch_up(self) -> bool:
        """Fetch the winning head's state if it is not mine; whether this peer now holds the newest it knows of.

        The next leader is told that this peer trains now. Where it goes on without it, what comes of that is fetched as
        well: else whoever was late once would be late again and again.
        """
        newest = await self._fetch_newest()
        limit = self.net.now() + self.settings.iteration_timeout
        while newest is None and self.net.now() < limit:
            late_for = await self.readiness.announce(NOT_YET)
            if late_for is None:
                return True
            self.standing.follows = True
            try:
                followed = await self._follow(late_for, limit)
            finally:
                self.standing.follows = False
            if not followed:
                return True
        return newest is not False

    async def _fetch_newest(self) -> bool | None:
        """None: a newer state is here now. Otherwise whether mine is the newest that I know of."""
        heads = await self.standing.heads()
        better = await self._answering([peer for peer, _ in heads])
        donors = [p for p in dict.fromkeys([*better, *reversed(self.standing.donors)]) if p != self.net.me]
        if self.behind and self.record.roster:
            donors += [p for p in self.record.roster.ids if p not in donors and p != self.net.me]
        try:
            self.standing.install(await self.transfer.fetch(donors, None))
        except SyncError:
            self.transfer.missed()
            return not self.behind and not await self._is_outrun(peer for peer, _ in heads)
        self.standing.donors.clear()
        return None

    async def _answering(self, peers: list[PeerId]) -> list[PeerId]:
        """Whom to ask for a state: several strangers are asked at once where they are, and the silent not again."""
        strangers = [peer for peer in peers if self.record.electors and not self.standing.is_elector(peer)]
        if len(strangers) < 2:
            return peers
        seen = await asyncio.gather(*map(self.transfer.seen, strangers))
        silent = {peer for peer, what in zip(strangers, seen, strict=True) if what is Sight.NOTHING}
        return [peer for peer in peers if peer not in silent]

    async def _is_outrun(self, peers: Iterable[PeerId]) -> bool:
        """Whether one of these can prove what it announced: who cannot would keep me waiting for ever."""
        return any(await asyncio.gather(*map(self.transfer.is_ahead, peers)))

    async def _follow(self, leader: PeerId, limit: float) -> bool:
        """Fetch what comes of an iteration that is under way without me; False if nothing does in time."""
        pause, before = self.settings.poll, self.record.hash
        while self.net.now() < limit:
            await self.net.sleep_until(self.net.now() + pause)
            if self.record.hash != before and not self.behind:
                return True  # it voted, and was given the result to hold
            try:
                self.standing.install(await self.transfer.fetch([leader], None))
                return True
            except SyncError:
                if pause >= self.settings.takeover and await self._fetch_newest() is None:
                    return True  # the leader may be gone
            pause = min(2 * pause, self.settings.takeover)
        return False

    # --- leaving ---

    async def farewell(self) -> None:
        """Nobody need wait for me. What I am part of is brought to its end; then the next ones must know it, too."""
        if self.standing.diary.revoked:
            return  # another process may speak in this name: it has not left
        self.verdicts.leaving.set()  # whoever may not know what was decided is told now
        await self.talk.rest(self.settings.poll)  # a notice that is under way must not arrive after the goodbye
        said = b""
        while said != self.record.hash:
            said = self.record.hash
            await asyncio.gather(self.readiness.announce(LEFT), self.talk.rest())
            while self.exchanging:
                await self.net.sleep_until(self.net.now() + self.settings.poll)

    @property
    def heirs(self) -> set[PeerId]:
        """Who was there lately and has not left, where nobody but me holds the newest state: it would go with me."""
        roster, standing = self.record.roster, self.standing
        gone = {self.net.me, *standing.notices.left, *standing.banned}
        if roster is None or self.behind or not gone.issuperset(roster.ids):
            return set()
        rosters = (known.roster for known in (*standing.history.values(), self.record) if known.roster)
        return {one.id for known in rosters for one in known.party} - gone

    async def hand_over(self, seconds: float) -> bool:
        """Serve on, after a goodbye, until an heir holds my newest state; False: none took it in so many seconds.

        Who still trains when I have gone on alone could never go on: what is certified would be gone.
        """
        limit = self.net.now() + seconds
        while heirs := self.heirs:
            if any(self.transfer.given.get(peer) == self.record.hash for peer in heirs):
                await self.net.sleep_until(self.net.now() + self.settings.poll)  # the last bytes are on their way
                return True
            answers = await asyncio.gather(*(self.readiness.tell_goodbye(peer) for peer in sorted(heirs)))
            if not any(answers) or self.net.now() >= limit:
                return False
            await self.net.sleep_until(min(limit, self.net.now() + max(1.0, self.settings.poll)))
        return True


def usable(mine: Contribution, settings: Settings) -> bool:
    """Whether this contribution may leave; what makes integers of it refuses by itself what they cannot carry."""
    if not settings.may_weigh(mine.weight):
        allowed = f"a number from 0 to {settings.max_weight:g}, which is the run's max_weight"
        allowed = "0 or 1 with privacy, where all count alike" if settings.alike else allowed
        raise InputError(f"weight: {mine.weight} must be {allowed}")
    return mine.weight == 0 or mine.quantise is not None or can_carry(settings.wire, weighted(mine))


def genesis(state: Snapshot, founders: tuple[tuple[PeerId, int], ...] = ()) -> Record:
    """The record of the beginning: everybody starts from this state; founders are named where they are known."""
    return Record(None, state.hash, tuple(Elector(peer, index) for peer, index in founders))


def _bits(instance: Instance, integers: IntegerWire | None) -> FieldBits | None:
    """In how many bits values travelled; None where nothing was summed, or where that follows from unknown scales."""
    roster = instance.record and instance.record.roster
    if not roster or not roster.is_sum or (is_small(roster.wire) and integers is None):
        return None
    return field_bits(roster.wire, integers, len(roster.circle or roster.members))
