"""Receives a message of an exchange without replicas (ring, star): only the peer that owes it can send it."""

from __future__ import annotations

import torch
from torch import Tensor

from marfl.errors import NetError, WireError
from marfl.net.base import Tag
from marfl.protocol.attempt import Attempt, Stuck, Want


async def receive(attempt: Attempt, phase: int, tag: Tag, rank: int, count: int) -> Tensor:
    """This peer's slice, or `Stuck` when the phase is over: nobody else holds these bits, so nobody else is asked."""
    value = torch.empty(count, dtype=attempt.dtype)
    done = attempt.done(tag.channel, tag.round)
    for number, (start, stop) in enumerate(attempt.cut(count, done)):
        value[start:stop] = await _piece(attempt, phase, tag._replace(piece=number), Want(done, rank, start, stop))
    return value


async def _piece(attempt: Attempt, phase: int, tag: Tag, want: Want) -> Tensor:
    rank = want.rank
    source = attempt.roster.members[rank].id
    attempt.waiting.add(rank)
    try:
        parcel = await attempt.owed(phase, tag, rank)
        value = attempt.opened(parcel, want)
    except NetError:
        attempt.overdue.add(rank)
        raise Stuck(f"nothing from {source}, and nobody else has it") from None
    except WireError as error:
        raise attempt.caught(rank, error) from None
    attempt.waiting.discard(rank)
    return value
