"""A JSON page on loopback that says what a peer is doing. It only ever answers GET /."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from marfl.errors import InputError
from marfl.runs.files import plain

PATIENCE = 5.0  # seconds for a request
HOST = "127.0.0.1"


async def serve_status(port: int, page: Callable[[], Mapping[str, Any]]) -> asyncio.Server:
    """Answer requests on this port of the loopback interface (0: a free one) until the server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].split(b" ")
                good = request[:2] in ([b"GET", b"/"], [b"GET", b"/status"])
                body = json.dumps(plain(page())).encode() if good else b"{}"
                head = f"HTTP/1.1 {'200 OK' if good else '404 Not Found'}\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # whoever asked is gone, or asked nonsense
        finally:
            writer.close()

    try:
        return await asyncio.start_server(answer, HOST, port)
    except OSError as error:
        raise InputError(f"--status-port {port}: cannot be used ({error.strerror})") from None
