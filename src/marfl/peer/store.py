"""The state directory: all that a peer must know to come back after `kill -9`, and what others may read meanwhile.

    identity                 its key: the name that others know it by
    pid, address             its process, and what others type to join it
    identity.votes           which iterations it may have voted in, written before each vote (see `votes`)
    privacy.json             what it has given away, written before that leaves
    checkpoint.safetensors   the agreed state and its record, after each iteration
    peers.json               addresses of peers that it has met: a way back when the bootstrap peer is gone
    metrics.jsonl            a row per iteration; summary.json at a clean end; log

Every file is replaced as a whole or not at all.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from marfl.errors import InputError, WireError
from marfl.net.base import Ledger
from marfl.net.libp2p_settings import check_free
from marfl.protocol.roster import Record, decode_record
from marfl.rundir import checkpoint
from marfl.rundir.files import read_json, take_lock, write_atomic, write_json
from marfl.rundir.rows import RowLog
from marfl.state import Snapshot

CHECKPOINT, PEERS, SUMMARY, ROWS, ADDRESS, ACCOUNT = (
    "checkpoint.safetensors", "peers.json", "summary.json", "metrics.jsonl", "address", "privacy.json",
)  # fmt: skip
MET = 64  # addresses worth keeping


@dataclass
class Memory:
    """What a checkpoint holds."""

    state: Snapshot
    record: Record
    consumed: int = 0  # mini-batches trained on so far
    trained: int = 0  # the last iteration they were for
    momentum: Tensor | None = None  # this peer's own, where peers keep their own
    sent: Ledger = field(default_factory=Ledger)
    received: Ledger = field(default_factory=Ledger)


class StateDir:
    """One peer's directory; one process at a time writes it."""

    def __init__(self, path: Path, owner: str) -> None:
        self.path, self._owner = path, owner
        self._saving = threading.Lock()  # a peer told to leave saves once more, while a save may be under way
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(path / ".lock")
        except OSError as error:
            raise InputError(f"--state-dir {path}: cannot be used ({error.strerror})") from None
        except InputError as error:
            raise InputError(f"--state-dir {path}: {str(error).replace('--out', '--state-dir')}") from None
        self.rows = RowLog(path / ROWS)

    @property
    def identity(self) -> Path:
        return self.path / "identity"

    def write_text(self, name: str, lines: Iterable[object]) -> None:
        write_atomic(self.path / name, "".join(f"{line}\n" for line in lines).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / SUMMARY, summary)

    def begin(self, addresses: Iterable[str]) -> None:
        """A peer listens: say who runs it and where, and take back what an earlier one said at its end."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        self.write_text("pid", [os.getpid()])
        self.write_text(ADDRESS, addresses)

    def reclaim(self) -> tuple[str, ...]:
        """Where this peer listened before, if that is free: those who met it find it again. It no longer says so."""
        try:
            lines = (self.path / ADDRESS).read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return ()
        (self.path / ADDRESS).unlink()
        places = tuple(line.rpartition("/p2p/")[0] for line in lines)
        try:
            for place in places:
                check_free(place)
        except InputError:
            return ()  # somebody else has it now: any other will do
        return places

    # --- the privacy ledger ---

    def save_account(self, account: Mapping[str, Any]) -> None:
        write_json(self.path / ACCOUNT, account)

    def load_account(self) -> dict[str, Any] | None:
        return read_json(self.path / ACCOUNT)

    # --- the agreed state ---

    def save(self, memory: Memory) -> None:
        """Keep this state; the one before stays until this one is whole and on the disk."""
        tensors = {f"state.{name}": vector for name, vector in memory.state.vectors.items()}
        if memory.momentum is not None:
            tensors["momentum"] = memory.momentum
        meta = {
            "version": memory.state.version, "scalars": dict(memory.state.scalars),
            "record": memory.record.encoded.hex(), "consumed": memory.consumed, "trained": memory.trained,
            "sent": asdict(memory.sent), "received": asdict(memory.received),
        }  # fmt: skip
        with self._saving:
            checkpoint.save(self.path / CHECKPOINT, tensors, meta, self._owner)

    def load(self) -> Memory | None:
        """The state kept last, verified; None in a new directory. Rows after it will be written again."""
        saved = checkpoint.load(self.path / CHECKPOINT, self._owner)
        if saved is None:
            return None
        tensors, meta = saved
        vectors = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
        try:
            record = decode_record(bytes.fromhex(meta["record"]))
        except (WireError, ValueError) as error:
            where = self.path / CHECKPOINT
            raise InputError(f"{where}: its record is damaged ({error}); remove it to start over") from None
        self.rows.keep(max(record.iteration, meta["version"]))  # without votes there is no record but the first
        return Memory(
            Snapshot(meta["version"], vectors, meta["scalars"]), record, meta["consumed"], meta["trained"],
            tensors.get("momentum"), Ledger(**meta["sent"]), Ledger(**meta["received"]),
        )  # fmt: skip

    def append_row(self, row: Mapping[str, Any]) -> None:
        """Add an iteration's row. A heavier lineage may lie behind mine: then its rows replace mine."""
        if row["iteration"] <= self.rows.last:
            self.rows.keep(row["iteration"] - 1)
        self.rows.append(row)

    # --- who was met ---

    def keep_peers(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        kept = dict(list(addresses.items())[-MET:])
        write_atomic(self.path / PEERS, json.dumps(kept, indent=2).encode())

    def known_peers(self) -> dict[str, tuple[str, ...]]:
        saved = read_json(self.path / PEERS) or {}
        return {str(peer): tuple(map(str, where)) for peer, where in saved.items()}

    def close(self) -> None:
        self.rows.close()
        os.close(self._lock)
