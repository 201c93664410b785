"""Who is ready for the next iteration: told to its first leader directly, and to the DHT where that does not do.

A notice is one small message to the elector that leads first. The DHT has it as well when that peer does not take it,
when its sender is new, and when the iteration lasts: then somebody else may come to lead it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from marfl.errors import NetError, WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.roster import Elector, quorum, ranked
from marfl.protocol.wire import pack, unpack

if TYPE_CHECKING:
    from marfl.protocol.instance import Instance
    from marfl.protocol.participant import Participant

Ready: TypeAlias = dict[PeerId, dict[str, Any]]  # who announced itself for this iteration, from the same state as mine
MAX_NOTICES = 65_536
NOT_YET = "training"  # the role of a peer that is there and still trains
LEFT = "left"  # and of one that says goodbye
HEIRS = 8  # electors that hear a goodbye: one of them leads next, though some may go at the same time


class Notices:
    """The last word of everybody who told me that it is ready."""

    def __init__(self) -> None:
        self._last: Ready = {}  # the oldest first
        self.news = asyncio.Event()

    def note(self, peer: PeerId, said: dict[str, Any]) -> None:
        self._last.pop(peer, None)
        self._last[peer] = said
        if len(self._last) > MAX_NOTICES:  # anybody may say something in an open run
            del self._last[next(iter(self._last))]
        self.news.set()

    def about(self, instance: Instance) -> Ready:
        """Who is ready to go on from the same state, and who has left by now."""
        last = self._last.items()
        return {peer: said for peer, said in last if said["base"] == instance.base or gone(said, instance)}

    def seen(self, iteration: int, peers: Iterable[PeerId]) -> None:
        """These took part in an iteration: who had left before it is back."""
        for peer in peers:
            said = self._last.get(peer)
            if said is not None and said["role"] == LEFT and said["iteration"] < iteration:
                del self._last[peer]


def gone(said: dict[str, Any], instance: Instance) -> bool:
    """Whether this was a goodbye; one for a later iteration comes from somebody who knows more than I do."""
    return bool(said["role"] == LEFT and said["iteration"] <= instance.iteration)


async def answer_ready(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """Somebody takes me for the leader of an iteration, now or soon; or says goodbye, which may make me the leader."""
    said = unpack("ready", request.header)
    me.notices.note(sender, said)
    instance = me.instance
    if said["role"] == LEFT and instance is not None and instance.promised < 0:
        instance.patience = min(instance.patience, first_turn(me, instance))
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


async def announce_ready(me: Participant, role: str, weight: float = 0.0) -> None:
    """Say that this peer is there for the next iteration, and what for; ends when the DHT has it, too."""
    iteration = me.record.iteration + 1
    said = {
        "iteration": iteration, "base": me.record.hash, "index": me.index, "weight": float(weight),
        "layout": me.layout, "mass": me.record.mass, "role": role,
    }  # fmt: skip
    notice = pack("ready", **said)
    key, electors = f"ready/{iteration}", _electors(me)
    known = any(elector.id == me.net.me for elector in electors)
    if role not in ("member", "witness"):  # on its way in or out: said once
        heirs = [elector.id for elector in electors[:HEIRS] if elector.id != me.net.me]
        hearers = heirs if role == LEFT else [elector.id for elector in electors[:1]]
        await asyncio.gather(me.announce(key, notice), *(_tell(me, peer, said) for peer in hearers))
        return
    if electors:
        told = me.aside(_tell(me, electors[0].id, said))  # not cut short: it must not arrive after a goodbye
        if known and await asyncio.shield(told):
            await me.net.sleep_until(me.net.now() + me.settings.takeover)
    while not await me.announce(key, notice):  # until the DHT listens
        await me.net.sleep_until(me.net.now() + me.settings.takeover)


def _electors(me: Participant) -> tuple[Elector, ...]:
    """Of the next iteration, in the order in which they lead."""
    instance = me.instance
    if instance is not None and instance.base == me.record.hash:
        return instance.electors
    return ranked(me.settings.run, me.record.iteration + 1, me.record.electors)


async def _tell(me: Participant, leader: PeerId, said: dict[str, Any]) -> bool:
    """Whether the leader knows."""
    if leader == me.net.me:
        me.notices.note(leader, said)
        return True
    try:
        return await me.ask(leader, "ready", Parcel(pack("ready", **said))) is not None
    except NetError:
        return False  # my own daemon is gone, perhaps because this peer is told to leave: the DHT is tried as well


async def gather_ready(me: Participant, instance: Instance, wanted: set[PeerId], *, first: bool) -> Ready:
    """Who is ready. The first leader waits for all electors (or the expected number), but not for ever.

    It looks into the DHT only while somebody is missing, less and less often: those who are there tell it.
    """
    pause = me.settings.poll
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
        enough = (wanted | ready.keys()) <= there if wanted else len(there) >= me.settings.expected > 0
        if not first or enough or me.net.now() >= limit or instance.over.is_set():
            return ready
        me.notices.news.clear()
        await me.until(me.notices.news, min(limit, look_at))


def _limit(me: Participant, instance: Instance) -> float:
    """Until when others are waited for."""
    return (instance.gathered or instance.entered) + me.settings.ready_timeout


def _complete(me: Participant, instance: Instance, wanted: set[PeerId], found: Ready) -> bool:
    """Whether everybody wanted has said so, and nobody is waited for: then the DHT need not be asked."""
    ready = _merged(found, me.notices.about(instance))
    there = {peer for peer, record in ready.items() if record["role"] != NOT_YET}
    return bool(wanted) and (wanted | ready.keys()) <= there


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
        if fields["base"] == instance.base:
            ready[peer] = fields
    return ready
