"""What a leader does with the votes: seal a roster or adopt an earlier result, count the hashes, commit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from marfl.net.base import Parcel, PeerId
from marfl.plan.grid import plan
from marfl.protocol.acks import culprits
from marfl.protocol.ballot import Tally, Way, choose, decided, held, kept
from marfl.protocol.exchange import VOID
from marfl.protocol.instance import Instance
from marfl.protocol.mask_rosters import keys_for, masked, promised
from marfl.protocol.masks import KIND
from marfl.protocol.member import begin
from marfl.protocol.readiness import LEFT, Ready
from marfl.protocol.roster import Elector, Member, Roster, brief, decode_roster, quorum, ranked
from marfl.protocol.trimming import abandoned, willing
from marfl.protocol.unmask import preside
from marfl.protocol.voting import endorse
from marfl.protocol.wire import pack, status_of

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant

Acks = dict[PeerId, dict[str, Any]]  # who answered a proposal, and what


async def seal_roster(me: Participant, instance: Instance, attempt: int, acks: Acks, ready: Ready) -> None:
    """Adopt the result that may have been committed already, or seal a new roster; then see it through."""
    choice = choose(instance.electors, {peer: _last_vote(ack) for peer, ack in acks.items()})
    if choice.way is Way.ADOPT:
        voters = [acks[elector.id] for elector in instance.electors if elector.id in acks]
        data = next(ack["accepted"] for ack in voters if ack["accepted_hash"] == choice.hash)
        return await _conduct(me, instance, attempt, decode_roster(data), choice.hash, list(choice.holders))
    if choice.way is Way.WAIT:  # the only holders may be lost for good: in the end a new lineage is founded
        me.wait_for_leader(instance, 0.0)
        return None
    pledge = promised(instance.electors, acks)
    if pledge is not None and not pledge.lost:
        return await _conduct(me, instance, attempt, pledge.roster, None, pledge.holders)
    new_roster = _roster(me, instance, attempt, acks, ready)
    if new_roster is None:
        trains = any(ack["role"] == "training" for ack in acks.values())
        instance.patience = me.net.now() + (me.settings.poll if trains else me.settings.takeover)
        return None
    if new_roster.exchange == VOID:
        return await _conduct(me, instance, attempt, new_roster, None, [])
    if me.settings.wire == "masked":
        new_roster = abandoned(new_roster) if pledge else masked(me, instance, new_roster, acks)
    else:
        enough = willing(new_roster, acks)
        new_roster = enough if enough.contributions else abandoned(new_roster)
    return await _conduct(me, instance, attempt, new_roster, None, [], keys_for(new_roster, acks))


class Told(NamedTuple):
    """A vote as its ack tells it."""

    attempt: int
    hash: bytes
    holds: bool


def _last_vote(ack: dict[str, Any]) -> Told | None:
    if ack["accepted"] is None:
        return None
    return Told(ack["accepted_attempt"], ack["accepted_hash"], ack["holds"])


def _roster(me: Participant, instance: Instance, attempt: int, acks: Acks, ready: Ready) -> Roster | None:
    """Exactly those who acked and bring something, without those who spoiled the last attempt."""
    bad = culprits(acks, patient=instance.tries < 4)
    joining = {peer: ack for peer, ack in acks.items() if ack["join"] and _speaks(me, ack) and peer not in bad}
    exchange = me.settings.exchange_of(instance.tries)
    if not any(ack["weight"] > 0 for ack in joining.values()):
        if any(ack["role"] == "training" and peer not in bad for peer, ack in acks.items()):
            return None  # it may still bring something
        joining = {p: ack | {"weight": 0.0} for p, ack in acks.items() if ack["role"] in ("member", "witness")}
        exchange = VOID
    if not joining:
        return None  # nobody here holds the state
    there = ranked(instance.run, instance.iteration, tuple(Elector(p, a["index"]) for p, a in joining.items()))
    founding = attempt == 0 and instance.founder is not None
    voters = ranked(instance.run, instance.iteration, tuple(Elector(p, a["index"]) for p, a in acks.items()))
    announced = sorted(p for p, r in ready.items() if r["role"] == "member")
    known = dict.fromkeys([*(e.id for e in (*instance.electors, *me.record.electors)), *announced, *instance.doubted])
    said = bad | instance.doubted
    omitted = {peer: said.get(peer, _why(me, peer, acks, ready)) for peer in known if peer not in joining}
    return Roster(
        instance.run, instance.iteration, attempt, instance.lineage, instance.base, me.layout, exchange,
        me.settings.group_size,
        tuple(Member(e.id, e.index, joining[e.id]["weight"]) for e in there),
        tuple(e for e in voters if e.id not in joining),
        voters if founding else (),
        tuple(omitted.items()),
        me.settings.wire if exchange != VOID else "fp32",
        piece=me.settings.piece,
    )  # fmt: skip


def _speaks(me: Participant, ack: dict[str, Any]) -> bool:
    """Whether this peer's values can be added to mine."""
    return bool(ack["layout"] == me.layout and ack["wire"] == me.settings.wire)


def _why(me: Participant, peer: PeerId, acks: Acks, ready: Ready) -> str:
    if peer not in acks:
        return "said goodbye" if peer in ready and ready[peer]["role"] == LEFT else "did not answer"
    if acks[peer]["layout"] != me.layout:
        return "brings another model layout"
    return "brings no update" if _speaks(me, acks[peer]) else "sends values in another way (wire)"


async def _conduct(
    me: Participant,
    instance: Instance,
    attempt: int,
    roster: Roster,
    adopt: bytes | None,
    holders: list[PeerId],
    keys: bytes = b"",
) -> None:
    """Publish the roster, collect the hashes, and commit once a majority agrees; or make way for the next attempt."""
    instance.finishes, instance.leading, instance.heard = {}, attempt, me.net.now()
    instance.keepers = set()
    instance.led = instance.sealed[roster.digest] = roster
    instance.masks.begin_leading()
    if roster.electors:
        instance.electors = ranked(instance.run, instance.iteration, roster.electors)
    named = brief(roster, instance.electors)
    seal = Parcel(pack("seal", roster=named, attempt=attempt, adopt=adopt, holders=holders[:16]), keys)
    # What is adopted may have lost most of its roster: then the electors hold it in their place.
    told = dict.fromkeys([*roster.ids, *(elector.id for elector in instance.electors if adopt)])
    others = [peer for peer in told if peer != me.net.me]
    work = [asyncio.create_task(me.ask(peer, "seal", seal, KIND)) for peer in others]
    begin(me, me.net.me, roster, attempt, adopt, holders, keys)
    if roster.wire == "masked" and adopt is None:
        work.append(asyncio.create_task(preside(me, instance, attempt, roster)))
    layout = plan(len(roster.members), roster.group_size)
    phases = me.settings.phases(roster.exchange, roster.iteration, layout)
    limit = me.net.now() + (phases + 1) * me.settings.phase_timeout + me.settings.call_timeout
    instance.patience = limit + me.settings.call_timeout
    try:
        await _count(me, instance, attempt, roster, limit)
    finally:
        for task in work:
            task.cancel()
        if instance.leading == attempt and not instance.over.is_set():
            instance.leading = -1
            instance.patience = me.net.now()


async def _count(me: Participant, instance: Instance, attempt: int, roster: Roster, limit: float) -> None:
    """Wait for finishes until there is a majority, or no hope of one."""
    members = tuple(Elector(member.id, member.index) for member in roster.members)
    endorsed: dict[PeerId, bytes] = {}
    again = attempt > roster.attempt
    while instance.leading == attempt and not instance.over.is_set():
        reports = [instance.finishes[peer] for peer in roster.ids if peer in instance.finishes]
        complete = me.net.now() >= limit or len(reports) == len(roster.members)
        tally = Tally(instance.finishes, endorsed)
        digest = held(instance.electors, members, tally, again=again)
        holders = tuple(peer for peer, got in instance.finishes.items() if got is not None and got == digest)
        if digest is not None and not kept(roster.voters, holders):
            if await _have_kept(me, instance, attempt, roster, digest, holders):
                continue
            return None
        enough = decided(instance.electors, members, tally, again=again) is not None
        if digest is not None and not enough and (complete or not quorum(instance.electors, roster.ranks)):
            endorsed |= dict.fromkeys(await _endorse(me, instance, attempt, roster, digest), digest)
            enough = decided(instance.electors, members, tally, again=again) is not None
        if digest is not None and enough and instance.leading == attempt:
            return me.decide(instance, me.record.after(roster, digest), holders)
        if None in reports:
            limit = min(limit, me.net.now() + me.settings.phase_timeout)
        if digest is not None:  # only votes are missing: whoever is silent is not waited for until others take over
            limit = min(limit, me.net.now() + me.settings.call_timeout / 2)
        if complete:
            return None
        instance.progress.clear()
        await me.until(instance.progress, limit)
    return None


async def _have_kept(
    me: Participant, instance: Instance, attempt: int, roster: Roster, digest: bytes, holders: tuple[PeerId, ...]
) -> bool:
    """Have one more peer hold a result that too few hold, a voter that brought nothing; whether one could be asked."""
    named = brief(roster, instance.electors)
    seal = Parcel(pack("seal", roster=named, attempt=attempt, adopt=digest, holders=list(holders[:16])))
    limit = me.net.now() + me.settings.phase_timeout + me.settings.call_timeout
    spare = [voter.id for voter in roster.voters if instance.finishes.get(voter.id) != digest]
    for keeper in [peer for peer in spare if peer not in instance.keepers]:
        instance.keepers.add(keeper)
        if keeper == me.net.me:
            begun = begin(me, me.net.me, roster, attempt, digest, list(holders))
        else:
            answer = await me.ask(keeper, "seal", seal)
            begun = answer is not None and status_of(answer) == "ok"
        while begun and keeper not in instance.finishes and instance.leading == attempt and me.net.now() < limit:
            instance.progress.clear()
            await me.until(instance.progress, limit)
        if instance.leading != attempt or instance.finishes.get(keeper) == digest:
            return True
    return False


async def _endorse(
    me: Participant, instance: Instance, attempt: int, roster: Roster, digest: bytes
) -> set[PeerId]:
    """Ask electors that do not hold the result to vote for its hash."""
    named = brief(roster, instance.electors)
    fields = {"iteration": instance.iteration, "attempt": attempt, "roster": named, "hash": digest}
    parcel = Parcel(pack("endorse", **fields))
    others = [e.id for e in instance.electors if instance.finishes.get(e.id) != digest and e.id != me.net.me]
    answers = await asyncio.gather(*(me.ask(peer, "endorse", parcel) for peer in others))
    said = {peer for peer, answer in zip(others, answers, strict=True) if answer and status_of(answer) == "ok"}
    if instance.rank(me.net.me) is not None and endorse(me, me.net.me, fields):
        said.add(me.net.me)
    return said

