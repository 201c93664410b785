"""DHT records that their owner signed: nobody else can write, change, prolong or move them.

A record is stored under (key, peer id) and says when it expires. Of two records in one place the DHT keeps the one that
is listed for longer; so a later record always is, and what is signed covers that time: an old one never comes back.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.net.libp2p_frames import Refusal
from marfl.net.libp2p_identity import Identity, verified
from marfl.net.libp2p_settings import Limits

CLOCK_SKEW = 60.0  # seconds by which another peer's clock may be ahead
log = logging.getLogger("marfl.peer.net")
HEAD = struct.Struct(">d64s")  # when it expires, the signature
NAMED = 16  # owners of records with bad times that are said
_AROUND = 16  # bytes that a DHT adds to a value


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
    """What a node of the DHT stores and believes: records that allowed peers have signed. The others are counted.

    The first three methods are those that hivemind asks of a record validator.
    """

    def __init__(self, allow: Callable[[PeerId], bool], refused: Counter[str], limits: Limits) -> None:
        self._allow = allow
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
            self._refused[refusal.reason] += 1
            return False
        return True

    def _check(self, place: Place, value: Any) -> None:
        kinds = (bytes, str, float, bytes)
        if not all(isinstance(field, kind) for field, kind in zip((*place, value), kinds, strict=True)):
            raise Refusal("garbage")  # anybody can say anything
        if len(value) > self._limits.record + HEAD.size + _AROUND:
            raise Refusal("oversized")
        record = unpacked(value, bytes)
        if not self._allow(place.owner):
            raise Refusal("not allowed")
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
