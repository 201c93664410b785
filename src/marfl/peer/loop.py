"""A daemon's iterations: catch up, train in a thread, take part, write down what came of it.

`Loop` is what every peer does on its way through a run: training in a thread, ledgers, rows. `VotedLoop` is the way of
a peer that votes; `paper_loop` has that of the paper.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from marfl.config import Config
from marfl.dp.ledger import Spending
from marfl.dp.private_agreement import CLIP
from marfl.errors import InputError
from marfl.from_config import technique_of
from marfl.learn import LocalResult, Metrics, distill_in_groups
from marfl.learn.small_integers import IntegerUpdates
from marfl.learn.strategy_memory import FORGOTTEN, StrategyMemory
from marfl.net.base import Net, Traffic
from marfl.peer.narrator import Narrator
from marfl.peer.privacy_ledger import Account
from marfl.peer.state_dir import Checkpoint, StateDir
from marfl.peer.trainer import Trainer
from marfl.protocol.exchange import Contribution, Quantise
from marfl.protocol.fixed_point import abstains, can_carry
from marfl.protocol.meetings import Meetings, Prepare
from marfl.protocol.participant import Outcome, Participant
from marfl.protocol.speaker import Speaker
from marfl.runs.rows import PeerRow
from marfl.state import Snapshot
from marfl.wire.error_feedback import LOST

T = TypeVar("T")
log = logging.getLogger("marfl.peer")
DONE = "all iterations done"
LEFT_OUT = "left out of all iterations"
ALONE = "alone in all iterations"
AGAIN = 1.0  # seconds before another try to catch up


# --- who takes part ---


class Part(NamedTuple):
    """What a peer does in an iteration; with neither it only votes."""

    updates: bool = True
    aggregates: bool = True
    age: int = 0  # by how many iterations what it brings is late
    keeps: bool = False  # it is slow: what it learns now it brings later


@dataclass(frozen=True)
class Parts:
    """The parts of one peer, drawn by somebody else (`--cast FILE`). Iterations that are not listed are everybody's."""

    index: int = 0
    parts: dict[int, Part] = field(default_factory=dict)

    def part(self, iteration: int) -> Part:
        return self.parts.get(iteration, Part())

    def consumed(self, iteration: int, consumes: Callable[[int], int]) -> int:
        """Mini-batches trained on before an iteration: as the simulator counts them, absences left out."""
        return sum(consumes(earlier) for earlier in range(1, iteration) if self.part(earlier).updates)


def read_parts(path: Path, index: int) -> Parts:
    """The parts of one peer from a JSON file: {"3": {"updaters": [0, 1], "aggregators": [0, 1]}, …}."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Parts(index, {int(iteration): _part(iteration, row, index) for iteration, row in table.items()})
    except OSError as error:
        raise InputError(f"--cast {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--cast {path}: is not a table of updaters and aggregators by iteration ({error})") from None


def _part(iteration: str, row: dict[str, Any], index: int) -> Part:
    updaters, aggregators = set(row["updaters"]), set(row["aggregators"])
    ages = {int(peer): int(age) for peer, age in row.get("ages", {}).items()}
    if not (updaters | ages.keys()) & aggregators:
        raise ValueError(f"in iteration {iteration} nobody brings an update")
    return Part(index in updaters, index in aggregators, ages.get(index, 0), index in row.get("slow", ()))


# --- what all peers do ---


def one_thread() -> ThreadPoolExecutor:
    """Where training happens, so that votes are answered meanwhile; torch adds in one thread's order there."""
    return ThreadPoolExecutor(1, "training", initializer=torch.set_num_threads, initargs=(1,))


@dataclass
class Loop(ABC):
    """One peer's way through a run, whichever way its peers agree."""

    config: Config
    trainer: Trainer
    store: StateDir
    kept: Checkpoint
    thread: ThreadPoolExecutor

    def __post_init__(self) -> None:
        self.ended = DONE  # why `run` came to its end
        self.state = "waiting"
        self.begun = 0  # the iteration that it works on
        self.end = self.config.iterations  # the last iteration
        self.accuracy: float | None = None
        self.last: dict[str, Any] | None = None  # the last outcome, for the status page
        self.newest: PeerRow | None = None  # the row of the newest average
        self._carried = self.kept.sent.copy(), self.kept.received.copy()  # before a restart
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
        """Whether nobody goes on yet, at the beginning or after a restart of all: then a peer waits for the others."""

    @abstractmethod
    def begin_with(self, count: int) -> None:
        """So many have come: the first iteration waits for no more."""

    @abstractmethod
    async def run(self) -> None:
        """Until the last iteration."""

    @abstractmethod
    async def serve(self) -> None:
        """After the last iteration: announce the state, so that peers that are not done find it."""

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
    def sent(self) -> Traffic:
        """Since the beginning, restarts included."""
        return self._carried[0].plus(self.net.sent)

    @property
    def received(self) -> Traffic:
        return self._carried[1].plus(self.net.received)

    @property
    def doing(self) -> str:
        return "exchanging" if self.state == "waiting" and self.exchanging else self.state

    # --- parts ---

    def _consume(self, iteration: int) -> int:
        """Where in its data this iteration begins; a second try of an iteration trains on the same batches."""
        kept, batches = self.kept, self.trainer.local_work.consumes(iteration)
        if kept.trained != iteration:
            kept.trained, kept.consumed = iteration, kept.consumed + batches
        return kept.consumed - batches

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    async def _test(self, iteration: int) -> Metrics | None:
        """How good the model is, in iterations that are tested."""
        if iteration % self.config.test_every and iteration != self.end:
            return None
        state = self.held
        metrics = await self._in_thread(lambda: self.trainer.evaluate(state))
        self.accuracy = metrics.accuracy
        self.trainer.share(metrics)
        return metrics

    async def _row(self, status: str, iteration: int, seconds: float) -> PeerRow:
        """A row without a result yet; its bytes are those that this peer has sent since the row before."""
        sent, received = self.sent.minus(self._told[0]), self.received.minus(self._told[1])
        self._told = self.sent, self.received
        notes, self._notes = self._notes, []
        return PeerRow(
            iteration=iteration,
            status=status,
            participants=0,
            aggregators=0,
            train_loss=None,
            messages=sent.messages,
            bytes_sent=sent.by_kind(),
            bytes_total=self.sent.total(),
            virtual_seconds=None,
            wall_seconds=seconds,
            update_seconds=None,
            aggregate_seconds=None,
            disagreement=0.0,
            model_hash=self.model_hash.hex(),
            checks=notes,
            sent=asdict(sent),
            received=asdict(received),
        )

    async def _write(self, row: PeerRow) -> None:
        """The row first, then the checkpoint: a kill between them only means that the row is written again."""
        kept = ("iteration", "status", "missing", "attempt", "exchange", "aggregators", "model_hash", "discarded")
        self.last = {name: row[name] for name in kept if name in row}
        self.newest = row if row.present else self.newest
        self.store.append_row(row)
        await self.save()


def with_result(
    row: PeerRow, present: Iterable[str], missing: Mapping[str, str], update: float, aggregate: float,
    metrics: Metrics | None,
) -> PeerRow:  # fmt: skip
    """The row of an iteration that ended in an average of those present; `update` and `aggregate` are seconds."""
    there = list(present)
    return replace(
        row,
        participants=len(there) + len(missing),
        aggregators=len(there),
        test_loss=metrics.loss if metrics and math.isfinite(metrics.loss) else None,
        test_accuracy=metrics.accuracy if metrics else None,
        update_seconds=update,
        aggregate_seconds=aggregate,
        present=there,
        missing=dict(missing),
        checks=row.checks + [f"{peer}: {why}" for peer, why in missing.items()],
    )


# --- peers that vote ---


class Ahead(NamedTuple):
    """Work for the next iteration that is under way."""

    iteration: int
    base: bytes  # hash of the state that it began from
    result: asyncio.Future[LocalResult]


class Kept(NamedTuple):
    """What a slow peer has learned, and in which iteration."""

    iteration: int
    mine: Contribution
    result: LocalResult


@dataclass
class VotedLoop(Loop):
    """The way of a peer that votes: every iteration is committed by a majority, or is not."""

    voter: Participant
    parts: Parts | None
    server: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        private = self.config.privacy.mode == "sound" and not self.server
        self.account = Account(self.config, self.store) if private else None
        self.updates: IntegerUpdates | None = None
        if self.trainer.small is not None and not self.server:
            memory, keep = self.store.load_feedback(), self.store.save_feedback
            self.updates = IntegerUpdates(self.trainer.small, self.config.seed, self.voter.index, memory, keep)
        self.memory: StrategyMemory | None = None
        if self.trainer.agreement.strategy.remembers and not self.server:
            memory, keep = self.store.load_feedback(), self.store.save_feedback
            self.memory = StrategyMemory(self.trainer.worker.trainable, memory, keep)
        patience = self.voter.settings
        self.narrator = Narrator(patience.ready_timeout, minority=patience.minority_timeout)
        self._update_seconds = 0.0  # that the last update took
        self._late: Kept | None = None  # what this peer learned and brings later
        self._ahead: Ahead | None = None  # what it trains while the last updates are averaged
        self.brought = self.counted = 0  # updates that this process brought, and those that are in an average
        self.accompanied = self.config.peers == 1  # whether anybody else was ever in an average with this process
        self.lost = 0  # and those that came too late for any

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
        return self.iteration < self.config.iterations and not await self.voter.standing.heads(every=True)

    def begin_with(self, count: int) -> None:
        self.voter.standing.company = count

    async def serve(self) -> None:
        await self.voter.standing.announce_head()

    async def go_on(self) -> None:
        """When a lineage that wins turns up, go on with it: a partition may heal after the last iteration."""
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
            if behind or (self.voter.behind and (part.updates or part.aggregates or iteration > self.end)):
                behind = not await self.catch_up()
                continue
            if self.account and part.updates and part.aggregates and not await self._affords(iteration):
                self.ended = self.account.spending.why_stopped
                break
            behind = await self._take_part(iteration, part)
        if self.ended == DONE and self.brought and not self.counted:
            self.ended = f"{LEFT_OUT}: none of its {self.brought} updates is in an average"
        elif self.ended == DONE and self.brought and not self.accompanied and self.parts is None:
            self.ended = f"{ALONE}: none of the other {self.config.peers - 1} ever took part in one"
        self.state = "done"

    async def _take_part(self, iteration: int, part: Part) -> bool:
        """Train and average once; whether others went on without this peer. What it brought is not kept in memory."""
        self.begun = iteration
        self.voter.standing.carries = self._carries
        self.speaker.aside(self.voter.readiness.say_how_long(self._update_seconds))
        begun = time.perf_counter()
        mine, result = await self._contribute(iteration, part)
        self._update_seconds = update_seconds = time.perf_counter() - begun
        self.state = "waiting"
        self._begin_next(iteration, mine)
        outcome = await self.narrator.during(self.voter, self.voter.run_iteration(mine))
        if outcome.status == "stale" and mine is not None:
            outcome = await self._bring_late(mine, iteration, outcome)
        if self.updates is not None:
            self.updates.settle(self.voter.standing.decisions)
        self.brought += mine is not None and not self.server
        self.counted += self.net.me in outcome.present
        self.accompanied |= len(outcome.present) > 1
        warning = self.narrator.warning_of(outcome.status, len(outcome.present), "", joined=self.config.peers > 1)
        for line in (*outcome.slow, *outcome.lost):
            self._notes.append(line)
            log.warning("iteration %d: %s", outcome.iteration, line)
        if outcome.status == "committed":
            await self._committed(outcome, result, update_seconds)
        else:
            self.last = {"iteration": outcome.iteration, "status": outcome.status, "missing": {}}
            log.info("iteration %d: %s", outcome.iteration, _explained(outcome.status))
        if warning:
            log.warning("iteration %d: %s", outcome.iteration, warning)
        return outcome.status == "stale"

    @property
    def _carries(self) -> bool:
        """Whether an update that comes late may be in a later average.

        A derived momentum takes every update for one from the last state, noise and rounding are for one iteration, and
        groups teach before they average.
        """
        exact = self.account is None and self.updates is None and self.trainer.local_work.distill is None
        return self.config.momentum != "derive" and exact and self.memory is None

    async def _bring_late(self, mine: Contribution, iteration: int, outcome: Outcome) -> Outcome:
        """An update that came too late goes to a later iteration, once, or is lost; either is counted and said."""
        if self.voter.may_carry(mine):
            self.voter.discarded = 0
            if await self.voter.catch_up() and not self.voter.discarded and self.voter.record.iteration < self.end:
                age = self.voter.record.iteration + 1 - iteration
                outcome = await self.voter.run_iteration(replace(mine, base=self.voter.state.hash, age=age))
                if outcome.status != "stale":
                    self._notes.append(f"this peer: its update is {age} iterations late")
                    return outcome
        self.lost += 1
        self._notes.append(f"this peer: its update came too late and is lost{self._why_lost}")
        log.warning("iteration %d: %s (%d so far)", iteration, self._notes[-1], self.lost)
        return outcome

    @property
    def _why_lost(self) -> str:
        """What keeps late updates from being carried, where something does."""
        if self.account is not None:
            return ": with privacy its noise is for one iteration"
        return ": a derived momentum takes none that is late" if self.config.momentum == "derive" else ""

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
        return self.parts.part(iteration) if self.parts else Part()

    # --- catch-up ---

    async def overtaken(self) -> bool:
        """Whether somebody announces a state that wins over mine."""
        return bool(await self.voter.standing.heads())

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
        if self.updates is not None:
            self.updates.settle(self.voter.standing.decisions)
        if record.hash != before.hash:
            lost, self.voter.discarded = self.voter.discarded, 0  # said once
            log.info("caught up: iteration %d, model %s%s", record.iteration, record.hash.hex()[:12],
                     f"; {lost} committed iterations given up for it" if lost else "")  # fmt: skip
            row = await self._row("stale", record.iteration, time.perf_counter() - begun)
            await self._write(replace(row, discarded=lost))
        return True

    # --- training ---

    async def _contribute(self, iteration: int, part: Part) -> tuple[Contribution | None, LocalResult | None]:
        state = self.voter.state
        result, consumed = None, 0
        if part.age:
            return self._kept(iteration - part.age, part.age)
        at_home = self.trainer.own is not None or self.config.local  # what stays here is trained in any case
        if part.updates and (part.aggregates or part.keeps or at_home):
            self.state = "training"
            consumed, own, ahead = self._consume(iteration), self._remembered(), self._ahead
            if ahead is not None and ahead.iteration == iteration and self._follows(ahead):
                result = await ahead.result
            else:
                result = await self._in_thread(lambda: self.trainer.update(state, iteration, consumed, own))
            if self.memory is not None and result.news is not None and result.finite and part.aggregates:
                self.memory.sent(state.hash, iteration, own, result.news)
        if not part.aggregates and not (part.keeps and result):
            return None, None
        if result is None:
            return Contribution(state.hash, self.trainer.nothing(), 0.0), None
        outgoing = await self._outgoing(state, iteration, result)
        quantise, carried = self._quantise(outgoing)
        # A private peer sends zero and noise for what is not finite: staying away would tell something about its data.
        carried = carried and can_carry(self.voter.settings.wire, outgoing)
        if (not result.finite and self.account is None) or not carried:
            self._notes.append(f"this peer: {abstains(self.voter.settings.wire)}")
            log.warning("iteration %d: %s", iteration, self._notes[-1])
            return None, None
        fewest = self.account.fewest if self.account else 0
        prepare = self._prepare(iteration, consumed, result)
        write_down = self.updates.write_down if self.updates is not None else None
        mine = Contribution(
            state.hash, outgoing, fewest=fewest, prepare=prepare, quantise=quantise, write_down=write_down
        )
        if part.keeps:
            self._late = Kept(iteration, mine, result)
            return None, None
        return mine, result

    def _kept(self, learned: int, age: int) -> tuple[Contribution | None, LocalResult | None]:
        """What this slow peer learned in an earlier iteration, on top of the state that all hold now."""
        kept, self._late = self._late, None
        if kept is None or kept.iteration != learned:
            self._notes.append("this peer: its late update is lost, for it was restarted meanwhile")
            return None, None
        self._notes.append(f"this peer: its update is {age} iterations late")
        return replace(kept.mine, base=self.voter.state.hash, age=age), kept.result

    def _begin_next(self, iteration: int, mine: Contribution | None) -> None:
        """Train on from the last decided state while what I bring is averaged. It is no state until it is brought."""
        next_one, state = iteration + 1, self.voter.state
        self._ahead = None
        if not self.config.overlap or mine is None or next_one > self.end or not self._part(next_one).updates:
            return
        consumed = self.parts.consumed(next_one, self.trainer.local_work.consumes) if self.parts else self.kept.consumed
        work = self._in_thread(lambda: self.trainer.update(state, next_one, consumed))
        self._ahead = Ahead(next_one, state.hash, asyncio.ensure_future(work))

    def _follows(self, ahead: Ahead) -> bool:
        """Whether the newest record directly follows the state that work began from, and I was in its exchange."""
        roster = self.voter.record.roster
        return roster is not None and roster.base == ahead.base and self.net.me in roster.ids

    def _remembered(self) -> Tensor | None:
        """What this peer remembers for the strategy, if anything."""
        if self.memory is None:
            return None
        standing, lost = self.voter.standing, self.memory.memory.lost
        self.memory.settle({**standing.history, standing.record.iteration: standing.record}, self.net.me)
        own = self.memory.current(standing.chain)
        if self.memory.memory.lost > lost:
            self._notes.append(f"this peer: {FORGOTTEN}")
        return own

    def _quantise(self, outgoing: Tensor) -> tuple[Quantise | None, bool]:
        """How to make integers of my update, where few bits travel, and whether they can carry it."""
        updates, standing = self.updates, self.voter.standing
        if updates is None:
            return None, True
        lost = updates.memory.lost
        updates.settle(standing.decisions)
        sender = updates.sender(standing.state, standing.chain)
        if updates.memory.lost > lost:
            self._notes.append(f"this peer: {LOST}")
        return partial(updates.quantise, sender), sender.can_send(outgoing)

    async def _outgoing(self, state: Snapshot, iteration: int, result: LocalResult) -> Tensor:
        account = self.account
        if account is None:
            return self.trainer.outgoing(result)
        make = partial(self.trainer.privatised, result, state, iteration)
        return await self._in_thread(lambda: account.draw(iteration, state.hash, make))

    def _prepare(self, iteration: int, consumed: int, result: LocalResult) -> Prepare | None:
        """How to learn from my groups before my update goes to a roster, where this iteration distils."""
        if not self.trainer.local_work.in_groups(iteration):
            return None

        async def distill_once(state: LocalResult, models: list[Tensor], round: int) -> LocalResult:
            learn = partial(self.trainer.distill_round, state, models, iteration, consumed, round)
            distilled = await self._in_thread(learn)
            if distilled.undone:
                self._notes.append(f"round {round + 1}: distillation led to NaN or infinity and was undone")
            return distilled.result

        async def prepare(meetings: Meetings) -> Tensor:
            learnt = await distill_in_groups(meetings, result, distill_once)
            self._notes += [f"round {round + 1}: no model of {peer} to learn from" for round, peer in meetings.missed]
            return self.trainer.outgoing(learnt)

        return prepare

    def _consume(self, iteration: int) -> int:
        if self.parts is not None:
            return self.parts.consumed(iteration, self.trainer.local_work.consumes)
        return super()._consume(iteration)

    # --- what came of it ---

    async def _committed(self, outcome: Outcome, result: LocalResult | None, update_seconds: float) -> None:
        self._notes += [f"iteration {at}: a sum in it is proven wrong" for at in outcome.tainted]
        row = await self._row(outcome.status, outcome.iteration, outcome.seconds + update_seconds)
        self.trainer.tests.forget()
        shared = self.trainer.shared_in(outcome.iteration)
        metrics = await self._test(outcome.iteration) if outcome.holds else None
        row = replace(
            with_result(row, outcome.present, outcome.missing, update_seconds, outcome.seconds, metrics),
            train_loss=result.loss if result and not self.account else None,
            attempt=outcome.attempt,
            exchange=outcome.exchange,
            holds=outcome.holds,
            swarm_accuracy=shared.get("accuracy"),
            swarm_loss=shared.get("loss"),
            discarded=outcome.discarded,
            more={**row.more, **_widths(outcome)},
        )
        if self.config.audit:
            row = replace(
                row, audits=asdict(outcome.audits), tainted=list(outcome.tainted), restored=outcome.restored
            )
        if outcome.restored is not None and self.trainer.own is not None:
            self.trainer.own = torch.zeros_like(self.trainer.own)  # nobody else has it: it cannot be taken back
        self._say(outcome, metrics, shared.get("accuracy"))
        await self._write(row)

    async def _row(self, status: str, iteration: int, seconds: float) -> PeerRow:
        """Every row's fields, and the agreed hash; a private peer's row also says what it has given away."""
        spent: Mapping[str, float | None] = {}
        if self.account:
            self._notes += self.account.settle(self.voter)
            spent = await self._in_thread(self.account.spending.columns)
        row = await super()._row(status, iteration, seconds)
        record = self.voter.history.get(iteration, self.voter.record)  # others may have gone on meanwhile
        return replace(
            row,
            model_hash=record.hash.hex(),
            lineage=record.lineage.hex(),
            epsilon_outsider=spent.get("epsilon_outsider"),
            epsilon_insider=spent.get("epsilon_insider"),
            epsilon_insider_masked=spent.get("epsilon_insider_masked"),
            clip=self.voter.state.scalars.get(CLIP),
            more={"privacy_warnings": warnings} if (warnings := self._privacy_warnings()) else row.more,
        )

    def _privacy_warnings(self) -> list[str]:
        return self.account.spending.warnings if self.account else []

    def _say(self, outcome: Outcome, metrics: Metrics | None, shared: float | None) -> None:
        everybody = self.config.peers + technique_of(self.config).server
        known = max(everybody, self.narrator.met({self.net.me}, outcome.present, outcome.missing))
        tested = f", accuracy {metrics.accuracy:.1%}" if metrics else ""
        tested += f", everybody's before {shared:.1%}" if shared is not None else ""
        missing = "; ".join(f"{peer} {why}" for peer, why in outcome.missing.items())
        log.info(
            "iteration %d: %d of %d known averaged in %.2f s (attempt %d, %s), model %s%s%s", outcome.iteration,
            len(outcome.present), known, outcome.seconds, outcome.attempt, outcome.exchange,
            (outcome.hash or b"").hex()[:12], tested, f"; without {missing}" if missing else "",
        )  # fmt: skip
        if outcome.hasty:
            log.info("too few seniors are left: %s may vote from now on", ", ".join(outcome.hasty))

    async def save(self) -> None:
        """Keep the agreed state, where this peer holds it."""
        if self.voter.behind:
            return  # it only voted: the state kept last is still right
        kept = self.kept
        kept.state, kept.record, kept.momentum = self.voter.state, self.voter.record, self.trainer.own
        kept.home = self.trainer.home
        kept.sent, kept.received, kept.proofs = self.sent, self.received, self.voter.standing.kept
        await asyncio.to_thread(self.store.save, kept)


def _explained(status: str) -> str:
    if status == "stale":
        return "the others went on from another state; catching up"
    return "no majority in time; trying again"


def _widths(outcome: Outcome) -> dict[str, int]:
    """In how many bits values travelled, for the row of an iteration that summed some."""
    return {"bits_up": outcome.bits.up, "bits_down": outcome.bits.down} if outcome.bits else {}
