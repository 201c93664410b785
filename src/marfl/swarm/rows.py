"""From the peers' own metrics to the rows and the summary of one run, as `marfl simulate` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from marfl.config import Config
from marfl.net.base import KINDS
from marfl.privacy.accounting import COLUMNS

PeerRow: TypeAlias = Mapping[str, Any]  # a line of a peer's metrics.jsonl
Row: TypeAlias = dict[str, Any]
OVER = ("committed", "averaged")  # how an iteration ends for a peer that holds its result: with votes, or without
COUNTED = (*KINDS, "messages")


class Book:
    """The rows of every peer by iteration, read as they are written."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._files = [folder / "metrics.jsonl" for folder in folders]
        self._seen: list[tuple[int, int] | None] = [None] * len(folders)
        self.rows: list[dict[int, PeerRow]] = [{} for _ in folders]  # by peer, then by iteration

    def read(self) -> None:
        """Take in what is new. A peer that comes back cuts its file first: files are read as a whole."""
        for peer, file in enumerate(self._files):
            try:
                stat = file.stat()
                if self._seen[peer] != (stat.st_mtime_ns, stat.st_size):
                    self._seen[peer] = (stat.st_mtime_ns, stat.st_size)
                    rows = map(json.loads, file.read_bytes().split(b"\n")[:-1])  # a last line without its end is torn
                    self.rows[peer] = {row["iteration"]: row for row in rows}
            except FileNotFoundError:
                continue

    def last(self, peer: int) -> int:
        """The newest iteration this peer has written down."""
        return max(self.rows[peer], default=0)

    def of(self, iteration: int) -> dict[int, PeerRow]:
        """Every peer's row of this iteration."""
        return {peer: rows[iteration] for peer, rows in enumerate(self.rows) if iteration in rows}

    def sent(self, peer: int) -> dict[str, int]:
        """What its rows say that a peer has sent, added up."""
        return add_ledgers(row["sent"] for row in self.rows[peer].values())


def add_ledgers(ledgers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum, kind by kind."""
    total: dict[str, int] = {}
    for ledger in ledgers:
        for kind, count in ledger.items():
            total[kind] = total.get(kind, 0) + count
    return total


def beyond(known: Mapping[str, int], written: Mapping[str, int]) -> dict[str, int]:
    """What is known to be sent but in no row: by peers that were killed, or after their last iteration."""
    return {kind: max(0, count - written.get(kind, 0)) for kind, count in known.items()}


def merged(iteration: int, rows: Mapping[int, PeerRow], clients: Mapping[str, int]) -> Row:
    """One iteration of the whole swarm. `clients` are the peers that hold data, by name; FedAvg's server does not.

    Bytes are sums, seconds the slowest peer's, the loss the mean over those who trained, in the order of the peers.
    The disagreement is 0 when all hashes are the same, else unknown, and a check says who holds what.
    """
    ordered = [rows[peer] for peer in sorted(rows)]
    sent = add_ledgers(row["sent"] for row in ordered)
    hashes = _hashes(rows)
    members = {clients[name] for row in ordered for name in row.get("present", ()) if name in clients}
    return {
        "iteration": iteration,
        "participants": len(members | {peer for peer, row in rows.items() if row.get("train_loss") is not None}),
        "aggregators": len(members),
        "train_loss": _mean([row["train_loss"] for row in ordered if row.get("train_loss") is not None]),
        "test_loss": _first(ordered, "test_loss"),
        "test_accuracy": _first(ordered, "test_accuracy"),
        "messages": sent.get("messages", 0),
        "dht_operations": sent.get("dht", 0),
        **{f"bytes_{kind}": sent.get(kind, 0) for kind in KINDS},
        "bytes_total": 0,  # filled in when the row is written
        "virtual_seconds": None,
        **{name: _largest(ordered, name) for name in ("wall_seconds", "update_seconds", "aggregate_seconds")},
        "disagreement": 0.0 if len(hashes) == 1 else None,
        "model_hash": max(hashes, key=lambda found: len(hashes[found])) if hashes else None,
        **{name: _worst(ordered, name) for name in COLUMNS},
        "clip": _first(ordered, "clip"),
        "checks": _checks(rows, hashes, clients),
    }


def add_sent(row: Row, ledger: Mapping[str, int]) -> None:
    """Count more bytes to a row."""
    row["messages"] += ledger.get("messages", 0)
    row["dht_operations"] += ledger.get("dht", 0)
    for kind in KINDS:
        row[f"bytes_{kind}"] += ledger.get(kind, 0)


def bytes_of(row: Mapping[str, Any]) -> int:
    """All bytes of an iteration."""
    return sum(int(row[f"bytes_{kind}"]) for kind in KINDS)


def summarised(config: Config, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The summary with every field that `marfl simulate` writes; `facts` are what only this swarm knows."""
    from marfl.from_config import wire_of  # torch takes a second: only when something runs
    from marfl.privacy.spending import promised  # torch takes a second: only when something has run
    from marfl.protocol.fixed_point import CHECKS

    tested = [row["test_accuracy"] for row in rows if row["test_accuracy"] is not None]
    last: Mapping[str, Any] = rows[-1] if rows else {}
    total = last.get("bytes_total", 0)
    return {
        "technique": config.technique,
        "semantics": config.semantics,
        "exchange": config.exchange if config.technique == "mar" else None,
        "plan": config.plan if config.technique == "mar" else None,
        "task": config.task,
        "peers": config.peers,
        "iterations": last.get("iteration", 0),
        "final_accuracy": tested[-1] if tested else None,
        "best_accuracy": max(tested, default=None),
        "bytes_total": total,
        "bytes_per_peer_iteration": total / config.peers / max(1, len(rows)),
        "disagreement": last.get("disagreement"),
        "model_hash": last.get("model_hash"),
        "virtual_seconds": None,
        "engine": "swarm",
        "engine_reason": "real peers on this machine, over libp2p",
        "value_checks": CHECKS[wire_of(config)],
        "coordination": config.coordination or "roster",
        "seed": config.seed,
        "target_accuracy": config.target_accuracy,
        **dict.fromkeys(("iterations_to_target", "bytes_to_target", "seconds_to_target")),
        "privacy": promised(config, {name: last.get(name) for name in COLUMNS}),
        **facts,
    }


def _hashes(rows: Mapping[int, PeerRow]) -> dict[str, list[int]]:
    """Which peers hold which model after the iteration; only those that finished it say so."""
    held: dict[str, list[int]] = {}
    for peer, row in sorted(rows.items()):
        if row["status"] in OVER and row.get("model_hash"):
            held.setdefault(row["model_hash"], []).append(peer)
    return held


def _checks(
    rows: Mapping[int, PeerRow], hashes: Mapping[str, list[int]], clients: Mapping[str, int]
) -> list[str]:
    found = []
    if len(hashes) > 1:
        found.append("; ".join(f"peers {_list(peers)} hold {digest[:8]}" for digest, peers in hashes.items()))
    missing: dict[str, list[int]] = {}
    for peer, row in sorted(rows.items()):
        for name, why in row.get("missing", {}).items():
            missing.setdefault(f"peer {clients.get(name, name)} is missing: {why}", []).append(peer)
    found += [f"{what} (say {_list(peers)})" for what, peers in missing.items()]
    found += [f"peer {peer}: {row['status']}" for peer, row in sorted(rows.items()) if row["status"] not in OVER]
    return found


def _list(peers: Iterable[int]) -> str:
    return ", ".join(map(str, peers))


def _first(rows: Iterable[PeerRow], name: str) -> Any:
    return next((row[name] for row in rows if row.get(name) is not None), None)


def _largest(rows: Iterable[PeerRow], name: str) -> float | None:
    return max((row[name] for row in rows if row.get(name) is not None), default=None)


def _worst(rows: Iterable[PeerRow], name: str) -> float | None:
    """The largest ε of the peers that account for theirs; null, which is infinite, is the largest."""
    found = [row[name] for row in rows if any(row.get(column) is not None for column in COLUMNS)]
    return None if None in found else max(found, default=None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
