"""The cryptography of masked sums: key pairs, secret sharing, and masks from a seed.

Every member has two X25519 pairs and a seed for each attempt, made when it votes and forgotten with the iteration. One
pair agrees on masks, the other encrypts shares. They are two because the first is reconstructed when its owner is lost,
and the shares that the owner was sent must stay unreadable then. What a member publishes, its card, are the two public
keys and the hash of the seed: so whatever is reconstructed can be compared with what was published.

Secrets are shared after Shamir (1979): 32 bytes, over the integers modulo the prime 2²⁵⁶ + 297. A mask is the AES-256
counter stream under its seed, read as integers modulo 2⁶⁴, 2³² or 2¹⁶: of the width of what it hides.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

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
from marfl.secagg.graph import KEY_BYTES, SEED_BYTES

_NONCE = bytes(12)  # every key encrypts one message


@dataclass(frozen=True)
class KeyPair:
    """What a member keeps to itself; `public` is what it sends with its vote."""

    mask: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    share: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)

    seed: bytes = field(default_factory=lambda: secrets.token_bytes(SEED_BYTES), repr=False)  # of its own mask

    @property
    def public(self) -> bytes:
        """Its card: the key for masks, the key for shares, and the hash of the seed."""
        return public_of(self.mask) + public_of(self.share) + seed_hash(self.seed)

    @property
    def secret(self) -> bytes:
        """The private key for masks: what is shared, so that a lost member's masks can be taken off."""
        return self.mask.private_bytes_raw()


def public_of(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def seed_hash(seed: bytes) -> bytes:
    """What a member says of its seed before it gives it away."""
    return hashlib.sha256(b"marfl seed" + seed).digest()


_PROBE = X25519PrivateKey.from_private_bytes(bytes(range(32)))


@lru_cache(maxsize=4096)
def is_public(card: bytes) -> bool:
    """Whether this may be a card: also that its keys agree on something with others'."""
    if len(card) != KEY_BYTES:
        return False
    try:
        for key in (card[:32], card[32:64]):
            _agreed(_PROBE, key, b"probe")
    except BadPayload:
        return False
    return True


def is_seed(card: bytes, secret: bytes) -> bool:
    """Whether this is the seed that a card speaks of."""
    return len(secret) == SEED_BYTES and seed_hash(secret) == card[64:]


def is_key(card: bytes, secret: bytes) -> bool:
    """Whether this is the private key of a card's key for masks."""
    return len(secret) == SECRET_BYTES and public_of(X25519PrivateKey.from_private_bytes(secret)) == card[:32]


def mask_seed(mine: X25519PrivateKey, theirs: bytes, epoch: bytes) -> bytes:
    """The seed of the mask between two members of one epoch: both derive the same."""
    return _agreed(mine, theirs[:32], b"mask" + epoch)


def seal_share(mine: KeyPair, theirs: bytes, context: bytes, share: bytes) -> bytes:
    """A share that only its receiver can read; the context names the epoch, the sender and the receiver."""
    return ChaCha20Poly1305(_agreed(mine.share, theirs[32:64], b"share" + context)).encrypt(_NONCE, share, context)


def open_share(mine: KeyPair, theirs: bytes, context: bytes, sealed: bytes) -> bytes:
    """The share in these bytes, or `BadPayload`."""
    try:
        return ChaCha20Poly1305(_agreed(mine.share, theirs[32:64], b"share" + context)).decrypt(_NONCE, sealed, context)
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


def mended(shares: Mapping[int, bytes], threshold: int, fits: Callable[[bytes], bool]) -> bytes | None:
    """The secret from shares of which some may be wrong: as many as half of those beyond the threshold.

    The first threshold of shares will do unless one of them is wrong. Then all of them are decoded as a Reed–Solomon
    code word (Gao 2003). None when they are too few, or more are wrong: then their dealer is to blame, or its
    neighbours.
    """
    if len(shares) < threshold:
        return None
    secret = join(dict(sorted(shares.items())[:threshold]))
    if secret is not None and fits(secret):
        return secret
    polynomial = _decoded({place: int.from_bytes(share) % PRIME for place, share in shares.items()}, threshold)
    if not polynomial or polynomial[0] >= 2**256:
        return None
    secret = polynomial[0].to_bytes(SECRET_BYTES)
    return secret if fits(secret) else None


def _decoded(points: Mapping[int, int], threshold: int) -> list[int]:
    """The polynomial below this degree through all points but a few (Gao 2003, algorithm 1); empty: there is none."""
    through, product = [0], [1]
    for place, value in points.items():  # Newton's interpolation, one point more at a time
        step = (value - _value(through, place)) * pow(_value(product, place), -1, PRIME) % PRIME
        through = _plus(through, product, step)
        product = _times(product, [-place % PRIME, 1])
    before, rest = product, through
    factor_before, factor = [0], [1]
    while 2 * (len(rest) - 1) >= len(points) + threshold:
        quotient, remainder = _divided(before, rest)
        before, rest = rest, remainder
        factor_before, factor = factor, _plus(factor_before, _times(quotient, factor), -1)
    quotient, remainder = _divided(rest, factor)
    return quotient if remainder == [0] and len(quotient) <= threshold else []


def _plus(one: list[int], two: list[int], times: int) -> list[int]:
    """one + times · two."""
    length = max(len(one), len(two))
    padded = ((row + [0] * length)[:length] for row in (one, two))
    return _trimmed([(a + times * b) % PRIME for a, b in zip(*padded, strict=True)])


def _times(one: list[int], two: list[int]) -> list[int]:
    found = [0] * (len(one) + len(two) - 1)
    for i, a in enumerate(one):
        for j, b in enumerate(two):
            found[i + j] = (found[i + j] + a * b) % PRIME
    return _trimmed(found)


def _divided(one: list[int], two: list[int]) -> tuple[list[int], list[int]]:
    """Quotient and remainder of two polynomials."""
    rest, lead = list(one), pow(two[-1], -1, PRIME)
    quotient = [0] * max(1, len(one) - len(two) + 1)
    for at in range(len(one) - len(two), -1, -1):
        quotient[at] = rest[at + len(two) - 1] * lead % PRIME
        for j, b in enumerate(two):
            rest[at + j] = (rest[at + j] - quotient[at] * b) % PRIME
    return _trimmed(quotient), _trimmed(rest)


def _trimmed(polynomial: list[int]) -> list[int]:
    """Without zeros at the top; zero itself has one coefficient."""
    while len(polynomial) > 1 and not polynomial[-1]:
        polynomial.pop()
    return polynomial


def _value(polynomial: list[int], at: int) -> int:
    """Horner's rule."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * at + coefficient) % PRIME
    return value


# --- masks from a seed ---

_CHUNK = 2**14  # values at a time: they stay in the cache, which is five times as fast as whole vectors
_ZEROS = bytes(8 * _CHUNK)  # of the widest


def add_mask(total: Tensor, seed: bytes, *, negative: bool = False) -> Tensor:
    """Add (or subtract) a seed's mask in place, modulo what the integers hold (2⁶⁴, 2³² or 2¹⁶).

    To whoever does not know the seed, every value is uniform. One seed is one mask: the first value of a vector is
    always masked by the first value of the stream.
    """
    size = total.dtype.itemsize
    stream = bytearray(size * _CHUNK)
    values = torch.frombuffer(stream, dtype=total.dtype)
    cipher = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
    for part in torch.split(total, _CHUNK) if total.numel() else ():
        cipher.update_into(memoryview(_ZEROS)[: size * part.numel()], stream)
        mask = values[: part.numel()]
        if negative:
            part.sub_(mask)
        else:
            part.add_(mask)
    return total
