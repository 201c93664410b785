"""A peer's name is its public key: an Ed25519 key pair, in libp2p's own formats.

A libp2p peer id of an Ed25519 key holds the key itself (libp2p specification, "Peer Ids and Keys"), so whoever knows a
peer's id can check its signatures without asking anybody.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from marfl.errors import InputError
from marfl.net.base import PeerId

_PRIVATE = b"\x08\x01\x12\x40"  # protobuf: key type Ed25519, then 64 bytes: the secret and the public half
_PEER = b"\x00\x24\x08\x01\x12\x20"  # multihash "identity" of the protobuf public key, then its 32 bytes
_LONGEST_ID = 64  # characters; an Ed25519 peer id has 52


@dataclass(frozen=True)
class Identity:
    """A key pair, as the name others know and as the power to sign."""

    secret: bytes  # 32 bytes

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)

    @cached_property
    def _public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    @cached_property
    def peer(self) -> PeerId:
        return base58.b58encode(_PEER + self._public).decode()

    @property
    def encoded(self) -> bytes:
        """The key file's content, as every libp2p implementation reads it."""
        return _PRIVATE + self.secret + self._public

    def sign(self, digest: bytes) -> bytes:
        return self._key.sign(digest)

    def __repr__(self) -> str:
        return f"Identity({self.peer})"  # the secret is never printed


def new_identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate().private_bytes_raw())


def load_identity(path: Path) -> Identity:
    """The key in this file; a new one is written there first, for its owner's eyes only, when there is none."""
    try:
        if not path.exists():
            save_identity(path, new_identity())
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"identity: {path} cannot be used: {error.strerror}") from None
    secret = data[len(_PRIVATE) : len(_PRIVATE) + 32]
    if len(secret) != 32 or Identity(secret).encoded != data:
        raise InputError(f"identity: {path} does not hold an Ed25519 libp2p key; name a new file and one is made")
    return Identity(secret)


def save_identity(path: Path, identity: Identity) -> None:
    """Write a key file that only its owner can read; an existing file is never overwritten."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(identity.encoded)


def public_key(peer: PeerId) -> bytes | None:
    """The Ed25519 public key that a peer id holds; None when it is no such id."""
    if len(peer) > _LONGEST_ID:
        return None
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        return None
    return raw[len(_PEER) :] if raw[: len(_PEER)] == _PEER and len(raw) == len(_PEER) + 32 else None


@lru_cache(maxsize=16_384)
def verified(peer: PeerId, digest: bytes, signature: bytes) -> bool:
    """Whether this peer signed this digest. Cached: every node of a DHT shows the same records again and again."""
    key = public_key(peer)
    if key is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, digest)
    except (InvalidSignature, ValueError):
        return False
    return True
