"""Updates as integers of a few bits: their bytes, their CPU time, and what they do to the accuracy.

    python benchmarks/compact.py bytes cpu compressors         # seconds to minutes
    python benchmarks/compact.py accuracy target               # minutes: MNIST with one hidden layer
    python benchmarks/compact.py accuracy --tasks mnist 20ng   # hours: the paper's networks
    python benchmarks/compact.py swarm                         # half an hour, as root

bytes        what a peer sends in an iteration, in models: `mar` and FedAvg with every wire
cpu          one aggregation on the virtual network, beside the same in fp32: CPU seconds, in turns, medians
compressors  hivemind's own compressors on the same vectors: bytes, error of the mean, whether peers end on one result;
             its blockwise one needs bitsandbytes
swarm        8 real peers with 25 million parameters, on links of 100 Mbit/s in namespaces and on unlimited ones
accuracy     the last test of `marfl reproduce`'s schedules beside fp32, all peers and half of them, three seeds
target       bytes and virtual seconds to an accuracy over links, beside FedAvg and MAR-FL as published in fp32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from marfl.config import load
from marfl.errors import BrokenPromise
from marfl.learn.agreement import Agreement
from marfl.learn.local_work import LocalWork
from marfl.learn.small_integers import IntegerUpdates, SmallIntegers
from marfl.learn.tasks.mnist import Mnist
from marfl.learn.worker import keep_freed_memory
from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.cost import cost
from marfl.plan.grid import plan
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Roster
from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import SCALES, Crowd
from marfl.reproduce.runner import bundles, compute
from marfl.state import Snapshot
from marfl.techniques.fedavg import FedAvg
from marfl.wire.packing import IntegerWire, integer_wire

PEERS, GROUP = 125, 5
MODELS = {"the paper's CNN": 1_199_882, "20NG's head": 56_828}
WIRES = (("fp32", None), ("int8", None), ("int4", 8), ("int4", None))
LINKS = ("wifi", "lte", "nb-iot")
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
            return LOCAL.advance(state, mean, roster.contributions)
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

    if kind == "FLOAT16":
        return deserialize_torch_tensor(message)
    numbers = 2 if kind == "BLOCKWISE_8BIT" else 1  # the largest values of blocks, and the codebook; or that alone
    sizes = np.frombuffer(message.buffer, count=numbers, dtype=np.int64)
    floats = np.frombuffer(message.buffer, offset=8 * numbers, count=int(sizes.sum()), dtype=np.float32)
    places = np.frombuffer(message.buffer, offset=8 * numbers + floats.nbytes, dtype=np.uint8)
    values = floats[-sizes[-1] :][places]
    if kind == "BLOCKWISE_8BIT":
        values = values * np.repeat(floats[: sizes[0]], -(-len(values) // int(sizes[0])))[: len(values)]
    return torch.from_numpy(values)


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


# --- real swarms ---

LIMITS = ("100mbit", "none")  # of a peer's link, each way
LONGEST = 900.0  # seconds of one swarm: one that hangs is not waited for


def show_swarm(turns: int, limits: list[str], iterations: int) -> dict[str, Any]:
    """Seconds of an aggregation of 8 real peers with 25 million parameters: on limited links, and on none.

    In each turn every wire has a swarm of its own, so that all of them see the same machine; medians over the turns.
    All settings are the usual ones. The first iteration of a swarm does not count; of the others the median does.
    """
    kept: dict[str, Any] = {}
    for limit in limits:
        where = f"links of {limit}" if limit != "none" else "no limit"
        print(f"8 real peers, 25 million parameters, {where}")
        taken: dict[tuple[str, int | None], list[float]] = {wire: [] for wire in WIRES}
        payload = {wire: _turn(limit, wire, iterations, taken[wire]) for _ in range(turns) for wire in WIRES}
        usual = statistics.median(taken["fp32", None])
        for wire, seconds in taken.items():
            median = statistics.median(seconds)
            all_of_them = " ".join(f"{each:.1f}" for each in seconds)
            print(f"  {name_of(*wire):8}{median:8.2f} s  {usual / median:5.2f} × faster than fp32"
                  f"   {payload[wire] / 8 / 1e6:7.1f} MB of payload a peer   ({all_of_them})", flush=True)  # fmt: skip
            kept[f"{where} {name_of(*wire)}"] = seconds
    return kept


def _turn(limit: str, wire: tuple[str, int | None], iterations: int, taken: list[float]) -> float:
    """One swarm of this wire: notes the seconds of an iteration; the payload of all peers in it."""
    from swarm import ours

    name, down = wire
    bits = ["--wire", name, *(["--wire-down", str(down)] if down else [])]
    link = ["--bandwidth", limit] if limit != "none" else []
    found = ours(8, 25.0, iterations, *link, *bits, longest=LONGEST)
    taken.append(found.seconds)
    print(f"    {name_of(*wire)}: {found.seconds:.1f} s", *found.checks, sep="\n      ", flush=True)
    return found.payload


# --- accuracy, and the way to a target ---


class SmallMnist(Mnist):
    """MNIST by one hidden layer: a run takes seconds, where the paper's CNN takes minutes."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


LAPTOP = SCALES["laptop"]
CROWD = Crowd(PEERS, GROUP)
SCHEDULES: dict[str, dict[str, Any]] = {
    "small": {"task": "compact:SmallMnist", "batch": 64, "iterations": 100, "engine": "fast", "test_every": 5},
    "mnist": LAPTOP.vision.settings(CROWD) | {"test_every": 5},
    "20ng": LAPTOP.text.settings(CROWD) | {"test_every": 5},
    "digits": {"task": "digits", "batch": 16, "iterations": 150, "engine": "fast", "test_every": 5},
}
TARGETS = {"small": 0.9, "mnist": LAPTOP.vision.target, "20ng": LAPTOP.text.target, "digits": 0.85}
PUBLISHED = {"semantics": "paper"}  # MAR-FL as its authors run it


def ran(archive: Archive, task: str, **more: Any) -> Mapping[str, Any]:
    """The summary of a run of 125 peers; what was run before is not run again, and one that was interrupted goes on."""
    config = load(overrides={**SCHEDULES[task], **CROWD.settings(), "workers": 1, **more})
    for bundle in bundles(archive, [config]):
        compute(archive, bundle, lambda seconds: None)
    summary = archive.summary(config)
    assert summary is not None
    return summary


def show_accuracy(archive: Archive, tasks: list[str], seeds: int) -> dict[str, Any]:
    """The accuracy at the end, in points, and how far each wire is from fp32 on average."""
    kept: dict[str, Any] = {}
    for task in tasks:
        for share in (1.0, 0.5):
            usual: list[float] = []
            for wire, down in WIRES:
                more = {"wire": wire, "wire_down": down, "churn.participation": share}
                found = [100 * ran(archive, task, seed=seed, **more)["final_accuracy"] for seed in range(seeds)]
                usual = usual or found
                gap = float(np.mean(found) - np.mean(usual))
                shown = " ".join(f"{each:6.2f}" for each in found)
                print(f"  {task:7} {share:4.0%} of peers  {name_of(wire, down):7} {shown}   {gap:+.2f}", flush=True)
                kept[f"{task} {share:.0%} {name_of(wire, down)}"] = found
    return kept


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "FedAvg fp32", {"technique": "fedavg"}
    yield "MAR-FL as published", PUBLISHED
    for wire, down in WIRES:
        yield f"mar grid {name_of(wire, down)}", {"wire": wire, "wire_down": down}


def show_target(archive: Archive, tasks: list[str], seeds: int) -> dict[str, Any]:
    """Bytes and virtual time until a test reaches the target, for everybody together; means over the seeds.

    A wire is trained once; what travels over which links is computed apart (`marfl.reproduce.shared`).
    """
    kept: dict[str, Any] = {}
    for task in tasks:
        print(f"  {task} to {TARGETS[task]:.0%}" + "".join(f"{links:>12}" for links in LINKS))
        for name, way in ways():
            runs = {
                links: [ran(archive, task, seed=seed, links=links, target_accuracy=TARGETS[task], **way)
                        for seed in range(seeds)]
                for links in LINKS
            }  # fmt: skip
            if any(run["bytes_to_target"] is None for each in runs.values() for run in each):
                print(f"    {name:22} not reached", flush=True)
                continue
            size = float(np.mean([run["bytes_to_target"] for run in runs[LINKS[0]]]))
            hours = {links: np.mean([r["seconds_to_target"] for r in each]) / 3600 for links, each in runs.items()}
            taken = "".join(f"{each:10.3f} h" for each in hours.values())
            print(f"    {name:22}{size / 1e9:9.3f} GB{taken}", flush=True)
            kept[f"{task} {name}"] = {"bytes": size, "hours": hours}
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("bytes", "cpu", "compressors", "swarm", "accuracy", "target"))
    parser.add_argument("--tasks", nargs="+", choices=tuple(SCHEDULES), default=["small"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="of each wire, in `swarm`")
    parser.add_argument("--limits", nargs="+", choices=LIMITS, default=LIMITS, help="of the links, in `swarm`")
    parser.add_argument("--iterations", type=int, default=2, help="of a swarm; the first does not count")
    parser.add_argument("--runs", type=Path, default=Path("runs/compact"), help="where finished runs are kept")
    parser.add_argument("--results", type=Path, help="a JSON file that what was found is added to")
    given = parser.parse_args()
    archive = Archive(given.runs)
    shows: dict[str, Callable[[], dict[str, Any] | None]] = {
        "bytes": show_bytes, "cpu": show_cpu, "compressors": show_compressors,
        "swarm": partial(show_swarm, given.turns, given.limits, given.iterations),
        "accuracy": partial(show_accuracy, archive, given.tasks, given.seeds),
        "target": partial(show_target, archive, given.tasks, given.seeds),
    }  # fmt: skip
    for what in given.what:
        found = shows[what]()
        if found and given.results:
            before = json.loads(given.results.read_text()) if given.results.exists() else {}
            before[what] = before.get(what, {}) | found
            given.results.write_text(json.dumps(before, indent=1) + "\n")


if __name__ == "__main__":
    main()
