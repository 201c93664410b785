"""Who may speak to a peer: everybody, or the holders of a run's tokens. A net is given such a rule (`Admission`).

In a closed run an authority signs who may take part, until when. A token is an Ed25519 signature (RFC 8032) over the
run's name, a peer's id and the time it expires. The peer's id is the hash of its own key, which libp2p proves on every
stream; so a token that somebody else shows is worth nothing. A peer shows its token in a "hello" before its first
message to another, and carries it in front of every DHT record, so that a node which never met it can judge the record
as well. Messages, questions and records of peers without a token are refused and counted.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from marfl.errors import InputError, PeerGone
from marfl.net.base import PeerId
from marfl.net.libp2p.identity import load_identity, new_identity, public_key, save_identity

DAY = 86_400.0
TOKEN_BYTES = 72
_TOKEN = struct.Struct(">d64s")  # when it expires (wall-clock seconds), the signature


def new_authority(path: Path) -> str:
    """Write a new authority's secret key to a file that only its owner can read; its public part, in hex."""
    try:
        save_identity(path, new_identity())
    except FileExistsError:
        raise InputError(f"--out {path}: exists already, and a key is never overwritten; name a new file") from None
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written ({error.strerror})") from None
    return authority_of(path)


def authority_of(path: Path) -> str:
    """The public part of an authority's key file, in hex."""
    if not path.exists():
        raise InputError(f"--key {path}: there is no such file; make an authority with marfl swarm-key --out FILE")
    key = public_key(load_identity(path).peer)
    assert key is not None
    return key.hex()


def sign_token(path: Path, run: str, peer: PeerId, days: float, now: float | None = None) -> str:
    """A token for one peer of one run, in hex."""
    if public_key(peer) is None:
        raise InputError(f"--sign {peer!r:.80}: is not a peer's id such as 12D3Koo…; a peer prints its own")
    if not (math.isfinite(days) and days > 0):
        raise InputError(f"--days {days}: must be a number above 0")
    authority_of(path)
    expires = (time.time() if now is None else now) + days * DAY
    return _TOKEN.pack(expires, load_identity(path).sign(_digest(run, peer, expires))).hex()


def read_token(path: Path) -> bytes:
    """The token in a file."""
    try:
        token = bytes.fromhex(path.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise InputError(f"token {path}: cannot be read ({error.strerror})") from None
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise InputError(f"token {path}: does not hold a token; marfl swarm-key --sign PEERID makes one")
    return token


def parse_authority(text: str) -> bytes:
    """An authority's public key from its hex form."""
    try:
        key = bytes.fromhex(text)
        Ed25519PublicKey.from_public_bytes(key)
    except ValueError:
        raise InputError(f"authority {text!r:.80}: must be the 64 hex digits that marfl swarm-key printed") from None
    return key


def _digest(run: str, peer: PeerId, expires: float) -> bytes:
    parts = (b"marfl token 1", run.encode(), peer.encode(), struct.pack(">d", expires))
    return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).digest()


class NotAdmitted(PeerGone):
    """The other peer is there, but one of the two does not let the other in."""


class Admission(Protocol):
    """The rule that a net goes by: whom it hears, and what it shows to be heard itself."""

    @property
    def token(self) -> bytes:
        """What I show: it stands in front of every DHT record of mine. Others' is as long."""

    @property
    def greets(self) -> bool:
        """Whether tokens are exchanged in a hello before the first message between two peers."""

    def check_own(self, me: PeerId, *, named: bool) -> None:
        """`InputError` if others would not hear this peer; `named`: it has the same key every time."""

    def admit(self, peer: PeerId, token: bytes) -> bool:
        """Look at a token that this (authenticated) peer shows; whether it may come in."""

    def admits(self, peer: PeerId) -> bool:
        """Whether this peer may come in now."""


class OpenAdmission:
    """The rule of an open run: everybody may speak, and nobody shows anything."""

    token = b""
    greets = False

    def check_own(self, me: PeerId, *, named: bool) -> None:
        """Everybody is heard."""

    def admit(self, peer: PeerId, token: bytes) -> bool:
        return self.admits(peer)

    def admits(self, peer: PeerId) -> bool:
        return True


@dataclass
class TokenAdmission:
    """The rule of a closed run: whoever has shown a valid token of its authority may speak, until it expires."""

    authority: bytes  # Ed25519 public key
    run: str
    token: bytes  # my own
    clock: Callable[[], float] = time.time
    _until: dict[PeerId, float] = field(default_factory=dict)
    greets = True

    def check_own(self, me: PeerId, *, named: bool) -> None:
        if not named:
            raise InputError("token: belongs to an identity; name its file (identity), or give a state directory")
        if self.expiry(me, self.token) is None:
            raise InputError(f"token: the authority has not signed it for {me} in run {self.run!r}")
        if not self.admit(me, self.token):
            raise InputError(f"token: of {me} has expired; ask the authority for a new one")

    def admit(self, peer: PeerId, token: bytes) -> bool:
        if self.admits(peer):
            return True
        expires = self.expiry(peer, token)
        if expires is None or expires <= self.clock():
            return False
        self._until[peer] = expires
        return True

    def admits(self, peer: PeerId) -> bool:
        return self._until.get(peer, 0.0) > self.clock()

    def expiry(self, peer: PeerId, token: bytes) -> float | None:
        """When a token of this peer expires or expired; None when the authority did not sign it for peer and run."""
        if len(token) != TOKEN_BYTES:
            return None
        expires, signature = _TOKEN.unpack(token)
        try:
            key = Ed25519PublicKey.from_public_bytes(self.authority)
            key.verify(signature, _digest(self.run, peer, expires))
        except (InvalidSignature, ValueError):
            return None
        return float(expires) if math.isfinite(expires) else None


def admission_of(run: str, authority: str | None, token: Path | None) -> Admission:
    """The rule of a run: closed to those without a token where an authority is named."""
    if authority is None and token is None:
        return OpenAdmission()
    if authority is None or token is None:
        raise InputError("authority and token: a closed run needs both")
    return TokenAdmission(parse_authority(authority), run, read_token(token))
