"""The vote log of a key: which decisions it may have voted in, on the disk before each vote.

It belongs to the key and not to a directory: it lies beside the key file, as ``<identity>.votes``, and whoever uses the
key holds its lock. One key may take part in several runs, and a run may begin anew under its old name, so a vote is
known by its run and by the state that it starts from. A peer without a key file has a new key in every process: nobody
can confuse its votes with another's, and nothing is written.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marfl.errors import InputError
from marfl.net.base import PeerId
from marfl.protocol.incarnations import incarnation_of
from marfl.runs.files import read_json, take_lock, write_json

KEPT = 128  # votes of a run: a state may be much older than the log, if only the state was restored
TAKEN = "another process (pid {pid}) uses this key; stop it, or give this peer a key of its own"


@dataclass
class Votes:
    """What is known of one run."""

    highest: int = 0  # the last iteration, in whatever lineage
    bases: list[tuple[int, bytes]] = field(default_factory=list)  # iteration and hash of the state before it

    def add(self, iteration: int, base: bytes) -> None:
        self.highest = max(self.highest, iteration)
        self.bases = [*(vote for vote in self.bases if vote[1] != base), (iteration, base)][-KEPT:]


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
            self._runs = {
                str(run): Votes(int(kept["highest"]), [(int(t), bytes.fromhex(base)) for t, base in kept["votes"]])
                for run, kept in saved["runs"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(f"{path}: is no vote log; give this peer a new key, or this key's own log") from None
        if owner != self._peer:
            raise InputError(f"{path}: is the vote log of another key, {owner}; move it away with that key")

    def _save(self) -> None:
        if self.path is None:
            return
        runs = {
            run: {"highest": votes.highest, "votes": [[t, base.hex()] for t, base in votes.bases]}
            for run, votes in self._runs.items()
        }
        write_json(self.path, {"peer": self._peer, "starts": self._starts, "runs": runs})
