"""A server of a few pages on loopback. It answers GET for the paths that it knows, and reads nothing else of a request.

Nothing of a request reaches the program: no query, no body, no header but the host's name, which must be this machine's
own, so that no page from elsewhere can read it through a browser (DNS rebinding).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import NamedTuple

from marfl.errors import InputError

HOST = "127.0.0.1"
PATIENCE = 5.0  # seconds for a request
OWN_NAMES = ("127.0.0.1", "localhost")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Page(NamedTuple):
    """What lies at a path."""

    kind: str  # MIME
    read: Callable[[], bytes]


def read_page() -> bytes:
    """The live page: it asks for `data` beside itself."""
    return files("marfl.live").joinpath("page.html").read_bytes()


async def serve_pages(
    port: int, pages: Mapping[str, Page], flag: str = "--port", browsers: str | None = None
) -> asyncio.Server:
    """Serve these paths on this port of the loopback interface (0: a free one).

    A browser that asks for `/` is shown the path `browsers`, if that is given; programs get what lies at `/`.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_answer(request, pages, browsers))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # whoever asked is gone, or asked nonsense
        finally:
            writer.close()

    try:
        return await asyncio.start_server(answer, HOST, port)
    except OSError as error:
        raise InputError(f"{flag} {port}: cannot be used ({error.strerror})") from None


def _answer(request: bytes, pages: Mapping[str, Page], browsers: str | None) -> bytes:
    lines = request.decode("latin-1").split("\r\n")
    method, path, *_ = [*lines[0].split(" "), "", ""]
    heads = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    host = heads.get("host", "").rsplit(":", 1)[0]
    path = path.split("?", 1)[0]
    if browsers and path == "/" and "text/html" in heads.get("accept", ""):
        path = browsers
    page = pages.get(path) if method == "GET" and host in (*OWN_NAMES, "") else None
    if page is None:
        return _response("404 Not Found", "application/json", b"{}")
    return _response("200 OK", page.kind, page.read())


def _response(status: str, kind: str, body: bytes) -> bytes:
    heads = (
        f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close",
        "Cache-Control: no-store", "X-Content-Type-Options: nosniff", f"Content-Security-Policy: {POLICY}",
    )  # fmt: skip
    return "\r\n".join([*heads, "", ""]).encode() + body
