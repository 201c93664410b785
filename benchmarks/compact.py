"""Updates as integers of a few bits: their bytes, their CPU time, and what they do to the accuracy.

    python benchmarks/compact.py bytes cpu compressors     # seconds to minutes
    python benchmarks/compact.py accuracy target           # hours; with --quick minutes, on digits

bytes        what a peer sends in an iteration, in models: `mar` and FedAvg with every wire
cpu          one aggregation on the virtual network, beside the same in fp32: CPU seconds, in turns, medians
compressors  hivemind's own compressors on the same vectors: bytes, error of the mean, whether peers end on one result
accuracy     the last test of `marfl reproduce`'s schedules beside fp32, all peers and half of them, three seeds
target       bytes and virtual seconds to an accuracy over links, beside FedAvg and MAR-FL as published in fp32
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marfl.config import load
from marfl.errors import BrokenPromise
from marfl.learn.agreement import Agreement
from marfl.learn.local_work import LocalWork
from marfl.learn.small_integers import IntegerUpdates, SmallIntegers
from marfl.learn.worker import keep_freed_memory
from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.cost import cost
from marfl.plan.grid import plan
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Roster
from marfl.sim.engine import Simulation
from marfl.state import Snapshot
from marfl.techniques.fedavg import FedAvg
from marfl.wire.packing import IntegerWire, integer_wire

PEERS, GROUP = 125, 5
MODELS = {"the paper's CNN": 1_199_882, "20NG's head": 56_828}
WIRES = (("fp32", None), ("int8", None), ("int4", 8), ("int4", None))
LOCAL = Agreement(LocalWork(), momentum="local")


def name_of(wire: str, down: int | None) -> str:
    return f"{wire}/{down}" if down else wire


# --- bytes ---


def show_bytes() -> None:
    """Models that a peer sends in an iteration among 125 in groups of 5, scales and all."""
    print(f"{PEERS} peers in groups of {GROUP}: models sent by a peer in an iteration, payload")
    for title, length in MODELS.items():
        print(f"  {title:16}" + "".join(f"{name_of(*wire):>10}" for wire in WIRES) + "   masked int8   masked int4")
        for exchange in ("grid", "chunked", "full", "fedavg"):
            sizes = [_models(exchange, length, integer_wire(*wire)) for wire in WIRES]
            line = "".join(f"{size:10.3f}" for size in sizes)
            if exchange != "fedavg":
                masked = [_models(exchange, length, integer_wire(f"masked-{each}", None)) for each in ("int8", "int4")]
                line += "".join(f"{size:14.3f}" for size in masked)
            print(f"    {exchange:14}{line}")


def _models(exchange: str, length: int, wire: IntegerWire | None) -> float:
    if exchange == "fedavg":
        return FedAvg(wire).cost(PEERS, length).bytes_per_peer / (4 * length)
    return cost(exchange, plan(PEERS, GROUP), length, wire).bytes_per_peer / (4 * length)


# --- CPU ---


def show_cpu(peers: int = 25, length: int = MODELS["the paper's CNN"], turns: int = 5) -> None:
    """One aggregation from the announcements to the commit, beside fp32; the first of each swarm is not counted."""
    keep_freed_memory()
    torch.set_num_threads(1)
    rows = torch.randn(peers, length, generator=torch.Generator().manual_seed(0)) * 1e-3
    swarms = {wire: TimedSwarm(rows, *wire) for wire in WIRES}
    taken: dict[Any, list[float]] = {wire: [] for wire in WIRES}
    for turn in range(turns + 2):  # the first finds the scales, the second warms up
        for wire, swarm in swarms.items():
            seconds = swarm.iterate()
            if turn > 1:
                taken[wire].append(seconds)
    usual = statistics.median(taken["fp32", None])
    print(f"CPU seconds of an aggregation, {peers} peers × {length:,} parameters on the virtual network, grid")
    for wire, seconds in taken.items():
        median = statistics.median(seconds)
        print(f"  {name_of(*wire):8}{median:8.3f}{median / usual:8.2f} × fp32")


class TimedSwarm:
    """Peers of one wire on a virtual network of their own."""

    def __init__(self, rows: Tensor, wire: str, down: int | None) -> None:
        network, integers = VirtualNetwork(log=False), integer_wire(wire, down)
        self.rows, self.small = rows, SmallIntegers(LOCAL, integers, 0) if integers else None
        start = (self.small or LOCAL).start(torch.zeros(rows.shape[1]))
        settings = Settings(group_size=GROUP, wire=wire, wire_down=down)
        names = [f"peer{index}" for index in range(len(rows))]
        record = genesis(start, tuple((name, index) for index, name in enumerate(names)))
        self.people = [
            Participant(network.join(name), settings, index, bytes(32), start, record, self._advance)
            for index, name in enumerate(names)
        ]
        self.updates = [IntegerUpdates(self.small, 0, index) for index in range(len(rows))] if self.small else []

    def _advance(self, state: Snapshot, mean: Tensor, roster: Roster) -> Snapshot:
        if self.small is None:
            return LOCAL.advance(state, mean)
        return self.small.advance(state, mean, roster.weight, roster.contributions)

    def iterate(self) -> float:
        """CPU seconds of one iteration of all peers."""
        began = time.process_time()
        run_virtual(self._iterate())
        seconds = time.process_time() - began
        if len({peer.state.hash for peer in self.people}) != 1:
            raise BrokenPromise("not all peers hold one committed model")
        return seconds

    async def _iterate(self) -> None:
        await asyncio.gather(*(peer.run_iteration(self._mine(peer)) for peer in self.people))

    def _mine(self, peer: Participant) -> Contribution:
        mine = Contribution(peer.record.hash, self.rows[peer.index])
        if self.small is None:
            return mine
        updates, standing = self.updates[peer.index], peer.standing
        updates.settle(standing.decisions)
        quantise = partial(updates.quantise, updates.sender(standing.state, standing.chain))
        return Contribution(mine.base, mine.delta, quantise=quantise)


# --- hivemind's compressors ---


def show_compressors(peers: int = 8, length: int = 2**20) -> None:
    """Every peer's vector compressed on its way to whoever adds it up, and the mean on its way back."""
    from hivemind.compression import serialize_torch_tensor as packed
    from hivemind.proto.runtime_pb2 import CompressionType

    rows = torch.randn(peers, length, generator=torch.Generator().manual_seed(1)) * 1e-3
    exact = rows.double().mean(0)
    print(f"the mean of {peers} vectors of {length:,} values: bytes a value up and down, error of the mean")
    for name in ("FLOAT16", "UNIFORM_8BIT", "QUANTILE_8BIT", "BLOCKWISE_8BIT"):
        kind = CompressionType.Value(name)
        try:
            sent = [packed(row.clone(), kind) for row in rows]
            mean = torch.stack([_opened(each, name) for each in sent]).mean(0)
            # hivemind's reducer sends each peer the difference to what that peer had: everybody rounds another one
            back = [packed(mean - row, kind) for row in rows]
        except (ImportError, ValueError, RuntimeError) as error:
            print(f"  hivemind {name:17} not here: {str(error).splitlines()[0][:60]}")
            continue
        held = [row + _opened(each, name) for row, each in zip(rows, back, strict=True)]
        error = float((held[0].double() - exact).norm() / exact.norm())
        sizes = (len(sent[0].buffer) / length, len(back[0].buffer) / length)
        same = all(torch.equal(held[0], other) for other in held)
        print(_line(f"hivemind {name}", *sizes, error, same))
    for wire in WIRES[1:]:
        print(_line(f"marfl {name_of(*wire)}", *_ours(rows, exact, *wire)))


def _opened(message: Any, kind: str) -> Tensor:
    """A compressed vector. hivemind's own reading of a codebook does not run on numpy 2, so it is read here."""
    from hivemind.compression import deserialize_torch_tensor

    if kind not in ("UNIFORM_8BIT", "QUANTILE_8BIT"):
        return deserialize_torch_tensor(message)
    size = int(np.frombuffer(message.buffer, count=1, dtype=np.int64)[0])
    codebook = np.frombuffer(message.buffer, offset=8, count=size, dtype=np.float32)
    return torch.from_numpy(codebook[np.frombuffer(message.buffer, offset=8 + 4 * size, dtype=np.uint8)])


def _line(name: str, up: float, down: float, error: float, same: bool) -> str:
    return f"  {name:26}{up:8.3f}{down:8.3f}{error:10.4f}   {'one result' if same else 'peers differ'}"


def _ours(rows: Tensor, exact: Tensor, wire: str, down: int | None) -> tuple[float, float, float, bool]:
    """Bytes a value to whoever adds it up and back, and the error once the scales are known; with feedback, of sums."""
    swarm, peers = TimedSwarm(rows, wire, down), len(rows)
    swarm.iterate()
    before = swarm.people[0].state.vectors["theta"].double()
    swarm.iterate()
    moved = swarm.people[0].state.vectors["theta"].double() - before
    found = integer_wire(wire, down)
    assert found is not None
    length = rows.shape[1]
    sizes = found.partial(1, peers).size(length) / length, found.result(peers).size(length) / length
    return *sizes, float((moved - exact).norm() / exact.norm()), len({p.state.hash for p in swarm.people}) == 1


# --- accuracy ---

SCHEDULES = {
    "mnist": {"task": "mnist", "batch": 64, "iterations": 100},
    "20ng": {"task": "20ng", "batch": 16, "iterations": 100},
    "digits": {"task": "digits", "batch": 16, "iterations": 150},
}
PUBLISHED = {"semantics": "paper"}  # MAR-FL as its authors run it


def schedules(quick: bool) -> dict[str, dict[str, Any]]:
    return {"digits": SCHEDULES["digits"]} if quick else SCHEDULES


def simulated(task: dict[str, Any], **more: Any) -> Simulation:
    """A run of 125 peers, to its end."""
    given = {"peers": PEERS, "group_size": GROUP, "engine": "fast", "test_every": 5} | task | more
    simulation = Simulation(load(overrides=given))
    for _ in simulation.rows():
        pass
    return simulation


def show_accuracy(quick: bool, seeds: int) -> None:
    """The accuracy at the end, in points, and how far each wire is from fp32 on average."""
    for title, task in schedules(quick).items():
        for share in (1.0, 0.5):
            usual: list[float] = []
            for wire, down in WIRES:
                more = {"wire": wire, "wire_down": down, "churn.participation": share}
                runs = (simulated(task, seed=seed, **more).progress for seed in range(seeds))
                found = [100 * float(run.final_accuracy or 0) for run in runs]
                usual = usual or found
                gap = float(np.mean(found) - np.mean(usual))
                shown = " ".join(f"{each:6.2f}" for each in found)
                print(f"  {title:7} {share:4.0%} of peers  {name_of(wire, down):7} {shown}   {gap:+.2f}", flush=True)


# --- to a target ---

TARGETS = {"mnist": 0.9, "20ng": 0.5, "digits": 0.85}


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "FedAvg fp32", {"technique": "fedavg"}
    yield "MAR-FL as published", PUBLISHED
    for wire, down in WIRES:
        yield f"mar grid {name_of(wire, down)}", {"wire": wire, "wire_down": down}


def show_target(quick: bool) -> None:
    """Bytes and virtual time until a test reaches the target, for everybody together."""
    for title, task in schedules(quick).items():
        for links in ("wifi", "lte", "nb-iot"):
            print(f"  {title} to {TARGETS[title]:.0%} over {links}")
            for name, way in ways():
                more = {"links": links, "target_accuracy": TARGETS[title]} | way
                progress = simulated(task, **more).progress
                reached = progress.reached
                if not reached:
                    print(f"    {name:22} not reached", flush=True)
                    continue
                seconds, size = reached["seconds_to_target"], reached["bytes_to_target"]
                print(f"    {name:22}{size / 1e9:10.3f} GB{seconds / 3600:12.3f} h", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("bytes", "cpu", "compressors", "accuracy", "target"))
    parser.add_argument("--quick", action="store_true", help="digits alone")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    shows = {
        "bytes": show_bytes, "cpu": show_cpu, "compressors": show_compressors,
        "accuracy": partial(show_accuracy, given.quick, given.seeds), "target": partial(show_target, given.quick),
    }  # fmt: skip
    for what in given.what:
        shows[what]()


if __name__ == "__main__":
    main()
