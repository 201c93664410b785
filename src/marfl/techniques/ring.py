"""Ring all-reduce: the chunked ring, with as few bytes as any all-reduce can have.

Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, Journal of Parallel and
Distributed Computing 69(2), 2009. The vector is cut in n chunks. Chunk c starts at peer c and is added to on its way
round; its last stop, peer c−1, completes it, and the completed chunks go round once more. 2(n−1)/n vectors per peer
in 2(n−1) phases, and a ring with a gap stands still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from marfl.plan.cost import BYTES_PER_VALUE, Cost, Messages, in_bytes, phase
from marfl.plan.grid import split
from marfl.techniques.technique import GlobalSum, Loss, Span, one_group, stalled_ring_messages, sum_in_rank_order

if TYPE_CHECKING:
    from torch import Tensor

    from marfl.protocol.attempt import Attempt


@dataclass(frozen=True)
class Ring(GlobalSum):
    """2(n−1) phases, 2(n−1)/n vectors per peer."""

    name: ClassVar[str] = "ring"

    def total(self, values: Sequence[Tensor], span: Span | None = None) -> Tensor:
        """Each chunk is added up from its own peer on, so the order of additions depends on the place in the vector."""
        here = values[0].numel()
        start, length = span or Span(0, here)
        total = values[0].new_empty(here)
        for chunk, (first, last) in enumerate(split(length, len(values))):
            part = slice(max(first - start, 0), min(last - start, here))
            if part.start < part.stop:
                turn = [*values[chunk:], *values[:chunk]]
                total[part] = sum_in_rank_order([value[part] for value in turn])
        return total

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        """The reduce starts with a peer's own chunk, the gather with the one that it has completed."""
        peer = np.arange(n)
        sizes = np.array([stop - start for start, stop in split(length, n)], dtype=np.int64)
        for first in (0, 1):
            for hop in range(n - 1):
                yield from phase(peer, (peer + 1) % n, sizes[(peer + first - hop) % n])

    def cost(self, n: int, length: int) -> Cost:
        """In closed form, as there are 2n(n−1) messages.

        Of the n chunks, peer i keeps chunk i+1 from its successor in the reduce and chunk i+2 in the gather.
        """
        sizes = [stop - start for start, stop in split(length, n)]
        sent = [2 * length - sizes[(peer + 1) % n] - sizes[(peer + 2) % n] for peer in range(n)]
        received = sent[-1:] + sent[:-1]
        steps = 2 * (n - 1) if length else 0
        return Cost(n, steps * min(n, length), steps, in_bytes(sent), in_bytes(received))

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """With every further hop one more peer behind the gap waits in vain."""
        messages = stalled_ring_messages(n, 2 * (n - 1), deaths, died_in_round)
        return Loss(messages * length // n * BYTES_PER_VALUE, "stall")

    def protocol(self, n: int) -> dict[str, Any]:
        """After a stall the next attempt's ring is built from the new roster."""
        return one_group("ring")


async def all_reduce(attempt: Attempt, value: Tensor) -> Tensor:
    """Reduce-scatter, then all-gather, a chunk a hop; whoever completes a chunk divides it."""
    from marfl.techniques.hops import receive  # torch takes a second: only where peers run it

    n, rank, mean = attempt.plan.peers, attempt.rank, value.clone()
    chunks = [slice(*part) for part in split(attempt.length, n)]

    async def hop(phase: int, channel: str, round: int, outgoing: int) -> Tensor:
        """Send one chunk to the successor; the one before it comes from the predecessor."""
        count = chunks[outgoing - 1].stop - chunks[outgoing - 1].start
        sent = mean[chunks[outgoing]].clone()  # what travels must not change any more
        async with attempt.sending(phase, channel, round, [((rank + 1) % n, sent)]):
            return await receive(attempt, phase, attempt.tag(channel, round), (rank - 1) % n, count)

    for round in range(n - 1):
        partial = await hop(round, "reduce", round, (rank - round) % n)
        mean[chunks[(rank - round) % n - 1]] += partial
    mean[chunks[(rank + 1) % n]] = attempt.averaged(mean[chunks[(rank + 1) % n]])
    for round in range(n - 1):
        completed = await hop(n - 1 + round, "gather", round, (rank + 1 - round) % n)
        mean[chunks[(rank + 1 - round) % n - 1]] = completed
    return mean
