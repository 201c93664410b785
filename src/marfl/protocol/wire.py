"""What goes over the wire: a versioned msgpack header, and raw little-endian fp32 bytes beside it.

A header is a msgpack array ``[version, name, {field: value}]``. Every message has a schema in `SCHEMAS`; the decoder
accepts exactly what a schema allows and turns everything else, whatever the bytes, into a `WireError`.
Nothing is ever unpickled, and nothing is allocated before its size has been checked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgpack
import torch
from torch import Tensor

from marfl.errors import BadPayload, WireError
from marfl.net.base import Buffer, Parcel
from marfl.state import all_finite

VERSION = 1
MAX_HEADER = 16 * 2**20  # a roster of 100,000 peers fits
MAX_PAYLOAD = 2**33  # 8 GiB: two billion parameters in one message
MAX_ITEMS = 200_000  # in any one list of a header
MAX_DEPTH = 6
LARGEST_INPUT = 2.0**100  # of a peer's w·Δ: no sum over a swarm overflows, so whoever sends more is to blame itself
LARGEST_FLOAT = torch.finfo(torch.float32).max

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("marfl's wire format is little-endian; this machine is not")

HASH = "hash"  # 32 bytes

# field -> type; "?" marks a field that may be None
SCHEMAS: dict[str, dict[str, Any]] = {
    "ready": {
        "iteration": int,
        "base": HASH,
        "index": int,
        "weight": float,
        "layout": HASH,
        "mass": int,
        "role": str,  # "member", "witness", "training" (it is waited for), "left"
        "incarnation": int,  # which process of its key speaks
        "terms": HASH,  # its settings
    },
    "head": {"iteration": int, "hash": HASH, "mass": int, "lineage": HASH, "terms": HASH},
    "propose": {
        "iteration": int,
        "attempt": int,
        "seen": int,  # the highest attempt the leader knew of: it takes that one for failed
        "lineage": HASH,
        "base": HASH,
        "mass": int,
        "founding": bool,
        "incarnation": int,  # whoever leads votes for its own roster
        "terms": HASH,
    },
    "ack": {
        "status": str,  # "ack", or why not: "refused", "left", "barred", "stale", "behind", "unknown", "other settings"
        "incarnation": int,
        "terms": HASH,
        "attempt": int,  # the highest one promised
        "join": bool,  # brings a contribution
        "role": str,  # "member" (joins), "witness" (only votes), "training" (not yet there), "behind" (lacks the state)
        "index": int,
        "weight": float,
        "fewest": int,  # contributions of a sum that it would be in
        "layout": HASH,
        "wire": str,  # how values travel
        "accepted": "?bytes",  # the roster whose result this peer has finished, if any
        "accepted_hash": "?hash",
        "accepted_attempt": int,
        "holds": bool,  # has that result's data, not only its hash
        "blamed": list,  # [[peer, reason, proven], …]
        "waits": bool,  # for others' data
        "unsent": list,  # who has not taken its data yet
        "record": "?bytes",
        "spent": bool,  # its masked value may be in a sum that this lineage knows nothing of
        "epoch": "?hash",  # whose masks its value is under
        "heard": list,  # whose values it has received in the last attempt
        "pledged": "?bytes",  # the roster that it has promised to unmask, and no other
        "pledged_attempt": int,
        "sum_here": bool,  # holds its masked sum
        "hopeless": bool,  # too few can unmask it
    },
    "seal": {"roster": bytes, "attempt": int, "adopt": "?hash", "holders": list},
    "ok": {"status": str},
    "finish": {"iteration": int, "attempt": int, "hash": "?hash", "final": bool},  # not final: only asks for news
    "verdict": {"status": str, "record": "?bytes", "holders": list},
    "endorse": {"iteration": int, "attempt": int, "roster": bytes, "hash": HASH},
    "decided": {"iteration": int, "record": bytes, "holders": list},
    "heavier": {"hash": HASH, "mass": int},
    "vouch": {"peer": str, "base": HASH},  # was given this state
    "share": {"digest": HASH},
    "masked": {"roster": HASH},
    "held": {"iteration": int, "attempt": int, "sum": HASH},
    "pledge": {"iteration": int, "attempt": int, "roster": bytes},
    "reveal": {
        "iteration": int,
        "attempt": int,
        "roster": HASH,
        "votes": list,  # places of the electors that have pledged themselves
        "seeds_of": list,  # ranks whose seeds are missing
        "keys_of": list,  # ranks that are not in the sum
    },
    "revealed": {"status": str, "owners": list},  # whose shares follow the seed
    "pace": {"iteration": int},
    "present": {  # under a group key, where the paper's peers coordinate themselves
        "index": int,
        "layout": HASH,
        "divisor": int,  # its value is the sum of so many models
        "view": "?hash",  # whom it takes for its group, once it has decided
    },
    "data": {"digest": HASH, "layout": HASH, "count": int},
    "resend": {"digest": HASH, "done": int, "rank": int, "start": int, "stop": int},
    "sync": {"have": HASH, "want": "?hash"},
    "state": {
        "record": "?bytes",
        "past": list,  # [[iteration, hash], …] of the last commits: whoever is given the state sees what it gives up
        "mode": str,
        "names": list,
        "lengths": list,
        "scalars": dict,
        "version": int,
    },
}


def pack(name: str, **fields: Any) -> bytes:
    """Encode a header; a wrong field is a bug of ours and raises at once."""
    _check(name, fields)
    data: bytes = msgpack.packb([VERSION, name, fields], use_bin_type=True)
    return data


def unpack(name: str, data: Buffer) -> dict[str, Any]:
    """Decode a header that must be a `name` message; any other bytes raise `WireError`."""
    if len(data) > MAX_HEADER:
        raise WireError(f"a header of {len(data)} bytes; at most {MAX_HEADER} are read")
    try:
        message = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_HEADER,
            max_bin_len=MAX_HEADER,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a msgpack header: {type(error).__name__}") from None
    if not isinstance(message, list) or len(message) != 3:
        raise WireError("a header must be [version, name, fields]")
    version, got, fields = message
    if version != VERSION or isinstance(version, bool):
        raise WireError(f"wire version {version!r:.20}; this peer speaks {VERSION}")
    if got != name:
        raise WireError(f"a {got!r:.30} message where {name!r} was expected")
    if not isinstance(fields, dict):
        raise WireError("a header's fields must be a map")
    _check(name, fields)
    return fields


def status_of(answer: Parcel) -> str:
    """The status in an answer that has nothing else; "" for an answer that is none."""
    try:
        return str(unpack("ok", answer.header)["status"])
    except WireError:
        return ""


def _check(name: str, fields: Mapping[str, Any]) -> None:
    schema = SCHEMAS[name]
    if fields.keys() != schema.keys():
        raise WireError(f"{name}: fields {sorted(map(str, fields))!s:.200}, expected {sorted(schema)}")
    for field, kind in schema.items():
        if not _fits(fields[field], kind):
            raise WireError(f"{name}.{field}: {fields[field]!r:.60} is not {getattr(kind, '__name__', kind)}")


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, str):
        if kind.startswith("?"):
            return value is None or _fits(value, {"?hash": HASH, "?bytes": bytes}[kind])
        return isinstance(value, bytes) and len(value) == 32
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, float) and value == value and abs(value) < float("inf")
    if kind is list:
        return isinstance(value, list | tuple)
    return isinstance(value, kind)


@lru_cache(maxsize=256)
def _data_header(digest: bytes, layout: bytes, count: int) -> bytes:
    """Cached: all slices of one size in an attempt have the same header."""
    return pack("data", digest=digest, layout=layout, count=count)


def tensor_parcel(vector: Tensor, digest: bytes, layout: bytes) -> Parcel:
    """One slice of a vector, ready to send. The tensor's own memory is what travels: it must not change any more."""
    return Parcel(_data_header(digest, layout, vector.numel()), raw(vector))


def raw(vector: Tensor) -> memoryview:
    """A tensor's own memory as bytes."""
    return vector.detach().contiguous().numpy().data.cast("B")


def tensor_from(parcel: Parcel, *, digest: bytes, layout: bytes, count: int) -> Tensor:
    """The slice that a parcel carries, or `BadPayload`: another roster, layout or length, NaN or infinity."""
    return summable(slice_from(parcel, digest=digest, layout=layout, count=count), LARGEST_FLOAT)


def slice_from(
    parcel: Parcel, *, digest: bytes, layout: bytes, count: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The slice that a parcel carries, its values unchecked, or `BadPayload`: another roster, layout or length."""
    if parcel.header != _data_header(digest, layout, count):  # only an unexpected header needs decoding
        fields = unpack("data", parcel.header)
        if fields["digest"] != digest:
            raise BadPayload("a chunk for another roster")
        if fields["layout"] != layout:
            raise BadPayload("a chunk of another model layout")
    return vector_from(parcel.payload, count, dtype)


def summable(vector: Tensor, largest: float) -> Tensor:
    """The vector, or `BadPayload` when a value is not finite, or further from zero than it can honestly be."""
    if not within(vector, largest):
        what = f"values beyond {largest:.2g}" if all_finite(vector) else "NaN or infinity"
        raise BadPayload(f"a chunk with {what}")
    return vector


def within(vector: Tensor, largest: float) -> bool:
    """Whether all values are finite and at most `largest` (which must be at least 2**64) from zero."""
    # One pass in the common case: the squares of numbers beyond 2**64 never add up to something finite.
    if math.isfinite(torch.dot(vector, vector).item()):
        return True
    low, high = torch.aminmax(vector)
    return bool(-largest <= low) and bool(high <= largest)


def vector_from(payload: Buffer, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Raw little-endian values as a tensor of exactly `count` of them (no copy when the buffer is writable)."""
    view = memoryview(payload)
    expected = dtype.itemsize * count
    if view.nbytes > MAX_PAYLOAD or view.nbytes != expected:
        raise BadPayload(f"a chunk of {view.nbytes} bytes where {expected} were expected")
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)
