"""Runs as lines of a figure: repeated seeds pooled, labels that name what differs, curves over any axis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from marfl.report.facts import Facts, facts_of, name_of
from marfl.report.looks import LINE_STYLES, Look, look_of
from marfl.rundir import Run, flattened

FIRST_NAMED = ("task", "semantics", "exchange", "plan", "peers")  # what a label says before other settings
OF_GROUPS = frozenset({"exchange", "plan", "group_size", "rounds"})  # settings that only mar obeys
SAME_PLACE = 0.006  # curves this near, as a share of the axes, cover each other


@dataclass(frozen=True)
class Curve:
    """Points of a line with the lowest and the highest of the pooled runs."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Series:
    """One line of a figure: a run, or finished runs that differ only in the seed."""

    label: str
    look: Look
    dashes: tuple[int, tuple[float, ...] | None]
    runs: tuple[Run, ...]
    facts: tuple[Facts, ...]  # of each run


Axis = Callable[[Run], Sequence[float] | None]  # where each row of a run lies on x; None when the run does not say


def iterations(run: Run) -> Sequence[float]:
    """x is the iteration."""
    return [row["iteration"] for row in run.rows]


def bytes_sent(run: Run) -> Sequence[float]:
    """x is what all peers have sent so far."""
    return [row["bytes_total"] for row in run.rows]


def virtual_time(run: Run) -> Sequence[float] | None:
    """x is the virtual time so far; None when a row has none, or when time stands still for want of links."""
    seconds = [row["virtual_seconds"] for row in run.rows]
    return list(accumulate(seconds)) if None not in seconds and any(seconds) else None


def series_of(runs: Sequence[Run]) -> list[Series]:
    """One series for each set of settings; an unfinished run stands alone, as pooling would cut the others short."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in flattened(run.config).items() if name != "seed"}
        alone = "" if run.finished else str(run.path.resolve())
        groups.setdefault((json.dumps(settings, sort_keys=True), alone), []).append(run)
    pooled = list(groups.values())
    facts = [tuple(facts_of(run) for run in group) for group in pooled]
    used: dict[str, int] = {}
    series = []
    for group, each, label in zip(pooled, facts, _labels(pooled, [each[0].technique for each in facts]), strict=True):
        technique = each[0].technique
        dashes = LINE_STYLES[used.get(technique, 0) % len(LINE_STYLES)]
        used[technique] = used.get(technique, 0) + 1
        series.append(Series(label, look_of(technique), dashes, tuple(group), each))
    return series


def accuracy_curve(series: Series, axis: Axis) -> Curve | None:
    """Test accuracy over `axis`: the mean over the runs, at the iterations that all of them tested.

    Where the runs' x differ (bytes under churn), a point lies at their mean. None when there is no such point.
    """
    tested = []
    for run in series.runs:
        places = axis(run)
        if places is None:
            return None
        pairs = zip(run.rows, places, strict=True)
        tested.append({row["iteration"]: (x, row["test_accuracy"]) for row, x in pairs if row["test_accuracy"] is not None})
    common = sorted(set.intersection(*(set(points) for points in tested)))
    at = [[points[iteration] for points in tested] for iteration in common]
    if not at:
        return None
    return Curve(
        x=tuple(_mean(x for x, _ in points) for points in at),
        mean=tuple(_mean(y for _, y in points) for points in at),
        low=tuple(min(y for _, y in points) for points in at),
        high=tuple(max(y for _, y in points) for points in at),
    )


def coinciding(places: Sequence[Sequence[tuple[float, float]]]) -> list[list[int]]:
    """Which lines cover each other: groups of indices. Points are in shares of the axes; the shorter line decides."""
    groups: list[list[int]] = []
    for index, line in enumerate(places):
        for group in groups:
            if all(_near(here, there) for here, there in zip(line, places[group[0]], strict=False)):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _near(here: tuple[float, float], there: tuple[float, float]) -> bool:
    return all(abs(a - b) < SAME_PLACE for a, b in zip(here, there, strict=True))


def _labels(groups: Sequence[Sequence[Run]], techniques: Sequence[str]) -> list[str]:
    settings = [_obeyed(group[0], technique) for group, technique in zip(groups, techniques, strict=True)]
    named = _telling(settings)
    labels = []
    for group, technique, has in zip(groups, techniques, settings, strict=True):
        parts = [look_of(technique).name, *(_spoken(name, has[name]) for name in named if name in has)]
        if len(group) > 1:
            parts.append(f"{len(group)} seeds")
        labels.append(" · ".join(parts) + ("" if group[0].finished else " (unfinished)"))
    return [
        label if labels.count(label) == 1 else f"{label} · {name_of(group[0].path)}"
        for label, group in zip(labels, groups, strict=True)
    ]


def _obeyed(run: Run, technique: str) -> dict[str, Any]:
    """The settings that mean something to the run's technique, as hashable values."""
    return {
        name: json.dumps(value) if isinstance(value, list) else value
        for name, value in flattened(run.config).items()
        if name not in {"technique", "seed"} and (technique == "mar" or name not in OF_GROUPS)
    }


def _telling(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that tell the runs apart, without those that follow from the ones before them."""
    names = dict.fromkeys([*FIRST_NAMED, *(name for each in settings for name in each)])
    chosen: list[str] = []
    for name in names:
        values: dict[tuple[Any, ...], set[Any]] = {}
        for each in settings:
            if name in each:
                values.setdefault(tuple(each.get(known) for known in chosen), set()).add(each[name])
        if any(len(found) > 1 for found in values.values()):
            chosen.append(name)
    return chosen


def _spoken(name: str, value: Any) -> str:
    """'paper' says what it is by itself; a number needs its name: 'participation 0.5'."""
    return value if isinstance(value, str) and name in FIRST_NAMED else f"{name.rsplit('.', 1)[-1].replace('_', ' ')} {value}"


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
