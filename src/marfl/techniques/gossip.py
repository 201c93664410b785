"""Gossip averaging: everyone averages with a few others, chosen anew in every iteration.

Boyd, Ghosh, Prabhakar, Shah: Randomized Gossip Algorithms, IEEE Transactions on Information Theory 52(6), 2006;
Jelasity, Montresor, Babaoglu: Gossip-Based Aggregation in Large Dynamic Networks, ACM TOCS 23(3), 2005 (push-pull).
Here the members sit down in a fresh random circle. Everyone pushes its whole model to the next `fanout` and averages
its own with those of the `fanout` before it: n·fanout vectors, and the mean over all members never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
from torch import Tensor

from marfl.errors import InputError
from marfl.plan.cost import Messages, phase
from marfl.rng import key
from marfl.techniques.technique import MixContext, Mixed, NoGlobalAverage, sum_in_rank_order


@dataclass(frozen=True)
class Gossip(NoGlobalAverage):
    """One phase, `fanout` vectors per peer."""

    fanout: int = 1  # all others, where there are not so many

    name: ClassVar[str] = "gossip"

    def __post_init__(self) -> None:
        if self.fanout < 1:
            raise InputError(f"fanout = {self.fanout}: must be at least 1")

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        source, step = np.divmod(np.arange(n * min(self.fanout, n - 1)), max(1, min(self.fanout, n - 1)))
        yield from phase(source, (source + step + 1) % n, length)

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
        sent = [(source, own, length) for own, others in enumerate(sources) for source in others]
        return Mixed(mixed, ctx.memory, [Messages.of(sent)] if sent else [])


def _mean(values: Sequence[Tensor]) -> Tensor:
    return sum_in_rank_order(values) / len(values)
