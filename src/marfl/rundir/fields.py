"""What rows and summaries hold, field by field, and what is said when one does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_COUNT, _NUMBER, _FLAG = "a whole number", "a number or null", "true or false"
_TEXT, _TEXTS = "text or null", "a list of texts"

BYTE_FIELDS = tuple(  # of this iteration
    f"bytes_{kind}" for kind in ("payload", "control", "repair", "sync", "distill", "masks")
)
ROW_FIELDS = {
    "iteration": _COUNT,
    "participants": _COUNT,
    "aggregators": _COUNT,
    "train_loss": _NUMBER,
    "test_loss": _NUMBER,
    "test_accuracy": _NUMBER,  # 0 to 1; null when not tested
    "messages": _COUNT,
    **dict.fromkeys(BYTE_FIELDS, _COUNT),
    "bytes_total": _COUNT,  # cumulative, of all kinds and all peers
    "virtual_seconds": _NUMBER,  # of this iteration, as are the other seconds
    "wall_seconds": _NUMBER,
    "update_seconds": _NUMBER,
    "aggregate_seconds": _NUMBER,
    "disagreement": _NUMBER,
    "model_hash": _TEXT,
    "epsilon_outsider": _NUMBER,
    "epsilon_insider": _NUMBER,
    "epsilon_insider_masked": _NUMBER,
    "clip": _NUMBER,
    "checks": _TEXTS,  # what the robustness checks found; empty when all is well
}
SUMMARY_FIELDS = {
    "technique": _TEXT,
    "semantics": _TEXT,
    "exchange": _TEXT,
    "plan": _TEXT,
    "task": _TEXT,
    "peers": _COUNT,
    "iterations": _COUNT,
    "final_accuracy": _NUMBER,  # of the last row that was tested
    "best_accuracy": _NUMBER,
    "bytes_total": _COUNT,
    "bytes_per_peer_iteration": _NUMBER,
    "model_bytes": _COUNT,
    "disagreement": _NUMBER,
    "model_hash": _TEXT,
    "wall_seconds": _NUMBER,
    "virtual_seconds": _NUMBER,
    "engine": _TEXT,
    "engine_reason": _TEXT,
    "seed": _COUNT,
    "config_hash": _TEXT,
    "target_accuracy": _NUMBER,
    "iterations_to_target": _NUMBER,
    "bytes_to_target": _NUMBER,
    "seconds_to_target": _NUMBER,
    "finished": _FLAG,
    "stopped_because": _TEXT,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_FITS: dict[str, Callable[[Any], bool]] = {
    _COUNT: lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    _NUMBER: lambda value: value is None or _is_number(value),
    _TEXT: lambda value: value is None or isinstance(value, str),
    _TEXTS: lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    _FLAG: lambda value: isinstance(value, bool),
}


def problem_of(record: object, fields: Mapping[str, str]) -> str | None:
    """What keeps a JSON value from holding all `fields`, in a few words, or None; it may hold more."""
    if not isinstance(record, Mapping):
        return "is not an object"
    missing = [field for field in fields if field not in record]
    if missing:
        return f"lacks {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    for field, kind in fields.items():
        if not _FITS[kind](record[field]):
            return f"{field} is {record[field]!r:.60}, not {kind}"
    return None


def in_order(record: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """The record with the known fields first, in their order."""
    return {**{field: record[field] for field in fields if field in record}, **record}
