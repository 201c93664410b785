"""The messages of an aggregation, and what they cost: phases and bytes, per peer and in all, for one fp32 vector.

An exchange is counted from its schedule, group by group (`cost`). A rival (`marfl.techniques`) counts its own messages,
or has a closed form where they grow with n². Tests hold every one of these to a count of the messages themselves.

`Messages` is a phase as arrays: costs are counted from them, and links carry them. `marfl.plan.schedule` lists the same
messages one by one, with the values that each carries. The arrays hold only how many values, so that a million
messages fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from marfl.plan.grid import Plan
from marfl.plan.schedule import Step, steps

BYTES_PER_VALUE = 4  # fp32
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Cost:
    """Tensor bytes of one vector's aggregation when nobody fails (headers and rosters are not in it)."""

    peers: int
    messages: int
    phases: int  # steps that must follow one another
    bytes_sent: tuple[int, ...]  # by rank; FedAvg's server comes after the peers
    bytes_received: tuple[int, ...]  # likewise

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes_sent)

    @property
    def bytes_per_peer(self) -> float:
        """The total shared out over the peers: what a peer sends on average, and with it its share of a server."""
        return self.bytes_total / self.peers

    def with_values_of(self, size: int) -> Cost:
        """The same messages with values of so many bytes."""
        sent = tuple(count // BYTES_PER_VALUE * size for count in self.bytes_sent)
        received = tuple(count // BYTES_PER_VALUE * size for count in self.bytes_received)
        return replace(self, bytes_sent=sent, bytes_received=received)

    @property
    def busiest(self) -> int:
        """The most bytes, sent and received together, that any one node handles."""
        return max(sent + received for sent, received in zip(self.bytes_sent, self.bytes_received, strict=True))


def cost(exchange: str, plan: Plan, length: int) -> Cost:
    """The cost of an exchange over a plan, for a vector of `length` fp32 values: linear in the peers."""
    return _count_steps(steps(plan, exchange, length), plan.peers)


def _count_steps(schedule: Iterable[Step], peers: int) -> Cost:
    """Add up the messages without spelling them out: linear in the peers, however large the groups."""
    sent, received = [0] * peers, [0] * peers
    messages = phases = 0
    for step in schedule:
        before = messages
        at_owners, at_others = (received, sent) if step.inward else (sent, received)
        for seat, parts in step.cuts:
            members = seat.members if step.with_spares else seat.core
            sizes = [stop - start for start, stop in parts]
            others, total = len(members) - 1, sum(sizes)
            messages += others * sum(size > 0 for size in sizes)
            for rank in members:
                at_others[rank] += total
            for owner, size in zip(seat.core, sizes, strict=True):
                at_others[owner] -= size
                at_owners[owner] += size * others
        phases += messages > before
    return Cost(peers, messages, phases, in_bytes(sent), in_bytes(received))


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

    @classmethod
    def of(cls, spelled_out: Iterable[tuple[int, int, int]]) -> Messages:
        """From (source, dest, how many values) of each message."""
        table = np.array(list(spelled_out), dtype=np.int64).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2])

    @property
    def total(self) -> int:
        """How many values travel."""
        return int(self.values.sum())


def phase(source: Ints, dest: Ints, values: Ints | int) -> Iterator[Messages]:
    """A phase without empty messages; nothing when no message is left."""
    sizes = np.broadcast_to(np.asarray(values, dtype=np.int64), source.shape)
    kept = sizes > 0
    if kept.any():
        yield Messages(source[kept], dest[kept], sizes[kept])


def everyone(n: int) -> tuple[Ints, Ints]:
    """Everyone with everyone else."""
    one, hop = np.divmod(np.arange(n * (n - 1)), max(1, n - 1))
    return one, (one + hop + 1) % n


def exchange_messages(plan: Plan, exchange: str, length: int) -> Iterator[Messages]:
    """`marfl.plan.schedule.schedule` without spelling the messages out one by one."""
    for step in steps(plan, exchange, length):
        yield from phase(*np.hstack([np.zeros((3, 0), dtype=np.int64), *_step_tables(step)]))


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
    messages = number = 0
    for phase in phases:
        number += 1
        messages += len(phase.source)
        np.add.at(sent, phase.source, phase.values)
        np.add.at(received, phase.dest, phase.values)
    return Cost(peers, messages, number, in_bytes(sent.tolist()), in_bytes(received.tolist()))
