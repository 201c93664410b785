"""What one peer gives another: the agreed state, for whoever is behind, and slices that did not arrive.

A state is checked against the committed hash before it is used, so any peer that has it may give it. Whoever missed
one iteration is given its mean update (one vector); whoever missed more is given the whole state.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from marfl.errors import NetError, SyncError, WireError
from marfl.net.base import Buffer, Parcel, PeerId
from marfl.protocol.attempt import DECIDED, Attempt, resend
from marfl.protocol.messages import Committed, Ok, Resend, State, Sync
from marfl.protocol.readiness import Readiness
from marfl.protocol.roster import Record, decode_record
from marfl.protocol.standing import Caught, Standing
from marfl.protocol.tensors import raw, vector_from
from marfl.state import Snapshot, all_finite

MAX_VECTORS = 16
MINUTE = 60.0
MANY = 4096  # peers whose fetching is counted before those that fetch no more are dropped
TOO_MUCH = "too many states"  # more than one peer may fetch: counted in `Net.refused`


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


class StateTransfer:
    """One peer's giving and fetching."""

    def __init__(self, standing: Standing, readiness: Readiness) -> None:
        self.standing, self.readiness = standing, readiness
        self.net, self.settings = standing.net, standing.settings
        self.allowance = Allowance()

    # --- states ---

    async def answer_sync(self, sender: PeerId, request: Parcel) -> Parcel:
        """Give my newest state, or the wanted one if I hold it: as one mean update where that suffices."""
        answer = self._given(Sync.decode(request.header))
        whole = sum(vector.nbytes for vector in self.standing.state.vectors.values())
        size = memoryview(answer.payload).nbytes
        if size and not self.allowance.take(sender, size, self.settings.sync_states * whole, self.net.now()):
            self.net.refused[TOO_MUCH] += 1
            return self.nothing_to_give()
        if size:
            self.standing.talk.aside(self.readiness.vouch(sender))
        return answer

    def nothing_to_give(self) -> Parcel:
        """The answer of a peer that does not have what is asked for."""
        return State("none", (), (), None, (), self.standing.state.version, {}).parcel()

    def _given(self, asked: Sync) -> Parcel:
        standing = self.standing
        state, record, mean = standing.state, standing.record, standing.last_mean
        accepted = standing.instance.accepted if standing.instance else None
        if asked.want not in (None, state.hash) and accepted and accepted.hash == asked.want and accepted.state:
            state, mean = accepted.state, (accepted.roster.base, accepted.mean)
            record = standing.record.after(accepted.roster, accepted.hash)
        if asked.want not in (None, state.hash) or state.hash != record.hash or state.hash == asked.have:
            return self.nothing_to_give()
        commits = sorted(standing.commits.items())
        past = tuple(Committed(at, digest) for at, digest in commits if at < record.iteration)
        common = record.encoded, past, state.version, dict(state.scalars)
        if mean and mean[0] == asked.have and mean[1] is not None and record.roster:
            return State("delta", ("mean",), (mean[1].numel(),), *common).parcel(_raw([mean[1]]))
        names = tuple(sorted(state.vectors))
        lengths = tuple(state.vectors[name].numel() for name in names)
        return State("full", names, lengths, *common).parcel(_raw([state.vectors[name] for name in names]))

    async def fetch(self, donors: Iterable[PeerId], want: bytes | None) -> Caught:
        """A verified newer state from the first donor that has one."""
        said = []
        for donor in donors:
            deadline = self.net.now() + self.settings.phase_timeout + self.settings.call_timeout
            request = Sync(self.standing.state.hash, want).parcel()
            try:
                answer = await self.net.call(donor, "sync", request, deadline=deadline)
                return self._verified(answer, want)
            except (NetError, WireError, SyncError) as error:
                said.append(f"{donor}: {error}")
        raise SyncError("no donor could give the state: " + ("; ".join(said) or "nobody is known to have it"))

    def _verified(self, answer: Parcel, want: bytes | None) -> Caught:
        """The state in an answer, only if its hash is the committed one."""
        given, mine = State.decode(answer.header), self.standing.record
        if given.mode not in ("delta", "full") or given.record is None:
            raise SyncError("does not have it")
        record = decode_record(given.record)
        if want is None and not (record.beats(mine.mass, mine.hash) or record.hash == mine.hash):
            raise SyncError("has nothing newer")
        vectors = _vectors(given.names, given.lengths, answer.payload)
        mean = vectors.get("mean") if given.mode == "delta" else None
        if mean is not None and record.roster:
            state = self.standing.advance(self.standing.state, mean, record.roster)
        else:
            state = Snapshot(given.version, vectors, given.scalars)
        if state.hash != record.hash or (want is not None and state.hash != want):
            raise SyncError("gave a state whose hash is not the committed one")
        return Caught(record, state, mean, _commits(record, given.past))

    # --- slices ---

    async def answer_resend(self, _: PeerId, request: Parcel) -> Parcel:
        """Somebody misses a slice that I may hold; once the iteration is decided it is told so, and can ask how."""
        digest, known = Resend.decode(request.header).digest, self.standing.history.values()
        if any(record.roster is not None and record.roster.digest == digest for record in known):
            return Ok(DECIDED).parcel()
        return await resend(under_way(self.standing), request)


def under_way(standing: Standing) -> Attempt | None:
    """The attempt whose slices this peer still gives to those who miss them: none once the iteration is decided."""
    instance = standing.instance
    return instance.work.exchange if instance is not None and instance.record is None else None


def _raw(vectors: list[Tensor]) -> memoryview:
    return raw(vectors[0] if len(vectors) == 1 else torch.cat(vectors))


def _commits(record: Record, past: tuple[Committed, ...]) -> dict[int, bytes]:
    """The commits that a donor tells of, and those that its record names."""
    before = {record.iteration - 1: record.roster.base} if record.roster else {}
    return {at: digest for at, digest in past if at < record.iteration} | before | {record.iteration: record.hash}


def _vectors(names: tuple[str, ...], lengths: tuple[int, ...], payload: Buffer) -> dict[str, Tensor]:
    if not 0 < len(names) == len(lengths) <= MAX_VECTORS or min(lengths) < 0:
        raise WireError("a state with bad vectors")
    joined = vector_from(payload, sum(lengths))
    if not all_finite(joined):
        raise WireError("a state with NaN or infinity")
    return dict(zip(names, torch.split(joined, list(lengths)), strict=True))
