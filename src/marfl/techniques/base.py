"""What a technique is: a way for peers to average, with its price, its order of additions and its weaknesses.

A technique is a small frozen dataclass; state goes in and comes out. Its `total` or `mix` computes in one place what
its peers compute by messages, bit for bit: see `marfl.protocol.exchange` and `marfl.techniques.talk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from marfl.plan.cost import Cost
from marfl.plan.schedule import Phase


@dataclass(frozen=True)
class Traits:
    """The ticks of the paper's Table 1 (arXiv 2512.05234)."""

    partial_communication: bool  # a peer takes in fewer messages than there are other peers
    global_aggregation: bool  # all members end an iteration on the average over all of them
    no_sparsification: bool  # whole models count, not a few coordinates of them
    dropout_tolerance: bool  # the others still get what they would have got without the lost peer
    private_training: bool  # published with differential privacy


class Span(NamedTuple):
    """Where given values stand in the whole vector: they begin at `start`, and the vector has `length` values."""

    start: int
    length: int


class Mixed(NamedTuple):
    """What an iteration of mixing came to."""

    values: list[Tensor]  # by position in the members; those who agree may share one tensor: never change it in place
    memory: Mapping[str, Any]  # the technique's own state for the next iteration, in plain JSON values
    phases: list[Phase]  # the messages really exchanged; ranks are positions in the members


class Loss(NamedTuple):
    """What peers that die during an exchange cost."""

    wasted_bytes: int  # sent in an attempt that gives no result
    outcome: Literal[
        "retry",  # the survivors repeat the attempt
        "stall",  # the technique itself has no way on: it waits for ever, and its users must rebuild
        "partial",  # parts of the model are missing
        "absorbed",  # the others go on; at most the dead one's own input is missing
    ]


@dataclass(frozen=True)
class MixContext:
    """What members know of an iteration before they mix; the tuples are by position."""

    members: tuple[int, ...]  # peer indices
    iteration: int
    seed: int
    memory: Mapping[str, Any]  # what `Mixed.memory` was after the iteration before; empty at the beginning
    samples: tuple[int, ...]  # how many samples each member trains on
    speed: Callable[[int, int], float] | None  # of the link between two peer indices; None: all are alike


class Technique(Protocol):
    """One system, by name and by what it does."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def citation(self) -> str: ...

    @property
    def traits(self) -> Traits: ...

    @property
    def exact(self) -> bool:
        """Whether, for any number of members, all of them end with the same sum over all of them."""

    @property
    def server(self) -> bool:
        """Whether it needs a server."""

    def exact_for(self, n: int) -> bool:
        """Whether it is exact for this number of members."""

    def total(self, values: Sequence[Tensor], span: Span | None = None) -> Tensor:
        """Where it is exact: the sum over the roster (in rank order), added as the technique's own peers add it.

        With `span`, the values are slices of a longer vector, and the result is that slice of its total.
        """

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        """What each member ends up with, every value counting as the technique would have it."""

    def cost(self, n: int, length: int) -> Cost:
        """Messages and tensor bytes of one vector when nobody fails."""

    def phases(self, n: int, length: int) -> Iterator[Phase]:
        """The messages of one vector when nobody fails, for virtual time."""

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """What it costs when `deaths` peers die in that phase (from 0) of an exchange of `length` values."""

    def protocol(self, n: int) -> dict[str, Any]:
        """Keyword arguments of `marfl.protocol.settings.Settings` that run it among peers."""
