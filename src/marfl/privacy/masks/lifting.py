"""Taking the masks off a sum: with the seeds of all who are in it, and the keys of those who are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from marfl.plan.masks import neighbours, threshold
from marfl.privacy.masks.keys import mask_seed
from marfl.privacy.masks.shamir import join
from marfl.privacy.masks.stream import add_mask


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
