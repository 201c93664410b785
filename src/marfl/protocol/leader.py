"""What a peer does when it is its turn to lead: wait for the others, gather their votes, and have a roster sealed.

Electors lead in rank order. A leader that falls silent is followed by the next one, with a higher attempt. Without a
majority of electors for long enough, the first peer that is there founds a new lineage (`on_minority = "fork"`).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from marfl.errors import WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.access import is_elector
from marfl.protocol.acks import BAD_ACK, check_ack
from marfl.protocol.incarnations import SECOND
from marfl.protocol.instance import Instance
from marfl.protocol.readiness import LEFT, gather_ready, survivors
from marfl.protocol.roster import Elector, decode_record, quorum, ranked
from marfl.protocol.sealing import Acks, seal_roster
from marfl.protocol.terms import OTHERS, met
from marfl.protocol.verdict import news, tell_decided
from marfl.protocol.voting import offered_keys, vote
from marfl.protocol.wire import pack, unpack

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant

PATIENT = 3  # times that a leader, or a founder, gives way to those who refuse


async def drive(me: Participant, instance: Instance) -> None:
    """Until the iteration is over: whenever the others have been silent for long enough, lead."""
    if (me.fetched or instance.rank(me.net.me) is None) and await _elsewhere(me, instance):
        return  # a newcomer, or late before: better to know at once than to stay late for ever
    said = False
    while not instance.over.is_set():
        if await _waited_in_vain(me, instance):
            return
        if _is_first(me, instance):
            await _lead_first(me, instance)
        elif await _elsewhere(me, instance):
            return
        elif me.net.now() < instance.patience:
            continue  # while it looked, a leader came forward
        else:
            await _take_turn(me, instance)
        if instance.over.is_set():
            return
        if instance.patience <= me.net.now():
            instance.patience = me.net.now() + me.settings.takeover
        if not said and not me.behind:  # too few follow: whoever announced the state that I hold may be gone
            me.aside(me.announce_head())
            said = True


async def _waited_in_vain(me: Participant, instance: Instance) -> bool:
    """Be patient; whether the others have gone on without this peer meanwhile.

    Who is not part of anything may be late, or others may still train: it looks less and less often.
    """
    pause = me.settings.takeover
    look_at = me.net.now() + pause
    while me.net.now() < instance.patience:
        me.notices.news.clear()  # a goodbye may have shortened the wait
        await me.until(me.notices.news, min(instance.patience, look_at))
        if me.net.now() >= look_at:
            if not instance.busy:
                pause = min(3 * pause, 2 * me.settings.ready_timeout)
                if await _elsewhere(me, instance):
                    return True
            look_at = me.net.now() + pause
    return False


def _is_first(me: Participant, instance: Instance) -> bool:
    """Whether everybody waits for this peer to lead, and it has not tried yet."""
    first = instance.rank(me.net.me) == 0 and instance.promised < 0
    return first and not _alone(me, instance) and me.barred != instance.iteration


def _alone(me: Participant, instance: Instance) -> bool:
    """Whether no majority was heard of for long enough, or there is none any more."""
    silent = me.net.now() - max(instance.entered, instance.heard)
    return silent >= me.settings.minority_timeout or bool(survivors(me, instance))


async def _lead_first(me: Participant, instance: Instance) -> None:
    """The first elector's turn: it looks for a heavier lineage while it gathers votes."""
    looking = asyncio.create_task(_elsewhere(me, instance))
    try:
        await _lead(me, instance, instance.next_attempt(0), looking)
    finally:
        looking.cancel()


async def _take_turn(me: Participant, instance: Instance) -> None:
    """Lead an attempt, or found a lineage, if that is mine to do."""
    rank = instance.rank(me.net.me)
    if not instance.electors or (_alone(me, instance) and me.settings.on_minority == "fork"):
        await _found(me, instance)
    elif rank is not None and me.barred != instance.iteration:
        await _lead(me, instance, instance.next_attempt(rank))


async def _elsewhere(me: Participant, instance: Instance) -> bool:
    """Whether a head that wins over mine has been announced: then nobody here goes on."""
    for peer, mass, digest in await me.heads():
        if digest != me.record.hash and not me.record.beats(mass, digest):
            mine = instance.accepted
            if mine and mine.hash == digest:  # what this peer has finished is committed: it hears so, or will adopt it
                return await news(me, instance, peer)
            notice = Parcel(pack("heavier", hash=digest, mass=mass))
            voter = instance.rank(me.net.me) is not None  # of others the electors would not believe it
            others = {elector.id for elector in instance.electors} | instance.seen if voter else set()
            await asyncio.gather(*(me.ask(other, "heavier", notice) for other in sorted(others - {me.net.me})))
            me.gone_elsewhere(peer)
            return True
    return False


async def _lead(
    me: Participant, instance: Instance, attempt: int, elsewhere: asyncio.Task[bool] | None = None
) -> None:
    """One attempt of the lineage's own: needs the votes of a majority of its electors, and no heavier lineage."""
    wanted = {elector.id for elector in instance.electors}
    ready = await gather_ready(me, instance, wanted, first=instance.tries == 0)
    if instance.over.is_set() or instance.promised >= attempt:
        return
    instance.closed = True
    left = {peer for peer, said in ready.items() if said["role"] == LEFT}
    acks = await _propose(me, instance, attempt, (wanted | ready.keys()) - left)
    if acks is None or not quorum(instance.electors, acks):
        me.wait_for_leader(instance, me.settings.takeover)
        return
    if elsewhere is not None and await elsewhere:
        return
    await seal_roster(me, instance, attempt, acks, ready)


async def _found(me: Participant, instance: Instance) -> None:
    """Begin a lineage with whoever is there and answers: they are its electors."""
    before = instance.heard, instance.founder, instance.promised
    rest = survivors(me, instance) - {me.net.me}
    ready = await gather_ready(me, instance, rest, first=bool(rest) or not me.record.electors)
    here = {peer: said["index"] for peer, said in ready.items() if said["role"] != LEFT} | {me.net.me: me.index}
    there = ranked(instance.run, instance.iteration, tuple(Elector(peer, index) for peer, index in here.items()))
    turn = [elector.id for elector in there].index(me.net.me)
    await me.net.sleep_until(me.net.now() + turn * me.settings.takeover)
    if instance.over.is_set() or before != (instance.heard, instance.founder, instance.promised):
        return
    seed = f"{instance.run}:{instance.iteration}:{me.net.me}:{me.net.now()}".encode()
    instance.found(hashlib.sha256(instance.lineage + seed).digest(), me.net.me)
    instance.heard, instance.foundings = me.net.now(), instance.foundings + 1
    acks = await _propose(me, instance, 0, set(here), founding=True)
    if acks is None or not any(ack["role"] in ("member", "witness") for ack in acks.values()):
        instance.patience = me.net.now() + me.settings.takeover * (1 + turn)
        return
    instance.electors = there
    await seal_roster(me, instance, 0, acks, ready)


async def _propose(
    me: Participant, instance: Instance, attempt: int, peers: set[PeerId], *, founding: bool = False
) -> Acks | None:
    """Ask for votes. None: it is not my turn after all (another attempt is under way, or others are ahead)."""
    before, instance.doubted = instance.promised, {}
    proposal = {
        "iteration": instance.iteration, "attempt": attempt, "seen": max(before, instance.known),
        "lineage": instance.lineage, "base": instance.base, "mass": me.record.mass, "founding": founding,
        "incarnation": me.incarnation, "terms": me.terms.digest,
    }  # fmt: skip
    others = sorted(peers - {me.net.me})
    begun = me.net.now()
    parcel = Parcel(pack("propose", **proposal))
    timed = await asyncio.gather(*(_timed_ask(me, peer, "propose", parcel) for peer in others))
    found = [_read_ack(me, instance, attempt, peer, answer) for peer, (answer, _) in zip(others, timed, strict=True)]
    acks: Acks = {peer: ack for peer, ack in zip(others, found, strict=True) if ack and ack["status"] == "ack"}
    heard = [ack for peer, ack in zip(others, found, strict=True) if ack and _is_heeded(me, peer)]
    refusals = [ack["attempt"] for ack in heard if ack["status"] == "refused"]
    if not founding:
        instance.known = max([instance.known, *refusals])
    outrun = bool(refusals) and _gives_way(instance, attempt, len(refusals), len(acks), founding=founding)
    if instance.record is not None:  # those who voted for this attempt do not know, and would wait for it
        me.aside(tell_decided(me, instance, instance.record, acks))
    if instance.over.is_set() or outrun or instance.promised != before:
        return None
    if me.net.now() - begun > 1.5 * me.settings.call_timeout:
        return None  # it slept: what it knows is old
    if attempt < len(instance.electors) and _seems_slow(me, timed):
        return None  # on its first turn, it lets somebody else lead
    if not acks and me.dht.astray():
        return None  # others are there, but not for me: alone it decides nothing
    mine = vote(me, me.net.me, proposal)  # last: until here it could still join another's attempt
    if mine["status"] == "ack":
        acks[me.net.me] = mine | {"keys": offered_keys(me, mine)}
    return acks


def _is_heeded(me: Participant, peer: PeerId) -> bool:
    """Whether to believe what is said instead of a vote: anybody can refuse, or make up a record.

    In the beginning nobody is known, and everybody is believed.
    """
    return not me.record.electors or is_elector(me, peer)


def _gives_way(instance: Instance, attempt: int, refusals: int, acks: int, *, founding: bool) -> bool:
    """Whether to step back for those who refuse: they live, and are busy or follow somebody else.

    They must not be left out for that, but neither can they stop the others for ever. Who founds a lineage without them
    is, at worst, the lighter one, and gives it up.
    """
    if founding:
        return instance.foundings <= PATIENT or refusals > acks + 1
    return attempt < PATIENT * len(instance.electors)


def _read_ack(
    me: Participant, instance: Instance, attempt: int, peer: PeerId, answer: Parcel | None
) -> dict[str, Any] | None:
    """An answer to a proposal; None for silence, for an answer that is none, and for a vote that must not count."""
    if answer is None:
        return None
    try:
        ack = unpack("ack", answer.header)
        check_ack(ack, attempt, instance.decision, me.settings.max_weight)
        ack["keys"] = bytes(answer.payload)
        heeded = _is_heeded(me, peer) and met(me, peer, ack["terms"])
        if ack["status"] == "behind" and ack["record"] and heeded:
            _learn(me, instance, peer, ack["record"])
    except WireError:
        me.net.refused[BAD_ACK] += 1
        return None
    if not met(me, peer, ack["terms"]):
        me.net.refused[OTHERS] += 1
        instance.doubted[peer] = me.terms.why(ack["terms"])
        return None
    if ack["status"] != "ack":
        me.incarnations.note(peer, ack["incarnation"])
    elif why := me.incarnations.vote(peer, ack["incarnation"], instance.base + instance.lineage):
        me.net.refused[SECOND] += 1
        instance.doubted[peer] = why
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
