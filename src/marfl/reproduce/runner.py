"""From cases to finished runs: what is missing is computed, in order of importance, over worker processes."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest

from marfl.config import Config
from marfl.errors import BrokenPromise, MarflError
from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import Calculation, Case, Scale, Source, key_of
from marfl.reproduce.claims import Experiment
from marfl.reproduce.shared import Replayed, training_of
from marfl.sim.engine import Simulation

STEP_SECONDS = {"mnist": 0.08}  # CPU time of one local step, for the time left; the others are all alike
NOISE_SECONDS = 0.004  # what noise and its account add to a step
LONG = 20.0  # seconds: a run that takes longer keeps checkpoints
CHECKPOINTS = 12  # so many of them
DEAR = 70.0  # seconds: what takes longer waits until the rest is done
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
            return 2.0
        return estimate(self.first) + 3.0 * len(self.others)


def estimate(config: Config) -> float:
    """About how many CPU seconds a training takes: steps of all peers, more of them while they distil, and tests."""
    step = STEP_SECONDS.get(config.task, 0.0006) + (0.0 if config.privacy.mode == "off" else NOISE_SECONDS)
    rounds = 1
    while config.group_size**rounds < config.peers:
        rounds += 1
    taught = min(config.distill.iterations, config.iterations) * rounds * (1 if config.distill.match_local_steps else 3)
    steps = config.peers * config.churn.participation * (config.iterations + taught)
    return 2.0 + step * (steps + 45 * config.iterations / config.test_every)


def todo_of(archive: Archive, scale: Scale, experiments: Sequence[Experiment]) -> list[Bundle]:
    """What is still to be computed for these experiments, the most important first."""
    return bundles(archive, in_order([case for each in experiments for case in each.cases(scale).values()]))


def in_order(cases: Sequence[Case]) -> Iterator[Source]:
    """The first seed of every case before the second of any; of each what is soon done before what takes long."""
    for seeds in zip_longest(*(case.sources for case in cases)):
        yield from sorted((source for source in seeds if source is not None), key=_is_dear)


def _is_dear(source: Source) -> bool:
    return isinstance(source, Config) and estimate(training_of(source)) > DEAR


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
    if archive.summary(bundle.first) is None:
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


def _run_here(archive: Archive, todo: list[Bundle], end: float) -> Iterator[Progress]:
    for bundle in todo:
        if time.monotonic() > end:
            return
        yield Ended(bundle, _attempt(archive, bundle, lambda seconds: None))


def _run_apart(archive: Archive, todo: list[Bundle], workers: int, end: float) -> Iterator[Progress]:
    """In worker processes. How far each bundle is stands in memory that all of them share, and is looked at often."""
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
    """Ctrl-C is for the process that directs the workers."""
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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
