"""A member's part in a sealed attempt: exchange (or fetch what is adopted), finish, and tell the leader the hash."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from marfl.errors import SyncError
from marfl.net.base import Parcel, PeerId
from marfl.plan.grid import plan
from marfl.protocol.access import under_way
from marfl.protocol.attempt import DECIDED, Attempt, Stuck, resend
from marfl.protocol.ballot import may_promise, may_vote
from marfl.protocol.exchange import EXCHANGES, VOID, mean
from marfl.protocol.instance import Accepted, Instance, weighted
from marfl.protocol.masking import fetch_masked_sum, masked_mean, unmasked
from marfl.protocol.meetings import Meetings
from marfl.protocol.roster import Roster, ranked, unbrief
from marfl.protocol.sync import fetch
from marfl.protocol.verdict import news, report
from marfl.protocol.wire import pack, unpack
from marfl.state import Snapshot, all_finite

if TYPE_CHECKING:
    from torch import Tensor

    from marfl.protocol.participant import Participant


async def answer_seal(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """The leader publishes a roster: begin, or say that this is not mine to begin."""
    fields = unpack("seal", request.header)
    roster = unbrief(fields["roster"], me.instance.electors if me.instance else ())
    given = fields["adopt"], fields["holders"], bytes(request.payload)
    if begin(me, sender, roster, fields["attempt"], *given):
        return Parcel(pack("ok", status="ok"))
    return Parcel(pack("ok", status="refused"))


def begin(
    me: Participant,
    sender: PeerId,
    roster: Roster,
    attempt: int,
    adopt: bytes | None,
    holders: list[PeerId],
    keys: bytes = b"",
) -> bool:
    """Start my part in a sealed attempt, unless I have promised a later one."""
    instance = me.instance
    if instance is None or instance.over.is_set() or not _follows(me, instance, roster):
        return False
    if instance.leader(attempt) != sender or not may_promise(instance.ballot, attempt):
        return False
    if me.net.me not in roster.ranks and (adopt is None or instance.rank(me.net.me) is None):
        return False  # an elector adopts what is finished also when it had no part in it
    if instance.working == attempt:
        return True  # sent twice
    again = roster.wire == "masked" and roster.attempt < attempt  # its masked sum is to be seen through
    mine = instance.mine is not None and roster.layout == me.layout
    mine = not me.behind if roster.exchange == VOID else mine  # whoever holds the state can let an iteration go by
    if adopt is None and not (mine and (again or roster.attempt == attempt)):
        return False
    if adopt is None and not _large_enough(me, instance, roster):
        return False
    if adopt is None and roster.wire == "masked" and not instance.masks.open(roster, me.net.me, keys):
        return False
    instance.promise(attempt)
    instance.sealed[roster.digest] = roster
    me.judge_anew()
    if roster.electors:
        instance.electors = ranked(me.settings.run, roster.iteration, roster.electors)
    instance.working, instance.heard, instance.tries = attempt, me.net.now(), instance.tries + 1
    instance.interrupted = False
    instance.task = asyncio.create_task(_take_part(me, instance, sender, roster, attempt, adopt, holders))
    return True


def _follows(me: Participant, instance: Instance, roster: Roster) -> bool:
    """Whether a roster is of this iteration and lineage, from the state that I hold, in a way that I know."""
    if roster.exchange != VOID and (roster.exchange not in EXCHANGES or roster.wire != me.settings.wire):
        return False
    if (roster.run, roster.iteration, roster.lineage) != (me.settings.run, instance.iteration, instance.lineage):
        return False
    if any(member.weight > me.settings.max_weight for member in roster.members):
        return False
    barred = me.barred == instance.iteration and instance.founder is None
    return roster.base == me.record.hash and not barred


def _large_enough(me: Participant, instance: Instance, roster: Roster) -> bool:
    """Whether as many contributions are summed as mine demands, where it is among them."""
    mine, rank = instance.mine, roster.ranks.get(me.net.me)
    if mine is None or rank is None or not roster.members[rank].weight:
        return True
    return roster.contributions >= mine.fewest


async def _take_part(
    me: Participant,
    instance: Instance,
    leader: PeerId,
    roster: Roster,
    attempt: int,
    adopt: bytes | None,
    holders: list[PeerId],
) -> None:
    """Exchange (or fetch the result to adopt), vote for the hash, and wait for the leader's verdict."""
    layout = plan(len(roster.members), roster.group_size)
    phases = me.settings.phases(roster.exchange, roster.iteration, layout)
    seconds = (phases + 1) * me.settings.phase_timeout + 2 * me.settings.call_timeout
    me.wait_for_leader(instance, seconds)
    try:
        if adopt:
            result: Accepted | None = await _adopt(me, instance, attempt, roster, adopt, holders)
        else:
            if roster.attempt < attempt:
                await fetch_masked_sum(me, instance, roster, holders)
            result = await _result(me, instance, leader, roster, attempt)
    except (Stuck, SyncError):
        result = None
    if result is not None and not may_vote(instance.ballot, attempt, result.hash):
        result = None  # a later attempt was promised, or a majority's hash endorsed that is not mine
    if result is not None:
        me.accept(instance, result)
    if not instance.over.is_set():
        await report(me, instance, leader, result.hash if result else None, me.net.now() + seconds)


async def _result(me: Participant, instance: Instance, leader: PeerId, roster: Roster, attempt: int) -> Accepted:
    """The state that follows from this roster."""
    if roster.exchange == VOID:
        state = passed_by(me.state, roster)
        return Accepted(attempt, roster, state.hash, state, None)
    if roster.attempt < attempt:
        update = await unmasked(me, instance, leader, roster, attempt)
    else:
        update = await _exchange(me, instance, leader, roster)
    if not all_finite(update):
        raise Stuck("the sum overflows")
    state = me.advance(me.state, update, roster)
    return Accepted(attempt, roster, state.hash, state, update)


def passed_by(state: Snapshot, roster: Roster) -> Snapshot:
    """The state after an iteration in which nothing was summed.

    Two lineages may part in it: then their states are told apart, or nobody could say which one wins.
    """
    name = {"lineage": float(int.from_bytes(roster.lineage[:6]))} if roster.electors else {}
    return Snapshot(state.version + 1, state.vectors, dict(state.scalars) | name)


async def _exchange(me: Participant, instance: Instance, leader: PeerId, roster: Roster) -> Tensor:
    """The mean over exactly the roster."""
    mine = instance.mine
    assert mine is not None
    layout = plan(len(roster.members), roster.group_size)

    async def overtaken(by: PeerId | None) -> bool:
        return await news(me, instance, by or leader)

    meetings = me.settings.meetings(roster.iteration, layout)
    ahead = meetings + (roster.wire == "masked")
    attempt = Attempt(me.net, roster, layout, mine.delta.numel(), me.settings.phase_timeout, overtaken, ahead)
    if instance.attempt is not None:
        instance.attempt.drop()
    instance.attempt, me.last_roster = attempt, roster
    try:
        if mine.prepare is not None and meetings:
            mine = replace(mine, delta=await mine.prepare(Meetings(attempt)))
            if not all_finite(mine.delta):
                raise Stuck("what became of my update is not finite")  # it never leaves
        if roster.wire == "masked":
            return await masked_mean(me, instance, leader, attempt, weighted(mine))
        return await mean(attempt, weighted(mine))
    finally:
        attempt.overtaken = None  # it knows the instance, which knows the attempt: neither would ever be freed


async def _adopt(
    me: Participant, instance: Instance, attempt: int, roster: Roster, digest: bytes | None, holders: list[PeerId]
) -> Accepted:
    """Vote for an earlier attempt's result; it is fetched first where it is missing."""
    had = instance.accepted
    if had and had.hash == digest and had.state:
        return Accepted(attempt, roster, had.hash, had.state, had.mean)
    caught = await fetch(me, (p for p in holders if p != me.net.me), digest)
    return Accepted(attempt, roster, caught.state.hash, caught.state, caught.mean)


async def answer_resend(me: Participant, _: PeerId, request: Parcel) -> Parcel:
    """Somebody misses a slice that I may hold; once the iteration is decided it is told so, and can ask how."""
    digest = unpack("resend", request.header)["digest"]
    if any(record.roster is not None and record.roster.digest == digest for record in me.history.values()):
        return Parcel(pack("ok", status=DECIDED))
    return await resend(under_way(me), request)
