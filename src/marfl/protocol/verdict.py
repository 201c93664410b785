"""How a peer hears what was decided: from the leader it reports its hash to, or from whoever knows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from marfl.errors import DeadlineExceeded, NetError, WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.instance import Instance
from marfl.protocol.roster import Record, brief_record, decode_record
from marfl.protocol.wire import pack, unpack

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant


async def report(
    me: Participant, instance: Instance, leader: PeerId, digest: bytes | None, limit: float, *, final: bool = True
) -> None:
    """Tell the leader how the attempt went, until it has a verdict, vanishes or falls silent."""
    attempt = instance.working
    finish = Parcel(pack("finish", iteration=instance.iteration, attempt=attempt, hash=digest, final=final))
    while me.net.now() < limit and not instance.over.is_set() and (instance.promised == attempt or not final):
        try:
            if leader == me.net.me:
                answer = await answer_finish(me, leader, finish)
            else:
                deadline = me.net.now() + me.settings.call_timeout
                answer = await me.net.call(leader, "finish", finish, deadline=deadline)
            verdict = unpack("verdict", answer.header)
            if verdict["status"] == "commit" and verdict["record"]:
                record = decode_record(verdict["record"], instance.electors)
                me.decide(instance, record, tuple(map(str, verdict["holders"])))
                return
        except DeadlineExceeded:
            continue
        except (NetError, WireError):  # an answer that is no answer is as good as none
            break
        if verdict["status"] != "pending" or not final:
            break
    if final:
        me.wait_for_leader(instance, 0.0)


async def news(me: Participant, instance: Instance, peer: PeerId) -> bool:
    """Ask a peer whether this iteration is committed; whether it is over now."""
    await report(me, instance, peer, None, me.net.now() + me.settings.call_timeout, final=False)
    return instance.over.is_set()


async def answer_finish(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """As the leader: note a member's report, and answer once there is a verdict (or ask it to come again)."""
    fields = unpack("finish", request.header)
    known = me.history.get(fields["iteration"])
    instance = me.instance
    if known is None and instance is not None and instance.iteration == fields["iteration"]:
        if instance.leading != fields["attempt"]:
            return Parcel(pack("verdict", status="unknown", record=None, holders=[]))
        if fields["final"]:
            instance.finished(sender, fields["hash"])
            await me.until(instance.over, me.net.now() + me.settings.call_timeout / 2)
        known = instance.record
        if known is None:
            status = "pending" if instance.leading == fields["attempt"] else "retry"
            return Parcel(pack("verdict", status=status, record=None, holders=[]))
    if known is None or known.roster is None:
        return Parcel(pack("verdict", status="unknown", record=None, holders=[]))
    me.untold.discard(sender)
    current = instance if instance and instance.record is known else None
    holders, electors = (current.holders, current.electors) if current else (known.roster.ids, ())
    return Parcel(pack("verdict", status="commit", record=brief_record(known, electors), holders=list(holders[:16])))


async def tell_decided(me: Participant, instance: Instance, record: Record, peers: Iterable[PeerId]) -> None:
    """Tell voters that had no part in it what was decided: they need the record to vote again."""
    notice = decision(instance, record)
    await asyncio.gather(*(me.ask(peer, "decided", notice) for peer in peers if peer != me.net.me))


def decision(instance: Instance, record: Record) -> Parcel:
    """What was decided, for those who know the electors of the iteration."""
    brief, holders = brief_record(record, instance.electors), list(instance.holders[:16])
    return Parcel(pack("decided", iteration=record.iteration, record=brief, holders=holders))


async def answer_decided(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """Somebody whom this peer voted for knows that the iteration is decided."""
    fields = unpack("decided", request.header)
    instance = me.instance
    if fields["iteration"] <= me.record.iteration and not (instance and instance.iteration == fields["iteration"]):
        return Parcel(pack("ok", status="ok"))  # it knows, or has gone elsewhere since
    record = decode_record(fields["record"], instance.electors if instance else ())
    if instance and record.roster and record.roster.base == instance.base and record.lineage == instance.lineage:
        me.decide(instance, record, tuple(map(str, fields["holders"])))
    elif record.beats(me.record.mass, me.record.hash):
        me.gone_elsewhere(sender)
    return Parcel(pack("ok", status="ok"))


async def answer_heavier(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """Somebody has seen a head that wins over ours; what I have finished myself is not elsewhere, but decided."""
    fields = unpack("heavier", request.header)
    instance = me.instance
    finished = instance.accepted if instance else None
    if instance is not None and finished is not None and finished.hash == fields["hash"]:
        me.aside(news(me, instance, sender))
    elif fields["hash"] != me.record.hash and not me.record.beats(fields["mass"], fields["hash"]):
        me.gone_elsewhere(None)
    return Parcel(pack("ok", status="ok"))
