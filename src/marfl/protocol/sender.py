"""What a peer sends in an attempt: slices to ranks, by agreed deadlines. Long slices go in pieces.

A slice of up to `Roster.piece` bytes is one message. A longer one is cut, from its own start, in pieces of that size:
they leave in order, and the next one leaves while the receipt of the one before is still on its way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from marfl.errors import NetError, PeerGone
from marfl.net.base import Net, Tag
from marfl.plan.grid import Plan
from marfl.protocol.roster import Roster
from marfl.protocol.wire import tensor_parcel

WINDOW = 2  # pieces of one slice under way


@dataclass
class Outgoing:
    """A slice on its way to one peer."""

    rank: int
    tag: Tag  # of its first piece
    pieces: deque[tuple[int, Tensor]]  # those that have not left, by number
    untaken: int  # pieces that the peer has not taken yet
    begun: float


class Sender:
    """One member of a roster: its tags and deadlines, and the slices that it sends."""

    def __init__(self, net: Net, roster: Roster, plan: Plan, phase_timeout: float, meetings: int = 0) -> None:
        self.net = net
        self.roster = roster
        self.plan = plan
        self.rank = roster.ranks[net.me]
        self._part = roster.part
        self.started = net.now() + meetings * phase_timeout  # each meeting before the averaging takes a phase
        self.phase_timeout = phase_timeout
        self.gone: set[int] = set()  # ranks that refused a connection
        self.unsent: set[int] = set()  # ranks that have not taken my slice yet

    def deadline(self, phase: float) -> float:
        """The agreed end of a phase: an offset from the roster's receipt, so one late group does not push the next.

        Phases of the averaging count from 0; the meetings before it have negative numbers.
        """
        return self.started + (phase + 1) * self.phase_timeout

    def tag(self, channel: str, round: int, piece: int = 0) -> Tag:
        """A tag of this roster and no other: two views of who takes part never mix."""
        return Tag(channel, self.roster.iteration, self.roster.attempt, round, self._part, piece)

    def cut(self, count: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        """Where so many values are cut for their way: [start, stop) of each piece. Nothing has no pieces."""
        each = self.roster.piece // dtype.itemsize
        return [(start, min(start + each, count)) for start in range(0, count, each)]

    @asynccontextmanager
    async def sending(
        self, phase: int, channel: str, round: int, slices: Iterable[tuple[int, Tensor]]
    ) -> AsyncIterator[None]:
        """Send these (rank, slice) pairs while the body runs. A peer that is gone is remembered, not an error."""
        # Everybody starts with another peer (the ranks after its own first), so that no downlink is everybody's first.
        turn = sorted(slices, key=lambda item: (item[0] - self.rank) % self.plan.peers)
        tag, deadline = self.tag(channel, round), self.deadline(phase)
        leaving = [self._outgoing(rank, tag, value) for rank, value in turn if value.numel()]
        lanes = [self._send(out, deadline) for out in leaving for _ in range(min(WINDOW, out.untaken))]
        tasks = [asyncio.create_task(lane) for lane in lanes]
        try:
            yield
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()

    def _outgoing(self, rank: int, tag: Tag, value: Tensor) -> Outgoing:
        cuts = self.cut(value.numel(), value.dtype)
        pieces = deque((number, value[start:stop]) for number, (start, stop) in enumerate(cuts))
        return Outgoing(rank, tag, pieces, len(cuts), self.net.now())

    async def _send(self, out: Outgoing, deadline: float) -> None:
        """Send pieces of a slice, one after the other, until none is left."""
        to = self.roster.members[out.rank].id
        self.unsent.add(out.rank)
        try:
            while out.pieces:
                number, value = out.pieces.popleft()
                tag = out.tag._replace(piece=number)
                parcel = tensor_parcel(value, self.roster.digest, self.roster.layout)
                await self.net.send(to, tag, parcel, kind=tag.kind, deadline=deadline)
                out.untaken -= 1
        except PeerGone:
            self.gone.add(out.rank)
            out.pieces.clear()
            self.unsent.discard(out.rank)
        except NetError:
            out.pieces.clear()  # it stays in `unsent`: the receiver asks again, or the attempt fails and says why
        except asyncio.CancelledError:
            if self.net.now() - out.begun < self.phase_timeout / 2:
                self.unsent.discard(out.rank)  # the attempt ended first: this link is not to blame
            raise
        else:
            if not out.untaken:
                self.unsent.discard(out.rank)
