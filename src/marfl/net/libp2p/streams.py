"""Streams to other peers and from them: one question at a time on each, kept open for the next one.

Opening a stream costs more than a small message does (`benchmarks/streams.py` measures it), so both sides keep it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from marfl.errors import PeerGone, Unreachable
from marfl.net.base import PeerId, Refusals
from marfl.net.libp2p.admission import NotAdmitted
from marfl.net.libp2p.connection import Limits
from marfl.net.libp2p.frames import NOT_ALLOWED, Code, Frame, Hangup, Opening, Refusal, Wire

Take: TypeAlias = Callable[[PeerId, Wire, Opening], Awaitable[Frame]]  # read the rest of a frame; what to answer
Sent: TypeAlias = Callable[[int], None]  # hears that a header left, and how many payload bytes

ANSWERED_BY = {Code.SEND: Code.TAKEN, Code.CALL: Code.ANSWER}
BACKLOG = 4096  # a peer that hangs takes streams and does not answer: it must not look dead
MANY = 4096  # peers whose requests are counted before those that are quiet are dropped
OUT_OF_FILES = 0.05  # seconds before another stream is accepted when this process has no descriptor left


class Streams(Protocol):
    """Whatever connects this process to other peers."""

    async def open_stream(self, peer: PeerId) -> socket.socket:
        """A stream to this peer. Raises `PeerGone`."""

    async def whose(self, stream: socket.socket) -> PeerId:
        """Who has opened a stream to us: authenticated. Raises `Hangup`."""


class Dialer:
    """Asks other peers, over streams that it opens and keeps."""

    def __init__(self, streams: Streams, limits: Limits) -> None:
        self._streams = streams
        self._limits = limits
        self._idle: dict[Wire, PeerId] = {}  # the longest unused first
        self.hears: Callable[[PeerId], None] = lambda _: None  # told whenever bytes of somebody's answer have come
        # more would be refused there; half, because streams that were closed here may still count there
        self._turns: dict[PeerId, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(limits.peer_streams // 2))

    async def ask(self, to: PeerId, question: Frame, sent: Sent) -> Frame:
        """The answer to one frame, or `PeerGone`. The caller sets the deadline.

        A kept stream may have died without a sign: then the question is asked once more, on a new one. Whoever answers
        must bear a question that comes twice, as on any network.
        """
        async with self._turns[to]:
            for wire in self._kept(to):
                with contextlib.suppress(Hangup):
                    return await self._exchange(to, wire, question, sent)
            wire = Wire(await self._streams.open_stream(to), self._limits)
            wire.hears = partial(self.hears, to)
            try:
                return await self._exchange(to, wire, question, sent)
            except Hangup:
                raise Unreachable(f"{to} vanished") from None

    def close(self) -> None:
        """End the streams that are kept; the others end with the daemon."""
        for wire in self._idle:
            wire.close()
        self._idle.clear()

    def _kept(self, to: PeerId) -> Iterator[Wire]:
        """Streams to this peer that seem to live, the last used first."""
        for wire in [wire for wire, peer in reversed(self._idle.items()) if peer == to]:
            if self._idle.pop(wire, None) is None:
                continue  # another question has taken it
            if wire.has_news:
                wire.close()
            else:
                yield wire

    async def _exchange(self, to: PeerId, wire: Wire, question: Frame, sent: Sent) -> Frame:
        """One question, one answer; the stream is kept only if all went well."""
        answer = None
        try:
            answer = await self._converse(wire, question, sent)
        except Refusal as refusal:
            raise PeerGone(f"{to} sent an answer that is {refusal.reason}") from None
        finally:
            if answer is None or answer.code is Code.REFUSED:
                wire.close()
            else:
                self._keep(to, wire)
        if answer.code is Code.REFUSED:
            raise (NotAdmitted if answer.tag == NOT_ALLOWED else PeerGone)(f"{to} refused: {answer.tag}")
        return answer

    async def _converse(self, wire: Wire, question: Frame, sent: Sent) -> Frame:
        try:
            with contextlib.suppress(Hangup):  # the reason of a refusal may be here before the stream breaks
                await wire.write(question)
        finally:
            if wire.left is not None:
                sent(wire.left)
        answer = await wire.read()
        whole = wire.left == memoryview(question.parcel.payload).nbytes
        if answer.code is not Code.REFUSED and not (whole and answer.code is ANSWERED_BY[question.code]):
            raise Refusal("garbage")
        return answer

    def _keep(self, to: PeerId, wire: Wire) -> None:
        self._idle[wire] = to
        if len(self._idle) > self._limits.idle_streams:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.close()


class Doorkeeper(NamedTuple):
    """Who may come in, and a count of what was refused."""

    allow: Callable[[PeerId], bool]
    refused: Refusals


class RequestPace:
    """How many messages and questions each peer may still send: a bucket that fills by `requests` a second."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._spent: dict[PeerId, tuple[float, float]] = {}  # (how full, when) the bucket of what was taken is

    def take(self, peer: PeerId, now: float) -> None:
        """One more from this peer, or `Refusal`."""
        level, then = self._spent.get(peer, (0.0, now))
        level = max(0.0, level - (now - then) * self._requests) + 1
        if level > 2 * self._requests:
            raise Refusal("too many requests")
        self._spent[peer] = (level, now)

    def tidy(self, now: float) -> None:
        """Drop the buckets that have drained, when there are many: strangers who come and go must not fill memory."""
        if len(self._spent) > MANY:
            full = {peer: (level, then) for peer, (level, then) in self._spent.items()
                    if level > (now - then) * self._requests}  # fmt: skip
            self._spent = full


class Listener:
    """Takes the streams that others open: one task for each, one question after the other."""

    def __init__(self, streams: Streams, take: Take, door: Doorkeeper, limits: Limits) -> None:
        self._origin = streams
        self._take = take
        self._door = door
        self._limits = limits
        self._socket = socket.socket(socket.AF_UNIX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: Counter[PeerId] = Counter()  # streams by who opened them
        self._pace = RequestPace(limits.requests)

    def start(self, path: Path) -> None:
        """Listen where the daemon hands over streams."""
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._socket.listen(BACKLOG)
        self._run(self._accept())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):  # a bug, here or in a handler: never hidden
            context = {"message": "a stream's task failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError:
                self._door.refused["too many streams"] += 1
                await asyncio.sleep(OUT_OF_FILES)
                continue
            if len(self._tasks) > self._limits.streams:
                self._door.refused["too many streams"] += 1
                sock.close()
            else:
                self._run(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """Answer one stream's questions until it ends, or breaks the rules."""
        wire = Wire(sock, self._limits, paced=True)
        try:
            peer = await self._origin.whose(sock)
            with self._admitted(peer):
                idle = self._limits.grace  # a stream is opened to ask something, and only then kept
                while True:
                    opening = await wire.read_opening(idle)
                    self._pace.take(peer, asyncio.get_running_loop().time())
                    await wire.write(await self._take(peer, wire, opening))
                    idle = self._limits.idle_seconds
        except Refusal as refusal:
            self._door.refused.note(refusal.reason, peer)
            await wire.dismiss(refusal.reason)
        except Hangup:
            pass  # which is everybody's right
        finally:
            wire.close()

    @contextlib.contextmanager
    def _admitted(self, peer: PeerId) -> Iterator[None]:
        if not self._door.allow(peer):
            raise Refusal(NOT_ALLOWED)
        if self._open[peer] >= self._limits.peer_streams:
            raise Refusal("too many streams")
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
                self._pace.tidy(asyncio.get_running_loop().time())
