"""Real peers against hivemind's own averager, side by side on this machine.

    python benchmarks/swarm.py [--all | --only 27,1.2]

Prints seconds per aggregation in steady state for 8 peers and a 1.2-million-parameter model, beside hivemind's
`DecentralizedAverager` (one group of 8, and three rounds of groups of 2), and beside the time that our bytes would
take at the speed of one p2pd stream. By default hivemind gets a few steps at one matchmaking time; `--all` looks for
the smallest one at which its groups form 20 times out of 20, and adds 27 peers and 25 million parameters (many
minutes). `--only` runs one of our own swarms: so many peers, so many million parameters (1.2 or 25).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import library_peers

from marfl.net.base import Parcel, Tag
from marfl.net.libp2p.connection import Libp2pSettings
from marfl.net.libp2p.transport import Libp2pNet
from marfl.reproduce.hivemind_averager import MATCHMAKING, HivemindSwarm, run
from marfl.reproduce.real_peers import TimedSwarm

SIZES = {1.2: "[660,660,660]", 25.0: "[3400,3400,3400]"}  # million parameters: hidden layers of the synthetic task
STREAM_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Ours:
    """One of our swarms."""

    seconds: float  # of an aggregation: median over iterations of the slowest peer, waiting for others included
    payload: float  # bytes of an iteration, all peers
    summary: dict[str, Any]
    checks: tuple[str, ...] = ()  # what its rows found, the first iteration included: attempts that were lost, and why


def ours(peers: int, million: float, iterations: int, *more: str, longest: float | None = None) -> Ours:
    """Run `marfl swarm`; the first iteration, in which peers get to know each other, does not count."""
    task = ["--task", "synthetic", "--option", "features=512", "--option", f"hidden={SIZES[million]}",
            "--option", f"samples={40 * peers}", "--option", "test_samples=20", "--batch", "1"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = ["swarm", "--peers", str(peers), "--iterations", str(iterations), "--test-every", "1000000"]
        command += ["--out", str(out), "--json", *task, *more]
        command = [sys.executable, "-m", "marfl", *command]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=longest)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    checks = tuple(f"iteration {row['iteration']}: {check}" for row in rows for check in row["checks"])
    rows = rows[1:]
    seconds = statistics.median(row["aggregate_seconds"] for row in rows)
    return Ours(seconds, statistics.median(row["bytes_payload"] for row in rows), json.loads(done.stdout), checks)


async def stream_speed() -> float:
    """Bytes per second of one large message between two peers on loopback."""
    async with Libp2pNet.create() as one, Libp2pNet.create(Libp2pSettings(join=await one.addresses())) as other:
        best = 0.0
        for attempt in range(3):
            begun, tag = time.perf_counter(), Tag("reduce", attempt)
            deadline = one.now() + 60
            sending = one.send(other.me, tag, Parcel(b"", bytes(STREAM_BYTES)), deadline=deadline)
            await asyncio.gather(sending, other.recv(one.me, tag, deadline=other.now() + 60))
            best = max(best, STREAM_BYTES / (time.perf_counter() - begun))
    return best


def show_ours(name: str, found: Ours, speed: float) -> None:
    summary, limit = found.summary, found.payload / speed
    memory = statistics.mean(process["resident_bytes"] for process in summary["processes"]) / 2**20
    ratio = found.seconds / limit
    print(f"{name:44} {found.seconds:8.3f} s  {ratio:.1f} × the {limit:.3f} s of one p2pd stream at full speed")
    print(f"{'':44} {summary['dht_operations_per_peer_iteration']:.1f} DHT operations and "
          f"{summary['control_bytes_per_peer_iteration']:,.0f} control bytes per peer and iteration, "
          f"{memory:,.0f} MiB per peer, {summary['start_seconds']:.1f} s to start")  # fmt: skip


def together(peers: int, million: float, steps: int) -> tuple[float, float]:
    """(seconds, seconds of the data phase) of `marfl.Peer` when all begin at once, as hivemind's peers do."""
    found = library_peers.run(TimedSwarm(peers, int(million * 1e6), steps))
    whole = [step for step in found.steps if step.whole]
    seconds = statistics.median(step.seconds for step in whole)
    data = statistics.median(step.data_seconds for step in whole)
    memory = statistics.mean(found.resident) / 2**20
    name = f"marfl.Peer, {peers} peers, {million:g} million parameters"
    print(f"{name:44} {seconds:8.3f} s  whole {len(whole)} of {steps}, data phase {data:.3f} s, "
          f"{statistics.mean(step.dht for step in whole) / peers:.1f} DHT operations per peer, "
          f"{memory:,.0f} MiB per peer, {found.start_seconds:.1f} s to start")  # fmt: skip
    return seconds, data


def hivemind_at(group_size: int, rounds: int, times: tuple[float, ...], steps: int) -> tuple[float, float]:
    """(seconds, seconds of the data phase) at the first matchmaking time at which every group formed."""
    for matchmaking in times:
        found = run(HivemindSwarm(8, 1_200_000, group_size, rounds, matchmaking, steps))
        formed = [step for step in found if step.formed]
        name = f"hivemind, {rounds} × groups of {group_size}, matchmaking {matchmaking:g} s"
        if not formed:
            print(f"{name:44} not formed the first time")
            continue
        seconds = statistics.median(step.seconds for step in formed)
        data = statistics.median(step.data_seconds for step in formed)
        print(f"{name:44} {seconds:8.3f} s  formed {len(formed)} of {steps}, data phase {data:.3f} s")
        if len(formed) == steps:
            return seconds, data
    return float("nan"), float("nan")


def size(text: str) -> tuple[int, float]:
    """`27,1.2`: peers, and million parameters."""
    peers, _, million = text.partition(",")
    if float(million) not in SIZES:
        raise argparse.ArgumentTypeError(f"{million}: must be one of {', '.join(f'{each:g}' for each in SIZES)}")
    return int(peers), float(million)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every size, and 20 of 20 groups of hivemind's")
    parser.add_argument("--only", type=size, metavar="PEERS,MILLION", help="only our own swarm of this size")
    parser.add_argument("--iterations", type=int, default=12)
    arguments = parser.parse_args()
    speed = asyncio.run(stream_speed())
    print(f"one p2pd stream on loopback: {speed / 1e6:.0f} MB/s")
    if arguments.only:
        peers, million = arguments.only
        name = f"marfl swarm, {peers} peers, {million:g} million parameters"
        show_ours(name, ours(peers, million, arguments.iterations), speed)
        return
    show_ours("marfl swarm, 8 peers, 1.2 million parameters", ours(8, 1.2, arguments.iterations), speed)
    times, steps = (MATCHMAKING, 20) if arguments.all else ((3.0,), 3)
    mine, my_data = together(8, 1.2, 20)
    for group_size, rounds in ((8, 1), (2, 3)):
        seconds, data = hivemind_at(group_size, rounds, times, steps)
        print(f"{'':44} marfl is {seconds / mine:.1f} × faster, "
              f"{data / my_data:.1f} × data phase against data phase")  # fmt: skip
    if arguments.all:
        for peers, million in ((27, 1.2), (8, 25.0)):
            name = f"marfl, {peers} peers, {million:g} million parameters"
            show_ours(name, ours(peers, million, arguments.iterations), speed)


if __name__ == "__main__":
    main()
