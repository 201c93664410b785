"""Our own library on one machine, timed aggregation by aggregation: as `hivemind_averager.py` times hivemind's.

Every peer is a process with a `marfl.Peer`. All begin an aggregation together, at a barrier; it has lasted until the
slowest peer holds the average. Only aggregations in which everybody was present count.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from crowd import reports

PATIENCE = 300.0  # seconds for everybody to come to a barrier
PAGE = resource.getpagesize()


@dataclass(frozen=True)
class Setting:
    """One swarm."""

    peers: int
    parameters: int
    steps: int
    group_size: int = 5
    exchange: str = "grid"
    options: tuple[tuple[str, Any], ...] = ()  # more keyword arguments of `marfl.Peer`


@dataclass(frozen=True)
class Step:
    """One aggregation: the slowest peer's seconds, in all and while tensors moved, and what it cost."""

    seconds: float
    data_seconds: float
    payload: int  # tensor bytes, all peers
    control: int
    dht: int  # operations, all peers
    whole: bool  # everybody was averaged in


@dataclass(frozen=True)
class Swarm:
    """What a swarm came to."""

    steps: list[Step]
    start_seconds: float  # until everybody had joined, imports included
    resident: list[int]  # bytes of each peer at the end, its daemon included


def run(setting: Setting) -> Swarm:
    """Aggregate `steps` times, after one to warm up."""
    begun = time.time()
    results = reports(_peer, setting.peers, setting)
    steps = [_step(row, setting.peers) for row in list(zip(*(r[0] for r in results), strict=True))[1:]]
    return Swarm(steps, max(r[1] for r in results) - begun, [r[2] for r in results])


def _step(row: Any, peers: int) -> Step:
    return Step(
        max(r[0] for r in row), max(r[3] for r in row), sum(r[1].payload for r in row),
        sum(r[1].control for r in row), sum(r[1].dht for r in row), all(r[2] == peers for r in row),
    )  # fmt: skip


def _peer(index: int, setting: Setting, barrier: Barrier, queue: Queue[Any], address: Queue[Any]) -> None:
    import torch

    import marfl

    torch.set_num_threads(1)
    model = torch.nn.Linear(setting.parameters, 1, bias=False)
    moving = _timed_exchange()
    join = [] if index == 0 else address.get(timeout=PATIENCE)
    swarm = {"expected": setting.peers, "group_size": setting.group_size, "exchange": setting.exchange}
    with marfl.Peer(model, run="bench", index=index, join=join, **swarm, **dict(setting.options)) as peer:
        if index == 0:
            for _ in range(setting.peers - 1):
                address.put(peer.addresses)
        barrier.wait(PATIENCE)
        started = time.time()
        steps = [_aggregate(peer, model, index, barrier, moving) for _ in range(setting.steps + 1)]
        queue.put((steps, started, _resident(os.getpid())))
        barrier.wait(PATIENCE)


def _timed_exchange() -> list[float]:
    """The seconds of every exchange of this process from now on: from its first slice out to the mean."""
    from marfl.protocol import member

    seconds: list[float] = []
    exchange = member.mean

    async def timed(*given: Any) -> Any:
        begun = time.perf_counter()
        try:
            return await exchange(*given)
        finally:
            seconds.append(time.perf_counter() - begun)

    member.mean = timed
    return seconds


def _aggregate(
    peer: Any, model: Any, index: int, barrier: Barrier, moving: list[float]
) -> tuple[float, Any, int, float]:
    """(seconds, bytes, who was present, seconds in which tensors moved) of one peer."""
    import torch

    with torch.no_grad():
        model.weight.add_(0.001 * (index + 1))
    barrier.wait(PATIENCE)
    moving.clear()
    begun = time.perf_counter()
    outcome = peer.aggregate()
    return time.perf_counter() - begun, outcome.sent, len(outcome.present), sum(moving)


def _resident(pid: int) -> int:
    """Bytes of memory that are really there, of this process and those it has started."""
    own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    started = [each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    return own + sum(map(_resident, map(int, started)))
