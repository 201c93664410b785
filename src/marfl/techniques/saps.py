"""SAPS-PSGD: sparsification and adaptive peer selection.

Tang, Shi, Chu: Communication-Efficient Decentralized Learning with Sparsification and Adaptive Peer Selection, ICDCS
2020 (arXiv 2002.09692). Each iteration pairs the peers. A pair exchanges only the coordinates of a random mask that
everybody shares, one in `compression`, and averages them: x ← x∘(1−mask) + ½(x + x_partner)∘mask. The matching
prefers fast links, and the pairs of every block of `window` iterations connect all peers.

The matching is ours: while the pairs made since a block began leave the members in several pieces, the pieces are
paired first, each with one other: every iteration halves their number, so ⌈log₂ n⌉ iterations connect any n members
that stay. Everybody else is paired freely. In both steps the fastest of some random links come first, so that fast
links are preferred and yet all kinds are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from marfl.errors import InputError
from marfl.plan.cost import Messages, phase
from marfl.rng import key, numpy_stream
from marfl.techniques.technique import MixContext, Mixed, NoGlobalAverage

CANDIDATES = 4  # random links per peer, or piece of the graph, to choose from

Pair: TypeAlias = tuple[int, int]  # positions in the members
Speed: TypeAlias = Callable[[int, int], float]  # of the link between two positions


@dataclass(frozen=True)
class Saps(NoGlobalAverage):
    """One phase, 1/compression of a vector per peer."""

    compression: int = 100  # c in the paper
    window: int = 20  # iterations; at least ⌈log₂ n⌉, for in each the pieces of the graph can only join in pairs

    name: ClassVar[str] = "saps"

    def __post_init__(self) -> None:
        for name in ("compression", "window"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: must be at least 1")

    def kept(self, length: int) -> int:
        """How many coordinates travel."""
        return -(-length // self.compression)

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        """With an odd number somebody is left over."""
        peer = np.arange(n - n % 2)
        yield from phase(peer, peer ^ 1, self.kept(length))

    def mask(self, ctx: MixContext, length: int) -> Tensor:
        """The coordinates that travel in this iteration, the same for all peers: ⌈length / compression⌉ of them."""
        random = numpy_stream(ctx.seed, "saps", "mask", ctx.iteration)
        return torch.from_numpy(random.choice(length, self.kept(length), replace=False, shuffle=False)).sort().values

    def matching(self, ctx: MixContext) -> Matching:
        """Who is paired with whom; everybody computes the same."""
        needed = (len(ctx.members) - 1).bit_length()
        if self.window < needed:
            raise InputError(f"window = {self.window}: {len(ctx.members)} peers need at least {needed} iterations")
        return match(ctx, self.window)

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        found, mask = self.matching(ctx), self.mask(ctx, values[0].numel())
        mixed = list(values)
        for one, other in found.pairs:
            mixed[one] = _averaged(values[one], mask, values[other][mask])
            mixed[other] = _averaged(values[other], mask, values[one][mask])
        sent = [(source, dest, len(mask)) for pair in found.pairs for source, dest in (pair, pair[::-1])]
        return Mixed(mixed, found.memory, [Messages.of(sent)] if sent else [])


def _averaged(value: Tensor, mask: Tensor, theirs: Tensor) -> Tensor:
    mixed = value.clone()
    mixed[mask] = (value[mask] + theirs) * 0.5
    return mixed


# --- who is paired with whom ---


@dataclass(frozen=True)
class Matching:
    """Disjoint pairs, and what to remember of them."""

    pairs: tuple[Pair, ...]
    memory: dict[str, Any]  # since: the block's first iteration; links: pairs of peer indices that joined two pieces


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
