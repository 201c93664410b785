"""Whom a peer asks for a state: one donor after the other, and the next one beside it where a donor keeps silent."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from marfl.errors import NetError, WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.chain import Anchor
from marfl.protocol.pace import Pace
from marfl.protocol.speaker import Speaker

Answer: TypeAlias = Parcel | NetError | WireError  # what a donor gives, or why there is nothing


class Question(NamedTuple):
    """What a donor is asked: a state that is proven from the first of these lists of anchors."""

    donor: PeerId
    proofs: list[list[Anchor]]  # the others are for when the first one convinces nobody
    request: Parcel

    @property
    def last(self) -> bool:
        """Whether nothing else can be asked of this donor."""
        return len(self.proofs) == 1


class Donors:
    """Donors in their order, and the questions that are under way.

    Who shows no sign of life for half of the usual time is not waited for alone, as in an exchange. A question may be
    lost, and of many donors one may have a bad link: neither may make the asker late for the next iteration.
    """

    def __init__(self, talk: Speaker, pace: Pace, order: Iterable[PeerId]) -> None:
        self._talk, self._net, self._pace = talk, talk.net, pace
        self._rest = deque(order)
        self._asking: dict[asyncio.Task[Answer], tuple[Question, float]] = {}

    @property
    def due(self) -> PeerId | None:
        """Who is to be asked now; None while one that was asked may still answer, and when all were asked."""
        if not self._rest or self._net.now() < self._hope_ends:
            return None
        return self._rest.popleft()

    def ask(self, question: Question) -> None:
        """Ask one of them."""
        work = self._answer_to(question)
        self._asking[asyncio.create_task(work)] = question, self._net.now()

    async def answers(self) -> list[tuple[Question, float, Answer]] | None:
        """What was answered, to questions asked when; nothing when another is to be asked; None when all is over."""
        if not self._asking:
            return [] if self._rest else None
        waits: set[asyncio.Task[Any]] = {*self._asking}
        clock = asyncio.create_task(self._net.sleep_until(self._hope_ends)) if self._rest else None
        try:
            await asyncio.wait(waits | {clock} if clock else waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if clock:
                clock.cancel()
        done = [task for task in self._asking if task.done()]
        return [(*self._asking.pop(task), task.result()) for task in done]

    def stop(self) -> None:
        """Nothing more is needed of them."""
        for task in self._asking:
            task.cancel()

    @property
    def silent(self) -> list[PeerId]:
        """Who was asked, and has shown nothing for so long that the next one was to be asked."""
        asked = self._asking.values()
        return [question.donor for question, begun in asked if self._net.now() >= self._hope_for(question, begun)]

    @property
    def _hope_ends(self) -> float:
        """Until when those who were asked are waited for alone."""
        return max((self._hope_for(*asked) for asked in self._asking.values()), default=-math.inf)

    def _hope_for(self, question: Question, begun: float) -> float:
        """The same of one of them: while bytes of it come."""
        return max(begun, self._net.last_heard(question.donor)) + self._pace.usual / 2

    async def _answer_to(self, question: Question) -> Answer:
        try:
            return await self._talk.call_long(question.donor, "sync", question.request, self._pace)
        except (NetError, WireError) as error:
            return error
