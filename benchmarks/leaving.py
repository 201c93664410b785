"""What it costs the others when a peer is killed, says goodbye or hangs: real library peers on loopback.

    python benchmarks/leaving.py [--rounds 3] [--ways SIGSTOP SIGSTOP-leader]

Five processes train for a second each and average, again and again. Then one of them gets a SIGKILL, another time a
SIGTERM (a goodbye), another time a SIGSTOP and a while later a SIGCONT: one that does not lead the next iteration, and
one that does. Printed is by how many seconds the others'
iterations after that are longer than the usual one before, in the same swarm: the first, and the longest of the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

PEERS = 5
STEP = 1.0  # seconds that everybody trains for
BEFORE, AFTER = 6, 6  # iterations that are timed
PATIENCE = 20.0  # ready_timeout: the default
TIMEOUT = 300.0  # seconds for one swarm

PEER = """
import json, sys, time
import torch
import marfl
torch.set_num_threads(1)
folder, index, join, step, peers, patience = json.loads(sys.argv[1])
model = torch.nn.Linear(100, 100)
with marfl.Peer(model, join=join, expected=peers if not index else 0, ready_timeout=patience) as peer:
    with open(f"{folder}/{index}.address", "w") as file:
        print(*peer.addresses, file=file)
    with open(f"{folder}/{index}.rows", "w", buffering=1) as rows:
        while True:
            time.sleep(step)
            with torch.no_grad():
                model.weight.add_(0.01)
            done = peer.aggregate()
            leads = peer._peer._voter.standing.electors[0].id == peer.id
            row = [time.monotonic(), done.iteration, done.status, len(done.present), leads]
            print(json.dumps(row), file=rows)
"""

Row = tuple[float, int, str, int, bool]  # when, iteration, status, present, whether it leads the next one


def rows_of(folder: Path, index: int) -> list[Row]:
    path = folder / f"{index}.rows"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def until(what: str, limit: float) -> Iterator[None]:
    """Look again and again, until the limit."""
    while time.monotonic() < limit:
        yield
        time.sleep(0.05)
    raise SystemExit(f"{what}: not within {TIMEOUT:g} seconds")


@contextmanager
def swarm(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Five peers that have averaged together often enough."""
    processes: list[subprocess.Popen[bytes]] = []
    limit, join = time.monotonic() + TIMEOUT, list[str]()
    try:
        for index in range(PEERS):
            given = json.dumps([str(folder), index, join, STEP, PEERS, PATIENCE])
            with (folder / f"{index}.log").open("w") as log:
                processes.append(subprocess.Popen([sys.executable, "-c", PEER, given], stdout=log, stderr=log))
            for _ in until("the first peer's address", limit) if not index else ():
                if (path := folder / "0.address").exists() and (text := path.read_text()).endswith("\n"):
                    join = text.split()
                    break
        for _ in until("iterations of all five", limit):
            together = [row for row in rows_of(folder, 0) if row[3] == PEERS]
            if len(together) > BEFORE:
                break
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def ends(folder: Path, survivors: list[int]) -> list[float]:
    """When each iteration was over for the last of the survivors that took part in it."""
    last: dict[int, float] = {}
    for index in survivors:
        for when, iteration, status, *_ in rows_of(folder, index):
            if status == "committed":
                last[iteration] = max(when, last.get(iteration, 0.0))
    return [last[iteration] for iteration in sorted(last)]


def lengths(moments: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(moments)]


def leave(how: signal.Signals, *, leader: bool) -> tuple[float, list[float], str]:
    """The usual length of an iteration, and the lengths of those after a peer got this signal; and what came of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with swarm(folder) as processes:
            chosen = struck_one(folder, leader=leader)
            survivors = [index for index in range(PEERS) if index != chosen]
            time.sleep(STEP / 2)  # in the midst of its training
            struck = time.monotonic()
            os.kill(processes[chosen].pid, how)
            limit = struck + TIMEOUT
            for _ in until(f"{AFTER} iterations without one", limit):
                if sum(moment > struck for moment in ends(folder, survivors)) >= AFTER:
                    break
            note = back(processes[chosen], folder, survivors, limit) if how == signal.SIGSTOP else ""
            moments = ends(folder, survivors)
        usual = statistics.median(lengths([moment for moment in moments if moment <= struck][1:]))
        first = max(moment for moment in moments if moment <= struck)
        after = lengths([first, *(moment for moment in moments if moment > struck)])[:AFTER]
        return usual, after, note


def struck_one(folder: Path, *, leader: bool) -> int:
    """A peer that leads the next iteration, or one that does not, as soon as an iteration is over for everybody."""
    before = max(row[1] for row in rows_of(folder, 0))
    for _ in until("an iteration of all", time.monotonic() + TIMEOUT):
        last = [rows_of(folder, index)[-1] for index in range(PEERS)]
        if len({row[1] for row in last}) == 1 and last[0][1] > before and sum(row[4] for row in last) == 1:
            return next(index for index in reversed(range(PEERS)) if last[index][4] == leader)
    raise AssertionError


def back(victim: subprocess.Popen[bytes], folder: Path, survivors: list[int], limit: float) -> str:
    """Let a hung peer go on, and say after how many iterations of the others it counts again."""
    alone, one = len(ends(folder, survivors)), survivors[0]
    os.kill(victim.pid, signal.SIGCONT)
    for _ in until("the hung peer in an average again", limit):
        if any(row[3] == PEERS for row in rows_of(folder, one)[alone:]):
            break
    skipped = next(n for n, row in enumerate(rows_of(folder, one)[alone:]) if row[3] == PEERS)
    return f"; counts again after {skipped} iterations of the others"


WAYS = {
    "SIGKILL": (signal.SIGKILL, False),
    "SIGTERM": (signal.SIGTERM, False),
    "SIGSTOP": (signal.SIGSTOP, False),
    "SIGSTOP-leader": (signal.SIGSTOP, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a peer that dies, leaves or hangs costs the others.")
    parser.add_argument("--rounds", type=int, default=3, help="swarms for each way to leave (default 3)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="how the peer leaves (all)")
    options = parser.parse_args()
    for name in options.ways:
        how, leader = WAYS[name]
        for _ in range(options.rounds):
            usual, (first, *rest), note = leave(how, leader=leader)
            worst = max(rest) - usual
            print(
                f"{name}: {first - usual:+.2f} s in the iteration it strikes, {worst:+.2f} s at most in the next "
                f"{len(rest)}; usual {usual:.2f} s{note}",
                flush=True,
            )


if __name__ == "__main__":
    main()
