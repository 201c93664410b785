"""`Net` over real sockets: libp2p streams for messages, a Kademlia DHT for records. The only file that uses hivemind.

Each net starts one `p2pd` daemon (go-libp2p), which encrypts every stream and vouches for who is at its other end, and
one `DHTNode` beside it, in this process. The daemon ends with its net, and also when this process is killed. One that
dies before is started again, under the same name and at the same addresses.

From hivemind 1.1.12 we use the daemon's life cycle (`P2P`), its control messages and the DHT. Streams are opened and
taken by ourselves, over the daemon's own protocol, so that payloads go straight from and into their buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from hivemind.dht import protocol as hivemind_protocol
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
from marfl.net.libp2p_scratch import Scratch
from marfl.net.libp2p_settings import Libp2pSettings, check_free

PROTOCOL = "/marfl/1"
LISTED = 1800.0  # seconds for which nodes of the DHT keep a record at least, though it may expire before
LOOK_UP = 10  # a DHT operation is given up after so many unanswered requests in a row
STOP_TIMEOUT = 3.0
PING_AGAIN = 0.1  # seconds before a peer that did not answer is asked again
GONE = "this peer's own p2p daemon is gone"
DIED = "p2p daemon died"  # counted in `Net.refused`
RESTARTS = 5  # so many times in `RESTART_WINDOW` seconds a daemon is started again; after that the net is lost
RESTART_WINDOW = 60.0
REJOINED = 32  # peers at most through which it then finds the swarm again
RESTART_PAUSE = 0.25  # seconds before the second of them; twice as many before each that follows

T = TypeVar("T")
log = logging.getLogger("marfl.peer.net")

hivemind_protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # peers judge clocks: by name, and not within 3 seconds
use_hivemind_log_handler("nowhere")  # whoever uses us decides where log messages go


class Libp2pNet(Messenger):
    """A real peer's door to the network: implements `marfl.net.base.Net`. Use `create`, or `start` and `close`."""

    def __init__(self, identity: Identity, settings: Libp2pSettings, allow: Callable[[PeerId], bool]) -> None:
        self._kept = Scratch()
        self._scratch = self._kept.path  # for this user alone: its socket is our front door
        self._daemon = Daemon(settings, self._scratch)
        super().__init__(identity.peer, self._daemon, allow, settings.limits)
        self._identity = identity
        self._settings = settings
        self._records = Records(self, identity, settings)
        self._entered: dict[str, None] = {}  # addresses through which this peer has met others
        self._restarting = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self.acquaintances: Callable[[], Iterable[str]] = lambda: ()  # addresses of more peers, the newest last
        self.returned = asyncio.Event()  # set whenever a daemon that died runs again; whoever waits for it clears it

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
        self.listen(self._scratch / "streams")
        await self._start_daemon()
        self._daemon.ready()
        self._watcher = asyncio.create_task(self._watch())
        failed = await self.join(self._settings.join)
        if failed and len(failed) == len(self._settings.join):
            raise PeerGone("join: nobody answers; " + "; ".join(f"{where}: {why}" for where, why in failed.items()))

    async def _start_daemon(self) -> None:
        key, door = self._scratch / "key", self._scratch / "streams"
        save_identity(key, self._identity)
        try:
            await self._daemon.start(key)
        finally:
            key.unlink()
        await self._daemon.hand_streams_to(door)
        await self._records.start(self._daemon.p2p)

    async def _watch(self) -> None:
        """Start the daemon again whenever it dies, but not for ever."""
        tries: list[float] = []
        while True:
            why = await self._daemon.ended()
            self.refused[DIED] += 1
            log.warning("the p2p daemon of this peer died (%s); starting it again", why)
            while why:
                tries = [each for each in tries if each > self.now() - RESTART_WINDOW]
                if len(tries) == RESTARTS:
                    self._daemon.give_up(f"started {RESTARTS} times in vain ({why})")
                    return
                await asyncio.sleep(RESTART_PAUSE * 2 ** len(tries) if tries else 0)
                tries.append(self.now())
                async with self._restarting:
                    why = await self._restart()
            await self._rejoin()
            log.warning("the p2p daemon of this peer runs again")
            self.returned.set()

    async def _restart(self) -> str:
        """The same daemon once more: its name, its addresses, what the DHT gave it to keep. Empty, or why not."""
        try:
            await self._daemon.stop()
            for address in self._daemon.listen:
                check_free(address)
            async with asyncio.timeout(self._settings.start_timeout):  # it may die while it is being set up
                await self._start_daemon()
        except (InputError, NetError, OSError) as error:
            return _brief(error) or "it does not answer"
        return ""

    async def _rejoin(self) -> None:
        """Find the swarm again. Whoever waits for the daemon goes on once a peer has answered, or none does."""

        async def enter(address: str) -> None:
            if not await self._enter(address):
                self._daemon.ready()

        places = [*self._entered, *self.acquaintances()]
        await asyncio.gather(*map(enter, dict.fromkeys(places[-REJOINED:])))
        self._daemon.ready()

    @property
    def lost(self) -> asyncio.Future[str]:
        """Why this peer has no daemon any more, once it is given up: then nothing can be sent or heard."""
        return self._daemon.lost

    async def close(self) -> None:
        """End the streams, the DHT node and the daemon, and remove what they left on disk."""
        async with self._restarting:  # a start that is cut short would leave a process
            if self._watcher is not None:
                self._watcher.cancel()
        await asyncio.gather(*filter(None, [self._watcher]), return_exceptions=True)
        self._daemon.give_up("this net is closed")
        await self.hang_up()
        await self._daemon.stop()
        await self._records.end()
        self._kept.remove()

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
                self._entered[address] = None
        except TimeoutError:
            return f"no answer in {self._settings.join_timeout:g} seconds"
        except (NetError, InputError) as error:  # others may say that they are at places that are none
            return str(error)
        return ""

    async def announce(self, key: str, value: bytes, *, ttl: float) -> None:
        with self._daemon.checked():
            await self._records.announce(key, value, ttl)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        with self._daemon.checked():
            return await self._records.lookup(key)


def _p2p_in(scratch: Path) -> Any:
    """hivemind's `P2P`, with a guarded daemon, and with its sockets in this directory."""

    class Guarded(P2P):  # type: ignore[misc]
        _UNIX_SOCKET_PREFIX = f"/unix{scratch}/"

        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            return guarded(P2P._make_process_args(*args, **kwargs))

    return Guarded


class Daemon:
    """The p2pd process of one net, and what this process asks of it."""

    def __init__(self, settings: Libp2pSettings, scratch: Path) -> None:
        self._settings = settings
        self._kind = _p2p_in(scratch)
        self.listen = settings.listen  # with the ports that were taken, once it runs
        self.p2p: Any = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it does not come back
        self._runs = asyncio.Event()  # or is lost: there is nothing to wait for

    async def start(self, key: Path) -> None:
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
                raise InputError(f"listen: {', '.join(self.listen)} cannot be used: {_brief(error)}") from None
            raise NetError(f"the p2p daemon did not start: {_brief(error)}") from None
        self._requests = Requests()
        self.p2p._client.control._pending_calls = self._requests
        self.listen = with_ports(self.listen, await self.addresses())

    def ready(self) -> None:
        """All is set up: whoever waited for the daemon may go on."""
        self._runs.set()

    async def ended(self) -> str:
        """Wait until the daemon's process is gone; how it went."""
        status = await self.p2p._child.wait()
        self._runs.clear()
        self._requests.end()
        return f"signal {-status}" if status < 0 else f"exit code {status}"

    def give_up(self, why: str) -> None:
        """It does not come back: whoever waits for it is told so."""
        if not self.lost.done():
            self.lost.set_result(f"{GONE}: {why}")
        self._runs.set()

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
                raise PeerGone(f"{peer} cannot be reached: {_brief(error)}") from None
            except NetError:  # it has just died
                await asyncio.sleep(PING_AGAIN)
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
        self._searches: set[asyncio.Task[Any]] = set()

    async def start(self, p2p: Any) -> None:
        """Begin, or begin again with another daemon; then whoever is met is given what it should keep."""
        before = self._node
        # no caches: a look-up must see what was announced before it began
        self._node = await DHTNode.create(
            p2p,
            # not hivemind's own: that comes from `random`, and peers with the same seed would be one node
            node_id=DHTID.generate(self._identity.peer),
            record_validator=self._validator,
            wait_timeout=self._timeout,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )
        if before is not None:
            self._node.protocol.storage = before.protocol.storage
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
        await self._search(self._node.find_nearest_nodes([self._node.node_id]))

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
            stored = await self._search(self._node.store(key, record, listed, subkey=me))
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
            found = await self._search(self._node.get(key, latest=True))
        return found.value if found else {}

    async def _search(self, work: Coroutine[Any, Any, T]) -> T:
        """What the DHT answers. To stop waiting is not to stop the search: hivemind would leave tasks of it behind."""
        task = asyncio.create_task(work)
        self._searches.add(task)
        task.add_done_callback(self._searches.discard)
        return await asyncio.shield(task)

    async def end(self) -> None:
        """Once the daemon has ended: no search finds anything any more, so all come to their end."""
        if self._searches:
            _, left = await asyncio.wait(self._searches, timeout=STOP_TIMEOUT)
            for task in left:
                task.cancel()

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


_PLACE = re.compile(r"/(ip4|ip6)/([^/]+)/(tcp|udp)/(\d+)")


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
