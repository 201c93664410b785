"""Runs as a reader sees them: the facts of each, seeds pooled into series, and series as lines with labels and looks.

Nothing here draws: `figures` draws the lines, `page` puts the facts into a table.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from marfl.errors import InputError
from marfl.runs.config_file import flattened
from marfl.runs.reader import Run, Split
from marfl.runs.rows import BYTE_FIELDS

# --- looks: the same name, colour and marker for a technique in every figure ---
#
# The colours stay apart for people with protanopia, deuteranopia and tritanopia; a test holds it. The markers and the
# line styles say the same without colour.

Dashes = tuple[int, tuple[float, ...] | None]  # offset, and on, off, on, … in points; None is a solid line


class Look(NamedTuple):
    """How a technique appears."""

    name: str
    colour: str
    marker: str


LOOKS = {
    "mar": Look("MAR", "#0072B2", "o"),
    "fedavg": Look("FedAvg", "#222222", "s"),
    "arfl": Look("AR-FL", "#D55E00", "^"),
    "rdfl": Look("RDFL", "#CC79A7", "v"),
    "ring": Look("ring all-reduce", "#56B4E9", "D"),
    "butterfly": Look("butterfly", "#D6B500", "P"),
    "saps": Look("SAPS-PSGD", "#332288", "X"),
    "braintorrent": Look("BrainTorrent", "#882255", "<"),
    "gossip": Look("gossip", "#7A4B1E", ">"),
}
OURS = Look("MAR, exact semantics", "#76B259", "d")  # where it stands beside MAR-FL as published
OTHER_COLOUR, OTHER_MARKER = "#888888", "*"  # of a technique that is not ours

# Solid first, then patterns that differ in rhythm, for several runs of one technique.
LINE_STYLES: tuple[Dashes, ...] = (
    (0, None),
    (0, (6, 2)),
    (0, (2, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (7, 2, 1.5, 2, 1.5, 2)),
)
FURTHER_MARKERS = ("x", "+", "1", "|")  # to go with the patterns; no technique has one of them


def colours_of(looks: Sequence[Look]) -> list[str]:
    """A colour for each series: its look's for the first of a look, then those that nobody here has.

    When all are taken they come again; then markers and line styles tell.
    """
    own = {look.colour for look in looks}
    free = [look.colour for look in (*LOOKS.values(), OURS) if look.colour not in own]
    found: list[str] = []
    for place, look in enumerate(looks):
        first = look not in looks[:place]
        found.append(look.colour if first or not free else free.pop(0))
    return found


def look_of(technique: str) -> Look:
    """The look of a technique; one that is not ours appears under its own name, in grey."""
    return LOOKS.get(technique, Look(technique, OTHER_COLOUR, OTHER_MARKER))


def rank_of(technique: str) -> int:
    """The place of a technique in figures and tables: as in `LOOKS`, those that are not ours last."""
    return list(LOOKS).index(technique) if technique in LOOKS else len(LOOKS)


# --- facts: what a table says about a run, from its summary, or from its rows as far as it got ---


@dataclass(frozen=True)
class Facts:
    """One run in figures; None where it does not say."""

    run: str
    technique: str
    semantics: str | None
    exchange: str | None
    plan: str | None
    task: str | None
    peers: int | None
    seed: int | None
    iterations: int  # done
    final_accuracy: float | None
    best_accuracy: float | None
    bytes_total: int
    models_per_peer_iteration: float | None  # bytes sent, in model sizes S
    disagreement: float | None
    model_hash: str | None
    virtual_seconds: float | None
    wall_seconds: float | None
    engine: str | None
    engine_reason: str | None  # which way it took, and why
    findings: dict[str, int]  # what the rows' checks found, the most frequent first: in how many iterations
    state: str  # finished, or unfinished and why
    bytes_by_kind: dict[str, int]
    wire: str | None  # how values travelled
    bits_up: int | None  # of a value on its way to whoever adds it up, in the last iteration
    bits_down: int | None  # and of the sum on its way back
    payload_down: int  # bytes of all peers on that way back

    @property
    def bytes_per_iteration(self) -> float:
        """Bytes of all peers in one iteration, on average."""
        return self.bytes_total / max(1, self.iterations)


def facts_of(run: Run, name: str) -> Facts:
    """Gather the facts of a run, to be called `name`; one that names no technique is refused."""
    summary: Mapping[str, Any] = run.summary or {}
    technique = _text(run, "technique")
    if technique is None:
        raise InputError(f"{run.path / 'config.toml'}: names no technique; restore it or repeat the run")
    accuracies = [row["test_accuracy"] for row in run.rows if row["test_accuracy"] is not None]
    last = run.rows[-1] if run.rows else {}
    grouped = technique == "mar"  # a group's exchange and plan mean nothing to the others
    return Facts(
        run=name,
        technique=technique,
        semantics=_text(run, "semantics"),
        exchange=_text(run, "exchange") if grouped else None,
        plan=_text(run, "plan") if grouped else None,
        task=_text(run, "task"),
        peers=_whole(run, "peers"),
        seed=_whole(run, "seed"),
        iterations=len(run.rows),
        final_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        bytes_total=last.get("bytes_total", 0),
        models_per_peer_iteration=_models(summary),
        disagreement=last.get("disagreement"),
        model_hash=last.get("model_hash"),
        virtual_seconds=_total(run, "virtual_seconds"),
        wall_seconds=summary.get("wall_seconds", _total(run, "wall_seconds")),
        engine=summary.get("engine"),
        engine_reason=summary.get("engine_reason"),
        findings=_findings(run),
        state=_state(run),
        bytes_by_kind={name.removeprefix("bytes_"): sum(row.get(name, 0) for row in run.rows) for name in BYTE_FIELDS},
        wire=summary.get("wire", _text(run, "wire")),
        bits_up=last.get("bits_up"),
        bits_down=last.get("bits_down"),
        payload_down=sum(row.get("payload_down", 0) for row in run.rows),
    )


def _findings(run: Run) -> dict[str, int]:
    counts = Counter(str(finding) for row in run.rows for finding in row.get("checks") or ())
    summary: Mapping[str, Any] = run.summary or {}
    told = summary.get("privacy") or {}
    counts.update({str(warning): len(run.rows) for warning in told.get("warnings") or ()})  # they are of all iterations
    return dict(counts.most_common())


def _text(run: Run, name: str) -> str | None:
    value = run.config.get(name)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{run.path / 'config.toml'}: {name} is {value!r}, not text; restore it or repeat the run")
    return value


def _whole(run: Run, name: str) -> int | None:
    value = run.config.get(name)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise InputError(f"{run.path / 'config.toml'}: {name} is {value!r}, not a count; restore it or repeat the run")
    return value


def _models(summary: Any) -> float | None:
    sent, size = summary.get("bytes_per_peer_iteration"), summary.get("model_bytes")
    return sent / size if sent is not None and size else None


def _total(run: Run, field: str) -> float | None:
    """The sum over the rows that say, or None when none does."""
    values = [row[field] for row in run.rows if row[field] is not None]
    return sum(values) if values else None


def _state(run: Run) -> str:
    if run.finished:
        return "finished"
    reason = run.summary.stopped_because if run.summary else None
    return f"unfinished: {reason}" if reason else "unfinished"


# --- labels: what tells runs apart, and nothing that they share ---

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


# --- series: repeated seeds pooled, and lines from them ---

Abscissa = Callable[[Run], Sequence[float] | None]  # where each row of a run lies on x; None when the run does not say


@dataclass(frozen=True)
class Line:
    """Points with a look; where runs are pooled, with the lowest and the highest of them."""

    label: str
    look: Look
    dashes: Dashes
    x: tuple[float, ...]
    y: tuple[float, ...]
    band: tuple[tuple[float, ...], tuple[float, ...]] | None = None


@dataclass(frozen=True)
class Series:
    """A run, or finished runs that differ only in the seed."""

    label: str
    technique: str
    dashes: Dashes
    runs: tuple[Run, ...]
    facts: tuple[Facts, ...]  # of each run
    colour: str | None = None  # its own, where a technique has several series
    given: Look | None = None  # by whoever also gave the label, and knows better what it is than the settings say

    @property
    def look(self) -> Look:
        usual = look_of(self.technique)
        return self.given or usual._replace(colour=self.colour or usual.colour)

    @property
    def seeds(self) -> list[int]:
        return sorted(facts.seed for facts in self.facts if facts.seed is not None)

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
    colours = colours_of(list(map(look_of, techniques)))
    remarks = [_remark(run, len(group)) for (run, _), group in zip(firsts, pooled.values(), strict=True)]
    labels = labels_of(techniques, [flattened(run.config) for run, _ in firsts], remarks)
    return [
        Series(
            label if labels.count(label) == 1 else f"{label} · {group[0][1].run}",
            technique,
            dashes,
            runs=tuple(run for run, _ in group),
            facts=tuple(facts for _, facts in group),
            colour=colour,
        )
        for label, technique, dashes, colour, group in zip(
            labels, techniques, _dashes_of(techniques), colours, pooled.values(), strict=True
        )
    ]


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, Run]]]:
    """Each finished run once, and (copy, first) for those that say the same again: pooled twice they would weigh twice.

    A copy has the same settings, the seed among them, and ended on the same model after the same bytes.
    """
    firsts: dict[str, Run] = {}
    kept, copies = [], []
    for run in runs:
        summary = run.summary if run.finished else None
        told = [run.config, *(summary[name] for name in ("engine", "model_hash", "bytes_total"))] if summary else None
        first = firsts.setdefault(json.dumps(told, sort_keys=True), run) if told else run
        if first is run:
            kept.append(run)
        else:
            copies.append((run, first))
    return kept, copies


def telling_settings(series: Sequence[Series]) -> tuple[list[str], list[dict[str, Any]]]:
    """The settings in which these series differ, and the values of each; what all share is not among them."""
    obeyed = [_obeyed(each.technique, flattened(each.runs[0].config)) for each in series]
    names = _telling(obeyed)
    return names, [{name: has[name] for name in names if name in has} for has in obeyed]


def accuracy_line(series: Series, axis: Abscissa, *, positive: bool) -> Line | None:
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


def splits_of(series: Sequence[Series]) -> list[tuple[str, Split]]:
    """Every different split, with the names of the runs that have it."""
    owners: dict[Split, list[str]] = {}
    for group in series:
        for run, facts in zip(group.runs, group.facts, strict=True):
            if run.split is not None:
                owners.setdefault(run.split, []).append(facts.run)
    return [(", ".join(names), split) for split, names in owners.items()]


def mean(values: Iterable[float]) -> float:
    """The ordinary mean of at least one value."""
    held = list(values)
    return sum(held) / len(held)


def _tested(run: Run, axis: Abscissa, positive: bool) -> dict[int, tuple[float, float]]:
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
