"""Local updates of a task by one real peer: bit for bit those of the simulator's bitwise engine."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from marfl.config import Config
from marfl.dp.noise import system_words
from marfl.dp.private_agreement import CLIP, PrivateAgreement, RecordAgreement, Secret, agreement_of
from marfl.errors import InputError
from marfl.from_config import check_task, integers_of, local_work_of, technique_of, test_of, wire_of
from marfl.learn import (
    Distilled,
    Loader,
    LocalResult,
    Metrics,
    Task,
    Worker,
    initial_model,
    load_task,
    personal,
    shard_of,
)
from marfl.learn.device import find_device
from marfl.learn.local_work import Start
from marfl.learn.record_gradients import RecordGradients
from marfl.learn.small_integers import SmallIntegers
from marfl.learn.strategy import part_of
from marfl.peer.federated_metrics import PREFIX, FederatedMetrics
from marfl.protocol.roster import Roster
from marfl.settings import Partition
from marfl.state import Snapshot, check_trainable, frozen_layers, keep_at_home

log = logging.getLogger("marfl.peer")
TESTED = ("loss", "accuracy")  # what a peer's own test says


def task_of(config: Config) -> Task:
    custom = ":" in config.task and config.partition == Partition()  # a task of one's own may split its data itself
    return load_task(config.task, partition=None if custom else config.partition, **config.task_options)


class Trainer:
    """One peer's model, its shard of the data, and how the agreed state moves. One thread at a time uses it."""

    def __init__(self, config: Config, index: int, *, server: bool = False) -> None:
        torch.set_num_threads(1)  # more threads would add in another order
        self.config = config
        self.task = task_of(config)
        module = initial_model(self.task, config.seed)
        keep_at_home(module, config.local)
        self.worker = Worker(self.task, module, find_device(config.device))
        self.home: Tensor | None = None  # this peer's personal layers, once they were trained
        self._left_home: tuple[int, Tensor | None] = (0, None)  # the iteration trained last, and what was there before
        self._tests: Dataset[Any] | None = None  # what personal layers are tested on
        if config.local:
            personal.check_task(self.task)
        check_trainable(self.worker.module)
        self.frozen = frozen_layers(self.worker.module)
        self.local_work = local_work_of(config, technique_of(config))
        check_task(self.task, self.local_work)
        self.agreement = agreement_of(config, self.local_work, self.worker.trainable)
        wire = integers_of(config)
        self.small = SmallIntegers(self.agreement, wire, self.worker.trainable, config.overlap) if wire else None
        self.start = (self.small or self.agreement).start(self.worker.flat.clone())
        self.tests = FederatedMetrics(TESTED if config.share_tests else (), wire_of(config))
        self.layout = self.tests.layout(self.worker.layout)
        self.shared: dict[int, dict[str, float]] = {}  # everybody's tests that came with a state, by its iteration
        self.own = torch.zeros_like(self.worker.flat) if self.agreement.momentum == "local" else None
        self._test = test_of(config, self.task)
        self._loader: Loader | None = None
        if not server:
            shard = shard_of(self.task, index, config.peers, config.seed)
            if config.local:
                shard, self._tests = personal.apart(shard, config.seed, index)
            self._loader = Loader(shard, seed=config.seed, peer=index, batch_size=config.batch_of(index))
        self.records: RecordGradients | None = None
        if isinstance(self.agreement, RecordAgreement) and self._loader is not None:
            self.records = RecordGradients(self.worker, self._loader.records(np.arange(1)))
            log.info("%s", self.records.way)

    def advance(self, state: Snapshot, mean: Tensor, roster: Roster) -> Snapshot:
        if self.small is not None:
            return self.small.advance(state, mean, roster.weight, roster.contributions)
        values = self.agreement.values(self.worker.flat.numel())
        self.shared = {state.version + 1: self.tests.told(mean, values)}
        return self.agreement.advance(state, mean[:values], roster.contributions)

    def share(self, tested: Metrics) -> None:
        """Bring this peer's own test to the next average, where peers share them."""
        if self.tests.names:
            self.tests.note({"loss": tested.loss, "accuracy": tested.accuracy}, float(tested.count))

    def shared_in(self, iteration: int) -> dict[str, float]:
        """Everybody's tests that were averaged in an iteration, of models before it. They are no part of the state."""
        return {name.removeprefix(PREFIX): value for name, value in self.shared.get(iteration, {}).items()}

    def update(self, state: Snapshot, iteration: int, consumed: int, remembered: Tensor | None = None) -> LocalResult:
        """The local update of an iteration from the agreed state, and from what this peer remembers for the strategy.

        Where single records are hidden there is none: their sample is drawn with the noise, when the vector is made.
        """
        if self._loader is None:
            raise InputError("a server has no data to train on")
        if self.records is not None:
            theta = state.vectors["theta"]
            return LocalResult(theta, torch.empty(0), torch.empty(0), math.nan, 0, finite=True)
        momentum = state.vectors["momentum"] if self.own is None else self.own
        if self._left_home[0] != iteration:  # a second try of an iteration begins where the first one did
            self._left_home = iteration, self.home
        start = Start(state.vectors["theta"], momentum, part_of(state.vectors), remembered, self._left_home[1])
        result = self.local_work.update(self.worker, self._loader, start, iteration, consumed)
        if result.home is not None and result.finite:
            self.home = result.home
        if self.own is not None and result.finite:
            self.own = result.momentum
        return result

    def distill_round(
        self, before: LocalResult, models: list[Tensor], iteration: int, consumed: int, round: int
    ) -> Distilled:
        """A round of distillation from the models of my group."""
        if self._loader is None:
            raise InputError("a server has no data to learn with")
        return self.local_work.distill_round(self.worker, self._loader, before, models, iteration, consumed, round)

    def outgoing(self, result: LocalResult) -> Tensor:
        return self.tests.brought(self.agreement.outgoing(result), 1.0)

    def privatised(self, result: LocalResult, state: Snapshot, iteration: int) -> Tensor:
        """All that leaves this peer in a private run, under fresh noise from the OS: draw it once per iteration."""
        assert isinstance(self.agreement, PrivateAgreement)
        bound, words = state.scalars[CLIP], system_words()
        if isinstance(self.agreement, RecordAgreement) and self.records is not None and self._loader is not None:
            theta = state.vectors["theta"]
            return self.agreement.of_records(self.records, self._loader, theta, bound, Secret(words, words))
        momentum = state.vectors.get("momentum", result.momentum)
        return self.agreement.privatised(result.delta, momentum, iteration, bound, words)

    def nothing(self) -> Tensor:
        """What somebody brings who only helps to aggregate."""
        return torch.zeros(self.agreement.values(self.worker.flat.numel()) + 2 * len(self.tests.names))

    def evaluate(self, state: Snapshot) -> Metrics:
        if self._tests is not None:
            return personal.tested(self.worker, state.vectors["theta"], self.home, self._tests)
        self.worker.load(state.vectors["theta"])
        return self._test(self.worker.module)
