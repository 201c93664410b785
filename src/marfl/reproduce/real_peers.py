"""Real peers on this machine, timed aggregation by aggregation: as `hivemind_averager.py` times hivemind's.

Every peer is a process with a `marfl.Peer`. All begin an aggregation together, at a barrier; it has lasted until the
slowest peer holds the average. Only aggregations in which everybody was present count.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Empty
from typing import Any

from marfl.errors import BrokenPromise

PATIENCE = 300.0  # seconds for everybody to come to a barrier
SHUTDOWN_TIMEOUT = 30.0
Taken = tuple[float, Any, int, float]  # of an aggregation: seconds, bytes, who was present, seconds tensors moved
Report = tuple[list[Taken], float, int]  # of a peer: its aggregations, when it had joined, bytes of memory


def reports(peer: Callable[..., None], peers: int, setting: Any) -> list[Any]:
    """What each `peer(index, setting, barrier, queue, address)` puts into the queue; one that fails ends it all."""
    context = multiprocessing.get_context("spawn")
    queue: Queue[Any] = context.Queue()
    address: Queue[Any] = context.Queue()
    barrier = context.Barrier(peers)
    processes = [context.Process(target=peer, args=(i, setting, barrier, queue, address)) for i in range(peers)]
    for process in processes:
        process.start()
    try:
        return [_next(queue, processes) for _ in processes]
    finally:
        for process in processes:
            process.join(SHUTDOWN_TIMEOUT if not any(each.exitcode for each in processes) else 0)
            process.kill()


def _next(queue: Queue[Any], processes: list[Any]) -> Any:
    while True:
        try:
            return queue.get(timeout=1.0)
        except Empty:
            if any(process.exitcode for process in processes):
                raise BrokenPromise("a peer's process failed; it said why above") from None


@dataclass(frozen=True)
class TimedSwarm:
    """Which peers average what, and how often."""

    peers: int
    parameters: int
    steps: int
    group_size: int = 5
    exchange: str = "grid"
    options: tuple[tuple[str, Any], ...] = ()  # more keyword arguments of `marfl.Peer`


@dataclass(frozen=True)
class TimedStep:
    """One aggregation: the slowest peer's seconds, in all and while tensors moved, and what it cost."""

    seconds: float
    data_seconds: float  # 0 where nobody looked
    payload: int  # tensor bytes, all peers
    control: int
    dht: int  # operations, all peers
    whole: bool  # everybody was averaged in


@dataclass(frozen=True)
class SwarmTimes:
    """What a swarm came to."""

    steps: list[TimedStep]
    start_seconds: float  # until everybody had joined, imports included
    resident: list[int]  # bytes of each peer at the end, its daemon included


def run(swarm: TimedSwarm, peer: Callable[..., None] | None = None) -> SwarmTimes:
    """Aggregate `steps` times, after one to warm up. `peer` stands for `take_part` where more is to be measured."""
    begun = time.time()
    results: list[Report] = reports(peer or take_part, swarm.peers, swarm)
    steps = [_step(row, swarm.peers) for row in list(zip(*(r[0] for r in results), strict=True))[1:]]
    return SwarmTimes(steps, max(r[1] for r in results) - begun, [r[2] for r in results])


def _step(row: tuple[Taken, ...], peers: int) -> TimedStep:
    return TimedStep(
        max(r[0] for r in row), max(r[3] for r in row), sum(r[1].payload for r in row),
        sum(r[1].control for r in row), sum(r[1].dht for r in row), all(r[2] == peers for r in row),
    )  # fmt: skip


def take_part(
    index: int,
    swarm: TimedSwarm,
    barrier: Barrier,
    queue: Queue[Any],
    address: Queue[Any],
    moving: list[float] | None = None,
) -> None:
    """Be one peer. Whoever measures the seconds in which tensors move adds them to `moving`."""
    import torch

    from marfl.peer.api import Peer

    torch.set_num_threads(1)
    model = torch.nn.Linear(swarm.parameters, 1, bias=False)
    join = [] if index == 0 else address.get(timeout=PATIENCE)
    options: dict[str, Any] = {"group_size": swarm.group_size, "exchange": swarm.exchange, **dict(swarm.options)}
    with Peer(model, run="bench", index=index, join=join, expected=swarm.peers, **options) as peer:
        if index == 0:
            for _ in range(swarm.peers - 1):
                address.put(peer.addresses)
        barrier.wait(PATIENCE)
        started = time.time()
        seconds = [] if moving is None else moving
        steps = [_aggregate(peer, model, index, barrier, seconds) for _ in range(swarm.steps + 1)]
        queue.put((steps, started, _resident(os.getpid())))
        barrier.wait(PATIENCE)


def _aggregate(peer: Any, model: Any, index: int, barrier: Barrier, moving: list[float]) -> Taken:
    import torch

    with torch.no_grad():
        model.weight.add_(0.001 * (index + 1))
    barrier.wait(PATIENCE)
    moving.clear()
    begun = time.perf_counter()
    outcome = peer.aggregate()
    return time.perf_counter() - begun, outcome.sent, len(outcome.present), sum(moving)


def _resident(pid: int) -> int:
    """Bytes of memory that are really there, of a process and those it has started; 0 where no system tells."""
    if not Path("/proc/self/statm").is_file():
        return 0
    own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    started = [each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    return own + sum(map(_resident, map(int, started)))
