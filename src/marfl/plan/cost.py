"""What an aggregation costs: messages, phases and bytes, per peer and in all, for one fp32 vector.

Counted from the schedule: group by group for the exchanges, message by message for the rivals, with closed forms for
those whose messages grow with n². Tests hold every one of these to a count of the messages themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from marfl.errors import InputError
from marfl.plan.grid import Plan, split
from marfl.plan.rivals import RIVALS, rival_phases
from marfl.plan.schedule import EXCHANGES, Phase, Step, steps

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


def cost(name: str, plan: Plan, length: int, **options: int) -> Cost:
    """The cost of an exchange over a plan, or of a rival technique among the plan's peers.

    `name` is one of `EXCHANGES` or `RIVALS`; `length` is the number of fp32 values. Options are those of the rival
    in `marfl.plan.rivals`: compression for saps, fetched for braintorrent, fanout for gossip.
    """
    if name in _CLOSED_FORMS and not options:
        return _CLOSED_FORMS[name](plan.peers, length)
    if name in EXCHANGES and not options:
        return _count_steps(steps(plan, name, length), plan.peers)
    if name in RIVALS:
        return count(rival_phases(name, plan.peers, length, **options), plan.peers, servers=name == "fedavg")
    raise InputError(f"cost of {name!r}: must be one of {', '.join(EXCHANGES + RIVALS)}")


def count(schedule: Iterable[Phase], peers: int, servers: int = 0) -> Cost:
    """Add up a schedule's messages; ranks from `peers` on are servers."""
    sent, received = [0] * (peers + servers), [0] * (peers + servers)
    messages = phases = 0
    for phase in schedule:
        phases += 1
        messages += len(phase)
        for source, dest, start, stop in phase:
            sent[source] += stop - start
            received[dest] += stop - start
    return Cost(peers, messages, phases, _in_bytes(sent), _in_bytes(received))


def _count_steps(schedule: Iterable[Step], peers: int) -> Cost:
    """`count` without spelling the messages out: linear in the peers, however large the groups."""
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
    return Cost(peers, messages, phases, _in_bytes(sent), _in_bytes(received))


def _in_bytes(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(value * BYTES_PER_VALUE for value in values)


def _arfl(n: int, length: int) -> Cost:
    each = _in_bytes([(n - 1) * length] * n)
    return Cost(n, n * (n - 1) if length else 0, int(n > 1 and length > 0), each, each)


def _rdfl(n: int, length: int) -> Cost:
    each = _in_bytes([(n - 1) * length] * n)
    return Cost(n, n * (n - 1) if length else 0, n - 1 if length else 0, each, each)


def _ring(n: int, length: int) -> Cost:
    """Of the n chunks, peer i keeps chunk i+1 from its successor in the reduce and chunk i+2 in the gather."""
    sizes = [stop - start for start, stop in split(length, n)]
    sent = [2 * length - sizes[(peer + 1) % n] - sizes[(peer + 2) % n] for peer in range(n)]
    received = sent[-1:] + sent[:-1]
    steps = 2 * (n - 1) if length else 0
    return Cost(n, steps * min(n, length), steps, _in_bytes(sent), _in_bytes(received))


def _butterfly(n: int, length: int) -> Cost:
    """Peer j sends all but part j once, and part j n−1 times; it receives as much."""
    each = _in_bytes(length + (stop - start) * (n - 2) for start, stop in split(length, n))
    return Cost(n, 2 * (n - 1) * min(n, length), 2 if n > 1 and length else 0, each, each)


_CLOSED_FORMS: dict[str, Callable[[int, int], Cost]] = {
    "arfl": _arfl,
    "rdfl": _rdfl,
    "ring": _ring,
    "butterfly": _butterfly,
}
