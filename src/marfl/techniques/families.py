"""What techniques have in common: those that end on one sum over everybody, and those without a global average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor

from marfl.errors import InputError
from marfl.plan.cost import Cost, cost
from marfl.plan.grid import MAX_PEERS, plan
from marfl.plan.rivals import rival_phases
from marfl.plan.schedule import Phase
from marfl.protocol.exchange import sum_in_plan_order
from marfl.techniques.base import Loss, MixContext, Mixed, Span

EVERYBODY = MAX_PEERS  # a group size that no number of peers exceeds: one group of all, whoever joins
ABSORBED = Loss(0, "absorbed")


def sum_in_rank_order(values: Sequence[Tensor]) -> Tensor:
    """x_0 + x_1 + …, one after the other: what a group of everybody adds up to."""
    return sum_in_plan_order(plan(len(values), EVERYBODY), values)


class GlobalSum:
    """All members end on the same sum, added in rank order; priced by `marfl.plan.rivals`."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    server: ClassVar[bool] = False

    def exact_for(self, n: int) -> bool:
        return True

    def total(self, values: Sequence[Tensor], span: Span | None = None) -> Tensor:
        return sum_in_rank_order(values)

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        """Everybody ends with the plain mean."""
        mean = self.total(values) / len(values)
        return Mixed([mean] * len(values), ctx.memory, list(self.phases(len(values), mean.numel())))

    def cost(self, n: int, length: int) -> Cost:
        return cost(self.name, plan(n, EVERYBODY), length)

    def phases(self, n: int, length: int) -> Iterator[Phase]:
        return rival_phases(self.name, n, length)


class NoGlobalAverage(ABC):
    """Members meet a few others and end on different models; a lost peer costs its partners its model, no more."""

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    server: ClassVar[bool] = False

    @abstractmethod
    def options(self, n: int) -> dict[str, int]:
        """The options of `marfl.plan.rivals` that price it among n peers."""

    def exact_for(self, n: int) -> bool:
        return False

    def total(self, values: Sequence[Tensor], span: Span | None = None) -> Tensor:
        raise InputError(f"technique = {self.name!r}: has no global aggregate, so there is no total")

    def cost(self, n: int, length: int) -> Cost:
        return cost(self.name, plan(n, EVERYBODY), length, **self.options(n))

    def phases(self, n: int, length: int) -> Iterator[Phase]:
        """The right number of messages and values, between stand-in peers: `mix` tells the real ones."""
        return rival_phases(self.name, n, length, **self.options(n))

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        return ABSORBED

    def protocol(self, n: int) -> dict[str, Any]:
        raise InputError(
            f"technique = {self.name!r}: has no global aggregate for peers to agree on; run it in the simulator"
        )
