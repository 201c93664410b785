"""A daemon's iterations as the paper coordinates them: train from my own model, average by group keys, go on.

Nobody catches up: a peer that was away goes on from its stale model, as in the paper, in the iteration that the others
are in.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import torch

from marfl.config import Config
from marfl.from_config import technique_of
from marfl.learn import LocalResult, Metrics
from marfl.peer.loop import Loop, with_result
from marfl.protocol.moshpit import Averaged, Grouping, Moshpit
from marfl.protocol.speaker import Speaker
from marfl.state import Snapshot, vector_hash
from marfl.techniques.mar import Mar

log = logging.getLogger("marfl.peer")
WEAKER = (
    "coordination = paper: no roster and no commit; when a peer fails, or the number of peers is no power of the group "
    "size, peers may end on different models"
)


def grouping_of(config: Config) -> Grouping:
    """Who meets whom by the paper's keys."""
    chosen = technique_of(config)
    assert isinstance(chosen, Mar)  # the config has been checked
    rounds, dimension = chosen.key_shape(config.peers)
    return Grouping(config.peers, config.group_size, rounds, dimension)


@dataclass
class PaperLoop(Loop):
    """The way of a peer that asks nobody: its model is its own."""

    moshpit: Moshpit

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hold(self.kept.state)

    @property
    def speaker(self) -> Speaker:
        return self.moshpit.talk

    @property
    def iteration(self) -> int:
        return self.held.version

    @property
    def held(self) -> Snapshot:
        return self.kept.state

    @property
    def model_hash(self) -> bytes:
        return self._hash

    @property
    def exchanging(self) -> bool:
        return self.moshpit.exchanging

    async def begins(self) -> bool:
        return self.iteration < self.config.iterations and not await self.moshpit.pace()

    def begin_with(self, count: int) -> None:
        """A group waits for those of its key, and not for long."""

    async def run(self) -> None:
        """Through all iterations; whoever met nobody looks where the others are."""
        alone = True
        while self.iteration < self.end:
            iteration = self.iteration + 1
            if alone:
                iteration = min(self.end, max(iteration, await self.moshpit.pace()))
            alone = not await self._iterate(iteration)
        self.state = "done"

    async def serve(self) -> None:
        """There is nothing to serve: the others do without me."""

    async def go_on(self) -> None:
        """My model is final, whatever the others hold."""

    async def farewell(self) -> None:
        """Nobody is told: a group waits for its peers until its time is over."""

    async def save(self) -> None:
        self.kept.sent, self.kept.received = self.sent, self.received
        await self._in_thread(lambda: self.store.save(self.kept))

    async def _iterate(self, iteration: int) -> bool:
        """One iteration; whether anybody else was met in it."""
        self.begun, self.state = iteration, "training"
        state, consumed, begun = self.held, self._consume(iteration), time.perf_counter()
        result = await self._in_thread(lambda: self.trainer.update(state, iteration, consumed))
        trained = time.perf_counter()
        self.state = "waiting"
        theta, momentum = state.vectors["theta"], state.vectors["momentum"]
        if result.finite:
            theta, momentum = result.theta, result.momentum
            averaged = await self.moshpit.average(iteration, torch.cat((theta, momentum)))
            theta, momentum = (half.clone() for half in averaged.value.chunk(2))
        else:
            self._notes.append("this peer: its update is not finite, so it abstains")
            averaged = Averaged(theta)
        self._hold(Snapshot(iteration, {"theta": theta, "momentum": momentum}, {}))
        await self._note(averaged, result, trained - begun, time.perf_counter() - trained)
        return len(averaged.present) > 1

    def _hold(self, state: Snapshot) -> None:
        self.kept.state = state
        self._hash = vector_hash(state.vectors["theta"], state.vectors["momentum"])

    async def _note(self, averaged: Averaged, result: LocalResult, update: float, aggregate: float) -> None:
        metrics = await self._test(self.iteration)
        row = await self._row("averaged", self.iteration, update + aggregate)
        row = replace(
            with_result(row, averaged.present, averaged.missing, update, aggregate, metrics),
            train_loss=result.loss if result.finite else None,
            exchange="full",
            disagreement=None,  # nobody compares models here
        )
        self._say(averaged, aggregate, metrics)
        await self._write(row)

    def _say(self, averaged: Averaged, seconds: float, metrics: Metrics | None) -> None:
        sizes = ", ".join(str(len(group)) for group in averaged.groups) or "none"
        tested = f", accuracy {metrics.accuracy:.1%}" if metrics else ""
        missing = "; ".join(f"{peer} {why}" for peer, why in averaged.missing.items())
        log.info(
            "iteration %d: averaged in groups of %s in %.2f s, model %s%s%s", self.iteration, sizes, seconds,
            self.model_hash.hex()[:12], tested, f"; without {missing}" if missing else "",
        )  # fmt: skip
