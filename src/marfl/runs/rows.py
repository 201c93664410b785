"""What a run leaves behind, as types: a `Row` for each iteration (metrics.jsonl) and a `Summary` (summary.json).

Every field is named here once. A row or summary is also the JSON object that is on the disk, so `row["test_loss"]` is
`row.test_loss`; what only one kind of writer knows is in a subclass, or in `more` when it was read from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypedDict, get_type_hints

from marfl.byte_kinds import ByteKind
from marfl.config import Config


@dataclass(frozen=True, kw_only=True, eq=False)
class JsonObject(Mapping[str, Any]):
    """A frozen dataclass that is also the JSON object it is written as."""

    more: Mapping[str, Any] = field(default_factory=dict, repr=False)  # names in the file that the type does not have

    @cached_property
    def _object(self) -> dict[str, Any]:
        return {**self._named(), **self.more}

    def _named(self) -> dict[str, Any]:
        """The fields under their names in the file."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}

    def __getitem__(self, name: str) -> Any:
        return self._object[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._object)

    def __len__(self) -> int:
        return len(self._object)


@dataclass(frozen=True, kw_only=True, eq=False)
class Row(JsonObject):
    """One iteration. Bytes and seconds are of this iteration, except `bytes_total`."""

    iteration: int
    participants: int  # who updated or aggregated
    aggregators: int  # whose updates are in the average
    train_loss: float | None
    test_loss: float | None = None
    test_accuracy: float | None = None  # 0 to 1; None when not tested
    messages: int
    bytes_sent: Mapping[ByteKind, int]  # bytes_payload, bytes_control, … in the file
    bytes_total: int  # of all kinds and all peers, since the beginning
    virtual_seconds: float | None
    wall_seconds: float | None
    update_seconds: float | None
    aggregate_seconds: float | None
    disagreement: float | None
    model_hash: str | None
    epsilon_outsider: float | None = None
    epsilon_insider: float | None = None
    epsilon_insider_masked: float | None = None
    clip: float | None = None
    checks: list[str] = field(default_factory=list)  # what the robustness checks found; empty when all is well

    def _named(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in super()._named().items():
            if name == "bytes_sent":
                found |= {f"bytes_{kind}": value.get(kind, 0) for kind in ByteKind}
            else:
                found[name] = value
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class SwarmRow(Row):
    """An iteration of real peers."""

    dht_operations: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerRow(Row):
    """An iteration as one real peer saw it; the bytes are its own."""

    status: str  # "committed" by votes, "averaged" without them, "stale": a later state was fetched instead
    sent: Mapping[str, int]  # by name: bytes of every kind, messages, DHT operations
    received: Mapping[str, int]
    present: list[str] = field(default_factory=list)  # whose updates are in the average
    missing: Mapping[str, str] = field(default_factory=dict)  # who is not in it, and why
    # Only in the rows of those who know it.
    attempt: int | None = None  # the attempt (ballot) that was committed
    exchange: str | None = None
    holds: bool | None = None  # whether this peer has the state that was committed
    discarded: int | None = None  # committed iterations that were given up for a lineage that wins
    lineage: str | None = None
    swarm_accuracy: float | None = None  # everybody's own tests of the models before, averaged along with the update
    swarm_loss: float | None = None
    # Only where sums are audited.
    audits: Mapping[str, int] | None = None  # since the row before: made, unshown; lies that were proven to this peer
    tainted: list[int] | None = None  # iterations that it has learned of since the row before: a sum in them is wrong
    restored: int | None = None  # the iteration whose state the run went back to in this one

    def _named(self) -> dict[str, Any]:
        return {name: value for name, value in super()._named().items() if value is not None or name not in IF_KNOWN}


IF_KNOWN = (  # of a peer's row: left out of the file when None
    "attempt", "exchange", "holds", "discarded", "lineage", "swarm_accuracy", "swarm_loss", "audits", "tainted",
    "restored",
)  # fmt: skip


class TargetReached(TypedDict, total=False):
    """When the target accuracy was reached, and at what price; empty before."""

    iterations_to_target: int
    bytes_to_target: int
    seconds_to_target: float | None
    steps_to_target: int  # of simulations


@dataclass(frozen=True, kw_only=True, eq=False)
class Summary(JsonObject):
    """What came out of a run."""

    technique: str
    semantics: str
    exchange: str | None
    plan: str | None
    task: str
    peers: int
    iterations: int
    final_accuracy: float | None  # of the last row that was tested
    best_accuracy: float | None
    bytes_total: int
    bytes_per_peer_iteration: float
    model_bytes: int
    disagreement: float | None
    model_hash: str | None
    wall_seconds: float
    virtual_seconds: float | None
    engine: str
    engine_reason: str | None
    seed: int
    config_hash: str | None = None  # known to the run directory; not in the object before
    target_accuracy: float | None
    iterations_to_target: int | None = None
    bytes_to_target: int | None = None
    seconds_to_target: float | None = None
    finished: bool
    stopped_because: str | None

    def _named(self) -> dict[str, Any]:
        named = super()._named()
        if self.config_hash is None:
            del named["config_hash"]
        return named


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulationSummary(Summary):
    """What came out of a simulation."""

    task_options: Mapping[str, Any]
    bytes_by_kind: Mapping[ByteKind, int]
    messages_total: int
    steps_total: int  # gradient steps of all peers, those of distillation included
    steps_to_target: int | None = None
    value_checks: str  # what is looked for in values that arrive
    privacy: Mapping[str, Any] | None  # what was promised, and to whom


@dataclass(frozen=True, kw_only=True, eq=False)
class SwarmSummary(Summary):
    """What came out of a swarm of real peers."""

    value_checks: str
    coordination: str
    privacy: Mapping[str, Any] | None
    missing: Mapping[str, str]  # by index: the peers that did not reach the end, and why
    notes: list[str]
    audits: Mapping[str, int]  # of all peers: made, unshown, and the most lies that were proven to one of them
    left_out: Mapping[str, str]  # who is proven to have lied, and how
    tainted: list[int]  # the iterations in which it did
    agreed: bool  # whether all who reached the end hold one model
    payload_bytes: int
    # Without the first iteration, in which peers also look for each other; look-ups are in what is received alone.
    control_bytes_per_peer_iteration: float
    control_bytes_received_per_peer_iteration: float
    dht_operations_per_peer_iteration: float
    start_seconds: float | None
    processes: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerSummary(JsonObject):
    """What one real peer says of itself at its end."""

    index: int
    run: str
    peer: str  # its id
    model_hash: str
    iteration: int
    accuracy: float | None  # when last tested
    sent: Mapping[str, int]  # since the beginning, by name: bytes of every kind, messages, DHT operations
    received: Mapping[str, int]
    dht_operations: int
    refused: Mapping[str, int]  # what was not let in, by reason
    refused_from: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # the same by sender, where it is known
    stopped_because: str | None = None  # None while it runs
    lost_updates: int = 0  # of this process: they came too late for any average
    audits: Mapping[str, int] = field(default_factory=dict)  # since it started: made, unshown, lies that were proven
    left_out: Mapping[str, str] = field(default_factory=dict)  # who is proven to have lied, and how
    tainted: list[int] = field(default_factory=list)  # the iterations in which it did


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerStatus(PeerSummary):
    """What one real peer says of itself while it runs: its status page."""

    state: str
    peers_seen: int
    hash: str
    last_outcome: Mapping[str, Any] | None  # of the newest row, or of an attempt that came to nothing
    address: list[str]
    pid: int


class SettingsSummed(TypedDict):
    """The settings that a summary repeats."""

    exchange: str | None
    peers: int
    plan: str | None
    seed: int
    semantics: str
    target_accuracy: float | None
    task: str
    technique: str


def settings_summed(config: Config) -> SettingsSummed:
    """What a summary repeats of the settings; an exchange and a plan mean nothing without groups."""
    grouped = config.technique == "mar"
    return {
        "exchange": config.exchange if grouped else None,
        "peers": config.peers,
        "plan": config.plan if grouped else None,
        "seed": config.seed,
        "semantics": config.semantics,
        "target_accuracy": config.target_accuracy,
        "task": config.task,
        "technique": config.technique,
    }


# --- what the files must hold ---


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_CALLED: dict[Any, str] = {  # what the values of a type are called
    int: "a whole number",
    int | None: "a whole number or null",
    float: "a number",
    float | None: "a number or null",
    str: "text",
    str | None: "text or null",
    bool: "true or false",
    list[str]: "a list of texts",
}
_FITS: dict[str, Callable[[Any], bool]] = {
    "a whole number": _is_count,
    "a whole number or null": lambda value: value is None or _is_count(value),
    "a number": _is_number,
    "a number or null": lambda value: value is None or _is_number(value),
    "text": lambda value: isinstance(value, str),
    "text or null": lambda value: value is None or isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
}


def _names(kind: type[JsonObject]) -> dict[str, Any]:
    """Every name that the file must hold, with its type; a row has a count for each kind of bytes."""
    types = get_type_hints(kind)
    found: dict[str, Any] = {}
    for each in fields(kind):
        if each.name == "bytes_sent":
            found |= dict.fromkeys(BYTE_FIELDS, int)
        elif each.name != "more":
            found[each.name] = types[each.name]
    return found


BYTE_FIELDS = tuple(f"bytes_{kind}" for kind in ByteKind)
ROW_FIELDS = {name: _CALLED[kind] for name, kind in _names(Row).items()}
SUMMARY_FIELDS = {name: _CALLED[kind] for name, kind in _names(Summary).items()}


def parse_row(found: object) -> Row:
    """A line of metrics.jsonl as a row; ValueError says in a few words what it lacks."""
    known, more = _checked(found, ROW_FIELDS)
    return Row(**_with_bytes_sent(known), more=more)


def parse_peer_row(found: object) -> PeerRow:
    """A line of a peer's own metrics.jsonl; ValueError says in a few words what it lacks."""
    known, more = _checked(found, ROW_FIELDS | {"status": _CALLED[str]})
    names = ("sent", "received", "present", "missing", *IF_KNOWN)
    named = {name: more.pop(name) for name in names if name in more}
    return PeerRow(**_with_bytes_sent(known), **named, more=more)


def _with_bytes_sent(known: dict[str, Any]) -> dict[str, Any]:
    counts = {kind: known.pop(f"bytes_{kind}") for kind in ByteKind}
    return {**known, "bytes_sent": counts}


def parse_summary(found: object) -> Summary:
    """What summary.json holds; ValueError says in a few words what it lacks."""
    known, more = _checked(found, SUMMARY_FIELDS)
    return Summary(**known, more=more)


def _checked(found: object, expected: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a JSON value holds of the expected names, and what else it holds."""
    if not isinstance(found, Mapping):
        raise ValueError("is not an object")
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(
            f"lacks {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    for name, called in expected.items():
        if not _FITS[called](found[name]):
            raise ValueError(f"{name} is {found[name]!r:.60}, not {called}")
    more = {name: value for name, value in found.items() if name not in expected}
    return {name: found[name] for name in expected}, more
