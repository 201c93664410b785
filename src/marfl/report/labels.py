"""Labels that say what tells runs apart, and nothing that they share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from marfl.report.looks import look_of

FIRST_NAMED = ("task", "semantics", "exchange", "plan", "peers")  # what a label says before other settings
SELF_EVIDENT = frozenset({"task", "semantics", "exchange"})  # 'paper' says what it is; 0.5 needs 'participation'
OF_GROUPS = frozenset({"exchange", "plan", "group_size", "rounds"})  # settings that only mar obeys
NOT_NAMED = frozenset({"technique", "seed"})  # the label starts with the one, and pools over the other


def labels_of(techniques: Sequence[str], settings: Sequence[Mapping[str, Any]], remarks: Sequence[str]) -> list[str]:
    """A label for each: the technique, the settings in which it differs from others, the remark."""
    obeyed = [_obeyed(*each) for each in zip(techniques, settings, strict=True)]
    named = _telling(obeyed)
    return [
        " · ".join([look_of(technique).name, *(_spoken(name, has[name]) for name in named if name in has)]) + remark
        for technique, has, remark in zip(techniques, obeyed, remarks, strict=True)
    ]


def _obeyed(technique: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that mean something to the technique, as hashable values."""
    return {
        name: json.dumps(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if name not in NOT_NAMED and (technique == "mar" or name not in OF_GROUPS)
    }


def _telling(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that tell runs apart, without those that follow from the ones named before them."""
    chosen: list[str] = []
    for name in dict.fromkeys([*FIRST_NAMED, *(name for each in settings for name in each)]):
        values: dict[tuple[Any, ...], set[Any]] = {}
        for each in settings:
            if name in each:
                values.setdefault(tuple(each.get(known) for known in chosen), set()).add(each[name])
        if any(len(found) > 1 for found in values.values()):
            chosen.append(name)
    return chosen


def _spoken(name: str, value: Any) -> str:
    return str(value) if name in SELF_EVIDENT else f"{name.rsplit('.', 1)[-1].replace('_', ' ')} {value}"
