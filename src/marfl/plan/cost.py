"""The messages of an aggregation, and what they cost: phases and bytes, per peer and in all, for one vector.

Values are fp32 (4 bytes each), or integers that are packed in fields of a few bits (`marfl.wire.packing`).

An exchange is counted from its schedule, group by group (`cost`). A rival (`marfl.techniques`) counts its own messages,
or has a closed form where they grow with n². Tests hold every one of these to a count of the messages themselves.

`Messages` is a phase as arrays: costs are counted from them, and links carry them. `marfl.plan.schedule` lists the same
messages one by one, with the values that each carries. The arrays hold only how many values, so that a million
messages fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from marfl.plan.grid import Plan
from marfl.plan.schedule import Step, steps
from marfl.wire.packing import BLOCK, IntegerWire, SliceFormat

BYTES_PER_VALUE = 4  # fp32
FP32 = SliceFormat(8 * BYTES_PER_VALUE)
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Cost:
    """Tensor bytes of one vector's aggregation when nobody fails (headers and rosters are not in it)."""

    peers: int
    messages: int
    phases: int  # steps that must follow one another
    bytes_sent: tuple[int, ...]  # by rank; FedAvg's server comes after the peers
    bytes_received: tuple[int, ...]  # likewise
    bytes_down: int = 0  # of all that are sent, those of the sum over everybody: on its way back from who made it

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes_sent)

    @property
    def bytes_per_peer(self) -> float:
        """The total shared out over the peers: what a peer sends on average, and with it its share of a server."""
        return self.bytes_total / self.peers

    def with_values_of(self, size: int) -> Cost:
        """The same messages of fp32 with values of so many bytes."""
        sent = tuple(count // BYTES_PER_VALUE * size for count in self.bytes_sent)
        received = tuple(count // BYTES_PER_VALUE * size for count in self.bytes_received)
        down = self.bytes_down // BYTES_PER_VALUE * size
        return replace(self, bytes_sent=sent, bytes_received=received, bytes_down=down)

    @property
    def busiest(self) -> int:
        """The most bytes, sent and received together, that any one node handles."""
        return max(sent + received for sent, received in zip(self.bytes_sent, self.bytes_received, strict=True))


def cost(exchange: str, plan: Plan, length: int, wire: IntegerWire | None = None) -> Cost:
    """The cost of an exchange over a plan, for a vector of `length` values: linear in the peers."""
    return _count_steps(steps(plan, exchange, length, unit_of(wire)), plan, wire)


def unit_of(wire: IntegerWire | None) -> int:
    """Slices begin at a multiple of this: packed values travel in whole blocks."""
    return 1 if wire is None else BLOCK


def contributions_in(plan: Plan, done: int) -> int:
    """The most contributions that a partial sum has after so many rounds."""
    return min(plan.peers, math.prod(max(map(len, groups)) for groups in plan.rounds[:done]))


def format_of(plan: Plan, done: int, wire: IntegerWire | None) -> SliceFormat:
    """How partial sums after so many rounds travel; after the last round it is the sum over everybody."""
    if wire is None:
        return FP32
    if done == len(plan.rounds):
        return wire.result(plan.peers)
    return wire.partial(contributions_in(plan, done), plan.peers)


def _count_steps(schedule: Iterable[Step], plan: Plan, wire: IntegerWire | None) -> Cost:
    """Add up the messages without spelling them out: linear in the peers, however large the groups."""
    sent, received = [0] * plan.peers, [0] * plan.peers
    messages = phases = down = 0
    for step in schedule:
        before, form = messages, format_of(plan, step.done, wire)
        at_owners, at_others = (received, sent) if step.inward else (sent, received)
        for seat, parts in step.cuts:
            members = seat.members if step.with_spares else seat.core
            sizes = [form.size(stop - start) for start, stop in parts]
            others, total = len(members) - 1, sum(sizes)
            down += others * total if step.done == len(plan.rounds) else 0
            messages += others * sum(size > 0 for size in sizes)
            for rank in members:
                at_others[rank] += total
            for owner, size in zip(seat.core, sizes, strict=True):
                at_others[owner] -= size
                at_owners[owner] += size * others
        phases += messages > before
    return Cost(plan.peers, messages, phases, tuple(sent), tuple(received), down)


def in_bytes(values: Iterable[int]) -> tuple[int, ...]:
    """So many bytes for so many fp32 values."""
    return tuple(value * BYTES_PER_VALUE for value in values)


# --- messages as arrays ---


@dataclass(frozen=True, eq=False)
class Messages:
    """A phase: message i carries `values[i]` values from rank `source[i]` to rank `dest[i]`, all at once."""

    source: Ints
    dest: Ints
    values: Ints
    form: SliceFormat = FP32  # how these values travel
    down: bool = False  # they are of the sum over everybody

    @classmethod
    def of(cls, spelled_out: Iterable[tuple[int, int, int]]) -> Messages:
        """From (source, dest, how many values) of each message."""
        table = np.array(list(spelled_out), dtype=np.int64).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2])

    @property
    def total(self) -> int:
        """How many values travel."""
        return int(self.values.sum())

    @property
    def sizes(self) -> Ints:
        """The bytes of each message."""
        return self.form.sizes(self.values)


def phase(
    source: Ints, dest: Ints, values: Ints | int, form: SliceFormat = FP32, *, down: bool = False
) -> Iterator[Messages]:
    """A phase without empty messages; nothing when no message is left."""
    counts = np.broadcast_to(np.asarray(values, dtype=np.int64), source.shape)
    kept = counts > 0
    if kept.any():
        yield Messages(source[kept], dest[kept], counts[kept], form, down)


def everyone(n: int) -> tuple[Ints, Ints]:
    """Everyone with everyone else."""
    one, hop = np.divmod(np.arange(n * (n - 1)), max(1, n - 1))
    return one, (one + hop + 1) % n


def exchange_messages(plan: Plan, exchange: str, length: int, wire: IntegerWire | None = None) -> Iterator[Messages]:
    """`marfl.plan.schedule.schedule` without spelling the messages out one by one."""
    for step in steps(plan, exchange, length, unit_of(wire)):
        source, dest, values = np.hstack([np.zeros((3, 0), dtype=np.int64), *_step_tables(step)])
        down = step.done == len(plan.rounds)
        yield from phase(source, dest, values, format_of(plan, step.done, wire), down=down)


def _step_tables(step: Step) -> Iterator[Ints]:
    """[source, dest, values] of a step's messages; groups of one shape are done at once."""
    shapes: dict[tuple[int, int], list[tuple[Sequence[int], list[int], tuple[int, ...]]]] = {}
    for seat, parts in step.cuts:
        members = seat.members if step.with_spares else seat.core
        sizes = [stop - start for start, stop in parts]
        shapes.setdefault((len(seat.core), len(members)), []).append((seat.core, sizes, members))
    for cuts in shapes.values():
        cores, sizes_of, members_of = (np.array(column, dtype=np.int64) for column in zip(*cuts, strict=True))
        owner, size, other = np.broadcast_arrays(cores[:, :, None], sizes_of[:, :, None], members_of[:, None, :])
        table = np.stack([other, owner, size] if step.inward else [owner, other, size])
        yield table[:, owner != other]


def count(phases: Iterable[Messages], peers: int, servers: int = 0) -> Cost:
    """Add up messages; ranks from `peers` on are servers."""
    sent, received = np.zeros((2, peers + servers), dtype=np.int64)
    messages = number = down = 0
    for phase in phases:
        number += 1
        messages += len(phase.source)
        sizes = phase.sizes
        np.add.at(sent, phase.source, sizes)
        np.add.at(received, phase.dest, sizes)
        down += int(sizes.sum()) if phase.down else 0
    return Cost(peers, messages, number, tuple(sent.tolist()), tuple(received.tolist()), down)
