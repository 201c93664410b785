"""Runs as lines of a figure: repeated seeds pooled, accuracy over any axis, bytes against the number of peers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from marfl.report.facts import Facts, facts_of
from marfl.report.labels import labels_of
from marfl.report.lines import Line
from marfl.report.looks import LINE_STYLES, Dashes, Look, look_of, rank_of
from marfl.runs import Run, flattened

Axis = Callable[[Run], Sequence[float] | None]  # where each row of a run lies on x; None when the run does not say


@dataclass(frozen=True)
class Series:
    """A run, or finished runs that differ only in the seed."""

    label: str
    technique: str
    dashes: Dashes
    runs: tuple[Run, ...]
    facts: tuple[Facts, ...]  # of each run
    given: Look | None = None  # by whoever also gave the label, and knows better what it is than the settings say

    @property
    def look(self) -> Look:
        return self.given or look_of(self.technique)

    @property
    def sent(self) -> list[float]:
        """Bytes of all peers in an iteration, for each run."""
        return [facts.bytes_per_iteration for facts in self.facts]


def iterations(run: Run) -> Sequence[float]:
    """x is the iteration."""
    return [row["iteration"] for row in run.rows]


def bytes_sent(run: Run) -> Sequence[float]:
    """x is what all peers have sent so far."""
    return [row["bytes_total"] for row in run.rows]


def virtual_time(run: Run) -> Sequence[float] | None:
    """x is the virtual time so far, which stands still when nobody takes part; None when it never moves: no links."""
    seconds = [row["virtual_seconds"] or 0.0 for row in run.rows]
    return list(accumulate(seconds)) if any(seconds) else None


def series_of(runs: Sequence[Run]) -> list[Series]:
    """One series for each set of settings, in the order of `LOOKS`, then of peers, then as given.

    An unfinished run stands alone, as pooling would cut the others short.
    """
    root = os.path.commonpath([run.path.resolve().parent for run in runs])
    known = [(run, facts_of(run, run.path.resolve().relative_to(root).as_posix())) for run in runs]
    pooled: dict[tuple[str, str], list[tuple[Run, Facts]]] = {}
    for run, facts in sorted(known, key=lambda each: (rank_of(each[1].technique), each[1].peers or 0)):
        same = {name: value for name, value in flattened(run.config).items() if name != "seed"}
        alone = "" if run.finished else facts.run
        pooled.setdefault((json.dumps(same, sort_keys=True), alone), []).append((run, facts))
    firsts = [group[0] for group in pooled.values()]
    techniques = [facts.technique for _, facts in firsts]
    remarks = [_remark(run, len(group)) for (run, _), group in zip(firsts, pooled.values(), strict=True)]
    labels = labels_of(techniques, [flattened(run.config) for run, _ in firsts], remarks)
    return [
        Series(
            label if labels.count(label) == 1 else f"{label} · {group[0][1].run}",
            technique,
            dashes,
            runs=tuple(run for run, _ in group),
            facts=tuple(facts for _, facts in group),
        )
        for label, technique, dashes, group in zip(
            labels, techniques, _dashes_of(techniques), pooled.values(), strict=True
        )
    ]


def accuracy_line(series: Series, axis: Axis, *, positive: bool) -> Line | None:
    """Test accuracy over `axis`: the mean over the runs, at the iterations that all of them tested.

    Where the runs' x differ (bytes under churn), a point lies at their mean. `positive` leaves out points at 0, for
    which a logarithmic axis has no place. None when there is no point at all.
    """
    tested = [_tested(run, axis, positive) for run in series.runs]
    common = sorted(set.intersection(*(set(each) for each in tested)))
    at = [[each[iteration] for each in tested] for iteration in common]
    if not at:
        return None
    y = [[y for _, y in points] for points in at]
    return Line(
        series.label,
        series.look,
        series.dashes,
        x=tuple(mean(x for x, _ in points) for points in at),
        y=tuple(map(mean, y)),
        band=(tuple(map(min, y)), tuple(map(max, y))) if len(series.runs) > 1 else None,
    )


def growth_lines(series: Sequence[Series]) -> list[Line]:
    """Bytes of an iteration against the number of peers: a line for each technique, semantics, exchange, plan, task.

    Empty unless the runs differ in their number of peers.
    """
    ways: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    firsts: dict[tuple[Any, ...], Series] = {}
    for each in series:
        for facts in each.facts:
            if facts.peers and facts.bytes_total:
                way = (facts.technique, facts.semantics, facts.exchange, facts.plan, facts.task)
                ways.setdefault(way, {}).setdefault(facts.peers, []).append(facts.bytes_per_iteration)
                firsts.setdefault(way, each)
    if len({peers for points in ways.values() for peers in points}) < 2:
        return []
    names = ("semantics", "exchange", "plan", "task")
    settings = [{name: value for name, value in zip(names, way[1:], strict=True) if value is not None} for way in ways]
    labels = labels_of([way[0] for way in ways], settings, [""] * len(ways))
    dashes = _dashes_of([firsts[way].look.name for way in ways])
    return [
        Line(
            firsts[way].label if firsts[way].given else label,
            firsts[way].look,
            dash,
            tuple(sorted(sent)),
            tuple(mean(sent[peers]) for peers in sorted(sent)),
        )
        for label, dash, (way, sent) in zip(labels, dashes, ways.items(), strict=True)
    ]


def mean(values: Iterable[float]) -> float:
    """The ordinary mean of at least one value."""
    held = list(values)
    return sum(held) / len(held)


def _tested(run: Run, axis: Axis, positive: bool) -> dict[int, tuple[float, float]]:
    """(x, accuracy) by iteration, where it was tested."""
    places = axis(run)
    if places is None:
        return {}
    return {
        row["iteration"]: (x, row["test_accuracy"])
        for x, row in zip(places, run.rows, strict=True)
        if row["test_accuracy"] is not None and (x > 0 or not positive)
    }


def _dashes_of(names: Sequence[str]) -> list[Dashes]:
    """A line style for each: solid for the first of a name, a pattern for every further one."""
    return [LINE_STYLES[names[:index].count(name) % len(LINE_STYLES)] for index, name in enumerate(names)]


def _remark(run: Run, pooled: int) -> str:
    if not run.finished:
        return " (unfinished)"
    return f" (mean of {pooled} runs)" if pooled > 1 else ""
