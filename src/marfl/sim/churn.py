"""Who takes part: the dispatcher of the paper, as a pure function of (settings, peers, iteration, seed).

For each iteration t it names U_t (who updates), A_t (who aggregates), who is lost in between, and who dies in which
round of the exchange (MAR-FL, arXiv 2512.05234). Every draw belongs to (seed, iteration, purpose) and peer i takes
value i of it: any iteration can be asked for alone, and one more peer changes no other peer's luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marfl.errors import InputError
from marfl.rng import churn_stream
from marfl.settings import Churn, Sessions

Mask: TypeAlias = NDArray[np.bool_]  # by peer
Scores: TypeAlias = NDArray[np.float64]  # by peer, uniform in [0, 1)
_HEADER = ["time", "peer", "state"]
_NEVER = 1 << 31  # a round that no exchange has


@dataclass(frozen=True)
class Participation:
    """Who does what in one iteration, by peer index."""

    updaters: frozenset[int]  # U_t
    aggregators: frozenset[int]  # A_t: without those that were lost after their update
    dies: Mapping[int, int]  # aggregator → the round (from 0) it dies in; past the exchange's last it survives
    fewest: int = 0  # updates in the sum; with fewer, the iteration goes by
    ages: Mapping[int, int] = field(default_factory=dict)  # aggregator → iterations by which what it brings is late

    def deaths(self, rounds: int) -> dict[int, int]:
        """Who dies in an exchange of so many rounds, and in which."""
        return {peer: when for peer, when in self.dies.items() if when < rounds}


def participation(churn: Churn, peers: int, iteration: int, seed: int) -> Participation:
    """Who takes part in iteration t. The same arguments give the same answer, whatever was asked before.

    - Online are the peers that sessions or the trace have up; the clock is the iteration number.
    - The rate of participation picks exactly round(rate·peers), at least one, of the online peers without
      replacement; all of them when fewer are online, nobody when nobody is. Both U_t and A_t are that set; with
      separate rates each is its own independent draw, and a rate not given is 1.
    - Each peer that has updated and would aggregate drops out independently. If that would leave nobody to
      aggregate, the luckiest stays.
    - Each aggregator dies independently in every round, so its round of death is geometric.
    - A slow peer begins an update in one iteration, and brings it some iterations later: then it begins the next.

    Draws are common to all settings: with one seed, a higher rate picks a superset.
    """
    if peers < 1:
        raise InputError(f"peers = {peers}: must be at least 1")
    online = online_at(churn, peers, seed, float(iteration))

    def draw(purpose: str) -> Scores:
        return churn_stream(seed, iteration, purpose).random(peers)

    updaters, willing = _participants(churn, online, draw)
    aggregators = willing & ~_dropouts(churn.dropout, updaters, willing, draw("dropout"))
    ages: dict[int, int] = {}
    if churn.slow:
        slow = _slow(churn.slow, peers, seed)
        begins, brings = (iteration - 1) % churn.slowness == 0, iteration % churn.slowness == 0
        updaters, aggregators = updaters & (~slow | begins), aggregators & (~slow | brings)
        ages = dict.fromkeys(_members(slow & brings), churn.slowness - 1)
    return Participation(
        updaters=_members(updaters),
        aggregators=_members(aggregators),
        dies=_deaths(churn.death, aggregators, draw("death")),
        ages=ages,
    )


@lru_cache(maxsize=8)
def _slow(share: float, peers: int, seed: int) -> Mask:
    """Who is slow, for the whole run: round(share·peers), and somebody is not."""
    slow = np.zeros(peers, dtype=np.bool_)
    scores = churn_stream(seed, 0, "slow").random(peers)
    slow[np.argsort(scores, kind="stable")[: min(round(share * peers), peers - 1)]] = True
    return slow


def _members(mask: Mask) -> frozenset[int]:
    return frozenset(np.flatnonzero(mask).tolist())


def _participants(churn: Churn, online: Mask, draw: Callable[[str], Scores]) -> tuple[Mask, Mask]:
    """Who updates, and who would aggregate."""
    if not churn.separate:
        both = _pick(churn.participation, online, draw("participate"))
        return both, both
    updating, aggregating = churn.update_participation, churn.aggregate_participation
    return (
        _pick(1.0 if updating is None else updating, online, draw("update")),
        _pick(1.0 if aggregating is None else aggregating, online, draw("aggregate")),
    )


def _pick(rate: float, online: Mask, scores: Scores) -> Mask:
    """Exactly round(rate·peers), at least one, of those online: the lowest scores."""
    candidates = np.flatnonzero(online)
    wanted = max(1, round(rate * len(online)))
    lucky = candidates[np.argsort(scores[candidates], kind="stable")[:wanted]]
    picked = np.zeros_like(online)
    picked[lucky] = True
    return picked


def _dropouts(likelihood: float, updaters: Mask, willing: Mask, scores: Scores) -> Mask:
    dropped = updaters & willing & (scores < likelihood)
    if willing.any() and not (willing & ~dropped).any():
        dropped[np.argmax(np.where(willing, scores, -1.0))] = False
    return dropped


def _deaths(likelihood: float, aggregators: Mask, scores: Scores) -> dict[int, int]:
    """P(round r) = (1−d)^r·d, by inversion."""
    if likelihood == 0:
        return {}
    with np.errstate(over="ignore"):  # infinity is as good as never
        rounds = np.minimum(np.log1p(-scores) / math.log1p(-likelihood), _NEVER).astype(np.int64)
    return {peer: int(rounds[peer]) for peer in np.flatnonzero(aggregators).tolist()}


def online_at(churn: Churn, peers: int, seed: int, time: float) -> Mask:
    """Who is up at this time."""
    if churn.sessions is not None:
        return _timeline(churn.sessions, peers, seed).online(time)
    if churn.trace is not None:
        return _cached_trace(churn.trace, peers, *_stamp(churn.trace)).online(time)
    return np.ones(peers, dtype=np.bool_)


class _Timeline:
    """The sessions of all peers, drawn as far as anybody has asked, in blocks that are found again by their number."""

    WIDTH = 32  # even: a block that is over leaves every peer in the state it began in
    LIMIT = 100_000_000  # changes of state kept in memory

    def __init__(self, sessions: Sessions, peers: int, seed: int) -> None:
        self.sessions, self.seed = sessions, seed
        share = sessions.up / (sessions.up + sessions.down)
        self.began_up = churn_stream(seed, "sessions", "first").random(peers) < share
        means = np.array([sessions.up, sessions.down])
        self.means = np.where(self.began_up[:, None], means, means[::-1])  # by peer: of its first state, of the other
        self.blocks: list[NDArray[np.float64]] = []  # times of change, [peers, WIDTH], ascending along a row
        self.known_until = np.zeros(peers)

    def online(self, time: float) -> Mask:
        """A peer that has changed state an even number of times is where it began."""
        while self.known_until.min() <= time:
            self._extend(time)
        odd = np.zeros_like(self.began_up)
        for block in self.blocks:
            if block[:, 0].min() <= time < block[:, -1].max():
                odd ^= (block <= time).sum(axis=1) % 2 == 1
        return self.began_up ^ odd

    def _extend(self, time: float) -> None:
        peers, number = len(self.means), len(self.blocks)
        if number * self.WIDTH * peers > self.LIMIT:
            up, down = self.sessions.up, self.sessions.down
            raise InputError(f"sessions up = {up}, down = {down}: far too short for a clock that reads {time}")
        lengths = churn_stream(self.seed, "sessions", number).standard_exponential((peers, self.WIDTH))
        lengths *= np.tile(self.means, self.WIDTH // 2)
        self.blocks.append(self.known_until[:, None] + lengths.cumsum(axis=1))
        self.known_until = self.blocks[-1][:, -1]


@lru_cache(maxsize=8)
def _timeline(sessions: Sessions, peers: int, seed: int) -> _Timeline:
    return _Timeline(sessions, peers, seed)


class _Event(NamedTuple):
    """One line of a trace: from this time on the peer is up, or down."""

    time: float
    peer: int
    up: bool


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded sessions: `first` is who was up before the first line, `times` and `flips` who changes when."""

    first: Mask
    times: NDArray[np.float64]  # ascending
    flips: NDArray[np.int64]  # the peer that changes state at each time

    def online(self, time: float) -> Mask:
        """Who is up at this time, a change at that very time included."""
        done = self.flips[: np.searchsorted(self.times, time, side="right")]
        odd: Mask = np.bincount(done, minlength=len(self.first)) % 2 == 1
        return self.first ^ odd


def read_trace(path: Path, peers: int) -> Trace:
    """Read a trace: lines `time,peer,up` or `time,peer,down` in order of time, with or without a header.

    The clock is the iteration number. Before its first line a peer is in the other state; a peer without a line is
    always up.
    """
    first = np.ones(peers, dtype=np.bool_)
    state: dict[int, bool] = {}
    events: list[_Event] = []
    for where, event in _events(path, peers):
        if state.get(event.peer) == event.up:
            raise InputError(f"{where}: peer {event.peer} is {'up' if event.up else 'down'} already")
        if events and event.time < events[-1].time:
            raise InputError(f"{where}: time {event.time} must not be before {events[-1].time}, the line above it")
        if event.peer not in state:
            first[event.peer] = not event.up
        state[event.peer] = event.up
        events.append(event)
    flips = np.array([event.peer for event in events], dtype=np.int64)
    return Trace(first, np.array([event.time for event in events]), flips)


def _events(path: Path, peers: int) -> Iterator[tuple[str, _Event]]:
    """The lines of a trace, each with its place for error messages; blank ones and a header are passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"trace = {path}: cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        fields = [field.strip() for field in line.split(",")]
        if fields != [""] and not (number == 1 and fields == _HEADER):
            where = f"trace {path}, line {number}"
            yield where, _event(fields, peers, where)


def _event(fields: list[str], peers: int, where: str) -> _Event:
    if len(fields) != 3:
        raise InputError(f"{where}: has {len(fields)} fields, must have 3: time, peer, up or down")
    time, peer, state = fields
    try:
        event = _Event(float(time), int(peer), state == "up")
    except ValueError as error:
        raise InputError(f"{where}: time must be a number and peer a whole number ({error})") from error
    if not (math.isfinite(event.time) and 0 <= event.peer < peers):
        raise InputError(f"{where}: time {time} must be finite, and peer {peer} between 0 and {peers - 1}")
    if state not in ("up", "down"):
        raise InputError(f"{where}: state {state!r} must be up or down")
    return event


def _stamp(path: Path) -> tuple[int, int]:
    """What changes when a file is written again."""
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"trace = {path}: cannot be read ({error.strerror})") from error
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _cached_trace(path: Path, peers: int, modified: int, size: int) -> Trace:
    return read_trace(path, peers)
