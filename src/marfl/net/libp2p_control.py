"""How a process talks to its p2pd daemon: protobuf messages, each with its length before it as a varint."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from marfl.net.libp2p_frames import Hangup

MAX_CONTROL = 2**20  # bytes of one message from our own daemon


class Requests(dict[Any, "asyncio.Future[bytes]"]):
    """The DHT's requests under way, for hivemind's client, which has two faults.

    It takes an answer to a request that was given up a moment ago for an error, and its reader ends, and with it the
    DHT: so such a request is not among these. And it waits for ever for a daemon that is gone: so these can be ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ended = False

    def __contains__(self, request: object) -> bool:
        answer = self.get(request)
        return answer is not None and not answer.done()

    def __setitem__(self, request: Any, answer: asyncio.Future[bytes]) -> None:
        super().__setitem__(request, answer)
        if self._ended:
            answer.set_exception(Hangup())

    def end(self) -> None:
        self._ended = True
        for answer in self.values():
            if not answer.done():
                answer.set_exception(Hangup())


async def ask_daemon(path: str, request: Any, response: Any) -> socket.socket:
    """Ask the daemon that listens at this path; the connection, once the response is filled. `Hangup` if it is gone."""
    loop, data = asyncio.get_running_loop(), request.SerializeToString()
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, path)
        await loop.sock_sendall(connection, _varint(len(data)) + data)
        await read_message(connection, response)
    except OSError:
        connection.close()
        raise Hangup from None
    except BaseException:
        connection.close()
        raise
    return connection


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


async def read_message(connection: socket.socket, message: Any) -> None:
    """One protobuf message with its length before it, and not a byte more: what follows belongs to the stream."""
    size = shift = 0
    more = True
    while more:
        byte = (await _read_exactly(connection, 1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        more = byte > 0x7F
        if size > MAX_CONTROL:
            raise Hangup
    message.ParseFromString(await _read_exactly(connection, size))


async def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data, loop = b"", asyncio.get_running_loop()
    while len(data) < size:
        try:
            piece = await loop.sock_recv(connection, size - len(data))
        except OSError:
            raise Hangup from None
        if not piece:
            raise Hangup
        data += piece
    return data
