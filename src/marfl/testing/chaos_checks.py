"""What must hold of real peers whatever is done to them: takes their logs, returns a line per broken promise."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

COMMITTED = "committed"
NEVER_SAID = (  # in a peer's output: an error that nobody handled, or work that was dropped
    "Traceback (most recent call last)",
    "Task was destroyed",
    "was never retrieved",
    "was never awaited",
    "Exception ignored",
    "Fatal Python error",
)
MIB = 2**20
GROWTH = 96 * MIB  # of a process over what it had after its first iterations: the model is small
DESCRIPTORS = 256  # open in one process
ENOUGH = 3  # iterations: what was under way when the calm began may have suffered
ALIKE = 40  # lines of a complaint that are shown


class Commit(NamedTuple):
    """An iteration that a peer knows to be decided."""

    peer: str
    lineage: str
    iteration: int
    hash: str


@dataclass
class Usage:
    """What one process took in one life."""

    process: str  # whose, and which
    base: int = 0  # resident bytes after its first iterations
    peak: int = 0
    descriptors: int = 0  # the most that were open


def read_commits(peer: str, lines: Iterable[str]) -> list[Commit]:
    """The commits in a peer's rows. A torn last line says nothing."""
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["status"] == COMMITTED and row["model_hash"]:
            found.append(Commit(peer, row["lineage"], row["iteration"], row["model_hash"]))
    return found


def one_commit(commits: Iterable[Commit]) -> list[str]:
    """No two hashes are committed for one iteration of one lineage, by whomever."""
    held: dict[tuple[int, str], dict[str, set[str]]] = {}
    for peer, lineage, iteration, digest in commits:
        held.setdefault((iteration, lineage), {}).setdefault(digest, set()).add(peer)
    return [
        f"iteration {iteration} of lineage {lineage[:8]}: committed as "
        + " and ".join(f"{digest[:8]} by {', '.join(sorted(peers))}" for digest, peers in sorted(hashes.items()))
        for (iteration, lineage), hashes in sorted(held.items())
        if len(hashes) > 1
    ]


def settled(since: Mapping[str, Iterable[Commit]]) -> list[str]:
    """All live peers have gone on since the calm began, and the newest iteration that all have ended as one model.

    `since` has what each live peer has committed since then, in its order: of a lineage that lost, the later counts.
    """
    held = {peer: {commit.iteration: commit.hash for commit in commits} for peer, commits in since.items()}
    found = [
        f"{peer}: stuck; {len(commits)} iterations since all is calm, and {ENOUGH} were due"
        for peer, commits in sorted(held.items())
        if len(commits) < ENOUGH
    ]
    if not held:
        return ["nobody lives"]
    common = set.intersection(*map(set, held.values()))
    hashes = {commits[max(common)] for commits in held.values()} if common else set()
    if not found and len(hashes) != 1:
        where = ", ".join(f"{peer} at {max(commits)}" for peer, commits in sorted(held.items()))
        what = f"{len(hashes)} models of iteration {max(common)}" if common else "no iteration in common"
        found.append(f"live peers hold {what} after the calm: {where}")
    return found


def bounded(usages: Iterable[Usage]) -> list[str]:
    """No process grows, or keeps what it has opened."""
    found = []
    for usage in usages:
        if usage.base and usage.peak - usage.base > GROWTH:
            sizes = f"from {usage.base / MIB:.0f} to {usage.peak / MIB:.0f} MiB"
            found.append(f"{usage.process}: its memory grew {sizes}; {GROWTH / MIB:.0f} MiB are allowed")
        if usage.descriptors > DESCRIPTORS:
            found.append(f"{usage.process}: {usage.descriptors} open descriptors; {DESCRIPTORS} are allowed")
    return found


def said_nothing_wrong(outputs: Mapping[str, str]) -> list[str]:
    """No traceback, and no task that was dropped, in anything that a peer wrote."""
    return [
        f"{peer}: wrote {word!r}: {_context(text, word)}"
        for peer, text in sorted(outputs.items())
        for word in NEVER_SAID
        if word in text
    ]


def _context(text: str, word: str) -> str:
    """The last line of the first complaint, which says what it was."""
    lines = text[text.index(word) :].splitlines()[:ALIKE]
    ends = [line.strip() for line in lines[1:] if line and not line.startswith((" ", "Traceback"))]
    return (ends[0] if ends else lines[0])[:200]


def nothing_left(processes: Mapping[int, str], files: Iterable[str]) -> list[str]:
    """At the end nobody runs, and nothing lies about."""
    found = [f"process {pid} ({name}) is still running" for pid, name in sorted(processes.items())]
    return found + [f"{file} was left behind" for file in sorted(files)]
