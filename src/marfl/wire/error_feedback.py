"""What is left of a peer's updates, and of which record: so that nothing counts twice, whatever becomes of an attempt.

A residual belongs to the record of the last commit that this peer's contribution is in. A contribution that was sent
is on its way (`sent`) until it is known what became of its roster: committed, its residual is the one to go on from;
else the one before stays. In another lineage the residual of the newest common record returns. Where it is not known
whether a contribution counted, or there is no residual of a common record, nothing is left: that is counted in `lost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

KEPT = 2  # residuals, each of 4 bytes a value: lineages part seldom, and seldom for long
LOST = "what was left of its updates is lost: it is not known whether they counted, or they are of another lineage"


class Residual(NamedTuple):
    """What is left, and since when."""

    iteration: int
    record: bytes  # hash of the state that was committed
    lineage: bytes
    value: Tensor


class OnItsWay(NamedTuple):
    """A contribution that may have left this peer."""

    roster: bytes  # digest
    iteration: int
    value: Tensor  # what is left of it, should it count


class RecordChain(NamedTuple):
    """Where a peer stands: the newest record, and what it knows of those before."""

    lineage: bytes
    commits: Mapping[int, bytes]  # by iteration, the hashes of the last records; never empty


class CommittedSum(NamedTuple):
    """A committed record, and the roster whose sum it is; None where nothing was summed."""

    iteration: int
    roster: bytes | None  # digest
    record: bytes
    lineage: bytes


@dataclass
class ErrorFeedback:
    """The residuals of one peer."""

    kept: list[Residual] = field(default_factory=list)  # oldest first
    lost: int = 0  # times that nothing could be taken over
    on_its_way: list[OnItsWay] = field(default_factory=list)

    def current(self, chain: RecordChain) -> Tensor | None:
        """What is left for a contribution on top of this record; None: nothing. What is of another lineage goes."""
        if any(each.iteration <= max(chain.commits) for each in self.on_its_way):
            self._forget()  # it is not known whether that contribution counted
        had = bool(self.kept)
        while self.kept and not _is_of(self.kept[-1], chain):
            self.kept.pop()
        self.lost += had and not self.kept
        return self.kept[-1].value if self.kept else None

    def sent(self, roster: bytes, iteration: int, value: Tensor) -> None:
        """A contribution of this iteration leaves for a roster."""
        if all(each.roster != roster for each in self.on_its_way):
            self.on_its_way.append(OnItsWay(roster, iteration, value))

    def decided(self, decision: CommittedSum) -> None:
        """This record is committed: the roster whose sum it is decides which contribution counts, if any."""
        iteration, roster, record, lineage = decision
        of_it = [each for each in self.on_its_way if each.iteration == iteration]
        self.on_its_way = [each for each in self.on_its_way if each.iteration != iteration]
        for each in of_it:
            if each.roster == roster:
                self.kept = [*self.kept, Residual(iteration, record, lineage, each.value)][-KEPT:]

    def _forget(self) -> None:
        self.on_its_way, self.kept = [], []
        self.lost += 1


def _is_of(residual: Residual, chain: RecordChain) -> bool:
    """Whether a residual's record is among those before; of one that is too old to be known the lineage tells."""
    if residual.iteration in chain.commits:
        return chain.commits[residual.iteration] == residual.record
    return residual.iteration < min(chain.commits) and residual.lineage == chain.lineage
