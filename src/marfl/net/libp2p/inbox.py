"""Messages that arrived before anybody asked for them, and how much of them a sender may leave here."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

from marfl.errors import BrokenPromise, DeadlineExceeded
from marfl.net.base import Parcel, PeerId, Tag
from marfl.net.libp2p.connection import Limits
from marfl.net.libp2p.frames import Refusal

OVERHEAD = 1024  # bytes that a message costs besides its own: empty ones are not free either


class Inbox:
    """Messages by sender and tag: the first to arrive counts, each is handed out once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # by iteration, then (sender, tag): the message, whoever waits for it, or None once it was handed out
        self._boxes: dict[int, dict[tuple[PeerId, Tag], Parcel | asyncio.Future[Parcel] | None]] = defaultdict(dict)
        self._held: Counter[PeerId] = Counter()
        self._change = asyncio.Event()

    async def reserve(self, source: PeerId, size: int, tag: Tag | None = None) -> None:
        """Make room for a message or question of this size. A sender over its memory waits, then is refused."""
        try:
            async with asyncio.timeout(self._limits.patience):
                while not (self._has_room(source, size) or self._awaited(source, tag)):
                    await self._change.wait()
        except TimeoutError:
            raise Refusal("over cap") from None
        self._held[source] += size + OVERHEAD

    def release(self, source: PeerId, size: int) -> None:
        """Give back the room of a message or question that is done with."""
        self._held[source] -= size + OVERHEAD
        if not self._held[source]:
            del self._held[source]
        self._stir()

    def deliver(self, source: PeerId, tag: Tag, parcel: Parcel) -> bool:
        """Take over a message for which room was made; whether it is the first of its name."""
        box = self._boxes[tag.iteration]
        held = box.get((source, tag))
        if isinstance(held, asyncio.Future) and not held.done():
            held.set_result(parcel)
            box[source, tag] = None
            self.release(source, parcel.size)
            return True
        if isinstance(held, asyncio.Future) or (source, tag) not in box:
            box[source, tag] = parcel  # its room is given back when it is received or forgotten
            return True
        self.release(source, parcel.size)
        return False

    async def recv(self, source: PeerId, tag: Tag, deadline: float) -> Parcel:
        """The message of this name, once; `DeadlineExceeded` when it does not come."""
        box = self._boxes[tag.iteration]
        held = box.get((source, tag))
        if isinstance(held, tuple):
            box[source, tag] = None
            self.release(source, held.size)
            return held
        if (source, tag) in box:
            raise BrokenPromise(f"{tag} from {source} was received before, or is awaited twice")
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Parcel] = loop.create_future()
        box[source, tag] = waiting
        self._stir()  # its sender may be waiting for room
        # the timer ends the future and not the task: a message that came just in time is never lost
        timer = loop.call_at(deadline, _expire, waiting, f"no {tag.channel} from {source} in time")
        try:
            return await waiting
        finally:
            timer.cancel()
            if box.get((source, tag)) is waiting:
                del box[source, tag]  # it may be asked for again
            del waiting  # its error names this frame, and every frame above: they would keep each other for ever

    def forget(self, iteration: int) -> None:
        for old in [key for key in self._boxes if key <= iteration]:
            for (source, _), held in self._boxes.pop(old).items():
                if isinstance(held, tuple):
                    self.release(source, held.size)

    def _has_room(self, source: PeerId, size: int) -> bool:
        mine, total = self._held[source], self._held.total()
        # beside nothing one message always fits, so that the overhead does not shut out the largest ones
        fits_sender = not mine or mine + size + OVERHEAD <= self._limits.sender_memory
        return fits_sender and (not total or total + size + OVERHEAD <= self._limits.memory)

    def _awaited(self, source: PeerId, tag: Tag | None) -> bool:
        return tag is not None and isinstance(self._boxes.get(tag.iteration, {}).get((source, tag)), asyncio.Future)

    def _stir(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _expire(waiting: asyncio.Future[Parcel], why: str) -> None:
    if not waiting.done():
        waiting.set_exception(DeadlineExceeded(why))
