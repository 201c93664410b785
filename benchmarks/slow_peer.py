"""What one slow peer costs the others, and whether its work counts: real library peers on loopback.

    python benchmarks/slow_peer.py

Four peers train for a second each; then three do, and one takes five times as long. Printed is the time of an iteration
of the quick ones, as a ratio of the two, and how many of the slow one's updates are in an average.
"""

from __future__ import annotations

import argparse
import threading
import time
from contextlib import ExitStack

import torch
from torch import nn

import marfl

STEP = 1.0  # seconds


def run(seconds: list[float], iterations: int) -> tuple[float, int, int]:
    """Seconds of an iteration of the first peer; updates of the last one that were brought and that counted."""
    models = [nn.Linear(100, 100) for _ in seconds]
    with ExitStack() as stack:
        first = stack.enter_context(marfl.Peer(models[0], expected=len(seconds), ready_timeout=60.0))
        others = [stack.enter_context(marfl.Peer(model, join=first.addresses)) for model in models[1:]]
        peers = [first, *others]
        over = threading.Event()
        found: dict[int, list[tuple[float, marfl.Aggregated]]] = {}

        def work(rank: int) -> None:
            done = found.setdefault(rank, [])
            while not over.is_set():
                time.sleep(seconds[rank])
                with torch.no_grad():
                    models[rank].weight.add_(0.01)
                outcome = peers[rank].aggregate()
                done.append((time.monotonic(), outcome))
                if rank == 0 and len(done) > iterations:
                    over.set()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(seconds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
    half = len(found[0]) // 2  # at first nobody knows who is slow
    took = (found[0][-1][0] - found[0][half][0]) / (len(found[0]) - 1 - half)
    last = [outcome for _, outcome in found[len(seconds) - 1]]
    return took, len(last), sum(outcome.status == "committed" and not outcome.discarded for outcome in last)


def main() -> None:
    parser = argparse.ArgumentParser(description="What one slow peer costs the others, and whether its work counts.")
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    alike, _, _ = run([STEP] * 4, options.iterations)
    mixed, brought, counted = run([STEP] * 3 + [5 * STEP], options.iterations)
    print(f"iteration of the quick peers beside one that is 5 times slower: {mixed / alike:.2f} x that among equals")
    print(f"updates of the slow peer in an average: {counted} of {brought}")


if __name__ == "__main__":
    main()
