"""How much memory a real peer takes while it averages, over the memory it has before.

    python benchmarks/memory.py [--iterations 500] [--peers 3] [--parameters 5000000] [--exchange grid] [--audit 0]

Every peer is a process with a `marfl.Peer` on loopback. Its base is what is resident when everybody has joined and
nothing was averaged yet: the model and the agreed state are in it. From then on the kernel keeps the highest value
(`VmHWM`). Promised: base plus 4 models at most, however many iterations. Exit code 1 where that is broken.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from marfl.reproduce.real_peers import reports

PATIENCE = 300.0  # seconds for everybody to come to a barrier
PROMISED = 4.0  # models over the base
MIB = 2**20
RESET_PEAK = "5"  # what /proc/…/clear_refs takes to begin a new `VmHWM`


@dataclass(frozen=True)
class Setting:
    """One swarm."""

    peers: int
    parameters: int
    iterations: int
    exchange: str
    audit: float


@dataclass(frozen=True)
class Memory:
    """What one peer took, in bytes."""

    index: int
    base: int
    peak: int
    after: list[int]  # resident after each iteration
    daemon: int  # its p2pd at the end: not Python's, and no model stays in it
    whole: int  # iterations in which everybody was averaged


def main() -> int:
    setting = _arguments()
    model = 4 * setting.parameters
    print(f"{setting.peers} peers, {setting.parameters:,} parameters ({model / MIB:.1f} MiB), "
          f"{setting.iterations} iterations, {setting.exchange}")  # fmt: skip
    print("peer      base      peak  (peak − base) ÷ model   after iteration: first tenth  last tenth    p2pd   whole")
    found = sorted(reports(_peer, setting.peers, setting), key=lambda memory: memory.index)
    for memory in found:
        tenth = max(1, len(memory.after) // 10)
        first, last = (statistics.median(part) for part in (memory.after[:tenth], memory.after[-tenth:]))
        print(f"{memory.index:4}  {memory.base / MIB:6.0f} MiB {memory.peak / MIB:5.0f} MiB"
              f"  {_over(memory, model):21.2f}"
              f"  {first / MIB:25.0f} MiB  {last / MIB:6.0f} MiB  {memory.daemon / MIB:3.0f} MiB"
              f"  {memory.whole} of {setting.iterations}")  # fmt: skip
    kept = all(_over(memory, model) <= PROMISED for memory in found)
    print(f"promised: at most {PROMISED:g} models over the base: {'kept' if kept else 'BROKEN'}")
    return 0 if kept else 1


def _over(memory: Memory, model: int) -> float:
    return (memory.peak - memory.base) / model


def _peer(index: int, setting: Setting, barrier: Barrier, queue: Queue[Any], address: Queue[Any]) -> None:
    import torch

    import marfl

    torch.set_num_threads(1)
    model = torch.nn.Linear(setting.parameters, 1, bias=False)
    join = [] if index == 0 else address.get(timeout=PATIENCE)
    options = {"expected": setting.peers, "exchange": setting.exchange, "audit": setting.audit}
    with marfl.Peer(model, run="bench", index=index, join=join, **options) as peer:
        if index == 0:
            for _ in range(setting.peers - 1):
                address.put(peer.addresses)
        barrier.wait(PATIENCE)
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        base, after, whole = _status("VmRSS"), [], 0
        for _ in range(setting.iterations):
            with torch.no_grad():
                model.weight.add_(0.001 * (index + 1))
            whole += len(peer.aggregate().present) == setting.peers
            after.append(_status("VmRSS"))
        daemon = _status("VmRSS", _child())
        queue.put(Memory(index, base, _status("VmHWM"), after, daemon, whole))
        barrier.wait(PATIENCE)


def _status(field: str, process: str = "self") -> int:
    """Bytes, as the kernel counts them."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _child() -> str:
    """The daemon that this process has started."""
    started = [each for task in Path("/proc/self/task").iterdir() for each in (task / "children").read_text().split()]
    return started[0]


def _arguments() -> Setting:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--exchange", choices=["grid", "chunked", "full"], default="grid")
    parser.add_argument("--audit", type=float, default=0.0)
    given = parser.parse_args()
    return Setting(given.peers, given.parameters, given.iterations, given.exchange, given.audit)


if __name__ == "__main__":
    sys.exit(main())
