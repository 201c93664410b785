"""Pairs for SAPS-PSGD (Tang et al. 2020): fast links first, and a connected graph over every block of iterations.

Time is cut in blocks of `window` iterations. While the pairs made since the block began leave the members in several
pieces, the pieces are paired first, each with one other: every iteration halves their number, so ⌈log₂ n⌉ iterations
connect any n members that stay. Everybody else is paired freely. In both steps the fastest of some random links come
first, so that fast links are preferred and yet all kinds are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from marfl.rng import key
from marfl.techniques.base import MixContext

CANDIDATES = 4  # random links per peer, or piece of the graph, to choose from

Pair: TypeAlias = tuple[int, int]  # positions in the members
Speed: TypeAlias = Callable[[int, int], float]  # of the link between two positions


@dataclass(frozen=True)
class Matching:
    """Disjoint pairs, and what to remember of them."""

    pairs: tuple[Pair, ...]
    memory: dict[str, Any]  # since: the block's first iteration; links: pairs of peer indices that joined two pieces

    def partner(self, position: int) -> int | None:
        """Whom this member is paired with, if anybody."""
        return next((pair[pair[0] == position] for pair in self.pairs if position in pair), None)


def match(ctx: MixContext, window: int) -> Matching:
    """Pair the members; with an odd number somebody is left over. A function of the context alone."""
    random = Random(key(ctx.seed, "saps", "matching", ctx.iteration))
    since = ctx.iteration - ctx.iteration % window
    links = _links_since(ctx.memory, since)
    position = {peer: place for place, peer in enumerate(ctx.members)}
    known = [(position[a], position[b]) for a, b in links if a in position and b in position]
    speed = _speed(ctx)
    bridges = _pairs(_pieces(len(ctx.members), known), speed, random)
    taken = {place for pair in bridges for place in pair}
    free = [[place] for place in range(len(ctx.members)) if place not in taken]
    pairs = (*bridges, *_pairs(free, speed, random))
    joined = [[ctx.members[a], ctx.members[b]] for a, b in bridges]
    return Matching(pairs, {"since": since, "links": [*links, *joined]})


def _links_since(memory: Mapping[str, Any], since: int) -> list[list[int]]:
    """What was joined in this block: a new block begins with nothing."""
    return list(memory["links"]) if memory and memory["since"] == since else []


def _speed(ctx: MixContext) -> Speed:
    given, members = ctx.speed, ctx.members
    return (lambda a, b: 0.0) if given is None else (lambda a, b: given(members[a], members[b]))


def _pieces(n: int, links: Iterable[Pair]) -> list[list[int]]:
    """The connected pieces of a graph over 0…n−1, each in ascending order."""
    root = list(range(n))

    def find(place: int) -> int:
        while root[place] != place:
            root[place] = root[root[place]]  # halve the path
            place = root[place]
        return place

    for one, other in links:
        root[find(one)] = find(other)
    pieces: dict[int, list[int]] = {}
    for place in range(n):
        pieces.setdefault(find(place), []).append(place)
    return list(pieces.values())


def _pairs(units: Sequence[Sequence[int]], speed: Speed, random: Random) -> list[Pair]:
    """Join units (peers, or pieces of the graph) two by two, by a link each; of an odd number one is left.

    Of a few random links of every unit the fastest are taken first; units that are left over take what there is.
    """
    if len(units) < 2:
        return []
    tried = [_random_link(units, one, random) for one in range(len(units)) for _ in range(CANDIDATES)]
    left = set(range(len(units)))
    pairs = []
    for one, other, pair in sorted(tried, key=lambda link: -speed(*link[2])):
        if one in left and other in left:
            left -= {one, other}
            pairs.append(pair)
    rest = random.sample(sorted(left), len(left))
    return pairs + [
        (random.choice(units[a]), random.choice(units[b])) for a, b in zip(rest[::2], rest[1::2], strict=False)
    ]


def _random_link(units: Sequence[Sequence[int]], one: int, random: Random) -> tuple[int, int, Pair]:
    """A link between a member of this unit and one of another: (unit, other unit, the two members)."""
    other = (one + random.randrange(1, len(units))) % len(units)
    return one, other, (random.choice(units[one]), random.choice(units[other]))
