"""The figures of the page, drawn as `marfl report` draws runs: a technique has one colour everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from marfl.config import Config
from marfl.errors import InputError
from marfl.report.looks import FURTHER_MARKERS, LINE_STYLES, OURS, Look, look_of
from marfl.report.series import Series, series_of
from marfl.reproduce.claims import Figure
from marfl.reproduce.gather import Findings
from marfl.reproduce.store import Store
from marfl.runs.files import write_atomic, writing


def draw_figures(store: Store, findings: Sequence[Findings], out: Path) -> dict[str, str]:
    """Draw every figure that has runs into `out`, as SVG and PNG; returns the captions by the figures' names."""
    try:
        from marfl.report.figures import drawing  # here, because it needs matplotlib, which is an extra
    except ModuleNotFoundError as error:
        raise InputError(f"reproduce: {error.name} is not installed; run: pip install 'marfl[plots]'") from error
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    captions = {}
    for found in findings:
        for figure in found.experiment.figures:
            drawn = drawing(figure.view, list(_series(store, found, figure)))
            if drawn is None:
                continue
            for kind in ("svg", "png"):
                write_atomic(out / f"{figure.name}.{kind}", drawn.rendered(kind))
            captions[figure.name] = f"{_titled(found, figure)}. {drawn.caption}"
    return captions


def _titled(found: Findings, figure: Figure) -> str:
    missing = [case for case in figure.cases if case not in found.evidence]
    task = figure.cases[0].split(" ", 1)[0].capitalize()
    without = f" (not run: {', '.join(missing)})" if missing else ""
    return f"{task}: {figure.title}{without}"


def _series(store: Store, found: Findings, figure: Figure) -> Iterator[Series]:
    """A line for each finished case; several of one look differ in dashes and markers. Ours has a look of its own."""
    seen: list[Look] = []
    for case, label in figure.lines.items():
        if case not in found.evidence:
            continue
        finished = found.cases[case].sources[: len(found.evidence[case])]
        configs = [source for source in finished if isinstance(source, Config)]
        ours = configs[0].technique == "mar" and configs[0].semantics == "exact"
        look = OURS if ours else look_of(configs[0].technique)
        for series in series_of([store.run(config) for config in configs]):
            further = seen.count(look) % len(LINE_STYLES)
            marker = (look.marker, *FURTHER_MARKERS)[further]
            yield replace(series, label=label, dashes=LINE_STYLES[further], given=look._replace(marker=marker))
            seen.append(look)
