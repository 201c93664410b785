"""Shamir's secret sharing (1979) of 32-byte secrets, over the integers modulo the prime 2²⁵⁶ + 297."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from marfl.errors import InputError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_SIZE = 33


def cut(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """`count` shares, for the places 1…count; any `threshold` of them give the secret, fewer tell nothing about it."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise InputError(f"shares: {threshold} of {count} of a secret of {len(secret)} bytes cannot be made")
    polynomial = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(polynomial, place).to_bytes(SHARE_SIZE) for place in range(1, count + 1)]


def join(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret from a threshold of shares by place; None when these shares are of no 32-byte secret."""
    total = 0
    for place, share in shares.items():
        weight = 1
        for other in shares:
            if other != place:
                weight = weight * other * pow(other - place, -1, PRIME) % PRIME
        total = (total + int.from_bytes(share) * weight) % PRIME
    return total.to_bytes(SHARE_SIZE)[1:] if total < 2**256 else None


def _value(polynomial: list[int], at: int) -> int:
    """Horner's rule."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * at + coefficient) % PRIME
    return value
