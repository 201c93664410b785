"""Receives a message of an exchange without replicas (ring, star): only the peer that owes it can send it."""

from __future__ import annotations

import torch
from torch import Tensor

from marfl.errors import NetError, WireError
from marfl.net.base import Tag
from marfl.protocol.attempt import Attempt, Stuck
from marfl.protocol.fixed_point import check_range
from marfl.protocol.tensors import slice_from, tensor_from


async def receive(attempt: Attempt, phase: int, tag: Tag, rank: int, count: int) -> Tensor:
    """This peer's slice, or `Stuck` when the phase is over: nobody else holds these bits, so nobody else is asked."""
    value = torch.empty(count, dtype=attempt.dtype)
    for number, (start, stop) in enumerate(attempt.cut(count, value.dtype)):
        value[start:stop] = await _piece(attempt, phase, tag._replace(piece=number), rank, stop - start)
    return value


async def _piece(attempt: Attempt, phase: int, tag: Tag, rank: int, count: int) -> Tensor:
    source, roster = attempt.roster.members[rank].id, attempt.roster
    attempt.waiting.add(rank)
    try:
        parcel = await attempt.net.recv(source, tag, deadline=attempt.deadline(phase))
        if roster.wire == "fp32":
            value = tensor_from(parcel, digest=roster.digest, layout=roster.layout, count=count)
        else:
            value = slice_from(parcel, digest=roster.digest, layout=roster.layout, count=count, dtype=attempt.dtype)
            check_range(value, len(roster.members))
    except NetError:
        attempt.overdue.add(rank)
        raise Stuck(f"nothing from {source}, and nobody else has it") from None
    except WireError as error:
        raise attempt.caught(rank, error) from None
    attempt.waiting.discard(rank)
    return value
