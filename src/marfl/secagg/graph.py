"""Masked sums: who shares masks with whom, how many of them must answer, and what it costs.

Pairwise masks over the whole roster (Bonawitz et al. 2017) would cost every peer n−1 key agreements and as many mask
expansions; a sparse graph gives the same protection with O(log n) neighbours (Bell et al. 2020). The graph is a random
cycle of the members; a peer's neighbours are the nearest on both sides of it. It follows from the state that the
iteration starts from and from who is a member, and from nothing else: a leader can shuffle it only by leaving somebody
out or taking somebody in, and each such try has the likelihood `SECURITY` at most.

More than two thirds of a peer's neighbours must answer to reconstruct a secret of it (Bonawitz et al. 2017, section
6.2). A neighbour that does not lie gives a share of a peer's seed or of its key, so d neighbours of which c lie give
d + c shares at most. Both secrets take 2t of them: with t > 2d/3, nobody who has fewer than a third of the neighbours
on its side has both, even if it could have two rosters unmasked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, comb

KEY_BYTES = 96  # two X25519 public keys, one for masks and one for shares, and the hash of a seed
SIGNATURE_BYTES = 64
SEED_BYTES = 32
SHARE_BYTES = 82  # two Shamir shares of 33 bytes and a 16-byte tag

FEWEST = 3  # contributions in a masked sum: two would show each other
LEAST_DEGREE = 32  # neighbours, where there are so many: 11 of them may lie with a leader, 10 may be lost
COLLUDING = LOST = 0.1  # parts of a large swarm that the degree is made for
SECURITY = 2.0**-40  # likelihood that too many of anybody's neighbours lie with a leader
RECOVERY = 2.0**-30  # likelihood that too many of anybody's neighbours are lost


def threshold(degree: int) -> int:
    """How many of a peer's neighbours can reconstruct its secrets: more than two thirds."""
    return 2 * degree // 3 + 1


def betrayal(degree: int) -> int:
    """How many lying neighbours a leader would need that has two rosters unmasked: more than a third."""
    return 2 * threshold(degree) - degree


@lru_cache(maxsize=64)
def degree(n: int) -> int:
    """Neighbours per member: all up to 33 members; after that the fewest that hold `SECURITY` and `RECOVERY`."""
    if n - 1 <= LEAST_DEGREE:
        return max(0, n - 1)
    for count in range(LEAST_DEGREE, n - 1, 2):
        betrayed = n * _tail(n - 1, ceil(COLLUDING * n), count, betrayal(count))
        stranded = n * _tail(n - 1, ceil(LOST * n), count, count - threshold(count) + 1)
        if betrayed <= SECURITY and stranded <= RECOVERY:
            return count
    return n - 1


def _tail(population: int, marked: int, drawn: int, least: int) -> float:
    """P[at least so many marked ones among those drawn without replacement] (hypergeometric)."""
    ways = sum(comb(marked, x) * comb(population - marked, drawn - x) for x in range(least, min(marked, drawn) + 1))
    return ways / comb(population, drawn)


@lru_cache(maxsize=16)
def neighbours(base: bytes, members: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """For every rank the ranks it shares masks with, ascending, in the iteration that starts from this state.

    Everybody derives the same graph, in whichever order the members are named.
    """
    n = len(members)
    half, odd = divmod(degree(n), 2)
    if odd or degree(n) == n - 1:
        return tuple(tuple(other for other in range(n) if other != rank) for rank in range(n))
    seed = hashlib.sha256(b"marfl neighbours" + base)
    for member in sorted(members):
        seed.update(f"{len(member)}:{member}".encode())
    places = [hashlib.sha256(seed.digest() + member.encode()).digest() for member in members]
    cycle = sorted(range(n), key=places.__getitem__)
    found: list[tuple[int, ...]] = [()] * n
    for place, rank in enumerate(cycle):
        found[rank] = tuple(sorted(cycle[(place + step) % n] for step in range(-half, half + 1) if step))
    return tuple(found)


# --- what it costs ---


@dataclass(frozen=True)
class MaskCost:
    """What masks add to one iteration when nobody fails; the masked values themselves are payload."""

    peers: int
    messages: int  # beyond those of the exchange and of the votes, which carry the keys
    bytes_total: int

    @property
    def bytes_per_peer(self) -> float:
        return self.bytes_total / self.peers


def pledges_needed(electors: int, liars: int) -> int:
    """Signatures in the proof that a roster may be unmasked: a quorum as `marfl.protocol.ballot` has it."""
    return (electors + _borne(electors, liars)) // 2 + 1


def _borne(electors: int, liars: int) -> int:
    """Liars that a decision bears, as `marfl.protocol.ballot.bearable` has it."""
    return max(0, min(liars, (electors - 1) // 3))


def mask_cost(n: int, *, electors: int = 0, liars: int = 0, leader_inside: bool = True) -> MaskCost:
    """Signed keys with every vote, all of them with the roster, shares to neighbours, pledges, seeds to the leader and
    back.

    `electors`: all who vote, where they are more than the members; those who bring nothing are asked for their pledges
    when the members are no quorum. A leader that is not a member itself talks to one member more.
    """
    asked, voters, each = n - leader_inside, max(n, electors), degree(n)
    needed = pledges_needed(voters, liars)
    half = leader_inside and 2 * n == voters and not _borne(voters, liars)  # the first elector's vote breaks the tie
    others = 0 if n >= needed or half else voters - n - (not leader_inside)
    keys = asked * (KEY_BYTES * (1 + n) + SIGNATURE_BYTES * (1 + each))
    pledges = SIGNATURE_BYTES * (asked + others + asked * (n if half else needed))
    seeds = asked * SEED_BYTES * (1 + n)
    messages = n * each + 4 * asked + 2 * others
    return MaskCost(n, messages, keys + n * each * SHARE_BYTES + pledges + seeds)
