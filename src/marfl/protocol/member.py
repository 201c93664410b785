"""A member's part in a sealed attempt: exchange (or fetch what is adopted), vote, and hear what was decided.

`Verdicts` is how a peer learns of a decision (Paxos: the learner): from the leader it reports its hash to, or from
whoever knows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from marfl.errors import DeadlineExceeded, NetError, SyncError, WireError
from marfl.net.base import Parcel, PeerId
from marfl.plan.grid import plan
from marfl.protocol.attempt import Attempt, Stuck, TooSlow
from marfl.protocol.audit import Audits
from marfl.protocol.ballot import Sealed, is_terse, may_vote, on_seal
from marfl.protocol.commits import check
from marfl.protocol.exchange import Contribution, mean, weighted
from marfl.protocol.fraud import CONTRADICTION, Proof
from marfl.protocol.instance import Accepted, Instance, Led, passed_by
from marfl.protocol.masked_rounds import MaskedRounds
from marfl.protocol.meetings import Meetings
from marfl.protocol.messages import Decided, Finish, Ok, Overtaken, Ruling, Seal
from marfl.protocol.pace import Pace
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import VOID, Record, Roster, brief_record, decode_record, ranked, unbrief
from marfl.protocol.seniority import parted
from marfl.protocol.signed_slices import Signed
from marfl.protocol.standing import OTHER_RESULT, UNPROVEN, Standing
from marfl.protocol.statements import Certificate
from marfl.protocol.transfer import Sight, StateTransfer
from marfl.protocol.voting import GROUNDLESS, UNFIT, Voting, names_electors_rightly
from marfl.state import all_finite

SHOWN = 16  # holders of a result that are named
SHORT = 16  # signatures of a certificate that everybody is shown
HEIRS = 3  # the next leaders: they are shown every certificate
BAD_VOTE = "bad signature of a vote"  # counted in `Net.refused`
ELSEWHERE = "verdict of another lineage"  # that does not win: counted in `Net.refused`


class Verdicts:
    """Reports to a leader, and what was decided."""

    def __init__(self, standing: Standing, transfer: StateTransfer) -> None:
        self.standing, self.transfer, self.talk = standing, transfer, standing.talk
        self.net, self.settings = standing.net, standing.settings
        self.untold: set[PeerId] = set()  # who may not know yet what was decided under my lead
        self.leaving = asyncio.Event()

    async def report(
        self, instance: Instance, leader: PeerId, digest: bytes | None, limit: float, silence: float = math.inf,
        *, final: bool = True,
    ) -> None:  # fmt: skip
        """Tell the leader how the attempt went, until it has a verdict, vanishes or falls silent."""
        attempt, answered = instance.work.attempt, self.net.now()
        finish = Finish(instance.iteration, attempt, digest, final, self._signed(instance, digest)).parcel()
        while self.net.now() < limit and not instance.over.is_set() and (instance.promised == attempt or not final):
            try:
                if leader == self.net.me:
                    answer = await self.answer_finish(leader, finish)
                else:
                    deadline = self.net.now() + self.settings.call_timeout
                    answer = await self.net.call(leader, "finish", finish, deadline=deadline)
                ruling, answered = Ruling.decode(answer.header), self.net.now()
                if instance.work.exchange is not None and leader != self.net.me:
                    instance.work.exchange.signs.note(leader)
                if ruling.status == "commit" and ruling.record:
                    record = decode_record(ruling.record, instance.electors)
                    await self.learn(instance, leader, record, ruling.holders, ruling.certificate)
                    return
            except DeadlineExceeded:
                if self.net.now() - answered < silence:
                    continue
                break
            except (NetError, WireError):  # an answer that is no answer is as good as none
                break
            if ruling.status != "pending" or not final:
                break
        if final:
            self.standing.wait_for_leader(instance, 0.0)

    async def news(self, instance: Instance, peer: PeerId) -> bool:
        """Ask a peer whether this iteration is committed; whether it is over now."""
        await self.report(instance, peer, None, self.net.now() + self.settings.call_timeout, final=False)
        return instance.over.is_set()

    def _signed(self, instance: Instance, digest: bytes | None) -> bytes:
        """My signature of the vote that I cast last, if it is for this hash."""
        mine = instance.accepted
        if mine is None or mine.hash != digest:
            return b""
        return self.net.sign(instance.vote(mine.roster, mine.attempt, mine.hash).statement)

    # --- what others say was decided ---

    async def learn(
        self, instance: Instance, teller: PeerId, record: Record, holders: tuple[PeerId, ...], proof: bytes
    ) -> None:
        """Somebody says what was decided: it counts once that is certain (see `commits`); else it must prove it."""
        if not self.take_over(instance, teller, record, holders, proof):
            seen = await self.transfer.look(teller)
            if seen is Sight.LOSES and record.lineage != instance.lineage:
                self.net.refused.note(ELSEWHERE, teller)

    def take_over(
        self, instance: Instance, teller: PeerId, record: Record, holders: tuple[PeerId, ...], proof: bytes
    ) -> bool:
        """Take a decision over if its certificate holds, or an elector tells of the result that I have voted for."""
        standing, mine = self.standing, instance.accepted
        if instance.over.is_set():
            return True
        if record.roster is None or (record.roster.base, record.lineage) != (instance.base, instance.lineage):
            return False  # a lineage that others found is not entered by the way: see `Commits.is_beaten`
        if proof:
            try:
                votes = Certificate.decode(proof)
                check(standing.record, record, votes, self.settings.liars, self.net.verify)
            except WireError:
                self.net.refused.note(UNPROVEN, teller)
                return False
            standing.decide(instance, standing.record.after(record.roster, record.hash), holders, votes)
            return True
        borne = standing.proofs.borne(instance.electors)
        own = mine is not None and mine.value == (record.roster.digest, record.hash)
        if not own or (borne and (len(instance.electors) + borne) // 2 < SHORT):
            self.net.refused.note(UNPROVEN, teller)  # only of what I voted for, and long ones, it need not be shown
            return False
        if not standing.is_elector(teller):
            return False
        standing.decide(instance, standing.record.after(record.roster, record.hash), holders, vouchers=[teller])
        return True

    async def answer_finish(self, sender: PeerId, request: Parcel) -> Parcel:
        """As the leader: note a member's report, and answer once there is a verdict (or ask it to come again)."""
        said, instance = Finish.decode(request.header), self.standing.instance
        known = self.standing.history.get(said.iteration)
        if known is None and instance is not None and instance.iteration == said.iteration:
            if instance.lead.attempt != said.attempt:
                return Ruling("unknown", None, ()).parcel()
            if said.final:
                if not self._is_signed(instance.led, sender, said):
                    self.net.refused.note(BAD_VOTE, sender)
                    return Ruling("unknown", None, ()).parcel()
                self._compare(instance.led, sender, said)
                instance.finished(sender, said.hash, said.signature)
                await self.talk.until(instance.over, self.net.now() + self.settings.call_timeout / 2)
            known = instance.record
            if known is None:
                pending = instance.lead.attempt == said.attempt and not instance.over.is_set()
                return Ruling("pending" if pending else "retry", None, ()).parcel()
        if known is None or known.roster is None:
            return Ruling("unknown", None, ()).parcel()
        self.untold.discard(sender)
        self._compare_late(sender, said, known)
        current = instance if instance and instance.record is known else None
        holders, electors = (current.holders, current.electors) if current else (known.roster.ids, ())
        proof = self._shown(known, sender, voted=said.hash == known.hash)
        return Ruling("commit", brief_record(known, electors), holders[:SHOWN], proof).parcel()

    def _compare(self, led: Led | None, sender: PeerId, said: Finish) -> None:
        """Whether a signed report is the sender's first in the attempt that I lead."""
        if said.hash is not None and led is not None:
            self.standing.note_vote(led, sender, said.hash, said.signature)

    def _compare_late(self, sender: PeerId, said: Finish, known: Record) -> None:
        """The same of a report in the attempt that I led last, which is decided by now."""
        led = self.standing.led
        if led is None or said.hash is None or (led.iteration, led.attempt) != (said.iteration, said.attempt):
            return
        second = any(voter == sender and other != said.hash for voter, other in led.votes)
        other = said.hash != known.hash and (sender, said.hash) not in led.votes  # else it was named with the decision
        if (second or other) and sender in led.roster.ranks and self._is_signed(led, sender, said):
            if other:
                self.net.refused.note(OTHER_RESULT, sender)
            self._compare(led, sender, said)

    def _is_signed(self, led: Led | None, sender: PeerId, said: Finish) -> bool:
        """Whether a report is signed by whoever sends it, as a vote in the attempt that I lead."""
        if said.hash is None or led is None:
            return said.hash is None
        return self.net.verify(sender, led.vote(said.hash).statement, said.signature)

    def _shown(self, record: Record, to: PeerId, *, voted: bool) -> bytes:
        """The certificate of a record, for those who need to see it: who did not vote for it, or may lead next.

        Short ones are for everybody. Where so many vote that they are long, others go by the word of who saw them.
        """
        proof = self.standing.proofs.certificate(record)
        if proof is None:
            return b""
        heirs = ranked(self.settings.run, record.iteration + 1, record.electors)[:HEIRS]
        many = len(proof.signatures) > SHORT and self.net.me != heirs[0].id
        if voted and many and to not in {heir.id for heir in heirs}:
            return b""
        return proof.encoded

    async def tell(self, instance: Instance, record: Record, peers: Iterable[PeerId]) -> None:
        """Tell voters that had no part in it what was decided: they need the record to vote again."""
        notice = self._notice(instance, record)
        await asyncio.gather(*(self.talk.ask(peer, "decided", notice) for peer in peers if peer != self.net.me))

    def tell_late(self, instance: Instance, record: Record, late: set[PeerId]) -> None:
        """Tell peers what was decided that do not ask for it a phase later: they still wait for what nobody sends."""
        self.untold |= late
        assert record.roster is not None
        patience = self.standing.pace(record.roster).phase  # whoever is about to have it is not told to fetch it
        self.talk.aside(self._tell_late(self._notice(instance, record), late, patience))

    async def _tell_late(self, notice: Parcel, late: set[PeerId], patience: float) -> None:
        """Later, without the instance, which need not be kept for it."""
        await self.talk.until(self.leaving, self.net.now() + patience)
        await asyncio.gather(*(self.talk.ask(peer, "decided", notice) for peer in sorted(late & self.untold)))
        self.untold -= late

    async def answer_decided(self, sender: PeerId, request: Parcel) -> Parcel:
        """Somebody whom this peer voted for knows that the iteration is decided."""
        said, standing = Decided.decode(request.header), self.standing
        instance, mine = standing.instance, standing.record
        if said.iteration <= mine.iteration and not (instance and instance.iteration == said.iteration):
            return Ok("ok").parcel()  # it knows, or has gone elsewhere since
        record = decode_record(said.record, instance.electors if instance else ())
        if instance and record.roster and record.roster.base == instance.base and record.lineage == instance.lineage:
            self.talk.aside(self.learn(instance, sender, record, said.holders, said.certificate))
        elif record.hash not in standing.commits.values():
            self.talk.aside(self.transfer.look_after(sender, sender, record.hash))
        return Ok("ok").parcel()

    async def answer_overtaken(self, sender: PeerId, request: Parcel) -> Parcel:
        """Somebody has seen a head that wins over ours; what I have finished myself is not elsewhere, but decided."""
        said, standing = Overtaken.decode(request.header), self.standing
        instance = standing.instance
        finished = instance.accepted if instance else None
        if instance is not None and finished is not None and finished.hash == said.hash:
            self.talk.aside(self.news(instance, sender))
        elif said.hash not in standing.commits.values() and standing.is_known(sender):  # nobody goes for a stranger's
            self.talk.aside(self.transfer.look_after(sender, said.peer or sender, said.hash))
        return Ok("ok").parcel()

    def _notice(self, instance: Instance, record: Record) -> Parcel:
        """What was decided, for those who know the electors of the iteration."""
        proof = self.standing.proofs.certificate(record)
        named = brief_record(record, instance.electors)
        return Decided(record.iteration, named, instance.holders[:SHOWN], proof.encoded if proof else b"").parcel()


class Membership:
    """One peer's part in sealed attempts."""

    def __init__(self, voting: Voting, transfer: StateTransfer, verdicts: Verdicts, masked: MaskedRounds) -> None:
        standing = voting.standing
        self.standing, self.voting = standing, voting
        self.transfer, self.verdicts, self.masked = transfer, verdicts, masked
        self.net, self.settings = standing.net, standing.settings
        self.audits = Audits(standing)
        standing.contradicted = self._accuse

    def _accuse(self, liar: PeerId, one: Signed, other: Signed) -> None:
        """Tell everybody of two words that contradict each other, and leave out whoever said them."""
        if liar not in self.standing.banned and liar != self.net.me:
            self.standing.talk.aside(self.audits.accuse(Proof(CONTRADICTION, liar, (one, other))))

    async def answer_seal(self, sender: PeerId, request: Parcel) -> Parcel:
        """The leader publishes a roster: begin, or say that this is not mine to begin."""
        seal, instance = Seal.decode(request.header), self.standing.instance
        roster = unbrief(seal.roster, instance.electors if instance else ())
        promises, arrivals = parted(seal.promises)
        keys = bytes(request.payload)
        given = Sealed(
            seal.attempt, seal.adopt, seal.holders, keys, promises, seal.votes, arrivals, seal.signature
        )  # fmt: skip
        self.audits.warn(sender, roster)
        return Ok("ok" if self.begin(sender, roster, given) else "refused").parcel()

    def begin(self, sender: PeerId, roster: Roster, seal: Sealed) -> bool:
        """Start my part in a sealed attempt, unless I have promised a later one."""
        instance, attempt = self.standing.instance, seal.attempt
        if instance is None or instance.over.is_set():
            return False
        if not on_seal(instance.acceptor(barred=False), self.net.me, sender, roster, seal):
            return False
        if not self._follows(instance, roster):
            self.net.refused.note(UNFIT, sender)
            return False
        signed = sender == self.net.me or self.voting.is_signed(instance, roster, seal)
        if instance.work.attempt == attempt:
            return True  # sent twice
        if not signed or (sender != self.net.me and not self.voting.is_grounded(instance, roster, seal)):
            self.net.refused.note(GROUNDLESS, sender)
            return False
        if seal.adopt is None and not self._may_compute(instance, roster, seal):
            self.net.refused.note(UNFIT, sender)
            return False
        instance.promise(attempt)
        instance.sealed[roster.digest] = roster
        self.standing.judge_anew()
        if roster.electors:
            instance.electors = ranked(self.settings.run, roster.iteration, roster.electors)
        work = instance.work
        instance.heard = self.net.now()
        work.attempt, work.tries, work.interrupted = attempt, work.tries + 1, False
        work.task = asyncio.create_task(self._take_part(instance, sender, roster, seal))
        return True

    def _may_compute(self, instance: Instance, roster: Roster, seal: Sealed) -> bool:
        """Whether what this roster sums is mine to give, or there is nothing to give."""
        again = roster.masked and roster.attempt < seal.attempt  # its masked sum is to be seen through
        mine = instance.mine is not None and roster.layout == self.standing.layout
        if not roster.is_sum:
            mine = not self.standing.behind  # whoever holds the state can let an iteration go by
            mine = mine and (roster.restores is None or self.standing.may_take_back(roster))
        if not (mine and (again or roster.attempt == seal.attempt)) or not self._is_fair(instance, roster):
            return False
        return not roster.masked or self.masked.opens(instance, roster, seal.keys)

    def _follows(self, instance: Instance, roster: Roster) -> bool:
        """Whether a roster is of this iteration and lineage, from the state that I hold, in a way that I know."""
        ways = self.settings.exchange, *self.settings.fallbacks
        if roster.is_sum and (roster.exchange not in ways or roster.wire != self.settings.wire):
            return False
        if roster.is_sum and not self.settings.holds(len(roster.members)):
            return False  # their sum could wrap
        if roster.group_size != self.settings.group_size:
            return False
        if (roster.run, roster.iteration, roster.lineage) != (self.settings.run, instance.iteration, instance.lineage):
            return False
        if not all(self.settings.may_weigh(member.weight) for member in roster.members):
            return False
        if not names_electors_rightly(instance, roster) or not is_terse(instance.before, instance.electors, roster):
            return False
        barred = self.standing.barred == instance.iteration and instance.founder is None
        return roster.base == self.standing.record.hash and not barred

    def _is_fair(self, instance: Instance, roster: Roster) -> bool:
        """Whether mine counts for what it is worth, and is summed with as many others as it demands."""
        mine, rank = instance.mine, roster.ranks.get(self.net.me)
        if mine is None or rank is None or not roster.is_sum:
            return True
        weight = roster.members[rank].weight
        return weight == mine.weight and (not weight or roster.contributions >= mine.fewest)

    async def _take_part(self, instance: Instance, leader: PeerId, roster: Roster, seal: Sealed) -> None:
        """Exchange (or fetch the result to adopt), vote for the hash, and wait for the leader's verdict."""
        layout = plan(len(roster.members), roster.group_size)
        phases = self.settings.phases(roster.exchange, roster.iteration, layout)
        pace = self.standing.pace(roster)
        seconds = (phases + 1) * pace.phase + 2 * self.settings.call_timeout
        self.standing.wait_for_leader(instance, seconds)
        try:
            if seal.adopt:
                result: Accepted | None = await self._adopt(instance, roster, seal)
            else:
                if roster.attempt < seal.attempt:
                    await self.masked.fetch_sum(instance, roster, seal.holders)
                result = await self._result(instance, leader, roster, seal.attempt)
        except (Stuck, SyncError) as error:
            result = None
            if isinstance(error, TooSlow):
                instance.slow.append(slow_link(str(error), seal.attempt, pace, self.settings))
            elif not instance.over.is_set():
                instance.note_lost(seal.attempt, str(error))
        if result is not None and not self.standing.proofs.settled and not await self.transfer.settle():
            result = None  # what it builds on may not be committed
        if result is not None and not may_vote(instance.ballot, seal.attempt, result.value):
            result = None  # a later attempt was promised, or a majority's hash endorsed that is not mine
        if result is not None:
            self.standing.accept(instance, result)
        if not instance.over.is_set():
            digest = result.hash if result else None
            silence = seconds - (phases + 1) * pace.extra
            await self.verdicts.report(instance, leader, digest, self.net.now() + seconds, silence)

    async def _result(self, instance: Instance, leader: PeerId, roster: Roster, attempt: int) -> Accepted:
        """The state that follows from this roster."""
        if roster.exchange == VOID:
            state = passed_by(self.standing.state, roster)
            return Accepted(attempt, roster, state.hash, state, None)
        if roster.restores is not None:
            former = self.standing.taken_back(roster)
            if former is None:
                raise Stuck("the state that the run goes back to is not here any more")
            return Accepted(attempt, roster, former.hash, former, None)
        if roster.attempt < attempt:
            update = await self.masked.unmasked(instance, leader, roster, attempt)
        else:
            update = await self._exchange(instance, leader, roster)
        if update.is_floating_point() and not all_finite(update):
            raise Stuck("the sum overflows")
        state = self.standing.advance(self.standing.state, update, roster)
        return Accepted(attempt, roster, state.hash, state, update)

    async def _exchange(self, instance: Instance, leader: PeerId, roster: Roster) -> Tensor:
        """The mean over exactly the roster."""
        mine = instance.mine
        assert mine is not None
        layout = plan(len(roster.members), roster.group_size)

        async def overtaken(by: PeerId | None) -> bool:
            return await self.verdicts.news(instance, by or leader)

        meetings = self.settings.meetings(roster.iteration, layout)
        ahead = meetings + roster.masked
        pace = self.standing.pace(roster)
        attempt = Attempt(self.net, roster, layout, mine.delta.numel(), pace, overtaken, ahead)
        self.audits.begin(attempt)
        instance.keep_nothing()
        instance.work.exchange, self.standing.last_roster = attempt, roster
        try:
            if mine.prepare is not None and meetings:
                mine = replace(mine, delta=await mine.prepare(Meetings(attempt)))
                if not all_finite(mine.delta):
                    raise Stuck("what became of my update is not finite")  # it never leaves
            value = await self._value(attempt, mine)
            if roster.masked:
                return await attempt.once_written(self.masked.mean(instance, leader, attempt, value))
            return await attempt.once_written(mean(attempt, value, self.settings.room))
        finally:
            attempt.overtaken = None  # it knows the instance, which knows the attempt: neither would ever be freed

    async def _value(self, attempt: Attempt, mine: Contribution) -> Tensor:
        """What I bring to the sum: w·Δ, or integers of it where few bits travel."""
        wire, make = self.settings.integers, mine.quantise
        if wire is None:
            return weighted(mine)
        attempt.pack(self.standing.wire_now(wire))
        dtype = attempt.codec.dtype_of(0)
        if make is None or not mine.weight:  # it only helps
            return torch.zeros(mine.delta.numel(), dtype=dtype)

        def made() -> Tensor:
            value = make(mine.delta, mine.weight, attempt.roster)
            return torch.empty(0) if value is None else value.to(dtype)

        value = await self.standing.talk.compute(made)
        if value.numel() != mine.delta.numel():
            raise Stuck("an update that integers cannot carry")
        if mine.write_down is not None:
            attempt.written = asyncio.ensure_future(self.standing.talk.compute(mine.write_down))
        return value

    async def _adopt(self, instance: Instance, roster: Roster, seal: Sealed) -> Accepted:
        """Vote for an earlier attempt's result; it is fetched first where it is missing."""
        had = instance.accepted
        if had and had.hash == seal.adopt and had.state:
            return Accepted(seal.attempt, roster, had.hash, had.state, had.mean)
        caught = await self.transfer.fetch((peer for peer in seal.holders if peer != self.net.me), seal.adopt)
        return Accepted(seal.attempt, roster, caught.state.hash, caught.state, caught.mean)


def slow_link(peer: PeerId, attempt: int, pace: Pace, settings: Settings) -> str:
    """Which attempt was lost because something was slow, and what to change."""
    return (
        f"attempt {attempt} was lost: what {peer} sends was still on its way after the {pace.phase:.3g} s of a phase; "
        f"set slowest_link (now {settings.slowest_link:g} Mbit/s) or phase_timeout (now {settings.phase_timeout:g} s) "
        "to suit the slowest peer, or send less (wire = int8 or int4)"
    )
