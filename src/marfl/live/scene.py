"""What the live page shows, as plain values: who is there, who met whom in each iteration, who is missing and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marfl.errors import InputError
from marfl.plan.grid import plan
from marfl.runs import open_run
from marfl.runs.files import parsed, plain
from marfl.runs.rows import PeerRow, Row, parse_peer_row

GROUPED = ("grid", "chunked", "full")  # exchanges that meet in the groups of a plan
MOST_DRAWN = 200  # peers whose groups are drawn
MOST_KEPT = 2000  # iterations of a scene


@dataclass(frozen=True)
class Iteration:
    """One iteration; peers are named by their ids, `present` in the order of the roster."""

    number: int
    present: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    exchange: str = ""
    accuracy: float | None = None
    sent: int | None = None  # bytes, of all who are known to have sent any
    hash: str = ""
    seconds: float | None = None
    checks: tuple[str, ...] = ()


@dataclass
class Scene:
    """A run as the page shows it. A peer is a mapping with at least `id`; what else it says of itself is shown."""

    title: str
    group_size: int = 5
    over: bool = False
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    iterations: dict[int, Iteration] = field(default_factory=dict)

    def meet(self, peer: str, **facts: Any) -> None:
        """Know a peer, or more of it."""
        self.peers.setdefault(peer, {"id": peer}).update(facts)

    def add(self, iteration: Iteration) -> None:
        """Know an iteration: what is told later counts."""
        self.iterations[iteration.number] = iteration
        for peer in (*iteration.present, *iteration.missing):
            self.meet(peer)
        while len(self.iterations) > MOST_KEPT:
            del self.iterations[min(self.iterations)]

    def as_json(self) -> bytes:
        """For the page; peers are named by their places in a list, so that many iterations stay short."""
        places = {peer: place for place, peer in enumerate(self.peers)}
        sizes = {len(each.present) for each in self.iterations.values() if each.exchange in GROUPED}
        told = {
            "title": self.title, "over": self.over, "group_size": self.group_size, "peers": list(self.peers.values()),
            "iterations": [_told(self.iterations[number], places) for number in sorted(self.iterations)],
            "plans": {size: plan(size, self.group_size).rounds for size in sizes if 1 < size <= MOST_DRAWN},
        }  # fmt: skip
        return json.dumps(plain(told), allow_nan=False).encode()


def _told(each: Iteration, places: Mapping[str, int]) -> dict[str, Any]:
    return {
        "t": each.number, "present": [places[peer] for peer in each.present],
        "missing": [[places[peer], why] for peer, why in each.missing.items()], "exchange": each.exchange,
        "accuracy": each.accuracy, "sent": each.sent, "hash": each.hash, "seconds": each.seconds,
        "checks": list(each.checks),
    }  # fmt: skip


# --- a run directory ---


def scene_of_run(path: Path) -> Scene:
    """A run directory as it is now: of a swarm with its peers, of a simulation by numbers alone."""
    run = open_run(path)
    config: Mapping[str, Any] = run.config
    title = f"{path.resolve().name}: {config.get('technique', '')} on {config.get('task', '')}"
    scene = Scene(title, int(config.get("group_size", 5)), over=run.summary is not None)
    folders = sorted((path / "peers").glob("[0-9]*"), key=lambda folder: int(folder.name))
    if folders:
        _of_swarm(scene, run.rows, folders)
        lost = run.summary.get("missing", {}) if run.summary else {}
        for peer in list(scene.peers.values()):
            if why := lost.get(str(peer.get("index"))):
                scene.meet(peer["id"], here=False, why=str(why), state="lost")
        return scene
    exchange = str(config.get("exchange", "")) if config.get("technique") == "mar" else ""
    count = int(config.get("peers", 0))
    for index in range(min(count, MOST_DRAWN)):
        scene.meet(str(index), index=index)
    for row in run.rows:
        members = tuple(map(str, range(row.aggregators))) if row.aggregators <= len(scene.peers) else ()
        exact = exchange if row.aggregators == count else ""  # who is away is not written down: then no groups
        scene.add(_iteration(row, members, {}, exact))
    return scene


def _of_swarm(scene: Scene, rows: Sequence[Row], folders: Sequence[Path]) -> None:
    """The peers' own rows name who met; the run's rows add up what they sent."""
    own = {int(folder.name): _peer_rows(folder) for folder in folders}
    for folder in folders:
        rows_of_it, facts = own[int(folder.name)], _word_of(folder)
        name = str(facts.get("peer") or folder.name)
        last = rows_of_it[-1] if rows_of_it else None
        sent = sum(last_sent(row) for row in rows_of_it)
        model = str(facts.get("model_hash") or (last.model_hash if last else "") or "")
        state = facts.get("stopped_because") or ("ended" if scene.over else "running")
        scene.meet(
            name, index=int(folder.name), iteration=last.iteration if last else 0, sent=sent, model=model,
            accuracy=facts.get("accuracy"), state=state,
        )  # fmt: skip
    merged = {row.iteration: row for row in rows}
    numbers = sorted({row.iteration for each in own.values() for row in each})
    for number in numbers:
        told = [row for each in own.values() for row in each if row.iteration == number and row.present]
        if told:
            first, row = told[0], merged.get(number, told[0])
            found = _iteration(row, tuple(first.present), first.missing, first.exchange or "")
            if number not in merged:  # others may not have written theirs yet
                found = replace(found, sent=None)
            scene.add(found if found.accuracy is not None else replace(found, accuracy=first.test_accuracy))
    newest = scene.iterations.get(max(scene.iterations, default=0))
    for peer in scene.peers.values():
        if newest is not None and peer.get("state") == "running" and peer["id"] not in newest.present:
            peer["state"] = "away"


def scene_of_peer(folder: Path, title: str, group_size: int) -> Scene:
    """A run as one of its peers saw it, from its state directory."""
    scene = Scene(title, group_size)
    for row in _peer_rows(folder):
        if row.present:
            scene.add(_iteration(row, tuple(row.present), row.missing, row.exchange or ""))
    return scene


def last_sent(row: PeerRow) -> int:
    """Bytes that a peer's row says it sent."""
    return sum(row.bytes_sent.values())


def _iteration(row: Row, present: tuple[str, ...], missing: Mapping[str, str], exchange: str) -> Iteration:
    return Iteration(
        row.iteration, present, dict(missing), exchange, row.test_accuracy, sum(row.bytes_sent.values()),
        row.model_hash or "", row.wall_seconds, tuple(row.checks),
    )  # fmt: skip


def _word_of(folder: Path) -> dict[str, Any]:
    """What a peer says of itself at its end, or its name while it runs."""
    try:
        said = parsed((folder / "summary.json").read_bytes())
    except (FileNotFoundError, ValueError):
        said = {}
    if not said.get("peer"):
        lines = _lines(folder / "address")
        said["peer"] = lines[0].rpartition("/p2p/")[2] if lines else None
    return dict(said)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return []


def _peer_rows(folder: Path) -> list[PeerRow]:
    """A peer's own rows; a torn last line does not count."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return [parse_peer_row(parsed(line)) for line in lines]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise InputError(f"{folder / 'metrics.jsonl'}: {error}; restore it or repeat the run") from None
