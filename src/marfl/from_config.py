"""What a config asks of every peer, as the parts that do it: the same in the simulator and in a real swarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from marfl.config import Config
from marfl.errors import InputError
from marfl.learn import LocalWork, Metrics, ShardedTest
from marfl.learn.strategy import Plain, Strategy, load_strategy
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
    optimizer, given, strategy = config.optimizer, config.distill, strategy_of(config)
    if not given.iterations:
        return LocalWork(optimizer, config.local_batches, strategy=strategy)
    layout = chosen.plan_for(config.peers) if isinstance(chosen, Mar) else plan(config.peers, config.group_size)
    rounds, matched = len(layout.rounds), given.match_local_steps
    return LocalWork(optimizer, config.local_batches, given, rounds, matched=matched, strategy=strategy)


def strategy_of(config: Config) -> Strategy:
    """What a mean does to the model, and what is other about local steps; refused where it cannot hold."""
    strategy = load_strategy(config.strategy, config.strategy_options)
    if not isinstance(strategy, Plain):
        for holds, why in _obstacles(config, strategy):
            if holds:
                raise InputError(f"strategy = {config.strategy}: {why}")
    return strategy


def _obstacles(config: Config, strategy: Strategy) -> Iterator[tuple[bool, str]]:
    """What a strategy cannot go with, each with what to choose instead."""
    yield config.semantics == "paper", (
        "is applied to one agreed mean, and the paper's semantics has none; choose semantics = exact"
    )
    if strategy.is_local:
        yield config.cluster is not None, "changes local steps in one process; leave cluster out, or choose diloco"
        yield config.distill.iterations > 0, (
            "changes local steps, and so does distillation; choose one, or diloco, fedadam or fedyogi"
        )
        yield config.privacy.unit == "record" and config.privacy.mode != "off", (
            "changes local steps, and records are summed without any; choose diloco, fedadam or fedyogi"
        )
    if strategy.remembers:
        yield config.privacy.mode != "off", "sends a second vector, which is not noised; choose fedprox"
        yield is_small(wire_of(config)), f"needs values in full; choose wire = fp32 or fixed, not {config.wire}"
        yield bool(config.churn.slow), "what peers remember cannot come late; leave churn.slow out, or choose fedprox"
        yield config.overlap, "what peers remember is of their last update; leave overlap out, or choose fedprox"
        yield config.on_fraud == "rollback", (
            "peers cannot take back what they remember; choose on_fraud = go on"
        )


def test_of(config: Config, task: Task) -> Callable[[nn.Module], Metrics]:
    """How a model that all peers hold is tested."""
    return task.evaluate if config.test_on == "whole" else ShardedTest(task, config.peers, config.seed).of_all


def check_task(task: Task, local_work: LocalWork) -> None:
    """Refuse a task that cannot be distilled, before anything runs."""
    distill = local_work.distill
    if distill and not local_work.matched and (obstacle := logit_obstacle(task)):
        raise InputError(f"distill.iterations = {distill.iterations}: {obstacle}")
