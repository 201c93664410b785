"""What a config asks of every peer, as the parts that do it: the same in the simulator and in a real swarm."""

from __future__ import annotations

from marfl.config import Config
from marfl.errors import InputError
from marfl.learn import LocalWork
from marfl.learn.task import Task, logit_obstacle
from marfl.plan.grid import plan
from marfl.settings import RunTerms
from marfl.techniques.catalogue import technique
from marfl.techniques.mar import Mar
from marfl.techniques.technique import Technique
from marfl.wire.packing import MASKED, IntegerWire, integer_wire, is_small


def technique_of(config: Config, wire: IntegerWire | None = None) -> Technique:
    """How the peers average; with another wire of small integers than the usual one, where one is given."""
    return technique(
        config.technique,
        group_size=config.group_size,
        exchange=config.exchange or "grid",
        plan=config.plan or "exact",
        rounds=config.rounds,
        wire=wire or integers_of(config),
        **config.technique_options,
    )


def wire_of(config: Config) -> str:
    """How values travel among peers: see `marfl.protocol.fixed_point` and `marfl.wire`."""
    wire = config.wire or "fp32"
    if config.privacy.masks:
        return MASKED + wire if is_small(wire) else "masked"
    return wire


def integers_of(config: Config) -> IntegerWire | None:
    """How values travel, where they are integers of a few bits."""
    return integer_wire(wire_of(config), config.wire_down)


def smallest_sum_of(config: Config) -> int:
    """Contributions that a masked sum must have."""
    return config.privacy.smallest_sum or RunTerms.smallest_sum


def local_work_of(config: Config, chosen: Technique) -> LocalWork:
    """Local steps and distillation. Where a peer distils on its own, it takes as many rounds as a full roster has."""
    optimizer, given = config.optimizer, config.distill
    if not given.iterations:
        return LocalWork(optimizer, config.local_batches)
    layout = chosen.plan_for(config.peers) if isinstance(chosen, Mar) else plan(config.peers, config.group_size)
    return LocalWork(optimizer, config.local_batches, given, len(layout.rounds), matched=given.match_local_steps)


def check_task(task: Task, local_work: LocalWork) -> None:
    """Refuse a task that cannot be distilled, before anything runs."""
    distill = local_work.distill
    if distill and not local_work.matched and (obstacle := logit_obstacle(task)):
        raise InputError(f"distill.iterations = {distill.iterations}: {obstacle}")
