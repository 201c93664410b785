"""Computes local updates and sums, in this process or over worker processes, behind one interface (`Executor`).

A third executor, on a Ray cluster, is in `marfl.sim.cluster`.

Rows of shared matrices hold the vectors, so nothing large is ever sent to a worker. Every worker steps one peer at a
time on one thread: the same inputs give the same bits wherever they are computed.

The worker processes are our own and not a `concurrent.futures` pool: ours end by themselves when the simulator is
killed, and quietly on Ctrl-C.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils.data import Dataset

from marfl.config import Config
from marfl.dp.discrete_gaussian import Words
from marfl.dp.noise import derived_words
from marfl.dp.private_agreement import PrivateAgreement, RecordAgreement, Secret
from marfl.errors import BrokenPromise, InputError
from marfl.learn import (
    Loader,
    LocalResult,
    LocalWork,
    Metrics,
    Partition,
    Task,
    Worker,
    initial_model,
    load_task,
    personal,
    shard_of,
)
from marfl.learn.device import find_device
from marfl.learn.local_work import NOTHING, Start
from marfl.learn.record_gradients import RecordGradients
from marfl.learn.strategy import Vectors
from marfl.learn.worker import keep_freed_memory
from marfl.plan.grid import split
from marfl.protocol.fixed_point import DTYPES, decode_mean, sum_of_integers
from marfl.rng import numpy_stream
from marfl.state import all_finite, keep_at_home
from marfl.techniques.technique import Span, Technique

MOST_JOBS = 16  # handed to a worker process at once
LONG_STEP = 10_000_000  # values times rows of a batch: a step of 10 ms


class Job(NamedTuple):
    """One peer's local update."""

    peer: int
    iteration: int
    consumed: int  # batches it has trained on so far
    row: int  # of the model it starts from (in place: and where its new model goes)
    momentum_row: int
    out: int  # the row of its update
    bound: float = 0.0  # C, in a private run
    slow: bool = False  # with the step size of a peer that is good enough already


class Done(NamedTuple):
    """How a job went."""

    peer: int
    out: int
    loss: float
    samples: int
    finite: bool


@dataclass(frozen=True)
class TaskSpec:
    """A task by name, so that every process makes its own instead of being sent the data."""

    name: str
    options: dict[str, Any]
    partition: Partition | None

    def load(self) -> Task:
        return load_task(self.name, partition=self.partition, **self.options)


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know; everything in it can be sent to another process."""

    task: TaskSpec
    peers: int
    seed: int
    batches: tuple[int, ...]  # rows of a mini-batch, by peer
    local_work: LocalWork
    own_momentum: bool  # every peer keeps a row of its own
    local: tuple[str, ...] = ()  # patterns of layers that stay at home
    device: str = "cpu"  # where local steps run
    private: PrivateAgreement | None = None  # then only what it lets through reaches `Matrices.updates`


@dataclass
class Matrices:
    """The matrices that all workers share, a row per vector."""

    theta: Tensor  # [rows, P]
    momentum: Tensor  # [rows, P]
    updates: Tensor  # [peers that update, values that travel]
    mean: Tensor  # [values that travel]

    def share(self) -> Matrices:
        for tensor in (self.theta, self.momentum, self.updates, self.mean):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return self


class Sum(NamedTuple):
    """A sum over rows of updates, divided by the weight."""

    technique: Technique
    rows: tuple[int, ...]  # in roster order
    weights: tuple[float, ...]
    weight: float
    wire: str = "fp32"


class Executor(Protocol):
    """Runs local updates and sums."""

    matrices: Matrices

    def update(self, jobs: Sequence[Job], *, in_place: bool) -> list[Done]: ...

    def distill_groups(self, groups: Sequence[Sequence[Job]], round: int, *, in_place: bool) -> list[int]: ...

    def mean(self, total: Sum) -> None: ...

    def close(self) -> None: ...


@dataclass
class InProcess:
    """Computes everything in this process, one peer after the other."""

    setup: Setup
    matrices: Matrices
    _loaders: dict[int, Loader] = field(default_factory=dict)
    agreed: dict[int, Vectors] = field(default_factory=dict)  # by row of θ, the strategy's part of the agreed state
    own: dict[int, Tensor] = field(default_factory=dict)  # by peer, what it remembers for the strategy
    homes: dict[int, Tensor] = field(default_factory=dict)  # by peer, its personal layers once they were trained
    tests: dict[int, Dataset[Any]] = field(default_factory=dict)  # by peer, what it is tested on

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.task = self.setup.task.load()
        module = initial_model(self.task, self.setup.seed)
        keep_at_home(module, self.setup.local)
        self.worker = Worker(self.task, module, find_device(self.setup.device))
        if self.setup.local:
            personal.check_task(self.task)
        self.loader(0)  # data that cannot be split over so many peers is refused here and now

    def loader(self, peer: int) -> Loader:
        if peer not in self._loaders:
            setup = self.setup
            shard = shard_of(self.task, peer, setup.peers, setup.seed)
            if setup.local:
                shard, self.tests[peer] = personal.apart(shard, setup.seed, peer)
            self._loaders[peer] = Loader(shard, seed=setup.seed, peer=peer, batch_size=setup.batches[peer])
        return self._loaders[peer]

    def test_at_home(self, theta: Tensor) -> Metrics:
        """How good the agreed layers are with each peer's personal ones, on its own data, over all peers."""
        for peer in range(self.setup.peers):
            self.loader(peer)
        return personal.pooled(
            personal.tested(self.worker, theta, self.homes.get(peer), rows) for peer, rows in self.tests.items()
        )

    @cached_property
    def records(self) -> RecordGradients:
        """The gradients of single records."""
        return RecordGradients(self.worker, self.loader(0).records(np.arange(1)))

    def update(self, jobs: Sequence[Job], *, in_place: bool) -> list[Done]:
        return [self._one(job, in_place) for job in jobs]

    def _one(self, job: Job, in_place: bool) -> Done:
        matrices, setup = self.matrices, self.setup
        theta, momentum = matrices.theta[job.row], matrices.momentum[job.momentum_row]
        loader = self.loader(job.peer)
        if isinstance(setup.private, RecordAgreement):
            secret = Secret(noise_for(setup, job, "sample"), noise_for(setup, job))
            matrices.updates[job.out] = setup.private.of_records(self.records, loader, theta, job.bound, secret)
            return Done(job.peer, job.out, math.nan, 0, True)
        start = Start(
            theta, momentum, self.agreed.get(job.row, NOTHING), self.own.get(job.peer), self.homes.get(job.peer)
        )
        # Where Δ alone travels, it is written to where it is added up; in_place its row is not there.
        alone = setup.private is None and not in_place and matrices.updates.shape[1] == theta.numel()
        into = matrices.updates[job.out] if alone else None
        result = self._work_of(job).update(self.worker, loader, start, job.iteration, job.consumed, into)
        if setup.private is not None:
            sent = setup.private.privatised(result.delta, momentum, job.iteration, job.bound, noise_for(setup, job))
            matrices.updates[job.out] = sent
        if result.finite:
            self._keep(job, result, in_place)
        # A private peer sends something in any case: who stays away would tell something about its data.
        usable = result.finite or setup.private is not None
        return Done(job.peer, job.out, result.loss, result.samples, usable)

    def _work_of(self, job: Job) -> LocalWork:
        work = self.setup.local_work
        return replace(work, optimizer=work.optimizer.slowed) if job.slow else work

    def _keep(self, job: Job, result: LocalResult, in_place: bool) -> None:
        matrices, length = self.matrices, result.delta.numel()
        if result.home is not None:
            self.homes[job.peer] = result.home
        if self.setup.own_momentum:
            matrices.momentum[job.momentum_row] = result.momentum
        if in_place:
            matrices.theta[job.row].add_(result.delta)
        if in_place or self.setup.private is not None:
            return
        if result.delta.data_ptr() != matrices.updates[job.out].data_ptr():
            matrices.updates[job.out, :length] = result.delta
        if result.news is not None:
            matrices.updates[job.out, -length:] = result.news
        if matrices.updates.shape[1] > length * (1 + (result.news is not None)):
            matrices.updates[job.out, length : 2 * length] = result.momentum

    def distill_groups(self, groups: Sequence[Sequence[Job]], round: int, *, in_place: bool) -> list[int]:
        """A round of distillation in each group; the peers whose round led to NaN or infinity and was undone."""
        return [peer for group in groups for peer in self._distill(group, round, in_place)]

    def _distill(self, group: Sequence[Job], round: int, in_place: bool) -> list[int]:
        """Everybody learns from the models that the others had before the round."""
        before = [self._state(job, in_place) for job in group]
        models = [state.theta for state in before]
        undone = []
        for place, (job, state) in enumerate(zip(group, before, strict=True)):
            others = models[:place] + models[place + 1 :]
            loader = self.loader(job.peer)
            local_work = self._work_of(job)
            distilled = local_work.distill_round(self.worker, loader, state, others, job.iteration, job.consumed, round)
            self._keep(job, distilled.result, in_place)
            undone += [job.peer] if distilled.undone else []
        return undone

    def _state(self, job: Job, in_place: bool) -> LocalResult:
        """Where a peer is, as far as its rows say."""
        matrices, theta = self.matrices, self.matrices.theta[job.row]
        if in_place:
            delta, momentum = torch.zeros_like(theta), matrices.momentum[job.momentum_row]
        else:
            delta, momentum = matrices.updates[job.out].view(2, -1)  # config: momentum = send
        return LocalResult(theta, delta, momentum, 0.0, 0, True)

    def mean(self, total: Sum) -> None:
        self.mean_of_slice(total, 0, self.matrices.mean.numel())

    def mean_of_slice(self, total: Sum, start: int, stop: int) -> None:
        """The mean's values from start to stop: a slice of the sum is the sum of the slices, bit for bit."""
        values = [self.matrices.updates[row, start:stop] for row in total.rows]
        self.matrices.mean[start:stop] = slice_of_mean(values, total, start, self.matrices.mean.numel())

    def close(self) -> None:
        self._loaders.clear()


def _decoded(total: Sum, values: Sequence[Tensor]) -> Tensor:
    """The mean of integers that are added modulo the size of their field, as peers add them."""
    return decode_mean(sum_of_integers(values).to(DTYPES[total.wire]), len(values), total.weight)


def noise_for(setup: Setup, job: Job, purpose: str = "privacy") -> Words:
    """The noise of one peer in one iteration: its own stream, so that no two peers' noise is related."""
    return derived_words(numpy_stream(setup.seed, job.peer, job.iteration, purpose))


def slice_of_mean(values: Sequence[Tensor], total: Sum, start: int, length: int) -> Tensor:
    """A slice of the mean, `length` values long as a whole, from the same slice of every member's update."""
    weighted = [_weighted(value, weight) for value, weight in zip(values, total.weights, strict=True)]
    if total.wire != "fp32":
        return _decoded(total, weighted)
    summed = total.technique.total(weighted, Span(start, length))
    if summed.shape != values[0].shape or not all_finite(summed):
        shape = f"{list(summed.shape)} of {list(values[0].shape)}"
        raise InputError(f"technique = {total.technique.name}: its sum has {shape} values, or NaN or infinity")
    return summed / total.weight


def _weighted(value: Tensor, weight: float) -> Tensor:
    """As real peers weight their own updates: rounded once, and exact zeros for a weight of zero."""
    if weight == 1.0:
        return value
    return value * weight if weight else torch.zeros_like(value)


def portions(jobs: Sequence[Job], workers: int, most: int) -> list[list[Job]]:
    """Jobs as they are handed out: several at once, for messages take time, and fewer and fewer, so that nobody waits
    long for the last one (guided self-scheduling, Polychronopoulos and Kuck 1987)."""
    found, first = [], 0
    while first < len(jobs):
        size = min(most, max(1, (len(jobs) - first) // (4 * workers)))
        found.append(list(jobs[first : first + size]))
        first += size
    return found


class Processes:
    """Worker processes over shared matrices."""

    def __init__(self, setup: Setup, matrices: Matrices, count: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.matrices = matrices.share()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, setup, matrices), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def update(self, jobs: Sequence[Job], *, in_place: bool) -> list[Done]:
        works = [("update", some, in_place) for some in portions(jobs, len(self._pipes), MOST_JOBS)]
        done = [item for answer in self._spread(works) for item in answer]
        return sorted(done, key=lambda item: item.out)

    def distill_groups(self, groups: Sequence[Sequence[Job]], round: int, *, in_place: bool) -> list[int]:
        # Groups are disjoint, so no worker changes a row that another one reads.
        answers = self._spread([("distill", [group], round, in_place) for group in groups])
        return sorted(peer for answer in answers for peer in answer)

    def mean(self, total: Sum) -> None:
        self._spread([("mean", total, part) for part in split(self.matrices.mean.numel(), len(self._pipes))])

    def _spread(self, requests: list[Any]) -> list[Any]:
        """Hand requests to whoever is free until all are answered."""
        todo, answers = list(reversed(requests)), []
        busy: set[Connection] = set()
        for pipe in self._pipes[: len(todo)]:
            pipe.send(todo.pop())
            busy.add(pipe)
        while busy:
            for free in wait(list(busy)):
                assert isinstance(free, Connection)
                answers.append(self._answer(free))
                if todo:
                    free.send(todo.pop())
                else:
                    busy.discard(free)
        return answers

    def _answer(self, pipe: Connection) -> Any:
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionError):
            raise BrokenPromise(
                "a worker process died; with little memory use fewer workers, and begin a script with "
                "if __name__ == '__main__', for its workers read it, too"
            ) from None
        if kind == "error":
            raise value
        return value

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, setup: Setup, matrices: Matrices) -> None:
    """A worker's life: answer requests until the other end hangs up."""
    keep_freed_memory()
    try:
        local = InProcess(setup, matrices)
        while True:
            request = pipe.recv()
            if request[0] == "update":
                pipe.send(("done", local.update(request[1], in_place=request[2])))
            elif request[0] == "distill":
                pipe.send(("done", local.distill_groups(request[1], request[2], in_place=request[3])))
            else:
                local.mean_of_slice(request[1], *request[2])
                pipe.send(("done", None))
    except (EOFError, KeyboardInterrupt):
        return  # the simulator has ended, or the user ends everything
    except Exception as error:  # noqa: BLE001 - handed to the simulator, which raises it
        pipe.send(("error", error))


def make_executor(setup: Setup, matrices: Matrices, config: Config, *, reads_updates: bool = True) -> Executor:
    """A cluster where one is asked for; else worker processes where a step is long enough to be worth sending.

    `reads_updates` says whether the world looks at single updates, and not at their mean alone.
    """
    if config.cluster is not None:
        from marfl.sim.cluster import Cluster  # it needs this module

        return Cluster(setup, matrices, config, reads_updates=reads_updates)
    long = matrices.theta.shape[1] * setup.batches[0] > LONG_STEP
    count = config.workers or (os.cpu_count() or 1 if long else 1)
    return Processes(setup, matrices, count) if count > 1 else InProcess(setup, matrices)
