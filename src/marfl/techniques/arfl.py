"""AR-FL: everyone sends its whole model to everyone.

The naïve all-to-all baseline of MAR-FL (Mulitze, Woisetschläger, Jacobsen 2025, arXiv 2512.05234, section 3).
Among peers it is the exchange `full` in one group of everybody: whoever misses a vector may have it from any peer that
received it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from marfl.plan.cost import Cost, Messages, everyone, in_bytes, phase
from marfl.techniques.technique import ABSORBED, GlobalSum, Loss, one_group


@dataclass(frozen=True)
class ArFl(GlobalSum):
    """One phase, n−1 vectors per peer."""

    name: ClassVar[str] = "arfl"

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        yield from phase(*everyone(n), length)

    def cost(self, n: int, length: int) -> Cost:
        """In closed form, as there are n(n−1) messages."""
        each = in_bytes([(n - 1) * length] * n)
        return Cost(n, n * (n - 1) if length else 0, int(n > 1 and length > 0), each, each)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """Everyone averages what has arrived: only the dead ones' models are missing."""
        return ABSORBED

    def protocol(self, n: int) -> dict[str, Any]:
        return one_group("full")
