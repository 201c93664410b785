"""The cryptography of masked sums: key pairs, secret sharing, and masks from a seed.

Every member has two X25519 pairs for each attempt, made when it votes and forgotten with the iteration. One pair agrees
on masks, the other encrypts shares. They are two because the first is reconstructed when its owner is lost, and the
shares that the owner was sent must stay unreadable then.

Secrets are shared after Shamir (1979): 32 bytes, over the integers modulo the prime 2²⁵⁶ + 297. A mask is the AES-256
counter stream under its seed, read as integers modulo 2⁶⁴.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from marfl.errors import BadPayload, InputError
from marfl.secagg.graph import KEY_BYTES

_NONCE = bytes(12)  # every key encrypts one message


@dataclass(frozen=True)
class KeyPair:
    """What a member keeps to itself; `public` is what it sends with its vote."""

    mask: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    share: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)

    @property
    def public(self) -> bytes:
        return self.mask.public_key().public_bytes_raw() + self.share.public_key().public_bytes_raw()

    @property
    def secret(self) -> bytes:
        """The private key for masks: what is shared, so that a lost member's masks can be taken off."""
        return self.mask.private_bytes_raw()


def is_public(data: bytes) -> bool:
    """Whether these may be two public keys."""
    return len(data) == KEY_BYTES


def mask_seed(mine: X25519PrivateKey, theirs: bytes, epoch: bytes) -> bytes:
    """The seed of the mask between two members of one epoch: both derive the same."""
    return _agreed(mine, theirs[:32], b"mask" + epoch)


def seal_share(mine: KeyPair, theirs: bytes, context: bytes, share: bytes) -> bytes:
    """A share that only its receiver can read; the context names the epoch, the sender and the receiver."""
    return ChaCha20Poly1305(_agreed(mine.share, theirs[32:], b"share" + context)).encrypt(_NONCE, share, context)


def open_share(mine: KeyPair, theirs: bytes, context: bytes, sealed: bytes) -> bytes:
    """The share in these bytes, or `BadPayload`."""
    try:
        return ChaCha20Poly1305(_agreed(mine.share, theirs[32:], b"share" + context)).decrypt(_NONCE, sealed, context)
    except InvalidTag:
        raise BadPayload("a share that its sender did not seal") from None


def _agreed(mine: X25519PrivateKey, theirs: bytes, purpose: bytes) -> bytes:
    try:
        secret = mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise BadPayload("a public key that agrees on nothing") from None
    return HKDF(SHA256(), 32, salt=None, info=b"marfl " + purpose).derive(secret)


# --- Shamir's shares ---

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


# --- masks from a seed ---

_CHUNK = 2**14  # values at a time: they stay in the cache, which is five times as fast as whole vectors
_ZEROS = bytes(8 * _CHUNK)


def add_mask(total: Tensor, seed: bytes, *, negative: bool = False) -> Tensor:
    """Add (or subtract) a seed's mask in place, modulo 2⁶⁴: to whoever does not know the seed, every value is uniform.

    One seed is one mask: the first value of a vector is always masked by the first value of the stream.
    """
    stream = bytearray(8 * _CHUNK)
    values = torch.frombuffer(stream, dtype=torch.int64)
    cipher = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
    for part in torch.split(total, _CHUNK) if total.numel() else ():
        cipher.update_into(memoryview(_ZEROS)[: 8 * part.numel()], stream)
        mask = values[: part.numel()]
        if negative:
            part.sub_(mask)
        else:
            part.add_(mask)
    return total
