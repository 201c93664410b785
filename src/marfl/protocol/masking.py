"""A member's part in a masked sum: trade shares, exchange what is masked, and see the masks taken off."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marfl.errors import DeadlineExceeded, NetError, PeerGone, WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.attempt import Attempt, Stuck
from marfl.protocol.exchange import combined, decoded
from marfl.protocol.fixed_point import encode, fits
from marfl.protocol.masks import KIND, Pledge
from marfl.protocol.roster import Roster
from marfl.protocol.unmask import answer_held
from marfl.protocol.wire import pack, raw, unpack, vector_from
from marfl.secagg.graph import SEED_BYTES
from marfl.secagg.session import Session, lift
from marfl.state import vector_hash

if TYPE_CHECKING:
    from marfl.protocol.instance import Instance
    from marfl.protocol.participant import Participant


async def masked_mean(me: Participant, instance: Instance, leader: PeerId, attempt: Attempt, value: Tensor) -> Tensor:
    """The mean over exactly the roster, of which nobody has seen a part."""
    masks, roster = instance.masks, attempt.roster
    session = masks.session
    assert session is not None
    if not fits(value):
        raise Stuck("an update that integers cannot carry")
    await _trade_shares(me, attempt, session)
    hidden = await me.compute(lambda: session.masked(encode(value)))
    masks.lineage = roster.lineage  # from here on it may have left
    total = await combined(attempt, hidden)
    masks.total = (roster, total)
    return await unmasked(me, instance, leader, roster, roster.attempt)


async def unmasked(me: Participant, instance: Instance, leader: PeerId, roster: Roster, attempt: int) -> Tensor:
    """Pledge myself to the roster whose masked sum I hold, wait for the secrets, and take the masks off."""
    masks = instance.masks
    session, total = masks.session, masks.sum_of(roster)
    assert session is not None
    assert total is not None
    masks.pledge = Pledge(attempt, roster)
    secrets = await _secrets(me, instance, leader, attempt, vector_hash(total))
    if secrets is None:
        raise Stuck("nobody could take the masks off")
    try:
        seeds, lost = read_secrets(roster, session.members, secrets)
        return decoded(roster, await me.compute(lambda: lift(total, session.epoch, session.keys, seeds, lost)))
    except Stuck:
        masks.hopeless.add(roster.digest)  # somebody sent what it should not; under masks nobody can tell who
        raise


async def fetch_masked_sum(me: Participant, instance: Instance, roster: Roster, holders: list[PeerId]) -> None:
    """An earlier attempt's masked sum that is to be seen through, from anybody who holds it."""
    mine = instance.mine
    assert mine is not None
    request = Parcel(pack("masked", roster=roster.digest))
    for holder in (peer for peer in holders if instance.masks.sum_of(roster) is None and peer != me.net.me):
        deadline = me.net.now() + me.settings.phase_timeout
        try:
            answer = await me.net.call(holder, "masked", request, deadline=deadline)
            if unpack("ok", answer.header)["status"] == "held":
                instance.masks.total = roster, vector_from(answer.payload, mine.delta.numel(), torch.int64)
        except (NetError, WireError):
            continue  # the next one may have it
    if instance.masks.sum_of(roster) is None:
        raise Stuck("a masked sum that nobody gives")


async def answer_masked(me: Participant, _: PeerId, request: Parcel) -> Parcel:
    """Somebody is to see a roster through whose masked sum I may hold."""
    digest = unpack("masked", request.header)["roster"]
    held = me.instance.masks.total if me.instance else None
    if held is None or held[0].digest != digest:
        return Parcel(pack("ok", status="unknown"))
    return Parcel(pack("ok", status="held"), raw(held[1]))


async def _secrets(me: Participant, instance: Instance, leader: PeerId, attempt: int, digest: bytes) -> bytes | None:
    """Tell the leader that the masked sum is here, again and again until it has the secrets or gives up."""
    request = Parcel(pack("held", iteration=instance.iteration, attempt=attempt, sum=digest))
    limit = me.net.now() + 3 * me.settings.phase_timeout + 2 * me.settings.call_timeout
    while me.net.now() < limit and instance.promised == attempt and not instance.over.is_set():
        try:
            if leader == me.net.me:
                answer = await answer_held(me, leader, request)
            else:
                answer = await me.net.call(leader, "held", request, deadline=me.net.now() + me.settings.call_timeout)
            status = unpack("ok", answer.header)["status"]
        except DeadlineExceeded:
            continue
        except (NetError, WireError):  # gone, or my own daemon is: to ask again at once would be to ask for ever
            return None
        if status != "pending":
            secrets = bytes(answer.payload)
            return secrets if status == "lift" and len(secrets) % SEED_BYTES == 0 else None
    return None


def read_secrets(roster: Roster, circle: tuple[PeerId, ...], data: bytes) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The seeds of the members and the keys of all others in the circle, by rank in it; `Stuck` for another number."""
    each = [data[at : at + SEED_BYTES] for at in range(0, len(data), SEED_BYTES)]
    if len(each) != len(circle):
        raise Stuck("secrets of another roster")
    seeds = {rank: secret for rank, secret in enumerate(each) if circle[rank] in roster.ranks}
    return seeds, {rank: secret for rank, secret in enumerate(each) if rank not in seeds}


# --- shares ---


async def _trade_shares(me: Participant, attempt: Attempt, session: Session) -> None:
    """Hand every neighbour its shares and take theirs into custody; all of them, or nothing is masked with them."""
    if session.complete:
        return
    dealt = session.deal()
    sending = [asyncio.create_task(_hand_over(attempt, rank, sealed)) for rank, sealed in dealt.items()]
    try:
        for rank in session.neighbours:
            attempt.waiting.add(rank)
            await _take_share(me, attempt, session, rank)
            attempt.waiting.discard(rank)
        await asyncio.gather(*sending)
    finally:
        for task in sending:
            task.cancel()


async def _hand_over(attempt: Attempt, rank: int, sealed: bytes) -> None:
    header = pack("share", digest=attempt.roster.digest)
    peer, tag = attempt.roster.members[rank].id, attempt.tag("shares", 0)
    try:
        await attempt.net.send(peer, tag, Parcel(header, sealed), kind=KIND, deadline=attempt.deadline(-1))
    except PeerGone:
        attempt.gone.add(rank)
    except NetError:
        return  # the receiver asks for it


async def _take_share(me: Participant, attempt: Attempt, session: Session, rank: int) -> None:
    """A neighbour's shares: as it sent them, else asked for. Whoever sends what cannot be read is named."""
    parcel = await attempt.arrival(-1, attempt.tag("shares", 0), rank)
    peer = attempt.roster.members[rank].id
    if parcel is None:
        attempt.overdue.add(rank)
        parcel = await me.ask(peer, "share", Parcel(pack("share", digest=attempt.roster.digest)))
    if parcel is None or not parcel.payload:
        raise Stuck(f"no shares of {peer}")
    try:
        session.keep(rank, bytes(parcel.payload))
    except WireError as error:
        raise attempt.caught(rank, error) from None
    attempt.overdue.discard(rank)


async def answer_share(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """A neighbour misses the shares that I dealt it."""
    digest = unpack("share", request.header)["digest"]
    masks = me.instance.masks if me.instance else None
    if masks is None or masks.session is None or masks.working is None or masks.working.digest != digest:
        return Parcel(pack("ok", status="unknown"))
    members = masks.session.members
    sealed = masks.session.deal().get(members.index(sender)) if sender in members else None
    return Parcel(pack("ok", status="held" if sealed else "unknown"), sealed or b"")
