"""A swarm's run directory, written while it runs: the same files as `marfl simulate` writes."""

from __future__ import annotations

import time
from typing import Any

from marfl.config import Config
from marfl.rundir import RunDir
from marfl.swarm.peers import PeerProcess
from marfl.swarm.rows import Row, add_ledgers, add_sent, beyond, bytes_of, merged, summarised
from marfl.swarm.run import Swarm

DONE = "all iterations done"


class Recorder:
    """Writes a row as soon as everybody who is there has passed an iteration; the newest waits for the next.

    What peers send after their last iteration, or sent before they were killed, is counted in the last row.
    """

    def __init__(self, config: Config, run: RunDir, swarm: Swarm, model_bytes: int) -> None:
        self._config, self._run, self._swarm, self._model_bytes = config, run, swarm, model_bytes
        self._held: Row | None = None
        self._next = 1
        self._total = 0
        self._begun = time.monotonic()

    def look(self) -> None:
        """Write what is complete."""
        book = self._swarm.book
        awaited = [p.index for p in self._swarm.peers if p.index not in self._swarm.missing and p.fate != "stopped"]
        while awaited and all(book.last(peer) >= self._next for peer in awaited):
            self._take(self._next)

    def finish(self, stopped_because: str) -> dict[str, Any]:
        """Write the rest and the summary, after all peers have ended."""
        book = self._swarm.book
        for iteration in range(self._next, max(book.last(p.index) for p in self._swarm.peers) + 1):
            self._take(iteration)
        if self._held is not None:
            for peer in self._swarm.peers:
                add_sent(self._held, beyond(peer.sent, book.sent(peer.index)))
            self._write(self._held)
        summary = summarised(self._config, self._run.rows(), self._facts(stopped_because))
        self._run.write_summary(summary)
        return summary

    def _why_done(self) -> str:
        """Why those who are left ended: a privacy budget may end a run before its last iteration."""
        left = [peer for peer in self._swarm.peers[: self._config.peers] if peer.index not in self._swarm.missing]
        said = [peer.status.get("stopped_because") for peer in left]
        return next((why for why in said if why not in (None, DONE, "told to leave")), DONE)

    def _take(self, iteration: int) -> None:
        self._next = iteration + 1
        rows = self._swarm.book.of(iteration)
        if not rows:
            return  # nobody who is left knows of it
        if self._held is not None:
            self._write(self._held)
        self._held = merged(iteration, rows, self._names())

    def _names(self) -> dict[str, int]:
        """The peers that hold data, by the name they go by in each other's rows."""
        return {p.name: p.index for p in self._swarm.peers[: self._config.peers] if p.name is not None}

    def _write(self, row: Row) -> None:
        self._total += bytes_of(row)
        self._run.append_row({**row, "bytes_total": self._total})

    def _facts(self, stopped_because: str) -> dict[str, Any]:
        peers, book = self._swarm.peers, self._swarm.book
        sent = add_ledgers(peer.sent for peer in peers)
        steady = [row for peer in peers for t, row in book.rows[peer.index].items() if t > 1]
        each, taken = (add_ledgers(row[way] for row in steady) for way in ("sent", "received"))
        done = max(1, len(steady))
        finals = {peer.index: peer.status.get("model_hash") for peer in peers if peer.index not in self._swarm.missing}
        return {
            "model_bytes": self._model_bytes,
            "wall_seconds": time.monotonic() - self._begun,
            "finished": stopped_because == DONE,
            "stopped_because": self._why_done() if stopped_because == DONE else stopped_because,
            "missing": {str(index): why for index, why in self._swarm.missing.items()},
            "notes": self._swarm.notes,
            "agreed": len(set(finals.values())) == 1,
            "payload_bytes": sent.get("payload", 0),
            # without the first iteration, in which peers also look for each other
            "control_bytes_per_peer_iteration": each.get("control", 0) / done,
            "control_bytes_received_per_peer_iteration": taken.get("control", 0) / done,  # look-ups are only here
            "dht_operations_per_peer_iteration": each.get("dht", 0) / done,
            "start_seconds": self._swarm.start_seconds,
            "processes": [_process(peer) for peer in peers],
        }


def _process(peer: PeerProcess) -> dict[str, Any]:
    return {
        "index": peer.index, "name": peer.name, "pids": peer.pids, "daemons": sorted(peer.daemons), "fate": peer.fate,
        "resident_bytes": peer.resident,
        "iteration": peer.committed, "model_hash": peer.status.get("model_hash"), "sent": peer.sent,
    }  # fmt: skip
