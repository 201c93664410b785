"""What all figures share: size, style, lines, legends below the axes, and the finished files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from marfl.report.lines import THIN, Line, coinciding, widths_of

WIDTH, HEIGHT = 5.4, 3.3  # inches, without a legend: narrow, so that the letters stay readable on a phone
LEGEND_ROW = 0.24  # inches
LOG_SPREAD = 20  # an axis may be logarithmic when its largest value is this many times its smallest
MARKERS = 8  # about so many on a line
STYLE: Any = {  # matplotlib names its settings one by one in their type
    "font.size": 11,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "marfl",  # the same runs give the same bytes
}


@dataclass(frozen=True)
class Drawing:
    """A figure to be saved and shown."""

    name: str  # of its files, without suffix
    caption: str
    figure: Figure

    def rendered(self, kind: str) -> bytes:
        """The figure as 'png' or 'svg'; no date in it, so that the same runs give the same bytes."""
        nothing = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        with styled(), io.BytesIO() as file:
            self.figure.savefig(file, format=kind, dpi=160, metadata=nothing)
            return file.getvalue()


@contextmanager
def styled() -> Iterator[None]:
    """Our style, whatever the user's matplotlibrc says."""
    with rc_context():
        rcdefaults()
        rcParams.update(STYLE)
        yield


def canvas(lines: Sequence[Line]) -> tuple[Figure, Axes]:
    """An empty figure with room below the axes for a legend of these lines."""
    labels = [line.label for line in lines]
    figure = Figure(figsize=(WIDTH, HEIGHT + LEGEND_ROW * math.ceil(len(labels) / _columns(labels))))
    return figure, figure.subplots()


def plot(axes: Axes, lines: Sequence[Line], *, log_x: bool = False, log_y: bool = False) -> str:
    """Draw the lines, the covered ones wider; return a sentence that names those that cover each other, or nothing."""
    axes.set_xscale("log" if log_x else "linear")
    axes.set_yscale("log" if log_y else "linear")
    groups = coinciding(lines, log_x=log_x, log_y=log_y)
    for group in groups:
        for rank, (index, width) in enumerate(zip(group, widths_of(len(group)), strict=True)):
            line = lines[index]
            every = max(len(group), len(line.x) // MARKERS)
            axes.plot(
                line.x,
                line.y,
                **_pen(line, width),
                markevery=(rank % len(line.x), every),  # in turn, so that markers do not cover each other
                zorder=3 - width / 100,  # a thin line is never below a wide one
            )
            if line.band:
                axes.fill_between(line.x, *line.band, color=line.look.colour, alpha=0.2, linewidth=0)
    together = [", ".join(lines[index].label for index in group) for group in groups if len(group) > 1]
    return f" Lines that cover each other are drawn one inside the other: {'; '.join(together)}." if together else ""


def legend(figure: Figure, lines: Sequence[Line]) -> None:
    """A legend below the axes, where it hides nothing; all its lines are equally wide."""
    figure.legend(
        handles=[Line2D([], [], **_pen(line, 1.2 * THIN)) for line in lines],
        loc="outside lower center",
        ncols=_columns([line.label for line in lines]),
        handlelength=4.4,
        columnspacing=1.2,
    )


def _pen(line: Line, width: float) -> dict[str, Any]:
    return {
        "label": line.label,
        "color": line.look.colour,
        "linestyle": line.dashes,
        "linewidth": width,
        "marker": line.look.marker,
        "markersize": width + 4,
        "markeredgewidth": THIN,  # some markers are nothing but edges
    }


def _columns(labels: Sequence[str]) -> int:
    longest = max(map(len, labels))
    return 1 if longest > 27 else 2 if longest > 14 else 3
