"""What a peer does when it is its turn to lead (Paxos: the proposer): wait for the others, gather votes, seal, commit.

Electors lead in rank order. A leader that falls silent is followed by the next one, with a higher attempt. Without a
majority of electors for long enough, the first peer that is there founds a new lineage (`on_minority = "fork"`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from marfl.errors import WireError
from marfl.net.base import Parcel, PeerId
from marfl.plan.grid import plan
from marfl.protocol.audit import not_shown
from marfl.protocol.ballot import (
    AT_ODDS,
    BAD_ACK,
    MOST_STRANGERS,
    Acks,
    Against,
    Court,
    Reply,
    Sealed,
    Tally,
    Way,
    abandoned,
    at_odds,
    check_ack,
    choose,
    culprits,
    decided,
    held,
    kept,
    last_vote,
    new_roster,
    quorum,
    some_of,
    willing,
)
from marfl.protocol.former_states import taking_back
from marfl.protocol.incarnations import SECOND
from marfl.protocol.instance import Instance
from marfl.protocol.mask_pledges import KIND, SUSPECTED, Keys, Needs, keys_for, keys_to, masked, promised
from marfl.protocol.masked_rounds import MaskedRounds
from marfl.protocol.member import BAD_VOTE, SHOWN, Membership, Verdicts
from marfl.protocol.messages import (
    BEHIND,
    LEFT,
    MEMBER,
    NOT_YET,
    WITNESS,
    Ack,
    Endorse,
    Overtaken,
    Propose,
    Seal,
    status_of,
)
from marfl.protocol.notices import ReadyPeers
from marfl.protocol.readiness import OTHER_INDEX, Readiness
from marfl.protocol.roster import Elector, Roster, brief, decode_record, decode_roster, ranked
from marfl.protocol.seniority import Arrival, arriving, graded, is_arrival, joined, pack_arrivals
from marfl.protocol.standing import Standing
from marfl.protocol.statements import (
    Certificate,
    SignedPromise,
    SignedSeal,
    certificate,
    lineage_after,
    link_of,
    pack_promises,
    seal_parts,
    statement,
)
from marfl.protocol.terms import OTHERS
from marfl.protocol.transfer import StateTransfer
from marfl.protocol.voting import Voting, promise_of
from marfl.secagg.graph import pledges_needed

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
        self.transfer: StateTransfer = member.transfer
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
        silent = self.net.now() - instance.in_company
        return silent >= self.settings.minority_timeout or bool(self.readiness.survivors(instance))

    async def _lead_first(self, instance: Instance) -> None:
        """The first elector's turn: it looks for a lineage that wins while it gathers votes."""
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
        heads = await self.standing.heads()
        finished = instance.accepted.hash if instance.accepted else b""
        others = [(peer, head) for peer, head in heads if head.hash != finished]
        seen = await asyncio.gather(*(self.transfer.is_where_it_says(peer, head) for peer, head in others))
        for peer, head in heads:
            if head.hash == finished:  # what this peer has finished is committed: it hears so, or adopts it
                if await self.verdicts.news(instance, peer):
                    return True
                continue  # it says so only
            if not seen[others.index((peer, head))]:
                continue  # it does not win, or cannot prove it
            notice = Overtaken(head.hash, head.iteration, peer).parcel()
            voter = instance.rank(self.net.me) is not None  # of others the electors would not believe it
            all_here = {elector.id for elector in instance.electors} | instance.lead.seen if voter else set()
            telling = (self.talk.ask(other, "overtaken", notice) for other in sorted(all_here - {self.net.me}))
            await asyncio.gather(*telling)
            self.standing.gone_elsewhere(peer)
            return True
        return False

    # --- phase 1: proposals ---

    async def lead(self, instance: Instance, attempt: int, elsewhere: asyncio.Task[bool] | None = None) -> None:
        """One attempt of the lineage's own: needs the votes of a quorum of its electors, and no lineage that wins."""
        last = self.standing.record.roster
        juniors = {peer for peer, _ in last.juniors} if last else set()
        wanted = ({elector.id for elector in instance.electors} | juniors) - self.standing.banned.keys()
        before = instance.promised
        ready = await self.readiness.gather(instance, wanted, first=instance.work.tries == 0)
        if not self.standing.proofs.settled:
            await self.transfer.settle()
        if instance.over.is_set() or instance.promised != before:
            return  # somebody else has come forward meanwhile: it is given its time
        instance.lead.closed = True
        left = {peer for peer, said in ready.items() if said.role == LEFT}
        there = (wanted - instance.absent | ready.keys()) - left
        promises = await self.propose(instance, attempt, there)
        if promises is None or not quorum(instance.electors, promises.acks, self.settings.liars):
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
        instance.found(lineage_after(link_of(instance.before), seed), me)
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
            founding, standing.incarnation, standing.terms.digest, standing.proofs.settled,
        )  # fmt: skip
        others = sorted(peers - {self.net.me})
        begun = self.net.now()
        parcel = proposal.parcel()
        timed = await self._ask_all(instance, others, parcel)
        answers = {peer: answer for peer, (answer, _) in zip(others, timed, strict=True) if answer is not None}
        found = {peer: self._read_ack(instance, attempt, peer, answer) for peer, answer in answers.items()}
        acks = {peer: ack for peer, ack in found.items() if ack and ack.status == Reply.ACK.value}
        keys = {p: self.masked.checked_keys(p, instance, attempt, bytes(answers[p].payload)) for p in acks}
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
            keys[self.net.me] = self.voting.offered_keys(mine)
            acks[self.net.me] = self._named(instance, self.net.me, mine)
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
            check_ack(ack, attempt, instance.decision, self.settings.max_weight, alike=self.settings.alike)
            said, ack = ack.index, self._named(instance, peer, ack)
            self._check_signature(instance, peer, ack)
            heeded = self._is_heeded(peer) and standing.terms.met(self.talk, peer, ack.terms)
            if ack.status == Reply.BEHIND.value and ack.record and heeded:
                self._learn(instance, peer, ack)
        except WireError:
            self.net.refused.note(BAD_ACK, peer)
            return None
        if said != ack.index:
            self.net.refused.note(OTHER_INDEX, peer)  # its vote counts all the same
        if not standing.terms.met(self.talk, peer, ack.terms):
            self.net.refused.note(OTHERS, peer)
            instance.lead.doubted[peer] = standing.terms.why(ack.terms)
            return None
        if ack.status != Reply.ACK.value:
            standing.incarnations.note(peer, ack.incarnation)
        elif why := standing.incarnations.vote(peer, ack.incarnation, instance.base + instance.lineage):
            self.net.refused.note(SECOND, peer)
            instance.lead.doubted[peer] = why
            return None
        return ack

    async def _ask_all(
        self, instance: Instance, peers: list[PeerId], parcel: Parcel
    ) -> list[tuple[Parcel | None, float]]:
        """Everybody's answer and how long it took. Who has just been asked in vain where it is has little time for it.

        But not where the others are no quorum, or answer late: then it may be me who does not hear.
        """
        begun, settings = self.net.now(), self.settings
        asking = {peer: asyncio.create_task(self._timed_ask(peer, parcel)) for peer in peers}
        hung = asking.keys() & self.readiness.unheard(instance)
        try:
            await asyncio.gather(*(asking[peer] for peer in peers if peer not in hung))
            enough = quorum(instance.electors, {*asking, self.net.me} - hung, settings.liars)
            if hung and enough and self.net.now() - begun <= settings.call_timeout / 3:
                await self.talk.within((asking[peer] for peer in hung), begun + settings.takeover / 4)
            else:
                await asyncio.gather(*asking.values())
            return [each.result() if each.done() else (None, 0.0) for each in asking.values()]
        finally:
            for each in asking.values():
                each.cancel()

    async def _timed_ask(self, peer: PeerId, parcel: Parcel) -> tuple[Parcel | None, float]:
        begun = self.net.now()
        answer = await self.talk.ask(peer, "propose", parcel)
        return answer, self.net.now() - begun

    def _seems_slow(self, timed: list[tuple[Parcel | None, float]]) -> bool:
        """Whether some peers kept silent and others answered late: the slow one may be me, and I must not judge."""
        silent = any(answer is None and seconds > 0.9 * self.settings.call_timeout for answer, seconds in timed)
        return silent and any(answer and seconds > self.settings.call_timeout / 3 for answer, seconds in timed)

    def _named(self, instance: Instance, peer: PeerId, ack: Ack) -> Ack:
        """The ack with its elector's index as the electors know it: it is another's to say, once it votes."""
        rank = instance.rank(peer)
        return ack if rank is None else replace(ack, index=instance.electors[rank].index)

    def _check_signature(self, instance: Instance, peer: PeerId, ack: Ack) -> None:
        """`WireError` for a vote that could not be shown to others, where they may have to see it."""
        if ack.status == Reply.ACK.value and instance.rank(peer) is None:
            shown, who = Arrival.cut(ack.signature), Elector(peer, ack.index)
            if not is_arrival(shown, who, ack.attempt, instance.signed_id, self.net.verify, self.net.entitled):
                raise WireError("a newcomer's ack that is not signed")
            return
        if ack.status != Reply.ACK.value or ack.attempt == 0 or not self.standing.proofs.borne(instance.electors):
            return
        said = promise_of(ack)
        if not self.net.verify(peer, said.statement(instance.signed_id), ack.signature):
            raise WireError("an ack that is not signed")
        place = instance.rank(peer)
        assert place is not None
        self.standing.note_promise(instance, peer, SignedPromise(place, said, ack.signature), checked=True)
        if ack.sealed and not self.standing.note_seal(instance, SignedSeal.decode(ack.sealed)):
            raise WireError("an ack with a seal that is not its leader's")

    def _learn(self, instance: Instance, peer: PeerId, ack: Ack) -> None:
        """Somebody is ahead: this very iteration may be decided already; otherwise it must prove that it is.

        Where more electors than can lie say so, one of them knows that it is decided.
        """
        assert ack.record is not None
        record, mine, standing = decode_record(ack.record), self.standing.record, self.standing
        roster = record.roster
        if roster and roster.base == instance.base and record.iteration == instance.iteration:
            if self.verdicts.take_over(instance, peer, record, (peer, *roster.ids), ack.certificate):
                return
            said = instance.lead.ahead.setdefault(ack.record, set())
            said |= {peer} if instance.rank(peer) is not None else set()
            if len(said) > standing.proofs.borne(instance.electors) and record.lineage == instance.lineage:
                standing.decide(instance, mine.after(roster, record.hash), (peer, *roster.ids), vouchers=said)
                return
        self.talk.aside(self.transfer.look_after(peer, peer, record.hash))

    # --- phase 2: a roster, or an earlier result ---

    async def _seal(self, instance: Instance, attempt: int, promises: Promises, ready: ReadyPeers) -> None:
        """Adopt the result that may have been committed already, or seal a new roster; then see it through."""
        acks = promises.acks
        votes = {peer: last_vote(ack) for peer, ack in acks.items()}
        choice = choose(instance.electors, votes, self.settings.liars)
        shown = self._promises(instance, attempt, acks)
        if choice.way is Way.ADOPT:
            found = (ack.accepted for peer, ack in acks.items() if (vote := votes[peer]) and vote.value == choice.value)
            adopted = decode_roster(next(data for data in found if data))
            seal = Sealed(attempt, choice.hash, choice.holders, promises=shown)
            return await self._conduct(instance, adopted, self._with_arrivals(instance, adopted, seal))
        if choice.way is Way.WAIT:  # the only holders may be lost for good: in the end a new lineage is founded
            self.standing.wait_for_leader(instance, 0.0)
            return None
        pledge = promised(instance.electors, acks, self.settings.liars, instance.sealed)
        if pledge is not None and not pledge.lost:
            seal = Sealed(attempt, None, pledge.holders, promises=shown)
            return await self._conduct(instance, pledge.roster, self._with_arrivals(instance, pledge.roster, seal))
        acks = self._without_the_slow(instance, acks)
        early = instance.founder is None and self.readiness.is_early(instance, acks)
        roster = None if early else self._roster(instance, attempt, acks, ready)
        to = self.standing.where_to
        if roster is not None and to is not None and self.standing.past.get(to) is not None:
            roster = taking_back(roster, to)
            await self.member.audits.show(to + 1, roster)
        if roster is not None and roster.is_sum:
            roster = self._trimmed(instance, roster, acks, None if pledge else promises.keys)
        if roster is None:
            trains = any(ack.role == NOT_YET for ack in acks.values())
            instance.patience = self.net.now() + (self.settings.poll if trains else self.settings.takeover)
            if trains:
                instance.lead.idle = self.net.now() if instance.lead.idle is None else instance.lead.idle
                instance.heard = self.net.now()  # a majority is there, and waits with me: nobody founds a lineage
            return None
        deciders = roster.electors or instance.electors
        roster = graded(instance.before, deciders, roster, self.settings.seniority, self.settings.liars)
        new = [one.id for one in arriving(_known(instance, roster), roster)]
        instance.arrivals |= {(peer, attempt): Arrival.cut(acks[peer].signature) for peer in new}
        seal = Sealed(attempt, keys=keys_for(roster, promises.keys), promises=shown)
        return await self._conduct(instance, roster, self._with_arrivals(instance, roster, seal))

    def _with_arrivals(self, instance: Instance, roster: Roster, seal: Sealed) -> Sealed:
        """What an attempt is sealed with, and the newcomers' own words that they take part, as far as they are here."""
        known = {peer: shown for (peer, attempt), shown in instance.arrivals.items() if attempt == roster.attempt}
        return seal._replace(arrivals=pack_arrivals(arriving(_known(instance, roster), roster), known))

    def _without_the_slow(self, instance: Instance, acks: dict[PeerId, Ack]) -> dict[PeerId, Ack]:
        """The acks, in which nobody trains any more once that was waited for as long as an iteration may take."""
        since = instance.lead.idle
        if since is None or self.net.now() - since < self.settings.iteration_timeout:
            return acks
        return {peer: replace(ack, role=BEHIND) if ack.role == NOT_YET else ack for peer, ack in acks.items()}

    def _promises(self, instance: Instance, attempt: int, acks: Acks) -> bytes:
        """The signed acks that an attempt goes by, for those who vote in it; nothing comes before the first."""
        if attempt == 0 or not self.standing.proofs.borne(instance.electors):
            return b""
        rows = [
            SignedPromise(place, promise_of(ack), ack.signature)
            for place, elector in enumerate(instance.electors)
            if (ack := acks.get(elector.id)) is not None
        ]
        return pack_promises(rows)

    def _roster(self, instance: Instance, attempt: int, acks: Acks, ready: ReadyPeers) -> Roster | None:
        """The roster that these acks make (see `ballot.new_roster`)."""
        settings, tries = self.settings, instance.work.tries
        blank = Roster(
            instance.run, instance.iteration, attempt, instance.lineage, instance.base, self.standing.layout,
            settings.exchange_of(tries), settings.group_size, (), (), (), (), settings.wire, piece=settings.piece,
        )  # fmt: skip
        last = self.standing.record.roster
        court = self._court(instance, acks)
        party = last.party if last else ()
        voters = [elector.id for elector in (*instance.electors, *party, *instance.before.electors)]
        announced = sorted(peer for peer, said in ready.items() if said.role == MEMBER)
        doubted = instance.lead.doubted
        guilty = culprits(acks, patient=tries < PATIENT_TRIES, court=court)
        guilty |= not_shown(acks, court) if settings.audit else {}
        guilty = guilty or self._spoilt(instance, acks) or at_odds(instance.electors, acks, attempt, settings.liars)
        strangers = [peer for peer in dict.fromkeys([*announced, *doubted]) if peer not in {*voters, *acks}]
        unnamed = {*strangers[MOST_STRANGERS:]}
        against = Against(
            known=[peer for peer in (*voters, *announced, *doubted) if peer not in unnamed],
            reasons=guilty | doubted,
            left={peer for peer, said in ready.items() if said.role == LEFT},
        )
        founding = instance.founder is not None
        roster = new_roster(blank, acks, against, founding=founding and attempt == 0)
        if roster is None or not founding or attempt == 0:
            return roster
        return replace(roster, electors=instance.electors)  # whichever of its attempts succeeds founds the lineage

    def _court(self, instance: Instance, acks: Acks) -> Court:
        """How to judge who accuses whom. Who is said to have dealt bad shares of masks is out for longer."""
        newest, masked = self.standing.record.iteration, self.settings.masked
        known = [self.standing.history.get(newest - back) for back in range(SUSPECTED if masked else 1)]
        omitted = [dict(record.roster.omitted) for record in known if record is not None and record.roster is not None]
        times = Counter(peer for each in omitted for peer in each)
        often = {peer: why for peer, why in (omitted[0] if omitted else {}).items() if 2 * times[peer] >= len(known)}
        bring = sum(ack.join and ack.weight > 0 for ack in acks.values())
        few = masked and bring < self.settings.smallest_sum + 2
        electors = [elector.id for elector in instance.electors]
        return Court(electors, self.standing.proofs.borne(instance.electors), often, few, link_of(instance.before))

    def _spoilt(self, instance: Instance, acks: Acks) -> dict[PeerId, str]:
        """Whom to leave out after an iteration whose masked sum came to nothing: somebody may have spoilt it."""
        bring = sum(ack.join and ack.weight > 0 for ack in acks.values())
        borne = self.standing.proofs.borne(instance.electors)
        if not borne or self.standing.in_vain != instance.iteration - 1:
            return {}
        spare = len(instance.electors) - pledges_needed(len(instance.electors), self.settings.liars)
        some = some_of(acks, link_of(instance.before))[:spare]  # who is left out signs no pledge
        return dict.fromkeys(some, AT_ODDS) if bring - len(some) >= self.settings.smallest_sum else {}

    def _trimmed(self, instance: Instance, roster: Roster, acks: Acks, keys: Keys | None) -> Roster | None:
        """The roster without those who will not be in its sum, or without a sum; masked where all sums are.

        No keys: something of this iteration may have been unmasked already, so nothing else ever is. None: not yet.
        """
        if self.settings.masked:
            if keys is None:
                return abandoned(roster)
            electors = ranked(instance.run, instance.iteration, roster.electors) or instance.electors
            needs = Needs(electors, self.settings.smallest_sum, self.settings.liars)
            chosen = masked(instance.masks.session, roster, acks, keys, needs)
            if chosen is None:
                instance.heard = self.net.now()  # a majority is there: who waits for those who train is not alone
            return chosen
        enough = willing(roster, acks)
        return enough if enough.contributions else abandoned(roster)

    async def _conduct(self, instance: Instance, roster: Roster, seal: Sealed) -> None:
        """Publish the roster, collect the hashes, commit once a majority agrees; or make way for the next attempt."""
        attempt = seal.attempt
        instance.lead.begin(attempt, roster)
        instance.heard = self.net.now()
        instance.sealed[roster.digest] = roster
        instance.masks.begin_leading(roster, seal.keys)
        if roster.electors:
            instance.electors = ranked(instance.run, instance.iteration, roster.electors)
        seal = seal._replace(signature=self._signed_seal(instance, roster, seal))
        parcel = _published(instance, roster, seal)
        # What is adopted may have lost most of its roster: then the electors hold it in their place.
        told = dict.fromkeys([*roster.ids, *(elector.id for elector in instance.electors if seal.adopt)])
        others = [peer for peer in told if peer != self.net.me]
        given = {peer: parcel._replace(payload=keys_to(peer, roster, seal.keys)) for peer in others}
        asking = (self.talk.ask(peer, "seal", given[peer], KIND) for peer in others)
        work: list[asyncio.Task[Any]] = [asyncio.create_task(each) for each in asking]
        self.member.begin(self.net.me, roster, seal._replace(keys=keys_to(self.net.me, roster, seal.keys)))
        if roster.masked and seal.adopt is None:
            work.append(asyncio.create_task(self.masked.preside(instance, attempt, roster)))
        layout = plan(len(roster.members), roster.group_size)
        phases = self.settings.phases(roster.exchange, roster.iteration, layout)
        limit = self.net.now() + (phases + 1) * self.standing.pace(roster).phase + self.settings.call_timeout
        instance.patience = limit + self.settings.call_timeout
        try:
            await self._count(instance, roster, seal, limit)
        finally:
            for task in work:
                task.cancel()
            if instance.lead.attempt == attempt and not instance.over.is_set():
                instance.lost.append(_unfinished(attempt, roster, instance.lead.finishes))
                instance.lead.attempt = -1
                instance.patience = self.net.now()

    def _signed_seal(self, instance: Instance, roster: Roster, seal: Sealed) -> bytes:
        """My signature of what I seal, where leaders may lie; nobody is given another one of this attempt."""
        if not self.standing.proofs.borne(instance.electors):
            return b""
        said = statement("seal", *seal_parts(instance.signed_id, seal.attempt, roster.digest, seal.promises))
        signature = self.net.sign(said)
        instance.seals[seal.attempt] = SignedSeal(seal.attempt, roster.digest, seal.promises, signature)
        return signature

    async def _count(self, instance: Instance, roster: Roster, seal: Sealed, limit: float) -> None:
        """Wait for finishes until there is a majority, or no hope of one."""
        lead, attempt, liars = instance.lead, seal.attempt, self.settings.liars
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
                if await self._have_kept(instance, roster, seal._replace(adopt=digest, holders=holders)):
                    continue
                return None
            enough = decided(instance.electors, members, tally, again=again, liars=liars) is not None
            if digest is not None and not enough and (complete or not quorum(instance.electors, roster.ranks, liars)):
                endorsed |= dict.fromkeys(await self._endorse(instance, roster, seal._replace(adopt=digest)), digest)
                enough = decided(instance.electors, members, tally, again=again, liars=liars) is not None
            if digest is not None and enough and lead.attempt == attempt:
                proof = self._certificate(instance, roster, attempt, digest)
                return self.standing.decide(instance, self.standing.record.after(roster, digest), holders, proof)
            if None in reports:
                limit = min(limit, self.net.now() + self.settings.phase_timeout)
            if digest is not None:  # only votes are missing: whoever is silent is not waited for until others take over
                limit = min(limit, self.net.now() + self.settings.call_timeout / 2)
            if complete:
                return None
            instance.progress.clear()
            await self.talk.until(instance.progress, limit)
        return None

    def _certificate(self, instance: Instance, roster: Roster, attempt: int, digest: bytes) -> Certificate:
        """The votes of a quorum, and no more; all there are where a lineage is founded, since they are counted."""
        votes = instance.lead.signatures(digest)
        voters = [elector.id for elector in instance.electors if elector.id in votes]
        if not roster.electors:
            some = range(1, len(voters))
            enough = (n for n in some if quorum(instance.electors, voters[:n], self.settings.liars))
            voters = voters[: next(enough, len(voters))]
        made = certificate(instance.electors, attempt, {peer: votes[peer] for peer in voters})
        return replace(made, goodbyes=self._goodbyes(instance)) if roster.electors else made

    def _goodbyes(self, instance: Instance) -> tuple[tuple[int, bytes], ...]:
        """Who of the electors before a founding had left, in its own words."""
        said = self.standing.notices.goodbyes(link_of(instance.before))
        before = ranked(instance.run, instance.iteration, instance.before.electors)
        return tuple((place, said[one.id]) for place, one in enumerate(before) if one.id in said)

    async def _have_kept(self, instance: Instance, roster: Roster, seal: Sealed) -> bool:
        """Have one more voter fetch a result that too few hold; whether one could be asked."""
        seal = seal._replace(keys=b"", votes=self._some_votes(instance, roster, seal))
        lead, parcel = instance.lead, _published(instance, roster, seal)
        patience = self.settings.state_pace(self.standing.values).phase
        limit = self.net.now() + patience + self.settings.call_timeout
        first = [*roster.voters, *roster.party]  # juniors come last
        spare = [one.id for one in dict.fromkeys(first) if lead.finishes.get(one.id) != seal.adopt]
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

    async def _endorse(self, instance: Instance, roster: Roster, seal: Sealed) -> set[PeerId]:
        """Ask electors that do not hold the result to vote for its hash."""
        digest, lead, me = seal.adopt, instance.lead, self.net.me
        assert digest is not None
        shown = self._some_votes(instance, roster, seal)
        named = brief(roster, instance.electors)
        grounds = joined(seal.promises, seal.arrivals)
        request = Endorse(instance.iteration, seal.attempt, named, digest, shown, grounds, seal.signature)
        others = [e.id for e in instance.electors if lead.finishes.get(e.id) != digest and e.id != me]
        parcel = request.parcel()
        answers = await asyncio.gather(*(self.talk.ask(peer, "endorse", parcel) for peer in others))
        votes = {
            peer: bytes(answer.payload)
            for peer, answer in zip(others, answers, strict=True)
            if answer and status_of(answer) == "ok"
        }
        if instance.rank(me) is not None and lead.finishes.get(me) != digest:
            votes[me] = self.voting.endorse(me, request)
        said = instance.vote(roster, seal.attempt, digest).statement
        signed = {peer: vote for peer, vote in votes.items() if vote and self.net.verify(peer, said, vote)}
        for peer in votes.keys() - signed.keys() - {me}:
            self.net.refused.note(BAD_VOTE, peer)
        for peer, vote in signed.items():
            if (led := instance.led) is not None:
                self.standing.note_vote(led, peer, digest, vote)  # it may have reported another one
        lead.votes |= {(peer, digest): vote for peer, vote in signed.items()}
        return set(signed)

    def _some_votes(self, instance: Instance, roster: Roster, seal: Sealed) -> bytes:
        """Votes of members for what came of their roster, more than there can be liars."""
        borne = self.standing.proofs.borne(instance.electors)
        if not borne or seal.adopt is None or roster.attempt < seal.attempt:
            return b""
        members = tuple(Elector(member.id, member.index) for member in roster.members)
        votes = instance.lead.signatures(seal.adopt)
        some = [peer for peer in roster.ids if peer in votes][: borne + 1]
        return certificate(members, seal.attempt, {peer: votes[peer] for peer in some}).encoded


def _known(instance: Instance, roster: Roster) -> tuple[Elector, ...]:
    """Whom those know to be electors whom a roster is shown: of a new lineage nobody, until its first one is."""
    return () if roster.electors and roster.attempt == 0 else instance.electors


def _published(instance: Instance, roster: Roster, seal: Sealed) -> Parcel:
    """What the leader sends of an attempt."""
    named = brief(roster, instance.electors)
    holders = tuple(seal.holders[:SHOWN])
    grounds = joined(seal.promises, seal.arrivals)
    return Seal(named, seal.attempt, seal.adopt, holders, grounds, seal.votes, seal.signature).parcel()


def _unfinished(attempt: int, roster: Roster, finishes: Mapping[PeerId, bytes | None]) -> str:
    """What the leader of an attempt that came to nothing knows of it: who had no result, and who said nothing."""
    without = [peer for peer in roster.ids if finishes.get(peer, b"") is None]
    unheard = [peer for peer in roster.ids if peer not in finishes]
    found = [f"no result at {', '.join(without)}" if without else ""]
    found.append(f"no word of {', '.join(unheard)}" if unheard else "")
    return f"attempt {attempt}, which this peer led, was lost: {'; '.join(filter(None, found)) or 'results differ'}"


def _gives_way(instance: Instance, attempt: int, refusals: int, acks: int, *, founding: bool) -> bool:
    """Whether to step back for those who refuse: they live, and are busy or follow somebody else.

    They must not be left out for that, but neither can they stop the others for ever. Who founds a lineage without them
    is, at worst, in the one that loses, and gives it up.
    """
    if founding:
        return instance.lead.foundings <= PATIENT or refusals > acks + 1
    return attempt < PATIENT * len(instance.electors)
