"""RDFL, ring decentralised federated learning: whole models travel round a closed ring.

Hu, Zhou, Xiao, Wu: GFL: A Decentralized Federated Learning Framework Based On Blockchain, 2020 (arXiv 2010.10996); as
MAR-FL (arXiv 2512.05234) measures it: n−1 hops, in each of which everyone forwards a whole model to its successor.
A ring all-gather: n(n−1) vectors, and a ring with a gap stands still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from marfl.plan.cost import BYTES_PER_VALUE
from marfl.protocol.attempt import Attempt
from marfl.protocol.exchange import register
from marfl.techniques.base import Loss, Traits
from marfl.techniques.families import EVERYBODY, GlobalSum, sum_in_rank_order
from marfl.techniques.hops import receive
from marfl.techniques.loss import ring_messages


@dataclass(frozen=True)
class Rdfl(GlobalSum):
    """n−1 phases, n−1 vectors per peer."""

    name: ClassVar[str] = "rdfl"
    title: ClassVar[str] = "RDFL"
    citation: ClassVar[str] = "Hu et al. 2020, arXiv 2010.10996"
    traits: ClassVar[Traits] = Traits(False, True, True, False, False)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """One peer more behind the gap waits for ever with every hop that was still to come."""
        messages = ring_messages(n, n - 1, deaths, died_in_round)
        return Loss(messages * length * BYTES_PER_VALUE, "stall")

    def protocol(self, n: int) -> dict[str, Any]:
        """After a stall the next attempt's ring is built from the new roster."""
        return {"exchange": "rdfl", "group_size": EVERYBODY, "fallbacks": ("rdfl",)}


async def all_gather(attempt: Attempt, value: Tensor) -> Tensor:
    """Pass on what came in the hop before; once everybody's vector has passed, add them all in rank order."""
    n, rank = attempt.plan.peers, attempt.rank
    held = {rank: value}
    for hop in range(n - 1):
        async with attempt.sending(hop, "gather", hop, [((rank + 1) % n, value)]):
            value = await receive(attempt, hop, attempt.tag("gather", hop), (rank - 1) % n, attempt.length)
        held[(rank - 1 - hop) % n] = value
    return sum_in_rank_order([held[origin] for origin in range(n)]) / attempt.roster.weight


register("rdfl", all_gather, lambda plan: plan.peers - 1)
