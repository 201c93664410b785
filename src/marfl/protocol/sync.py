"""Catch-up: the agreed state from any peer that has it, checked against the committed hash before it is used.

Whoever missed one iteration is given its mean update (one vector); whoever missed more is given the whole state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from marfl.errors import NetError, SyncError, WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.readiness import vouch
from marfl.protocol.roster import Record, decode_record
from marfl.protocol.wire import pack, raw, unpack, vector_from
from marfl.state import Snapshot, all_finite

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant

MAX_VECTORS = 16
MAX_PAST = 64
MINUTE = 60.0
MANY = 4096  # peers whose fetching is counted before those that fetch no more are dropped
TOO_MUCH = "too many states"  # more than one peer may fetch: counted in `Net.refused`


class Caught(NamedTuple):
    """A verified state, the record it belongs to, and the mean update that led to it when that was sent."""

    record: Record | None
    state: Snapshot
    mean: Tensor | None
    commits: dict[int, bytes]  # what was committed before it, as far as its donor says


def given_up(mine: Mapping[int, bytes], theirs: Mapping[int, bytes]) -> int:
    """How many of my commits another history does not have, from the first that it has otherwise, or ends before.

    What its donor does not tell is taken to be the same; the beginning is no commit.
    """
    last = max(theirs, default=0)
    parted = [at for at, digest in mine.items() if at > 0 and (at > last or theirs.get(at, digest) != digest)]
    return max(mine) - min(parted) + 1 if parted else 0


class Allowance:
    """How many bytes each peer may still fetch: a bucket that drains by its whole size in a minute."""

    def __init__(self) -> None:
        self._level: dict[PeerId, tuple[float, float]] = {}  # (bytes, when) of what was given

    def take(self, peer: PeerId, size: int, most: float, now: float) -> bool:
        """Whether a peer may have so many bytes more."""
        level = self._now(peer, most, now)
        if level and level + size > most:
            return False
        self._level[peer] = level + size, now
        if len(self._level) > MANY:  # strangers who come and go must not fill memory
            self._level = {each: was for each, was in self._level.items() if self._now(each, most, now)}
        return True

    def _now(self, peer: PeerId, most: float, now: float) -> float:
        level, then = self._level.get(peer, (0.0, now))
        return max(0.0, level - (now - then) * most / MINUTE)


async def answer_sync(me: Participant, sender: PeerId, request: Parcel) -> Parcel:
    """Give my newest state, or the wanted one if I hold it: as one mean update where that suffices."""
    answer = _state(me, request)
    whole = sum(vector.nbytes for vector in me.state.vectors.values())
    size = memoryview(answer.payload).nbytes
    if size and not me.allowance.take(sender, size, me.settings.sync_states * whole, me.net.now()):
        me.net.refused[TOO_MUCH] += 1
        return nothing_to_give(me)
    if size:
        me.aside(vouch(me, sender))
    return answer


def _state(me: Participant, request: Parcel) -> Parcel:
    fields = unpack("sync", request.header)
    state, record, mean = me.state, me.record, me.last_mean
    accepted = me.instance.accepted if me.instance else None
    if fields["want"] not in (None, state.hash) and accepted and accepted.hash == fields["want"] and accepted.state:
        state, mean = accepted.state, (accepted.roster.base, accepted.mean)
        record = me.record.after(accepted.roster, accepted.hash)
    if fields["want"] not in (None, state.hash) or state.hash != record.hash or state.hash == fields["have"]:
        return nothing_to_give(me)
    past = [[at, digest] for at, digest in sorted(me.commits.items()) if at < record.iteration]
    common = {"record": record.encoded, "past": past, "version": state.version, "scalars": dict(state.scalars)}
    if mean and mean[0] == fields["have"] and mean[1] is not None and record.roster:
        header = pack("state", mode="delta", names=["mean"], lengths=[mean[1].numel()], **common)
        return Parcel(header, _raw([mean[1]]))
    names = sorted(state.vectors)
    lengths = [state.vectors[name].numel() for name in names]
    header = pack("state", mode="full", names=names, lengths=lengths, **common)
    return Parcel(header, _raw([state.vectors[name] for name in names]))


def nothing_to_give(me: Participant) -> Parcel:
    """The answer of a peer that does not have what is asked for."""
    empty = {"mode": "none", "names": [], "lengths": [], "scalars": {}, "version": me.state.version}
    return Parcel(pack("state", record=None, past=[], **empty))


def _raw(vectors: list[Tensor]) -> memoryview:
    return raw(vectors[0] if len(vectors) == 1 else torch.cat(vectors))


async def fetch(me: Participant, donors: Iterable[PeerId], want: bytes | None) -> Caught:
    """A verified newer state from the first donor that has one."""
    said = []
    for donor in donors:
        deadline = me.net.now() + me.settings.phase_timeout + me.settings.call_timeout
        request = Parcel(pack("sync", have=me.state.hash, want=want))
        try:
            answer = await me.net.call(donor, "sync", request, deadline=deadline)
            return _verified(me, answer, want)
        except (NetError, WireError, SyncError) as error:
            said.append(f"{donor}: {error}")
    raise SyncError("no donor could give the state: " + ("; ".join(said) or "nobody is known to have it"))


def _verified(me: Participant, answer: Parcel, want: bytes | None) -> Caught:
    """The state in an answer, only if its hash is the committed one."""
    fields = unpack("state", answer.header)
    if fields["mode"] not in ("delta", "full") or fields["record"] is None:
        raise SyncError("does not have it")
    record = decode_record(fields["record"])
    if want is None and not (record.beats(me.record.mass, me.record.hash) or record.hash == me.record.hash):
        raise SyncError("has nothing newer")
    vectors = _vectors(fields["names"], fields["lengths"], answer.payload)
    mean = vectors.get("mean") if fields["mode"] == "delta" else None
    if mean is not None and record.roster:
        state = me.advance(me.state, mean, record.roster)
    else:
        scalars = {str(name): float(value) for name, value in fields["scalars"].items()}
        state = Snapshot(fields["version"], vectors, scalars)
    if state.hash != record.hash or (want is not None and state.hash != want):
        raise SyncError("gave a state whose hash is not the committed one")
    return Caught(record, state, mean, _commits(record, fields["past"]))


def _commits(record: Record, past: list[Any]) -> dict[int, bytes]:
    """The commits that a donor tells of, and those that its record names."""
    fits = all(isinstance(row, list) and [type(value) for value in row] == [int, bytes] for row in past)
    if len(past) > MAX_PAST or not fits:
        raise WireError("a state with a bad past")
    before = {record.iteration - 1: record.roster.base} if record.roster else {}
    return {at: digest for at, digest in past if at < record.iteration} | before | {record.iteration: record.hash}


def _vectors(names: list[str], lengths: list[int], payload: bytes | memoryview) -> dict[str, Tensor]:
    if not 0 < len(names) == len(lengths) <= MAX_VECTORS or not all(isinstance(n, int) and n >= 0 for n in lengths):
        raise WireError("a state with bad vectors")
    joined = vector_from(payload, sum(lengths))
    if not all_finite(joined):
        raise WireError("a state with NaN or infinity")
    return dict(zip(map(str, names), torch.split(joined, lengths), strict=True))
