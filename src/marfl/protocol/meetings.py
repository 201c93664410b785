"""What the groups of a sealed roster do before they average: show each other a vector, round by round.

Moshpit-KD shows models (arXiv 2512.05234, section 3). Nothing here is needed for the sum: whoever's vector does not
arrive before the round's agreed deadline is simply not seen, and the averaging stays all or nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import torch
from torch import Tensor

from marfl.byte_kinds import ByteKind
from marfl.errors import NetError, WireError
from marfl.net.base import PeerId, Tag
from marfl.protocol.attempt import BAD_DATA, MODELS, Attempt
from marfl.protocol.tensors import tensor_from

Prepare: TypeAlias = Callable[["Meetings"], Awaitable[Tensor]]  # the groups of a roster: the update to bring to it
CHANNEL = ByteKind.DISTILL.value  # also the name of its bytes in the ledger


class Meetings:
    """The groups of one attempt, as one member sees them. They take one phase per round, before all others."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.rounds = len(attempt.plan.rounds)
        self.missed: list[tuple[int, PeerId]] = []  # (round, who) of vectors that did not arrive or were no good

    def mates(self, round: int) -> tuple[int, ...]:
        """The others in my group, by rank in the order of the sum; whoever brings no update shows nothing."""
        attempt = self._attempt
        seat = attempt.plan.seats(attempt.rank)[round]
        members = attempt.roster.members
        return tuple(rank for rank in seat.members if rank != attempt.rank and members[rank].weight) if seat else ()

    async def show(self, round: int, vector: Tensor) -> list[Tensor]:
        """Show my vector to my group; theirs, in the order of the sum, without those that did not arrive in time."""
        attempt, mates = self._attempt, self.mates(round)
        phase = round - self.rounds  # `Attempt.started` is when the averaging begins
        seen = []
        async with attempt.sending(phase, CHANNEL, round, [(rank, vector) for rank in mates]):
            for rank in mates:
                attempt.waiting.add(rank)
                theirs = await self._see(round, phase, rank, vector.numel())
                attempt.waiting.discard(rank)
                if theirs is None:
                    self.missed.append((round, attempt.roster.members[rank].id))
                else:
                    seen.append(theirs)
        return seen

    async def _see(self, round: int, phase: int, rank: int, count: int) -> Tensor | None:
        """A member's whole vector, which comes in pieces where it is long; None unless all of it is here in time."""
        seen = torch.empty(count)
        for number, (start, stop) in enumerate(self._attempt.cut(count, 0, MODELS)):
            piece = await self._piece(self._attempt.tag(CHANNEL, round, number), phase, rank, stop - start)
            if piece is None:
                return None
            seen[start:stop] = piece
        return seen

    async def _piece(self, tag: Tag, phase: int, rank: int, count: int) -> Tensor | None:
        attempt = self._attempt
        source, limit = attempt.roster.members[rank].id, attempt.deadline(phase)
        step = attempt.pace.usual / 8
        while True:
            try:
                parcel = await attempt.net.recv(source, tag, deadline=min(limit, attempt.net.now() + step))
                return tensor_from(parcel, digest=attempt.roster.digest, layout=attempt.roster.layout, count=count)
            except WireError:
                attempt.net.refused.note(BAD_DATA, source)
                return None  # not a vector to learn from
            except NetError:
                if rank in attempt.gone or attempt.net.now() >= limit:
                    return None
