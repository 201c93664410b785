"""A library peer for `marfl.testing.chaos`: a small training loop that writes down how every iteration ended.

    python -m marfl.testing.chaos_peer --folder DIR --run NAME --join ADDRESS … --listen ADDRESS --seed N

What it needs to come back is in its folder: the key, and its votes beside it. SIGTERM makes it leave politely.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from marfl.errors import MarflError
from marfl.learn.data import Batch
from marfl.learn.tasks.digits import Digits
from marfl.peer.api import Peer
from marfl.rng import seeded_torch
from marfl.testing.chaos_checks import COMMITTED

AGAIN = 1.0  # seconds before another try after an error that churn explains
STEP = 0.2  # seconds of a training step
REFUSED = 3  # the exit code of a peer that nobody lets in


class SlowDigits(Digits):
    """The daemons' task, slowed down: a peer that goes on alone must not outweigh all others within seconds."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        time.sleep(STEP)
        return super().loss(model, batch)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--listen", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", type=json.loads, default={}, help="settings of the network, as JSON")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        _live(given)
    except KeyboardInterrupt:
        print("told to leave", flush=True)
    except MarflError as error:
        print(f"ended: {error}", flush=True)
        return REFUSED
    return 0


def _live(given: argparse.Namespace) -> None:
    with seeded_torch(0):
        model = SlowDigits().model()
    dice = random.Random(given.seed)
    options: dict[str, Any] = {"listen": given.listen} if given.listen else {}
    options |= {"identity": given.folder / "key", "group_size": 3, "join_patience": 30.0, **given.network}
    with Peer(model, run=given.run, join=given.join, **options) as peer:
        (given.folder / "address").write_text(" ".join(peer.addresses))
        while True:
            _train(model, dice)
            try:
                outcome = peer.aggregate()
            except MarflError as error:  # others are gone, or nobody gives the state: churn, in a loop of its own
                print(f"iteration {peer.iteration + 1}: {error}", flush=True)
                time.sleep(AGAIN)
                continue
            _write(given.folder, _row(peer, outcome.iteration, outcome.status))


def _train(model: torch.nn.Module, dice: random.Random) -> None:
    """A training step that learns nothing, and differs from peer to peer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.001 * dice.uniform(-1, 1))
    time.sleep(STEP * dice.uniform(0.5, 1.5))


def _row(peer: Peer, iteration: int, status: str) -> dict[str, Any]:
    """As a daemon writes it: the commit of this iteration, and its lineage."""
    voter = peer._peer._voter
    record = voter.history.get(iteration)
    known = record is not None and status in ("committed", "abstained")
    return {
        "iteration": iteration,
        "status": COMMITTED if known else status,
        "model_hash": record.hash.hex() if record else None,
        "lineage": record.lineage.hex() if record else None,
        "holds": record is not None and voter.state.hash == record.hash,
    }


def _write(folder: Path, row: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
