"""What an aggregation costs: the whole protocol on the virtual network against a plain `torch.mean`.

    python benchmarks/aggregate.py [--return-memory] [--audit 0.01]

"plain" is `torch.mean` over the stacked [peers, parameters] tensor, copied back to every peer, with the same finite
check and the same hash for each. The protocol does all that a swarm does: announce, seal, exchange, commit. Both run on
one thread that never waits, so CPU seconds are what the clock shows on an idle machine; they take turns, medians count,
and a ratio is against the plain line above it. Memory is the peak of a fresh process, the contributions included, per
byte of contributions. `--return-memory` leaves malloc as it is; without it neither side has its pages cleared by the
kernel again and again, which costs more than the aggregation and is never twice the same.

`--audit RATE` compares `grid` with itself instead: as it is, with audits at this rate, with quorums that bear no liar,
and where nobody signs or verifies anything (which is no protocol, only what signatures cost). Then it counts what peers
say beside values.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marfl.byte_kinds import ByteKind
from marfl.errors import BrokenPromise
from marfl.learn.worker import keep_freed_memory
from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import Outcome, Participant, genesis
from marfl.protocol.protocol_settings import EXCHANGES, Settings
from marfl.protocol.roster import Roster
from marfl.state import Snapshot, all_finite, vector_hash

LAYOUT = bytes(32)
EXPECTED = (ByteKind.PAYLOAD, ByteKind.CONTROL, ByteKind.MASKS)  # when nobody fails
TIME_LIMIT, MEMORY_LIMIT = 3.0, 2.5  # what `grid` on 125 peers must stay below


@dataclass(frozen=True)
class Case:
    """One size to measure."""

    peers: int
    parameters: int
    group_size: int
    turns: int = 1

    @property
    def contributions(self) -> int:
        """Bytes of all the peers' updates."""
        return 4 * self.peers * self.parameters

    def deltas(self) -> Tensor:
        return torch.randn(self.peers, self.parameters, generator=torch.Generator().manual_seed(0))


CASES = (Case(125, 1_199_882, 5, turns=4), Case(1_000, 57_000, 10, turns=2))  # the paper's CNN; its 20NG head, rounded


@dataclass(frozen=True)
class Seconds:
    """How long something took: of this process's CPU, and by the clock."""

    cpu: float
    wall: float


@contextmanager
def stopwatch() -> Iterator[Callable[[], Seconds]]:
    """Time the body; what it gives tells the seconds afterwards."""
    began = time.process_time(), time.perf_counter()
    taken: list[Seconds] = []
    yield lambda: taken[0]
    taken.append(Seconds(time.process_time() - began[0], time.perf_counter() - began[1]))


@dataclass(frozen=True)
class Run:
    """One iteration of a whole swarm, and what all its peers sent."""

    seconds: Seconds
    payload: int
    control: int
    messages: int
    mean: Tensor
    shown: int = 0  # to auditors
    masks: int = 0  # of the control bytes: keys, shares and signatures of masks


def replace_by_mean(state: Snapshot, mean: Tensor, _: Roster) -> Snapshot:
    """The agreed state is the mean itself, so that no other vector is in the bill."""
    return Snapshot(state.version + 1, {"theta": mean}, {})


def aggregate(
    deltas: Tensor, group_size: int, exchange: str, wire: str = "fp32", *, signed: bool = True, **terms: Any
) -> Run:
    """One iteration of the protocol, from the announcements to the commit; each row is one peer's update."""
    network = VirtualNetwork(log=False)
    settings = Settings(group_size=group_size, exchange=exchange, wire=wire, **terms)
    start = Snapshot(0, {"theta": torch.zeros(deltas.shape[1])}, {})
    names = [f"peer{index:05}" for index in range(len(deltas))]
    record = genesis(start, tuple((name, index) for index, name in enumerate(names)))
    swarm = [
        Participant(network.join(name), settings, index, LAYOUT, start, record, replace_by_mean)
        for index, name in enumerate(names)
    ]

    for peer in swarm if not signed else ():
        peer.net.sign = lambda _: bytes(64)  # type: ignore[method-assign]
        peer.net.verify = lambda *_: True  # type: ignore[method-assign]

    async def iterate() -> list[Outcome]:
        return await asyncio.gather(
            *(peer.run_iteration(Contribution(record.hash, delta)) for peer, delta in zip(swarm, deltas, strict=True))
        )

    with stopwatch() as seconds:
        outcomes = run_virtual(iterate())
    if {outcome.holds and outcome.hash for outcome in outcomes} != {swarm[0].state.hash}:
        raise BrokenPromise("not all peers hold one committed model")
    sent = [peer.net.sent for peer in swarm]
    usual = (*EXPECTED, ByteKind.REPAIR) if settings.audit else EXPECTED  # what auditors are shown is repair
    if any(count for ledger in sent for kind, count in ledger.by_kind().items() if kind not in usual):
        raise BrokenPromise("something was repaired or synced although nobody failed")
    names = ("payload", "control", "messages", "masks", "repair")
    payload, control, messages, masks, repair = (sum(getattr(ledger, name) for ledger in sent) for name in names)
    return Run(seconds(), payload, control + masks, messages, swarm[0].state.vectors["theta"], repair, masks)


def plain(deltas: Tensor, homes: Tensor) -> tuple[Seconds, Tensor]:
    """The mean, copied back to every peer's vector, checked and hashed for each; and the seconds it took."""
    with stopwatch() as seconds:
        mean = torch.mean(deltas, 0)
        homes.copy_(mean)
        good = [all_finite(home) for home in homes]
        hashes = {vector_hash(home) for home in homes}
    if not all(good) or len(hashes) != 1:
        raise BrokenPromise("the plain mean is not the same finite vector everywhere")
    return seconds(), mean


def take_turns(case: Case) -> tuple[list[Seconds], dict[str, list[Run]]]:
    """Every candidate in every turn, so that a busy machine hits them alike; the first turn of several warms up."""
    deltas = case.deltas()
    homes = torch.zeros_like(deltas)
    plain_seconds: list[Seconds] = []
    runs: dict[str, list[Run]] = {exchange: [] for exchange in EXCHANGES}
    for _ in range(case.turns):
        for exchange in EXCHANGES:
            seconds, mean = plain(deltas, homes)
            run = aggregate(deltas, case.group_size, exchange)
            torch.testing.assert_close(run.mean, mean, rtol=1e-4, atol=1e-6)
            plain_seconds.append(seconds)
            runs[exchange].append(run)
            gc.collect()  # a swarm is full of cycles: let it go before the next one's turn
    return plain_seconds[len(EXCHANGES) :], {exchange: found[1:] for exchange, found in runs.items()}


def median(seconds: Iterable[Seconds]) -> Seconds:
    taken = list(seconds)
    return Seconds(statistics.median(s.cpu for s in taken), statistics.median(s.wall for s in taken))


def memory_in(status: str) -> int:
    """A line of this process's memory account in bytes: VmRSS is what it has, VmHWM the most it ever had."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[status].split()[0])


def peak_memory(case: Case, exchange: str | None) -> float:
    """The most memory a fresh process takes for the contributions and one aggregation, per byte of contributions."""
    torch.set_num_threads(1)
    tiny = Case(2, 1, 2)
    aggregate(tiny.deltas(), 2, "grid")  # whatever is loaded on first use is not the aggregation's
    before = memory_in("VmRSS")
    deltas = case.deltas()
    if exchange is None:
        plain(deltas, torch.zeros_like(deltas))
    else:
        aggregate(deltas, case.group_size, exchange)
    return (memory_in("VmHWM") - before) / case.contributions


def in_fresh_process(call: Callable[[Case, str | None], float], case: Case, exchange: str | None) -> float:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, case, exchange).result()


def report(case: Case) -> None:
    """Measure one case and print its table."""
    plain_seconds, runs = take_turns(case)
    base = median(plain_seconds)
    memory = in_fresh_process(peak_memory, case, None)
    print(f"{case.peers:,} peers × {case.parameters:,} parameters, groups of {case.group_size}")
    print("             CPU s   ratio  by clock     payload     control  (share)  messages   memory")
    print(f"  {'plain':8} {base.cpu:7.3f}    1.00      1.00 {memory:48.2f} ×", flush=True)
    for exchange, found in runs.items():
        mine, run = median(run.seconds for run in found), found[0]
        memory = in_fresh_process(peak_memory, case, exchange)
        times = f"{mine.cpu:7.3f} {mine.cpu / base.cpu:7.2f} {mine.wall / base.wall:9.2f}"
        share = f"({run.control / (run.control + run.payload):.2%})"
        sent = f"{run.payload / 1e6:8.1f} MB {run.control / 1e6:8.2f} MB {share:>8} {run.messages:9,}"
        print(f"  {exchange:8} {times} {sent} {memory:8.2f} ×", flush=True)
        if (case, exchange) == (CASES[0], "grid"):
            kept = "kept" if mine.cpu <= TIME_LIMIT * base.cpu and memory <= MEMORY_LIMIT else "BROKEN"
            print(f"    promised: at most {TIME_LIMIT:g} times the time and {MEMORY_LIMIT:g} × the memory: {kept}")


def compare(case: Case, rate: float, turns: int = 5) -> None:
    """What signatures and audits cost: the same aggregation in turns, the first of which warms up."""
    deltas = case.deltas()
    variants: dict[str, dict[str, Any]] = {
        "as it is": {}, f"audit = {rate:g}": {"audit": rate}, "liars = 0": {"liars": 0}, "unsigned": {"signed": False}
    }  # fmt: skip
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for _ in range(turns + 1):
        for name, terms in variants.items():
            runs[name].append(aggregate(deltas, case.group_size, "grid", **terms))
            gc.collect()
    print(f"{case.peers:,} peers × {case.parameters:,} parameters, groups of {case.group_size}, grid, {turns} turns")
    print("                  CPU s   ratio   lowest       bytes   control bytes of a peer")
    base, least = (median_cpu(runs["as it is"]), min(run.seconds.cpu for run in runs["as it is"][1:]))
    first = runs["as it is"][0]
    for name, found in runs.items():
        run, low = found[0], min(run.seconds.cpu for run in found[1:])
        total = (run.payload + run.control + run.shown) / (first.payload + first.control + first.shown)
        print(f"  {name:14} {median_cpu(found):6.3f} {median_cpu(found) / base:7.2f} {low / least:8.2f} "
              f"{total - 1:+11.2%} {run.control / case.peers:16,.0f}", flush=True)  # fmt: skip


def talk() -> None:
    """What peers say to each other beside values, where nobody fails or lies: a few values will do."""
    print("control and mask bytes of a peer in an iteration, groups of 5, grid")
    for peers in (16, 125):
        for wire in ("fp32", "masked"):
            run = aggregate(Case(peers, 600, 5).deltas(), 5, "grid", wire)
            print(f"  {peers:4} peers, {wire:6} {(run.control - run.masks) / peers:8,.0f} {run.masks / peers:8,.0f}")


def median_cpu(runs: list[Run]) -> float:
    """Of all runs but the first."""
    return median(run.seconds for run in runs[1:]).cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--return-memory", action="store_true")
    parser.add_argument("--audit", type=float, metavar="RATE")
    arguments = parser.parse_args()
    if not arguments.return_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    if arguments.audit is not None:
        compare(CASES[0], arguments.audit)
        return talk()
    for case in CASES:
        report(case)
    return None


if __name__ == "__main__":
    main()
