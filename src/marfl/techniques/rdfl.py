"""RDFL, ring decentralised federated learning: whole models travel round a closed ring.

Hu, Zhou, Xiao, Wu: GFL: A Decentralized Federated Learning Framework Based On Blockchain, 2020 (arXiv 2010.10996); as
MAR-FL (arXiv 2512.05234) measures it: n−1 hops, in each of which everyone forwards a whole model to its successor.
A ring all-gather: n(n−1) vectors, and a ring with a gap stands still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from marfl.plan.cost import BYTES_PER_VALUE, Cost, Messages, in_bytes, phase
from marfl.techniques.technique import GlobalSum, Loss, one_group, stalled_ring_messages, sum_in_rank_order

if TYPE_CHECKING:
    from torch import Tensor

    from marfl.protocol.attempt import Attempt


@dataclass(frozen=True)
class Rdfl(GlobalSum):
    """n−1 phases, n−1 vectors per peer."""

    name: ClassVar[str] = "rdfl"

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        peer = np.arange(n)
        for _ in range(n - 1):
            yield from phase(peer, (peer + 1) % n, length)

    def cost(self, n: int, length: int) -> Cost:
        """In closed form, as there are n(n−1) messages."""
        each = in_bytes([(n - 1) * length] * n)
        return Cost(n, n * (n - 1) if length else 0, n - 1 if length else 0, each, each)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """With every further hop one more peer behind the gap waits in vain."""
        messages = stalled_ring_messages(n, n - 1, deaths, died_in_round)
        return Loss(messages * length * BYTES_PER_VALUE, "stall")

    def protocol(self, n: int) -> dict[str, Any]:
        """After a stall the next attempt's ring is built from the new roster."""
        return one_group("rdfl")


async def all_gather(attempt: Attempt, value: Tensor) -> Tensor:
    """Pass on what came in the hop before; once everybody's vector has passed, add them all in rank order."""
    from marfl.techniques.hops import receive  # torch takes a second: only where peers run it

    n, rank = attempt.plan.peers, attempt.rank
    held = {rank: value}
    for hop in range(n - 1):
        async with attempt.sending(hop, "gather", hop, [((rank + 1) % n, value)]):
            value = await receive(attempt, hop, attempt.tag("gather", hop), (rank - 1) % n, attempt.length)
        held[(rank - 1 - hop) % n] = value
    return attempt.averaged(sum_in_rank_order([held[origin] for origin in range(n)]))
