"""From cases to finished runs: what is missing is computed, in order of importance, over worker processes."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from typing import Any

from marfl.config import Config
from marfl.errors import BrokenPromise, MarflError
from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import Calculation, Case, Source, key_of
from marfl.reproduce.shared import training_of

STEP_SECONDS = {"mnist": 0.08}  # CPU time of one local step, for the time left; the others are all alike
NOISE_SECONDS = 0.004  # what noise and its account add to a step
LONG = 20.0  # seconds: a run that takes longer keeps checkpoints
CHECKPOINTS = 12  # so many of them
DEAR = 70.0  # seconds: what takes longer waits until the rest is done


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


Report = Callable[[float], None]  # hears how many of a bundle's seconds are done


def compute(archive: Archive, bundle: Bundle, report: Report) -> None:
    """Compute a bundle; what is finished already is not computed again."""
    if isinstance(bundle.first, Calculation):
        from marfl.reproduce.calculations import FUNCTIONS  # here, because some wait for dp-accounting

        archive.keep(bundle.first, FUNCTIONS[bundle.first.function](**dict(bundle.first.arguments)))
        return
    done = 0.0
    if archive.summary(bundle.first) is None:
        _train(archive, bundle.first, report)
        done = estimate(bundle.first)
    for config in bundle.others:
        _replay(archive, bundle.first, config)
        done += 3.0
        report(done)


def _train(archive: Archive, config: Config, report: Report) -> None:
    from marfl.sim.engine import Simulation  # torch takes a second: only when something runs

    seconds = estimate(config)
    every = max(10, config.iterations // CHECKPOINTS) if seconds > LONG else config.iterations + 1
    config = config.model_copy(update={"checkpoint_every": every})
    run, goes_on = archive.begin(config)
    with run:
        simulation = Simulation(config, run, resume=goes_on)
        for row in simulation.rows():
            report(seconds * row["iteration"] / config.iterations)
    archive.seal(config)


def _replay(archive: Archive, training: Config, config: Config) -> None:
    from marfl.reproduce.shared import Replayed
    from marfl.sim.engine import Simulation

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


Event = Advanced | Ended


def run_all(archive: Archive, todo: list[Bundle], workers: int, deadline: float | None = None) -> Iterator[Event]:
    """Compute the bundles, at most `workers` at a time; stop (and lose nothing finished) when `deadline` has passed."""
    if deadline is not None and time.monotonic() >= deadline:
        return
    if workers == 1:
        yield from _run_here(archive, todo, deadline)
        return
    context = multiprocessing.get_context("spawn")
    team = [_Helper(context, archive) for _ in range(min(workers, len(todo)))]
    waiting = list(reversed(todo))
    try:
        for helper in team:
            helper.start(waiting.pop())
        while any(helper.bundle for helper in team):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([helper.pipe for helper in team if helper.bundle], timeout=left)
            if not ready and left is not None:
                return
            for helper in team:
                if helper.pipe in ready:
                    event = helper.hear()
                    yield event
                    if isinstance(event, Ended) and waiting:
                        helper.start(waiting.pop())
    finally:
        for helper in team:
            helper.stop()


def _run_here(archive: Archive, todo: list[Bundle], deadline: float | None) -> Iterator[Event]:
    for bundle in todo:
        if deadline is not None and time.monotonic() > deadline:
            return
        try:
            compute(archive, bundle, lambda seconds: None)
        except MarflError as error:
            yield Ended(bundle, str(error))
        else:
            yield Ended(bundle, None)


class _Helper:
    """A worker process with one bundle at a time."""

    def __init__(self, context: Any, archive: Archive) -> None:
        self.pipe, there = context.Pipe()
        self.bundle: Bundle | None = None
        self._process = context.Process(target=_work, args=(there, archive), daemon=True)
        self._process.start()
        there.close()

    def start(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.pipe.send(bundle)

    def hear(self) -> Event:
        assert self.bundle is not None
        bundle = self.bundle
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            raise BrokenPromise("a worker process died; with little memory use fewer --workers") from None
        if kind == "at":
            return Advanced(bundle, value)
        self.bundle = None
        if kind == "broken":
            raise value
        return Ended(bundle, value)

    def stop(self) -> None:
        """Run directories bear a kill at any moment."""
        self._process.terminate()
        self._process.join()


def _work(pipe: Connection, archive: Archive) -> None:
    """A worker's life: compute bundles until the other end hangs up. Ctrl-C is for the one that directs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            bundle = pipe.recv()
            try:
                compute(archive, bundle, lambda seconds: pipe.send(("at", seconds)))
            except MarflError as error:
                pipe.send(("done", str(error)))
            except Exception as error:  # noqa: BLE001 - handed to the one that directs, which raises it
                pipe.send(("broken", error))
            else:
                pipe.send(("done", None))
    except (EOFError, BrokenPipeError):
        return
