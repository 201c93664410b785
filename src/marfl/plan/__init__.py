"""Who meets whom, which bytes travel and what they cost. Pure functions; nothing here knows about networks.

The functions `schedule` and `cost` are in the modules of the same names.
"""

from marfl.plan.grid import Plan, Seat, order, plan, split
from marfl.plan.keys import keys_plan, random_plan

__all__ = ["Plan", "Seat", "keys_plan", "order", "plan", "random_plan", "split"]
