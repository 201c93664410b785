"""What the simulator makes of given rosters: the model that a swarm must end on, whoever died on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from marfl.config import Config
from marfl.sim.churn import Participation
from marfl.sim.engine import Simulation


def models_of(config: Config, rosters: Iterable[Sequence[int]]) -> list[str]:
    """The model's hash after every iteration in which everybody trains, and the peers of its roster average.

    Who is not in a roster has nothing under way for the next one, as if it had died in the exchange.
    """
    world, everybody = Simulation(config).world, frozenset(range(config.peers))
    found = []
    for iteration, roster in enumerate(rosters, start=1):
        world.step(iteration, Participation(everybody, frozenset(roster), {}))
        found.append(world.model_hash().hex())
    world.close()
    return found
