"""A participant that writes down the iteration it is about to vote in, and can say which layer of a model differs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from marfl.errors import InputError, NetError, WireError
from marfl.net.base import Net, Parcel, PeerId
from marfl.peer.votes import VoteLog
from marfl.protocol.instance import Instance
from marfl.protocol.participant import Advance, Participant
from marfl.protocol.readiness import LEFT, announce_ready
from marfl.protocol.roster import Record
from marfl.protocol.settings import Settings
from marfl.protocol.sync import Caught
from marfl.state import Layout, Slot, Snapshot

LAYOUT_CHANNEL = "layout"
T = TypeVar("T")


class Voter(Participant):
    """A peer that, killed at any moment, never votes twice in one decision (`Participant.barred`)."""

    def __init__(
        self,
        net: Net,
        settings: Settings,
        index: int,
        layout: Layout,
        state: Snapshot,
        record: Record,
        advance: Advance,
    ) -> None:
        super().__init__(net, settings, index, layout.hash, state, record, advance)
        self.revoked = ""  # why this peer must not vote any more
        self._noted = b""
        self.votes = VoteLog()  # of a key that no other process ever has
        self.incarnation = self.votes.incarnation
        serve_layout(net, layout)

    def vote_with(self, votes: VoteLog) -> None:
        """Keep the votes in this log from now on; it must know of those that the others count."""
        self.votes, self.incarnation = votes, votes.incarnation
        self._check_log(self.record)

    def install(self, caught: Caught) -> None:
        """Replace my state by a verified one, unless it shows that somebody has voted in my name."""
        assert caught.record is not None
        self._check_log(caught.record)
        super().install(caught)

    def decide(self, instance: Instance, record: Record, holders: tuple[PeerId, ...]) -> None:
        """Take over a decision; a vote of mine in it that neither this process nor the log knows of is another's."""
        super().decide(instance, record, holders)
        roster = record.roster
        if roster is None or instance.record is not record or self.barred == record.iteration:
            return
        counted = any(elector.id == self.net.me for elector in roster.voters)
        if counted and (record.lineage, roster.attempt) not in self.acked.get(roster.base, ()):
            self.revoked = (
                f"run {self.settings.run!r}: the others count a vote of this peer in iteration {record.iteration} that "
                f"it has not cast: its vote log{self.votes.place} is a restored backup, or another process uses the "
                "key; go on with a new key"
            )

    def _check_log(self, record: Record) -> None:
        """`InputError` when the others count a vote of mine that my log does not know: it is written before each."""
        voters = {elector.id for elector in record.electors}
        if record.roster is None or self.net.me not in voters or record.iteration <= self.votes.highest:
            return
        self.revoked = (
            f"run {self.settings.run!r}: the others count a vote of this peer in iteration {record.iteration}, but its "
            f"vote log{self.votes.place} ends with iteration {self.votes.highest}: the log was lost or is a restored "
            "backup, or another process uses the key; go on with a new key"
        )
        raise InputError(self.revoked)

    def enter(self) -> Instance:
        """Every vote is cast in an iteration that was entered; it is on the disk before that, or nothing is entered."""
        if self.revoked:
            raise InputError(self.revoked)
        iteration, base = self.record.iteration + 1, self.record.hash
        if base != self._noted:
            self.votes.note(iteration, base)
            self.barred = iteration if self.votes.cast_before(base) else -1
            self._noted = base
        return super().enter()

    async def compute(self, work: Callable[[], T]) -> T:
        """In a thread: a large model's masks take a second, in which nobody would get an answer."""
        return await asyncio.to_thread(work)

    async def announce_training(self) -> None:
        """The next iteration waits for me for a while."""
        await announce_ready(self, "training")

    async def farewell(self) -> None:
        """Nobody need wait for me. What I am part of is brought to its end; then the next ones must know it, too."""
        if self.revoked:
            return  # another process may speak in this name: it has not left
        self.leaving.set()  # whoever may not know what was decided is told now
        await self.rest(self.settings.poll)  # a notice that is under way must not arrive after the goodbye
        said = b""
        while said != self.record.hash:
            said = self.record.hash
            await asyncio.gather(announce_ready(self, LEFT), self.rest())
            while self.exchanging:
                await self.net.sleep_until(self.net.now() + self.settings.poll)

    @property
    def exchanging(self) -> bool:
        """Whether an attempt that others count on is under way here."""
        instance = self.instance
        task = instance.task if instance and not instance.over.is_set() else None
        return task is not None and not task.done()


def serve_layout(net: Net, layout: Layout) -> None:
    """Tell whoever asks which model this peer trains."""
    answer = Parcel(encode_layout(layout))

    async def tell(_: PeerId, __: Parcel) -> Parcel:
        return answer

    net.serve(LAYOUT_CHANNEL, tell)


def encode_layout(layout: Layout) -> bytes:
    data: bytes = msgpack.packb([[slot.name, list(slot.shape), slot.dtype] for slot in layout.slots])
    return data


def decode_layout(data: bytes) -> Layout:
    """The layout in these bytes, or `WireError`."""
    try:
        rows = msgpack.unpackb(data, raw=False, max_ext_len=0)
        slots, offset = [], 0
        for name, shape, dtype in rows:
            slot = Slot(str(name), tuple(int(size) for size in shape), str(dtype), offset)
            slots.append(slot)
            offset += slot.length
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a layout: {type(error).__name__}") from None
    return Layout(tuple(slots))


async def refuse_other_layouts(net: Net, run: str, mine: Layout, others: dict[PeerId, dict[str, Any]]) -> None:
    """`InputError` naming the layer when most of a run's peers train another model than mine."""
    strangers = [peer for peer, record in others.items() if record["layout"] != mine.hash]
    if not strangers or 2 * len(strangers) <= len(others):
        return
    for peer in strangers:
        try:
            answer = await net.call(peer, LAYOUT_CHANNEL, Parcel(b""), deadline=net.now() + 5.0)
            difference = mine.difference(decode_layout(answer.header))
        except (NetError, WireError):
            continue  # gone, or not one of ours: the next one may say more
        if difference:
            raise InputError(f"run {run!r}: its peers train another model: {difference}")
