"""BAR, butterfly all-reduce: peer j sums part j of everyone's vector and hands it back to everyone.

Rabenseifner: Optimization of Collective Reduction Operations, ICCS 2004 (reduce-scatter, then all-gather); the
all-reduce that Moshpit All-Reduce starts from (Ryabinin et al. 2021, arXiv 2103.03239).
Among peers it is the exchange `chunked` in one group of everybody. A dead owner's own share of its part was with
nobody else, so the part is lost, and with it the attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from marfl.plan.cost import BYTES_PER_VALUE, Cost, Messages, everyone, in_bytes, phase
from marfl.plan.grid import split
from marfl.techniques.technique import GlobalSum, Loss, one_group, ranks_of_dead


@dataclass(frozen=True)
class Butterfly(GlobalSum):
    """Two phases, 2(n−1)/n vectors per peer, over links between all pairs."""

    name: ClassVar[str] = "butterfly"

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        owner, peer = everyone(n)
        parts = np.array([stop - start for start, stop in split(length, n)], dtype=np.int64)[owner]
        yield from phase(peer, owner, parts)
        yield from phase(owner, peer, parts)

    def cost(self, n: int, length: int) -> Cost:
        """In closed form, as there are 2n(n−1) messages.

        Peer j sends all but part j once, and part j n−1 times; it receives as much.
        """
        each = in_bytes(length + (stop - start) * (n - 2) for start, stop in split(length, n))
        return Cost(n, 2 * (n - 1) * min(n, length), 2 if n > 1 and length else 0, each, each)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """Every other part lacks an input when a peer dies in the reduce; in the gather only the dead ones' parts."""
        alive = n - len(ranks_of_dead(n, deaths))
        messages = alive * (alive - 1) + (n * (n - 1) if died_in_round else 0)
        return Loss(messages * length // n * BYTES_PER_VALUE, "partial")

    def protocol(self, n: int) -> dict[str, Any]:
        return one_group("chunked")
