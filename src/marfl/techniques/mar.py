"""MAR-FL: Moshpit All-Reduce among small groups, round after round.

Mulitze, Woisetschläger, Jacobsen: MAR-FL: A Communication Efficient Peer-to-Peer Federated Learning System, 2025
(arXiv 2512.05234), on Moshpit All-Reduce (Ryabinin, Gorbunov, Plokhotnyuk, Pekhimenko 2021, arXiv 2103.03239).
Plans: `exact` is ours (core and spares, the sum over everybody for any n), `keys` the paper's group keys (exact on
perfect grids, and only there), `random` fresh random groups in every round. What travels in a group is the exchange:
`full` as in the paper, `chunked`, or `grid`, which costs 2(n−1) vectors in all and needs the exact plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from marfl.errors import InputError
from marfl.plan.cost import Cost, Messages, cost, exchange_messages
from marfl.plan.grid import Plan, plan
from marfl.plan.keys import keys_plan, random_plan
from marfl.plan.schedule import EXCHANGES
from marfl.protocol.exchange import sum_in_plan_order
from marfl.rng import key
from marfl.techniques.technique import ABSORBED, Loss, MixContext, Mixed, Span, ranks_of_dead, sum_in_rank_order
from marfl.wire.packing import IntegerWire

PLANS = ("exact", "keys", "random")


@dataclass(frozen=True)
class Mar:
    """Moshpit All-Reduce over a plan, by an exchange."""

    group_size: int = 5  # M in the paper
    exchange: str = "grid"
    plan: str = "exact"
    rounds: int | None = None  # of `keys` and `random`; by default as many as a perfect grid would need
    dimension: int | None = None  # d of the paper's keys; by default that of the grid, or the rounds if these are fewer
    wire: IntegerWire | None = None  # values as integers of a few bits; fp32 without

    name: ClassVar[str] = "mar"
    server: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise InputError(f"group_size = {self.group_size}: must be at least 2")
        if self.exchange not in EXCHANGES:
            raise InputError(f"exchange = {self.exchange!r}: must be one of {', '.join(EXCHANGES)}")
        if self.plan not in PLANS:
            raise InputError(f"plan = {self.plan!r}: must be one of {', '.join(PLANS)}")
        if self.exchange == "grid" and self.plan != "exact":
            raise InputError(f"exchange = 'grid': needs plan = 'exact'; with plan = {self.plan!r} take full or chunked")
        if self.rounds is not None and self.plan == "exact":
            raise InputError(f"rounds = {self.rounds}: plan = 'exact' takes as many as it needs; take keys or random")
        if self.dimension is not None and self.plan != "keys":
            raise InputError(f"dimension = {self.dimension}: belongs to plan = 'keys', not to {self.plan!r}")
        for name in ("rounds", "dimension"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise InputError(f"{name} = {given}: must be at least 1")

    @property
    def exact(self) -> bool:
        return self.plan == "exact"

    def plan_for(self, n: int, seed: int = 0) -> Plan:
        """Who meets whom among n members; the seed is for random groups."""
        if self.plan == "exact":
            return plan(n, self.group_size)
        rounds, dimension = self.key_shape(n)
        if self.plan == "random":
            return random_plan(n, self.group_size, rounds, seed)
        return keys_plan(n, self.group_size, rounds, dimension)

    def key_shape(self, n: int) -> tuple[int, int]:
        """(rounds, d) of the paper's keys for n members; a key has d − 1 entries."""
        grid = _grid_dimension(n, self.group_size)
        rounds = grid if self.rounds is None else self.rounds
        return rounds, self.dimension or min(rounds, grid)

    def groups(self, n: int, seed: int, iteration: int) -> Plan:
        """Who meets whom in one iteration of a run: random groups are others each time."""
        return self.plan_for(n, key(seed, "random groups", iteration))

    def exact_for(self, n: int) -> bool:
        return self.plan_for(n).exact

    def total(self, values: Sequence[Tensor], span: Span | None = None) -> Tensor:
        return sum_in_plan_order(self.plan_for(len(values)), values)

    def mix(self, values: Sequence[Tensor], ctx: MixContext) -> Mixed:
        """The mean within each group, round after round; every member's value counts the same, as in the paper."""
        if self.plan != "random" and self.exact_for(len(values)):  # random groups are others in every iteration
            return Mixed([self.total(values) / len(values)] * len(values), ctx.memory, None)
        chosen = self.groups(len(values), ctx.seed, ctx.iteration)
        mixed = list(values)
        for groups in chosen.rounds:
            for group in groups:
                mean = sum_in_rank_order([mixed[rank] for rank in group]) / len(group)
                for rank in group:
                    mixed[rank] = mean
        return Mixed(mixed, ctx.memory, list(exchange_messages(chosen, self.exchange, values[0].numel())))

    def cost(self, n: int, length: int) -> Cost:
        return cost(self.exchange, self.plan_for(n), length, self.wire)

    def messages(self, n: int, length: int) -> Iterator[Messages]:
        return exchange_messages(self.plan_for(n), self.exchange, length, self.wire)

    def lost(self, n: int, length: int, died_in_round: int, deaths: int) -> Loss:
        """A group averages without its dead; an exact attempt goes on as long as the sums it needs have replicas.

        `grid` has none; but once anybody has the result, the others can have it from there.
        """
        if not self.exact or (self.exchange != "grid" and self._has_replicas(n, died_in_round, deaths)):
            return ABSORBED
        played = play(self.messages(n, length), n, ranks_of_dead(n, deaths), died_in_round)
        if played.finished:
            return ABSORBED
        return Loss(played.sent, "retry")

    def _has_replicas(self, n: int, died_in_round: int, deaths: int) -> bool:
        """Whether every partial sum of the rounds before most likely survives: one of its holders, at least."""
        done = died_in_round // 2 if self.exchange == "chunked" else died_in_round
        replicas = math.prod(self.plan_for(n).factors[:done])
        return done > 0 and n / replicas * (deaths / n) ** replicas < 0.5

    def protocol(self, n: int) -> dict[str, Any]:
        if self.plan != "exact":
            raise InputError(f"plan = {self.plan!r}: runs in the simulator only; peers need plan = 'exact'")
        fallbacks = ("full",) if self.exchange == "full" else ("chunked", "full")
        return {"exchange": self.exchange, "group_size": self.group_size, "fallbacks": fallbacks}


def _grid_dimension(n: int, group_size: int) -> int:
    """The smallest d with group_size^d ≥ n, at least 1."""
    dimension = 1
    while group_size**dimension < n:
        dimension += 1
    return dimension


class Played(NamedTuple):
    """A schedule played until nobody can go on."""

    sent: int  # bytes
    finished: int  # peers that got all they wait for


def play(phases: Iterable[Messages], n: int, dead: Collection[int], died_in: int) -> Played:
    """Let the dead fall silent in a phase; everybody else goes on until an input is missing, and is then stuck."""
    gone, stuck = np.zeros((2, n), dtype=np.bool_)
    sent = 0
    for number, phase in enumerate(phases):
        if number == died_in:
            gone[list(dead)] = True
        silent = (gone | stuck)[phase.source]
        sent += int(phase.sizes[~silent & ~gone[phase.dest]].sum())
        stuck[phase.dest[silent]] = True
    gone[list(dead)] = True
    return Played(sent, n - int((stuck | gone).sum()))
