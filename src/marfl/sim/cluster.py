"""Local updates, distillation and sums on a Ray cluster: the third `Executor`.

Every job is a pure function of vectors in Ray's object store, so Ray alone decides where it runs, and runs it again
when a worker or a node dies with it. A worker process of Ray loads the task with its first job and keeps it. They are
tasks of Ray and not actors: an actor whose node dies waits for a free place of its own size, a task goes wherever a
core is free, also on nodes that came later. An update stays in the store, in slices, and whoever adds a slice up
fetches it alone; the simulator gets the mean, and single updates only where it reads them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import platform
import socket
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from marfl.config import Config
from marfl.errors import BrokenPromise, InputError
from marfl.learn.worker import keep_freed_memory
from marfl.plan.grid import split
from marfl.sim.executor import Done, InProcess, Job, Matrices, Setup, Sum, portions, slice_of_mean
from marfl.system import cores
from marfl.techniques.technique import Span

RETRIES = 5  # times that a job may die with its worker or node
SLICES = 8  # at most, one for each node: an update is stored in so many parts
MOST_JOBS = 8  # that a worker gets at once
AHEAD = 3  # portions for each core: one that is computed, and two on their way to it
PATIENCE = 5.0  # seconds, for an address that does not answer
Array: TypeAlias = Any  # a NumPy array
Ref: TypeAlias = Any  # of an object in the store; Ray's own types would need Ray


# --- what runs on the nodes ---


class Machine(NamedTuple):
    """What decides the last bits of a computation, and whose marfl it is."""

    cpu: str
    torch: str
    marfl: str

    @classmethod
    def here(cls) -> Machine:
        build = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:8]
        cpu = f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"
        return cls(cpu, f"{torch.__version__} ({build})", version("marfl"))

    def differences(self, other: Machine) -> str:
        """In which of these another machine differs, in words; empty where bits are the same."""
        pairs = zip(("CPU", "torch", "marfl"), self, other, strict=True)
        return ", ".join(f"{name} {theirs} instead of {ours}" for name, ours, theirs in pairs if ours != theirs)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True)
class _Run:
    """What a worker must know of a run."""

    name: str
    setup: Setup
    machine: Machine  # the simulator's
    alike: bool  # whether all nodes must compute the same bits


class _Shape(NamedTuple):
    """Of the updates: how many values, of which type, and where each slice begins and ends."""

    values: int
    dtype: torch.dtype
    slices: tuple[tuple[int, int], ...]


_loaded: dict[str, InProcess] = {}  # in a worker process: the run that it works for


def _local(run: _Run) -> InProcess:
    """The run's task, loaded with the first job that a worker gets."""
    if run.name not in _loaded:
        _loaded.clear()
        keep_freed_memory()
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # and nobody writes to it
        found = run.machine.differences(Machine.here())
        if run.alike and found:
            raise InputError(_not_alike(_my_name(), found))
        try:
            _loaded[run.name] = InProcess(run.setup, Matrices(*(torch.empty(0),) * 4))
        except InputError as error:
            raise InputError(f"on node {_my_name()}: {error}") from error
    return _loaded[run.name]


def _my_name() -> str:
    return f"{socket.gethostname()} ({importlib.import_module('ray').util.get_node_ip_address()})"


def _introduce() -> tuple[str, Machine]:
    return _my_name(), Machine.here()


class _Answer(NamedTuple):
    """What a worker says of its jobs, beside the slices of their updates."""

    said: Any
    theta: Array | None  # rows that changed
    momentum: Array | None


def _update(run: _Run, shape: _Shape, jobs: list[Job], in_place: bool, *rows: Array) -> Any:
    """Some local updates; `rows` are those of θ and then of the momentum that they start from."""
    local = _local(run)
    own, thetas, momenta = _renumbered(jobs)
    width = 0 if in_place else len(jobs)
    updates = torch.empty(width, shape.values, dtype=shape.dtype)
    local.matrices = _matrices(local, rows[: len(thetas)], rows[len(thetas) :], updates, in_place)
    assert len(rows) == len(thetas) + len(momenta)
    done = local.update(own, in_place=in_place)
    return _answer(local, shape, [item._replace(out=job.out) for item, job in zip(done, jobs, strict=True)], in_place)


def _distil(
    run: _Run, shape: _Shape, group: list[Job], places: list[int], round: int, in_place: bool, *rows: Array
) -> Any:
    """A round of distillation in one group; behind `rows` come the blocks with each member's update, at its place."""
    local = _local(run)
    own, thetas, momenta = _renumbered(group)
    first, behind = len(thetas), len(thetas) + len(momenta)
    updates = torch.empty(0 if in_place else len(group), shape.values, dtype=shape.dtype)
    found = iter(rows[behind:])
    for row in range(len(updates)):
        for start, stop in shape.slices:
            updates[row, start:stop] = torch.from_numpy(next(found)[places[row]])
    local.matrices = _matrices(local, rows[:first], rows[first:behind], updates, in_place)
    undone = local.distill_groups([own], round, in_place=in_place)
    return _answer(local, shape, undone, in_place)


def _add(total: Sum, span: Span, part: tuple[int, int], places: list[tuple[int, int]], *blocks: Array) -> Array:
    """A part of a slice of the mean. `span` is the slice's; a member's update is at its place: a block and a row."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    values = [torch.from_numpy(blocks[block][row, slice(*part)]) for block, row in places]
    return slice_of_mean(values, total, span.start + part[0], span.length).numpy()


def _renumbered(jobs: Sequence[Job]) -> tuple[list[Job], list[int], list[int]]:
    """Jobs by the rows of a worker's own matrices, and which rows of the simulator's those are."""
    thetas = list(dict.fromkeys(job.row for job in jobs))
    momenta = list(dict.fromkeys(job.momentum_row for job in jobs))
    own = [
        job._replace(row=thetas.index(job.row), momentum_row=momenta.index(job.momentum_row), out=place)
        for place, job in enumerate(jobs)
    ]
    return own, thetas, momenta


def _matrices(
    local: InProcess, thetas: Sequence[Array], momenta: Sequence[Array], updates: Tensor, in_place: bool
) -> Matrices:
    """A worker's own; a row that it only reads stays where it is, in the store."""
    theta = _stack(thetas, writes=in_place)
    return Matrices(theta, _stack(momenta, writes=local.setup.own_momentum), updates, torch.empty(0))


def _stack(rows: Sequence[Array], *, writes: bool) -> Tensor:
    return torch.from_numpy(np.stack(rows) if writes or len(rows) > 1 else rows[0][None])


def _answer(local: InProcess, shape: _Shape, said: Any, in_place: bool) -> Any:
    """One object, or with the slices as many as the caller expects."""
    matrices = local.matrices
    theta = matrices.theta.numpy() if in_place else None
    momentum = matrices.momentum.numpy() if local.setup.own_momentum else None
    rows = matrices.updates.numpy()
    slices = [] if in_place else [np.ascontiguousarray(rows[:, start:stop]) for start, stop in shape.slices]
    local.matrices = Matrices(*(torch.empty(0),) * 4)
    answer = _Answer(said, theta, momentum)
    return [answer, *slices] if slices else answer


# --- the simulator's side ---


def _not_alike(node: str, found: str) -> str:
    return (
        f"--cluster: node {node} would not compute the same bits ({found}); leave it out, "
        "or allow it with other_nodes = name"
    )


@dataclass
class ClusterUse:
    """What a summary says of a cluster."""

    nodes: int
    cpus: int
    stored_bytes: int = 0  # all that went into the object store
    not_bit_equal: list[str] = field(default_factory=list)  # nodes


class _Stored(NamedTuple):
    """An update in the store."""

    slices: list[Ref]  # of all updates that one worker made at once: a block for each slice
    row: int  # in those blocks


class Cluster:
    """Ray's workers, on as many machines as the cluster has."""

    def __init__(self, setup: Setup, matrices: Matrices, config: Config, *, reads_updates: bool) -> None:
        self.matrices, self.reads_updates = matrices, reads_updates
        self._ray = _ray()
        self._ours = _join(self._ray, str(config.cluster), config.workers)  # whether it is ours to leave
        try:
            self._begin(setup, config)
        except BaseException:
            self.close()
            raise

    def _begin(self, setup: Setup, config: Config) -> None:
        ray = self._ray
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if not nodes:
            raise InputError(f"--cluster {config.cluster}: no node has a CPU to work on")
        cpus = int(sum(node["Resources"]["CPU"] for node in nodes))
        self.account = ClusterUse(len(nodes), cpus)
        self._most_jobs = 1 if setup.local_work.distill else MOST_JOBS  # a group then fetches what it needs alone
        self._workers, self._slice_count = config.workers, min(SLICES, len(nodes))
        alike = (config.other_nodes or ("refuse" if config.engine == "bitwise" else "name")) == "refuse"
        run = _Run(uuid.uuid4().hex, setup, Machine.here(), alike)
        self._meet(nodes, run)
        self._run = ray.put(run)
        self._held: dict[int, _Stored] = {}  # by row of the updates
        made = functools.partial(ray.remote, num_cpus=1, max_retries=RETRIES)
        self._update, self._distil, self._add = made()(_update), made()(_distil), made()(_add)

    def _meet(self, nodes: Sequence[Any], run: _Run) -> None:
        """Ask every node what it is; refuse or name those whose bits may differ."""
        by_node = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        ask = self._ray.remote(num_cpus=0, max_retries=RETRIES)(_introduce)
        asked = [ask.options(scheduling_strategy=by_node(node["NodeID"], soft=False)).remote() for node in nodes]
        for ref in asked:
            try:
                name, machine = self._get([ref])[0]
            except _NodeGone:
                continue
            found = run.machine.differences(machine)
            if run.machine.marfl != machine.marfl or (found and run.alike):
                raise InputError(_not_alike(name, found))
            if found:
                self.account.not_bit_equal.append(name)
                logging.getLogger("marfl").warning("cluster: node %s may differ in the last bits (%s)", name, found)

    # --- what an executor does ---

    def update(self, jobs: Sequence[Job], *, in_place: bool) -> list[Done]:
        self._held = {}  # of the iteration before
        chunks = portions(jobs, self._busy, self._most_jobs)
        shape, rows = self._shape(), _Rows(self, chunks)

        def send(chunk: list[Job]) -> list[Ref]:
            count = 1 + (0 if in_place else len(shape.slices))
            begin = self._update.options(num_returns=count)
            return _listed(begin.remote(self._run, shape, chunk, in_place, *rows.of(chunk)))

        answers = self._all(chunks, send, in_place)
        return sorted((item for answer in answers for item in answer), key=lambda item: item.out)

    def distill_groups(self, groups: Sequence[Sequence[Job]], round: int, *, in_place: bool) -> list[int]:
        works = [list(group) for group in groups]
        shape, rows = self._shape(), _Rows(self, works)

        def send(group: list[Job]) -> list[Ref]:
            stored = [] if in_place else [self._stored(job.out) for job in group]
            updates, places = [ref for each in stored for ref in each.slices], [each.row for each in stored]
            begin = self._distil.options(num_returns=1 + (0 if in_place else len(shape.slices)))
            return _listed(begin.remote(self._run, shape, group, places, round, in_place, *rows.of(group), *updates))

        answers = self._all(works, send, in_place)
        return sorted(peer for answer in answers for peer in answer)

    def mean(self, total: Sum) -> None:
        """Every slice is added up where it is, in as many parts as there are cores for it."""
        length, shape = self.matrices.mean.numel(), self._shape()
        stored = [self._stored(row) for row in total.rows]
        blocks = {each.slices[0]: place for place, each in enumerate({e.slices[0]: e for e in stored}.values())}
        places = [(blocks[each.slices[0]], each.row) for each in stored]
        begun: list[tuple[int, int, Ref]] = []
        for number, (start, stop) in enumerate(shape.slices):
            refs = list({each.slices[0]: each.slices[number] for each in stored}.values())
            for part in split(stop - start, -(-self._busy // len(shape.slices))):
                ref = self._add.remote(total, Span(start, length), part, places, *refs)
                begun.append((start + part[0], start + part[1], ref))
        for (first, last, _), found in zip(begun, self._get([ref for *_, ref in begun]), strict=True):
            self.matrices.mean.numpy()[first:last] = found
            self.account.stored_bytes += found.nbytes

    def close(self) -> None:
        self._held = {}
        if self._ours:
            self._ray.shutdown()

    # --- how it does it ---

    def _shape(self) -> _Shape:
        updates = self.matrices.updates
        values = updates.shape[1]
        return _Shape(values, updates.dtype, tuple(split(values, min(self._slice_count, max(1, values)))))

    @property
    def _busy(self) -> int:
        """Jobs that run at a time: nodes may have come or gone."""
        return min(self._workers or self._cpus, self._cpus)

    @property
    def _cpus(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _all(self, works: list[list[Job]], send: Callable[[list[Job]], list[Ref]], in_place: bool) -> list[Any]:
        """Have all of this done, and keep what changed; what the workers say of it.

        A few portions are under way for each core, or `workers` where that is less: more would fill the store. After an
        error or Ctrl-C they end by themselves: `ray.cancel` may abort this process if a job ends just then (Ray 2.55).
        """
        most = self._workers if 0 < self._workers < self._cpus else AHEAD * self._cpus
        todo, under_way, answers = list(reversed(works)), dict[Ref, tuple[list[Job], list[Ref]]](), list[Any]()
        while todo or under_way:
            while todo and len(under_way) < most:
                work = todo.pop()
                first, *slices = send(work)
                under_way[first] = work, slices
            with _one_line(self._ray):
                ready, _ = self._ray.wait(list(under_way), num_returns=1)
            for ref in ready:
                work, slices = under_way.pop(ref)
                answers.append(self._kept(work, self._get([ref])[0], slices, in_place))
        return answers

    def _kept(self, work: list[Job], answer: _Answer, slices: list[Ref], in_place: bool) -> Any:
        matrices, shape = self.matrices, self._shape()
        _, thetas, momenta = _renumbered(work)
        if answer.theta is not None:
            matrices.theta.numpy()[thetas] = answer.theta
            self.account.stored_bytes += answer.theta.nbytes
        if answer.momentum is not None:
            matrices.momentum.numpy()[momenta] = answer.momentum
            self.account.stored_bytes += answer.momentum.nbytes
        if in_place:
            return answer.said
        self._held |= {job.out: _Stored(slices, place) for place, job in enumerate(work)}
        self.account.stored_bytes += len(work) * shape.values * matrices.updates.element_size()
        if self.reads_updates:
            for (start, stop), found in zip(shape.slices, self._get(slices), strict=True):
                matrices.updates.numpy()[[job.out for job in work], start:stop] = found
        return answer.said

    def _stored(self, row: int) -> _Stored:
        """An update in the store; members that bring none count as zeros, and any row will do for them."""
        if row not in self._held:
            whole = self.matrices.updates[row : row + 1].numpy()
            self._held[row] = _Stored([self.put(whole[:, start:stop]) for start, stop in self._shape().slices], 0)
        return self._held[row]

    def put(self, array: Array) -> Ref:
        self.account.stored_bytes += array.nbytes
        with _one_line(self._ray):
            return self._ray.put(array)

    def _get(self, refs: list[Ref]) -> list[Any]:
        with _one_line(self._ray):
            return self._ray.get(refs)  # type: ignore[no-any-return]


class _Rows:
    """The rows that jobs start from, each put into the store once, and let go with the last job that needs it."""

    def __init__(self, cluster: Cluster, works: Iterable[Sequence[Job]]) -> None:
        self._cluster = cluster
        self._put: dict[tuple[str, int], Ref] = {}
        self._uses = Counter(row for jobs in works for row in self._rows(jobs))

    def of(self, jobs: Sequence[Job]) -> list[Ref]:
        return [self._one(row) for row in self._rows(jobs)]

    def _rows(self, jobs: Sequence[Job]) -> list[tuple[str, int]]:
        _, thetas, momenta = _renumbered(jobs)
        return [("theta", row) for row in thetas] + [("momentum", row) for row in momenta]

    def _one(self, row: tuple[str, int]) -> Ref:
        if row not in self._put:
            matrix, place = row
            self._put[row] = self._cluster.put(getattr(self._cluster.matrices, matrix)[place].numpy())
        self._uses[row] -= 1
        return self._put[row] if self._uses[row] else self._put.pop(row)


# --- Ray itself, quiet and on this machine's own address ---


def _ray() -> Any:
    """The library; it says nothing to anybody, and overrides nothing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of jobs that nobody waits for any more
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise InputError("--cluster: Ray is not installed; pip install 'marfl[cluster]'") from None


@contextmanager
def joined(address: str, workers: int = 0) -> Iterator[None]:
    """Stay in a cluster for several runs, instead of joining it (or starting one) for each."""
    ray = _ray()
    ours = _join(ray, address, workers)
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def _join(ray: Any, given: str, workers: int) -> bool:
    """Join the cluster, unless this process is in one already; `auto` starts one on this machine if there is none."""
    if ray.is_initialized():
        return False
    address = _address(ray, given)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    try:
        if address != "local":
            ray.init(address=address, **quiet)
            return True
    except ConnectionError as error:
        if address != "auto":
            raise _unjoined(given, error) from error
    except (RuntimeError, ValueError, OSError) as error:
        raise _unjoined(given, error) from error
    with _on_loopback():
        local = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "num_cpus": workers or cores()}
        niceness = {"_system_config": {"worker_niceness": 0}}  # Ray would let its workers wait for all others
        try:
            ray.init(address="local", **local, **niceness, **quiet)
        except Exception as error:  # a node that takes more than 30 seconds to start is a plain one
            raise _unjoined(given, error, "started") from error
    return True


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray begin a cluster that nobody else can reach.

    It listens on loopback alone where a variable tells it that there are no other nodes; it reads it when it is
    imported, and its processes do later. Otherwise it takes 127.0.0.1 for the machine's own address.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    name, before = constants.ENABLE_RAY_CLUSTERS_ENV_VAR, constants.ENABLE_RAY_CLUSTER
    said = os.environ.get(name)
    constants.ENABLE_RAY_CLUSTER, os.environ[name] = False, "0"
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if said is None:
            del os.environ[name]
        else:
            os.environ[name] = said


def _address(ray: Any, given: str) -> str:
    """Where the cluster is; an address that does not answer is refused at once."""
    if given in ("auto", "local"):
        return given
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise InputError(f"--cluster {given}: must be auto, local, or HOST:PORT as `ray start` says it")
    if host in ("localhost", "127.0.0.1", "[::1]"):
        host = ray.util.get_node_ip_address()  # as Ray reads it: nobody else could call a node back at such an address
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--cluster {given}: nobody answers at {host}:{port} ({error})") from error
    return given


def _unjoined(given: str, error: Exception, what: str = "joined") -> InputError:
    reason = " ".join(str(error).split())
    return InputError(f"--cluster {given}: cannot be {what} ({reason:.300})")


class _NodeGone(BrokenPromise):
    """A job was for a node that has died."""


@contextmanager
def _one_line(ray: Any) -> Iterator[None]:
    """An error of a job as if it had happened here, and one of Ray's in one line."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if "failed to import on the worker" in str(error.cause):
            reason = str(error.cause).strip().rpartition("\n")[2]
            raise InputError(f"--cluster: marfl is not on every node, or an older one ({reason:.200})") from None
        raise error.cause from None
    except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError) as error:
        raise _NodeGone(str(error)) from error
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())
        raise BrokenPromise(f"the cluster gave up: {type(error).__name__}: {reason:.300}") from error


def _listed(found: Any) -> list[Ref]:
    return found if isinstance(found, list) else [found]
