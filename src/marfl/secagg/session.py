"""One member's secrets of one epoch: the roster whose keys were published together.

y_i = q_i + PRG(b_i) + Σ_{j>i} PRG(s_ij) − Σ_{j<i} PRG(s_ij), with s_ij agreed between neighbours and b_i its own (the
double masking of Bonawitz et al. 2017, section 4). In a sum over the whole epoch the pairwise masks cancel. b_i and the
key behind s_ij are shared among the neighbours: to take the masks off, they give away b_i of a member that is in the
sum, or the key of one that is not; never both, so a value that arrives late stays hidden.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from marfl.errors import BadPayload
from marfl.secagg.crypto import SHARE_SIZE, KeyPair, add_mask, cut, join, mask_seed, open_share, seal_share
from marfl.secagg.graph import SEED_BYTES, neighbours, threshold


def epoch_of(run: str, iteration: int, members: Sequence[str], keys: Sequence[bytes]) -> bytes:
    """The name of an epoch: everybody in it, with their keys. Its graph of neighbours follows from it."""
    digest = hashlib.sha256(f"{len(run)}:{run}:{iteration}:{len(members)}:".encode())
    for member, key in zip(members, keys, strict=True):
        digest.update(f"{len(member)}:{member}".encode() + key)
    return digest.digest()


@dataclass
class Session:
    """One member's part in an epoch."""

    epoch: bytes
    members: tuple[str, ...]  # in the order of the roster that founded the epoch
    rank: int
    pair: KeyPair = field(repr=False)
    keys: tuple[bytes, ...]  # everybody's public ones, by rank
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(SEED_BYTES), repr=False)  # b_i
    _shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)  # of b and of the key, by owner
    _dealt: dict[int, bytes] = field(default_factory=dict, repr=False)
    _given: dict[int, str] = field(default_factory=dict)  # which of the two was given away
    _masked: Tensor | None = field(default=None, repr=False)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        return self.neighbours_of(self.rank)

    def neighbours_of(self, rank: int) -> tuple[int, ...]:
        return neighbours(self.epoch, len(self.members))[rank]

    # --- shares ---

    def deal(self) -> dict[int, bytes]:
        """For every neighbour shares of my seed and of my key, sealed for it alone: the same, however often asked."""
        count = len(self.neighbours)
        if not count or self._dealt:
            return self._dealt
        seeds = cut(self.seed, threshold(count), count)
        keys = cut(self.pair.secret, threshold(count), count)
        self._dealt = {
            other: seal_share(self.pair, self.keys[other], self._context(self.rank, other), one + two)
            for other, one, two in zip(self.neighbours, seeds, keys, strict=True)
        }
        return self._dealt

    def keep(self, owner: int, sealed: bytes) -> None:
        """Take a neighbour's shares into custody, or raise `BadPayload`."""
        if owner not in self.neighbours:
            raise BadPayload("a share from a stranger")
        both = open_share(self.pair, self.keys[owner], self._context(owner, self.rank), sealed)
        if len(both) != 2 * SHARE_SIZE:
            raise BadPayload("a share of another size")
        self._shares[owner] = both[:SHARE_SIZE], both[SHARE_SIZE:]

    def _context(self, sender: int, receiver: int) -> bytes:
        return self.epoch + sender.to_bytes(8) + receiver.to_bytes(8)

    @property
    def complete(self) -> bool:
        """Whether all neighbours' shares are here: before that nothing is masked with them."""
        return len(self._shares) == len(self.neighbours)

    # --- masks ---

    def masked(self, value: Tensor) -> Tensor:
        """y_i. Made once: a second sum of this epoch is over the very same values."""
        if self._masked is None:
            total = add_mask(value.clone(), self.seed)
            for other in self.neighbours:
                seed = mask_seed(self.pair.mask, self.keys[other], self.epoch)
                add_mask(total, seed, negative=self.rank > other)
            self._masked = total
        return self._masked

    @property
    def spent(self) -> bool:
        """Whether this member's value may have left, masked."""
        return self._masked is not None

    # --- giving away ---

    def seed_share(self, owner: int) -> bytes | None:
        """My share of the seed of a member that is in the sum; None when its key's was given away, or there is none."""
        return self._give(owner, "seed", 0)

    def key_share(self, owner: int) -> bytes | None:
        """My share of the key of a member that is not in the sum; None when its seed's was given away."""
        return self._give(owner, "key", 1)

    def _give(self, owner: int, what: str, which: int) -> bytes | None:
        if owner not in self._shares or self._given.setdefault(owner, what) != what:
            return None
        return self._shares[owner][which]


# --- taking the masks off: with the seeds of all who are in the sum, and the keys of those who are not ---


def recovered(epoch: bytes, size: int, owner: int, shares: Mapping[int, bytes]) -> bytes | None:
    """A member's secret from the shares of its neighbours, by rank; None while they are too few."""
    circle = neighbours(epoch, size)[owner]
    places = {circle.index(rank) + 1: share for rank, share in shares.items() if rank in circle}
    needed = threshold(len(circle))
    if len(places) < needed:
        return None
    return join(dict(sorted(places.items())[:needed]))


def lift(
    total: Tensor, epoch: bytes, keys: Sequence[bytes], seeds: Mapping[int, bytes], lost: Mapping[int, bytes]
) -> Tensor:
    """Σq modulo 2⁶⁴ over the members whose seeds these are; `lost` holds the private keys of all the others."""
    plain = total - _blanket(tuple(sorted(seeds.items())), total.numel())
    graph = neighbours(epoch, len(keys))
    for owner, secret in sorted(lost.items()):
        private = X25519PrivateKey.from_private_bytes(secret)
        for other in (rank for rank in graph[owner] if rank in seeds):
            # What `other` added for a mask that nobody cancelled comes off.
            add_mask(plain, mask_seed(private, keys[other], epoch), negative=other < owner)
    return plain


@lru_cache(maxsize=1)
def _blanket(seeds: tuple[tuple[int, bytes], ...], length: int) -> Tensor:
    """The sum of all self masks. Cached: peers of one process expand it once."""
    total = torch.zeros(length, dtype=torch.int64)
    for _, seed in seeds:
        add_mask(total, seed)
    return total
