"""What makes a participant a real peer: it writes down the iteration that it is about to vote in, computes in a thread,
and can say which layer of a model differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
from torch import Tensor

from marfl.errors import InputError, NetError, WireError
from marfl.net.base import Net, Parcel, PeerId
from marfl.peer.votes import VoteLog
from marfl.protocol.instance import Instance
from marfl.protocol.participant import Participant
from marfl.protocol.roster import Record
from marfl.protocol.settings import Settings
from marfl.protocol.standing import Advance, Diary, Standing
from marfl.state import Layout, Slot, Snapshot

LAYOUT_CHANNEL = "layout"


class VoteDiary(Diary):
    """Has a peer that is killed at any moment never vote twice in one decision: it writes down where it votes."""

    def __init__(self, net: Net, run: str, votes: VoteLog) -> None:
        self.net, self.run, self.votes = net, run, votes
        self.incarnation = votes.incarnation
        self._noted = b""

    def check(self, me: PeerId, record: Record) -> None:
        """`InputError` when the others count a vote of mine that my log does not know: it is written before each."""
        voters = {elector.id for elector in record.electors}
        if record.roster is None or me not in voters or record.iteration <= self.votes.highest:
            return
        self.revoked = (
            f"run {self.run!r}: the others count a vote of this peer in iteration {record.iteration}, but its "
            f"vote log{self.votes.place} ends with iteration {self.votes.highest}: the log was lost or is a restored "
            "backup, or another process uses the key; go on with a new key"
        )
        raise InputError(self.revoked)

    def entering(self, standing: Standing) -> None:
        """Every vote is cast in an iteration that was entered; it is on the disk before that, or nothing is entered."""
        if self.revoked:
            raise InputError(self.revoked)
        iteration, base = standing.record.iteration + 1, standing.record.hash
        if base != self._noted:
            self.votes.note(iteration, base)
            standing.barred = iteration if self.votes.cast_before(base) else -1
            self._noted = base

    def decided(self, standing: Standing, instance: Instance, before: Record) -> None:
        """A vote of mine in a decision that neither this process nor the log knows of is another's."""
        record, roster = standing.record, standing.record.roster
        if roster is None or standing.barred == record.iteration:
            return
        counted = any(elector.id == self.net.me for elector in roster.voters)
        if counted and (record.lineage, roster.attempt) not in standing.acked.get(roster.base, ()):
            self.revoked = (
                f"run {self.run!r}: the others count a vote of this peer in iteration {record.iteration} that "
                f"it has not cast: its vote log{self.votes.place} is a restored backup, or another process uses the "
                "key; go on with a new key"
            )


async def in_a_thread(work: Callable[[], Tensor]) -> Tensor:
    """A large model's masks take a second, in which nobody would get an answer."""
    return await asyncio.to_thread(work)


def real_participant(
    net: Net, settings: Settings, index: int, layout: Layout, state: Snapshot, record: Record, advance: Advance
) -> Participant:
    """A participant of a real run: it computes in a thread, and can say which layer of a model differs."""
    made = Participant(net, settings, index, layout.hash, state, record, advance)
    made.talk.compute = in_a_thread
    made.standing.keep(VoteDiary(net, settings.run, VoteLog()))  # of a key that no other process ever has
    serve_layout(net, layout)
    return made


def keep_votes(participant: Participant, votes: VoteLog) -> None:
    """Keep a participant's votes in this log from now on; it must know of those that the others count."""
    diary = VoteDiary(participant.net, participant.settings.run, votes)
    participant.standing.keep(diary)
    diary.check(participant.net.me, participant.record)


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
