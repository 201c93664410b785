"""hivemind's own `DecentralizedAverager` on one machine, timed step by step: what real peers are compared with.

Every peer is a process of its own, as ours are. All begin a step together. A step counts as formed when every peer
reports a group of the full size: hivemind itself reports success also when somebody was left out. The first step that
does not form ends the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Any

from marfl.reproduce.real_peers import reports

ROUND_TIMEOUT = 20.0  # seconds; whole groups form and average in a few
MATCHMAKING = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0)  # seconds to try, smallest first
POLL = 0.002  # seconds between two looks at the stage of a step


@dataclass(frozen=True)
class HivemindSwarm:
    """One way to average."""

    peers: int
    parameters: int
    group_size: int
    rounds: int  # of groups in one averaging
    matchmaking: float  # hivemind's min_matchmaking_time
    steps: int


@dataclass(frozen=True)
class HivemindStep:
    """One averaging: the slowest peer's seconds, in all and while tensors moved, and whether all groups were whole."""

    seconds: float
    data_seconds: float
    formed: bool


def run(setting: HivemindSwarm) -> list[HivemindStep]:
    """Average `steps` times, after one to warm up; fewer if one of them did not form: then it is the last."""
    results = reports(_peer, setting.peers, setting)
    steps = list(zip(*results, strict=True))[1:]
    return [HivemindStep(max(r[0] for r in step), max(r[1] for r in step), all(r[2] for r in step)) for step in steps]


def _peer(index: int, setting: HivemindSwarm, barrier: Barrier, queue: Queue[Any], address: Queue[Any]) -> None:
    import torch
    from hivemind import DHT, DecentralizedAverager

    multiprocessing.set_start_method("fork", force=True)  # hivemind's own processes cannot be started otherwise
    torch.set_num_threads(1)
    local = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "use_relay": False, "use_auto_relay": False, "start": True}
    if index == 0:
        dht = DHT(**local)
        for _ in range(setting.peers - 1):
            address.put([str(each) for each in dht.get_visible_maddrs()])
    else:
        dht = DHT(initial_peers=address.get(timeout=300), **local)
    bits = format(index // setting.group_size, f"0{setting.rounds - 1}b") if setting.rounds > 1 else ""
    averager = DecentralizedAverager(
        [torch.full((setting.parameters,), float(index))], dht, prefix="bench", start=True,
        target_group_size=setting.group_size, min_group_size=setting.group_size, initial_group_bits=bits,
        min_matchmaking_time=setting.matchmaking, request_timeout=min(3.0, setting.matchmaking * 0.6),
    )  # fmt: skip
    try:
        queue.put(_averages(averager, setting, barrier))
        with contextlib.suppress(BrokenBarrierError):
            barrier.wait(ROUND_TIMEOUT)
    finally:
        averager.shutdown()
        dht.shutdown()


def _averages(averager: Any, setting: HivemindSwarm, barrier: Barrier) -> list[tuple[float, float, bool]]:
    """HivemindStep after step, all peers at once, until anybody was left without its whole group."""
    done: list[tuple[float, float, bool]] = []
    with contextlib.suppress(BrokenBarrierError):
        while len(done) <= setting.steps:
            barrier.wait(setting.rounds * ROUND_TIMEOUT + 300)
            done.append(_average(averager, setting))
            if len(done) > 1 and not done[-1][2]:  # the first one warms up
                barrier.abort()
    return done


def _average(averager: Any, setting: HivemindSwarm) -> tuple[float, float, bool]:
    """(seconds, seconds in which tensors moved, all groups were whole) of one peer."""
    begun, moving, formed = time.perf_counter(), 0.0, True
    for _ in range(setting.rounds):
        data, whole = _round(averager, setting.group_size)
        moving += data
        formed = formed and whole
    return time.perf_counter() - begun, moving, formed


def _round(averager: Any, group_size: int) -> tuple[float, bool]:
    from hivemind.averaging.control import AveragingStage

    control = averager.step(wait=False, timeout=ROUND_TIMEOUT, allow_retries=False)
    began_data = None
    while not control.done():
        if began_data is None and control.stage == AveragingStage.RUNNING_ALLREDUCE:
            began_data = time.perf_counter()
        time.sleep(POLL)
    data = 0.0 if began_data is None else time.perf_counter() - began_data
    if control.exception() is not None:
        return data, False
    group = control.result()
    return data, group is not None and len(group) == group_size
