"""AR-FL: everyone sends its whole model to everyone.

The naïve all-to-all baseline of MAR-FL (Mulitze, Woisetschläger, Jacobsen 2025, arXiv 2512.05234, section 3).
Among peers it is the exchange `full` in one group of everybody: whoever misses a vector may have it from any peer that
received it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from marfl.techniques.base import Loss, Traits
from marfl.techniques.families import ABSORBED, EVERYBODY, GlobalSum


@dataclass(frozen=True)
class ArFl(GlobalSum):
    """One phase, n−1 vectors per peer."""

    name: ClassVar[str] = "arfl"
    title: ClassVar[str] = "AR-FL"
    citation: ClassVar[str] = "Mulitze et al. 2025, arXiv 2512.05234 (baseline)"
    traits: ClassVar[Traits] = Traits(False, True, True, True, False)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """Everyone averages what has arrived: only the dead ones' models are missing."""
        return ABSORBED

    def protocol(self, n: int) -> dict[str, Any]:
        return {"exchange": "full", "group_size": EVERYBODY, "fallbacks": ("full",)}
