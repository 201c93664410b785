"""Masked sums: who shares masks with whom, how many of them must answer, and what it costs.

Pairwise masks over the whole roster (Bonawitz et al. 2017) would cost every peer n−1 key agreements and as many mask
expansions; a sparse graph gives the same protection with O(log n) neighbours (Bell et al. 2020). The graph is a random
cycle of the members, known only once the roster is sealed; a peer's neighbours are the nearest on both sides of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, comb

KEY_BYTES = 64  # two X25519 public keys: one for masks, one for shares
SEED_BYTES = 32
SHARE_BYTES = 82  # two Shamir shares of 33 bytes and a 16-byte tag

FEWEST = 3  # contributions in a masked sum: two would show each other
LEAST_DEGREE = 32  # neighbours, where there are so many: 16 of them may collude, or be lost
COLLUDING = LOST = 0.1  # parts of a large swarm that the degree is made for
SECURITY = 2.0**-40  # likelihood that too many of anybody's neighbours collude
RECOVERY = 2.0**-30  # likelihood that too many of anybody's neighbours are lost


def threshold(degree: int) -> int:
    """How many of a peer's neighbours can reconstruct its secrets: more than half."""
    return degree // 2 + 1


@lru_cache(maxsize=64)
def degree(n: int) -> int:
    """Neighbours per member: all up to 33 members; after that the fewest that hold `SECURITY` and `RECOVERY`."""
    if n - 1 <= LEAST_DEGREE:
        return max(0, n - 1)
    for count in range(LEAST_DEGREE, n - 1, 2):
        betrayed = n * _tail(n - 1, ceil(COLLUDING * n), count, threshold(count))
        stranded = n * _tail(n - 1, ceil(LOST * n), count, count - threshold(count) + 1)
        if betrayed <= SECURITY and stranded <= RECOVERY:
            return count
    return n - 1


def _tail(population: int, marked: int, drawn: int, least: int) -> float:
    """P[at least so many marked ones among those drawn without replacement] (hypergeometric)."""
    ways = sum(comb(marked, x) * comb(population - marked, drawn - x) for x in range(least, min(marked, drawn) + 1))
    return ways / comb(population, drawn)


@lru_cache(maxsize=16)
def neighbours(seed: bytes, n: int) -> tuple[tuple[int, ...], ...]:
    """For every rank the ranks it shares masks with, ascending; everybody derives the same graph from the seed."""
    half, odd = divmod(degree(n), 2)
    if odd or degree(n) == n - 1:
        return tuple(tuple(other for other in range(n) if other != rank) for rank in range(n))
    cycle = sorted(range(n), key=lambda rank: hashlib.sha256(seed + rank.to_bytes(8)).digest())
    found: list[tuple[int, ...]] = [()] * n
    for place, rank in enumerate(cycle):
        found[rank] = tuple(sorted(cycle[(place + step) % n] for step in range(-half, half + 1) if step))
    return tuple(found)


@dataclass(frozen=True)
class MaskCost:
    """What masks add to one iteration when nobody fails; the masked values themselves are payload."""

    peers: int
    messages: int  # beyond those of the exchange and of the votes, which carry the keys
    bytes_total: int

    @property
    def bytes_per_peer(self) -> float:
        return self.bytes_total / self.peers


def mask_cost(n: int, *, leader_inside: bool = True) -> MaskCost:
    """Keys with every vote and all of them with the roster, shares to neighbours, seeds to the leader and back.

    A leader that is not a member itself, because it brings nothing to the sum, talks to one member more.
    """
    asked = n - leader_inside
    keys = asked * KEY_BYTES * (1 + n)
    shares = n * degree(n) * SHARE_BYTES
    seeds = asked * SEED_BYTES * (1 + n)
    return MaskCost(n, n * degree(n) + 4 * asked, keys + shares + seeds)
