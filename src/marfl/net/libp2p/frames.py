"""What goes over a stream: frames of a fixed prefix, a tag, a header and a payload; one question, one answer, again.

    prefix   magic (4), code (1), and the lengths of what follows: tag (2), header (4), payload (8), big-endian
    tag      msgpack; SEND [channel, iteration, attempt, round, part] and the piece's number after the first one,
             CALL channel, ANSWER kind, REFUSED reason
    header   the parcel's header
    payload  the parcel's raw bytes, in chunks straight from and into the buffer they live in

SEND is answered by TAKEN, CALL by ANSWER, anything by REFUSED, after which the stream ends. All lengths are checked
before anything is allocated.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgpack
import numpy as np

from marfl.byte_kinds import ByteKind
from marfl.errors import WireError
from marfl.net.base import NOT_ENTITLED, Parcel, Tag
from marfl.net.libp2p.connection import MIB, Limits

T = TypeVar("T")
PREFIX = struct.Struct(">4sBHIQ")
MAGIC = b"marf"
MAX_TAG = 1024
READ_AHEAD = 4096
LINGER = 0.25  # seconds for which a refused peer is heard out
MAX_NUMBER = 2**63 - 1
SOCKET_BUFFER = MIB  # between this process and its daemon: a chunk or more is on its way while the next one is written
NOT_ALLOWED = "not allowed"  # by the rule of who may speak
REASONS = (
    "bad signature", "garbage", NOT_ALLOWED, NOT_ENTITLED, "over cap", "oversized", "too many requests",
    "too many streams", "too slow", "truncated",
)  # fmt: skip


class Code(IntEnum):
    """What a frame is."""

    SEND = 1  # here is a message
    CALL = 2  # here is a question
    TAKEN = 3  # your message has arrived whole
    ANSWER = 4  # to your question
    REFUSED = 5  # neither: the tag says why


class Frame(NamedTuple):
    """One question or answer, whole."""

    code: Code
    tag: Any  # by code: Tag, channel, None, kind, reason
    parcel: Parcel = Parcel(b"")


class Refusal(WireError):
    """What the other side sent is not taken, for one of the `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Hangup(Exception):
    """The other side has closed the stream, or its process has ended."""


def nothing() -> None:
    """Nobody asks."""


class Wire:
    """One stream: a socket to this process's own daemon, which speaks to the other side.

    A paced wire gives up on another side that stalls. The others are used under a deadline of their own.
    """

    def __init__(self, sock: socket.socket, limits: Limits, *, paced: bool = False) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self.left: int | None = None  # payload bytes of the last frame that are out; None: not even its header is
        self._socket = sock
        self._limits = limits
        self._paced = paced
        self._loop = asyncio.get_running_loop()
        self._ahead = b""  # read, but not yet asked for: a small frame comes whole in one system call
        self.hears: Callable[[], None] = nothing  # told whenever bytes have come

    def close(self) -> None:
        self._socket.close()

    @property
    def has_news(self) -> bool:
        """Whether the other side has said something, or has closed the stream."""
        if self._ahead:
            return True
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def write(self, frame: Frame) -> None:
        """Write a frame, straight from its payload; stops early when the other side answers before the end."""
        parcel, chunk = frame.parcel, self._limits.chunk
        tag = _encode_tag(frame.tag)
        payload = memoryview(parcel.payload).cast("B")
        prefix = PREFIX.pack(MAGIC, frame.code, len(tag), len(parcel.header), payload.nbytes)
        self.left, start, before = None, self._loop.time(), len(parcel.header)
        await self._within(self._loop.sock_sendall(self._socket, prefix + tag + parcel.header), start, before)
        self.left = 0
        while self.left < payload.nbytes and not (self.left and self.has_news):
            step = payload[self.left : self.left + chunk]
            await self._within(self._loop.sock_sendall(self._socket, step), start, before + self.left + step.nbytes)
            self.left += step.nbytes

    async def read_opening(self, idle: float | None = None) -> Opening:
        """The next frame up to its tag. `Hangup` when the stream ends first, `Refusal` when it is not one of ours."""
        if not self._ahead:
            try:
                async with asyncio.timeout(idle):
                    self._ahead = await self._loop.sock_recv(self._socket, READ_AHEAD)
            except OSError:  # a time-out is one, too
                raise Hangup from None
        if not self._ahead:
            raise Hangup
        self.hears()
        magic, code, tag_size, header_size, payload_size = PREFIX.unpack(await self._take(PREFIX.size))
        if magic != MAGIC or code not in tuple(Code) or tag_size > MAX_TAG:
            raise Refusal("garbage")
        if header_size > self._limits.header or payload_size > self._limits.message:
            raise Refusal("oversized")
        return Opening(Code(code), _decode_tag(Code(code), await self._take(tag_size)), header_size, payload_size)

    async def read_parcel(self, opening: Opening) -> Parcel:
        """The rest of a frame."""
        header = await self._take(opening.header_size)
        payload = new_buffer(opening.payload_size)
        await self._fill(payload)
        return Parcel(header, payload)

    async def read(self) -> Frame:
        """The next frame, whole."""
        opening = await self.read_opening()
        return Frame(opening.code, opening.tag, await self.read_parcel(opening))

    async def dismiss(self, reason: str) -> None:
        """Tell the other side why it is refused, and hear it out for a moment so that the reason gets through."""
        waste = bytearray(self._limits.chunk)
        with contextlib.suppress(OSError, Hangup, Refusal):  # it may have gone already
            async with asyncio.timeout(LINGER):
                await self.write(Frame(Code.REFUSED, reason))
                while await self._loop.sock_recv_into(self._socket, waste):
                    pass

    async def _take(self, size: int) -> bytes:
        view = new_buffer(size)
        await self._fill(view)
        return bytes(view)

    async def _fill(self, view: memoryview) -> None:
        """Read exactly this many bytes, straight into the buffer."""
        done = min(view.nbytes, len(self._ahead))
        view[:done], self._ahead = self._ahead[:done], self._ahead[done:]
        start = self._loop.time()
        while done < view.nbytes:
            step = view[done : done + self._limits.chunk]
            try:
                got = await self._within(self._loop.sock_recv_into(self._socket, step), start, done)
            except Hangup:
                got = 0
            if not got:
                raise Refusal("truncated")
            self.hears()
            done += got

    async def _within(self, work: Awaitable[T], start: float, progress: int) -> T:
        """Do one step of a frame, before the time that so many bytes may take."""
        limit = start + self._limits.grace + progress / self._limits.rate if self._paced else None
        try:
            async with asyncio.timeout_at(limit):
                return await work
        except TimeoutError:
            raise Refusal("too slow") from None
        except OSError:
            raise Hangup from None


class Opening(NamedTuple):
    """A frame whose header and payload have not been read."""

    code: Code
    tag: Any
    header_size: int
    payload_size: int

    @property
    def size(self) -> int:
        return self.header_size + self.payload_size


def new_buffer(size: int) -> memoryview:
    """Memory that is filled from the wire. Untouched pages cost nothing: announcing a size does not use it up."""
    try:
        return np.empty(size, dtype=np.uint8).data
    except MemoryError:
        raise Refusal("oversized") from None


def _encode_tag(tag: Any) -> bytes:
    if tag is None:
        return b""
    whole = isinstance(tag, Tag) and not tag.piece  # mostly a message is in one piece: its number is left out
    data: bytes = msgpack.packb(tag[:-1] if whole else tag, use_bin_type=True)
    return data


def _decode_tag(code: Code, data: bytes) -> Any:
    if code is Code.TAKEN:
        return None
    try:
        tag = msgpack.unpackb(data, raw=False, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        raise Refusal("garbage") from None
    if code is Code.SEND:
        return _message_tag(tag)
    allowed = {Code.ANSWER: tuple(ByteKind), Code.REFUSED: REASONS}.get(code)
    if not isinstance(tag, str) or (allowed is not None and tag not in allowed):
        raise Refusal("garbage")
    return tag


def _message_tag(fields: Any) -> Tag:
    most = len(Tag._fields)
    if not isinstance(fields, list) or len(fields) not in (most - 1, most) or not isinstance(fields[0], str):
        raise Refusal("garbage")
    if not all(type(number) is int and 0 <= number <= MAX_NUMBER for number in fields[1:]):
        raise Refusal("garbage")
    return Tag(*fields)
