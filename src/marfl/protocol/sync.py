"""Catch-up: the agreed state from any peer that has it, checked against the committed hash before it is used.

Whoever missed one iteration is given its mean update (one vector); whoever missed more is given the whole state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from marfl.errors import NetError, SyncError, WireError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.roster import Record
from marfl.protocol.roster_code import decode_record
from marfl.protocol.wire import pack, raw, unpack, vector_from
from marfl.state import Snapshot, all_finite

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant

MAX_VECTORS = 16


class Caught(NamedTuple):
    """A verified state, the record it belongs to, and the mean update that led to it when that was sent."""

    record: Record | None
    state: Snapshot
    mean: Tensor | None


async def answer_sync(me: Participant, _: PeerId, request: Parcel) -> Parcel:
    """Give my newest state, or the wanted one if I hold it: as one mean update where that suffices."""
    fields = unpack("sync", request.header)
    state, record, mean = me.state, me.record, me.last_mean
    accepted = me.instance.accepted if me.instance else None
    if fields["want"] not in (None, state.hash) and accepted and accepted.hash == fields["want"] and accepted.state:
        state, mean = accepted.state, (accepted.roster.base, accepted.mean)
        record = me.record.after(accepted.roster, accepted.hash)
    if fields["want"] not in (None, state.hash) or state.hash != record.hash:
        empty = {"mode": "none", "names": [], "lengths": [], "scalars": {}, "version": state.version}
        return Parcel(pack("state", record=None, **empty))
    common = {"record": record.encoded, "version": state.version, "scalars": dict(state.scalars)}
    if mean and mean[0] == fields["have"] and mean[1] is not None and record.roster:
        header = pack("state", mode="delta", names=["mean"], lengths=[mean[1].numel()], **common)
        return Parcel(header, _raw([mean[1]]))
    names = sorted(state.vectors)
    lengths = [state.vectors[name].numel() for name in names]
    header = pack("state", mode="full", names=names, lengths=lengths, **common)
    return Parcel(header, _raw([state.vectors[name] for name in names]))


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
    return Caught(record, state, mean)


def _vectors(names: list[str], lengths: list[int], payload: bytes | memoryview) -> dict[str, Tensor]:
    if not 0 < len(names) == len(lengths) <= MAX_VECTORS or not all(isinstance(n, int) and n >= 0 for n in lengths):
        raise WireError("a state with bad vectors")
    joined = vector_from(payload, sum(lengths))
    if not all_finite(joined):
        raise WireError("a state with NaN or infinity")
    return dict(zip(map(str, names), torch.split(joined, lengths), strict=True))
