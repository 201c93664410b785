"""Moshpit-KD among peers that run the protocol: the groups of a sealed roster meet, and everybody learns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from torch import Tensor

from marfl.learn import LocalResult
from marfl.protocol.meetings import Meetings

Study: TypeAlias = Callable[[LocalResult, list[Tensor], int], Awaitable[LocalResult]]  # my state, models, the round


async def learn_in_groups(meetings: Meetings, before: LocalResult, study: Study) -> LocalResult:
    """One round of distillation per meeting, from the models that arrived; a round alone changes nothing."""
    result = before
    for round in range(meetings.rounds):
        if meetings.mates(round):
            models = await meetings.show(round, result.theta)
            result = await study(result, models, round)
    return result
