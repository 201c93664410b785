"""One member's secrets of one epoch: the roster whose keys were published together.

y_i = q_i + PRG(b_i) + Σ_{j>i} PRG(s_ij) − Σ_{j<i} PRG(s_ij), with s_ij agreed between neighbours and b_i its own (the
double masking of Bonawitz et al. 2017, section 4). In a sum over the whole epoch the pairwise masks cancel. b_i and the
key behind s_ij are shared among the neighbours: to take the masks off, they give away b_i of a member that is in the
sum, or the key of one that is not; never both, so a value that arrives late stays hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from marfl.errors import BadPayload
from marfl.secagg.crypto import SHARE_SIZE, KeyPair, add_mask, cut, mask_seed, mended, open_share, seal_share
from marfl.secagg.graph import neighbours, threshold

Graph: TypeAlias = tuple[tuple[int, ...], ...]  # by rank, the ranks it shares masks with


def epoch_of(run: str, iteration: int, members: Sequence[str], keys: Sequence[bytes]) -> bytes:
    """The name of an epoch: everybody in it, with their cards."""
    digest = hashlib.sha256(f"{len(run)}:{run}:{iteration}:{len(members)}:".encode())
    for member, key in zip(members, keys, strict=True):
        digest.update(f"{len(member)}:{member}".encode() + key)
    return digest.digest()


@dataclass
class Session:
    """One member's part in an epoch."""

    epoch: bytes
    base: bytes  # hash of the state that the iteration starts from
    members: tuple[str, ...]  # in the order of the roster that founded the epoch
    rank: int
    pair: KeyPair = field(repr=False)
    keys: tuple[bytes, ...]  # everybody's cards, by rank
    _shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)  # of b and of the key, by owner
    _dealt: dict[int, bytes] = field(default_factory=dict, repr=False)
    _given: dict[int, str] = field(default_factory=dict)  # which of the two was given away
    _masked: Tensor | None = field(default=None, repr=False)

    @property
    def seed(self) -> bytes:
        """b_i."""
        return self.pair.seed

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        return self.graph[self.rank]

    @property
    def graph(self) -> Graph:
        return neighbours(self.base, self.members)

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


def recovered(circle: Sequence[int], shares: Mapping[int, bytes], fits: Callable[[bytes], bool]) -> bytes | None:
    """A member's secret from the shares of its neighbours, by rank; None while they are too few, or do not fit.

    `fits`: whether a secret is the one that its owner published a key or a hash of.
    """
    return mended(_placed(circle, shares), threshold(len(circle)), fits)


def spoilt(circle: Sequence[int], shares: Mapping[int, bytes]) -> bool:
    """Whether so many shares are here that they would give a secret, had their owner dealt good ones."""
    return len(_placed(circle, shares)) >= threshold(len(circle))


def _placed(circle: Sequence[int], shares: Mapping[int, bytes]) -> dict[int, bytes]:
    return {circle.index(rank) + 1: share for rank, share in shares.items() if rank in circle}


def lift(total: Tensor, session: Session, seeds: Mapping[int, bytes], lost: Mapping[int, bytes]) -> Tensor:
    """Σq over the members whose seeds these are, modulo 2⁶⁴ or what its integers hold.

    `lost` holds the private keys of all the others.
    """
    plain = total - _blanket(tuple(sorted(seeds.items())), total.numel(), total.dtype)
    for owner, secret in sorted(lost.items()):
        private = X25519PrivateKey.from_private_bytes(secret)
        for other in (rank for rank in session.graph[owner] if rank in seeds):
            # What `other` added for a mask that nobody cancelled comes off.
            add_mask(plain, mask_seed(private, session.keys[other], session.epoch), negative=other < owner)
    return plain


@lru_cache(maxsize=1)
def _blanket(seeds: tuple[tuple[int, bytes], ...], length: int, dtype: torch.dtype) -> Tensor:
    """The sum of all self masks. Cached: peers of one process expand it once."""
    total = torch.zeros(length, dtype=dtype)
    for _, seed in seeds:
        add_mask(total, seed)
    return total
