"""The p2pd daemon (go-libp2p) of one net: its process, what this process asks of it, and its addresses.

The daemon encrypts every stream and vouches for who is at its other end. hivemind 1.1.12 starts it (`P2P`) and asks it
what the DHT needs. Streams are opened and taken by ourselves, over the daemon's own control protocol: protobuf
messages, each with its length before it as a varint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from marfl.errors import InputError, NetError, PeerGone, Unreachable
from marfl.net.base import PeerId
from marfl.net.libp2p.cleanup import Scratch, guarded
from marfl.net.libp2p.connection import Libp2pSettings, check_free, is_loopback
from marfl.net.libp2p.frames import Hangup
from marfl.net.libp2p.identity import Identity, save_identity

PROTOCOL = "/marfl/1"
STOP_TIMEOUT = 3.0
ASK_AGAIN = 0.1  # seconds before a daemon that has just died is asked again
GONE = "this peer's own p2p daemon is gone"
MAX_CONTROL = 2**20  # bytes of one message from our own daemon

_PLACE = re.compile(r"/(ip4|ip6)/([^/]+)/(tcp|udp)/(\d+)")
log = logging.getLogger("marfl.peer.net")


# --- addresses ---


def check_addresses(settings: Libp2pSettings) -> None:
    """`InputError` for an address that is malformed, or that somebody else listens on.

    A peer that joins others elsewhere, and listens where they cannot call it, is warned.
    """
    for text in settings.announce:
        parse_address(text, "announce")
    for name in ("trusted_relays", "join"):
        for text in getattr(settings, name):
            parse_address(text, name, peer=True)
    for text in settings.listen:
        parse_address(text, "listen")
        check_free(text)
    away = [address for address in settings.join if not is_loopback(address)]
    if away and all(map(is_loopback, settings.listen)) and not settings.auto_relay:
        log.warning("this peer listens on loopback only: peers on other machines, such as %s, cannot call it; "
                    "listen on /ip4/0.0.0.0/tcp/0", away[0])  # fmt: skip


def with_ports(listen: Iterable[str], addresses: Iterable[str]) -> tuple[str, ...]:
    """Where to listen, with the ports that a daemon has taken where any would do."""
    taken = [match.groups() for where in addresses if (match := _PLACE.match(where)) and "p2p-circuit" not in where]
    given = []
    for text in listen:
        match = _PLACE.match(text)
        if match and match[4] == "0":
            family, host, kind, _ = match.groups()
            same = [place for place in taken if (place[0], place[2]) == (family, kind)]
            place = next((place for place in same if place[1] == host), same[0] if same else None)
            text = text.replace(match[0], f"/{family}/{host}/{kind}/{place[3]}", 1) if place else text
        given.append(text)
    return tuple(given)


def parse_address(text: str, setting: str, *, peer: bool = False) -> Multiaddr:
    """A multiaddress, of a certain peer if so asked; `InputError` names the setting that it was written in."""
    example = "/ip4/192.0.2.1/tcp/4001" + ("/p2p/12D3Koo…" if peer else "")
    try:
        address = Multiaddr(text)
    except (MultiaddrError, ValueError) as error:
        raise InputError(f"{setting}: {text!r} is not a multiaddress such as {example}: {one_line(error)}") from None
    if peer and "p2p" not in [protocol.name for protocol in address.protocols()]:
        raise InputError(f"{setting}: {text!r} does not name its peer; write it as {example}")
    return address


def one_line(error: Exception) -> str:
    """What went wrong, on one line."""
    return " ".join(str(error).split())[:300]


# --- the process ---


def _p2p_in(scratch: Path) -> Any:
    """hivemind's `P2P`, with a guarded daemon, and with its sockets in this directory."""

    class Guarded(P2P):  # type: ignore[misc]
        _UNIX_SOCKET_PREFIX = f"/unix{scratch}/"

        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            return guarded(P2P._make_process_args(*args, **kwargs))

    return Guarded


class P2pDaemon:
    """The p2pd process of one net, and what this process asks of it."""

    def __init__(self, identity: Identity, settings: Libp2pSettings) -> None:
        self.identity = identity
        self._settings = settings
        self._scratch = Scratch()
        self._kind = _p2p_in(self.scratch)
        self.listen = settings.listen  # with the ports that were taken, once it runs
        self.p2p: Any = None
        self.requests = Requests()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it does not come back
        self._runs = asyncio.Event()  # or is lost: there is nothing to wait for

    @property
    def scratch(self) -> Path:
        """Where its sockets are, for this user alone: one of them is our front door."""
        return self._scratch.path

    @property
    def door(self) -> Path:
        """The socket at which this process takes the streams that others open."""
        return self.scratch / "streams"

    async def start(self) -> None:
        """Start the process; from now on it passes streams that others open on to the door."""
        key = self.scratch / "key"
        save_identity(key, self.identity)
        try:
            await self._start_process(key)
        finally:
            key.unlink()
        self.requests = Requests()
        self.p2p._client.control._pending_calls = self.requests
        self.listen = with_ports(self.listen, await self.addresses())
        handler = p2pd_pb2.StreamHandlerRequest(
            addr=Multiaddr(f"/unix{self.door}").to_bytes(), proto=[PROTOCOL], balanced=False
        )
        await self._ask(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)

    async def _start_process(self, key: Path) -> None:
        options = self._settings
        try:
            self.p2p = await self._kind.create(
                host_maddrs=self.listen,
                announce_maddrs=options.announce or None,
                identity_path=str(key),
                check_if_identity_free=False,  # it would start a second daemon only to look
                nat_port_map=options.nat_port_map,
                auto_nat=options.auto_nat,
                force_reachability=None if options.reachability == "auto" else options.reachability,
                use_relay=options.relay,
                use_auto_relay=options.auto_relay,
                trusted_relays=options.trusted_relays or None,
                startup_timeout=options.start_timeout,
            )
        except P2PDaemonError as error:
            if "listen" in str(error):
                raise InputError(f"listen: {', '.join(self.listen)} cannot be used: {one_line(error)}") from None
            raise NetError(f"the p2p daemon did not start: {one_line(error)}") from None

    def ready(self) -> None:
        """All is set up: whoever waited for the daemon may go on."""
        self._runs.set()

    async def ended(self) -> str:
        """Wait until the daemon's process is gone; how it went."""
        status = await self.p2p._child.wait()
        self._runs.clear()
        self.requests.end()
        return f"signal {-status}" if status < 0 else f"exit code {status}"

    def give_up(self, why: str) -> None:
        """It does not come back: whoever waits for it is told so."""
        if not self.lost.done():
            self.lost.set_result(f"{GONE}: {why}")
        self._runs.set()

    async def stop(self) -> None:
        """End the process; one that hangs is killed."""
        if self.p2p is None:
            return
        control, child = self.p2p._client.control, self.p2p._child
        self.requests.end()
        tasks = [control._read_task, control._write_task, self.p2p._reader_task, *control._handler_tasks.values()]
        for task in tasks:
            task.cancel()
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await self.p2p.shutdown()
        except TimeoutError:  # it hangs
            child.kill()
            await child.wait()
        await asyncio.gather(*tasks, return_exceptions=True)
        Path(self.p2p.daemon_listen_maddr["unix"]).unlink(missing_ok=True)  # it stays behind when a daemon was killed

    def clean_up(self) -> None:
        """Remove what it left on disk."""
        self._scratch.remove()

    @property
    def pid(self) -> int:
        return int(self.p2p._child.pid)

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Without its daemon this peer would be alone in its DHT, and take itself for the whole swarm."""
        daemon = self.p2p
        self._check(daemon)
        yield
        self._check(daemon)  # it may have died meanwhile

    def _check(self, daemon: Any) -> None:
        if self.lost.done():
            raise NetError(self.lost.result())
        if daemon is not self.p2p or not self._runs.is_set() or daemon._child.returncode is not None:
            raise NetError(GONE)

    async def addresses(self) -> tuple[str, ...]:
        _, response = await self._ask(type=p2pd_pb2.Request.IDENTIFY)
        me = PeerID(response.identify.id).to_base58()
        return tuple(f"{Multiaddr(address)}/p2p/{me}" for address in response.identify.addrs)

    async def seen(self, peer: PeerId) -> str:
        """Where the daemon sees this peer, as it is connected now; empty if it is not."""
        _, response = await self._ask(type=p2pd_pb2.Request.LIST_PEERS)
        places = [str(Multiaddr(where)) for each in response.peers if PeerID(each.id).to_base58() == peer
                  for where in each.addrs]  # fmt: skip
        return next(iter(places), "")

    async def connect(self, address: Multiaddr) -> PeerID:
        """Make the daemon dial an address, or `PeerGone`."""
        peer = PeerID.from_base58(address["p2p"])
        where = address.decapsulate(Multiaddr(f"/p2p/{address['p2p']}")).to_bytes()
        request = p2pd_pb2.ConnectRequest(peer=peer.to_bytes(), addrs=[where])
        try:
            await self._ask(type=p2pd_pb2.Request.CONNECT, connect=request)
        except P2PDaemonError as error:
            raise PeerGone(one_line(error)) from None
        return peer

    async def open_stream(self, peer: PeerId) -> socket.socket:
        """A stream to this peer, or `PeerGone`. While the daemon is being started again, this waits."""
        try:
            request = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[PROTOCOL])
        except ValueError:
            raise PeerGone(f"{peer!r:.80} is not a peer's id") from None
        while True:
            await self._runs.wait()
            if self.lost.done():
                raise PeerGone(f"{peer} cannot be reached: {self.lost.result()}")
            try:
                stream, _ = await self._ask(keep=True, type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request)
            except P2PDaemonError as error:
                raise Unreachable(f"{peer} cannot be reached: {one_line(error)}") from None
            except NetError:  # it has just died
                await asyncio.sleep(ASK_AGAIN)
            else:
                return stream

    async def whose(self, stream: socket.socket) -> PeerId:
        """Who opened a stream that the daemon passed on."""
        info = p2pd_pb2.StreamInfo()
        await read_message(stream, info)
        return str(PeerID(info.peer).to_base58())

    async def _ask(self, *, keep: bool = False, **request: Any) -> tuple[socket.socket, Any]:
        """Ask the daemon something: the connection, which has become a stream if it is kept, and the answer."""
        response = p2pd_pb2.Response()
        path = self.p2p.daemon_listen_maddr["unix"]
        try:
            connection = await ask_daemon(path, p2pd_pb2.Request(**request), response)
        except Hangup:
            raise NetError(GONE) from None
        failed = response.type == p2pd_pb2.Response.ERROR
        if failed or not keep:
            connection.close()
        if failed:
            raise P2PDaemonError(response.error.msg)
        return connection, response


# --- control messages ---


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
