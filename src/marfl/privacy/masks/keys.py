"""The keys of one attempt: two X25519 pairs per member, made when it votes and forgotten with the iteration.

One pair agrees on masks, the other encrypts shares. They are two because the first is reconstructed when its owner is
lost, and the shares that the owner was sent must stay unreadable then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from marfl.errors import BadPayload
from marfl.plan.masks import KEY_BYTES

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
