"""Who meets whom: the core-and-spares planner, exact for every number of peers.

`n` peers are laid out in `R = M_2·…·M_d` cells of `m = ⌊n/R⌋` core members each; the at most `R − 1` peers left over
are spares, at most one in a cell. Round 0 sums within each cell (a spare hands its value in and sits out); round j
sums along digit j of the cell's number, at every core position. Proof of exactness: after round 0 all core members
of a cell hold the cell's sum, and the cells partition the peers; at each position the cells form a complete grid, so
after round j a peer holds the sum over all cells that agree with it on the digits after j.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement, pairwise
from typing import NamedTuple, TypeAlias

from marfl.errors import InputError

Group: TypeAlias = tuple[int, ...]  # ranks in coordinate order, the order in which their values are added up
Round: TypeAlias = tuple[Group, ...]  # disjoint groups that sum at the same time

MAX_PEERS = 1_000_000  # a plan lists every rank once per round: beyond this it would not fit in memory


class Seat(NamedTuple):
    """One peer's place in one round."""

    core: tuple[int, ...]  # ranks that hold the group's sum after the round, in coordinate order
    spare: int | None  # a rank that hands in its value and then sits out (round 0 only)

    @property
    def members(self) -> tuple[int, ...]:
        """Everyone whose value is in the group's sum, in the order of the sum: the core, then the spare."""
        return self.core if self.spare is None else (*self.core, self.spare)


@dataclass(frozen=True)
class Plan:
    """Who meets whom in one iteration, by rank (see `order`)."""

    peers: int
    group_size: int  # M in the paper; a group that includes a spare may have one member more
    factors: tuple[int, ...]  # (m, M_2, …, M_d); empty when the plan is not a grid
    rounds: tuple[Round, ...]  # a cell's spare is last in its group of round 0
    spares: tuple[tuple[int, int], ...]  # (spare, helper): the helper gives the spare the result at the end
    exact: bool  # replaying the rounds provably gives every peer the sum over all peers

    def seats(self, rank: int) -> tuple[Seat | None, ...]:
        """The peer's place in each round; None where it sits out (a spare after round 0)."""
        self._check_rank(rank)
        return tuple(row[rank] for row in self._seats)

    def replicas(self, rank: int, done: int) -> tuple[int, ...]:
        """The other core ranks that hold the same partial sum as `rank` after `done` rounds of an exact plan.

        Nobody before the first round, the core cellmates after it, everybody in the core at the end. A spare sits
        out and holds no partial sum, so it has no replicas.
        """
        self._check_rank(rank)
        if not self.exact:
            raise InputError("replicas are known for exact plans only, and this plan is not exact")
        if not 0 <= done <= len(self.rounds):
            raise InputError(f"done = {done}: must be between 0 and the plan's {len(self.rounds)} rounds")
        if rank in self._helper_of:
            return ()
        holders = {rank}
        for row in reversed(self._seats[:done]):
            holders = {peer for seat in {row[holder] for holder in holders} if seat for peer in seat.core}
        return tuple(sorted(holders - {rank}))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.peers:
            raise InputError(f"rank = {rank}: must be between 0 and {self.peers - 1}")

    @cached_property
    def tables(self) -> tuple[tuple[Seat, ...], ...]:
        """The groups of each round, as seats."""
        return tuple(tuple(map(self._table, groups)) for groups in self.rounds)

    def _table(self, group: Group) -> Seat:
        return Seat(group[:-1], group[-1]) if group[-1] in self._helper_of else Seat(group, None)

    @cached_property
    def _helper_of(self) -> dict[int, int]:
        return dict(self.spares)

    @cached_property
    def _seats(self) -> tuple[tuple[Seat | None, ...], ...]:
        """Seats by round and rank, built once; the members of a group share one Seat."""
        rows = []
        for table in self.tables:
            row: list[Seat | None] = [None] * self.peers
            for seat in table:
                for rank in seat.members:
                    row[rank] = seat
            rows.append(tuple(row))
        return tuple(rows)


@lru_cache(maxsize=128)
def plan(n: int, group_size: int) -> Plan:
    """The core-and-spares plan for `n` peers in groups of at most `group_size` (one more with a spare).

    Always exact. Fewest rounds first, then the smallest largest group, then the fewest spares.
    """
    check_size(n, group_size)
    factors = _factors(n, group_size)
    core, radices = factors[0], factors[1:]
    cells = math.prod(radices)
    rounds = (_cells(n, cells), *_lines(core, radices)) if n > 1 else ()
    helpers = ((rank, rank % cells % core * cells + rank % cells) for rank in range(core * cells, n))
    return Plan(n, group_size, factors, rounds, tuple(helpers), exact=True)


def check_size(n: int, group_size: int) -> None:
    """Refuse a number of peers or a group size that no plan can have."""
    if not 1 <= n <= MAX_PEERS:
        raise InputError(f"peers = {n}: must be between 1 and {MAX_PEERS:,}")
    if group_size < 2:
        raise InputError(f"group_size = {group_size}: must be at least 2")


def order(run: str, iteration: int, members: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """The roster's order: members (peer index, peer id) by sha256(run, iteration, index), then id; rank = position.

    The shuffle spreads the load of spares and owners over the iterations; it leaves the ids out as long as the
    indices differ, so that a simulated and a real run agree.
    """
    prefix = hashlib.sha256(f"{len(run.encode())}:{run}:{iteration}:".encode())

    def place(member: tuple[int, str]) -> tuple[bytes, str]:
        digest = prefix.copy()
        digest.update(str(member[0]).encode())
        return digest.digest(), member[1]

    return sorted(members, key=place)


def split(length: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """Cut `length` values in contiguous [start, stop) slices; sizes differ by at most one, the larger ones first.

    Every slice begins at a multiple of the `unit`, and sizes are counted in it.
    """
    size, larger = divmod(-(-length // unit), parts)
    starts = [min(length, (part * size + min(part, larger)) * unit) for part in range(parts + 1)]
    return list(pairwise(starts))


def _factors(n: int, group_size: int) -> tuple[int, ...]:
    """(m, M_2, …, M_d) with m·ΠM_j ≤ n < (m+1)·ΠM_j: the first number of rounds that has a solution decides."""
    rounds = 1
    while True:
        radices = combinations_with_replacement(range(2, min(group_size, n) + 1), rounds - 1)
        candidates = [(n // math.prod(rest), *rest) for rest in radices if n // (group_size + 1) < math.prod(rest) <= n]
        if candidates:
            return min(candidates, key=lambda factors: _merit(n, factors))
        rounds += 1


def _merit(n: int, factors: Sequence[int]) -> tuple[int, int, int]:
    """Less is better: the largest group, then the spares; a tie goes to larger cells, whose sums have more replicas."""
    spares = n - math.prod(factors)
    return max(factors[0] + (spares > 0), *factors), spares, -factors[0]


def _cells(n: int, cells: int) -> Round:
    """Round 0: rank k is in cell k mod R at position k div R; the spare, one position past the core, comes last."""
    return tuple(tuple(range(cell, n, cells)) for cell in range(cells))


def _lines(core: int, radices: Sequence[int]) -> list[Round]:
    """Rounds 1…d−1: for every position, the lines of the grid of cells along one digit (lowest digit first)."""
    cells = math.prod(radices)
    rounds, stride = [], 1
    for radix in radices:
        block = stride * radix
        starts = (first + low for first in range(0, core * cells, block) for low in range(stride))
        rounds.append(tuple(tuple(range(start, start + block, stride)) for start in starts))
        stride = block
    return rounds
