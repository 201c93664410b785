"""The paper's group keys (Moshpit All-Reduce, Ryabinin et al. 2021; MAR-FL, arXiv 2512.05234), and random groups.

Both give a `Plan` without spares. It is exact on a perfect grid (N = M^d, d rounds of keys: each round sums along one
digit of the index) and when one group holds everybody; elsewhere the rounds mix, and end near the mean, not on it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from marfl.errors import InputError
from marfl.plan.grid import Plan, Round, check_size

Key: TypeAlias = tuple[int, ...]  # of a group: whoever has the same one meets


def keys_plan(n: int, group_size: int, rounds: int | None = None, dimension: int | None = None) -> Plan:
    """The paper's plan: `dimension` is d, by default the smallest with M^d ≥ n, and `rounds` is d by default.

    Write the peer's index in base M; of its d lowest digits the first d−1 are its first key. In each round the peers,
    sorted by (key, index), are cut in runs of M; then every key drops its first entry and appends the peer's rank
    inside its run. On a perfect grid a run is exactly the peers of one key; elsewhere (the paper's approximate
    setting: n = 125, M = 3, 4 rounds, d = 4) it keeps the groups from growing.
    """
    check_size(n, group_size)
    dimension = _grid_dimension(n, group_size) if dimension is None else dimension
    if dimension < 1:
        raise InputError(f"dimension = {dimension}: must be at least 1")
    rounds = dimension if rounds is None else rounds
    _check_rounds(rounds)
    keys = [first_key(index, group_size, dimension) for index in range(n)]
    done: list[Round] = []
    for _ in range(rounds):
        done.append(_runs(sorted(range(n), key=lambda peer: (keys[peer], peer)), group_size))
        for group in done[-1]:
            for place, peer in enumerate(group):
                keys[peer] = next_key(keys[peer], place)
    side = min(n, group_size)
    exact = rounds == dimension and n == side**dimension
    return Plan(n, group_size, (side,) * dimension if exact else (), tuple(done), spares=(), exact=exact)


def first_key(index: int, group_size: int, dimension: int) -> Key:
    """The key of a peer's first round: all but the last of its index's d lowest digits in base M."""
    return _digits(index, group_size, dimension)[:-1]


def next_key(key: Key, place: int) -> Key:
    """The key after a round in which the peer had this place in its group: the first entry goes, the place comes."""
    return (*key, place)[1:]


def key_meetings(n: int, group_size: int, rounds: int, dimension: int) -> tuple[Mapping[Key, tuple[int, ...]], ...]:
    """Who has which key in which round when all n peers are there, and a group is exactly the peers of one key.

    Unlike in `keys_plan` nobody cuts the sorted list of all peers in runs: nobody sees it. On perfect grids both agree;
    elsewhere these groups may be smaller than M, and with fewer rounds than M^d ≥ n asks for, larger.
    """
    check_size(n, group_size)
    keys = [first_key(index, group_size, dimension) for index in range(n)]
    done = []
    for _ in range(rounds):
        groups: dict[Key, list[int]] = defaultdict(list)
        for peer, key in enumerate(keys):
            groups[key].append(peer)
        for key, group in groups.items():
            for place, peer in enumerate(group):
                keys[peer] = next_key(key, place)
        done.append({key: tuple(group) for key, group in groups.items()})
    return tuple(done)


def random_plan(n: int, group_size: int, rounds: int, seed: int) -> Plan:
    """In every round a fresh random partition in runs of `group_size` (the last one may be smaller)."""
    check_size(n, group_size)
    _check_rounds(rounds)
    rng = random.Random(seed)
    done = tuple(_runs(rng.sample(range(n), n), group_size) for _ in range(rounds))
    return Plan(n, group_size, (), done, spares=(), exact=rounds == 1 and n <= group_size)


def _grid_dimension(n: int, group_size: int) -> int:
    dimension = 1
    while group_size**dimension < n:
        dimension += 1
    return dimension


def _check_rounds(rounds: int) -> None:
    if rounds < 1:
        raise InputError(f"rounds = {rounds}: must be at least 1")


def _digits(number: int, base: int, count: int) -> Key:
    """The `count` lowest digits of a number, most significant first."""
    return tuple(number // base**place % base for place in reversed(range(count)))


def _runs(peers: Sequence[int], group_size: int) -> Round:
    return tuple(tuple(peers[start : start + group_size]) for start in range(0, len(peers), group_size))
