"""From the peers' own metrics to the rows of one run, as `marfl simulate` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from marfl.byte_kinds import ByteKind
from marfl.dp.accounting import COLUMNS
from marfl.runs.rows import PeerRow, Row, SwarmRow, parse_peer_row

OVER = ("committed", "averaged")  # how an iteration ends for a peer that holds its result: with votes, or without


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
                    lines = file.read_bytes().split(b"\n")[:-1]  # a last line without its end is torn
                    rows = (parse_peer_row(json.loads(line)) for line in lines)
                    self.rows[peer] = {row.iteration: row for row in rows}
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
        return add_ledgers(row.sent for row in self.rows[peer].values())


def add_ledgers(ledgers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum, name by name: bytes of every kind, messages, DHT operations."""
    total: dict[str, int] = {}
    for ledger in ledgers:
        for kind, count in ledger.items():
            total[kind] = total.get(kind, 0) + count
    return total


def beyond(known: Mapping[str, int], written: Mapping[str, int]) -> dict[str, int]:
    """What is known to be sent but in no row: by peers that were killed, or after their last iteration."""
    return {kind: max(0, count - written.get(kind, 0)) for kind, count in known.items()}


def merged(iteration: int, rows: Mapping[int, PeerRow], clients: Mapping[str, int]) -> SwarmRow:
    """One iteration of the whole swarm. `clients` are the peers that hold data, by name; FedAvg's server does not.

    Bytes are sums, seconds the slowest peer's, the loss the mean over those who trained, in the order of the peers.
    The disagreement is 0 when all hashes are the same, else unknown, and a check says who holds what.
    """
    ordered = [rows[peer] for peer in sorted(rows)]
    sent = add_ledgers(row.sent for row in ordered)
    hashes = _hashes(rows)
    members = {clients[name] for row in ordered for name in row.present if name in clients}
    epsilons = {name: _worst(ordered, name) for name in COLUMNS}
    return SwarmRow(
        iteration=iteration,
        participants=len(members | {peer for peer, row in rows.items() if row.train_loss is not None}),
        aggregators=len(members),
        train_loss=_mean([row.train_loss for row in ordered if row.train_loss is not None]),
        test_loss=_first(row.test_loss for row in ordered),
        test_accuracy=_first(row.test_accuracy for row in ordered),
        messages=sent.get("messages", 0),
        bytes_sent={kind: sent.get(kind, 0) for kind in ByteKind},
        bytes_total=0,  # filled in when the row is written
        virtual_seconds=None,
        wall_seconds=_largest(row.wall_seconds for row in ordered),
        update_seconds=_largest(row.update_seconds for row in ordered),
        aggregate_seconds=_largest(row.aggregate_seconds for row in ordered),
        disagreement=0.0 if len(hashes) == 1 else None,
        model_hash=max(hashes, key=lambda found: len(hashes[found])) if hashes else None,
        epsilon_outsider=epsilons["epsilon_outsider"],
        epsilon_insider=epsilons["epsilon_insider"],
        epsilon_insider_masked=epsilons["epsilon_insider_masked"],
        clip=_first(row.clip for row in ordered),
        checks=_checks(rows, hashes, clients),
        dht_operations=sent.get("dht", 0),
        more=({"payload_down": sent["down"]} if sent.get("down") else {}) | widths(ordered) | _warned(ordered),
    )


def widths(rows: Sequence[Row]) -> dict[str, int]:
    """In how many bits values travelled, as the last of these rows says that knows."""
    known = [row.more for row in rows if "bits_up" in row.more]
    return {name: known[-1][name] for name in ("bits_up", "bits_down")} if known else {}


def _warned(rows: Sequence[PeerRow]) -> dict[str, Any]:
    """What peers say of a privacy that promises little: the same settings, so the same words."""
    said = [row.more["privacy_warnings"] for row in rows if "privacy_warnings" in row.more]
    return {"privacy_warnings": said[0]} if said else {}


def with_more_sent(row: SwarmRow, ledger: Mapping[str, int]) -> SwarmRow:
    """The row with more messages, bytes and DHT operations."""
    return replace(
        row,
        messages=row.messages + ledger.get("messages", 0),
        bytes_sent={kind: row.bytes_sent[kind] + ledger.get(kind, 0) for kind in ByteKind},
        dht_operations=row.dht_operations + ledger.get("dht", 0),
    )


def _hashes(rows: Mapping[int, PeerRow]) -> dict[str, list[int]]:
    """Which peers hold which model after the iteration; only those that finished it say so."""
    held: dict[str, list[int]] = {}
    for peer, row in sorted(rows.items()):
        if row.status in OVER and row.model_hash:
            held.setdefault(row.model_hash, []).append(peer)
    return held


def _checks(rows: Mapping[int, PeerRow], hashes: Mapping[str, list[int]], clients: Mapping[str, int]) -> list[str]:
    found = []
    if len(hashes) > 1:
        found.append("; ".join(f"peers {_list(peers)} hold {digest[:8]}" for digest, peers in hashes.items()))
    missing: dict[str, list[int]] = {}
    for peer, row in sorted(rows.items()):
        for name, why in row.missing.items():
            missing.setdefault(f"peer {clients.get(name, name)} is missing: {why}", []).append(peer)
    found += [f"{what} (say {_list(peers)})" for what, peers in missing.items()]
    found += [f"peer {peer}: {row.status}" for peer, row in sorted(rows.items()) if row.status not in OVER]
    lost = ((peer, note) for peer, row in sorted(rows.items()) for note in row.checks if note.startswith("attempt "))
    return found + [f"peer {peer}: {_named(note, clients)}" for peer, note in lost]


def _named(note: str, clients: Mapping[str, int]) -> str:
    """A note in which peers have their numbers."""
    return re.sub(r"\w+", lambda word: f"peer {clients[word[0]]}" if word[0] in clients else word[0], note)


def _list(peers: Iterable[int]) -> str:
    return ", ".join(map(str, peers))


def _first(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _worst(rows: Iterable[PeerRow], name: str) -> float | None:
    """The largest ε of the peers that account for theirs; null, which is infinite, is the largest."""
    found = [row[name] for row in rows if any(row[column] is not None for column in COLUMNS)]
    return None if None in found else max(found, default=None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
