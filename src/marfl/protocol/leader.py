"""What a peer does when it is its turn to lead: gather votes, seal a roster, count the hashes, commit.

Electors lead in rank order. A leader that falls silent is followed by the next one, with a higher attempt. Without a
majority of electors for long enough, the first peer that is there founds a new lineage (`on_minority = "fork"`).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from marfl.errors import WireError
from marfl.net.base import Parcel, PeerId
from marfl.plan.grid import plan
from marfl.protocol.exchange import PHASES
from marfl.protocol.instance import Instance, culprits
from marfl.protocol.roster import Elector, Member, Roster, brief, decode_record, decode_roster, quorum, ranked
from marfl.protocol.wire import pack, unpack

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant

Ready = dict[PeerId, dict[str, Any]]  # who announced itself for this iteration, from the same state as mine
Acks = dict[PeerId, dict[str, Any]]  # who answered a proposal, and what


async def drive(me: Participant, instance: Instance) -> None:
    """Until the iteration is over: whenever the others have been silent for long enough, lead."""
    while not instance.over.is_set():
        while me.net.now() < instance.patience:
            await me.net.sleep_until(min(instance.patience, me.net.now() + me.settings.takeover))
            if not instance.busy and await _elsewhere(me, instance):  # not part of anything: is it late?
                return
        if await _elsewhere(me, instance):
            return
        if me.net.now() < instance.patience:
            continue  # while it looked, a leader came forward
        rank = instance.rank(me.net.me)
        alone = me.net.now() - max(instance.entered, instance.heard) >= me.settings.minority_timeout
        if not instance.electors or (alone and me.settings.on_minority == "fork"):
            await _found(me, instance)
        elif rank is not None and me.barred != instance.iteration:
            await _lead(me, instance, instance.next_attempt(rank))
        if not instance.over.is_set() and instance.patience <= me.net.now():
            instance.patience = me.net.now() + me.settings.takeover


async def _elsewhere(me: Participant, instance: Instance) -> bool:
    """Whether a head that wins over mine has been announced: then nobody here goes on."""
    for peer, mass, digest in await me.heads():
        if digest != me.record.hash and not me.record.beats(mass, digest):
            mine = instance.accepted
            if mine and mine.hash == digest and await me.news(instance, peer):
                return True  # what this peer has finished is committed: nothing is lost
            notice = Parcel(pack("heavier", hash=digest, mass=mass))
            others = [elector.id for elector in instance.electors if elector.id != me.net.me]
            await asyncio.gather(*(me.ask(other, "heavier", notice) for other in others))
            me.gone_elsewhere(peer)
            return True
    return False


async def _lead(me: Participant, instance: Instance, attempt: int) -> None:
    """One attempt of the lineage's own: needs the votes of a majority of its electors."""
    wanted = {elector.id for elector in instance.electors}
    ready = await _gather_ready(me, instance, wanted, first=attempt < len(instance.electors))
    if instance.over.is_set() or instance.promised >= attempt:
        return
    acks = await _propose(me, instance, attempt, wanted | ready.keys())
    if acks is None or not quorum(instance.electors, acks):
        me.wait_for_leader(instance, me.settings.takeover)
        return
    await _seal(me, instance, attempt, acks, ready)


async def _found(me: Participant, instance: Instance) -> None:
    """Begin a lineage with whoever is there and answers: they are its electors."""
    before = instance.heard, instance.founder, instance.promised
    ready = await _gather_ready(me, instance, set(), first=not me.record.electors)
    there = ranked(instance.run, instance.iteration, tuple(Elector(p, r["index"]) for p, r in ready.items()))
    turn = next((place for place, elector in enumerate(there) if elector.id == me.net.me), len(there))
    await me.net.sleep_until(me.net.now() + turn * me.settings.takeover)
    if instance.over.is_set() or before != (instance.heard, instance.founder, instance.promised):
        return
    seed = f"{instance.run}:{instance.iteration}:{me.net.me}:{me.net.now()}".encode()
    instance.found(hashlib.sha256(instance.lineage + seed).digest(), me.net.me)
    instance.heard = me.net.now()
    acks = await _propose(me, instance, 0, set(ready) | {me.net.me}, founding=True)
    if acks is None or not any(ack["join"] for ack in acks.values()):
        instance.patience = me.net.now() + me.settings.takeover * (1 + turn)
        return
    instance.electors = there
    await _seal(me, instance, 0, acks, ready)


async def _gather_ready(me: Participant, instance: Instance, wanted: set[PeerId], *, first: bool) -> Ready:
    """Who is ready. The first leader waits for all electors (or the expected number), but not for ever."""
    limit = instance.entered + me.settings.ready_timeout
    while True:
        ready = await _ready(me, instance)
        there = {peer for peer, record in ready.items() if record["role"] != "training"}
        enough = (wanted | ready.keys()) <= there if wanted else len(there) >= me.settings.expected > 0
        if not first or enough or me.net.now() >= limit or instance.over.is_set():
            return ready
        await me.net.sleep_until(min(limit, me.net.now() + me.settings.poll))


async def _ready(me: Participant, instance: Instance) -> Ready:
    ready: Ready = {}
    for peer, value in (await me.net.lookup(me.key(f"ready/{instance.iteration}"))).items():
        try:
            fields = unpack("ready", value)
        except WireError:
            continue  # not a record of ours: its owner is simply not ready
        if fields["base"] == instance.base:
            ready[peer] = fields
    return ready


async def _propose(
    me: Participant, instance: Instance, attempt: int, peers: set[PeerId], *, founding: bool = False
) -> Acks | None:
    """Ask for votes. None: it is not my turn after all (another attempt is under way, or others are ahead)."""
    before = instance.promised
    proposal = {
        "iteration": instance.iteration, "attempt": attempt, "seen": max(before, instance.known),
        "lineage": instance.lineage, "base": instance.base, "mass": me.record.mass, "founding": founding,
    }  # fmt: skip
    others = sorted(peers - {me.net.me})
    begun = me.net.now()
    parcel = Parcel(pack("propose", **proposal))
    timed = await asyncio.gather(*(_timed_ask(me, peer, "propose", parcel) for peer in others))
    found = [_read_ack(me, instance, peer, answer) for peer, (answer, _) in zip(others, timed, strict=True)]
    acks: Acks = {peer: ack for peer, ack in zip(others, found, strict=True) if ack and ack["status"] == "ack"}
    refusals = [ack["attempt"] for ack in found if ack and ack["status"] == "refused"]
    if not founding:
        instance.known = max([instance.known, *refusals])
    # Whoever refuses lives, and is busy or follows somebody else: it must not be left out for that.
    outrun = bool(refusals) and (founding or attempt < 3 * len(instance.electors))
    if instance.over.is_set() or outrun or instance.promised != before:
        return None
    if me.net.now() - begun > 1.5 * me.settings.call_timeout:
        return None  # it slept: what it knows is old
    if attempt < len(instance.electors) and _seems_slow(me, timed):
        return None  # on its first turn, it lets somebody else lead
    mine = me.vote(me.net.me, proposal)  # last: until here it could still join another's attempt
    if mine["status"] == "ack":
        acks[me.net.me] = mine
    return acks


def _read_ack(me: Participant, instance: Instance, peer: PeerId, answer: Parcel | None) -> dict[str, Any] | None:
    """An answer to a proposal; None for silence, and for an answer that is none."""
    if answer is None:
        return None
    try:
        ack = unpack("ack", answer.header)
        if ack["status"] == "behind" and ack["record"]:
            _learn(me, instance, peer, ack["record"])
    except WireError:
        return None
    return ack


async def _timed_ask(me: Participant, peer: PeerId, channel: str, parcel: Parcel) -> tuple[Parcel | None, float]:
    begun = me.net.now()
    answer = await me.ask(peer, channel, parcel)
    return answer, me.net.now() - begun


def _seems_slow(me: Participant, timed: list[tuple[Parcel | None, float]]) -> bool:
    """Whether some peers kept silent and others answered late: then the slow one may be me, and I must not judge."""
    silent = any(answer is None and seconds > 0.9 * me.settings.call_timeout for answer, seconds in timed)
    return silent and any(answer and seconds > me.settings.call_timeout / 3 for answer, seconds in timed)


def _learn(me: Participant, instance: Instance, peer: PeerId, data: bytes) -> None:
    """Somebody is ahead: this very iteration may be decided already; otherwise sync."""
    record = decode_record(data)
    if record.roster and record.roster.base == instance.base and record.iteration == instance.iteration:
        me.decide(instance, record, (peer, *record.roster.ids))
    elif record.beats(me.record.mass, me.record.hash):
        me.gone_elsewhere(peer)


async def _seal(me: Participant, instance: Instance, attempt: int, acks: Acks, ready: Ready) -> None:
    """Adopt the result that may have been committed already, or seal a new roster; then see it through."""
    free, adopted = _earlier_result(instance, acks)
    if adopted is not None:
        roster, digest, holders = adopted
        return await _conduct(me, instance, attempt, roster, digest, holders)
    if not free:  # the only holders of a committed result may be lost for good: in the end a new lineage is founded
        me.wait_for_leader(instance, 0.0)
        return None
    new_roster = _roster(me, instance, attempt, acks, ready)
    if new_roster is None:
        instance.patience = me.net.now() + me.settings.poll
        return None
    return await _conduct(me, instance, attempt, new_roster, None, [])


def _earlier_result(
    instance: Instance, acks: Acks
) -> tuple[bool, tuple[Roster, bytes, list[PeerId]] | None]:
    """Whether a new roster may be sealed, and the finished result to adopt instead when there is one (Paxos' rule)."""
    voted = {peer: ack for peer, ack in acks.items() if ack["accepted"] is not None}
    if not voted:
        return True, None
    newest = max(ack["accepted_attempt"] for ack in voted.values())
    top = {peer: ack for peer, ack in voted.items() if ack["accepted_attempt"] == newest}
    silent = {elector.id for elector in instance.electors} - acks.keys()
    hashes = sorted({ack["accepted_hash"] for ack in top.values()})
    backers = {h: {peer for peer, ack in top.items() if ack["accepted_hash"] == h} for h in hashes}
    possible = [h for h in hashes if quorum(instance.electors, backers[h] | silent)]
    chosen = possible[0] if possible else max(hashes, key=lambda h: len(backers[h]))
    holders = sorted(p for p, ack in acks.items() if ack["holds"] and ack["accepted_hash"] == chosen)
    if len(possible) > 1 or (possible and not holders):
        return False, None  # one of them may be committed, and nobody here can tell or has the data: wait
    if not holders:
        return True, None
    data = next(ack["accepted"] for ack in top.values() if ack["accepted_hash"] == chosen)
    return False, (decode_roster(data), chosen, holders)


def _roster(me: Participant, instance: Instance, attempt: int, acks: Acks, ready: Ready) -> Roster | None:
    """Exactly those who acked and bring something, without those who spoiled the last attempt."""
    bad = culprits(acks, patient=instance.tries < 4)
    joining = {
        peer: ack for peer, ack in acks.items() if ack["join"] and ack["layout"] == me.layout and peer not in bad
    }
    if not any(ack["weight"] > 0 for ack in joining.values()):
        return None
    there = ranked(instance.run, instance.iteration, tuple(Elector(p, a["index"]) for p, a in joining.items()))
    founding = attempt == 0 and instance.founder is not None
    voters = ranked(instance.run, instance.iteration, tuple(Elector(p, a["index"]) for p, a in acks.items()))
    announced = sorted(p for p, r in ready.items() if r["role"] == "member")
    known = dict.fromkeys([*(e.id for e in (*instance.electors, *me.record.electors)), *announced])
    omitted = {peer: bad.get(peer, _why(peer, acks, me.layout)) for peer in known if peer not in joining}
    exchange = me.settings.exchange_of(instance.tries)
    return Roster(
        instance.run, instance.iteration, attempt, instance.lineage, instance.base, me.layout, exchange,
        me.settings.group_size,
        tuple(Member(e.id, e.index, joining[e.id]["weight"]) for e in there),
        tuple(e for e in voters if e.id not in joining),
        voters if founding else (),
        tuple(omitted.items()),
    )  # fmt: skip


def _why(peer: PeerId, acks: Acks, layout: bytes) -> str:
    if peer not in acks:
        return "did not answer"
    return "brings another model layout" if acks[peer]["layout"] != layout else "brings no update"


async def _conduct(
    me: Participant, instance: Instance, attempt: int, roster: Roster, adopt: bytes | None, holders: list[PeerId]
) -> None:
    """Publish the roster, collect the hashes, and commit once a majority agrees; or make way for the next attempt."""
    instance.finishes, instance.leading, instance.heard = {}, attempt, me.net.now()
    if roster.electors:
        instance.electors = ranked(instance.run, instance.iteration, roster.electors)
    named = brief(roster, instance.electors)
    seal = Parcel(pack("seal", roster=named, attempt=attempt, adopt=adopt, holders=holders[:16]))
    others = [peer for peer in roster.ids if peer != me.net.me]
    publishing = [asyncio.create_task(me.ask(peer, "seal", seal)) for peer in others]
    me.begin(me.net.me, roster, attempt, adopt, holders)
    phases = PHASES[roster.exchange](plan(len(roster.members), roster.group_size))
    limit = me.net.now() + (phases + 1) * me.settings.phase_timeout + me.settings.call_timeout
    instance.patience = limit + me.settings.call_timeout
    try:
        await _count(me, instance, attempt, roster, limit)
    finally:
        for task in publishing:
            task.cancel()
        if instance.leading == attempt and not instance.over.is_set():
            instance.leading = -1
            instance.patience = me.net.now()


async def _count(me: Participant, instance: Instance, attempt: int, roster: Roster, limit: float) -> None:
    """Wait for finishes until there is a majority, or no hope of one."""
    endorsers: set[PeerId] = set()
    while instance.leading == attempt and not instance.over.is_set():
        complete = me.net.now() >= limit or len(instance.finishes) == len(roster.members)
        digest, decided = instance.decided_hash(roster, endorsers)
        if digest is not None and not decided and (complete or not quorum(instance.electors, roster.ranks)):
            endorsers |= await _endorse(me, instance, attempt, roster, digest)
            digest, decided = instance.decided_hash(roster, endorsers)
        if digest is not None and decided and instance.leading == attempt:
            holders = tuple(peer for peer, got in instance.finishes.items() if got == digest)
            return me.decide(instance, me.record.after(roster, digest), holders)
        failed = any(got is None for got in instance.finishes.values())
        if failed:
            limit = min(limit, me.net.now() + me.settings.phase_timeout)
        if digest is not None:  # only votes are missing: whoever is silent is not waited for until others take over
            limit = min(limit, me.net.now() + me.settings.call_timeout / 2)
        if complete:
            return None
        instance.progress.clear()
        await me.until(instance.progress, limit)
    return None


async def _endorse(
    me: Participant, instance: Instance, attempt: int, roster: Roster, digest: bytes
) -> set[PeerId]:
    """Ask electors that do not hold the result to vote for its hash."""
    named = brief(roster, instance.electors)
    fields = {"iteration": instance.iteration, "attempt": attempt, "roster": named, "hash": digest}
    parcel = Parcel(pack("endorse", **fields))
    others = [e.id for e in instance.electors if instance.finishes.get(e.id) != digest and e.id != me.net.me]
    answers = await asyncio.gather(*(me.ask(peer, "endorse", parcel) for peer in others))
    said = {peer for peer, answer in zip(others, answers, strict=True) if answer and _is_ok(answer)}
    if instance.rank(me.net.me) is not None and me.endorse(me.net.me, fields):
        said.add(me.net.me)
    return said


def _is_ok(answer: Parcel) -> bool:
    try:
        return bool(unpack("ok", answer.header)["status"] == "ok")
    except WireError:
        return False
