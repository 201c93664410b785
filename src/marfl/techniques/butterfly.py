"""BAR, butterfly all-reduce: peer j sums part j of everyone's vector and hands it back to everyone.

Rabenseifner: Optimization of Collective Reduction Operations, ICCS 2004 (reduce-scatter, then all-gather); the
all-reduce that Moshpit All-Reduce starts from (Ryabinin et al. 2021, arXiv 2103.03239).
Among peers it is the exchange `chunked` in one group of everybody. A dead owner's own share of its part was with
nobody else, so the part is lost, and with it the attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from marfl.plan.cost import BYTES_PER_VALUE
from marfl.techniques.base import Loss, Traits
from marfl.techniques.families import EVERYBODY, GlobalSum
from marfl.techniques.loss import spread


@dataclass(frozen=True)
class Butterfly(GlobalSum):
    """Two phases, 2(n−1)/n vectors per peer, over links between all pairs."""

    name: ClassVar[str] = "butterfly"
    title: ClassVar[str] = "BAR (butterfly)"
    citation: ClassVar[str] = "Rabenseifner 2004; Ryabinin et al. 2021, arXiv 2103.03239"
    traits: ClassVar[Traits] = Traits(False, True, True, False, False)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """Every other part lacks an input when a peer dies in the reduce; in the gather only the dead ones' parts."""
        alive = n - len(spread(n, deaths))
        messages = alive * (alive - 1) + (n * (n - 1) if died_in_round else 0)
        return Loss(messages * length // n * BYTES_PER_VALUE, "partial")

    def protocol(self, n: int) -> dict[str, Any]:
        return {"exchange": "chunked", "group_size": EVERYBODY, "fallbacks": ("chunked",)}
