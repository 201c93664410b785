"""A daemon's way through a run, whichever way its peers agree: training in a thread, ledgers, rows."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from marfl.config import Config
from marfl.dp.accounting import COLUMNS
from marfl.learn import Metrics
from marfl.net.base import Ledger, Net
from marfl.peer.store import Memory, StateDir
from marfl.peer.trainer import Trainer
from marfl.protocol.speaker import Speaker
from marfl.state import Snapshot

T = TypeVar("T")
DONE = "all iterations done"


def one_thread() -> ThreadPoolExecutor:
    """Where training happens, so that votes are answered meanwhile; torch adds in one thread's order there."""
    return ThreadPoolExecutor(1, "training", initializer=torch.set_num_threads, initargs=(1,))


@dataclass
class Course(ABC):
    """One peer's way through a run."""

    config: Config
    trainer: Trainer
    store: StateDir
    memory: Memory
    thread: ThreadPoolExecutor

    def __post_init__(self) -> None:
        self.ended = DONE  # why `run` came to its end
        self.state = "waiting"
        self.end = self.config.iterations  # the last iteration
        self.accuracy: float | None = None
        self.last: dict[str, Any] | None = None  # the last outcome, for the status page
        self._carried = self.memory.sent.copy(), self.memory.received.copy()  # before a restart
        self._told = self.sent, self.received  # what rows have accounted for
        self._notes: list[str] = []

    # --- what the ways to agree have in common for those who watch ---

    @property
    @abstractmethod
    def speaker(self) -> Speaker:
        """How this peer talks to the others."""

    @property
    def net(self) -> Net:
        return self.speaker.net

    @property
    @abstractmethod
    def iteration(self) -> int:
        """The last iteration that is over for this peer."""

    @property
    @abstractmethod
    def held(self) -> Snapshot:
        """The state that this peer holds."""

    @property
    @abstractmethod
    def model_hash(self) -> bytes:
        """Of what this peer holds, as a simulated run names it."""

    @property
    @abstractmethod
    def exchanging(self) -> bool:
        """Whether others count on this peer right now."""

    @abstractmethod
    async def begins(self) -> bool:
        """Whether nobody has begun yet: then a peer waits for the others."""

    @abstractmethod
    async def run(self) -> None:
        """Until the last iteration."""

    @abstractmethod
    async def serve(self) -> None:
        """All iterations are done: be found by those who are not."""

    @abstractmethod
    async def go_on(self) -> None:
        """After the end: when others turn out to know better, follow them."""

    @abstractmethod
    async def farewell(self) -> None:
        """Tell the others that nobody need wait for me."""

    @abstractmethod
    async def save(self) -> None:
        """Keep what is held, to come back to it."""

    @property
    def sent(self) -> Ledger:
        """Since the beginning, restarts included."""
        return self._carried[0].plus(self.net.sent)

    @property
    def received(self) -> Ledger:
        return self._carried[1].plus(self.net.received)

    @property
    def doing(self) -> str:
        return "exchanging" if self.state == "waiting" and self.exchanging else self.state

    # --- parts ---

    def _consume(self, iteration: int) -> int:
        """Where in its data this iteration begins; a second try of an iteration trains on the same batches."""
        memory, batches = self.memory, self.trainer.practice.consumes(iteration)
        if memory.trained != iteration:
            memory.trained, memory.consumed = iteration, memory.consumed + batches
        return memory.consumed - batches

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def _test(self, iteration: int) -> Metrics | None:
        """How good the model is, in iterations that are tested."""
        if iteration % self.config.test_every and iteration != self.end:
            return None
        state = self.held
        metrics = await self._in_thread(lambda: self.trainer.evaluate(state))
        self.accuracy = metrics.accuracy
        return metrics

    async def _row(self, status: str, iteration: int, seconds: float) -> dict[str, Any]:
        """The fields that every row has; bytes are those that this peer has sent since the row before."""
        sent, received = self.sent.minus(self._told[0]), self.received.minus(self._told[1])
        self._told = self.sent, self.received
        notes, self._notes = self._notes, []
        return {
            "iteration": iteration, "status": status, "participants": 0, "aggregators": 0,
            **dict.fromkeys(("train_loss", "test_loss", "test_accuracy", "virtual_seconds")),
            "messages": sent.messages, **{f"bytes_{kind}": count for kind, count in sent.by_kind().items()},
            "bytes_total": self.sent.total(), "wall_seconds": seconds,
            **dict.fromkeys(("update_seconds", "aggregate_seconds")),
            "disagreement": 0.0, "model_hash": self.model_hash.hex(), **dict.fromkeys(COLUMNS), "clip": None,
            "checks": notes, "sent": asdict(sent), "received": asdict(received),
        }  # fmt: skip

    async def _write(self, row: dict[str, Any]) -> None:
        """The row first, then the checkpoint: a kill between them only means that the row is written again."""
        kept = ("iteration", "status", "missing", "attempt", "exchange", "aggregators", "model_hash", "discarded")
        self.last = {name: row[name] for name in kept if name in row}
        self.store.append_row(row)
        await self.save()
