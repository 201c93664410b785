"""Taking the masks off: the leader counts pledges, asks for seeds, has those of the dead reconstructed, and tells all.

Nobody is asked for anything before a majority of the roster holds the masked sum and a majority of the electors has
pledged itself to this roster. Members that died after the exchange cost a second question: their neighbours' shares of
their seeds. Members that never sent anything are not in the sum; their neighbours give shares of their keys.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from marfl.errors import WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.instance import Instance
from marfl.protocol.masks import Pledge
from marfl.protocol.roster import Elector, Roster, brief, quorum
from marfl.protocol.voting import asked_for
from marfl.protocol.wire import pack, status_of, unpack
from marfl.secagg.crypto import SHARE_SIZE
from marfl.secagg.graph import SEED_BYTES
from marfl.secagg.session import recovered

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant

QUESTIONS = 3  # times that shares are asked for before an iteration is given up


async def preside(me: Participant, instance: Instance, attempt: int, roster: Roster) -> None:
    """As the leader of a masked attempt: certify the roster, gather its secrets, and let members have them."""
    votes = await _certify(me, instance, attempt, roster)
    if votes is None:
        return
    secrets = await _gather(me, instance, attempt, roster, votes)
    if instance.leading != attempt:
        return
    if secrets is None:
        instance.masks.hopeless.add(roster.digest)
        instance.leading, instance.patience = -1, me.net.now()
        instance.progress.set()
    else:
        instance.masks.secrets = secrets
    instance.masks.settled.set()


async def _certify(me: Participant, instance: Instance, attempt: int, roster: Roster) -> list[int] | None:
    """The places of electors that pledged themselves, once they are a majority; None when the attempt ends first."""
    masks = instance.masks
    members = tuple(Elector(member.id, member.index) for member in roster.members)
    asked = False
    while instance.leading == attempt and not instance.over.is_set():
        for digest in set(masks.held.values()):
            holders = {peer for peer, got in masks.held.items() if got == digest}
            if not quorum(members, holders):
                continue
            if not asked and not quorum(instance.electors, holders):
                holders |= await _ask_pledges(me, instance, attempt, roster, holders)
                asked = True
            if quorum(instance.electors, holders):
                return [place for place, elector in enumerate(instance.electors) if elector.id in holders]
        masks.news.clear()
        await me.until(masks.news, me.net.now() + me.settings.call_timeout)
        asked = False
    return None


async def _ask_pledges(
    me: Participant, instance: Instance, attempt: int, roster: Roster, had: set[PeerId]
) -> set[PeerId]:
    """Electors that bring nothing pledge themselves, too."""
    fields = {"iteration": instance.iteration, "attempt": attempt, "roster": brief(roster, instance.electors)}
    parcel = Parcel(pack("pledge", **fields))
    others = [elector.id for elector in instance.electors if elector.id not in had and elector.id != me.net.me]
    answers = await asyncio.gather(*(me.ask(peer, "pledge", parcel) for peer in others))
    said = {peer for peer, answer in zip(others, answers, strict=True) if answer and status_of(answer) == "ok"}
    if instance.rank(me.net.me) is not None and pledge(me, me.net.me, fields):
        said.add(me.net.me)
    return said


async def _gather(
    me: Participant, instance: Instance, attempt: int, roster: Roster, votes: list[int]
) -> bytes | None:
    """Every secret of the roster's circle, by rank in it; None when some cannot be had."""
    circle = roster.circle or roster.ids
    lost = [rank for rank, peer in enumerate(circle) if peer not in roster.ranks]
    asking = {"iteration": instance.iteration, "attempt": attempt, "roster": roster.digest, "votes": votes}
    secrets: dict[int, bytes] = {}
    shares: defaultdict[int, dict[int, bytes]] = defaultdict(dict)  # by owner, then by who gave it
    wanted: list[int] = []
    for _ in range(QUESTIONS):
        question = asking | {"seeds_of": wanted, "keys_of": [rank for rank in lost if rank not in secrets]}
        await _ask_all(me, roster, circle, question, secrets, shares)
        for owner in (rank for rank in range(len(circle)) if rank not in secrets):
            if (secret := recovered(roster.masks, len(circle), owner, shares[owner])) is not None:
                secrets[owner] = secret
        wanted = [rank for rank in range(len(circle)) if rank not in secrets and rank not in lost]
        if len(secrets) == len(circle):
            return b"".join(secrets[rank] for rank in range(len(circle)))
        if instance.leading != attempt or instance.over.is_set():
            break
    return None


async def _ask_all(
    me: Participant,
    roster: Roster,
    circle: tuple[PeerId, ...],
    question: dict[str, Any],
    secrets: dict[int, bytes],
    shares: defaultdict[int, dict[int, bytes]],
) -> None:
    """One question to every member; what they give away is noted."""
    request = Parcel(pack("reveal", **question))
    others = [peer for peer in roster.ids if peer != me.net.me]
    answers: list[Parcel | None] = list(await asyncio.gather(*(me.ask(peer, "reveal", request) for peer in others)))
    if me.net.me in roster.ranks:
        others.append(me.net.me)
        answers.append(reveal(me, me.net.me, question))
    place = {peer: rank for rank, peer in enumerate(circle)}
    for peer, answer in zip(others, answers, strict=True):
        for owner, data in _given(answer, place[peer]):
            if owner == place[peer]:
                secrets[owner] = data
            else:
                shares[owner][place[peer]] = data


def _given(answer: Parcel | None, rank: int) -> Iterable[tuple[int, bytes]]:
    """(owner, its seed or a share) in an answer; nothing in one that is none."""
    if answer is None:
        return
    try:
        fields = unpack("revealed", answer.header)
    except WireError:
        return
    payload, owners = bytes(answer.payload), fields["owners"]
    if len(payload) != SEED_BYTES + SHARE_SIZE * len(owners) or len(_ranks(owners)) != len(owners):
        return
    yield rank, payload[:SEED_BYTES]
    for number, owner in enumerate(owners):
        at = SEED_BYTES + number * SHARE_SIZE
        yield owner, payload[at : at + SHARE_SIZE]


# --- answers ---


async def answer_held(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """As the leader: note who holds the masked sum; the answer brings the secrets, once they are here."""
    fields = unpack("held", request.header)
    instance = me.instance
    if instance is None or instance.iteration != fields["iteration"] or instance.leading != fields["attempt"]:
        return Parcel(pack("ok", status="retry"))
    masks = instance.masks
    if sender not in masks.held:
        masks.held[sender] = fields["sum"]
        masks.news.set()
    limit = me.net.now() + me.settings.call_timeout / 2
    while masks.secrets is None and instance.leading == fields["attempt"] and me.net.now() < limit:
        await me.until(masks.settled, limit)
    if masks.secrets is not None and masks.held[sender] == fields["sum"]:
        return Parcel(pack("ok", status="lift"), masks.secrets)
    return Parcel(pack("ok", status="pending" if instance.leading == fields["attempt"] else "retry"))


async def answer_pledge(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """A leader asks an elector that does not hold the masked sum."""
    fields = unpack("pledge", request.header)
    if pledge(me, sender, fields):
        return Parcel(pack("ok", status="ok"))
    return Parcel(pack("ok", status="refused"))


def pledge(me: Participant, sender: PeerId, fields: dict[str, Any]) -> bool:
    """Promise that no other roster of this iteration is unmasked with my help, unless a later attempt was promised."""
    asked, attempt = asked_for(me, sender, fields), fields["attempt"]
    if asked is None:
        return False
    instance, roster = asked
    instance.promise(attempt)
    instance.masks.pledge = Pledge(attempt, roster)
    return True


async def answer_reveal(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """A leader that shows a majority's pledges asks for my seed, and for shares of others' secrets."""
    return reveal(me, sender, unpack("reveal", request.header))


def reveal(me: Participant, sender: PeerId, question: dict[str, Any]) -> Parcel:
    """My seed and the shares asked for, for the one roster of this iteration that I ever help to unmask."""
    nothing = Parcel(pack("revealed", status="refused", owners=[]))
    instance, attempt = me.instance, question["attempt"]
    if instance is None or instance.iteration != question["iteration"] or me.barred == instance.iteration:
        return nothing
    session, roster = instance.masks.session, instance.masks.working
    if session is None or roster is None or roster.digest != question["roster"]:
        return nothing
    if instance.leader(attempt) != sender or attempt != instance.promised or not _majority(instance, question):
        return nothing
    if not me.may_help(roster):
        return nothing
    instance.masks.pledge = Pledge(attempt, roster)
    inside = {rank for rank, peer in enumerate(session.members) if peer in roster.ranks}
    given = {rank: session.seed_share(rank) for rank in _ranks(question["seeds_of"]) & inside}
    given |= {rank: session.key_share(rank) for rank in _ranks(question["keys_of"]) - inside}
    owners = [rank for rank, share in given.items() if share is not None]
    shares = b"".join(share for share in given.values() if share is not None)
    return Parcel(pack("revealed", status="ok", owners=owners), session.seed + shares)


def _majority(instance: Instance, question: dict[str, Any]) -> bool:
    places = _ranks(question["votes"])
    return quorum(instance.electors, {elector.id for at, elector in enumerate(instance.electors) if at in places})


def _ranks(values: list[Any]) -> set[int]:
    """The numbers in a list from the wire."""
    return {value for value in values if isinstance(value, int)}

