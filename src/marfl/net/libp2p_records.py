"""DHT records that their owner signed: nobody else can write, change, prolong or move them.

A record is stored under (key, peer id) and says when it expires. The DHT keeps, of two records in one place, the one
that is listed for longer; so what is signed also covers that time, and an old record played again never wins.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import NamedTuple

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.net.libp2p_identity import Identity, verified

_HEAD = struct.Struct(">d64s")  # when it expires, the signature


class Place(NamedTuple):
    """Where a record lies in the DHT, and until when the DHT keeps it (wall-clock seconds)."""

    key: bytes
    owner: PeerId
    listed_until: float


def sign_record(identity: Identity, place: Place, value: bytes, expires: float) -> bytes:
    return _HEAD.pack(expires, identity.sign(_digest(place, value, expires))) + value


def open_record(place: Place, record: bytes) -> tuple[bytes, float]:
    """A record's value and when it expires; `WireError` unless the owner signed exactly this, here."""
    if len(record) < _HEAD.size:
        raise WireError("a DHT record that is too short")
    expires, signature = _HEAD.unpack_from(record)
    value = record[_HEAD.size :]
    if not math.isfinite(expires) or not math.isfinite(place.listed_until) or expires > place.listed_until:
        raise WireError("a DHT record with bad times")
    if not verified(place.owner, _digest(place, value, expires), signature):
        raise WireError("a DHT record that its owner did not sign")
    return value, expires


def _digest(place: Place, value: bytes, expires: float) -> bytes:
    times = struct.pack(">dd", expires, place.listed_until)
    parts = (b"marfl DHT record 1", place.key, place.owner.encode(), times, value)
    return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).digest()
