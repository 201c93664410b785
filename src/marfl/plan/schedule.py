"""Every message of one vector's aggregation, by phase: what the protocol sends when nobody fails, and what links carry.

The three exchanges over a plan are here, the rivals' messages in `marfl.techniques`. Slices without values are not
sent, so a vector may have fewer values than a group has members; a phase in which nobody sends is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from marfl.errors import InputError
from marfl.plan.grid import Plan, Seat, split


class SliceTransfer(NamedTuple):
    """Values [start, stop) of the vector, from one rank to another: one message, or several where they are many."""

    source: int
    dest: int
    start: int
    stop: int


Phase: TypeAlias = tuple[SliceTransfer, ...]  # messages that need nothing but what earlier phases brought
Slice: TypeAlias = tuple[int, int]  # [start, stop) of the vector
Cut: TypeAlias = tuple[Seat, list[Slice]]  # a group, and the part of the vector that each of its core members owns


class Step(NamedTuple):
    """A phase before it is spelled out: in every group each owner hears from, or speaks to, all the others."""

    cuts: list[Cut]
    inward: bool  # to the owners (a reduce) or from them (a gather)
    with_spares: bool  # whether the groups' spares take part
    done: int  # what is sent are partial sums after so many rounds: 0 is a peer's own input

    def transfers(self) -> Iterator[SliceTransfer]:
        """The step's messages, one by one."""
        for seat, parts in self.cuts:
            members = seat.members if self.with_spares else seat.core
            for owner, (start, stop) in zip(seat.core, parts, strict=True):
                if start < stop:
                    for other in members:
                        if other != owner:
                            ends = (other, owner) if self.inward else (owner, other)
                            yield SliceTransfer(*ends, start, stop)

    def shows(self, wanted: SliceTransfer) -> bool:
        """Whether one of the step's messages carries these values between these two."""
        owner, other = (wanted.dest, wanted.source) if self.inward else (wanted.source, wanted.dest)
        for seat, parts in self.cuts:
            if owner in seat.core:
                start, stop = parts[seat.core.index(owner)]
                among = other in (seat.members if self.with_spares else seat.core)
                return among and other != owner and start <= wanted.start < wanted.stop <= stop
        return False


def schedule(plan: Plan, exchange: str, length: int, unit: int = 1) -> tuple[Phase, ...]:
    """The exact messages of one exchange ("full", "chunked" or "grid") of a vector of `length` values."""
    spelled_out = (tuple(step.transfers()) for step in steps(plan, exchange, length, unit))
    return tuple(phase for phase in spelled_out if phase)


def steps(plan: Plan, exchange: str, length: int, unit: int = 1) -> Iterator[Step]:
    """The same schedule group by group: its size does not grow with the square of the groups.

    Every slice begins at a multiple of the `unit`: of 1,024 where values are packed (`marfl.wire.packing`).
    """
    if exchange not in _EXCHANGES:
        raise InputError(f"exchange = {exchange!r}: must be one of {', '.join(EXCHANGES)}")
    if length < 0:
        raise InputError(f"length = {length}: a vector cannot have fewer than 0 values")
    if exchange == "grid" and not plan.exact:
        raise InputError("exchange = 'grid': needs an exact plan, and this plan is not exact")
    return _EXCHANGES[exchange](plan, length, unit)


def _full(plan: Plan, length: int, unit: int) -> Iterator[Step]:
    """Whole vectors to the whole group, as in the paper; at the end each helper sends its spare the result."""
    for done, table in enumerate(plan.tables):
        cuts = [(seat, [(0, length)] * len(seat.core)) for seat in table]
        yield Step(cuts, inward=True, with_spares=True, done=done)
    yield _hand_over(plan, length)


def _chunked(plan: Plan, length: int, unit: int) -> Iterator[Step]:
    """In each group reduce-scatter, then all-gather; at the end each helper sends its spare the result."""
    for done, table in enumerate(plan.tables):
        cuts = [(seat, split(length, len(seat.core), unit)) for seat in table]
        yield Step(cuts, inward=True, with_spares=True, done=done)
        yield Step(cuts, inward=False, with_spares=False, done=done + 1)
    yield _hand_over(plan, length)


def _grid(plan: Plan, length: int, unit: int) -> Iterator[Step]:
    """Reduce-scatter down the rounds, each on the slice owned so far, then all-gather back up; 2(n−1) vectors in all.

    In the last phase the owners hand their slices of the result to their cell's spare as well.
    """
    owned = [(0, length)] * plan.peers
    rounds = []
    for done, table in enumerate(plan.tables):
        cuts = [(seat, _split_slice(owned[seat.core[0]], len(seat.core), unit)) for seat in table]
        for seat, parts in cuts:
            for rank, part in zip(seat.core, parts, strict=True):
                owned[rank] = part
        rounds.append(cuts)
        yield Step(cuts, inward=True, with_spares=True, done=done)
    for cuts in reversed(rounds):
        yield Step(cuts, inward=False, with_spares=True, done=len(rounds))


_EXCHANGES: dict[str, Callable[[Plan, int, int], Iterator[Step]]] = {"full": _full, "chunked": _chunked, "grid": _grid}
EXCHANGES = tuple(_EXCHANGES)


def _split_slice(whole: Slice, parts: int, unit: int) -> list[Slice]:
    start, stop = whole
    return [(start + first, start + last) for first, last in split(stop - start, parts, unit)]


def _hand_over(plan: Plan, length: int) -> Step:
    """Each helper sends its spare the whole result."""
    cuts = [(Seat((helper,), spare), [(0, length)]) for spare, helper in plan.spares]
    return Step(cuts, inward=False, with_spares=True, done=len(plan.rounds))
