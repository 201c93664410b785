"""The simulator: runs one experiment from a config, row by row, with tests, checkpoints and the reason for its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from marfl.byte_kinds import ByteKind
from marfl.config import Config
from marfl.dp.ledger import Spending, promised
from marfl.errors import InputError
from marfl.from_config import check_task, integers_of, local_work_of, technique_of, wire_of
from marfl.learn import Metrics, label_table, shard_of
from marfl.learn.data import labels_of, size_of
from marfl.plan.cost import Messages
from marfl.protocol.fixed_point import field_bits, value_checks
from marfl.runs import PROLONGS, RunDir
from marfl.runs.rows import Row, SimulationSummary, TargetReached, settings_summed
from marfl.settings import Partition
from marfl.sim.churn import Participation, participation
from marfl.sim.cluster import Cluster
from marfl.sim.exact_world import ExactWorld
from marfl.sim.executor import Setup, TaskSpec
from marfl.sim.iteration import IterationResult, SimulatedWorld
from marfl.sim.links import Links, find_profile, iteration_seconds, links
from marfl.sim.paper_world import PaperWorld
from marfl.sim.protocol_world import ProtocolWorld
from marfl.techniques.technique import Technique


@dataclass
class Progress:
    """What has happened so far: all of it goes into checkpoints and the summary."""

    iteration: int = 0
    bytes_total: int = 0
    bytes_by_kind: dict[ByteKind, int] = field(default_factory=lambda: dict.fromkeys(ByteKind, 0))
    messages_total: int = 0
    steps_total: int = 0
    virtual_seconds: float = 0.0
    head_start: list[tuple[int, float]] = field(default_factory=list)  # (peer, seconds it has trained ahead already)
    wall_seconds: float = 0.0
    final_accuracy: float | None = None
    best_accuracy: float | None = None
    tests_without_gain: int = 0
    reached: TargetReached = field(default_factory=TargetReached)
    disagreement: float = 0.0
    stopped: str | None = None  # why it ended before its last iteration, for good
    releases: list[dict[str, Any]] = field(default_factory=list)  # the privacy ledger


class Simulation:
    """One run. `rows` yields a row per iteration; `summary` is valid at any time, also after an interruption.

    What is wrong with a config is said here, before `open` writes anything.

    `world` stands in for the one that trains: its models are known already.
    """

    def __init__(
        self, config: Config, run: RunDir | None = None, *, resume: bool = False, world: SimulatedWorld | None = None
    ) -> None:
        self.config = config
        self.run: RunDir | None = None
        self.technique = check(config)
        self.setup = _setup(config, self.technique)
        self.churn = config.churn
        participation(self.churn, config.peers, 1, config.seed)  # a trace that cannot be read is refused here and now
        self.links: Links | None = links(config.links, config.peers, config.seed) if config.links else None
        self.world: SimulatedWorld = world or _world(config, self.setup, self.technique)
        self.progress = Progress()
        self.spending = Spending(config) if config.privacy.mode == "sound" else None
        self.stopped_because: str | None = None
        if run is not None:
            self.open(run, resume=resume)

    def open(self, run: RunDir, *, resume: bool = False) -> None:
        """Write to this run directory from now on, or go on from its checkpoint: before the first row."""
        self.run = run
        saved = run.load_checkpoint() if resume else None
        if saved is not None:
            tensors, meta = saved
            self.world.restore(tensors, meta["world"])
            self.progress = Progress(**meta["progress"])
            if meta.get("ends", self._ends) != self._ends:  # it may go on longer than it was first told to
                self.progress.stopped, self.progress.reached = None, TargetReached()
            self.stopped_because = self.progress.stopped
            if self.spending is not None:
                self.spending = Spending(self.config, self.progress.releases)
        if resume:
            run.keep_rows(self.progress.iteration)
        self._write_split(run)

    @property
    def _ends(self) -> dict[str, Any]:
        """When the run is to end."""
        return {name: getattr(self.config, name) for name in sorted(PROLONGS)}

    def _write_split(self, run: RunDir) -> None:
        """Labels per peer, where the task has labels and a picture could show them."""
        if self.config.peers > 2000 or self.spending is not None:
            return  # too many to draw; or a private run, which tells nobody's labels
        task = self.setup.task.load()
        try:
            shards = [
                labels_of(shard_of(task, p, self.config.peers, self.config.seed)) for p in range(self.config.peers)
            ]
        except InputError:
            return  # a task of the user's own without labels: there is nothing to draw
        counts = label_table(shards)
        run.write_split(range(counts.shape[1]), counts.tolist())

    # --- the iterations ---

    def rows(self) -> Iterator[Row]:
        """Run to the end, or until a reason to stop; each row is written before it is yielded."""
        try:
            while self.stopped_because is None:
                if self.progress.iteration == self.config.iterations:
                    self.stopped_because = "all iterations done"
                    break
                if self.spending and not self._affords(self.progress.iteration + 1):
                    self.stopped_because = self.progress.stopped = self.spending.why_stopped
                    self._checkpoint()
                    break
                row = self._iterate(self.progress.iteration + 1)
                if self.run is not None:
                    self.run.append_row(row)
                self._stop_early(row)
                self._checkpoint()
                yield row
        except (KeyboardInterrupt, GeneratorExit):
            self.stopped_because = "interrupted"
            raise
        finally:
            if self.run is not None:
                self.run.write_summary(self.summary())
            self.world.close()

    def _affords(self, iteration: int) -> bool:
        """Whether the privacy budget, if there is one, allows this iteration."""
        who = self._participation(iteration)
        bring = len(who.updaters & who.aggregators)
        return self.spending is None or not bring or self.spending.affords(iteration, bring)

    def _participation(self, iteration: int) -> Participation:
        return participation(self.churn, self.config.peers, iteration, self.config.seed)

    def _iterate(self, iteration: int) -> Row:
        begun = time.perf_counter()
        who = self._participation(iteration)
        if self.spending is not None:
            who = replace(who, fewest=self.spending.fewest())
        step = self.world.step(iteration, who)
        seconds = self._virtual_seconds(iteration, step, who)
        self._account(step)
        last = iteration == self.config.iterations or not self._affords(iteration + 1)
        metrics = self.world.evaluate() if last or iteration % self.config.test_every == 0 else None
        self._check(step, who)
        progress = self.progress
        progress.iteration = iteration
        progress.bytes_total += step.bytes.total()
        progress.messages_total += step.bytes.messages
        progress.steps_total += self._steps(iteration, who)
        for kind, count in step.bytes.by_kind().items():
            progress.bytes_by_kind[kind] += count
        progress.virtual_seconds += seconds or 0.0
        progress.disagreement = step.disagreement
        wall = time.perf_counter() - begun
        progress.wall_seconds += wall
        return self._row(step, who, metrics, seconds, wall)

    def _row(
        self, step: IterationResult, who: Participation, metrics: Metrics | None, seconds: float | None, wall: float
    ) -> Row:
        """What there is to say of the iteration that is over."""
        spent = self.spending.columns() if self.spending else {}
        return Row(
            iteration=self.progress.iteration,
            participants=len(who.updaters | who.aggregators),
            aggregators=len(step.members),
            train_loss=sum(step.losses) / len(step.losses) if step.losses and not self.spending else None,
            test_loss=metrics.loss if metrics and math.isfinite(metrics.loss) else None,
            test_accuracy=metrics.accuracy if metrics else None,
            messages=step.bytes.messages,
            bytes_sent=step.bytes.by_kind(),
            bytes_total=self.progress.bytes_total,
            virtual_seconds=seconds,
            wall_seconds=wall,
            update_seconds=step.update_seconds,
            aggregate_seconds=step.aggregate_seconds,
            disagreement=step.disagreement,
            model_hash=self.world.model_hash().hex(),
            epsilon_outsider=spent.get("epsilon_outsider"),
            epsilon_insider=spent.get("epsilon_insider"),
            epsilon_insider_masked=spent.get("epsilon_insider_masked"),
            clip=self.world.clip(),
            checks=step.checks,
            more=self._more(step),
        )

    def _more(self, step: IterationResult) -> dict[str, Any]:
        """What only some rows have: how wide values were, which way they went, and what there is to say of privacy."""
        found: dict[str, Any] = {"payload_down": step.bytes.down} if step.bytes.down else {}
        if step.bits is not None:
            found |= {"bits_up": step.bits.up, "bits_down": step.bits.down}
        if step.clips is not None:
            return {**found, "clip_lowest": step.clips.lowest, "clip_highest": step.clips.highest}
        warned = self.spending.warnings if self.spending else ()
        return {**found, "privacy_warnings": warned} if warned else found

    def _account(self, step: IterationResult) -> None:
        """Account for what the iteration gave away."""
        if self.spending is None:
            return
        if step.sent:
            self.spending.add(step.arrived)
            step.checks += self.spending.checks(step.arrived)
        self.progress.releases = self.spending.ledger.to_rows()

    def _check(self, step: IterationResult, who: Participation) -> None:
        """The robustness checks of every row: finite losses, and nobody missing without a word."""
        if any(not math.isfinite(loss) for loss in step.losses):
            step.checks.append("a training loss is not finite")
        missing = len(who.aggregators) - len(step.members)
        if missing and not step.checks:
            step.checks.append(f"{missing} aggregators are missing")

    def _virtual_seconds(self, iteration: int, step: IterationResult, who: Participation) -> float | None:
        """How long the iteration takes on the links, catch-up included; None without links."""
        if self.links is None or not step.members:
            return None
        work = self.setup.local_work.work(iteration, self.config.group_size)
        compute = self.config.compute_seconds * work
        begun = {peer: seconds for peer, seconds in self.progress.head_start if peer in step.ahead}
        waits = {p: max(0.0, compute * float(self.links.slowness[p]) - begun.get(p, 0.0)) for p in who.updaters}
        taken = self._on_the_links(step, who, compute, begun, max(waits.values(), default=0.0))
        if self.config.overlap:  # a peer that waits for its own update cannot begin the next one
            self.progress.head_start = [(peer, taken - waits.get(peer, 0.0)) for peer in step.members]
        return taken

    def _on_the_links(
        self, step: IterationResult, who: Participation, compute: float, begun: Mapping[int, float], longest: float
    ) -> float:
        assert self.links is not None
        if step.seconds is not None:  # the virtual network ran the very messages
            return step.seconds + longest
        phases = chain(
            self._catch_up_phase(step),
            step.distillation,
            self._usual_messages(len(step.members)) if step.phases is None else step.phases,
        )
        return iteration_seconds(
            phases, self.links, roster=step.members, updaters=who.updaters, compute_seconds=compute, head_start=begun
        )

    def _steps(self, iteration: int, who: Participation) -> int:
        """Gradient steps of all who update, as many as their shards have batches for."""
        work = self.setup.local_work
        if not work.active(iteration):
            return len(who.updaters) * work.batches
        return sum(work.steps_of(iteration, self._whole_batches[peer]) for peer in who.updaters)

    @cached_property
    def _whole_batches(self) -> tuple[int, ...]:
        task, config = self.setup.task.load(), self.config
        sizes = [size_of(shard_of(task, peer, config.peers, config.seed)) for peer in range(config.peers)]
        return tuple(size // min(size, rows) for size, rows in zip(sizes, self.setup.batches, strict=True))

    def _usual_messages(self, members: int) -> Iterator[Messages]:
        return self.technique.messages(members, self.world.values)

    def _catch_up_phase(self, step: IterationResult) -> Iterator[Messages]:
        """Stale members fetch from those that are not, in turn."""
        rank = {peer: place for place, peer in enumerate(step.members)}
        stale = [rank[peer] for peer in step.stale if peer in rank]
        donors = [place for peer, place in rank.items() if peer not in set(step.stale)]
        if stale and donors and step.bytes.sync:
            each = step.bytes.sync // 4 // len(step.stale)
            yield Messages.of((donors[i % len(donors)], place, each) for i, place in enumerate(stale))

    def _stop_early(self, row: Row) -> None:
        """Note the accuracy; stop at the target, or when it has stopped getting better."""
        accuracy, progress = row.test_accuracy, self.progress
        if accuracy is None:
            return
        progress.final_accuracy = accuracy
        if progress.best_accuracy is None or accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.tests_without_gain = accuracy, 0
        else:
            progress.tests_without_gain += 1
        target = self.config.target_accuracy
        if target is not None and accuracy >= target and not progress.reached:
            progress.reached = {
                "iterations_to_target": row.iteration,
                "bytes_to_target": row.bytes_total,
                "seconds_to_target": progress.virtual_seconds if self.links else None,
                "steps_to_target": progress.steps_total,
            }
            self.stopped_because = progress.stopped = f"target accuracy {target:g} reached"
        elif self.config.patience is not None and progress.tests_without_gain >= self.config.patience:
            self.stopped_because = progress.stopped = f"no better accuracy in {self.config.patience} tests"

    def _checkpoint(self) -> None:
        done = self.progress.iteration
        due = done % self.config.checkpoint_every == 0 or self.stopped_because is not None
        due = due or done == self.config.iterations  # a finished run may be prolonged
        if self.run is not None and due:
            tensors, world = self.world.save()
            progress = dict(self.progress.__dict__)
            self.run.save_checkpoint(tensors, {"world": world, "progress": progress, "ends": self._ends})

    def summary(self) -> SimulationSummary:
        config, progress = self.config, self.progress
        return SimulationSummary(
            **settings_summed(config),
            **progress.reached,
            iterations=progress.iteration,
            final_accuracy=progress.final_accuracy,
            best_accuracy=progress.best_accuracy,
            bytes_total=progress.bytes_total,
            bytes_per_peer_iteration=progress.bytes_total / config.peers / max(1, progress.iteration),
            model_bytes=4 * self.world.length,
            disagreement=progress.disagreement,
            model_hash=self.world.model_hash().hex(),
            wall_seconds=progress.wall_seconds,
            virtual_seconds=progress.virtual_seconds if self.links else None,
            engine=config.engine,
            engine_reason=self.world.reason,
            finished=self.stopped_because not in (None, "interrupted"),
            stopped_because=self.stopped_because,
            task_options=dict(config.task_options),
            bytes_by_kind=dict(progress.bytes_by_kind),
            messages_total=progress.messages_total,
            steps_total=progress.steps_total,
            value_checks=value_checks(wire_of(config)),
            privacy=promised(config, self.spending.columns() if self.spending else {}, simulated=True),
            more=wire_summed(config, self.world.wire) | _cluster_summed(self.world),
        )


def wire_summed(config: Config, wire: str) -> dict[str, Any]:
    """How updates travelled, for the summary of a run: in small integers but for the first iteration."""
    bits = field_bits(wire, integers_of(config), config.peers)
    return {"wire": wire_of(config), "bits_up": bits.up, "bits_down": bits.down}


def _cluster_summed(world: SimulatedWorld) -> dict[str, Any]:
    """What a cluster cost, for the summary of a run on one."""
    executor = getattr(world, "executor", None)
    return {"cluster": asdict(executor.account)} if isinstance(executor, Cluster) else {}


def check(config: Config) -> Technique:
    """The technique of a config; refused when it cannot run with these settings. Loads nothing."""
    technique = technique_of(config)
    if config.semantics == "exact" and not technique.exact:
        raise InputError(f"technique = {technique.name}: has no exact average; run it with semantics = paper")
    if config.audit and config.engine != "protocol":
        raise InputError(
            f"audit = {config.audit:g}: simulated peers do not lie; engine = protocol audits them all the same"
        )
    if config.links:
        find_profile(config.links)
    return technique


def simulate(config: Config, on_row: Callable[[Row], None] | None = None) -> SimulationSummary:
    """Run a config to its end and return its summary: the library's one-line form."""
    simulation = Simulation(config)
    for row in simulation.rows():
        if on_row is not None:
            on_row(row)
    return simulation.summary()


def _setup(config: Config, technique: Technique) -> Setup:
    custom = ":" in config.task and config.partition == Partition()  # a task of one's own may split its data itself
    spec = TaskSpec(config.task, dict(config.task_options), None if custom else config.partition)
    own = config.semantics == "paper" or config.momentum == "local"
    local_work = local_work_of(config, technique)
    check_task(spec.load(), local_work)
    batches = tuple(map(config.batch_of, range(config.peers)))
    return Setup(
        spec, config.peers, config.seed, batches, local_work, own_momentum=own, local=config.local, device=config.device
    )


def _world(config: Config, setup: Setup, technique: Technique) -> SimulatedWorld:
    if "paper" in (config.semantics, config.privacy.mode):
        return PaperWorld(config, setup, technique)
    if config.engine == "protocol":
        return ProtocolWorld(config, setup, technique)
    return ExactWorld(config, setup, technique)
