"""Whether peers fit together: which settings all peers of a run must share, and that they train the same model.

`tests/protocol/test_terms.py` asks whoever adds a setting to put it in one of these tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

import msgpack

from marfl.config import Config
from marfl.dp.privacy_settings import indicator_noise_of, shares_of
from marfl.errors import InputError, NetError, WireError
from marfl.learn.strategy import Plain, Strategy, strategy_terms
from marfl.net.base import Net, Parcel, PeerId
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.terms import CHANNEL, Terms
from marfl.state import FrozenLayer, LayerSlot, Layout

LAYOUT_CHANNEL = "layout"
FROZEN = "frozen_weights"  # among the terms: the hash of what does not travel
OF_FROZEN = b"frozen"  # on the layout's channel: asks for the hash of each frozen layer
SHARED = (  # of `marfl.config.Config`, the most telling first
    "task", "task_options", "technique", "technique_options", "strategy", "strategy_options", "semantics",
    "coordination", "plan", "rounds", "peers", "seed", "partition.kind", "partition.alpha", "partition.min_samples",
    "local_batches", "batch", "global_batch", "momentum", "local", "overlap", "optimizer.learning_rate",
    "optimizer.decay",
    "churn.participation", "churn.update_participation", "churn.aggregate_participation", "churn.dropout",
    "share_tests", "churn.death", "churn.slow", "churn.slowness", "churn.sessions.up", "churn.sessions.down",
)  # fmt: skip
OF_DISTILLATION = (
    "distill.iterations", "distill.temperature", "distill.keep", "distill.epochs", "distill.batches",
    "distill.teacher", "distill.match_local_steps",
)  # fmt: skip
OF_PRIVACY = (
    "privacy.mode", "privacy.noise_multiplier", "privacy.clip", "privacy.target_quantile", "privacy.clip_step",
    "privacy.shares", "privacy.indicator_noise", "privacy.tolerated_loss", "privacy.unit", "privacy.records",
)  # fmt: skip
IN_PROTOCOL = (  # among `Settings.terms`, as the technique makes them
    "group_size", "exchange", "wire", "wire_down", "liars", "seniority", "audit", "on_fraud", "privacy.masks",
    "privacy.smallest_sum",
)  # fmt: skip
OWN = (  # how long, how often tested, on what; a budget is one's own, a trace is a file here; slow_* is simulated only
    "iterations", "links", "compute_seconds", "engine", "device", "workers", "cluster", "other_nodes", "test_every",
    "test_on", "target_accuracy", "patience", "checkpoint_every", "churn.trace", "privacy.delta",
    "privacy.target_epsilon", "privacy.target_observer", "privacy.colluders", "optimizer.slow_above",
    "optimizer.slow_rate",
)  # fmt: skip
SHARED_OPTIONS = (  # of `PeerOptions`
    "group_size", "exchange", "wire", "wire_down", "masks", "max_weight", "liars", "seniority", "smallest_sum", "audit",
    "on_fraud", "privacy", "records", "metrics", "strategy",
    "local",
)  # fmt: skip
OWN_OPTIONS = (  # a run's name is where peers meet
    "run", "join", "state_dir", "expected", "index", "listen", "identity", "token", "authority", "join_patience",
    "network", "progress",
)  # fmt: skip


def daemon_terms(
    config: Config, settings: Settings, frozen: str = "", strategy: Strategy | None = None
) -> dict[str, Any]:
    """What the daemons of a run must share; `frozen` is the hash of their models' frozen weights."""
    tree = config.model_dump(mode="json")
    of_distillation = OF_DISTILLATION if config.distill.iterations else OF_DISTILLATION[:1]
    chosen = {name: _at(tree, name) for name in (*SHARED, *of_distillation)}
    first = {"kind": "daemon", "privacy.mode": config.privacy.mode}  # which decides about the wire
    chosen |= strategy_terms(strategy) if strategy else {}  # with every option, whether it was written or not
    return {**first, **settings.terms, **chosen, **_privacy_terms(config), FROZEN: frozen}


def library_terms(
    config: Config | None,
    settings: Settings,
    frozen: str = "",
    metrics: Sequence[str] = (),
    strategy: Strategy = Plain(),  # noqa: B008 - it holds nothing
) -> dict[str, Any]:
    """What the library's peers of a run must share; `config` has the privacy of a private one."""
    private = _privacy_terms(config) if config else {"privacy.mode": "off"}
    of_records = ("batch", "optimizer.learning_rate", "optimizer.decay", "momentum")
    chosen: dict[str, Any] = {"momentum": "local"}
    if config is not None and config.privacy.unit == "record":
        tree = config.model_dump(mode="json")
        chosen = {name: _at(tree, name) for name in of_records}
    averaged = {"metrics": ", ".join(metrics)} if metrics else {}
    averaged |= strategy_terms(strategy)
    return {"kind": "library", **private, **settings.terms, **chosen, **averaged, FROZEN: frozen}


def _privacy_terms(config: Config) -> dict[str, Any]:
    """The constants of the mechanism, as they are and not as they were written: defaults depend on others."""
    if config.privacy.mode == "off":
        return {"privacy.mode": "off"}
    tree, shares = config.model_dump(mode="json"), shares_of(config)
    noise = indicator_noise_of(config, shares)
    return {name: _at(tree, name) for name in OF_PRIVACY} | {"privacy.shares": shares, "privacy.indicator_noise": noise}


def _at(tree: Any, name: str) -> Any:
    return reduce(lambda part, key: part.get(key) if isinstance(part, Mapping) else None, name.split("."), tree)


def serve_terms(net: Net, terms: Terms) -> None:
    """Tell whoever asks which settings this peer has, where no participant does."""
    answer = Parcel(terms.encoded)

    async def tell(_: PeerId, __: Parcel) -> Parcel:
        return answer

    net.serve(CHANNEL, tell)


async def refuse_other_terms(
    net: Net, run: str, mine: Terms, others: Mapping[PeerId, bytes], frozen: tuple[FrozenLayer, ...] = ()
) -> None:
    """`InputError` naming the setting when most of a run's peers that answer have other ones than mine.

    `frozen` are my frozen layers: where these differ, the first one is named.
    """
    for digest in dict.fromkeys(others.values()):
        if not mine.knows(digest):
            await _learn(net, mine, digest, [peer for peer, shown in others.items() if shown == digest])
    same = sum(mine.agree(digest) for digest in others.values())
    found = [(peer, first) for peer, digest in others.items() if (first := mine.difference(digest))]
    if len(found) > same:
        peer, first = found[0]
        if first.name == FROZEN:
            what = await _frozen_difference(net, peer, frozen)
            raise InputError(f"run {run!r}: its peers have other frozen weights: {what} ({peer})")
        raise InputError(f"run {run!r}: its peers have other settings: {first} ({peer})")


async def _learn(net: Net, mine: Terms, digest: bytes, peers: list[PeerId]) -> None:
    for peer in peers:
        try:
            answer = await net.call(peer, CHANNEL, Parcel(b""), deadline=net.now() + 5.0)
            mine.learn(digest, answer.header)
        except (NetError, WireError):
            continue  # gone, or not one of ours: the next one may say more
        return


# --- the model ---


def serve_layout(net: Net, layout: Layout, frozen: tuple[FrozenLayer, ...] = ()) -> None:
    """Tell whoever asks which model this peer trains, and by their hashes which weights it does not train."""
    answer = Parcel(encode_layout(layout))
    hashes = Parcel(msgpack.packb([list(layer) for layer in frozen]))

    async def tell(_: PeerId, asked: Parcel) -> Parcel:
        return hashes if asked.header == OF_FROZEN else answer

    net.serve(LAYOUT_CHANNEL, tell)


def decode_frozen(data: bytes) -> tuple[FrozenLayer, ...]:
    """The frozen layers in these bytes, or `WireError`."""
    try:
        rows = msgpack.unpackb(data, raw=False, max_ext_len=0)
        return tuple(FrozenLayer(f"{name:.200}", f"{dtype:.20}", bytes(digest)) for name, dtype, digest in rows)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not hashes of layers: {type(error).__name__}") from None


async def _frozen_difference(net: Net, peer: PeerId, mine: tuple[FrozenLayer, ...]) -> str:
    """The first frozen layer that is not the same there, in words."""
    try:
        answer = await net.call(peer, LAYOUT_CHANNEL, Parcel(OF_FROZEN), deadline=net.now() + 5.0)
        theirs = decode_frozen(bytes(answer.header))
    except (NetError, WireError):
        return "it does not say which layer differs"
    pairs = zip_longest(mine, theirs)
    return next((f"{a or 'nothing'} here, {b or 'nothing'} there" for a, b in pairs if a != b), "all the same by now")


def encode_layout(layout: Layout) -> bytes:
    data: bytes = msgpack.packb([[slot.name, list(slot.shape), slot.dtype] for slot in layout.slots])
    return data


def decode_layout(data: bytes) -> Layout:
    """The layout in these bytes, or `WireError`."""
    try:
        rows = msgpack.unpackb(data, raw=False, max_ext_len=0)
        slots, offset = [], 0
        for name, shape, dtype in rows:
            slot = LayerSlot(str(name), tuple(int(size) for size in shape), str(dtype), offset)
            slots.append(slot)
            offset += slot.length
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a layout: {type(error).__name__}") from None
    return Layout(tuple(slots))


async def refuse_other_layouts(net: Net, run: str, mine: Layout, others: Mapping[PeerId, bytes]) -> None:
    """`InputError` naming the layer when most of a run's peers train another model than mine."""
    strangers = [peer for peer, layout in others.items() if layout != mine.hash]
    if not strangers or 2 * len(strangers) <= len(others):
        return
    for peer in strangers:
        try:
            answer = await net.call(peer, LAYOUT_CHANNEL, Parcel(b""), deadline=net.now() + 5.0)
            difference = mine.difference(decode_layout(answer.header))
        except (NetError, WireError):
            continue  # gone, or not one of ours: the next one may say more
        if difference:
            raise InputError(f"run {run!r}: its peers train another model: {difference}")
