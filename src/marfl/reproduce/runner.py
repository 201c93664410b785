"""From cases to finished runs: what is missing is computed, in order of importance, over worker processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from marfl.config import Config
from marfl.errors import BrokenPromise, MarflError
from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import Calculation, Case, Scale, Source, key_of
from marfl.reproduce.claims import Claim, Experiment
from marfl.reproduce.shared import Replayed, training_of
from marfl.sim.cluster import joined
from marfl.sim.engine import Simulation

# CPU seconds, as `benchmarks/reproduction_cost.py` measures them on one core: for the time left, and for the price.
ROW_SECONDS = {"mnist": 0.00095}  # of a row of a local step; the small models of the others take as long for any batch
STEP_SECONDS, POOLED_SECONDS = 0.0006, 0.0001  # of such a step, alone and among those of many peers
TEST_SECONDS = {"mnist": 4.0}
MIX_SECONDS = {"mnist": 1.5}  # of averaging the models of all peers, where each has its own
NOISE_SECONDS, SMALL_NOISE_SECONDS = {"mnist": 0.06}, 0.0025  # of exact noise on one update
ROWS = {"mnist": 60_000, "20ng": 11_314}  # of the training set
CALCULATION_SECONDS = {"beside_hivemind": 300.0}
LONG = 20.0  # seconds: a run that takes longer keeps checkpoints
CHECKPOINTS = 12  # so many of them
DEAR = (150.0, 3600.0)  # seconds: what takes longer waits until the rest is done, and what takes longer yet again
LOOK = 0.5  # seconds: so often the progress of worker processes is looked at


@dataclass
class Bundle:
    """One training and all runs that have its models, or one calculation."""

    first: Source
    others: list[Config] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """About how long it takes on one core."""
        if isinstance(self.first, Calculation):
            return CALCULATION_SECONDS.get(self.first.function, 2.0)
        return estimate(self.first) + 3.0 * len(self.others)


def estimate(config: Config) -> float:
    """About how many CPU seconds a training takes, at most: one with a target accuracy may end much sooner."""
    task, iterations = config.task, config.iterations
    peers = config.peers * config.churn.participation
    pooled = config.engine == "fast" and config.momentum == "derive" and config.local_batches == 1
    private = config.privacy.mode != "off"
    step = ROW_SECONDS[task] * config.batch if task in ROW_SECONDS else STEP_SECONDS
    if pooled and not private and task not in ROW_SECONDS:
        step = POOLED_SECONDS
    noise = NOISE_SECONDS.get(task, SMALL_NOISE_SECONDS) if private else 0.0
    each = peers * (config.local_batches * step + noise) + MIX_SECONDS.get(task, 0.02) * (not pooled)
    tests = (1 + iterations / config.test_every) * TEST_SECONDS.get(task, 0.1)
    taught = min(config.distill.iterations, iterations) * peers * _distilling_steps(config) * step
    return 2.0 + iterations * each + tests + taught


def _distilling_steps(config: Config) -> float:
    """Steps that distillation adds to an iteration of a peer; a model that is only asked counts for a third."""
    rounds = 1
    while config.group_size**rounds < config.peers:
        rounds += 1
    shard = ROWS.get(config.task, 1500) // config.peers // config.batch
    asked = 0.0 if config.distill.match_local_steps else config.group_size / 3
    return rounds * min(config.distill.batches, max(1, shard)) * (1 + asked)


def todo_of(
    archive: Archive, scale: Scale, experiments: Sequence[Experiment], claim: Claim | None = None
) -> list[Bundle]:
    """What is still to be computed for these experiments, or for one claim of theirs, the most important first."""
    cases = [
        case
        for each in experiments
        for name, case in each.cases(scale).items()
        if claim is None or name in claim.needs()
    ]
    return bundles(archive, in_order(cases))


@cache
def total_seconds(scale: Scale, experiment: Experiment) -> float:
    """About how many CPU seconds an experiment takes from the beginning."""
    return sum(bundle.seconds for bundle in todo_of(Archive(Path("nowhere")), scale, [experiment]))


def in_order(cases: Sequence[Case]) -> Iterator[Source]:
    """What is soon done first, the first seed of every case before the second of any; then what takes long.

    Of that, each case with all its seeds before the next: fewer than three show nothing.
    """
    found = [
        (dear := _dearness(source), 0 if dear else seed, place, seed, source)
        for place, case in enumerate(cases)
        for seed, source in enumerate(case.sources)
    ]
    yield from (each[-1] for each in sorted(found, key=lambda each: each[:4]))


def _dearness(source: Source) -> int:
    """How late its turn comes: the network of MNIST waits for what is small."""
    if isinstance(source, Calculation):
        return 0
    seconds = estimate(training_of(source))
    return sum(seconds > limit for limit in DEAR) + (source.task in ROW_SECONDS)


def bundles(archive: Archive, sources: Iterable[Source]) -> list[Bundle]:
    """What is still to be computed, in the order of the sources; the first that needs a training brings it forward."""
    found: dict[str, Bundle] = {}
    for source in {key_of(source): source for source in sources}.values():
        if archive.summary(source) is not None:
            continue
        training = source if isinstance(source, Calculation) else training_of(source)
        bundle = found.setdefault(key_of(training), Bundle(training))
        if isinstance(source, Config) and key_of(source) != key_of(training):
            bundle.others.append(source)
    return list(found.values())


OnProgress = Callable[[float], None]  # hears how many of a bundle's seconds are done


def compute(archive: Archive, bundle: Bundle, advance: OnProgress) -> None:
    """Compute a bundle; what is finished already is not computed again."""
    if isinstance(bundle.first, Calculation):
        from marfl.reproduce.calculations import FUNCTIONS  # here, because some wait for dp-accounting

        archive.keep(bundle.first, FUNCTIONS[bundle.first.function](**dict(bundle.first.arguments)))
        return
    done = 0.0
    if not archive.is_here(bundle.first):  # one that was only kept has not the rows that a replay needs
        _train(archive, bundle.first, advance)
        done = estimate(bundle.first)
    for config in bundle.others:
        _replay(archive, bundle.first, config)
        done += 3.0
        advance(done)


def _train(archive: Archive, config: Config, advance: OnProgress) -> None:
    seconds = estimate(config)
    every = max(10, config.iterations // CHECKPOINTS) if seconds > LONG else config.iterations + 1
    config = config.model_copy(update={"checkpoint_every": every})
    run, goes_on = archive.begin(config)
    with run:
        simulation = Simulation(config, run, resume=goes_on)
        for row in simulation.rows():
            advance(seconds * row["iteration"] / config.iterations)
    archive.seal(config)


def _replay(archive: Archive, training: Config, config: Config) -> None:
    config = config.model_copy(update={"checkpoint_every": config.iterations + 1})
    run, _ = archive.begin(config, anew=True)
    with run:
        for _ in Simulation(config, run, world=Replayed(config, archive.run(training))).rows():
            pass
    archive.seal(config)


@dataclass(frozen=True)
class Advanced:
    """How far a bundle is."""

    bundle: Bundle
    seconds: float


@dataclass(frozen=True)
class Ended:
    """A bundle is computed, or cannot be."""

    bundle: Bundle
    problem: str | None  # why it cannot be computed


Progress = Advanced | Ended


def run_all(archive: Archive, todo: list[Bundle], workers: int, deadline: float | None = None) -> Iterator[Progress]:
    """Compute the bundles, at most `workers` at a time; stop (and lose nothing finished) when `deadline` has passed."""
    end = math.inf if deadline is None else deadline
    if time.monotonic() >= end or not todo:
        return
    yield from _run_here(archive, todo, end) if workers == 1 else _run_apart(archive, todo, workers, end)


def run_on_cluster(
    archive: Archive, todo: list[Bundle], cluster: str, workers: int, deadline: float | None = None
) -> Iterator[Progress]:
    """Compute the bundles one after the other, each run on all nodes of a cluster, which is joined once."""
    end = math.inf if deadline is None else deadline
    if time.monotonic() >= end or not todo:
        return
    with joined(cluster, workers):
        yield from _run_here(archive, [_elsewhere(each, cluster=cluster, workers=workers) for each in todo], end)


def _elsewhere(bundle: Bundle, **where: Any) -> Bundle:
    """The same bundle, with other settings of where its first run computes."""
    return replace(bundle, first=bundle.first.model_copy(update=where)) if isinstance(bundle.first, Config) else bundle


def _run_here(archive: Archive, todo: list[Bundle], end: float) -> Iterator[Progress]:
    for bundle in todo:
        if time.monotonic() > end:
            return
        yield Ended(bundle, _attempt(archive, bundle, lambda seconds: None))


def _run_apart(archive: Archive, todo: list[Bundle], workers: int, end: float) -> Iterator[Progress]:
    """In worker processes. How far each bundle is stands in memory that all of them share, and is looked at often."""
    todo = _sharing(todo, workers)
    context = multiprocessing.get_context("spawn")
    progress = context.Array("d", len(todo), lock=False)
    with _workers(ProcessPoolExecutor(min(workers, len(todo)), context, _start_worker, (progress,))) as pool:
        running = {pool.submit(_work, archive, bundle, place): (bundle, place) for place, bundle in enumerate(todo)}
        while running and (left := end - time.monotonic()) > 0:
            done, _ = wait(running, min(left, LOOK), FIRST_COMPLETED)
            for future in done:
                try:
                    yield Ended(running.pop(future)[0], future.result())
                except BrokenProcessPool:
                    raise BrokenPromise("a worker process died; with little memory use fewer --workers") from None
            yield from (Advanced(bundle, progress[place]) for bundle, place in running.values() if progress[place])


def _sharing(todo: list[Bundle], workers: int) -> list[Bundle]:
    """The bundles with a share of the processes each, for a run that is alone takes all."""
    return [_elsewhere(each, workers=max(1, workers // len(todo))) for each in todo]


@contextmanager
def _workers(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """The pool; at the end its processes are ended at once, as run directories bear a kill at any moment."""
    others = multiprocessing.active_children()
    try:
        yield pool
    finally:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        pool.shutdown(cancel_futures=True)


_progress: MutableSequence[float] = []  # of a worker process: seconds that are done, by the bundle's place


def _start_worker(progress: MutableSequence[float]) -> None:
    """Ctrl-C is for the process that directs the workers; where it is killed they end as well."""
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(director: Any) -> None:
    """Nobody would take what is computed for a process that is gone; run directories bear an end at any moment."""
    director.join()
    os._exit(1)


def _work(archive: Archive, bundle: Bundle, place: int) -> str | None:
    def advance(seconds: float) -> None:
        _progress[place] = seconds

    return _attempt(archive, bundle, advance)


def _attempt(archive: Archive, bundle: Bundle, advance: OnProgress) -> str | None:
    """Compute a bundle; the reason when it cannot be computed."""
    try:
        compute(archive, bundle, advance)
    except MarflError as error:
        return str(error)
    return None
