"""What an aggregation costs: messages, phases and bytes, per peer and in all, for one fp32 vector.

An exchange is counted from its schedule, group by group. A rival (`marfl.techniques`) counts its own messages, or has
a closed form where they grow with n². Tests hold every one of these to a count of the messages themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from marfl.plan.grid import Plan
from marfl.plan.schedule import Step, steps

BYTES_PER_VALUE = 4  # fp32


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
