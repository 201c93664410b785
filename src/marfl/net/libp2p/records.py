"""DHT records that their owner signed: nobody else can write, change, prolong or move them.

A record is stored under (key, peer id) and says when it expires. Of two records in one place the DHT keeps the one that
expires later. The signature covers that time, and a peer's newer record always expires later than its older one; so
nobody can put an old record back. The DHT is hivemind's Kademlia. Each peer has one node of it (`Records`), which
checks what it stores and what it is told (`Validator`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import struct
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

import msgpack
from hivemind.dht import protocol as hivemind_protocol
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from marfl.errors import DeadlineExceeded, InputError, NetError, PeerGone, WireError
from marfl.net.base import PeerId, Refusals, Traffic
from marfl.net.libp2p.admission import Admission
from marfl.net.libp2p.connection import CLOCK_SKEW, Libp2pSettings, Limits
from marfl.net.libp2p.frames import NOT_ALLOWED, Refusal
from marfl.net.libp2p.identity import Identity, verified
from marfl.net.libp2p.p2pd import STOP_TIMEOUT, one_line

T = TypeVar("T")
log = logging.getLogger("marfl.peer.net")

LISTED = 1800.0  # seconds for which nodes of the DHT keep a record at least, though it may expire before
LOOK_UP = 10  # a DHT operation is given up after so many unanswered requests in a row
PING_AGAIN = 0.1  # seconds before a peer that did not answer is asked again
HEAD = struct.Struct(">d64s")  # when it expires, the signature
NAMED = 16  # owners of records with bad times that are said
_AROUND = 16  # bytes that a DHT adds to a value

hivemind_protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS = math.inf  # peers judge clocks: by name, and not within 3 seconds


class Place(NamedTuple):
    """Where a record lies in the DHT, and until when the DHT keeps it (wall-clock seconds)."""

    key: bytes
    owner: PeerId
    listed_until: float


def sign_record(identity: Identity, place: Place, value: bytes, expires: float) -> bytes:
    return HEAD.pack(expires, identity.sign(_digest(place, value, expires))) + value


def open_record(place: Place, record: bytes) -> tuple[bytes, float]:
    """A record's value and when it expires; `WireError` unless the owner signed exactly this, here."""
    if len(record) < HEAD.size:
        raise WireError("a DHT record that is too short")
    expires, signature = HEAD.unpack_from(record)
    value = record[HEAD.size :]
    if not math.isfinite(expires) or not math.isfinite(place.listed_until) or expires > place.listed_until:
        raise WireError("a DHT record with bad times")
    if not verified(place.owner, _digest(place, value, expires), signature):
        raise WireError("a DHT record that its owner did not sign")
    return value, expires


def _digest(place: Place, value: bytes, expires: float) -> bytes:
    times = struct.pack(">dd", expires, place.listed_until)
    parts = (b"marfl DHT record 1", place.key, place.owner.encode(), times, value)
    return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).digest()


class Validator:
    """What a node of the DHT stores and believes: records that admitted peers have signed. The others are counted.

    The first three methods are those that hivemind asks of a record validator.
    """

    def __init__(self, admission: Admission, refused: Refusals, limits: Limits) -> None:
        self._admission = admission
        self._refused = refused
        self._limits = limits
        self._named: set[PeerId] = set()

    def validate(self, record: Any) -> bool:
        try:
            place = Place(record.key, unpacked(record.subkey, str), record.expiration_time)
        except Refusal:
            place = Place(record.key, "", record.expiration_time)  # nobody's: it is refused
        return self._holds(place, record.value)

    def sign_value(self, record: Any) -> bytes:
        return bytes(record.value)  # it is signed already

    def strip_value(self, record: Any) -> bytes:
        return bytes(record.value)

    def sift(self, key: bytes, records: Any) -> bool:
        """Remove the bad records from what another node says, and believe the others."""
        for owner, (value, listed_until) in list(records.items()):
            if not self._holds(Place(key, owner, listed_until), value):
                del records[owner]
        return True

    def _holds(self, place: Place, value: Any) -> bool:
        try:
            self._check(place, value)
        except Refusal as refusal:
            self._refused[refusal.reason] += 1  # by nobody's name: whoever wrote it may have taken another's
            return False
        return True

    def _check(self, place: Place, value: Any) -> None:
        kinds = (bytes, str, float, bytes)
        if not all(isinstance(field, kind) for field, kind in zip((*place, value), kinds, strict=True)):
            raise Refusal("garbage")  # anybody can say anything
        if len(value) > self._limits.record + HEAD.size + _AROUND:
            raise Refusal("oversized")
        record = unpacked(value, bytes)
        front = record[HEAD.size : HEAD.size + len(self._admission.token)]  # its owner's token
        if not self._admission.admit(place.owner, front):
            raise Refusal(NOT_ALLOWED)
        try:
            open_record(place, record)
        except WireError:
            raise Refusal("bad signature") from None
        late = place.listed_until - time.time() - self._limits.record_ttl
        if late > CLOCK_SKEW:
            self._name(place.owner, late)
            raise Refusal("bad times")

    def _name(self, owner: PeerId, late: float) -> None:
        """Say once whose record it was: its clock or mine is wrong. Anybody may have many names, so only of a few."""
        if owner not in self._named and len(self._named) < NAMED:
            self._named.add(owner)
            log.warning("a record of %s is from %.0f seconds ahead of this peer's clock", owner, late)


def unpacked(data: bytes, kind: type) -> Any:
    """One msgpack value of this type, or `Refusal`."""
    try:
        value = msgpack.unpackb(data, raw=False, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        raise Refusal("garbage") from None
    if not isinstance(value, kind):
        raise Refusal("garbage")
    return value


class Counts(NamedTuple):
    """What a net counts: see `marfl.net.base.Net`."""

    sent: Traffic
    received: Traffic
    refused: Refusals


class Records:
    """This peer's node of the DHT, where it keeps its own records and finds those of others."""

    def __init__(self, identity: Identity, settings: Libp2pSettings, admission: Admission, counts: Counts) -> None:
        self._identity = identity
        self._admission = admission
        self._counts = counts
        self._limits = settings.limits
        self._timeout, self._watches = settings.dht_timeout, settings.watches
        self._validator = Validator(admission, counts.refused, settings.limits)
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
            client_mode=self._watches,
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
            raise PeerGone(one_line(error)) from None
        await self._search(self._node.find_nearest_nodes([self._node.node_id]))

    async def announce(self, key: str, value: bytes, ttl: float) -> None:
        """Store my record, with my token in front of it."""
        value = self._admission.token + value
        if len(value) > self._limits.record:
            raise InputError(f"announce: {key} has {len(value)} bytes; at most {self._limits.record} are allowed")
        if not 0 < ttl <= self._limits.record_ttl:
            raise InputError(f"announce: {key} lives {ttl} seconds; more than 0 and at most {self._limits.record_ttl}")
        self._counts.sent.control += len(key) + len(value)
        expires = time.time() + ttl
        if not (await self._store(key, value, expires) or await self._store(key, value, expires)):
            raise NetError(f"no node of the DHT takes {key}")

    async def _store(self, key: str, value: bytes, expires: float) -> bool:
        """Store my record under a key; whether the DHT now has it."""
        # of two records the DHT keeps the one listed for longer: that must be the later one, also if its life is short
        self._listed = max(expires, time.time() + LISTED, self._listed + 0.001)
        me, listed = self._identity.peer, self._listed
        record = sign_record(self._identity, Place(DHTID.generate(key).to_bytes(), me, listed), value, expires)
        self._counts.sent.dht += 1
        async with self._patience(key):
            stored = await self._search(self._node.store(key, record, listed, subkey=me))
        if not stored:  # so said the last of several nodes: have the others got it, or one of when my clock was ahead?
            mine = (await self._get(key)).get(me)
            stored = mine is not None and mine.expiration_time == listed
            self._listed = max(listed, mine.expiration_time if mine else 0.0)
        return bool(stored)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        """The records under a key that have not expired, by owner, without their tokens."""
        values, front = {}, len(self._admission.token)
        name, now = DHTID.generate(key).to_bytes(), time.time()
        for owner, item in (await self._get(key)).items():
            value, expires = open_record(Place(name, owner, item.expiration_time), item.value)
            if expires > now and self._admission.admits(owner):  # it may have been admitted once, but not now
                values[owner] = value
        self._counts.received.control += len(key) + sum(map(len, values.values()))
        return {owner: value[front:] for owner, value in values.items()}

    async def _get(self, key: str) -> Mapping[PeerId, Any]:
        self._counts.sent.dht += 1
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
