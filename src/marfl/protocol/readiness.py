"""Who is ready for the next iteration: told to its first leader directly, and to the DHT where that does not do.

A notice is one small message to the elector that leads first. The DHT has it as well when that peer does not take it,
when its sender is new, and when the iteration lasts: then somebody else may come to lead it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace

from marfl.errors import WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.ballot import SILENT, TRAINS, quorum
from marfl.protocol.instance import Instance
from marfl.protocol.messages import (
    LEFT,
    MEMBER,
    NOT_YET,
    WITNESS,
    Ack,
    Noted,
    Ok,
    Overtaken,
    Ready,
    Vouch,
)
from marfl.protocol.notices import ReadyPeers, gone
from marfl.protocol.roster import Elector
from marfl.protocol.speaker import Reached
from marfl.protocol.standing import EMPTY, Standing
from marfl.protocol.statements import goodbye, link_of

SLACK = 0.2  # by so much of its time an iteration is held up for those who say when they are done
TOO_LATE = "too late"  # the answer to whoever begins to train for an iteration that begins without it
UNSIGNED = "unsigned goodbye"  # counted in `Net.refused`; whoever sent it has not left
OTHER_INDEX = "another index"  # that an elector gives itself; it has the one it is known by: counted in `Net.refused`
IN_VAIN = "vouched in vain"  # for somebody who said that it trains, and never came: counted in `Net.refused`
HEIRS = 8  # electors that hear a goodbye: one of them leads next, though some may go at the same time


class Readiness:
    """One peer's notices to the others, and what it knows of theirs."""

    def __init__(self, standing: Standing) -> None:
        self.standing, self.talk, self.notices = standing, standing.talk, standing.notices
        self.net, self.settings = standing.net, standing.settings
        self._left = b""  # the state after which I said goodbye

    # --- what others tell me ---

    async def answer_ready(self, sender: PeerId, request: Parcel) -> Parcel:
        """Somebody takes me for an iteration's leader, now or soon; or says goodbye, which may make me the leader."""
        said, standing = self._own(sender, Ready.decode(request.header)), self.standing
        if not self._is_signed(sender, said, bytes(request.payload)):
            self.net.refused.note(UNSIGNED, sender)
            return Noted("ok", 0.0).parcel()
        self.notices.note(sender, said, self.net.now())
        if said.iteration > standing.record.iteration + 1 and standing.is_known(sender):
            self._claimed(sender, said)
        standing.incarnations.note(sender, said.incarnation)
        standing.terms.met(self.talk, sender, said.terms)  # so that a leader can say what differs
        instance = standing.instance
        if instance is not None:
            instance.lead.unanswered.pop(sender, None)
        if said.role == LEFT and instance is not None and instance.promised < 0:
            instance.patience = min(instance.patience, self.first_turn(instance))
        late = said.role == NOT_YET and self._is_late(said)
        if late:
            self.notices.expect(sender, self.net.now())
        slow = self.standing.slow and (instance is None or not instance.begun)
        status = TOO_LATE if late else TRAINS if slow else "ok"
        return Noted(status, self._waited_for(sender, said)).parcel()

    def _claimed(self, sender: PeerId, said: Ready) -> None:
        """Somebody says that it is ahead: that is looked at later, if I do not get there by then."""
        if said.base in self.standing.commits.values():  # a state of mine, which no later commit can have
            self.net.refused.note(EMPTY, sender)
        else:
            self.notices.claim(sender, said, self.standing.record.iteration)

    def _waited_for(self, peer: PeerId, said: Ready) -> float:
        """For how many seconds the others have waited for a peer that is ready at last."""
        instance = self.standing.instance
        if said.role not in (MEMBER, WITNESS) or instance is None or peer not in instance.lead.awaited:
            return 0.0
        since = instance.lead.most_there
        return 0.0 if since is None else max(0.0, self.net.now() - since)

    def _own(self, sender: PeerId, said: Ready) -> Ready:
        """A notice with its elector's index as the electors know it: nobody takes another's place by its own word."""
        known = next((elector.index for elector in self.standing.electors if elector.id == sender), said.index)
        if known == said.index:
            return said
        self.net.refused.note(OTHER_INDEX, sender)
        return replace(said, index=known)

    def _is_signed(self, sender: PeerId, said: Ready, signature: bytes) -> bool:
        """Whether a goodbye after my record is its sender's; it is kept for the founding that may have to follow."""
        link = link_of(self.standing.record)
        if said.role != LEFT or said.base != self.standing.record.hash:
            return True
        if not self.net.verify(sender, goodbye(self.settings.run, link), signature):
            return False
        self.notices.keep_goodbye(sender, link, signature)
        return True

    def _is_late(self, said: Ready) -> bool:
        """Whether the iteration that somebody trains for is decided here, or goes on without it."""
        record, instance = self.standing.record, self.standing.instance
        if said.base != record.hash:
            return record.is_later(said.iteration - 1, said.base)
        return instance is not None and instance.base == said.base and (instance.lead.closed or instance.promised >= 0)

    async def vouch(self, peer: PeerId) -> None:
        """Tell the next leader that a peer which is no elector was given the agreed state: else nobody waits for it."""
        electors = [elector.id for elector in self.standing.electors]
        if peer in electors or self.net.me not in electors:
            return
        if electors[0] == self.net.me:
            self.notices.vouch(peer, self.standing.record.hash, self.net.me)
            self.notices.expect(peer, self.net.now())
            return
        await self.talk.ask(electors[0], "vouch", Vouch(peer, self.standing.record.hash).parcel())

    async def answer_vouch(self, sender: PeerId, request: Parcel) -> Parcel:
        """An elector has given somebody the state that the next iteration begins from."""
        said = Vouch.decode(request.header)
        self.notices.vouch(said.peer, said.base, sender)
        return Ok("ok").parcel()

    def first_turn(self, instance: Instance) -> float:
        """When this peer leads if nobody else does: in rank order, without waiting for those who are gone."""
        left = self._said_goodbye(instance) | instance.idle | self._still_train(instance) | self._were_silent(instance)
        before = [elector for elector in instance.electors[: instance.rank(self.net.me)] if elector.id not in left]
        patience = self.settings.ready_timeout + len(before) * self.settings.takeover
        return instance.entered + patience if before and not self.survivors(instance) else self.net.now()

    def is_alone(self) -> bool:
        """Whether no quorum of my electors was heard of for long, or there is none any more."""
        standing, instance, now = self.standing, self.standing.instance, self.net.now()
        if self._left == standing.record.hash:  # I said goodbye: the others need not have waited for me
            return True
        if instance is not None and instance.base == standing.record.hash:
            heard, left = instance.in_company, bool(self.survivors(instance))
        else:  # between two iterations nobody is expected to lead
            standing.moved = now if standing.moved is None else standing.moved
            heard, left = standing.moved, False
        return left or now - heard >= self.settings.minority_timeout / 2

    def survivors(self, instance: Instance) -> set[PeerId]:
        """Electors that did not say goodbye, if they are no majority: nobody can go on as before. Else nobody."""
        left = self._said_goodbye(instance)
        rest = {elector.id for elector in instance.electors} - left
        enough = quorum(instance.electors, rest, self.settings.liars)
        return rest if left and not enough else set()

    def _said_goodbye(self, instance: Instance) -> set[PeerId]:
        left = {peer for peer, said in self.notices.about(instance).items() if gone(said, instance)}
        return left | self.standing.banned.keys() & {elector.id for elector in instance.electors}

    # --- what I tell others ---

    async def announce(self, role: str, weight: float = 0.0) -> PeerId | None:
        """Say that this peer is there for the next iteration, and what for; ends when the DHT has it, too.

        The leader to whom a peer that trains comes too late: the iteration goes on without it. None otherwise.
        """
        said = self._said(role, weight)
        notice, key, electors = said.encoded, f"ready/{said.iteration}", self.standing.electors
        known = any(elector.id == self.net.me for elector in electors)
        self._left = said.base if role == LEFT else self._left
        if role not in (MEMBER, WITNESS):  # on its way in or out
            heirs = [elector.id for elector in electors[:HEIRS] if elector.id != self.net.me]
            hearers = heirs if role == LEFT else [elector.id for elector in electors[:1]]
            telling = (self._tell(peer, said) for peer in hearers)
            heard, *told = await asyncio.gather(self.talk.announce(key, notice), *telling)
            late = [peer for peer, answer in zip(hearers, told, strict=True) if answer == TOO_LATE]
            if not heard and role == NOT_YET and not late:  # it must be waited for: else it would always be late
                self.talk.aside(self.talk.repeat(key, notice))
            return late[0] if late else None
        if electors:
            # not cut short: it must not arrive after a goodbye
            told_first = self.talk.aside(self._tell_first(electors, said))
            if known and await asyncio.shield(told_first) is not None:
                await self.net.sleep_until(self.net.now() + self.settings.takeover)
        await self.talk.insist(key, notice)
        return None

    async def tell_goodbye(self, peer: PeerId) -> bool:
        """Tell one peer that I leave; whether it is there."""
        return await self._tell(peer, self._said(LEFT, 0.0)) is not None

    def _said(self, role: str, weight: float) -> Ready:
        standing = self.standing
        at, terms = standing.record, standing.terms.digest
        return Ready(
            at.iteration + 1, at.hash, standing.index, float(weight), standing.layout, role,
            standing.incarnation, terms,
        )  # fmt: skip

    async def _tell_first(self, electors: tuple[Elector, ...], said: Ready) -> str | None:
        """Tell the elector that leads first: where it is gone, or trains for long, the one that leads in its place."""
        instance = self.standing.instance
        silent = self._were_silent(instance) if instance is not None and instance.base == said.base else set()
        for elector in electors[:HEIRS]:
            if elector.id == self.net.me:
                return await self._tell(elector.id, said)
            if elector.id in silent:  # it may be back, but nobody waits for its answer
                self.talk.aside(self._tell(elector.id, said))
                continue
            reached = await self.talk.reach(elector.id, "ready", said.parcel())
            status = self._learn(reached.answer, said)
            if not reached.gone and status != TRAINS:
                return status
            self._pass_over(said.base, {elector.id}, gone=reached.gone)
        return None

    async def _tell(self, leader: PeerId, said: Ready) -> str | None:
        """What the leader says, once it knows; None when it does not answer."""
        if leader == self.net.me:
            self.notices.note(leader, said, self.net.now())
            return "ok"
        signed = b""
        if said.role == LEFT:  # it counts for the founding that may have to follow
            signed = self.net.sign(goodbye(self.settings.run, link_of(self.standing.record)))
        return self._learn(await self.talk.ask(leader, "ready", said.parcel(signed)), said)

    def _learn(self, answer: Parcel | None, said: Ready) -> str | None:
        """What a leader says; who let the others wait for long says from now on how long it will take."""
        if answer is None:
            return None
        try:
            noted = Noted.decode(answer.header)
        except WireError:
            return ""
        instance, moved = self.standing.instance, self.standing.moved
        in_time = instance is None or instance.mine is None or not instance.mine.age
        if said.role in (MEMBER, WITNESS) and moved is not None and in_time:
            self.standing.late = noted.waited > self._slack(self.net.now() - moved)
        return noted.status

    async def say_how_long(self, seconds: float) -> None:
        """Tell the next leader that this peer trains, and for how long, where the others would wait for it in vain."""
        electors = self.standing.electors
        others = [elector.id for elector in electors if elector.id != self.net.me]
        if self.standing.slow and others:
            await self._tell(others[0], replace(self._said(NOT_YET, 0.0), seconds=seconds))

    def _pass_over(self, base: bytes, peers: set[PeerId], *, gone: bool = True) -> None:
        """Somebody else leads the iteration that follows a state; and who is gone is not waited for in it, either."""
        instance = self.standing.instance
        if instance is None or instance.base != base or not peers:
            return
        instance.idle |= peers
        instance.absent |= peers if gone else set()
        if instance.promised < 0:
            instance.patience = min(instance.patience, self.first_turn(instance))
        self.notices.news.set()

    # --- whom a leader waits for ---

    async def gather(self, instance: Instance, wanted: set[PeerId], *, first: bool) -> ReadyPeers:
        """Who is ready. The first leader waits for all electors (or the expected number), but not for ever.

        It looks into the DHT only while somebody is missing, less and less often: those who are there tell it.
        """
        pause, lead = self.settings.poll, instance.lead
        at_once = self._were_silent(instance) or self.net.now() >= instance.entered + self.settings.ready_timeout
        knock_at = self.net.now() + (0.0 if at_once else self.settings.takeover / 2)
        look_at = self.net.now() + pause if first and wanted else self.net.now()
        found: ReadyPeers = {}
        while True:
            if self.net.now() >= min(look_at, self._limit(instance)) and not self._complete(instance, wanted, found):
                found = await self._looked_up(instance)
                pause = min(2 * pause, self.settings.takeover) if wanted else pause
                look_at = self.net.now() + pause
            ready = self._ready(instance, found)
            if lead.gathered is None and quorum(instance.electors, ready, self.settings.liars):
                lead.gathered = self.net.now()  # whoever was alone until now gives the others their time
            if lead.brought == -math.inf and any(said.role == MEMBER for said in ready.values()):
                lead.brought = self.net.now()
            limit = self._limit(instance)
            there = {peer for peer, said in ready.items() if said.role != NOT_YET}
            if lead.most_there is None and 2 * len(there) >= len(instance.electors):
                lead.most_there = self.net.now()
            absent = instance.absent | self._hung(instance)
            missing = self._worth(instance, ready, self._awaited(instance, wanted, ready) - there - absent)
            hoped_for = self.standing.company or self.settings.expected
            enough = not missing if wanted else len(there) >= hoped_for > 0
            if not first or enough or self.net.now() >= limit or instance.over.is_set():
                lead.seen |= ready.keys()
                self._waited_in_vain(instance, missing - wanted)
                return ready
            if self.net.now() >= knock_at:
                knock_at = self.net.now() + 2 * self.settings.takeover
                self.talk.aside(self._knock(instance, missing & wanted))
            self.notices.news.clear()
            ends = (
                limit, knock_at, look_at, self._pays_until(instance), *self._coming(instance).values(),
                *(self._hung_from(instance, peer) for peer in missing),
            )  # fmt: skip
            to_come = [at for at in ends if at > self.net.now()]  # one that is past must not keep this from waiting
            await self.talk.until(self.notices.news, min(to_come, default=limit))

    def _waited_in_vain(self, instance: Instance, peers: set[PeerId]) -> None:
        """These are not waited for again before they take part; who vouched for one of them is named."""
        for voucher in (by for peer in peers for by in self.notices.vouchers(peer, instance.base)):
            if voucher != self.net.me:
                self.net.refused.note(IN_VAIN, voucher)
        self.notices.waited_in_vain(peers)

    def _worth(self, instance: Instance, ready: ReadyPeers, missing: set[PeerId]) -> set[PeerId]:
        """Those of the missing whom it pays to wait for.

        Who says when it is done is waited for if that costs the others little, once all others are there; and who still
        trained when the last roster was sealed only if it has said something since.
        """
        lead, training = instance.lead, self._still_train(instance)
        if instance.mine is not None and instance.mine.age:  # who is late itself waits: else two would take turns
            lead.awaited = set(missing)
            return missing
        missing = missing - (training - ready.keys())
        slow = {peer for peer in missing if self.notices.due(peer, instance.base) is not None}
        lead.awaited = set(missing)
        if missing - slow or not quorum(instance.electors, ready.keys() | training, self.settings.liars):
            return missing
        if 2 * len(ready.keys() - slow) < len(instance.electors):
            return missing  # most are slow: they are the swarm
        lead.all_others = self.net.now() if lead.all_others is None else lead.all_others
        limit = self._pays_until(instance)
        return {p for p in slow if max(self.net.now(), self.notices.due(p, instance.base) or 0.0) <= limit}

    def _still_train(self, instance: Instance) -> set[PeerId]:
        """Slow electors that had nothing to bring yet when the last roster was sealed; not me."""
        last = instance.before.roster
        return {peer for peer, why in last.omitted if why == TRAINS} - {self.net.me} if last else set()

    def _were_silent(self, instance: Instance) -> set[PeerId]:
        """Electors that did not answer when the last roster was sealed, and have said nothing since; not me."""
        last = instance.before.roster
        silent = {peer for peer, why in last.omitted if why == SILENT} if last else set()
        return silent - self.notices.about(instance).keys() - {self.net.me}

    def unheard(self, instance: Instance) -> set[PeerId]:
        """Who was asked where it is, and has had the time to answer."""
        now, patience = self.net.now(), self.settings.takeover / 4
        return {peer for peer, since in instance.lead.unanswered.items() if now >= since + patience}

    def _hung(self, instance: Instance) -> set[PeerId]:
        """Who answers nothing, and has had its time."""
        return {peer for peer in instance.lead.unanswered if self._hung_from(instance, peer) <= self.net.now()}

    def _hung_from(self, instance: Instance, peer: PeerId) -> float:
        """When somebody that was asked in vain has had its time: its patience is given to it once."""
        asked = instance.lead.unanswered.get(peer, math.inf)
        if peer in self._were_silent(instance):
            return asked + self.settings.takeover / 4
        return max(asked + self.settings.takeover, instance.entered + self.settings.ready_timeout)

    def _pays_until(self, instance: Instance) -> float:
        """Until when those are waited for who said when they are done."""
        begun, others = self.standing.moved, instance.lead.all_others
        return math.inf if begun is None or others is None else others + self._slack(others - begun)

    def _slack(self, seconds: float) -> float:
        """For how long an iteration that lasts so long is held up: where it is short, a hiccup makes nobody slow."""
        return max(SLACK * seconds, self.settings.takeover / 8)

    async def _knock(self, instance: Instance, missed: set[PeerId]) -> None:
        """Tell electors that are missed where I am: whoever was to tell them what was decided may be gone.

        And so may they: who refuses a connection is not waited for any longer, who says nothing only for its time.
        """
        notice = Overtaken(self.standing.record.hash, self.standing.record.iteration).parcel()
        asked = sorted(missed - {self.net.me})
        reached = await asyncio.gather(*(self._reach_missed(instance, peer, notice) for peer in asked))
        self._pass_over(instance.base, {peer for peer, found in zip(asked, reached, strict=True) if found.gone})

    async def _reach_missed(self, instance: Instance, peer: PeerId, notice: Parcel) -> Reached:
        instance.lead.unanswered.setdefault(peer, self.net.now())
        reached = await self.talk.reach(peer, "overtaken", notice)
        if reached.answer is not None:
            instance.lead.unanswered.pop(peer, None)
            instance.lead.answered.add(peer)
        return reached

    def _limit(self, instance: Instance) -> float:
        """Until when others are waited for: whoever is the first to bring something gives the others their time."""
        begun = instance.entered if instance.lead.gathered is None else instance.lead.gathered
        return max(begun, instance.lead.brought) + self.settings.ready_timeout

    def is_early(self, instance: Instance, acks: Mapping[PeerId, Ack]) -> bool:
        """Whether electors that acked still train, and whoever was first to bring something must still wait for them.

        Who brings something may have told another leader so, and this one hears of it only now.
        """
        lead = instance.lead
        if lead.brought == -math.inf and any(ack.join and ack.weight > 0 for ack in acks.values()):
            lead.brought = self.net.now()
        trains = any(ack.role == NOT_YET and not ack.slow for p, ack in acks.items() if instance.rank(p) is not None)
        return trains and instance.work.tries == 0 and self.net.now() < self._limit(instance)

    def _complete(self, instance: Instance, wanted: set[PeerId], found: ReadyPeers) -> bool:
        """Whether everybody wanted has said so, and nobody is waited for: then the DHT need not be asked."""
        ready = self._ready(instance, found)
        there = {peer for peer, said in ready.items() if said.role != NOT_YET}
        return bool(wanted) and self._awaited(instance, wanted, ready) <= there | instance.absent | self._hung(instance)

    def _awaited(self, instance: Instance, wanted: set[PeerId], ready: ReadyPeers) -> set[PeerId]:
        """Whom the leader waits for: who must be there, and of those who train whoever is known to mean it.

        Anybody can say that it trains, for ever: so it must have taken part lately, or hold the state.
        """
        wanted = wanted | self._coming(instance).keys()
        training = {peer for peer, said in ready.items() if said.role == NOT_YET}
        if not training:
            return wanted
        rosters = [record.roster for record in self.standing.history.values() if record.roster is not None]
        lately = {one.id for roster in rosters for one in roster.party}
        return wanted | {p for p in training if p in lately or self.notices.is_vouched_for(p, instance.base)}

    def _coming(self, instance: Instance) -> dict[PeerId, float]:
        """Newcomers that were given a state just now, or came too late with it: until when their word is waited for.

        Where an iteration takes less time than to fetch its state, they would else be too late again and again.
        """
        expected = self.notices.coming(instance.base).items()
        until = {peer: since + self.settings.takeover for peer, since in expected}
        return {peer: end for peer, end in until.items() if end > self.net.now() and peer not in instance.absent}

    def _ready(self, instance: Instance, found: ReadyPeers) -> ReadyPeers:
        """Who is there by what the DHT and the peers themselves say, but for those who are proven to have lied."""
        ready = _merged(found, self.notices.about(instance))
        return {peer: said for peer, said in ready.items() if peer not in self.standing.banned}

    async def _looked_up(self, instance: Instance) -> ReadyPeers:
        ready: ReadyPeers = {}
        for peer, value in (await self.talk.look_up(f"ready/{instance.iteration}")).items():
            try:
                said = Ready.decode(value)
            except WireError:
                continue  # not a record of ours: its owner is simply not ready
            self.standing.terms.met(self.talk, peer, said.terms)
            if said.base == instance.base:
                ready[peer] = said
        return ready


def _merged(found: ReadyPeers, told: ReadyPeers) -> ReadyPeers:
    """The later of what the DHT and the peers themselves say; who still trains in one is done if the other says so."""
    later = {peer: said for peer, said in told.items() if peer not in found or not _precedes(said, found[peer])}
    return found | later


def _precedes(said: Ready, other: Ready) -> bool:
    return (said.iteration, said.role != NOT_YET) < (other.iteration, other.role != NOT_YET)
