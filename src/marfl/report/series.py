"""Runs as lines of a figure: repeated seeds pooled, labels that name what differs, curves over any axis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from marfl.report.facts import Facts, facts_of
from marfl.report.labels import labels_of
from marfl.report.looks import LINE_STYLES, Look, look_of
from marfl.rundir import Run, flattened

Dashes = tuple[int, tuple[float, ...] | None]  # offset, and on, off, on, … in points; None is a solid line
Axis = Callable[[Run], Sequence[float] | None]  # where each row of a run lies on x; None when the run does not say


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
    dashes: Dashes
    runs: tuple[Run, ...]
    facts: tuple[Facts, ...]  # of each run


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
    pooled: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in flattened(run.config).items() if name != "seed"}
        alone = "" if run.finished else str(run.path.resolve())
        pooled.setdefault((json.dumps(settings, sort_keys=True), alone), []).append(run)
    groups = list(pooled.values())
    facts = [tuple(facts_of(run) for run in group) for group in groups]
    techniques = [each[0].technique for each in facts]
    labels = labels_of(techniques, [flattened(group[0].config) for group in groups], [_remark(group) for group in groups])
    return [
        Series(_unique(label, labels, each[0]), look_of(each[0].technique), dashes, tuple(group), each)
        for label, dashes, group, each in zip(labels, dashes_of(techniques), groups, facts, strict=True)
    ]


def dashes_of(techniques: Sequence[str]) -> list[Dashes]:
    """A line style for each: solid for the first of a technique, a pattern for every further one."""
    return [LINE_STYLES[techniques[:index].count(name) % len(LINE_STYLES)] for index, name in enumerate(techniques)]


def accuracy_curve(series: Series, axis: Axis) -> Curve | None:
    """Test accuracy over `axis`: the mean over the runs, at the iterations that all of them tested.

    Where the runs' x differ (bytes under churn), a point lies at their mean. None when there is no such point.
    """
    tested: list[dict[int, tuple[float, float]]] = []
    for run in series.runs:
        places = axis(run)
        if places is None:
            return None
        points = zip(places, run.rows, strict=True)
        tested.append({row["iteration"]: (x, row["test_accuracy"]) for x, row in points if row["test_accuracy"] is not None})
    common = sorted(set.intersection(*(set(each) for each in tested)))
    at = [[each[iteration] for each in tested] for iteration in common]
    if not at:
        return None
    return Curve(
        x=tuple(mean(x for x, _ in points) for points in at),
        mean=tuple(mean(y for _, y in points) for points in at),
        low=tuple(min(y for _, y in points) for points in at),
        high=tuple(max(y for _, y in points) for points in at),
    )


@dataclass(frozen=True)
class Growth:
    """Bytes of an iteration against the number of peers, for one way to do it."""

    label: str
    look: Look
    dashes: Dashes
    points: tuple[tuple[int, float], ...]  # (peers, bytes of all peers in an iteration)


def growths_of(series: Sequence[Series]) -> list[Growth]:
    """One growth for each technique, semantics, exchange, plan and task; empty unless runs differ in peers."""
    ways: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    for facts in (facts for each in series for facts in each.facts):
        if facts.peers and facts.bytes_total:
            way = (facts.technique, facts.semantics, facts.exchange, facts.plan, facts.task)
            ways.setdefault(way, {}).setdefault(facts.peers, []).append(facts.bytes_per_iteration)
    if len({peers for points in ways.values() for peers in points}) < 2:
        return []
    techniques = [way[0] for way in ways]
    names = ("semantics", "exchange", "plan", "task")
    settings = [{name: value for name, value in zip(names, way[1:], strict=True) if value is not None} for way in ways]
    labels = labels_of(techniques, settings, [""] * len(ways))
    return [
        Growth(label, look_of(technique), dashes, tuple((peers, mean(each)) for peers, each in sorted(points.items())))
        for label, technique, dashes, points in zip(labels, techniques, dashes_of(techniques), ways.values(), strict=True)
    ]


def mean(values: Iterable[float]) -> float:
    """The ordinary mean of at least one value."""
    held = list(values)
    return sum(held) / len(held)


def _remark(group: Sequence[Run]) -> str:
    if not group[0].finished:
        return " (unfinished)"
    return f" (mean of {len(group)} runs)" if len(group) > 1 else ""


def _unique(label: str, labels: Sequence[str], facts: Facts) -> str:
    return label if labels.count(label) == 1 else f"{label} · {facts.run}"
