"""From runs to files: every figure as PNG and SVG, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marfl.errors import InputError
from marfl.report.facts import Facts
from marfl.report.page import Picture, page
from marfl.report.series import Series, series_of
from marfl.runs import Run, Split
from marfl.runs.files import write_atomic, writing

PAGE = "index.html"


@dataclass(frozen=True)
class Report:
    """What was drawn."""

    page: Path
    figures: tuple[Path, ...]  # PNG and SVG
    facts: tuple[Facts, ...]  # of every run, in the order of the page's table


def draw(runs: Sequence[Run], out: Path, *, title: str | None = None) -> Report:
    """Draw a report on `runs` into `out`: the figures they have data for, and one page that works offline.

    The same runs give the same bytes. Files of an earlier report are replaced, others are left alone.
    """
    if not runs:
        raise InputError("report: there is no run to draw")
    series = series_of(runs)
    try:
        from marfl.report.figures import drawings  # here, because it needs matplotlib, which is an extra
    except ModuleNotFoundError as error:
        raise InputError(f"report: {error.name} is not installed; run: pip install 'marfl[plots]'") from error
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    pictures, files = [], []
    for drawing in drawings(series, splits_of(series)):
        for kind in ("png", "svg"):
            files.append(out / f"{drawing.name}.{kind}")
            write_atomic(files[-1], drawing.rendered(kind))
        pictures.append(Picture(drawing.caption, files[-1].read_bytes()))
    facts = tuple(each for group in series for each in group.facts)
    write_atomic(out / PAGE, page(title or _title(facts), pictures, facts).encode())
    return Report(out / PAGE, tuple(files), facts)


def splits_of(series: Sequence[Series]) -> list[tuple[str, Split]]:
    """Every different split, with the names of the runs that have it."""
    owners: dict[Split, list[str]] = {}
    for group in series:
        for run, facts in zip(group.runs, group.facts, strict=True):
            if run.split is not None:
                owners.setdefault(run.split, []).append(facts.run)
    return [(", ".join(names), split) for split, names in owners.items()]


def _title(facts: Sequence[Facts]) -> str:
    tasks = sorted({each.task for each in facts if each.task})
    peers = sorted({each.peers for each in facts if each.peers})
    counts = f"{', '.join(f'{count:,}' for count in peers)} peers" if peers else ""
    return ", ".join(filter(None, [*tasks, counts])) or "runs"
