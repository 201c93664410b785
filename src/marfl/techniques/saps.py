"""SAPS-PSGD: sparsification and adaptive peer selection.

Tang, Shi, Chu: Communication-Efficient Decentralized Learning with Sparsification and Adaptive Peer Selection, ICDCS
2020 (arXiv 2002.09692). Each iteration pairs the peers. A pair exchanges only the coordinates of a random mask that
everybody shares, one in `compression`, and averages them: x ← x∘(1−mask) + ½(x + x_partner)∘mask. The matching
prefers fast links, and the pairs of every block of `window` iterations connect all peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marfl.errors import InputError
from marfl.net.base import Net
from marfl.plan.schedule import Transfer
from marfl.rng import numpy_stream
from marfl.techniques.base import MixContext, Mixed, Traits
from marfl.techniques.families import NoGlobalAverage
from marfl.techniques.matching import Matching, match
from marfl.techniques.talk import Circle, Turn, Voice


@dataclass(frozen=True)
class Saps(NoGlobalAverage):
    """One phase, 1/compression of a vector per peer."""

    compression: int = 100  # c in the paper
    window: int = 20  # iterations; at least ⌈log₂ n⌉, for in each the pieces of the graph can only join in pairs

    name: ClassVar[str] = "saps"
    title: ClassVar[str] = "SAPS-PSGD"
    citation: ClassVar[str] = "Tang et al. 2020, arXiv 2002.09692"
    traits: ClassVar[Traits] = Traits(True, False, False, False, False)

    def __post_init__(self) -> None:
        for name in ("compression", "window"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: must be at least 1")

    def options(self, n: int) -> dict[str, int]:
        return {"compression": self.compression}

    def mask(self, ctx: MixContext, length: int) -> Tensor:
        """The coordinates that travel in this iteration, the same for all peers: ⌈length / compression⌉ of them."""
        kept = -(-length // self.compression)
        random = numpy_stream(ctx.seed, "saps", "mask", ctx.iteration)
        return torch.from_numpy(random.choice(length, kept, replace=False, shuffle=False)).sort().values

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
        both = (ends for pair in found.pairs for ends in (pair, pair[::-1]))
        sent = tuple(Transfer(source, dest, 0, len(mask)) for source, dest in both)
        return Mixed(mixed, found.memory, [sent] if sent else [])

    async def converse(self, net: Net, circle: Circle, value: Tensor) -> Turn:
        """One peer's iteration; without its partner it learns nothing."""
        voice, found = Voice(net, circle), self.matching(circle.ctx)
        partner = found.partner(voice.position)
        if partner is None:
            return Turn(value, found.memory, {})
        mask = self.mask(circle.ctx, value.numel())
        theirs, _ = await asyncio.gather(
            voice.hear_vector(partner, "masked", len(mask)), voice.tell_vector(partner, "masked", value[mask])
        )
        mixed = value if theirs is None else _averaged(value, mask, theirs)
        return Turn(mixed, found.memory, voice.missing)


def _averaged(value: Tensor, mask: Tensor, theirs: Tensor) -> Tensor:
    mixed = value.clone()
    mixed[mask] = (value[mask] + theirs) * 0.5
    return mixed
