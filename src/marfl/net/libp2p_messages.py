"""Messages and questions between real peers, whatever opens the streams: the part of `Net` that is not the DHT."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from marfl.byte_kinds import ByteKind
from marfl.errors import DeadlineExceeded, PeerGone, WireError
from marfl.net.base import BAD_QUESTION, NOT_ENTITLED, Handler, Judge, Ledger, Parcel, PeerId, Tag, Verdict
from marfl.net.libp2p_frames import Code, Frame, Opening, Refusal, Wire
from marfl.net.libp2p_inbox import Inbox
from marfl.net.libp2p_settings import Limits
from marfl.net.libp2p_streams import Dialer, Doorkeeper, Listener, Streams

NO_ANSWER = b"\xc1refused"  # 0xc1 is never valid msgpack: no handler can answer this


def everybody(_: PeerId) -> bool:
    """The rule of an open run."""
    return True


class Messenger:
    """One peer's messages: `send`, `recv`, `call`, `serve` and `forget` of `marfl.net.base.Net`."""

    def __init__(self, me: PeerId, streams: Streams, allow: Callable[[PeerId], bool], limits: Limits) -> None:
        self.me = me
        self.allow = allow  # whose streams and records are taken
        self.sent = Ledger()
        self.received = Ledger()
        self.refused: Counter[str] = Counter()  # what was not taken, by reason
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[str, tuple[Handler, ByteKind]] = {}
        self._inbox = Inbox(limits)
        self._limits = limits
        self._judge: Judge | None = None
        self._judged_anew = asyncio.Event()
        door = Doorkeeper(lambda peer: self.allow(peer), self.refused)
        self._dialer = Dialer(streams, limits)
        self._listener = Listener(streams, self._take, door, limits)

    def listen(self, path: Path) -> None:
        """Take streams at this socket."""
        self._listener.start(path)

    async def hang_up(self) -> None:
        """End the streams; whoever still waits for an answer is told when the daemon ends."""
        self._dialer.close()
        await self._listener.close()

    # --- time ---

    def now(self) -> float:
        return self._loop.time()

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self.now()))

    # --- messages ---

    async def send(
        self, to: PeerId, tag: Tag, parcel: Parcel, *, kind: ByteKind = ByteKind.PAYLOAD, deadline: float
    ) -> None:
        async with _before(deadline, f"{to} has not taken {tag.channel}"):
            if to == self.me:
                await self._note(tag, parcel, kind)
            else:
                await self._dialer.ask(to, Frame(Code.SEND, tag, parcel), self._meter(kind, parcel))

    async def recv(self, source: PeerId, tag: Tag, *, deadline: float) -> Parcel:
        return await self._inbox.recv(source, tag, deadline)

    async def call(
        self, to: PeerId, channel: str, parcel: Parcel, *, kind: ByteKind = ByteKind.CONTROL, deadline: float
    ) -> Parcel:
        async with _before(deadline, f"no {channel} answered by {to}"):
            if to == self.me:
                self.sent.add(kind, parcel)
                answer = await self._answer(to, channel, parcel)
            else:
                answer = await self._dialer.ask(to, Frame(Code.CALL, channel, parcel), self._meter(kind, parcel))
        self.received.add(answer.tag, answer.parcel)
        if answer.parcel.header == NO_ANSWER:
            raise PeerGone(f"{to} does not answer {channel}")
        return answer.parcel

    def serve(self, channel: str, handler: Handler, *, kind: ByteKind = ByteKind.CONTROL) -> None:
        self._handlers[channel] = (handler, kind)

    def admit(self, judge: Judge | None) -> None:
        self._judge = judge
        self._judged_anew.set()
        self._judged_anew = asyncio.Event()

    def forget(self, iteration: int) -> None:
        self._inbox.forget(iteration)

    # --- how they are metered and taken ---

    def _meter(self, kind: ByteKind, parcel: Parcel) -> Callable[[int], None]:
        """Counts what has really left: all of it, or as much as went out before the other side was gone."""
        return lambda left: self.sent.add(kind, Parcel(parcel.header, memoryview(parcel.payload)[:left]))

    async def _take(self, source: PeerId, wire: Wire, opening: Opening) -> Frame:
        """Read the rest of what another peer has begun to say, into room that it may take up; what to answer."""
        if opening.code not in (Code.SEND, Code.CALL):
            raise Refusal("garbage")
        message = opening.tag if opening.code is Code.SEND else None
        kept = message is None or await self._judged(source, message) is Verdict.TAKE
        await self._inbox.reserve(source, opening.size, message)
        if message is None:
            try:
                return await self._answer(source, opening.tag, await wire.read_parcel(opening))
            finally:
                self._inbox.release(source, opening.size)
        try:
            parcel = await wire.read_parcel(opening)
        except BaseException:
            self._inbox.release(source, opening.size)
            raise
        if kept:
            self._deliver(source, message, parcel)
        else:
            self.received.add(message.kind, parcel)
            self._inbox.release(source, opening.size)
        return Frame(Code.TAKEN, None)

    async def _judged(self, source: PeerId, tag: Tag) -> Verdict:
        """Whether to keep a message, or `Refusal`. While nobody can tell it stays unread, and so its sender waits."""
        try:
            async with asyncio.timeout(self._limits.patience):
                while self._judge is not None:
                    verdict = self._judge(source, tag)
                    if verdict is Verdict.REFUSE:
                        raise Refusal(NOT_ENTITLED)
                    if verdict is not Verdict.LATER:
                        return verdict
                    await self._judged_anew.wait()
        except TimeoutError:
            raise Refusal(NOT_ENTITLED) from None
        return Verdict.TAKE

    async def _note(self, tag: Tag, parcel: Parcel, kind: ByteKind) -> None:
        """A message to myself: a daemon cannot dial itself."""
        self.sent.add(kind, parcel)
        try:
            await self._inbox.reserve(self.me, parcel.size, tag)
        except Refusal as refusal:
            raise PeerGone(f"{self.me} refused: {refusal.reason}") from None
        self._deliver(self.me, tag, parcel)

    def _deliver(self, source: PeerId, tag: Tag, parcel: Parcel) -> None:
        if self._inbox.deliver(source, tag, parcel):
            self.received.add(tag.kind, parcel)

    async def _answer(self, source: PeerId, channel: str, parcel: Parcel) -> Frame:
        self.received.add(ByteKind.CONTROL, parcel)
        handler, kind = self._handlers.get(channel, (_refuse, ByteKind.CONTROL))
        try:
            answer = await handler(source, parcel)
        except WireError:
            self.refused[BAD_QUESTION] += 1
            answer = Parcel(NO_ANSWER)
        self.sent.add(kind, answer)
        return Frame(Code.ANSWER, kind, answer)


@contextlib.asynccontextmanager
async def _before(deadline: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} in time") from None


async def _refuse(_: PeerId, __: Parcel) -> Parcel:
    return Parcel(NO_ANSWER)
