"""Who may see what of an exchange: when a peer asks for a slice again, these rules say whether it is given.

A peer's own input goes only to those to whom the plan sends that very slice. A partial sum may also go to a peer that
ends up with the same sum by the plan, or is sent a part of it; but only where the sum hides its inputs, which takes at
least two members that brought something. In a cell of one member, or where all others have weight 0, the sum is a
single input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from marfl.plan.grid import Plan
from marfl.plan.schedule import SliceTransfer, Step

HIDING = 2  # inputs in a sum that hides them from whoever did not bring one


def may_see(
    plan: Plan, exchange: str, steps: Sequence[Step], weights: Sequence[float], done: int, wanted: SliceTransfer
) -> bool:
    """Whether the peer `wanted.dest` may be given these values of `wanted.source`'s partial sum after `done` rounds.

    `steps` is the exchange's schedule over the plan (`marfl.plan.schedule.steps`), `weights` are the members', by rank.
    """
    if any(step.done == done and step.shows(wanted) for step in steps):
        return True
    if done == 0 or exchange == "grid":  # where slices are scattered, nobody else ends up with one but by the plan
        return False
    if len(tuple(islice((rank for rank in inputs(plan, wanted.source, done) if weights[rank]), HIDING))) < HIDING:
        return False
    if wanted.dest in plan.replicas(wanted.source, done):
        return True
    seat = plan.seats(wanted.source)[done] if done < len(plan.rounds) else None
    return seat is not None and wanted.dest in seat.core and wanted.dest != wanted.source


def inputs(plan: Plan, rank: int, done: int) -> Iterator[int]:
    """Whose inputs are in a peer's partial sum after so many rounds; nobody's where it sits out by then."""
    if done == 0:
        yield rank
        return
    seat = plan.seats(rank)[done - 1]
    for member in seat.members if seat else ():
        yield from inputs(plan, member, done - 1)
