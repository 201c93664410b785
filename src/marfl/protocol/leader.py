"""What a peer does when it is its turn to lead (Paxos: the proposer): wait for the others, gather votes, seal, commit.

Electors lead in rank order. A leader that falls silent is followed by the next one, with a higher attempt. Without a
majority of electors for long enough, the first peer that is there founds a new lineage (`on_minority = "fork"`).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, NamedTuple

from marfl.errors import WireError
from marfl.net.base import Parcel, PeerId
from marfl.plan.grid import plan
from marfl.protocol.audit import not_shown
from marfl.protocol.ballot import (
    BAD_ACK,
    Acks,
    Against,
    Reply,
    Sealed,
    Tally,
    Way,
    abandoned,
    check_ack,
    choose,
    culprits,
    decided,
    held,
    kept,
    last_vote,
    new_roster,
    quorum,
    willing,
)
from marfl.protocol.incarnations import SECOND
from marfl.protocol.instance import Instance
from marfl.protocol.mask_pledges import KIND, Keys, keys_for, masked, promised
from marfl.protocol.masked_rounds import MaskedRounds
from marfl.protocol.member import SHOWN, Membership, Verdicts
from marfl.protocol.messages import LEFT, MEMBER, NOT_YET, WITNESS, Ack, Endorse, Heavier, Propose, Seal, status_of
from marfl.protocol.readiness import Readiness
from marfl.protocol.roster import VOID, Elector, Roster, brief, decode_record, decode_roster, ranked
from marfl.protocol.standing import ReadyPeers, Standing
from marfl.protocol.terms import OTHERS
from marfl.protocol.voting import Voting

PATIENT = 3  # times that a leader, or a founder, gives way to those who refuse
PATIENT_TRIES = 4  # rosters, before somebody is left out for want of anybody to blame


class Promises(NamedTuple):
    """Who has promised an attempt to its leader, and the public keys that came with it where sums are masked."""

    acks: dict[PeerId, Ack]
    keys: dict[PeerId, bytes]


class Leader:
    """One peer's turns as a leader."""

    def __init__(self, standing: Standing, readiness: Readiness, voting: Voting, member: Membership) -> None:
        self.standing, self.readiness, self.voting, self.member = standing, readiness, voting, member
        self.verdicts: Verdicts = member.verdicts
        self.masked: MaskedRounds = member.masked
        self.talk, self.net, self.settings = standing.talk, standing.net, standing.settings

    # --- whose turn it is ---

    async def drive(self, instance: Instance) -> None:
        """Until the iteration is over: whenever the others have been silent for long enough, lead."""
        standing = self.standing
        if (standing.fetched or instance.rank(self.net.me) is None) and await self._elsewhere(instance):
            return  # a newcomer, or late before: better to know at once than to stay late for ever
        said = False
        while not instance.over.is_set():
            if await self._waited_in_vain(instance):
                return
            if self._is_first(instance):
                await self._lead_first(instance)
            elif await self._elsewhere(instance):
                return
            elif self.net.now() < instance.patience:
                continue  # while it looked, a leader came forward
            else:
                await self._take_turn(instance)
            if instance.over.is_set():
                return
            if instance.patience <= self.net.now():
                instance.patience = self.net.now() + self.settings.takeover
            if not said and not standing.behind:  # too few follow: whoever announced the state that I hold may be gone
                self.talk.aside(standing.announce_head())
                said = True

    async def _waited_in_vain(self, instance: Instance) -> bool:
        """Be patient; whether the others have gone on without this peer meanwhile.

        Who is not part of anything may be late, or others may still train: it looks less and less often.
        """
        pause, notices = self.settings.takeover, self.standing.notices
        look_at = self.net.now() + pause
        while self.net.now() < instance.patience:
            notices.news.clear()  # a goodbye may have shortened the wait
            await self.talk.until(notices.news, min(instance.patience, look_at))
            if self.net.now() >= look_at:
                if not instance.busy:
                    pause = min(3 * pause, 2 * self.settings.ready_timeout)
                    if await self._elsewhere(instance):
                        return True
                look_at = self.net.now() + pause
        return False

    def _is_first(self, instance: Instance) -> bool:
        """Whether everybody waits for this peer to lead, and it has not tried yet."""
        first = instance.rank(self.net.me) == 0 and instance.promised < 0
        return first and not self._alone(instance) and self.standing.barred != instance.iteration

    def _alone(self, instance: Instance) -> bool:
        """Whether no majority was heard of for long enough, or there is none any more."""
        silent = self.net.now() - max(instance.entered, instance.heard)
        return silent >= self.settings.minority_timeout or bool(self.readiness.survivors(instance))

    async def _lead_first(self, instance: Instance) -> None:
        """The first elector's turn: it looks for a heavier lineage while it gathers votes."""
        looking = asyncio.create_task(self._elsewhere(instance))
        try:
            await self.lead(instance, instance.next_attempt(0), looking)
        finally:
            looking.cancel()

    async def _take_turn(self, instance: Instance) -> None:
        """Lead an attempt, or found a lineage, if that is mine to do."""
        rank = instance.rank(self.net.me)
        if not instance.electors or (self._alone(instance) and self.settings.on_minority == "fork"):
            await self._found(instance)
        elif rank is not None and self.standing.barred != instance.iteration:
            await self.lead(instance, instance.next_attempt(rank))

    async def _elsewhere(self, instance: Instance) -> bool:
        """Whether a head that wins over mine has been announced: then nobody here goes on."""
        for peer, mass, digest in await self.standing.heads():
            record = self.standing.record
            if digest != record.hash and not record.beats(mass, digest):
                mine = instance.accepted
                if mine and mine.hash == digest:  # what this peer has finished is committed: it hears so, or adopts it
                    return await self.verdicts.news(instance, peer)
                notice = Heavier(digest, mass).parcel()
                voter = instance.rank(self.net.me) is not None  # of others the electors would not believe it
                others = {elector.id for elector in instance.electors} | instance.lead.seen if voter else set()
                telling = (self.talk.ask(other, "heavier", notice) for other in sorted(others - {self.net.me}))
                await asyncio.gather(*telling)
                self.standing.gone_elsewhere(peer)
                return True
        return False

    # --- phase 1: proposals ---

    async def lead(
        self, instance: Instance, attempt: int, elsewhere: asyncio.Task[bool] | None = None
    ) -> None:
        """One attempt of the lineage's own: needs the votes of a majority of its electors, and no heavier lineage."""
        wanted = {elector.id for elector in instance.electors} - self.standing.banned.keys()
        ready = await self.readiness.gather(instance, wanted, first=instance.work.tries == 0)
        if instance.over.is_set() or instance.promised >= attempt:
            return
        instance.lead.closed = True
        left = {peer for peer, said in ready.items() if said.role == LEFT}
        promises = await self.propose(instance, attempt, (wanted | ready.keys()) - left)
        if promises is None or not quorum(instance.electors, promises.acks):
            self.standing.wait_for_leader(instance, self.settings.takeover)
            return
        if elsewhere is not None and await elsewhere:
            return
        await self._seal(instance, attempt, promises, ready)

    async def _found(self, instance: Instance) -> None:
        """Begin a lineage with whoever is there and answers: they are its electors."""
        me = self.net.me
        before = instance.heard, instance.founder, instance.promised
        rest = self.readiness.survivors(instance) - {me}
        first = bool(rest) or not self.standing.record.electors
        ready = await self.readiness.gather(instance, rest, first=first)
        here = {peer: said.index for peer, said in ready.items() if said.role != LEFT} | {me: self.standing.index}
        there = ranked(instance.run, instance.iteration, tuple(Elector(peer, index) for peer, index in here.items()))
        turn = [elector.id for elector in there].index(me)
        await self.net.sleep_until(self.net.now() + turn * self.settings.takeover)
        if instance.over.is_set() or before != (instance.heard, instance.founder, instance.promised):
            return
        seed = f"{instance.run}:{instance.iteration}:{me}:{self.net.now()}".encode()
        instance.found(hashlib.sha256(instance.lineage + seed).digest(), me)
        instance.heard = self.net.now()
        instance.lead.foundings += 1
        promises = await self.propose(instance, 0, set(here), founding=True)
        if promises is None or not any(ack.role in (MEMBER, WITNESS) for ack in promises.acks.values()):
            instance.patience = self.net.now() + self.settings.takeover * (1 + turn)
            return
        instance.electors = there
        await self._seal(instance, 0, promises, ready)

    async def propose(
        self, instance: Instance, attempt: int, peers: set[PeerId], *, founding: bool = False
    ) -> Promises | None:
        """Ask for votes. None: it is not my turn after all (another attempt is under way, or others are ahead)."""
        standing, lead = self.standing, instance.lead
        liars = {elector.id for elector in instance.electors} & standing.banned.keys()
        before, lead.doubted = instance.promised, {liar: standing.banned[liar] for liar in sorted(liars)}
        proposal = Propose(
            instance.iteration, attempt, max(before, instance.known), instance.lineage, instance.base,
            standing.record.mass, founding, standing.incarnation, standing.terms.digest,
        )  # fmt: skip
        others = sorted(peers - {self.net.me})
        begun = self.net.now()
        parcel = proposal.parcel()
        timed = await asyncio.gather(*(self._timed_ask(peer, parcel) for peer in others))
        answers = {peer: answer for peer, (answer, _) in zip(others, timed, strict=True) if answer is not None}
        found = {peer: self._read_ack(instance, attempt, peer, answer) for peer, answer in answers.items()}
        acks = {peer: ack for peer, ack in found.items() if ack and ack.status == Reply.ACK.value}
        keys = {peer: bytes(answers[peer].payload) for peer in acks}
        heard = [ack for peer, ack in found.items() if ack and self._is_heeded(peer)]
        refusals = [ack.attempt for ack in heard if ack.status == Reply.REFUSED.value]
        if not founding:
            instance.known = max([instance.known, *refusals])
        outrun = bool(refusals) and _gives_way(instance, attempt, len(refusals), len(acks), founding=founding)
        if instance.record is not None:  # those who voted for this attempt do not know, and would wait for it
            self.talk.aside(self.verdicts.tell(instance, instance.record, acks))
        if instance.over.is_set() or outrun or instance.promised != before:
            return None
        if self.net.now() - begun > 1.5 * self.settings.call_timeout:
            return None  # it slept: what it knows is old
        if attempt < len(instance.electors) and self._seems_slow(timed):
            return None  # on its first turn, it lets somebody else lead
        if not acks and self.talk.dht.astray():
            return None  # others are there, but not for me: alone it decides nothing
        mine = self.voting.vote(self.net.me, proposal)  # last: until here it could still join another's attempt
        if mine.status == Reply.ACK.value:
            acks[self.net.me], keys[self.net.me] = mine, self.voting.offered_keys(mine)
        return Promises(acks, keys)

    def _is_heeded(self, peer: PeerId) -> bool:
        """Whether to believe what is said instead of a vote: anybody can refuse, or make up a record.

        In the beginning nobody is known, and everybody is believed.
        """
        return not self.standing.record.electors or self.standing.is_elector(peer)

    def _read_ack(self, instance: Instance, attempt: int, peer: PeerId, answer: Parcel) -> Ack | None:
        """An answer to a proposal; None for an answer that is none, and for a vote that must not count."""
        standing = self.standing
        try:
            ack = Ack.decode(answer.header)
            check_ack(ack, attempt, instance.decision, self.settings.max_weight)
            heeded = self._is_heeded(peer) and standing.terms.met(self.talk, peer, ack.terms)
            if ack.status == Reply.BEHIND.value and ack.record and heeded:
                self._learn(instance, peer, ack.record)
        except WireError:
            self.net.refused[BAD_ACK] += 1
            return None
        if not standing.terms.met(self.talk, peer, ack.terms):
            self.net.refused[OTHERS] += 1
            instance.lead.doubted[peer] = standing.terms.why(ack.terms)
            return None
        if ack.status != Reply.ACK.value:
            standing.incarnations.note(peer, ack.incarnation)
        elif why := standing.incarnations.vote(peer, ack.incarnation, instance.base + instance.lineage):
            self.net.refused[SECOND] += 1
            instance.lead.doubted[peer] = why
            return None
        return ack

    async def _timed_ask(self, peer: PeerId, parcel: Parcel) -> tuple[Parcel | None, float]:
        begun = self.net.now()
        answer = await self.talk.ask(peer, "propose", parcel)
        return answer, self.net.now() - begun

    def _seems_slow(self, timed: list[tuple[Parcel | None, float]]) -> bool:
        """Whether some peers kept silent and others answered late: the slow one may be me, and I must not judge."""
        silent = any(answer is None and seconds > 0.9 * self.settings.call_timeout for answer, seconds in timed)
        return silent and any(answer and seconds > self.settings.call_timeout / 3 for answer, seconds in timed)

    def _learn(self, instance: Instance, peer: PeerId, data: bytes) -> None:
        """Somebody is ahead: this very iteration may be decided already; otherwise sync."""
        record, mine = decode_record(data), self.standing.record
        if record.roster and record.roster.base == instance.base and record.iteration == instance.iteration:
            self.standing.decide(instance, record, (peer, *record.roster.ids))
        elif record.beats(mine.mass, mine.hash):
            self.standing.gone_elsewhere(peer)

    # --- phase 2: a roster, or an earlier result ---

    async def _seal(self, instance: Instance, attempt: int, promises: Promises, ready: ReadyPeers) -> None:
        """Adopt the result that may have been committed already, or seal a new roster; then see it through."""
        acks = promises.acks
        choice = choose(instance.electors, {peer: last_vote(ack) for peer, ack in acks.items()})
        if choice.way is Way.ADOPT:
            voters = [acks[elector.id] for elector in instance.electors if elector.id in acks]
            data = next(ack.accepted for ack in voters if ack.accepted and ack.accepted_hash == choice.hash)
            return await self._conduct(instance, decode_roster(data), Sealed(attempt, choice.hash, choice.holders))
        if choice.way is Way.WAIT:  # the only holders may be lost for good: in the end a new lineage is founded
            self.standing.wait_for_leader(instance, 0.0)
            return None
        pledge = promised(instance.electors, acks)
        if pledge is not None and not pledge.lost:
            return await self._conduct(instance, pledge.roster, Sealed(attempt, None, pledge.holders))
        roster = self._roster(instance, attempt, acks, ready)
        if roster is None:
            trains = any(ack.role == NOT_YET for ack in acks.values())
            instance.patience = self.net.now() + (self.settings.poll if trains else self.settings.takeover)
            return None
        if roster.exchange != VOID:
            roster = self._trimmed(instance, roster, acks, None if pledge else promises.keys)
        return await self._conduct(instance, roster, Sealed(attempt, keys=keys_for(roster, promises.keys)))

    def _roster(self, instance: Instance, attempt: int, acks: Acks, ready: ReadyPeers) -> Roster | None:
        """The roster that these acks make (see `ballot.new_roster`)."""
        settings, tries = self.settings, instance.work.tries
        blank = Roster(
            instance.run, instance.iteration, attempt, instance.lineage, instance.base, self.standing.layout,
            settings.exchange_of(tries), settings.group_size, (), (), (), (), settings.wire, piece=settings.piece,
        )  # fmt: skip
        voters = [elector.id for elector in (*instance.electors, *self.standing.record.electors)]
        announced = sorted(peer for peer, said in ready.items() if said.role == MEMBER)
        doubted = instance.lead.doubted
        against = Against(
            known=[*voters, *announced, *doubted],
            reasons=culprits(acks, patient=tries < PATIENT_TRIES) | not_shown(acks) | doubted,
            left={peer for peer, said in ready.items() if said.role == LEFT},
        )
        return new_roster(blank, acks, against, founding=attempt == 0 and instance.founder is not None)

    def _trimmed(self, instance: Instance, roster: Roster, acks: Acks, keys: Keys | None) -> Roster:
        """The roster without those who will not be in its sum, or without a sum; masked where all sums are.

        No keys: something of this iteration may have been unmasked already, so nothing else ever is.
        """
        if self.settings.wire == "masked":
            return masked(instance.masks.session, roster, acks, keys) if keys is not None else abandoned(roster)
        enough = willing(roster, acks)
        return enough if enough.contributions else abandoned(roster)

    async def _conduct(self, instance: Instance, roster: Roster, seal: Sealed) -> None:
        """Publish the roster, collect the hashes, commit once a majority agrees; or make way for the next attempt."""
        attempt = seal.attempt
        instance.lead.begin(attempt, roster)
        instance.heard = self.net.now()
        instance.sealed[roster.digest] = roster
        instance.masks.begin_leading()
        if roster.electors:
            instance.electors = ranked(instance.run, instance.iteration, roster.electors)
        parcel = _published(instance, roster, seal)
        # What is adopted may have lost most of its roster: then the electors hold it in their place.
        told = dict.fromkeys([*roster.ids, *(elector.id for elector in instance.electors if seal.adopt)])
        others = [peer for peer in told if peer != self.net.me]
        asking = (self.talk.ask(peer, "seal", parcel, KIND) for peer in others)
        work: list[asyncio.Task[Any]] = [asyncio.create_task(each) for each in asking]
        self.member.begin(self.net.me, roster, seal)
        if roster.wire == "masked" and seal.adopt is None:
            work.append(asyncio.create_task(self.masked.preside(instance, attempt, roster)))
        layout = plan(len(roster.members), roster.group_size)
        phases = self.settings.phases(roster.exchange, roster.iteration, layout)
        limit = self.net.now() + (phases + 1) * self.settings.phase_timeout + self.settings.call_timeout
        instance.patience = limit + self.settings.call_timeout
        try:
            await self._count(instance, attempt, roster, limit)
        finally:
            for task in work:
                task.cancel()
            if instance.lead.attempt == attempt and not instance.over.is_set():
                instance.lead.attempt = -1
                instance.patience = self.net.now()

    async def _count(self, instance: Instance, attempt: int, roster: Roster, limit: float) -> None:
        """Wait for finishes until there is a majority, or no hope of one."""
        lead = instance.lead
        members = tuple(Elector(member.id, member.index) for member in roster.members)
        endorsed: dict[PeerId, bytes] = {}
        again = attempt > roster.attempt
        while lead.attempt == attempt and not instance.over.is_set():
            reports = [lead.finishes[peer] for peer in roster.ids if peer in lead.finishes]
            complete = self.net.now() >= limit or len(reports) == len(roster.members)
            tally = Tally(lead.finishes, endorsed)
            digest = held(instance.electors, members, tally, again=again)
            holders = tuple(peer for peer, got in lead.finishes.items() if got is not None and got == digest)
            if digest is not None and not kept(roster.voters, holders):
                if await self._have_kept(instance, roster, Sealed(attempt, digest, holders)):
                    continue
                return None
            enough = decided(instance.electors, members, tally, again=again) is not None
            if digest is not None and not enough and (complete or not quorum(instance.electors, roster.ranks)):
                endorsed |= dict.fromkeys(await self._endorse(instance, attempt, roster, digest), digest)
                enough = decided(instance.electors, members, tally, again=again) is not None
            if digest is not None and enough and lead.attempt == attempt:
                return self.standing.decide(instance, self.standing.record.after(roster, digest), holders)
            if None in reports:
                limit = min(limit, self.net.now() + self.settings.phase_timeout)
            if digest is not None:  # only votes are missing: whoever is silent is not waited for until others take over
                limit = min(limit, self.net.now() + self.settings.call_timeout / 2)
            if complete:
                return None
            instance.progress.clear()
            await self.talk.until(instance.progress, limit)
        return None

    async def _have_kept(self, instance: Instance, roster: Roster, seal: Sealed) -> bool:
        """Have one more voter fetch a result that too few hold; whether one could be asked."""
        lead, parcel = instance.lead, _published(instance, roster, seal)
        limit = self.net.now() + self.settings.phase_timeout + self.settings.call_timeout
        spare = [voter.id for voter in roster.voters if lead.finishes.get(voter.id) != seal.adopt]
        for keeper in [peer for peer in spare if peer not in lead.keepers]:
            lead.keepers.add(keeper)
            if keeper == self.net.me:
                begun = self.member.begin(self.net.me, roster, seal)
            else:
                answer = await self.talk.ask(keeper, "seal", parcel)
                begun = answer is not None and status_of(answer) == "ok"
            while begun and keeper not in lead.finishes and lead.attempt == seal.attempt and self.net.now() < limit:
                instance.progress.clear()
                await self.talk.until(instance.progress, limit)
            if lead.attempt != seal.attempt or lead.finishes.get(keeper) == seal.adopt:
                return True
        return False

    async def _endorse(self, instance: Instance, attempt: int, roster: Roster, digest: bytes) -> set[PeerId]:
        """Ask electors that do not hold the result to vote for its hash."""
        request = Endorse(instance.iteration, attempt, brief(roster, instance.electors), digest)
        finishes, me, parcel = instance.lead.finishes, self.net.me, request.parcel()
        others = [e.id for e in instance.electors if finishes.get(e.id) != digest and e.id != me]
        answers = await asyncio.gather(*(self.talk.ask(peer, "endorse", parcel) for peer in others))
        said = {peer for peer, answer in zip(others, answers, strict=True) if answer and status_of(answer) == "ok"}
        if instance.rank(me) is not None and self.voting.endorse(me, request):
            said.add(me)
        return said


def _published(instance: Instance, roster: Roster, seal: Sealed) -> Parcel:
    """What the leader sends of an attempt."""
    named = brief(roster, instance.electors)
    return Seal(named, seal.attempt, seal.adopt, tuple(seal.holders[:SHOWN])).parcel(seal.keys)


def _gives_way(instance: Instance, attempt: int, refusals: int, acks: int, *, founding: bool) -> bool:
    """Whether to step back for those who refuse: they live, and are busy or follow somebody else.

    They must not be left out for that, but neither can they stop the others for ever. Who founds a lineage without them
    is, at worst, the lighter one, and gives it up.
    """
    if founding:
        return instance.lead.foundings <= PATIENT or refusals > acks + 1
    return attempt < PATIENT * len(instance.electors)
