"""Moshpit-KD in the simulator: before they average, the groups of a plan exchange models and learn from them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from marfl.plan.grid import Plan
from marfl.plan.schedule import Phase, Transfer
from marfl.sim.executor import Executor, Job


class Lessons(NamedTuple):
    """What the distillation of one iteration came to."""

    phases: list[Phase]  # the models that travelled, round by round
    undone: list[int]  # peers of whom a round led to NaN or infinity, and was undone

    @property
    def messages(self) -> int:
        return sum(map(len, self.phases))


def teach(executor: Executor, layout: Plan, jobs: Mapping[int, Job], length: int, *, in_place: bool) -> Lessons:
    """All rounds of an iteration over the plan's groups. Ranks without a job neither teach nor learn."""
    phases, undone = [], list[int]()
    for round, groups in enumerate(layout.rounds):
        classes = list(_classes(groups, jobs))
        undone += executor.teach([[jobs[rank] for rank in ranks] for ranks in classes], round, in_place=in_place)
        phases.append(tuple(Transfer(a, b, 0, length) for ranks in classes for a in ranks for b in ranks if a != b))
    return Lessons(phases, sorted(set(undone)))


def models_shown(layout: Plan, present: Container[int]) -> int:
    """How many models travel in all rounds when these ranks have one to show."""
    return sum(len(ranks) * (len(ranks) - 1) for groups in layout.rounds for ranks in _classes(groups, present))


def _classes(groups: Sequence[Sequence[int]], jobs: Container[int]) -> Iterator[list[int]]:
    """Those of each group that have a model to show, where they are at least two."""
    for group in groups:
        ranks = [rank for rank in group if rank in jobs]
        if len(ranks) > 1:
            yield ranks
