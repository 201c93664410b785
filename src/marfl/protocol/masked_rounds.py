"""The rounds of a masked sum: trade shares, exchange what is masked, pledge, take the masks off.

Nobody is asked for a secret before a majority of the roster holds the masked sum and a majority of the electors has
pledged itself to this roster (see `pledges`). Then the leader asks for seeds. Members that died after the exchange cost
a second question: their neighbours' shares of their seeds. Members that never sent anything are not in the sum; their
neighbours give shares of their keys.

`Membership` and `Leader` see masks through this class alone: `mean`, `unmasked`, `fetch_sum` and `preside`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marfl.errors import DeadlineExceeded, NetError, PeerGone, WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.attempt import Attempt, Stuck
from marfl.protocol.ballot import quorum
from marfl.protocol.exchange import combined, decoded
from marfl.protocol.fixed_point import encode, fits
from marfl.protocol.instance import Instance
from marfl.protocol.mask_pledges import KIND, Pledged
from marfl.protocol.messages import Held, Masked, Ok, Pledge, Reveal, Revealed, Share, status_of
from marfl.protocol.roster import Elector, Roster, brief
from marfl.protocol.standing import Standing
from marfl.protocol.tensors import raw, vector_from
from marfl.protocol.voting import Voting
from marfl.secagg.crypto import SHARE_SIZE
from marfl.secagg.graph import SEED_BYTES
from marfl.secagg.session import Session, lift, recovered
from marfl.state import vector_hash

QUESTIONS = 3  # times that shares are asked for before an iteration is given up


@dataclass
class Gathered:
    """What a leader has been given of the secrets of a roster's circle, by rank in it."""

    secrets: dict[int, bytes] = field(default_factory=dict)
    shares: defaultdict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))  # owner, then giver


class MaskedRounds:
    """One peer's part in masked sums, as a member and as a leader."""

    def __init__(self, standing: Standing, voting: Voting) -> None:
        self.standing, self.voting, self.talk = standing, voting, standing.talk
        self.net, self.settings = standing.net, standing.settings

    # --- a member's part ---

    async def mean(self, instance: Instance, leader: PeerId, attempt: Attempt, value: Tensor) -> Tensor:
        """The mean over exactly the roster, of which nobody has seen a part."""
        masks, roster = instance.masks, attempt.roster
        session = masks.session
        assert session is not None
        if not fits(value):
            raise Stuck("an update that integers cannot carry")
        await self._trade_shares(attempt, session)
        hidden = await self.talk.compute(lambda: session.masked(encode(value)))
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
        masks.pledge = Pledged(attempt, roster)
        secrets = await self._secrets(instance, leader, attempt, vector_hash(total))
        if secrets is None:
            raise Stuck("nobody could take the masks off")
        try:
            seeds, lost = read_secrets(roster, session.members, secrets)
            plain = await self.talk.compute(lambda: lift(total, session.epoch, session.keys, seeds, lost))
            return decoded(roster, plain)
        except Stuck:
            masks.hopeless.add(roster.digest)  # somebody sent what it should not; under masks nobody can tell who
            raise

    async def fetch_sum(self, instance: Instance, roster: Roster, holders: Iterable[PeerId]) -> None:
        """An earlier attempt's masked sum that is to be seen through, from anybody who holds it."""
        mine = instance.mine
        assert mine is not None
        request = Masked(roster.digest).parcel()
        for holder in (peer for peer in holders if instance.masks.sum_of(roster) is None and peer != self.net.me):
            deadline = self.net.now() + self.settings.phase_timeout
            try:
                answer = await self.net.call(holder, "masked", request, deadline=deadline)
                if Ok.decode(answer.header).status == "held":
                    instance.masks.total = roster, vector_from(answer.payload, mine.delta.numel(), torch.int64)
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

    async def _secrets(self, instance: Instance, leader: PeerId, attempt: int, digest: bytes) -> bytes | None:
        """Tell the leader that the masked sum is here, again and again until it has the secrets or gives up."""
        request = Held(instance.iteration, attempt, digest).parcel()
        limit = self.net.now() + 3 * self.settings.phase_timeout + 2 * self.settings.call_timeout
        while self.net.now() < limit and instance.promised == attempt and not instance.over.is_set():
            try:
                if leader == self.net.me:
                    answer = await self.answer_held(leader, request)
                else:
                    deadline = self.net.now() + self.settings.call_timeout
                    answer = await self.net.call(leader, "held", request, deadline=deadline)
                status = Ok.decode(answer.header).status
            except DeadlineExceeded:
                continue
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
        """A leader asks an elector that does not hold the masked sum."""
        return Ok("ok" if self.pledge(sender, Pledge.decode(request.header)) else "refused").parcel()

    def pledge(self, sender: PeerId, asked: Pledge) -> bool:
        """Promise that no other roster of this iteration is unmasked with my help, unless a later one was promised."""
        found = self.voting.asked_for(sender, asked.iteration, asked.attempt, asked.roster)
        if found is None:
            return False
        instance, roster = found
        instance.promise(asked.attempt)
        instance.masks.pledge = Pledged(asked.attempt, roster)
        return True

    async def answer_reveal(self, sender: PeerId, request: Parcel) -> Parcel:
        """A leader that shows a majority's pledges asks for my seed, and for shares of others' secrets."""
        return self.reveal(sender, Reveal.decode(request.header))

    def reveal(self, sender: PeerId, question: Reveal) -> Parcel:
        """My seed and the shares asked for, for the one roster of this iteration that I ever help to unmask."""
        nothing = Revealed("refused", ()).parcel()
        instance, attempt, barred = self.standing.instance, question.attempt, self.standing.barred
        if instance is None or instance.iteration != question.iteration or barred == instance.iteration:
            return nothing
        session, roster = instance.masks.session, instance.masks.working
        if session is None or roster is None or roster.digest != question.roster:
            return nothing
        if instance.leader(attempt) != sender or attempt != instance.promised or not _majority(instance, question):
            return nothing
        if not self.standing.may_help(roster):
            return nothing
        instance.masks.pledge = Pledged(attempt, roster)
        inside = {rank for rank, peer in enumerate(session.members) if peer in roster.ranks}
        given = {rank: session.seed_share(rank) for rank in set(question.seeds_of) & inside}
        given |= {rank: session.key_share(rank) for rank in set(question.keys_of) - inside}
        owners = tuple(rank for rank, share in given.items() if share is not None)
        shares = b"".join(share for share in given.values() if share is not None)
        return Revealed("ok", owners).parcel(session.seed + shares)

    # --- a leader's part ---

    async def preside(self, instance: Instance, attempt: int, roster: Roster) -> None:
        """As the leader of a masked attempt: certify the roster, gather its secrets, and let members have them."""
        votes = await self._certify(instance, attempt, roster)
        if votes is None:
            return
        secrets = await self._gather(instance, attempt, roster, votes)
        if instance.lead.attempt != attempt:
            return
        if secrets is None:
            instance.masks.hopeless.add(roster.digest)
            instance.lead.attempt, instance.patience = -1, self.net.now()
            instance.progress.set()
        else:
            instance.masks.secrets = secrets
        instance.masks.settled.set()

    async def _certify(self, instance: Instance, attempt: int, roster: Roster) -> tuple[int, ...] | None:
        """The places of electors that pledged themselves, once they are a majority; None if the attempt ends first."""
        masks = instance.masks
        members = tuple(Elector(member.id, member.index) for member in roster.members)
        asked = False
        while instance.lead.attempt == attempt and not instance.over.is_set():
            for digest in set(masks.held.values()):
                holders = {peer for peer, got in masks.held.items() if got == digest}
                if not quorum(members, holders):
                    continue
                if not asked and not quorum(instance.electors, holders):
                    holders |= await self._ask_pledges(instance, attempt, roster, holders)
                    asked = True
                if quorum(instance.electors, holders):
                    return tuple(place for place, elector in enumerate(instance.electors) if elector.id in holders)
            masks.news.clear()
            await self.talk.until(masks.news, self.net.now() + self.settings.call_timeout)
            asked = False
        return None

    async def _ask_pledges(
        self, instance: Instance, attempt: int, roster: Roster, had: set[PeerId]
    ) -> set[PeerId]:
        """Electors that bring nothing pledge themselves, too."""
        request = Pledge(instance.iteration, attempt, brief(roster, instance.electors))
        parcel = request.parcel()
        others = [elector.id for elector in instance.electors if elector.id not in had and elector.id != self.net.me]
        answers = await asyncio.gather(*(self.talk.ask(peer, "pledge", parcel) for peer in others))
        said = {peer for peer, answer in zip(others, answers, strict=True) if answer and status_of(answer) == "ok"}
        if instance.rank(self.net.me) is not None and self.pledge(self.net.me, request):
            said.add(self.net.me)
        return said

    async def _gather(
        self, instance: Instance, attempt: int, roster: Roster, votes: tuple[int, ...]
    ) -> bytes | None:
        """Every secret of the roster's circle, by rank in it; None when some cannot be had."""
        circle = roster.circle or roster.ids
        lost = [rank for rank, peer in enumerate(circle) if peer not in roster.ranks]
        found, wanted = Gathered(), tuple[int, ...]()
        for _ in range(QUESTIONS):
            keys_of = tuple(rank for rank in lost if rank not in found.secrets)
            question = Reveal(instance.iteration, attempt, roster.digest, votes, wanted, keys_of)
            await self._ask_all(roster, circle, question, found)
            for owner in (rank for rank in range(len(circle)) if rank not in found.secrets):
                if (secret := recovered(roster.masks, len(circle), owner, found.shares[owner])) is not None:
                    found.secrets[owner] = secret
            wanted = tuple(rank for rank in range(len(circle)) if rank not in found.secrets and rank not in lost)
            if len(found.secrets) == len(circle):
                return b"".join(found.secrets[rank] for rank in range(len(circle)))
            if instance.lead.attempt != attempt or instance.over.is_set():
                break
        return None

    async def _ask_all(self, roster: Roster, circle: tuple[PeerId, ...], question: Reveal, found: Gathered) -> None:
        """One question to every member; what they give away is noted."""
        request = question.parcel()
        others = [peer for peer in roster.ids if peer != self.net.me]
        asking = (self.talk.ask(peer, "reveal", request) for peer in others)
        answers: list[Parcel | None] = list(await asyncio.gather(*asking))
        if self.net.me in roster.ranks:
            others.append(self.net.me)
            answers.append(self.reveal(self.net.me, question))
        place = {peer: rank for rank, peer in enumerate(circle)}
        for peer, answer in zip(others, answers, strict=True):
            for owner, data in _given(answer, place[peer]):
                if owner == place[peer]:
                    found.secrets[owner] = data
                else:
                    found.shares[owner][place[peer]] = data

    async def answer_held(self, sender: PeerId, request: Parcel) -> Parcel:
        """As the leader: note who holds the masked sum; the answer brings the secrets, once they are here."""
        said, instance = Held.decode(request.header), self.standing.instance
        if instance is None or instance.iteration != said.iteration or instance.lead.attempt != said.attempt:
            return Ok("retry").parcel()
        masks = instance.masks
        if sender not in masks.held:
            masks.held[sender] = said.sum
            masks.news.set()
        limit = self.net.now() + self.settings.call_timeout / 2
        while masks.secrets is None and instance.lead.attempt == said.attempt and self.net.now() < limit:
            await self.talk.until(masks.settled, limit)
        if masks.secrets is not None and masks.held[sender] == said.sum:
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


def read_secrets(roster: Roster, circle: tuple[PeerId, ...], data: bytes) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The seeds of the members and the keys of all others in the circle, by rank in it; `Stuck` for another number."""
    each = [data[at : at + SEED_BYTES] for at in range(0, len(data), SEED_BYTES)]
    if len(each) != len(circle):
        raise Stuck("secrets of another roster")
    seeds = {rank: secret for rank, secret in enumerate(each) if circle[rank] in roster.ranks}
    return seeds, {rank: secret for rank, secret in enumerate(each) if rank not in seeds}


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


def _majority(instance: Instance, question: Reveal) -> bool:
    places = set(question.votes)
    return quorum(instance.electors, {elector.id for at, elector in enumerate(instance.electors) if at in places})
