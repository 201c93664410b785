"""What a peer keeps on the disk: all that it must know to come back after `kill -9`, and what others may read.

The state directory:

    identity                 its key: the name that others know it by
    pid, address             its process, and what others type to join it
    identity.votes           which iterations it may have voted in, written before each vote
    privacy.json             what it has given away, written before that leaves
    left.safetensors         what is left of its updates where few bits travel, written before these leave; the
                             vectors are in left.0.safetensors and so on, each written once
    checkpoint.safetensors   the agreed state and its record, after each iteration
    peers.json               addresses of peers that it has met: a way back when the bootstrap peer is gone
    metrics.jsonl            a row per iteration; summary.json at a clean end; log

Every file is replaced as a whole or not at all.

The vote log tells which decisions a key may have voted in. It belongs to the key and not to a directory: it lies beside
the key file, as ``<identity>.votes``, and whoever uses the key holds its lock. One key may take part in several runs,
and a run may begin anew under its old name, so a vote is known by its run and by the state that it starts from. A peer
without a key file has a new key in every process: nobody can confuse its votes with another's, and nothing is written.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from marfl.errors import InputError, WireError
from marfl.learn.feedback_files import load_feedback, save_feedback
from marfl.net.base import PeerId, Traffic
from marfl.net.libp2p.connection import check_free
from marfl.protocol.incarnations import incarnation_of
from marfl.protocol.roster import Record, decode_record
from marfl.runs import checkpoint
from marfl.runs.files import read_json, take_lock, write_atomic, write_json
from marfl.runs.rows import PeerRow, PeerSummary
from marfl.runs.writer import RowLog
from marfl.state import Snapshot
from marfl.wire.error_feedback import ErrorFeedback

LEFT_VECTORS = "left.*.safetensors"
CHECKPOINT, PEERS, SUMMARY, ROWS, ADDRESS, ACCOUNT, LEFT = (
    "checkpoint.safetensors", "peers.json", "summary.json", "metrics.jsonl", "address", "privacy.json",
    "left.safetensors",
)  # fmt: skip
MET = 64  # addresses worth keeping
VOTES_KEPT = 128  # of a run: a state may be much older than the log, if only the state was restored
TAKEN = "another process (pid {pid}) uses this key; stop it, or give this peer a key of its own"


@dataclass
class Checkpoint:
    """What a checkpoint holds."""

    state: Snapshot
    record: Record
    consumed: int = 0  # mini-batches trained on so far
    trained: int = 0  # the last iteration they were for
    momentum: Tensor | None = None  # this peer's own, where peers keep their own
    home: Tensor | None = None  # its personal layers, once they were trained
    sent: Traffic = field(default_factory=Traffic)
    received: Traffic = field(default_factory=Traffic)
    proofs: bytes = b""  # that the record is certified, for others (see `protocol.commits`)


class StateDir:
    """One peer's directory; one process at a time writes it."""

    def __init__(self, path: Path, owner: str) -> None:
        self.path, self._owner = path, owner
        self._left: dict[str, Tensor] = {}  # the vectors that are on the disk, by file
        self._saving = threading.Lock()  # a peer told to leave saves once more, while a save may be under way
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(path / ".lock")
        except OSError as error:
            raise InputError(f"state directory {path}: cannot be used ({error.strerror})") from None
        except InputError as error:
            why = str(error).removeprefix(f"{path}: ").replace("another --out", "another")
            raise InputError(f"state directory {path}: {why}") from None
        self.rows = RowLog(path / ROWS)

    @property
    def identity(self) -> Path:
        return self.path / "identity"

    def write_text(self, name: str, lines: Iterable[object]) -> None:
        write_atomic(self.path / name, "".join(f"{line}\n" for line in lines).encode())

    def write_summary(self, summary: PeerSummary) -> None:
        write_json(self.path / SUMMARY, summary)

    def begin(self, addresses: Iterable[str]) -> None:
        """Write down this process and its addresses, and remove the summary that an earlier process left."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        self.write_text("pid", [os.getpid()])
        self.write_text(ADDRESS, addresses)

    def reclaim(self) -> tuple[str, ...]:
        """The addresses of the last process, if they are free: others find this peer there. Removes their file."""
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

    # --- what is left of updates ---

    def save_feedback(self, memory: ErrorFeedback) -> None:
        """Keep what is left; of earlier records the newest alone: lineages do not part while a peer is away."""
        newest = ErrorFeedback(memory.kept[-1:], memory.lost, memory.on_its_way)
        tensors, rows = save_feedback([newest])
        with self._saving:
            files = {name: self._left_file(value) for name, value in tensors.items()}
            checkpoint.save(self.path / LEFT, {}, {"left": rows, "files": files}, self._owner)
            self._left = {file: value for file, value in self._left.items() if file in files.values()}
            for path in self.path.glob(LEFT_VECTORS):
                if path.name not in self._left:
                    path.unlink(missing_ok=True)

    def _left_file(self, value: Tensor) -> str:
        """The file that holds a vector of what is left; what was on its way stays where it is once it counts."""
        for file, known in self._left.items():
            if known is value:
                return file
        file = next(name for number in count() if (name := LEFT_VECTORS.replace("*", str(number))) not in self._left)
        checkpoint.save(self.path / file, {"left": value}, {}, self._owner)
        self._left[file] = value
        return file

    def load_feedback(self) -> ErrorFeedback:
        """What was left when this was saved; nothing in a new directory."""
        saved = checkpoint.load(self.path / LEFT, self._owner)
        if saved is None:
            return ErrorFeedback()
        tensors, meta = saved  # earlier versions kept the vectors here
        for name, file in meta.get("files", {}).items():
            found = checkpoint.load(self.path / file, self._owner)
            if found is None:
                raise InputError(f"{self.path / file}: is gone; restore a copy, or remove {LEFT} to go on without it")
            tensors[name] = self._left[file] = found[0]["left"]
        return load_feedback(meta["left"][0], tensors)

    # --- the agreed state ---

    def save(self, kept: Checkpoint) -> None:
        """Keep this state; the one before stays until this one is whole and on the disk."""
        tensors = {f"state.{name}": vector for name, vector in kept.state.vectors.items()}
        if kept.momentum is not None:
            tensors["momentum"] = kept.momentum
        if kept.home is not None:
            tensors["home"] = kept.home
        meta = {
            "version": kept.state.version, "scalars": dict(kept.state.scalars),
            "record": kept.record.encoded.hex(), "consumed": kept.consumed, "trained": kept.trained,
            "sent": asdict(kept.sent), "received": asdict(kept.received), "proofs": kept.proofs.hex(),
        }  # fmt: skip
        with self._saving:
            checkpoint.save(self.path / CHECKPOINT, tensors, meta, self._owner)

    def load(self) -> Checkpoint | None:
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
        return Checkpoint(
            Snapshot(meta["version"], vectors, meta["scalars"]), record, meta["consumed"], meta["trained"],
            tensors.get("momentum"), tensors.get("home"), Traffic(**meta["sent"]), Traffic(**meta["received"]),
            bytes.fromhex(meta.get("proofs", "")),
        )  # fmt: skip

    def append_row(self, row: PeerRow) -> None:
        """Add an iteration's row. A lineage that wins may lie behind mine: then its rows replace mine."""
        if row.iteration <= self.rows.last:
            self.rows.keep(row.iteration - 1)
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


# --- the vote log ---


@dataclass
class Votes:
    """What is known of one run."""

    highest: int = 0  # the last iteration, in whatever lineage
    bases: list[tuple[int, bytes]] = field(default_factory=list)  # iteration and hash of the state before it
    liars: dict[PeerId, str] = field(default_factory=dict)  # who was proven to have lied, and how

    def add(self, iteration: int, base: bytes) -> None:
        self.highest = max(self.highest, iteration)
        self.bases = [*(vote for vote in self.bases if vote[1] != base), (iteration, base)][-VOTES_KEPT:]


class VoteLog:
    """One key's votes; one process at a time writes it. `begin` comes before the first vote."""

    def __init__(self, identity: Path | None = None) -> None:
        """Take hold of the key's log; `InputError` when another process has it, or when it cannot be kept there."""
        self.path = identity.resolve().with_name(f"{identity.resolve().name}.votes") if identity else None
        self.incarnation = incarnation_of(0, secrets.randbits)
        self._lock: int | None = None
        self._peer, self._run, self._starts = "", "", 0
        self._runs: dict[str, Votes] = {}
        self._before: frozenset[bytes] = frozenset()
        if self.path is None:
            return
        if not self.path.parent.is_dir():
            raise InputError(f"identity: {identity} cannot be used: there is no such directory")
        self._lock = take_lock(self.path.with_name(f"{self.path.name}.lock"), f"identity {identity}: {TAKEN}")

    def begin(self, peer: PeerId, run: str) -> None:
        """A process begins to vote with this key: its incarnation is on the disk before anybody hears of it."""
        self._peer, self._run = peer, run
        if self.path is not None:
            self._read(self.path)
            self._starts += 1
            self.incarnation = incarnation_of(self._starts, secrets.randbits)
        self._before = frozenset(base for _, base in self._mine.bases)
        self._save()

    @property
    def place(self) -> str:
        """Where it is, for a line that names it."""
        return f" {self.path}" if self.path else ""

    @property
    def highest(self) -> int:
        """The last iteration of this run that the key may have voted in; 0 if in none."""
        return self._mine.highest

    def cast_before(self, base: bytes) -> bool:
        """Whether an earlier process may have voted in the decision that follows this state."""
        return base in self._before

    def note(self, iteration: int, base: bytes) -> None:
        """A vote is about to be cast: it is on the disk when this returns, or `InputError` says why not."""
        self._mine.add(iteration, base)
        self._save()

    @property
    def liars(self) -> dict[PeerId, str]:
        """Who was proven to have lied in this run, and how: that holds after a restart, too."""
        return dict(self._mine.liars)

    def note_liar(self, liar: PeerId, why: str) -> None:
        """Somebody is proven to have lied: it is on the disk when this returns, or `InputError` says why not."""
        self._mine.liars[liar] = why
        self._save()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _mine(self) -> Votes:
        return self._runs.setdefault(self._run, Votes())

    def _read(self, path: Path) -> None:
        saved: Any = read_json(path)
        if saved is None:
            return
        try:
            owner, self._starts = str(saved["peer"]), int(saved["starts"])
            self._runs = {str(run): _votes(kept) for run, kept in saved["runs"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{path}: is no vote log; give this peer a new key, or this key's own log") from None
        if owner != self._peer:
            raise InputError(f"{path}: is the vote log of another key, {owner}; move it away with that key")

    def _save(self) -> None:
        if self.path is None:
            return
        runs = {
            run: {"highest": votes.highest, "votes": [[t, base.hex()] for t, base in votes.bases]}
            | ({"liars": votes.liars} if votes.liars else {})
            for run, votes in self._runs.items()
        }
        write_json(self.path, {"peer": self._peer, "starts": self._starts, "runs": runs})


def _votes(kept: Mapping[str, Any]) -> Votes:
    """What a log has of one run; one that was written before there were audits knows of no liars."""
    bases = [(int(iteration), bytes.fromhex(base)) for iteration, base in kept["votes"]]
    return Votes(int(kept["highest"]), bases, {str(peer): str(why) for peer, why in kept.get("liars", {}).items()})
