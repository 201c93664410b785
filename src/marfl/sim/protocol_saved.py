"""What virtual peers hold between two iterations, as a checkpoint: each state once, however many hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from marfl.net.virtual import VirtualNetwork
from marfl.protocol.participant import Participant
from marfl.protocol.roster import decode_record
from marfl.state import Snapshot

Tensors: TypeAlias = dict[str, Tensor]
Meta: TypeAlias = dict[str, Any]  # plain JSON values


def save_people(people: Sequence[Participant]) -> tuple[Tensors, Meta]:
    """States, records and last mean updates of all peers."""
    tensors: Tensors = {}
    states: dict[bytes, Meta] = {}
    records: dict[str, str] = {}  # by hash, those of the last commits
    rows = []
    for peer in people:
        state = peer.state
        if state.hash not in states:
            tensors |= {f"{state.hash.hex()}.{name}": vector for name, vector in state.vectors.items()}
            states[state.hash] = {"version": state.version, "scalars": dict(state.scalars)}
        row: Meta = {"state": state.hash.hex(), "record": peer.record.encoded.hex(), "barred": peer.standing.barred}
        row["history"] = [record.hash.hex() for record in peer.history.values()]
        records |= {record.hash.hex(): record.encoded.hex() for record in peer.history.values()}
        mean = peer.standing.last_mean
        if mean is not None and mean[1] is not None:
            row["mean_from"] = mean[0].hex()
            tensors[f"{state.hash.hex()}.mean.{row['mean_from']}"] = mean[1]
        rows.append(row)
    kept = {digest.hex(): state for digest, state in states.items()}
    return tensors, {"people": rows, "states": kept, "records": records}


def restore_people(people: Sequence[Participant], tensors: Tensors, meta: Meta) -> None:
    """Give peers that have just begun what `save_people` kept."""
    states = {
        digest: Snapshot(kept["version"], _vectors(tensors, digest), kept["scalars"])
        for digest, kept in meta["states"].items()
    }
    records = {digest: decode_record(bytes.fromhex(data)) for digest, data in meta["records"].items()}
    for peer, row in zip(people, meta["people"], strict=True):
        standing = peer.standing
        standing.history = {records[digest].iteration: records[digest] for digest in row["history"]}
        standing.state, standing.record = states[row["state"]], decode_record(bytes.fromhex(row["record"]))
        standing.barred = row["barred"]
        if "mean_from" in row:
            mean = tensors[f"{row['state']}.mean.{row['mean_from']}"]
            standing.last_mean = (bytes.fromhex(row["mean_from"]), mean)


def _vectors(tensors: Tensors, digest: str) -> Tensors:
    found = {name.removeprefix(f"{digest}."): t for name, t in tensors.items() if name.startswith(f"{digest}.")}
    return {name: vector for name, vector in found.items() if not name.startswith("mean.")}


def save_heads(network: VirtualNetwork, key: str, now: float) -> dict[str, tuple[str, float]]:
    """Where the DHT says that the newest state is, and for how much longer."""
    return {peer: (value.hex(), until - now) for peer, (value, until) in network.dht[key].items()}


def restore_heads(network: VirtualNetwork, key: str, now: float, heads: dict[str, tuple[str, float]]) -> None:
    network.dht[key] = {peer: (bytes.fromhex(value), now + left) for peer, (value, left) in heads.items()}
