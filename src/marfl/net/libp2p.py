"""`Net` over real sockets: libp2p streams for messages, a Kademlia DHT for records. The only file that uses hivemind.

Each net starts one `p2pd` daemon (go-libp2p), which encrypts every stream and vouches for who is at its other end, and
one `DHTNode` beside it, in this process. The daemon ends with its net, and also when this process is killed.

From hivemind 1.1.12 we use the daemon's life cycle (`P2P`), its control messages and the DHT. Streams are opened and
taken by ourselves, over the daemon's own protocol, so that payloads go straight from and into their buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from marfl.errors import DeadlineExceeded, InputError, NetError, PeerGone
from marfl.net.base import PeerId
from marfl.net.libp2p_control import Requests, ask_daemon, read_message
from marfl.net.libp2p_frames import Hangup
from marfl.net.libp2p_guard import guarded
from marfl.net.libp2p_identity import Identity, load_identity, new_identity, save_identity
from marfl.net.libp2p_messages import Messenger, everybody
from marfl.net.libp2p_records import Place, Validator, open_record, sign_record
from marfl.net.libp2p_settings import Libp2pSettings, check_free

PROTOCOL = "/marfl/1"
LISTED = 1800.0  # seconds for which nodes of the DHT keep a record at least, though it may expire before
LOOK_UP = 10  # a DHT operation is given up after so many unanswered requests in a row
STOP_TIMEOUT = 3.0
PING_AGAIN = 0.1  # seconds before a peer that did not answer is asked again
GONE = "this peer's own p2p daemon is gone"

use_hivemind_log_handler("nowhere")  # whoever uses us decides where log messages go


class Libp2pNet(Messenger):
    """A real peer's door to the network: implements `marfl.net.base.Net`. Use `create`, or `start` and `close`."""

    def __init__(self, identity: Identity, settings: Libp2pSettings, allow: Callable[[PeerId], bool]) -> None:
        self._daemon = Daemon(settings)
        super().__init__(identity.peer, self._daemon, allow, settings.limits)
        self._identity = identity
        self._settings = settings
        self._scratch = Path(tempfile.mkdtemp(prefix="marfl-"))  # for this user alone: its socket is our front door
        self._records = Records(self, identity, settings)

    @classmethod
    @contextlib.asynccontextmanager
    async def create(
        cls, settings: Libp2pSettings | None = None, *, allow: Callable[[PeerId], bool] = everybody
    ) -> AsyncIterator[Self]:
        """A net that is closed at the end of the `async with` block."""
        net = await cls.start(settings, allow=allow)
        try:
            yield net
        finally:
            await net.close()

    @classmethod
    async def start(
        cls, settings: Libp2pSettings | None = None, *, allow: Callable[[PeerId], bool] = everybody
    ) -> Self:
        """Start the daemon, listen, join the swarm. `InputError` for wrong settings, `PeerGone` if nobody answers."""
        settings = settings or Libp2pSettings()
        check_addresses(settings)
        identity = load_identity(settings.identity) if settings.identity else new_identity()
        net = cls(identity, settings, allow)
        try:
            await net._begin()
        except BaseException:
            await net.close()
            raise
        return net

    async def _begin(self) -> None:
        key, door = self._scratch / "key", self._scratch / "streams"
        save_identity(key, self._identity)
        try:
            await self._daemon.start(key)
        finally:
            key.unlink()
        self.listen(door)
        await self._daemon.hand_streams_to(door)
        await self._records.start(self._daemon.p2p)
        failed = await self.join(self._settings.join)
        if failed and len(failed) == len(self._settings.join):
            raise PeerGone("join: nobody answers; " + "; ".join(f"{where}: {why}" for where, why in failed.items()))

    async def close(self) -> None:
        """End the streams, the DHT node and the daemon, and remove what they left on disk."""
        await self.hang_up()
        await self._daemon.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def daemon_pid(self) -> int:
        return self._daemon.pid

    async def addresses(self) -> tuple[str, ...]:
        """Where others reach this peer: what they put in `join`."""
        return await self._daemon.addresses()

    async def join(self, addresses: Iterable[str]) -> dict[str, str]:
        """Get to know the swarm through these peers, also later, when all others are lost. Who failed, and why."""
        places = list(addresses)
        failures = await asyncio.gather(*map(self._enter, places))
        return {place: why for place, why in zip(places, failures, strict=True) if why}

    async def _enter(self, address: str) -> str:
        """Enter the swarm through one peer; empty, or why not."""
        try:
            async with asyncio.timeout(self._settings.join_timeout):
                await self._records.meet(await self._daemon.connect(_address(address, "join", peer=True)))
        except TimeoutError:
            return f"no answer in {self._settings.join_timeout:g} seconds"
        except NetError as error:
            return str(error)
        return ""

    async def announce(self, key: str, value: bytes, *, ttl: float) -> None:
        self._daemon.check()
        await self._records.announce(key, value, ttl)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        self._daemon.check()
        return await self._records.lookup(key)


class _P2P(P2P):  # type: ignore[misc]
    """hivemind's, with a guarded daemon."""

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        return guarded(P2P._make_process_args(*args, **kwargs))


class Daemon:
    """The p2pd process of one net, and what this process asks of it."""

    def __init__(self, settings: Libp2pSettings) -> None:
        self._settings = settings
        self._requests = Requests()
        self.p2p: Any = None

    async def start(self, key: Path) -> None:
        options = self._settings
        try:
            self.p2p = await _P2P.create(
                host_maddrs=options.listen,
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
                raise InputError(f"listen: {', '.join(options.listen)} cannot be used: {_brief(error)}") from None
            raise NetError(f"the p2p daemon did not start: {_brief(error)}") from None
        self.p2p._client.control._pending_calls = self._requests

    async def stop(self) -> None:
        if self.p2p is None:
            return
        control, child = self.p2p._client.control, self.p2p._child
        self._requests.end()
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

    @property
    def pid(self) -> int:
        return int(self.p2p._child.pid)

    def check(self) -> None:
        """Without its daemon this peer would be alone in its DHT, and take itself for the whole swarm."""
        if not self.p2p.is_alive or self.p2p._child.returncode is not None:
            raise NetError(GONE)

    async def addresses(self) -> tuple[str, ...]:
        _, response = await self._ask(type=p2pd_pb2.Request.IDENTIFY)
        me = PeerID(response.identify.id).to_base58()
        return tuple(f"{Multiaddr(address)}/p2p/{me}" for address in response.identify.addrs)

    async def connect(self, address: Multiaddr) -> PeerID:
        """Make the daemon dial an address, or `PeerGone`."""
        peer = PeerID.from_base58(address["p2p"])
        where = address.decapsulate(Multiaddr(f"/p2p/{address['p2p']}")).to_bytes()
        request = p2pd_pb2.ConnectRequest(peer=peer.to_bytes(), addrs=[where])
        try:
            await self._ask(type=p2pd_pb2.Request.CONNECT, connect=request)
        except P2PDaemonError as error:
            raise PeerGone(_brief(error)) from None
        return peer

    async def hand_streams_to(self, path: Path) -> None:
        """From now on the daemon passes streams that others open on to the socket at this path."""
        address = Multiaddr(f"/unix{path}").to_bytes()
        handler = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[PROTOCOL], balanced=False)
        await self._ask(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)

    async def open_stream(self, peer: PeerId) -> socket.socket:
        """A stream to this peer, or `PeerGone`."""
        try:
            request = p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[PROTOCOL])
        except ValueError:
            raise PeerGone(f"{peer!r:.80} is not a peer's id") from None
        try:
            stream, _ = await self._ask(keep=True, type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request)
        except P2PDaemonError as error:
            raise PeerGone(f"{peer} cannot be reached: {_brief(error)}") from None
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


class Records:
    """This peer's node of the DHT, where it keeps its own records and finds those of others."""

    def __init__(self, net: Messenger, identity: Identity, settings: Libp2pSettings) -> None:
        self._net = net
        self._identity = identity
        self._limits = settings.limits
        self._timeout = settings.dht_timeout
        self._validator = Validator(lambda peer: net.allow(peer), net.refused, settings.limits)
        self._listed = 0.0  # until when the DHT keeps my last record
        self._node: Any = None

    async def start(self, p2p: Any) -> None:
        # no caches: a look-up must see what was announced before it began
        self._node = await DHTNode.create(
            p2p,
            record_validator=self._validator,
            wait_timeout=self._timeout,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )
        self._node.protocol.storage.maxsize = self._limits.records
        # hivemind drops a whole answer for one bad record in it: then anybody could hide all the others
        self._node.protocol._validate_dictionary = self._validator.sift

    async def meet(self, peer: PeerID) -> None:
        """Enter the DHT through this peer; the caller sets a deadline."""
        try:
            while await self._node.protocol.call_ping(peer, validate=True) is None:
                await asyncio.sleep(PING_AGAIN)
        except ValidationError as error:
            raise PeerGone(_brief(error)) from None
        await self._node.find_nearest_nodes([self._node.node_id])

    async def announce(self, key: str, value: bytes, ttl: float) -> None:
        if len(value) > self._limits.record:
            raise InputError(f"announce: {key} has {len(value)} bytes; at most {self._limits.record} are allowed")
        if not 0 < ttl <= self._limits.record_ttl:
            raise InputError(f"announce: {key} lives {ttl} seconds; more than 0 and at most {self._limits.record_ttl}")
        self._net.sent.control += len(key) + len(value)
        expires = time.time() + ttl
        if not (await self._store(key, value, expires) or await self._store(key, value, expires)):
            raise NetError(f"no node of the DHT takes {key}")

    async def _store(self, key: str, value: bytes, expires: float) -> bool:
        """Store my record under a key; whether the DHT now has it."""
        # of two records the DHT keeps the one listed for longer: that must be the later one, also if its life is short
        self._listed = max(expires, time.time() + LISTED, self._listed + 0.001)
        me, listed = self._net.me, self._listed
        record = sign_record(self._identity, Place(DHTID.generate(key).to_bytes(), me, listed), value, expires)
        self._net.sent.dht += 1
        async with self._patience(key):
            stored = await self._node.store(key, record, listed, subkey=me)
        if not stored:  # so said the last of several nodes: have the others got it, or one of when my clock was ahead?
            mine = (await self._get(key)).get(me)
            stored = mine is not None and mine.expiration_time == listed
            self._listed = max(listed, mine.expiration_time if mine else 0.0)
        return bool(stored)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        values = {}
        name, now = DHTID.generate(key).to_bytes(), time.time()
        for owner, item in (await self._get(key)).items():
            value, expires = open_record(Place(name, owner, item.expiration_time), item.value)
            if expires > now and self._net.allow(owner):  # it may have been allowed once, but not now
                values[owner] = value
        self._net.received.control += len(key) + sum(map(len, values.values()))
        return values

    async def _get(self, key: str) -> Mapping[PeerId, Any]:
        self._net.sent.dht += 1
        async with self._patience(key):
            found = await self._node.get(key, latest=True)
        return found.value if found else {}

    @contextlib.asynccontextmanager
    async def _patience(self, key: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(LOOK_UP * self._timeout):
                yield
        except TimeoutError:
            raise DeadlineExceeded(f"the DHT does not answer for {key}") from None


def check_addresses(settings: Libp2pSettings) -> None:
    """`InputError` for an address that is malformed, or that somebody else listens on."""
    for name in ("announce", "trusted_relays"):
        for text in getattr(settings, name):
            _address(text, name)
    for text in settings.join:
        _address(text, "join", peer=True)
    for text in settings.listen:
        _address(text, "listen")
        check_free(text)


def _address(text: str, setting: str, *, peer: bool = False) -> Multiaddr:
    example = "/ip4/192.0.2.1/tcp/4001" + ("/p2p/12D3Koo…" if peer else "")
    try:
        address = Multiaddr(text)
    except (MultiaddrError, ValueError) as error:
        raise InputError(f"{setting}: {text!r} is not a multiaddress such as {example}: {_brief(error)}") from None
    if peer and "p2p" not in [protocol.name for protocol in address.protocols()]:
        raise InputError(f"{setting}: {text!r} does not name its peer; write it as {example}")
    return address


def _brief(error: Exception) -> str:
    """What went wrong, on one line."""
    return " ".join(str(error).split())[:300]
