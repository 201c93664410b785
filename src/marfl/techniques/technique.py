"""What a technique is: a way for peers to average, with its messages, its price, its order of additions and its losses.

A technique is a small frozen dataclass in a file of its own; state goes in and comes out. Its `total` or `mix` computes
in one place what its peers compute by messages, bit for bit. Those that end on one sum over everybody are a
`GlobalSum`, those without a global average a `NoGlobalAverage`; `marfl.techniques.mar` may be either. One from outside
the package derives from one of the two, too: `--technique my_module:MyTechnique`.

Nothing here needs torch before there is something to add: `marfl plan` reads prices only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from marfl.errors import InputError
from marfl.plan.cost import BYTES_PER_VALUE, Cost, Messages, count
from marfl.plan.grid import MAX_PEERS

if TYPE_CHECKING:
    from torch import Tensor

EVERYBODY = MAX_PEERS  # a group size that no number of peers exceeds: one group of all, whoever joins


class Span(NamedTuple):
    """Where given values stand in the whole vector: they begin at `start`, and the vector has `length` values."""

    start: int
    length: int


class Mixed(NamedTuple):
    """What an iteration of mixing came to."""

    values: list[Tensor]  # by position in the members; those who agree may share one tensor: never change it in place
    memory: Mapping[str, Any]  # the technique's own state for the next iteration, in plain JSON values
    phases: list[Messages] | None  # what really travelled, ranks are positions; None: just what `messages` says


class Loss(NamedTuple):
    """What peers that die during an exchange cost."""

    wasted_bytes: int  # sent in an attempt that gives no result
    outcome: Literal[
        "retry",  # the survivors repeat the attempt
        "stall",  # the technique itself has no way on: it waits for ever, and its users must rebuild
        "partial",  # parts of the model are missing
        "absorbed",  # the others go on; at most the dead one's own input is missing
    ]


ABSORBED = Loss(0, "absorbed")


@dataclass(frozen=True)
class MixContext:
    """What members know of an iteration before they mix; positions are places in `members`."""

    members: tuple[int, ...]  # peer indices
    iteration: int
    seed: int
    memory: Mapping[str, Any]  # what `Mixed.memory` was after the iteration before; empty at the beginning
    samples: Callable[[int], int]  # how many samples the member at a position trains on
    speed: Callable[[int, int], float] | None  # of the link between two peer indices; None: all are alike


class Technique(Protocol):
    """One system, by name and by what it does."""

    @property
    def name(self) -> str: ...

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

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        """The messages of one vector when nobody fails, phase by phase, without empty ones."""

    def cost(self, n: int, length: int) -> Cost:
        """Messages and tensor bytes of one vector when nobody fails."""

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """What it costs when `deaths` peers die in that phase (from 0) of an exchange of `length` values."""

    def protocol(self, n: int) -> dict[str, Any]:
        """Keyword arguments of `marfl.protocol.protocol_settings.Settings` that run it among peers."""


class Rival(ABC):
    """What MAR-FL is compared with: its price is counted from its messages."""

    name: ClassVar[str]
    exact: ClassVar[bool]
    server: ClassVar[bool] = False

    @abstractmethod
    def messages(self, n: int, length: int) -> Iterator[Messages]: ...

    def cost(self, n: int, length: int) -> Cost:
        return count(self.messages(n, length), n, servers=self.server)

    def exact_for(self, n: int) -> bool:
        return self.exact


class GlobalSum(Rival):
    """All members end on the same sum over all of them, added in rank order unless it says otherwise."""

    exact: ClassVar[bool] = True

    def total(self, values: Sequence[Tensor], span: Span | None = None) -> Tensor:
        return sum_in_rank_order(values)

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        """Everybody ends with the plain mean."""
        return Mixed([self.total(values) / len(values)] * len(values), ctx.memory, None)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """The others begin anew: all that was sent in the phases before is wasted."""
        before = list(self.messages(n, length))[:died_in_round]
        return Loss(BYTES_PER_VALUE * sum(phase.total for phase in before), "retry")

    def protocol(self, n: int) -> dict[str, Any]:
        raise InputError(f"technique = {self.name!r}: has no messages for real peers; run it in the simulator")


class NoGlobalAverage(Rival):
    """Members meet a few others and end on different models; a lost peer costs its partners its model, no more.

    `messages` has the right number of messages and values, between stand-in peers: `mix` tells the real ones.
    """

    exact: ClassVar[bool] = False

    def total(self, values: Sequence[Tensor], span: Span | None = None) -> Tensor:
        raise InputError(f"technique = {self.name!r}: has no global aggregate, so there is no total")

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        return ABSORBED

    def protocol(self, n: int) -> dict[str, Any]:
        raise InputError(
            f"technique = {self.name!r}: has no global aggregate for peers to agree on; run it in the simulator"
        )


def one_group(exchange: str) -> dict[str, Any]:
    """Settings of peers that run this exchange, and no other, in one group of everybody."""
    return {"exchange": exchange, "group_size": EVERYBODY, "fallbacks": (exchange,)}


def sum_in_rank_order(values: Sequence[Tensor]) -> Tensor:
    """x_0 + x_1 + …, one after the other: what a group of everybody adds up to."""
    from marfl.protocol.exchange import sum_in_turn  # torch takes a second: only when there is something to add

    return sum_in_turn(values)


# --- peers that die during an exchange ---


def ranks_of_dead(n: int, deaths: int) -> list[int]:
    """The ranks of the dead, evenly spread: only their number is known."""
    if not 1 <= deaths <= n:
        raise InputError(f"deaths = {deaths}: must be between 1 and the {n} peers")
    return [place * n // deaths for place in range(deaths)]


def stalled_ring_messages(n: int, hops: int, deaths: int, died_in: int) -> int:
    """How many messages of a ring of so many hops are sent until it stands still; peers died in hop `died_in`.

    From the fatal hop on, the dead send nothing, nobody sends to them, and one peer more after each of them starves
    with every hop.
    """
    dead = ranks_of_dead(n, deaths)
    gaps = [after - before for before, after in zip(dead, [*dead[1:], n], strict=True)]
    return died_in * n + sum(gap - 2 - hop for gap in gaps for hop in range(min(gap - 2, hops - died_in)))
