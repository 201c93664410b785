"""A daemon's iterations: catch up, train in a thread, take part, write down what came of it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from marfl.config import Config
from marfl.learn import LocalResult, Metrics
from marfl.lessons import learn_in_groups
from marfl.net.base import KINDS, Ledger
from marfl.peer.account import Account
from marfl.peer.cast import Cast, Part
from marfl.peer.store import Memory, StateDir
from marfl.peer.trainer import Trainer
from marfl.peer.voter import Voter
from marfl.privacy.accounting import COLUMNS
from marfl.privacy.agreed import CLIP
from marfl.privacy.spending import Spending
from marfl.protocol.fixed import abstains, can_carry
from marfl.protocol.instance import Contribution
from marfl.protocol.meetings import Meetings, Prepare
from marfl.protocol.participant import Outcome
from marfl.state import Snapshot

log = logging.getLogger("marfl.peer")
T = TypeVar("T")
DONE = "all iterations done"
AGAIN = 1.0  # seconds before another try to catch up


def one_thread() -> ThreadPoolExecutor:
    """Where training happens, so that votes are answered meanwhile; torch adds in one thread's order there."""
    return ThreadPoolExecutor(1, "training", initializer=torch.set_num_threads, initargs=(1,))


@dataclass
class Rounds:
    """One peer's way through a run."""

    config: Config
    voter: Voter
    trainer: Trainer
    store: StateDir
    memory: Memory
    cast: Cast | None
    server: bool
    thread: ThreadPoolExecutor

    def __post_init__(self) -> None:
        private = self.config.privacy.mode == "sound" and not self.server
        self.account = Account(self.config, self.store) if private else None
        self.ended = DONE  # why `run` came to its end
        self.state = "waiting"
        self.end = self.config.iterations  # the last iteration
        self.accuracy: float | None = None
        self.last: dict[str, Any] | None = None  # the last outcome, for the status page
        self._carried = self.memory.sent.copy(), self.memory.received.copy()  # before a restart
        self._told = self.sent, self.received  # what rows have accounted for
        self._notes: list[str] = []

    @property
    def sent(self) -> Ledger:
        """Since the beginning, restarts included."""
        return self._carried[0].plus(self.voter.net.sent)

    @property
    def received(self) -> Ledger:
        return self._carried[1].plus(self.voter.net.received)

    @property
    def doing(self) -> str:
        return "exchanging" if self.state == "waiting" and self.voter.exchanging else self.state

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
            begun = time.perf_counter()
            mine, result = await self._contribute(iteration, part)
            update_seconds = time.perf_counter() - begun
            self.state = "waiting"
            outcome = await self.voter.run_iteration(mine)
            if outcome.status == "committed":
                await self._committed(outcome, result, update_seconds)
            else:
                behind = outcome.status == "stale"
                self.last = {"iteration": outcome.iteration, "status": outcome.status, "missing": {}}
                log.info("iteration %d: %s", outcome.iteration, _explained(outcome.status))
        self.state = "done"

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
        return await self._in_thread(partial(self.account.spending.affords, iteration))

    def _part(self, iteration: int) -> Part:
        if self.server:
            return Part(updates=False)
        return self.cast.part(iteration) if self.cast else Part()

    # --- catch-up ---

    async def overtaken(self) -> bool:
        """Whether somebody announces a state that wins over mine."""
        mine = self.voter.record
        return any(digest != mine.hash and not mine.beats(mass, digest) for _, mass, digest in await self.voter.heads())

    async def catch_up(self) -> bool:
        """Hold the swarm's newest state; whether it worked. What was given up for it is said."""
        self.state = "syncing"
        before = self.voter.record
        begun = time.perf_counter()
        if not await self.voter.catch_up():
            log.info("nobody gives the newest state yet; trying again in %g second", AGAIN)
            await asyncio.sleep(AGAIN)
            return False
        record = self.voter.record
        if record.hash != before.hash:
            lost, self.voter.discarded = self.voter.discarded, 0  # said once
            log.info("caught up: iteration %d, model %s%s", record.iteration, record.hash.hex()[:12],
                     f"; {lost} iterations of a lighter lineage discarded" if lost else "")  # fmt: skip
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
        return Contribution(state.hash, outgoing, prepare=self._prepare(iteration, consumed, result)), result

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
        """Where in its data this iteration begins; a second try of an iteration trains on the same batches."""
        memory, batches = self.memory, self.trainer.practice.consumes(iteration)
        if self.cast is not None:
            return self.cast.consumed(iteration, self.trainer.practice.consumes)
        if memory.trained != iteration:
            memory.trained, memory.consumed = iteration, memory.consumed + batches
        return memory.consumed - batches

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

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
        metrics = await self._test(outcome)
        row["test_loss"] = metrics.loss if metrics and math.isfinite(metrics.loss) else None
        row["test_accuracy"] = metrics.accuracy if metrics else None
        row["checks"] += [f"{peer}: {why}" for peer, why in outcome.missing.items()]
        self._say(outcome, metrics)
        await self._write(row)

    async def _test(self, outcome: Outcome) -> Metrics | None:
        due = outcome.iteration % self.config.test_every == 0 or outcome.iteration == self.end
        if not (due and outcome.holds):
            return None
        state = self.voter.state
        metrics = await self._in_thread(lambda: self.trainer.evaluate(state))
        self.accuracy = metrics.accuracy
        return metrics

    async def _row(self, status: str, iteration: int, seconds: float) -> dict[str, Any]:
        """The fields that every row has; bytes are those that this peer has sent since the row before."""
        sent, received = self.sent.minus(self._told[0]), self.received.minus(self._told[1])
        self._told = self.sent, self.received
        spent: Mapping[str, float | None] = dict.fromkeys(COLUMNS)
        if self.account:
            self._notes += self.account.settle(self.voter)
            spent = await self._in_thread(self.account.spending.columns)
        notes, self._notes = self._notes, []
        return {
            "iteration": iteration, "status": status, "participants": 0, "aggregators": 0,
            **dict.fromkeys(("train_loss", "test_loss", "test_accuracy", "virtual_seconds")),
            "messages": sent.messages, **{f"bytes_{kind}": getattr(sent, kind) for kind in KINDS},
            "bytes_total": self.sent.total(), "wall_seconds": seconds,
            **dict.fromkeys(("update_seconds", "aggregate_seconds")),
            "disagreement": 0.0, "model_hash": self.voter.record.hash.hex(), **spent,
            "clip": self.voter.state.scalars.get(CLIP),
            "checks": notes, "sent": asdict(sent), "received": asdict(received),
        }  # fmt: skip

    def _say(self, outcome: Outcome, metrics: Metrics | None) -> None:
        known = len(outcome.present) + len(outcome.missing)
        tested = f", accuracy {metrics.accuracy:.1%}" if metrics else ""
        missing = "; ".join(f"{peer} {why}" for peer, why in outcome.missing.items())
        log.info(
            "iteration %d: %d of %d averaged in %.2f s (attempt %d, %s), model %s%s%s", outcome.iteration,
            len(outcome.present), known, outcome.seconds, outcome.attempt, outcome.exchange,
            (outcome.hash or b"").hex()[:12], tested, f"; without {missing}" if missing else "",
        )  # fmt: skip

    async def _write(self, row: dict[str, Any]) -> None:
        """The row first, then the checkpoint: a kill between them only means that the row is written again."""
        kept = ("iteration", "status", "missing", "attempt", "exchange", "aggregators", "model_hash", "discarded")
        self.last = {name: row[name] for name in kept if name in row}
        self.store.append_row(row)
        await self.save()

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
