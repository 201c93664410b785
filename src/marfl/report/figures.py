"""The figures of a report: accuracy over iterations, bytes and time; bytes of techniques and of N; the split."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from marfl.report.series import (
    Abscissa,
    Line,
    Look,
    Series,
    accuracy_line,
    bytes_sent,
    growth_lines,
    iterations,
    mean,
    virtual_time,
)
from marfl.runs.reader import Split

# --- style, lines, legends below the axes ---

WIDTH, HEIGHT = 5.4, 3.3  # inches, without a legend: narrow, so that the letters stay readable on a phone
LEGEND_ROW = 0.24  # inches
LOG_SPREAD = 20  # an axis may be logarithmic when its largest value is this many times its smallest
MARKERS = 8  # about so many on a line
SAME_PLACE = 0.01  # points this near, as a share of both axes, cover each other: about a line's width
THIN, STEP, WIDEST = 1.8, 2.4, 12.0  # line widths in points: on top, how much wider each one below is, at most
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


def coinciding(lines: Sequence[Line], *, log_x: bool = False, log_y: bool = False) -> list[list[int]]:
    """The lines by index, grouped so that those of a group cover each other as far as the shortest of them goes."""
    across = _shares([line.x for line in lines], log=log_x)
    up = _shares([line.y for line in lines], log=log_y)
    places = [list(zip(*each, strict=True)) for each in zip(across, up, strict=True)]
    groups: list[list[int]] = []
    for index, line in enumerate(places):
        for group in groups:
            pairs = zip(line, places[group[0]], strict=False)
            if all(max(abs(a - c), abs(b - d)) < SAME_PLACE for (a, b), (c, d) in pairs):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def widths_of(size: int) -> list[float]:
    """Widths for the lines of a group, widest first: drawn in this order, each is seen on both sides of the next."""
    step = min(STEP, (WIDEST - THIN) / max(1, size - 1))
    return [THIN + step * below for below in reversed(range(size))]


def _shares(values: Sequence[Sequence[float]], *, log: bool) -> list[list[float]]:
    """The values as shares of the axis that shows them all."""
    scaled = [[math.log10(value) if log else value for value in each] for each in values]
    low = min(value for each in scaled for value in each)
    span = max(value for each in scaled for value in each) - low
    return [[(value - low) / span if span else 0.0 for value in each] for each in scaled]


# --- ticks that a person can read: SI bytes, percent, and times as 30 s, 10 min, 3 h ---

MOST_TICKS = 6  # labels beside each other
UNITS = (("ms", 0.001), ("s", 1.0), ("min", 60.0), ("h", 3_600.0), ("d", 86_400.0))


def count_ticks(axis: Axis) -> None:
    """Whole numbers, in ones, twos, fives or tens."""
    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def percent_ticks(axis: Axis) -> None:
    """Ticks of a share as 80%."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))


def byte_ticks(axis: Axis) -> None:
    """Ticks as 10 kB, 1 MB, 1 GB; between the powers of ten where there are few of them."""
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log" and high > 5 * low:
        between = (1, 2, 5) if high < 30 * low else (1, 3) if high < 1000 * low else (1,)
        axis.set_major_locator(LogLocator(subs=between, numticks=MOST_TICKS))
    else:
        axis.set_major_locator(MaxNLocator(MOST_TICKS - 2))  # also where a log axis has hardly a power of ten
    axis.set_major_formatter(EngFormatter("B"))
    axis.set_minor_formatter(NullFormatter())


def time_ticks(axis: Axis) -> None:
    """Ticks as 30 s, 10 min, 3 h; on a linear axis all in one unit."""
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log":
        ticks = _spread_times(low, high)
    else:
        steps = MaxNLocator(MOST_TICKS, steps=[1, 2, 2.5, 5, 10])
        unit, size = [each for each in UNITS if high >= 2 * each[1] or each is UNITS[0]][-1]
        ticks = {size * tick: f"{tick:.4g} {unit}" for tick in steps.tick_values(low / size, high / size)}
    shown = {tick: label for tick, label in ticks.items() if low <= tick <= high}
    axis.set_ticks(list(shown), list(shown.values()))
    axis.set_ticks([], minor=True)


def _spread_times(low: float, high: float) -> dict[float, str]:
    """Times for a logarithmic axis: 1, 3, 10, 30, … of every unit while the next is larger, thinned to a few."""
    ends = [size for _, size in UNITS[1:]] + [float("inf")]
    times = {
        count * size: f"{count} {unit}"
        for (unit, size), end in zip(UNITS, ends, strict=True)
        for count in (1, 3, 10, 30, 100, 300)
        if low <= count * size <= high and count * size < end
    }
    return dict(list(times.items())[:: 1 + len(times) // (MOST_TICKS + 1)])


# --- the figures ---

MOST_LABELS = 30  # of a split, that are written out beside it
POOLED = " Runs that differ only in the seed are pooled: their mean, and a band from the lowest to the highest."
POOLED_BARS = POOLED.replace("a band", "a grey line")  # what is drawn of a range there


@dataclass(frozen=True)
class View:
    """Accuracy seen over one axis."""

    name: str
    what: str  # is on the x axis
    axis: Abscissa
    ticks: Callable[[Axis], None]
    log_from: float  # logarithmic when the lines end so many times apart


VIEWS = (
    View("accuracy-iterations", "iteration", iterations, count_ticks, math.inf),
    View("accuracy-bytes", "bytes sent by all peers", bytes_sent, byte_ticks, 0.0),
    View("accuracy-time", "virtual time", virtual_time, time_ticks, LOG_SPREAD),
)


def drawings(series: Sequence[Series], splits: Sequence[tuple[str, Split]]) -> Iterator[Drawing]:
    """Every figure for which the runs have data."""
    with styled():
        found = [_accuracy(series, view) for view in VIEWS]
        found += [_bytes_of_techniques(series), _bytes_of_peers(series)]
        for number, (owner, split) in enumerate(splits, start=1):
            found.append(_split(f"split-{number}" if len(splits) > 1 else "split", owner, split))
    yield from (drawing for drawing in found if drawing is not None)


def drawing(name: str, series: Sequence[Series]) -> Drawing | None:
    """One figure by its name: that of a view, `bytes-techniques` or `bytes-peers`; None when the runs have no data."""
    views = {view.name: view for view in VIEWS}
    with styled():
        if name in views:
            return _accuracy(series, views[name])
        return {"bytes-techniques": _bytes_of_techniques, "bytes-peers": _bytes_of_peers}[name](series)


def _accuracy(series: Sequence[Series], view: View) -> Drawing | None:
    found = [accuracy_line(each, view.axis, positive=view.log_from < math.inf) for each in series]
    lines = [line for line in found if line is not None]
    if not lines:
        return None
    figure, axes = canvas(lines)
    ends = [line.x[-1] for line in lines]
    log = max(ends) >= view.log_from * min(ends)
    covered = plot(axes, lines, log_x=log)
    view.ticks(axes.xaxis)
    axes.set_xlabel(f"{view.what} (log scale)" if log else view.what)
    axes.set_ylabel("test accuracy")
    percent_ticks(axes.yaxis)
    legend(figure, lines)
    missing = [each.label for each, line in zip(series, found, strict=True) if line is None]
    without = f" Without data for it: {', '.join(missing)}." if missing else ""
    return Drawing(view.name, f"Test accuracy over {view.what}.{covered}{_pooled(series)}{without}", figure)


def _bytes_of_techniques(series: Sequence[Series]) -> Drawing | None:
    bars = sorted((each for each in series if all(each.sent)), key=lambda each: mean(each.sent))
    if not bars:
        return None
    means = [mean(each.sent) for each in bars]
    figure = Figure(figsize=(WIDTH, 0.8 + 0.5 * len(bars)))
    axes = figure.subplots()
    log = means[-1] > LOG_SPREAD * means[0]
    axes.set_xscale("log" if log else "linear")
    if log:  # the length of a bar means nothing where there is no zero: dots
        for place, (each, at) in enumerate(zip(bars, means, strict=True)):
            axes.plot([at], [place], color=each.look.colour, marker=each.look.marker, markersize=9)
    else:
        axes.barh(range(len(bars)), means, height=0.4, color=[each.look.colour for each in bars])
    for place, (each, at) in enumerate(zip(bars, means, strict=True)):
        label = f"{each.label}: {_amount(each, at)}"
        # Above the bar, where a long label has the whole width.
        axes.text(0.01, place - 0.29, label, transform=axes.get_yaxis_transform(), fontsize=10)
        if len(each.sent) > 1:
            axes.hlines(place, min(each.sent), max(each.sent), color="#999999", linewidth=3)
    axes.set_xlim(means[0] / 3 if log else 0.0, means[-1] * (1.5 if log else 1.1))
    axes.set_ylim(len(bars) - 0.6, -0.7)
    axes.set_yticks([])
    byte_ticks(axes.xaxis)
    axes.set_xlabel("bytes per iteration, all peers" + (" (log scale)" if log else ""))
    caption = "Bytes that all peers send in an iteration, and what each sends on average in model sizes S."
    return Drawing("bytes-techniques", caption + _pooled(series, POOLED_BARS), figure)


def _amount(series: Series, sent: float) -> str:
    models = [facts.models_per_peer_iteration for facts in series.facts if facts.models_per_peer_iteration is not None]
    shown = EngFormatter("B", places=2)(sent)
    return f"{shown}, {mean(models):.4g} S" if models else shown


def _bytes_of_peers(series: Sequence[Series]) -> Drawing | None:
    lines = growth_lines(series)
    if not lines:
        return None
    slopes = _slopes(lines)
    figure, axes = canvas([*lines, *slopes])
    covered = plot(axes, lines, log_x=True, log_y=True)
    byte_ticks(axes.yaxis)
    top = axes.get_ylim()[1]
    for slope in slopes:
        axes.plot(slope.x, slope.y, color=slope.look.colour, linestyle=slope.dashes, linewidth=1, zorder=1)
    axes.set_ylim(top=top)  # the slopes may leave the figure, the data may not
    axes.minorticks_off()
    axes.set_xticks(slopes[0].x, [f"{peers:,.0f}" for peers in slopes[0].x])
    axes.set_xlabel("peers N (log scale)")
    axes.set_ylabel("bytes per iteration, all peers\n(log scale)")
    legend(figure, [*lines, *slopes])
    caption = "Bytes that all peers send in an iteration, against their number; grey lines grow with N and with N²."
    return Drawing("bytes-peers", caption + covered, figure)


def _slopes(lines: Sequence[Line]) -> list[Line]:
    """Grey lines to read the growth by, from the lowest point, over every number of peers there is."""
    counts = sorted({peers for line in lines for peers in line.x})
    start = min(min(line.y) for line in lines)
    times = [peers / counts[0] for peers in counts]
    return [
        Line(name, Look(name, "#999999", ""), dashes, x=tuple(counts), y=tuple(start * each**power for each in times))
        for name, power, dashes in (("∝ N", 1, (0, (1, 2))), ("∝ N²", 2, (0, (4, 3))))
    ]


def _split(name: str, owner: str, split: Split) -> Drawing:
    figure = Figure(figsize=(WIDTH, max(HEIGHT, 1.0 + 0.22 * min(len(split.labels), MOST_LABELS))))
    axes = figure.subplots()
    shown = axes.imshow(list(zip(*split.counts, strict=True)), aspect="auto", cmap="cividis", interpolation="nearest")
    axes.grid(visible=False)
    axes.set_xlabel("peer")
    axes.set_ylabel("label")
    count_ticks(axes.xaxis)
    if len(split.labels) <= MOST_LABELS:
        axes.set_yticks(range(len(split.labels)), split.labels)
    figure.colorbar(shown, label="samples", ticks=MaxNLocator(integer=True))
    sizes = [sum(row) for row in split.counts]
    held = f"{min(sizes):,} to {max(sizes):,} samples each"
    return Drawing(name, f"Who holds which samples ({owner}): {len(sizes):,} peers with {held}.", figure)


def _pooled(series: Sequence[Series], said: str = POOLED) -> str:
    return said if any(len(each.runs) > 1 for each in series) else ""
