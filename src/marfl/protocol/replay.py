"""What an exchange must give, computed in one place without a network: the plan's sums in coordinate order.

The simulator's default engine aggregates with it, and tests hold every exchange to its bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from marfl.errors import InputError
from marfl.plan.grid import Plan, plan
from marfl.protocol.fixed_point import decode_mean, sum_of_integers
from marfl.protocol.instance import Contribution, weighted
from marfl.protocol.roster import Roster


def sum_in_plan_order(layout: Plan, values: Sequence[Tensor]) -> Tensor:
    """The sum over all ranks, added up exactly as the peers of an exact plan do (each partial sum only once)."""
    if not layout.exact:
        raise InputError("only an exact plan gives all peers the same sum")
    if layout.peers == 1:
        return values[0]
    partial: dict[int, Tensor] = dict(enumerate(values))
    for groups in layout.rounds:
        after: dict[int, Tensor] = {}
        for group in groups:
            if group[0] in partial:  # a replica of a group summed already is not summed again
                after[group[0]] = sum_in_turn([partial[rank] for rank in group])
        partial = after
    return partial[0]


def sum_in_turn(values: Sequence[Tensor]) -> Tensor:
    """Sequential adds, as in `Attempt.sum_in_order`; one value is its own sum."""
    if len(values) == 1:
        return values[0]
    total = values[0] + values[1]
    for value in values[2:]:
        total.add_(value)
    return total


def replay_mean(roster: Roster, contributions: dict[str, Contribution]) -> Tensor:
    """The mean that every member of this roster must end on, bit for bit."""
    values = [weighted(contributions[member.id]) for member in roster.members]
    if roster.wire != "fp32":
        return decode_mean(sum_of_integers(values), len(values), roster.weight)
    return sum_in_plan_order(plan(len(values), roster.group_size), values) / roster.weight
