"""`marfl.simulate`: a whole simulation in one call, with every setting by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar

from marfl.config import Config
from marfl.errors import InputError
from marfl.runs.rows import Row, SimulationSummary
from marfl.schema import validated
from marfl.settings import Churn, Distill, ExchangeName, Optimizer, Partition, Privacy, WireName
from marfl.sim.engine import simulate as run_to_the_end

P = ParamSpec("P")
R = TypeVar("R")
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def _config_or_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse settings beside a config: a config is complete, and a setting at its default would go unnoticed."""

    @wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> R:
        settings = [name for name in named if name in Config.model_fields]
        if settings and (arguments[:1] or (None,))[0] is not None:
            raise InputError(f"simulate: {settings[0]} beside a config; say it to marfl.load(overrides=…)")
        return function(*arguments, **named)

    return called


@_config_or_settings
def simulate(  # noqa: PLR0913 - all settings by name, so that an editor can complete them
    config: Config | None = None,
    /,
    *,
    on_row: Callable[[Row], None] | None = None,
    task: str = "digits",
    task_options: Mapping[str, Any] = NO_OPTIONS,
    technique: str = "mar",
    technique_options: Mapping[str, Any] = NO_OPTIONS,
    strategy: str = "plain",
    strategy_options: Mapping[str, Any] = NO_OPTIONS,
    semantics: Literal["exact", "paper"] = "exact",
    exchange: ExchangeName | None = None,
    plan: Literal["exact", "keys", "random"] | None = None,
    coordination: Literal["roster", "paper"] | None = None,
    peers: int = 16,
    group_size: int = 5,
    liars: int = 1,
    seniority: int = 2,
    audit: float = 0.0,
    on_fraud: Literal["go on", "rollback"] = "go on",
    rounds: int | None = None,
    iterations: int = 50,
    local_batches: int = 1,
    batch: int = 64,
    global_batch: int | None = None,
    momentum: Literal["derive", "send", "local"] | None = None,
    local: tuple[str, ...] = (),
    overlap: bool = False,
    optimizer: Optimizer = Optimizer(),
    partition: Partition = Partition(),
    churn: Churn = Churn(),
    distill: Distill = Distill(),
    privacy: Privacy = Privacy(),
    wire: WireName | None = None,
    wire_down: int | None = None,
    links: str | None = None,
    compute_seconds: float = 0.1,
    seed: int = 0,
    engine: Literal["bitwise", "fast", "protocol"] = "bitwise",
    device: str = "cpu",
    workers: int = 0,
    cluster: str | None = None,
    other_nodes: Literal["refuse", "name"] | None = None,
    test_every: int = 5,
    test_on: str = "whole",
    share_tests: bool = False,
    target_accuracy: float | None = None,
    patience: int | None = None,
    checkpoint_every: int = 10,
) -> SimulationSummary:
    """Simulate federated learning over many peers in this process, to the end; returns the summary.

    Either from a config, such as ``marfl.simulate(marfl.load("demo"))``, or from settings by name, such as
    ``marfl.simulate(peers=27, optimizer=marfl.Optimizer(learning_rate=0.5))``.

    Args:
        config: all settings at once; then none is given by name
        on_row: is called with every iteration's row
        task: what is learned: digits, mnist, 20ng, synthetic, or module:Class of your own
        task_options: arguments of the task's constructor
        technique: how: mar, fedavg, arfl, rdfl, ring, butterfly, saps, braintorrent, gossip, or module:Class of
            your own
        technique_options: compression, fanout, …
        strategy: what a mean does, and local steps: plain, diloco, fedadam, fedyogi, fedprox, scaffold, or
            module:Class of your own
        strategy_options: learning_rate, mu, …
        semantics: exact average of live peers, or as published
        exchange: what travels in a group (mar); default grid, with semantics = paper full
        plan: who meets whom (mar); default exact, with semantics = paper keys
        coordination: how real peers form groups: by a roster that they vote on, or by the paper's keys in the DHT
        peers: N: peers of the run
        group_size: largest group; M in the paper
        liars: lying peers that a decision bears; fewer than a third of its electors
        seniority: commits to which a newcomer contributes before its vote counts
        audit: share of all sums that are checked after a commit; 0: nothing is signed
        on_fraud: when a sum is proven wrong: go on without the liar, or go back to the state before it
        rounds: group rounds (paper); fewer than needed: approximate
        iterations: T: local updates and averages, one after the other
        local_batches: B: mini-batches per peer and iteration
        batch: rows of a mini-batch
        global_batch: or: rows of a mini-batch of all peers together; the last take one more each
        momentum: how the momentum is agreed on; default derive, or send where models travel
        local: layers that stay at home, by name or pattern such as head.*: nothing of them travels
        overlap: train on while the last updates are averaged; each mean is of work from one state before
        optimizer: damped momentum SGD, the same on every peer: m ← μ·m + (1−μ)·g, then θ ← θ − η·m
        partition: who holds which samples
        churn: who takes part in an iteration, and who is lost on the way
        distill: Moshpit-KD: peers learn from the models of their groups before they average
        privacy: what others may learn from a peer: differential privacy of its whole contribution, and masked sums
        wire: values as fp32 (default), fixed: 64-bit integers (with masks), or int8, int4: a few bits
        wire_down: bits of the sum on its way back: 4, 8 or 16; by default those of wire
        links: the peers' links, for virtual seconds: lan, wifi, 5g, lte, nb-iot or mixed
        compute_seconds: of one local mini-batch on a typical peer, for virtual time
        seed: of everything drawn at random: the same seed, the same run
        engine: the exact bits, the same curve in less time, or the protocol on a virtual network
        device: where local steps run: auto, cpu, cuda, cuda:N or mps
        workers: processes; 0: one per core where a step is long enough
        cluster: compute on a Ray cluster: auto, local for one of this machine alone, or HOST:PORT
        other_nodes: cluster nodes with another CPU or torch, whose last bits may differ: refuse them, or only name
            them; default refuse with engine = bitwise
        test_every: iterations between two tests; the last is always tested
        test_on: the test set, or the mean over the peers' own shards of it, as the paper's code has it
        share_tests: real peers average their own test results, along with the next model
        target_accuracy: stop when the test accuracy reaches this
        patience: stop after so many tests without a better accuracy
        checkpoint_every: iterations between two checkpoints
    """
    given = {name: value for name, value in locals().items() if name in Config.model_fields}
    return run_to_the_end((config or validated(Config, given)).resolved(), on_row)
