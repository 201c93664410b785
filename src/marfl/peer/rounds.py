"""A daemon's iterations: catch up, train in a thread, take part, write down what came of it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from marfl.learn import LocalResult, Metrics
from marfl.lessons import learn_in_groups
from marfl.peer.account import Account
from marfl.peer.cast import Cast, Part
from marfl.peer.course import Course
from marfl.privacy.agreed import CLIP
from marfl.privacy.spending import Spending
from marfl.protocol.exchange import Contribution
from marfl.protocol.fixed_point import abstains, can_carry
from marfl.protocol.meetings import Meetings, Prepare
from marfl.protocol.participant import Outcome, Participant
from marfl.protocol.speaker import Speaker
from marfl.state import Snapshot

log = logging.getLogger("marfl.peer")
AGAIN = 1.0  # seconds before another try to catch up


@dataclass
class Rounds(Course):
    """The way of a peer that votes: every iteration is committed by a majority, or is not."""

    voter: Participant
    cast: Cast | None
    server: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        private = self.config.privacy.mode == "sound" and not self.server
        self.account = Account(self.config, self.store) if private else None

    @property
    def speaker(self) -> Speaker:
        return self.voter.talk

    @property
    def iteration(self) -> int:
        return self.voter.record.iteration

    @property
    def held(self) -> Snapshot:
        return self.voter.state

    @property
    def model_hash(self) -> bytes:
        return self.voter.state.hash

    @property
    def exchanging(self) -> bool:
        return self.voter.exchanging

    async def begins(self) -> bool:
        return self.iteration == 0 and not await self.voter.standing.heads()

    async def serve(self) -> None:
        await self.voter.standing.announce_head()

    async def go_on(self) -> None:
        """When a heavier lineage turns up, go on with it: a partition may heal after the last iteration."""
        if await self.overtaken():
            await self.catch_up()
            await self.run()

    async def farewell(self) -> None:
        await self.voter.farewell()

    async def run(self) -> None:
        """Until the last iteration is committed and its state is here."""
        behind = True  # after a restart: look whether others went on
        self.end = await self._in_thread(self._last_iteration)
        while self.voter.record.iteration < self.end or self.voter.behind:
            iteration = self.voter.record.iteration + 1
            part = self._part(iteration)
            if behind or (self.voter.behind and (any(part) or iteration > self.end)):
                behind = not await self.catch_up()
                continue
            if self.account and all(part) and not await self._affords(iteration):
                self.ended = self.account.spending.why_stopped
                break
            behind = await self._take_part(iteration, part)
        self.state = "done"

    async def _take_part(self, iteration: int, part: Part) -> bool:
        """Train and average, once; whether others went on without this peer. What it brought is free after that."""
        begun = time.perf_counter()
        mine, result = await self._contribute(iteration, part)
        update_seconds = time.perf_counter() - begun
        self.state = "waiting"
        outcome = await self.voter.run_iteration(mine)
        if outcome.status == "committed":
            await self._committed(outcome, result, update_seconds)
            return False
        self.last = {"iteration": outcome.iteration, "status": outcome.status, "missing": {}}
        log.info("iteration %d: %s", outcome.iteration, _explained(outcome.status))
        return outcome.status == "stale"

    def _last_iteration(self) -> int:
        """The run's last iteration: a privacy budget may end it earlier, for everybody at once."""
        if self.config.privacy.target_epsilon is None:
            return self.config.iterations
        spending = self.account.spending if self.account else Spending(self.config)
        if spending.horizon < self.config.iterations:
            self.ended = spending.why_stopped
        return spending.horizon

    async def _affords(self, iteration: int) -> bool:
        assert self.account is not None
        return await self._in_thread(partial(self.account.affords, iteration, self.voter.state.hash))

    def _part(self, iteration: int) -> Part:
        if self.server:
            return Part(updates=False)
        return self.cast.part(iteration) if self.cast else Part()

    # --- catch-up ---

    async def overtaken(self) -> bool:
        """Whether somebody announces a state that wins over mine."""
        mine, heads = self.voter.record, await self.voter.standing.heads()
        return any(digest != mine.hash and not mine.beats(mass, digest) for _, mass, digest in heads)

    async def catch_up(self) -> bool:
        """Hold the swarm's newest state; whether it worked. What was given up for it is said."""
        trying, self.state = self.state == "syncing", "syncing"
        before = self.voter.record
        begun = time.perf_counter()
        if not await self.voter.catch_up():
            if not trying:  # said once
                log.info("nobody gives the newest state yet; trying again every %g second", AGAIN)
            await asyncio.sleep(AGAIN)
            return False
        record = self.voter.record
        if record.hash != before.hash:
            lost, self.voter.discarded = self.voter.discarded, 0  # said once
            log.info("caught up: iteration %d, model %s%s", record.iteration, record.hash.hex()[:12],
                     f"; {lost} committed iterations given up for it" if lost else "")  # fmt: skip
            row = await self._row("stale", record.iteration, time.perf_counter() - begun)
            await self._write(row | {"missing": {}, "discarded": lost})
        return True

    # --- training ---

    async def _contribute(self, iteration: int, part: Part) -> tuple[Contribution | None, LocalResult | None]:
        state = self.voter.state
        result, consumed = None, 0
        if part.updates and (part.aggregates or self.trainer.own is not None):
            self.state = "training"
            consumed = self._consume(iteration)
            result = await self._in_thread(lambda: self.trainer.update(state, iteration, consumed))
        if not part.aggregates:
            return None, None
        if result is None:
            return Contribution(state.hash, self.trainer.nothing(), 0.0), None
        outgoing = await self._outgoing(state, iteration, result)
        # A private peer sends zero and noise for what is not finite: staying away would tell something about its data.
        if (not result.finite and self.account is None) or not can_carry(self.voter.settings.wire, outgoing):
            self._notes.append(f"this peer: {abstains(self.voter.settings.wire)}")
            log.warning("iteration %d: %s", iteration, self._notes[-1])
            return None, None
        fewest = self.account.fewest if self.account else 0
        prepare = self._prepare(iteration, consumed, result)
        return Contribution(state.hash, outgoing, fewest=fewest, prepare=prepare), result

    async def _outgoing(self, state: Snapshot, iteration: int, result: LocalResult) -> Tensor:
        account = self.account
        if account is None:
            return self.trainer.outgoing(result)
        make = partial(self.trainer.privatised, result, state, iteration)
        return await self._in_thread(lambda: account.draw(iteration, state.hash, make))

    def _prepare(self, iteration: int, consumed: int, result: LocalResult) -> Prepare | None:
        """How to learn from my groups before my update goes to a roster, where this iteration distils."""
        if not self.trainer.practice.in_groups(iteration):
            return None

        async def study(state: LocalResult, models: list[Tensor], round: int) -> LocalResult:
            lesson = await self._in_thread(lambda: self.trainer.lesson(state, models, iteration, consumed, round))
            if lesson.undone:
                self._notes.append(f"round {round + 1}: distillation led to NaN or infinity and was undone")
            return lesson.result

        async def prepare(meetings: Meetings) -> Tensor:
            learnt = await learn_in_groups(meetings, result, study)
            self._notes += [f"round {round + 1}: no model of {peer} to learn from" for round, peer in meetings.missed]
            return self.trainer.outgoing(learnt)

        return prepare

    def _consume(self, iteration: int) -> int:
        if self.cast is not None:
            return self.cast.consumed(iteration, self.trainer.practice.consumes)
        return super()._consume(iteration)

    # --- what came of it ---

    async def _committed(self, outcome: Outcome, result: LocalResult | None, update_seconds: float) -> None:
        row = await self._row(outcome.status, outcome.iteration, outcome.seconds + update_seconds) | {
            "participants": len(outcome.present) + len(outcome.missing),
            "aggregators": len(outcome.present),
            "train_loss": result.loss if result and not self.account else None,
            "update_seconds": update_seconds,
            "aggregate_seconds": outcome.seconds,
            "present": list(outcome.present),
            "missing": dict(outcome.missing),
            "attempt": outcome.attempt,
            "exchange": outcome.exchange,
            "holds": outcome.holds,
            "discarded": outcome.discarded,
        }
        metrics = await self._test(outcome.iteration) if outcome.holds else None
        row["test_loss"] = metrics.loss if metrics and math.isfinite(metrics.loss) else None
        row["test_accuracy"] = metrics.accuracy if metrics else None
        row["checks"] += [f"{peer}: {why}" for peer, why in outcome.missing.items()]
        self._say(outcome, metrics)
        await self._write(row)

    async def _row(self, status: str, iteration: int, seconds: float) -> dict[str, Any]:
        """Every row's fields; a private peer's also say what it has given away."""
        spent: Mapping[str, float | None] = {}
        if self.account:
            self._notes += self.account.settle(self.voter)
            spent = await self._in_thread(self.account.spending.columns)
        row = await super()._row(status, iteration, seconds)
        record = self.voter.history.get(iteration, self.voter.record)  # others may have gone on meanwhile
        agreed = {"model_hash": record.hash.hex(), "lineage": record.lineage.hex()}
        return row | {**spent, **agreed, "clip": self.voter.state.scalars.get(CLIP)}

    def _say(self, outcome: Outcome, metrics: Metrics | None) -> None:
        known = len(outcome.present) + len(outcome.missing)
        tested = f", accuracy {metrics.accuracy:.1%}" if metrics else ""
        missing = "; ".join(f"{peer} {why}" for peer, why in outcome.missing.items())
        log.info(
            "iteration %d: %d of %d averaged in %.2f s (attempt %d, %s), model %s%s%s", outcome.iteration,
            len(outcome.present), known, outcome.seconds, outcome.attempt, outcome.exchange,
            (outcome.hash or b"").hex()[:12], tested, f"; without {missing}" if missing else "",
        )  # fmt: skip

    async def save(self) -> None:
        """Keep the agreed state, where this peer holds it."""
        if self.voter.behind:
            return  # it only voted: the state kept last is still right
        memory = self.memory
        memory.state, memory.record, memory.momentum = self.voter.state, self.voter.record, self.trainer.own
        memory.sent, memory.received = self.sent, self.received
        await asyncio.to_thread(self.store.save, memory)


def _explained(status: str) -> str:
    if status == "stale":
        return "the others went on from another state; catching up"
    return "no majority in time; trying again"
