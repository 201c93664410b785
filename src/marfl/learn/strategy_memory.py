"""What one peer remembers for a strategy (SCAFFOLD's c_i), and of which record: nothing counts twice, nor is it lost.

What a peer sends behind its update is on its way until it is known whether the roster that it was for was committed.
Only then is it part of what the peer remembers: else the agreed sum over all peers would not be the sum of theirs.
The book-keeping is that of residuals (`marfl.wire.error_feedback`); a contribution is known by the state that it starts
from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from marfl.wire.error_feedback import CommittedSum, ErrorFeedback, RecordChain

FORGOTTEN = "what it remembered for the strategy is lost: it is not known whether it counted, or of another lineage"


class SummedRoster(Protocol):
    """What must be known of a roster."""

    @property
    def base(self) -> bytes: ...

    @property
    def ids(self) -> tuple[str, ...]: ...

    @property
    def is_sum(self) -> bool: ...


class CommittedRecord(Protocol):
    """What must be known of a record."""

    @property
    def hash(self) -> bytes: ...

    @property
    def lineage(self) -> bytes: ...

    @property
    def roster(self) -> SummedRoster | None: ...


@dataclass
class StrategyMemory:
    """One peer's."""

    trainable: int
    memory: ErrorFeedback = field(default_factory=ErrorFeedback)
    before_sending: Callable[[ErrorFeedback], None] | None = None  # such as: write it down

    def settle(self, records: Mapping[int, CommittedRecord], me: str) -> None:
        """What was committed, by iteration, as far as it is known here."""
        for at, record in sorted(records.items()):
            roster = record.roster
            if roster is not None:
                base = roster.base if roster.is_sum and me in roster.ids else None
                self.memory.decided(CommittedSum(at, base, record.hash, record.lineage))

    def current(self, chain: RecordChain) -> Tensor | None:
        """What the peer remembers on top of this record; None: nothing. `settle` comes first."""
        return self.memory.current(chain)

    def sent(self, base: bytes, iteration: int, own: Tensor | None, news: Tensor) -> None:
        """An update from this state leaves, with this news behind it."""
        fresh = news[: self.trainable]
        self.memory.sent(base, iteration, fresh.clone() if own is None else own + fresh)
        if self.before_sending is not None:
            self.before_sending(self.memory)
