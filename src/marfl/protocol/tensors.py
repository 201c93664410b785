"""Tensors as they travel: raw little-endian bytes beside a `Data` header. Sizes are checked first."""

from __future__ import annotations

import math
import sys
from functools import lru_cache

import torch
from torch import Tensor

from marfl.errors import BadPayload
from marfl.net.base import Buffer, Parcel
from marfl.protocol.messages import Data, SignedData
from marfl.state import all_finite

MAX_PAYLOAD = 2**33  # 8 GiB: two billion parameters in one message
LARGEST_INPUT = 2.0**100  # of a peer's w·Δ: no sum over a swarm overflows, so whoever sends more is to blame itself
LARGEST_FLOAT = torch.finfo(torch.float32).max

CLAIM = SignedData(bytes(32), bytes(32), 0, b"").encoded[:8]  # how the header of one begins: version and name
_SHORT = 255  # bytes whose number msgpack writes as one byte

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("marfl's wire format is little-endian; this machine is not")


@lru_cache(maxsize=256)
def _data_header(digest: bytes, layout: bytes, count: int) -> bytes:
    """Cached: all slices of one size in an attempt have the same header."""
    return Data(digest, layout, count).encoded


def tensor_parcel(vector: Tensor, digest: bytes, layout: bytes) -> Parcel:
    """One slice of a vector, ready to send. The tensor's own memory is what travels: it must not change any more."""
    return slice_parcel(raw(vector), vector.numel(), digest, layout)


def slice_parcel(payload: Buffer, count: int, digest: bytes, layout: bytes) -> Parcel:
    """One slice of so many values, as bytes."""
    return Parcel(_data_header(digest, layout, count), payload)


def claim_parcel(payload: Buffer, count: int, digest: bytes, layout: bytes, proof: bytes) -> Parcel:
    """The last piece of a slice, with its sender's claim of the whole."""
    return Parcel(_claim_header(digest, layout, count, len(proof)) + proof, payload)


@lru_cache(maxsize=256)
def _claim_header(digest: bytes, layout: bytes, count: int, size: int) -> bytes:
    """The header of a piece with a claim of so many bytes, up to the claim, which comes last."""
    return SignedData(digest, layout, count, bytes(size)).encoded[: -size or None]


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
    check_header(parcel.header, digest=digest, layout=layout, count=count)
    return vector_from(parcel.payload, count, dtype)


def check_header(header: Buffer, *, digest: bytes, layout: bytes, count: int) -> None:
    """`BadPayload` for a slice of another roster or layout."""
    if header != _data_header(digest, layout, count):  # only an unexpected header needs decoding
        data = Data.decode(header)
        if data.digest != digest:
            raise BadPayload("a chunk for another roster")
        if data.layout != layout:
            raise BadPayload("a chunk of another model layout")


def claimed_slice_from(
    parcel: Parcel, *, digest: bytes, layout: bytes, count: int, dtype: torch.dtype
) -> tuple[Tensor, bytes]:
    """The same where slices are signed: also what travels of the claim, empty where there is none."""
    proof, header = b"", parcel.header
    if header.startswith(CLAIM):
        size = len(header) - len(_claim_header(digest, layout, count, 1))
        size -= size > _SHORT
        if size > 0 and header.startswith(_claim_header(digest, layout, count, size)):
            return vector_from(parcel.payload, count, dtype), header[-size:]  # only an unexpected one needs decoding
        claim = SignedData.decode(header)
        parcel, proof = Parcel(_data_header(claim.digest, claim.layout, claim.count), parcel.payload), claim.proof
    return slice_from(parcel, digest=digest, layout=layout, count=count, dtype=dtype), proof


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
