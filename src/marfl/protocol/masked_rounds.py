"""The rounds of a masked sum: trade shares, exchange what is masked, pledge, take the masks off.

Nobody is asked for a secret before a majority of the roster holds the masked sum and a quorum of the electors has
pledged itself to this roster, each with its signature (see `mask_pledges`). Then the leader asks for seeds, and shows
the pledges. Members that died after the exchange cost a second question: their neighbours' shares of their seeds.
Members that never sent anything are not in the sum; their neighbours give shares of their keys. Whatever comes back
is compared with what its owner had published; whoever dealt shares that do not fit is named.

`Membership` and `Leader` see masks through this class alone: `opens`, `mean`, `unmasked`, `fetch_sum`, `preside`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import Tensor

from marfl.errors import DeadlineExceeded, NetError, PeerGone, WireError
from marfl.net.base import Parcel, PeerId
from marfl.plan.grid import plan
from marfl.protocol.attempt import Attempt, Stuck
from marfl.protocol.ballot import AT_ODDS, quorum
from marfl.protocol.exchange import combined, decoded
from marfl.protocol.fixed_point import DTYPES, encode, fits
from marfl.protocol.instance import Instance
from marfl.protocol.mask_pledges import (
    KIND,
    Pledged,
    PledgeProof,
    agrees,
    is_signed_card,
    is_sound,
    pledge_statement,
    proof_of,
    proves,
    took_place,
    witnesses_of,
)
from marfl.protocol.messages import WITNESS, Ack, Held, Masked, Ok, Pledge, Reveal, Revealed, Share, status_of
from marfl.protocol.roster import Elector, Roster, brief, ranked
from marfl.protocol.slice_codec import PackedCodec
from marfl.protocol.standing import Standing
from marfl.protocol.statements import SignedSeal
from marfl.protocol.tensors import raw, vector_from
from marfl.protocol.voting import GROUNDLESS, UNFIT, Voting
from marfl.secagg.crypto import SHARE_SIZE, is_key, is_seed
from marfl.secagg.graph import SEED_BYTES, neighbours, pledges_needed
from marfl.secagg.session import Graph, Session, lift, recovered, spoilt
from marfl.state import vector_hash

QUESTIONS = 3  # times that shares are asked for before an iteration is given up
BOUND = "bound"  # the answer of an elector that never pledges itself to this roster


@dataclass
class Gathered:
    """What a leader has been given of the secrets of a roster's circle, by rank in it."""

    roster: Roster
    cards: Sequence[bytes]  # what everybody has published; empty where this leader was never told
    secrets: dict[int, bytes] = field(default_factory=dict)
    shares: defaultdict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))  # owner, then giver
    asked: bool = False

    @cached_property
    def circle(self) -> tuple[PeerId, ...]:
        return self.roster.circle or self.roster.ids

    def missing(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Whose seeds are not here, of those in the sum; and whose keys, of the others."""
        unknown = [rank for rank in range(len(self.circle)) if rank not in self.secrets]
        inside = [rank for rank in unknown if self._is_inside(rank)]
        return tuple(inside), tuple(rank for rank in unknown if not self._is_inside(rank))

    def note(self, peer: PeerId, answer: Parcel | None) -> None:
        """A member's seed, if it is the one it spoke of, and its shares of others' secrets."""
        giver = self.circle.index(peer)
        for owner, data in _given(answer, giver):
            if owner != giver:
                self.shares[owner][giver] = data
            elif self._fits(giver, data):
                self.secrets[giver] = data

    def complete(self) -> bool:
        """Whether all secrets are here, those included that follow from shares."""
        for owner in sum(self.missing(), ()):
            secret = recovered(self._graph[owner], self.shares[owner], partial(self._fits, owner))
            if secret is not None:
                self.secrets[owner] = secret
        return len(self.secrets) == len(self.circle)

    def dealt_badly(self) -> list[PeerId]:
        """Whose secret does not follow from as many shares as it takes."""
        unknown = sum(self.missing(), ())
        return [self.circle[owner] for owner in unknown if spoilt(self._graph[owner], self.shares[owner])]

    @property
    def _graph(self) -> Graph:
        return neighbours(self.roster.base, self.circle)

    def _is_inside(self, rank: int) -> bool:
        return self.circle[rank] in self.roster.ranks

    def _fits(self, owner: int, secret: bytes) -> bool:
        if not self.cards:
            return True  # a leader that was no member and sees a roster through: its members compare for themselves
        return (is_seed if self._is_inside(owner) else is_key)(self.cards[owner], secret)


class MaskedRounds:
    """One peer's part in masked sums, as a member and as a leader."""

    def __init__(self, standing: Standing, voting: Voting) -> None:
        self.standing, self.voting, self.talk = standing, voting, standing.talk
        self.net, self.settings = standing.net, standing.settings

    # --- before a sum ---

    def checked_keys(self, peer: PeerId, instance: Instance, attempt: int, data: bytes) -> bytes:
        """As the leader: the card and signature that came with an ack, or nothing where they are not that peer's."""
        if not self.settings.masked:
            return b""
        signed = is_signed_card(peer, instance.decision, attempt, data, self.net.verify)
        return data if signed else b""

    def opens(self, instance: Instance, roster: Roster, keys: bytes) -> bool:
        """Whether to give my value to a masked sum: large enough, as I bring it, and under keys that are signed."""
        mine, rank = instance.mine, roster.ranks.get(self.net.me)
        if mine is None or rank is None or roster.members[rank].weight != mine.weight:
            return False
        if not self._is_sound(instance, roster):
            return False
        return instance.masks.open(roster, self.net.me, keys, self.net.verify)

    def _is_sound(self, instance: Instance, roster: Roster) -> bool:
        """See `mask_pledges.is_sound`. Whoever helps to found a lineage knows no electors but those of its roster."""
        electors = instance.electors or ranked(roster.run, roster.iteration, roster.electors)
        return is_sound(roster, electors, self.settings.smallest_sum, self.settings.liars)

    # --- a member's part ---

    async def mean(self, instance: Instance, leader: PeerId, attempt: Attempt, value: Tensor) -> Tensor:
        """The mean over exactly the roster, of which nobody has seen a part."""
        masks, roster = instance.masks, attempt.roster
        session = masks.session
        assert session is not None
        if value.is_floating_point():
            if not fits(value):
                raise Stuck("an update that integers cannot carry")
            value = encode(value)
        value = value.to(attempt.dtype)  # which wraps
        await self._trade_shares(attempt, session)
        hidden = await self.talk.compute(lambda: session.masked(value))
        masks.lineage = roster.lineage  # from here on it may have left
        total = await combined(attempt, hidden)
        masks.total = (roster, total)
        return await self.unmasked(instance, leader, roster, roster.attempt)

    async def unmasked(self, instance: Instance, leader: PeerId, roster: Roster, attempt: int) -> Tensor:
        """Pledge myself to the roster whose masked sum I hold, wait for the secrets, and take the masks off."""
        masks = instance.masks
        session, total = masks.session, masks.sum_of(roster)
        assert session is not None
        assert total is not None
        pledge = masks.bind(roster, attempt, self.net.sign)
        held = Held(instance.iteration, attempt, vector_hash(total)).parcel(pledge)
        secrets = await self._secrets(instance, leader, attempt, held, 3 * self.standing.pace(roster).extra)
        if secrets is None:
            raise Stuck("nobody could take the masks off")
        seeds, lost = read_secrets(roster, session, secrets)
        plain = await self.talk.compute(lambda: lift(total, session, seeds, lost))
        try:
            return decoded(roster, plain, self._codec(roster), self.settings.room)
        except Stuck:
            masks.hopeless.add(roster.digest)  # somebody sent what it should not; under masks nobody can tell who
            raise

    def _codec(self, roster: Roster) -> PackedCodec | None:
        """How masked integers of few bits are added up, if these are."""
        wire, layout = self.settings.integers, plan(len(roster.members), roster.group_size)
        circle = len(roster.circle or roster.members)
        return PackedCodec(self.standing.wire_now(wire), layout, circle) if wire else None

    async def fetch_sum(self, instance: Instance, roster: Roster, holders: Iterable[PeerId]) -> None:
        """An earlier attempt's masked sum that is to be seen through, from anybody who holds it."""
        mine = instance.mine
        assert mine is not None
        request, codec = Masked(roster.digest).parcel(), self._codec(roster)
        dtype = codec.dtype if codec else DTYPES[roster.wire]
        for holder in (peer for peer in holders if instance.masks.sum_of(roster) is None and peer != self.net.me):
            try:
                answer = await self.talk.call_long(holder, "masked", request, self.standing.pace(roster), more=0.0)
                if Ok.decode(answer.header).status == "held":
                    instance.masks.total = roster, vector_from(answer.payload, mine.delta.numel(), dtype)
            except (NetError, WireError):
                continue  # the next one may have it
        if instance.masks.sum_of(roster) is None:
            raise Stuck("a masked sum that nobody gives")

    async def answer_masked(self, _: PeerId, request: Parcel) -> Parcel:
        """Somebody is to see a roster through whose masked sum I may hold."""
        digest, instance = Masked.decode(request.header).roster, self.standing.instance
        held = instance.masks.total if instance else None
        if held is None or held[0].digest != digest:
            return Ok("unknown").parcel()
        return Ok("held").parcel(raw(held[1]))

    async def _secrets(
        self, instance: Instance, leader: PeerId, attempt: int, request: Parcel, extra: float
    ) -> bytes | None:
        """Tell the leader that the masked sum is here, again and again until it has the secrets or gives up.

        While it answers it is given so much extra time: others may need it before they hold the sum.
        """
        patience = 3 * self.settings.phase_timeout + 2 * self.settings.call_timeout
        answered = self.net.now()
        limit = answered + patience + extra
        while self.net.now() < limit and instance.promised == attempt and not instance.over.is_set():
            try:
                if leader == self.net.me:
                    answer = await self.answer_held(leader, request)
                else:
                    deadline = self.net.now() + self.settings.call_timeout
                    answer = await self.net.call(leader, "held", request, kind=KIND, deadline=deadline)
                status, answered = Ok.decode(answer.header).status, self.net.now()
            except DeadlineExceeded:
                if self.net.now() - answered < patience:
                    continue
                return None
            except (NetError, WireError):  # gone, or my own daemon is: to ask again at once would be to ask for ever
                return None
            if status != "pending":
                secrets = bytes(answer.payload)
                return secrets if status == "lift" and len(secrets) % SEED_BYTES == 0 else None
        return None

    async def _trade_shares(self, attempt: Attempt, session: Session) -> None:
        """Hand every neighbour its shares and take theirs into custody; all of them, or nothing is masked with them."""
        if session.complete:
            return
        dealt = session.deal()
        sending = [asyncio.create_task(_hand_over(attempt, rank, sealed)) for rank, sealed in dealt.items()]
        try:
            for rank in session.neighbours:
                attempt.waiting.add(rank)
                await self._take_share(attempt, session, rank)
                attempt.waiting.discard(rank)
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()

    async def _take_share(self, attempt: Attempt, session: Session, rank: int) -> None:
        """A neighbour's shares: as it sent them, else asked for. Whoever sends what cannot be read is named."""
        parcel = await attempt.arrival(-1, attempt.tag("shares", 0), rank)
        peer = attempt.roster.members[rank].id
        if parcel is None:
            attempt.overdue.add(rank)
            parcel = await self.talk.ask(peer, "share", Share(attempt.roster.digest).parcel())
        if parcel is None or not parcel.payload:
            raise Stuck(f"no shares of {peer}")
        try:
            session.keep(rank, bytes(parcel.payload))
        except WireError as error:
            raise attempt.caught(rank, error) from None
        attempt.overdue.discard(rank)

    async def answer_share(self, sender: PeerId, request: Parcel) -> Parcel:
        """A neighbour misses the shares that I dealt it."""
        digest, instance = Share.decode(request.header).digest, self.standing.instance
        masks = instance.masks if instance else None
        if masks is None or masks.session is None or masks.working is None or masks.working.digest != digest:
            return Ok("unknown").parcel()
        members = masks.session.members
        sealed = masks.session.deal().get(members.index(sender)) if sender in members else None
        return Ok("held" if sealed else "unknown").parcel(sealed or b"")

    async def answer_pledge(self, sender: PeerId, request: Parcel) -> Parcel:
        """A leader asks an elector that does not hold the masked sum: the answer brings its signature."""
        return self.pledge(sender, Pledge.decode(request.header), bytes(request.payload))

    def pledge(self, sender: PeerId, asked: Pledge, signatures: bytes) -> Parcel:
        """Promise that no other roster of this iteration is unmasked with my help, unless a later one was promised.

        Nobody pledges itself to a roster that is too small, or leaves its own update out (see `mask_pledges.agrees`).
        """
        found = self.voting.asked_for(sender, asked.iteration, asked.attempt, asked.roster)
        if found is None or not found[1].masked:
            return Ok("refused").parcel()
        instance, roster = found
        shown = PledgeProof(asked.votes, signatures)
        if not (self._is_sealed(sender, instance, roster, asked) and self._took_place(instance, roster, asked, shown)):
            self.net.refused.note(GROUNDLESS, sender)
            return Ok("refused").parcel()
        if not self._is_sound(instance, roster) or not agrees(self.net.me, self._said(instance), roster):
            self.net.refused.note(UNFIT, sender)
            return Ok(BOUND).parcel()
        signature = instance.masks.bind(roster, asked.attempt, self.net.sign)
        if signature:
            instance.promise(asked.attempt)
        return Ok("ok" if signature else BOUND).parcel(signature)

    def _is_sealed(self, sender: PeerId, instance: Instance, roster: Roster, asked: Pledge) -> bool:
        """Whether a leader that may lie shows its signature of this roster: two of them in an attempt name it."""
        if sender == self.net.me or not self.standing.proofs.borne(instance.electors or roster.electors):
            return True
        seal = SignedSeal.decode(asked.sealed)
        same = (seal.attempt, seal.roster) == (asked.attempt, roster.digest)
        return same and self.standing.note_seal(instance, seal)

    def _took_place(self, instance: Instance, roster: Roster, asked: Pledge, shown: PledgeProof) -> bool:
        """Whether somebody who does not lie holds the sum of a roster (see `mask_pledges.took_place`)."""
        electors = instance.electors or ranked(roster.run, roster.iteration, roster.electors)
        if not self.standing.proofs.borne(electors):
            return True
        return took_place(shown, roster, asked.attempt, electors, self.settings.liars, self.net.verify)

    def _said(self, instance: Instance) -> Ack:
        """What my ack says of what I bring, and of others; who only votes brings nothing, also without the state."""
        mine = replace(self.voting.ack("ack", instance), blamed=instance.masks.complaints)
        return replace(mine, role=WITNESS) if instance.begun and instance.mine is None else mine

    async def answer_reveal(self, sender: PeerId, request: Parcel) -> Parcel:
        """A leader that shows a quorum's pledges asks for my seed, and for shares of others' secrets."""
        return self.reveal(sender, Reveal.decode(request.header), bytes(request.payload))

    def reveal(self, sender: PeerId, question: Reveal, signatures: bytes) -> Parcel:
        """My seed and the shares asked for, for the one roster of this iteration that I ever help to unmask."""
        nothing = Revealed("refused", ()).parcel()
        instance, attempt, barred = self.standing.instance, question.attempt, self.standing.barred
        if instance is None or instance.iteration != question.iteration or barred == instance.iteration:
            return nothing
        session, roster = instance.masks.session, instance.masks.working
        if session is None or roster is None or roster.digest != question.roster or self.net.me not in roster.ranks:
            return nothing
        if instance.leader(attempt) != sender or attempt != instance.promised:
            return nothing
        proof, liars = PledgeProof(question.votes, signatures), self.settings.liars
        if not proves(proof, roster, attempt, instance.electors, liars, self.net.verify):
            self.net.refused.note(GROUNDLESS, sender)
            return nothing
        if not self.standing.may_help(roster):
            return nothing
        instance.masks.pledge = Pledged(attempt, roster)
        return _gift(session, roster, question)

    # --- a leader's part ---

    async def preside(self, instance: Instance, attempt: int, roster: Roster) -> None:
        """As the leader of a masked attempt: certify the roster, gather its secrets, and let members have them."""
        proof = await self._certify(instance, attempt, roster)
        secrets = await self._gather(instance, attempt, roster, proof) if proof else None
        if instance.lead.attempt != attempt:
            return
        if secrets is None:
            instance.masks.hopeless.add(roster.digest)
            instance.lead.attempt, instance.patience = -1, self.net.now()
            instance.progress.set()
        else:
            instance.masks.secrets = secrets
        instance.masks.settled.set()

    async def _certify(self, instance: Instance, attempt: int, roster: Roster) -> PledgeProof | None:
        """The pledges of a quorum of the electors, once a majority of the roster holds the masked sum.

        None when the attempt ends first, or so many electors say that they never will.
        """
        masks, electors, liars = instance.masks, instance.electors, self.settings.liars
        members = tuple(Elector(member.id, member.index) for member in roster.members)
        outside = [elector.id for elector in electors if elector.id not in roster.ranks]
        asked = quorum(electors, roster.ranks, liars)  # then nobody else need be
        unwilling: set[PeerId] = set()
        questions = 0
        while instance.lead.attempt == attempt and not instance.over.is_set():
            ready = any(quorum(members, _holders(masks.held, digest)) for digest in set(masks.held.values()))
            proof = proof_of(electors, masks.pledges, liars) if ready else None
            waits = len(masks.held) < len(members)  # a member's pledge is on its way, which spares the tie-break
            if proof and (not waits or len(proof.places) >= pledges_needed(len(electors), liars)):
                return proof
            if not (ready or _may_agree(masks.held, members)):
                return None  # they hold different sums: somebody has shown each of them something else
            shown = witnesses_of(electors, roster, masks.pledges, liars)
            if ready and shown and not asked:
                unwilling |= await self._ask_pledges(instance, attempt, roster, outside, shown)
                asked = True
                continue
            if questions == QUESTIONS or not quorum(electors, {e.id for e in electors} - unwilling, liars):
                return None
            masks.news.clear()
            await self.talk.until(masks.news, self.net.now() + self.settings.call_timeout)
            if ready and not masks.news.is_set():  # whoever is silent may have no sum, and still a pledge to give
                questions += 1
                everybody = [elector.id for elector in electors] if shown else []
                unwilling |= await self._ask_pledges(instance, attempt, roster, everybody, shown)
                if proof := proof_of(electors, masks.pledges, liars):
                    return proof
        return None

    async def _ask_pledges(
        self, instance: Instance, attempt: int, roster: Roster, electors: Collection[PeerId], shown: PledgeProof | None
    ) -> set[PeerId]:
        """Electors that have not said so yet pledge themselves, too; who of them never will."""
        masks, seal = instance.masks, instance.seals.get(attempt)
        named, sealed = brief(roster, instance.electors), seal.brief.encoded if seal is not None else b""
        places, signatures = shown if shown and self.standing.proofs.borne(instance.electors) else ((), b"")
        request = Pledge(instance.iteration, attempt, named, sealed, places)
        out = {peer for peer, why in roster.omitted if why == AT_ODDS}  # they would have to refuse
        others = [peer for peer in electors if peer not in masks.pledges and peer not in {self.net.me, *out}]
        asking = (self.talk.ask(peer, "pledge", request.parcel(signatures)) for peer in others)
        answers = dict(zip(others, await asyncio.gather(*asking), strict=True))
        if self.net.me in electors and self.net.me not in masks.pledges and self.net.me not in out:
            answers[self.net.me] = self.pledge(self.net.me, request, signatures)
        for peer, answer in answers.items():
            if answer is not None:
                self._note_pledge(instance, roster, attempt, peer, bytes(answer.payload))
        return {peer for peer, answer in answers.items() if answer is not None and status_of(answer) == BOUND}

    def _note_pledge(self, instance: Instance, roster: Roster, attempt: int, peer: PeerId, signature: bytes) -> None:
        """Keep a pledge, if that peer has signed it: one that is not would spoil the proof."""
        if signature and self.net.verify(peer, pledge_statement(roster, attempt), signature):
            instance.masks.pledges[peer] = signature

    async def _gather(self, instance: Instance, attempt: int, roster: Roster, proof: PledgeProof) -> bytes | None:
        """Every secret of the roster's circle, by rank in it; None when some cannot be had."""
        found = Gathered(roster, instance.masks.cards_of(roster))
        for _ in range(QUESTIONS):
            seeds_of, keys_of = found.missing() if found.asked else ((), found.missing()[1])
            question = Reveal(instance.iteration, attempt, roster.digest, proof.places, seeds_of, keys_of)
            await self._ask_all(question, proof.signatures, found)
            if found.complete():
                return b"".join(found.secrets[rank] for rank in range(len(found.circle)))
            if instance.lead.attempt != attempt or instance.over.is_set():
                return None
        self.standing.suspects |= dict.fromkeys(found.dealt_badly(), instance.iteration)
        return None

    async def _ask_all(self, question: Reveal, signatures: bytes, found: Gathered) -> None:
        """One question to every member; what they give away is noted."""
        request, members = question.parcel(signatures), found.roster.ids
        others = [peer for peer in members if peer != self.net.me]
        asking = (self.talk.ask(peer, "reveal", request, KIND) for peer in others)
        answers: list[Parcel | None] = list(await asyncio.gather(*asking))
        if self.net.me in members:
            others.append(self.net.me)
            answers.append(self.reveal(self.net.me, question, signatures))
        found.asked = True
        for peer, answer in zip(others, answers, strict=True):
            found.note(peer, answer)

    async def answer_held(self, sender: PeerId, request: Parcel) -> Parcel:
        """As the leader: note who holds the masked sum; the answer brings the secrets, once they are here."""
        said, instance = Held.decode(request.header), self.standing.instance
        if instance is None or instance.iteration != said.iteration or instance.lead.attempt != said.attempt:
            return Ok("retry").parcel()
        masks, led = instance.masks, instance.lead.roster
        if sender not in masks.held and led is not None:
            masks.held[sender] = said.sum
            self._note_pledge(instance, led, said.attempt, sender, bytes(request.payload))
            masks.news.set()
        limit = self.net.now() + self.settings.call_timeout / 2
        while masks.secrets is None and instance.lead.attempt == said.attempt and self.net.now() < limit:
            await self.talk.until(masks.settled, limit)
        if masks.secrets is not None and masks.held.get(sender) == said.sum:
            return Ok("lift").parcel(masks.secrets)
        return Ok("pending" if instance.lead.attempt == said.attempt else "retry").parcel()


async def _hand_over(attempt: Attempt, rank: int, sealed: bytes) -> None:
    peer, tag = attempt.roster.members[rank].id, attempt.tag("shares", 0)
    parcel = Share(attempt.roster.digest).parcel(sealed)
    try:
        await attempt.net.send(peer, tag, parcel, kind=KIND, deadline=attempt.deadline(-1))
    except PeerGone:
        attempt.gone.add(rank)
    except NetError:
        return  # the receiver asks for it


def read_secrets(roster: Roster, session: Session, data: bytes) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The seeds of the members and the keys of all others in the circle, by rank in it.

    `Stuck` where they are another number, or not those that their owners published: then the leader is to blame.
    """
    each = [data[at : at + SEED_BYTES] for at in range(0, len(data), SEED_BYTES)]
    if len(each) != len(session.members):
        raise Stuck("secrets of another roster")
    inside = [peer in roster.ranks for peer in session.members]
    for card, secret, is_member in zip(session.keys, each, inside, strict=True):
        if not (is_seed if is_member else is_key)(card, secret):
            raise Stuck("secrets that their owners never published")
    seeds = {rank: secret for rank, secret in enumerate(each) if inside[rank]}
    return seeds, {rank: secret for rank, secret in enumerate(each) if not inside[rank]}


def _gift(session: Session, roster: Roster, question: Reveal) -> Parcel:
    """My seed, shares of the seeds of those in the sum, and of the keys of those who are not."""
    inside = {rank for rank, peer in enumerate(session.members) if peer in roster.ranks}
    given = {rank: session.seed_share(rank) for rank in set(question.seeds_of) & inside}
    given |= {rank: session.key_share(rank) for rank in set(question.keys_of) - inside}
    owners = tuple(rank for rank, share in given.items() if share is not None)
    shares = b"".join(share for share in given.values() if share is not None)
    return Revealed("ok", owners).parcel(session.seed + shares)


def _holders(held: Mapping[PeerId, bytes], digest: bytes) -> set[PeerId]:
    return {peer for peer, got in held.items() if got == digest}


def _may_agree(held: Mapping[PeerId, bytes], members: Sequence[Elector]) -> bool:
    """Whether a majority of the roster may still turn out to hold one masked sum."""
    silent = {member.id for member in members} - held.keys()
    return quorum(members, silent) or any(quorum(members, silent | _holders(held, each)) for each in {*held.values()})


def _given(answer: Parcel | None, rank: int) -> Iterable[tuple[int, bytes]]:
    """(owner, its seed or a share) in an answer; nothing in one that is none."""
    if answer is None:
        return
    try:
        owners = Revealed.decode(answer.header).owners
    except WireError:
        return
    payload = bytes(answer.payload)
    if len(payload) != SEED_BYTES + SHARE_SIZE * len(owners) or len(set(owners)) != len(owners):
        return
    yield rank, payload[:SEED_BYTES]
    for number, owner in enumerate(owners):
        at = SEED_BYTES + number * SHARE_SIZE
        yield owner, payload[at : at + SHARE_SIZE]
