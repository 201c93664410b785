"""A peer that lies: an honest participant whose messages a `Liar` changes on their way out, and adds to.

It signs what it says with its own key, and nobody else's. Its data are true: it lies about votes, rosters, records,
heads and states. What others must bear is in `settings.liars`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from random import Random

from marfl.errors import NetError, WireError
from marfl.net.base import Parcel, PeerId
from marfl.net.virtual import Delivery, Departure
from marfl.protocol.ballot import FAR, Reply
from marfl.protocol.instance import Instance
from marfl.protocol.messages import Ack, Decided, Endorse, Finish, Head, Overtaken, Propose, Ruling, Seal, State
from marfl.protocol.participant import Participant
from marfl.protocol.roster import Elector, Member, Record, Roster, brief, brief_record, unbrief
from marfl.protocol.seniority import parted
from marfl.protocol.statements import (
    SignedPromise,
    cast,
    certificate,
    lineage_after,
    link_of,
    pack_promises,
    seal_parts,
    statement,
)
from marfl.protocol.voting import promise_of

CHANCE = 0.3  # that a message is a lie
PAUSE = 8.0  # seconds between two lies that nobody asked for


class Liar:
    """One peer's lies, by dice of its own."""

    def __init__(self, me: Participant, random: Random) -> None:
        self.me, self.random = me, random
        self.told: Counter[str] = Counter()
        self._splitting = False  # it leads an attempt in which every word is chosen
        self._finishes: dict[PeerId, Finish] = {}  # what was reported to it then
        self._lies: dict[tuple[str, str], Callable[[PeerId, Parcel], Parcel | None]] = {
            ("answer", "propose"): self._ack,
            ("answer", "finish"): self._ruling,
            ("answer", "sync"): self._state,
            ("call", "finish"): self._finish,
            ("call", "seal"): self._seal,
            ("call", "endorse"): self._endorse,
            ("call", "decided"): self._decided,
            ("call", "propose"): self._propose,
        }

    def overhear(self, event: Departure, delivery: Delivery) -> None:
        """What others report to it in an attempt of its own."""
        if self._splitting and (event.op, event.tag.channel) == ("call", "finish"):
            with suppress(WireError):
                self._finishes[event.source] = Finish.decode(delivery.parcel.header)

    def tamper(self, event: Departure, delivery: Delivery) -> None:
        """Perhaps change one of its messages."""
        if self._splitting and (event.op, event.tag.channel) == ("answer", "finish"):
            delivery.parcel = Ruling("pending", None, ()).parcel()
        lie = self._lies.get((event.op, event.tag.channel))
        if lie is None or self._splitting or self.random.random() >= CHANCE:
            return
        try:
            changed = lie(event.dest, delivery.parcel)
        except WireError:  # a fault has spoilt it already
            return
        if changed is not None:
            delivery.parcel = changed
            self.told[f"{event.op} {event.tag.channel}"] += 1

    async def live(self) -> None:
        """Now and then say something that nobody asked for."""
        net = self.me.net
        while True:
            await net.sleep_until(net.now() + PAUSE * self.random.uniform(0.2, 2.0))
            what = self.random.choice([self._announce, self._spread, self._proclaim, self._found, *[self._split] * 3])
            try:
                await what()
            except NetError:
                continue
            self.told[what.__name__.strip("_")] += 1

    # --- what it makes up ---

    def _hash(self) -> bytes:
        return self.random.randbytes(32)

    def _roster(self, attempt: int = 0) -> Roster | None:
        """A roster that was never sealed, of the iteration under way."""
        instance, standing = self.me.instance, self.me.standing
        if instance is None or not instance.electors:
            return None
        members = tuple(Member(elector.id, elector.index, 1.0) for elector in instance.electors)
        settings = self.me.settings
        return Roster(
            settings.run, instance.iteration, attempt, instance.lineage, instance.base, standing.layout,
            settings.exchange, settings.group_size, members, (), (), (), settings.wire, piece=settings.piece,
        )  # fmt: skip

    def _record(self, roster: Roster | None = None, digest: bytes | None = None) -> tuple[Record, bytes] | None:
        """A record that nobody decided, and a certificate that only its own vote is in, or none at all."""
        instance = self.me.instance
        roster = roster or self._roster()
        if instance is None or roster is None:
            return None
        record = instance.before.after(roster, digest or self._hash())
        if self.random.random() < 0.5:
            return record, b""
        said = cast(roster, roster.attempt, instance.before, record.hash)
        votes = {self.me.net.me: self.me.net.sign(said.statement)}
        return record, certificate(instance.electors, roster.attempt, votes).encoded

    def _led(self) -> tuple[Instance, Roster] | None:
        instance = self.me.instance
        return (instance, instance.lead.roster) if instance is not None and instance.lead.roster is not None else None

    # --- answers ---

    def _ack(self, _: PeerId, parcel: Parcel) -> Parcel | None:
        """Another last vote, a later record, a far attempt, or a refusal."""
        ack, instance, net = Ack.decode(parcel.header), self.me.instance, self.me.net
        way, roster = self.random.choice(["vote", "vote", "behind", "far", "refuse"]), self._roster()
        if instance is None or roster is None:
            return None
        if way == "vote" and ack.status == Reply.ACK.value:
            known = [*instance.sealed.values(), roster]
            of = self.random.choice([each for each in known if each.attempt <= ack.attempt])
            when = self.random.randint(of.attempt, ack.attempt)
            lie = replace(
                ack, accepted=of.encoded, accepted_hash=self._hash(), accepted_attempt=when,
                holds=self.random.random() < 0.5,
            )  # fmt: skip
            signed = replace(lie, signature=net.sign(promise_of(lie).statement(instance.signed_id)))
            return signed.parcel(parcel.payload)
        if way == "behind" and (made := self._record()):
            return replace(ack, status="behind", record=made[0].encoded, certificate=made[1]).parcel()
        far = self.random.choice([2**64 - 1, FAR // 3, ack.attempt + 1])
        return replace(ack, status="refused", attempt=far).parcel()

    def _ruling(self, to: PeerId, parcel: Parcel) -> Parcel | None:
        """A commit without a quorum, best of what the other has voted for; or a true one without its certificate."""
        ruling, led = Ruling.decode(parcel.header), self._led()
        if ruling.status == "commit":
            return replace(ruling, certificate=b"").parcel()
        if led is None:
            return None
        instance, roster = led
        made = self._record(roster, instance.lead.finishes.get(to) if self.random.random() < 0.7 else None)
        if made is None:
            return None
        return Ruling("commit", brief_record(made[0], instance.electors), roster.ids[:4], made[1]).parcel()

    def _state(self, _: PeerId, parcel: Parcel) -> Parcel | None:
        """A wrong state, a record that nobody decided, or a true one that cannot be proven."""
        state, payload = State.decode(parcel.header), bytes(parcel.payload)
        way = self.random.choice(["payload", "record", "proof", "settled"])
        if way == "payload" and payload:
            return Parcel(parcel.header, bytes(len(payload)))
        if way == "record" and (made := self._record()):
            return replace(state, record=made[0].encoded, settled=True).parcel(payload)
        if way == "proof":
            return replace(state, proof=b"", vote=b"").parcel(payload)
        return replace(state, settled=True).parcel(payload)

    # --- calls ---

    def _finish(self, _: PeerId, parcel: Parcel) -> Parcel | None:
        """A vote for another hash, signed as it must be: often the second one in an attempt."""
        said, instance = Finish.decode(parcel.header), self.me.instance
        exchange = instance.work.exchange if instance is not None else None
        if instance is None or exchange is None or not said.final:
            return None
        digest = self._hash()
        vote = instance.vote(exchange.roster, said.attempt, digest)
        return replace(said, hash=digest, signature=self.me.net.sign(vote.statement)).parcel()

    def _seal(self, to: PeerId, parcel: Parcel) -> Parcel | None:
        """Another roster for this peer: without one of the others, with somebody made up; or something to adopt."""
        seal, instance = Seal.decode(parcel.header), self.me.instance
        if instance is None:
            return None
        roster = unbrief(seal.roster, instance.electors)
        way = self.random.choice(["less", "ghost", "adopt", "alone"])
        gone = self.random.choice(roster.ids)
        if way == "less" and len(roster.members) > 1:
            roster = replace(roster, members=tuple(m for m in roster.members if m.id != gone))
        elif way == "alone":
            roster = replace(roster, members=tuple(m for m in roster.members if m.id == to) or roster.members[:1])
        elif way == "adopt":
            return replace(seal, adopt=self._hash(), holders=(self.me.net.me,)).parcel(parcel.payload)
        elif way == "ghost":
            ghosts = tuple(Elector(f"nobody{i}", 10**6 + i) for i in range(2 * len(instance.electors)))
            roster = replace(roster, witnesses=(*roster.witnesses, *ghosts))
        else:
            roster = replace(roster, omitted=(*roster.omitted, ("nobody", "made up")))
        signed = self._signed_seal(instance, seal, roster) if self.random.random() < 0.5 else seal.signature
        return replace(seal, roster=brief(roster, instance.electors), signature=signed).parcel(parcel.payload)

    def _signed_seal(self, instance: Instance, seal: Seal, roster: Roster) -> bytes:
        """Its signature of a roster: the second one in an attempt gives it away."""
        parts = seal_parts(instance.signed_id, seal.attempt, roster.digest, parted(seal.promises)[0])
        return self.me.net.sign(statement("seal", *parts))

    def _endorse(self, _: PeerId, parcel: Parcel) -> Parcel | None:
        """Another hash, or what is asked for without what shows it to be right."""
        asked = Endorse.decode(parcel.header)
        if self.random.random() < 0.5:
            return replace(asked, hash=self._hash()).parcel()
        return replace(asked, promises=b"", votes=b"").parcel()

    def _decided(self, _: PeerId, parcel: Parcel) -> Parcel | None:
        """Another record, or the true one without its certificate."""
        said, instance, led = Decided.decode(parcel.header), self.me.instance, self._led()
        if self.random.random() < 0.5 or led is None or instance is None:
            return replace(said, certificate=b"").parcel()
        made = self._record(led[1])
        return Decided(said.iteration, brief_record(made[0], led[0].electors), (), made[1]).parcel() if made else None

    def _propose(self, _: PeerId, parcel: Parcel) -> Parcel | None:
        """A far attempt of its own."""
        proposal, instance = Propose.decode(parcel.header), self.me.instance
        if instance is None or not instance.electors or proposal.founding:
            return None
        many = len(instance.electors)
        farther = self.random.choice([many, 1000 * many, (2**63 // many) * many])
        return replace(proposal, attempt=proposal.attempt + farther, settled=True).parcel()

    # --- what nobody asked for ---

    async def _announce(self) -> None:
        """A head that does not exist."""
        standing = self.me.standing
        lineage = self.random.choice([standing.record.lineage, self._hash()])
        head = Head(standing.record.iteration + 5, self._hash(), lineage, standing.terms.digest)
        await self.me.talk.announce("head", head.encoded)

    async def _spread(self) -> None:
        """Others are elsewhere, and ahead."""
        for elector in self.me.standing.electors:
            if elector.id != self.me.net.me:
                notice = Overtaken(self._hash(), 10**6, self.random.choice(["", elector.id, "nobody"]))
                await self.me.talk.ask(elector.id, "overtaken", notice.parcel())

    async def _proclaim(self) -> None:
        """This iteration is decided."""
        instance = self.me.instance
        accepted = instance.accepted if instance is not None else None
        made = self._record(accepted.roster, accepted.hash) if accepted else self._record()
        if instance is None or made is None:
            return
        notice = Decided(instance.iteration, brief_record(made[0], instance.electors), (self.me.net.me,), made[1])
        for elector in instance.electors:
            if elector.id != self.me.net.me:
                await self.me.talk.ask(elector.id, "decided", notice.parcel())

    async def _found(self) -> None:
        """A lineage of its own: whoever follows it leaves the others."""
        standing, record = self.me.standing, self.me.record
        lineage = lineage_after(link_of(record), self._hash())
        proposal = Propose(
            record.iteration + 1, 0, -1, lineage, record.hash, True, standing.incarnation,
            standing.terms.digest, True,
        )  # fmt: skip
        for elector in standing.electors:
            if elector.id != self.me.net.me:
                await self.me.talk.ask(elector.id, "propose", proposal.parcel())

    # --- an attempt of its own, in which two results are to be decided ---

    async def _split(self) -> None:
        """Lead an attempt: one roster for some of the electors, another one for the rest, and votes for both."""
        instance, me = self.me.instance, self.me.net.me
        rank = instance.rank(me) if instance is not None else None
        if instance is None or rank is None or instance.record is not None:
            return
        self._splitting, self._finishes = True, {}
        try:
            attempt = instance.next_attempt(rank)
            acks = await self._acks(instance, attempt)
            others = self.random.sample(sorted(acks), len(acks))
            cut = self.random.randint(0, len(others) // 2)
            halves = [half for half in (others[:cut], others[cut:]) if half]
            rosters = [made for half in halves if (made := self._roster_of(instance, attempt, half, acks))]
            shown = self._shown(instance, acks) if attempt else b""
            for roster in rosters:
                seal = Seal(brief(roster, instance.electors), attempt, None, (), shown, b"")
                signed = self._signed_seal(instance, seal, roster)
                await self._tell(roster.ids, "seal", replace(seal, signature=signed).parcel())
            await self.me.net.sleep_until(self.me.net.now() + self.random.uniform(1.0, 6.0))
            for roster in rosters:
                await self._claim(instance, roster, shown)
        finally:
            self._splitting = False

    async def _tell(self, peers: Iterable[PeerId], channel: str, parcel: Parcel) -> dict[PeerId, Parcel]:
        others = [peer for peer in peers if peer != self.me.net.me]
        answers = await asyncio.gather(*(self.me.talk.ask(peer, channel, parcel) for peer in others))
        return {peer: answer for peer, answer in zip(others, answers, strict=True) if answer is not None}

    async def _acks(self, instance: Instance, attempt: int) -> dict[PeerId, Ack]:
        standing = self.me.standing
        proposal = Propose(
            instance.iteration, attempt, attempt - 1, instance.lineage, instance.base, False,
            standing.incarnation, standing.terms.digest, True,
        )  # fmt: skip
        answers = await self._tell([elector.id for elector in instance.electors], "propose", proposal.parcel())
        acks = {}
        for peer, answer in answers.items():
            with suppress(WireError):
                acks[peer] = Ack.decode(answer.header)
        return {peer: ack for peer, ack in acks.items() if ack.status == Reply.ACK.value}

    def _roster_of(
        self, instance: Instance, attempt: int, half: list[PeerId], acks: dict[PeerId, Ack]
    ) -> Roster | None:
        """Of those in this half who bring something; the next decision is everybody's, or theirs alone.

        Electors that have not acked are named as well, now and then: they must not take their votes for lost.
        """
        blank = self._roster(attempt)
        joining = {peer for peer in half if acks[peer].join}
        if blank is None or not joining:
            return None
        members = tuple(
            Member(elector.id, elector.index, acks[elector.id].weight)
            for elector in instance.electors
            if elector.id in joining
        )
        named = {elector.id for elector in instance.electors} if self.random.random() < 0.3 else set(acks)
        voters = {*named, self.me.net.me} - joining
        rest = tuple(elector for elector in instance.electors if elector.id in voters)
        return replace(blank, members=members, witnesses=rest if self.random.random() < 0.8 else ())

    def _shown(self, instance: Instance, acks: dict[PeerId, Ack]) -> bytes:
        """Any of the acks that it was given."""
        some = set(self.random.sample(sorted(acks), self.random.randint(len(acks) // 2, len(acks))))
        rows = [
            SignedPromise(place, promise_of(acks[elector.id]), acks[elector.id].signature)
            for place, elector in enumerate(instance.electors)
            if elector.id in some
        ]
        return pack_promises(rows)

    async def _claim(self, instance: Instance, roster: Roster, shown: bytes) -> None:
        """Have others vote for what these members made, and say that it is decided, with a quorum or without."""
        net, said = self.me.net, {peer: self._finishes[peer] for peer in roster.ids if peer in self._finishes}
        digests = [finish.hash for finish in said.values() if finish.hash is not None]
        if not digests:
            return
        digest = digests[0]
        votes = {peer: finish.signature for peer, finish in said.items() if finish.hash == digest}
        vote = instance.vote(roster, roster.attempt, digest).statement
        members = tuple(Elector(member.id, member.index) for member in roster.members)
        proof = certificate(members, roster.attempt, votes).encoded
        named = brief(roster, instance.electors)
        seal = self._signed_seal(instance, Seal(named, roster.attempt, None, (), shown), roster)
        asked = Endorse(instance.iteration, roster.attempt, named, digest, proof, shown, seal)
        rest = [elector.id for elector in instance.electors if elector.id not in votes]
        answers = await self._tell(rest, "endorse", asked.parcel())
        votes |= {peer: bytes(answer.payload) for peer, answer in answers.items() if answer.payload}
        votes[net.me] = net.sign(vote)
        good = {peer: vote_of for peer, vote_of in votes.items() if net.verify(peer, vote, vote_of)}
        record = instance.before.after(roster, digest)
        whole = certificate(instance.electors, roster.attempt, good).encoded
        whom = self.random.sample(sorted(good), self.random.randint(1, len(good)))
        shows = whole if self.random.random() < 0.7 else b""
        notice = Decided(instance.iteration, brief_record(record, instance.electors), roster.ids[:4], shows)
        await self._tell(whom, "decided", notice.parcel())
