"""Gossip averaging: everyone averages with a few others, chosen anew in every iteration.

Boyd, Ghosh, Prabhakar, Shah: Randomized Gossip Algorithms, IEEE Transactions on Information Theory 52(6), 2006;
Jelasity, Montresor, Babaoglu: Gossip-Based Aggregation in Large Dynamic Networks, ACM TOCS 23(3), 2005 (push-pull).
Here the members sit down in a fresh random circle. Everyone pushes its whole model to the next `fanout` and averages
its own with those of the `fanout` before it: n·fanout vectors, and the mean over all members never changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from torch import Tensor

from marfl.errors import InputError
from marfl.net.base import Net
from marfl.plan.schedule import Transfer
from marfl.rng import key
from marfl.techniques.base import MixContext, Mixed, Traits
from marfl.techniques.families import NoGlobalAverage, sum_in_rank_order
from marfl.techniques.talk import Circle, Turn, Voice


@dataclass(frozen=True)
class Gossip(NoGlobalAverage):
    """One phase, `fanout` vectors per peer."""

    fanout: int = 1  # all others, where there are not so many

    name: ClassVar[str] = "gossip"
    title: ClassVar[str] = "gossip"
    citation: ClassVar[str] = "Boyd et al. 2006; Jelasity et al. 2005"
    traits: ClassVar[Traits] = Traits(True, False, True, True, False)

    def __post_init__(self) -> None:
        if self.fanout < 1:
            raise InputError(f"fanout = {self.fanout}: must be at least 1")

    def options(self, n: int) -> dict[str, int]:
        return {"fanout": min(self.fanout, n - 1)}

    def pushed_by(self, ctx: MixContext) -> list[list[int]]:
        """For each position, whose models it averages with its own, the nearest before it in the circle first."""
        n = len(ctx.members)
        circle = Random(key(ctx.seed, "gossip", ctx.iteration)).sample(range(n), n)
        steps = range(1, min(self.fanout, n - 1) + 1)
        before = {peer: [circle[place - step] for step in steps] for place, peer in enumerate(circle)}
        return [before[position] for position in range(n)]

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        sources = self.pushed_by(ctx)
        mixed = [_mean([values[own], *(values[s] for s in others)]) for own, others in enumerate(sources)]
        length = values[0].numel()
        sent = tuple(Transfer(s, own, 0, length) for own, others in enumerate(sources) for s in others)
        return Mixed(mixed, ctx.memory, [sent] if sent else [])

    async def converse(self, net: Net, circle: Circle, value: Tensor) -> Turn:
        """One peer's iteration: whoever is missing is not in its average."""
        voice = Voice(net, circle)
        sources = self.pushed_by(circle.ctx)
        pushes = [dest for dest, others in enumerate(sources) if voice.position in others]
        heard = await asyncio.gather(
            *(voice.hear_vector(source, "gossip", value.numel()) for source in sources[voice.position]),
            *(voice.tell_vector(dest, "gossip", value) for dest in pushes),
        )
        return Turn(_mean([value, *(x for x in heard if x is not None)]), circle.ctx.memory, voice.missing)


def _mean(values: Sequence[Tensor]) -> Tensor:
    return sum_in_rank_order(values) / len(values)
