"""Who is ready for the next iteration: told to its first leader directly, and to the DHT where that does not do.

A notice is one small message to the elector that leads first. The DHT has it as well when that peer does not take it,
when its sender is new, and when the iteration lasts: then somebody else may come to lead it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from marfl.errors import WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.roster import Elector, quorum, ranked
from marfl.protocol.terms import met
from marfl.protocol.wire import pack, status_of, unpack

if TYPE_CHECKING:
    from marfl.protocol.instance import Instance
    from marfl.protocol.participant import Participant

T = TypeVar("T")
Ready: TypeAlias = dict[PeerId, dict[str, Any]]  # who announced itself for this iteration, from the same state as mine
MAX_NOTICES = 65_536
NOT_YET = "training"  # the role of a peer that is there and still trains
LEFT = "left"  # and of one that says goodbye
TOO_LATE = "too late"  # the answer to whoever begins to train for an iteration that begins without it
HEIRS = 8  # electors that hear a goodbye: one of them leads next, though some may go at the same time


class Notices:
    """The last word of everybody who told me that it is ready."""

    def __init__(self) -> None:
        self._last: Ready = {}  # the oldest first
        self._vouched: dict[PeerId, bytes] = {}  # who was given which state, the oldest first
        self._tardy: dict[PeerId, None] = {}  # who was waited for in vain, and has taken part in nothing since
        self.news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._last)

    def note(self, peer: PeerId, said: dict[str, Any]) -> None:
        _remember(self._last, peer, said)
        self.news.set()

    def about(self, instance: Instance) -> Ready:
        """Who is ready to go on from the same state, and who has left by now."""
        last = self._last.items()
        return {peer: said for peer, said in last if said["base"] == instance.base or gone(said, instance)}

    def vouch(self, peer: PeerId, base: bytes) -> None:
        """Somebody was given this state: it means to take part."""
        _remember(self._vouched, peer, base)
        self.news.set()

    def waited_in_vain(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            _remember(self._tardy, peer, None)

    def is_vouched_for(self, peer: PeerId, base: bytes) -> bool:
        return self._vouched.get(peer) == base and peer not in self._tardy

    def seen(self, iteration: int, peers: Iterable[PeerId]) -> None:
        """These took part in an iteration: who had left before it is back."""
        for peer in peers:
            self._tardy.pop(peer, None)
            said = self._last.get(peer)
            if said is not None and said["role"] == LEFT and said["iteration"] < iteration:
                del self._last[peer]


def _remember(last: dict[PeerId, T], peer: PeerId, word: T) -> None:
    """Keep somebody's last word, and not more than so many people's: anybody may say something in an open run."""
    last.pop(peer, None)
    last[peer] = word
    if len(last) > MAX_NOTICES:
        del last[next(iter(last))]


def gone(said: dict[str, Any], instance: Instance) -> bool:
    """Whether this was a goodbye; one for a later iteration comes from somebody who knows more than I do."""
    return bool(said["role"] == LEFT and said["iteration"] <= instance.iteration)


async def answer_ready(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """Somebody takes me for the leader of an iteration, now or soon; or says goodbye, which may make me the leader."""
    said = unpack("ready", request.header)
    me.notices.note(sender, said)
    me.incarnations.note(sender, said["incarnation"])
    met(me, sender, said["terms"])  # so that a leader can say what differs
    instance = me.instance
    if said["role"] == LEFT and instance is not None and instance.promised < 0:
        instance.patience = min(instance.patience, first_turn(me, instance))
    return Parcel(pack("ok", status=TOO_LATE if said["role"] == NOT_YET and _is_late(me, said) else "ok"))


def _is_late(me: Participant, said: dict[str, Any]) -> bool:
    """Whether the iteration that somebody trains for is decided here, or goes on without it."""
    if said["base"] != me.record.hash:
        return bool(me.record.beats(said["mass"], said["base"]))
    instance = me.instance
    return instance is not None and instance.base == said["base"] and (instance.closed or instance.promised >= 0)


async def vouch(me: Participant, peer: PeerId) -> None:
    """Tell the next leader that a peer which is no elector was given the agreed state: else nobody waits for it."""
    electors = [elector.id for elector in _electors(me)]
    if peer in electors or me.net.me not in electors:
        return
    if electors[0] == me.net.me:
        me.notices.vouch(peer, me.record.hash)
        return
    await me.ask(electors[0], "vouch", Parcel(pack("vouch", peer=peer, base=me.record.hash)))


async def answer_vouch(me: Participant, _: PeerId, request: Parcel) -> Parcel:
    """An elector has given somebody the state that the next iteration begins from."""
    fields = unpack("vouch", request.header)
    me.notices.vouch(fields["peer"], fields["base"])
    return Parcel(pack("ok", status="ok"))


def first_turn(me: Participant, instance: Instance) -> float:
    """When this peer leads if nobody else does: in rank order, without waiting for those who said goodbye."""
    left = _said_goodbye(me, instance)
    before = [elector for elector in instance.electors[: instance.rank(me.net.me)] if elector.id not in left]
    patience = me.settings.ready_timeout + len(before) * me.settings.takeover
    return instance.entered + patience if before and not survivors(me, instance) else me.net.now()


def survivors(me: Participant, instance: Instance) -> set[PeerId]:
    """Electors that did not say goodbye, if they are no majority: nobody can go on as before. Else nobody."""
    left = _said_goodbye(me, instance)
    rest = {elector.id for elector in instance.electors} - left
    return rest if left and not quorum(instance.electors, rest) else set()


def _said_goodbye(me: Participant, instance: Instance) -> set[PeerId]:
    return {peer for peer, said in me.notices.about(instance).items() if gone(said, instance)}


async def announce_ready(me: Participant, role: str, weight: float = 0.0) -> PeerId | None:
    """Say that this peer is there for the next iteration, and what for; ends when the DHT has it, too.

    The leader to whom a peer that trains comes too late: the iteration goes on without it. None otherwise.
    """
    iteration = me.record.iteration + 1
    said = {
        "iteration": iteration, "base": me.record.hash, "index": me.index, "weight": float(weight),
        "layout": me.layout, "mass": me.record.mass, "role": role, "incarnation": me.incarnation,
        "terms": me.terms.digest,
    }  # fmt: skip
    notice = pack("ready", **said)
    key, electors = f"ready/{iteration}", _electors(me)
    known = any(elector.id == me.net.me for elector in electors)
    if role not in ("member", "witness"):  # on its way in or out
        heirs = [elector.id for elector in electors[:HEIRS] if elector.id != me.net.me]
        hearers = heirs if role == LEFT else [elector.id for elector in electors[:1]]
        heard, *told = await asyncio.gather(me.announce(key, notice), *(_tell(me, peer, said) for peer in hearers))
        late = [peer for peer, answer in zip(hearers, told, strict=True) if answer == TOO_LATE]
        if not heard and role == NOT_YET and not late:  # it must be waited for: else it would always be late
            me.aside(me.repeat(key, notice))
        return late[0] if late else None
    if electors:
        told_first = me.aside(_tell(me, electors[0].id, said))  # not cut short: it must not arrive after a goodbye
        if known and await asyncio.shield(told_first) is not None:
            await me.net.sleep_until(me.net.now() + me.settings.takeover)
    await me.insist(key, notice)
    return None


def _electors(me: Participant) -> tuple[Elector, ...]:
    """Of the next iteration, in the order in which they lead."""
    instance = me.instance
    if instance is not None and instance.base == me.record.hash:
        return instance.electors
    return ranked(me.settings.run, me.record.iteration + 1, me.record.electors)


async def _tell(me: Participant, leader: PeerId, said: dict[str, Any]) -> str | None:
    """What the leader says, once it knows; None when it does not answer."""
    if leader == me.net.me:
        me.notices.note(leader, said)
        return "ok"
    answer = await me.ask(leader, "ready", Parcel(pack("ready", **said)))
    return status_of(answer) if answer is not None else None


async def gather_ready(me: Participant, instance: Instance, wanted: set[PeerId], *, first: bool) -> Ready:
    """Who is ready. The first leader waits for all electors (or the expected number), but not for ever.

    It looks into the DHT only while somebody is missing, less and less often: those who are there tell it.
    """
    pause = me.settings.poll
    rouse_at = me.net.now() + me.settings.takeover
    look_at = me.net.now() + pause if first and wanted else me.net.now()
    found: Ready = {}
    while True:
        if me.net.now() >= min(look_at, _limit(me, instance)) and not _complete(me, instance, wanted, found):
            found = await _looked_up(me, instance)
            pause = min(2 * pause, me.settings.takeover) if wanted else pause
            look_at = me.net.now() + pause
        ready = _merged(found, me.notices.about(instance))
        if instance.gathered is None and quorum(instance.electors, ready):
            instance.gathered = me.net.now()  # whoever was alone until now gives the others their time
        limit = _limit(me, instance)
        there = {peer for peer, record in ready.items() if record["role"] != NOT_YET}
        missing = _awaited(me, instance, wanted, ready) - there
        enough = not missing if wanted else len(there) >= me.settings.expected > 0
        if not first or enough or me.net.now() >= limit or instance.over.is_set():
            instance.seen |= ready.keys()
            me.notices.waited_in_vain(missing - wanted)
            return ready
        if me.net.now() >= rouse_at:
            rouse_at = math.inf
            me.aside(_rouse(me, wanted - ready.keys()))
        me.notices.news.clear()
        await me.until(me.notices.news, min(limit, look_at, rouse_at))


async def _rouse(me: Participant, silent: set[PeerId]) -> None:
    """Tell electors that are missed where I am: whoever was to tell them what was decided may be gone."""
    notice = Parcel(pack("heavier", hash=me.record.hash, mass=me.record.mass))
    await asyncio.gather(*(me.ask(peer, "heavier", notice) for peer in sorted(silent - {me.net.me})))


def _limit(me: Participant, instance: Instance) -> float:
    """Until when others are waited for."""
    return (instance.gathered or instance.entered) + me.settings.ready_timeout


def _complete(me: Participant, instance: Instance, wanted: set[PeerId], found: Ready) -> bool:
    """Whether everybody wanted has said so, and nobody is waited for: then the DHT need not be asked."""
    ready = _merged(found, me.notices.about(instance))
    there = {peer for peer, record in ready.items() if record["role"] != NOT_YET}
    return bool(wanted) and _awaited(me, instance, wanted, ready) <= there


def _awaited(me: Participant, instance: Instance, wanted: set[PeerId], ready: Ready) -> set[PeerId]:
    """Whom the leader waits for: who must be there, and of those who train whoever is known to mean it.

    Anybody can say that it trains, for ever: so it must have taken part lately, or hold the state.
    """
    training = {peer for peer, said in ready.items() if said["role"] == NOT_YET}
    if not training:
        return wanted
    lately = {elector.id for record in me.history.values() for elector in record.electors}
    return wanted | {p for p in training if p in lately or me.notices.is_vouched_for(p, instance.base)}


def _merged(found: Ready, told: Ready) -> Ready:
    """The later of what the DHT and the peers themselves say; who still trains in one is done if the other says so."""
    later = {peer: said for peer, said in told.items() if peer not in found or not _precedes(said, found[peer])}
    return found | later


def _precedes(said: dict[str, Any], other: dict[str, Any]) -> bool:
    order = [(word["iteration"], word["role"] != NOT_YET) for word in (said, other)]
    return order[0] < order[1]


async def _looked_up(me: Participant, instance: Instance) -> Ready:
    ready: Ready = {}
    for peer, value in (await me.look_up(f"ready/{instance.iteration}")).items():
        try:
            fields = unpack("ready", value)
        except WireError:
            continue  # not a record of ours: its owner is simply not ready
        met(me, peer, fields["terms"])
        if fields["base"] == instance.base:
            ready[peer] = fields
    return ready
