"""Our own library on one machine, as `marfl.reproduce.real_peers` times it, with the seconds in which tensors move."""

from __future__ import annotations

import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

from marfl.reproduce.real_peers import SwarmTimes, TimedSwarm, take_part
from marfl.reproduce.real_peers import run as run_peers


def run(swarm: TimedSwarm) -> SwarmTimes:
    """Aggregate `steps` times, after one to warm up."""
    return run_peers(swarm, _peer)


def _peer(index: int, swarm: TimedSwarm, barrier: Barrier, queue: Queue[Any], address: Queue[Any]) -> None:
    take_part(index, swarm, barrier, queue, address, _timed_exchange())


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
