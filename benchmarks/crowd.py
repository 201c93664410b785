"""Several peers as processes of their own, which start together and each report once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

SHUTDOWN_TIMEOUT = 30.0


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
                raise RuntimeError("a peer failed; it said why above") from None
