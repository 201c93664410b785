"""What a real peer has given away: one noised vector per iteration, and a ledger on the disk before anything leaves.

Noise comes from the OS. A second try of an iteration sends the very same vector; after a crash that vector is gone, so
the next one is another release, and the first is counted as seen by group members. Where a peer cannot find out how
many shares of noise joined its own, it counts none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from marfl.config import Config
from marfl.peer.store import StateDir
from marfl.peer.voter import Voter
from marfl.privacy.spending import Spending


@dataclass(frozen=True)
class Open:
    """A vector that may have left, in an iteration whose end this peer has not accounted for."""

    iteration: int
    base: str  # hash of the state it starts from, in hex


class Account:
    """One peer's own ledger. What is not on the disk has not left."""

    def __init__(self, config: Config, store: StateDir) -> None:
        saved: dict[str, Any] = store.load_account() or {"releases": [], "open": None}
        self.spending = Spending(config, saved["releases"])
        self._store = store
        self._open = Open(**saved["open"]) if saved["open"] else None
        self._vector: Tensor | None = None
        self._forgotten = self._open is not None  # a crash: nobody knows whether that vector left

    def draw(self, iteration: int, base: bytes, make: Callable[[], Tensor]) -> Tensor:
        """The vector of this iteration from this state: made once, and written down before it can leave."""
        wanted = Open(iteration, base.hex())
        if self._open == wanted and self._vector is not None:
            return self._vector
        if self._open == wanted:
            self.spending.add(0)  # only one of the two can be in the total, but group members may have seen both
        elif self._open is not None:
            self.spending.add(1)
        self._open, self._vector, self._forgotten = wanted, make(), False
        self._save()
        return self._vector

    def settle(self, voter: Voter) -> list[str]:
        """Account for the open vector once its iteration is decided; what a reader of the row should know."""
        opened = self._open
        if opened is None or voter.record.iteration < opened.iteration:
            return []
        self._open, self._vector = None, None
        arrived = self._arrived(voter, opened)
        begun = self._forgotten or _began(voter, opened)
        if arrived or begun:
            self.spending.add(arrived if arrived is not None else 1)
        self._save()
        if arrived is None and begun:
            return ["how much noise joined this peer's own is not known: counted as none"]
        return self.spending.checks(arrived or 0)

    def _arrived(self, voter: Voter, opened: Open) -> int | None:
        """Shares of noise in the total that holds mine; 0 if none does, None if nobody told."""
        record = voter.history.get(opened.iteration)
        roster = record.roster if record else None
        if roster is None or roster.base.hex() != opened.base:
            return None
        mine = roster.ranks.get(voter.net.me)
        if mine is None or not roster.members[mine].weight:
            return 0
        return sum(member.weight > 0 for member in roster.members)

    def _save(self) -> None:
        opened = self._open
        self._store.save_account(
            {
                "releases": self.spending.ledger.to_rows(),
                "open": {"iteration": opened.iteration, "base": opened.base} if opened else None,
            }
        )


def _began(voter: Voter, opened: Open) -> bool:
    """Whether an exchange with that vector began here."""
    roster = voter.last_attempt.roster if voter.last_attempt else None
    return roster is not None and (roster.iteration, roster.base.hex()) == (opened.iteration, opened.base)
