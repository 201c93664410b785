"""The figures of a report: accuracy over iterations, bytes and time; bytes of techniques and of N; the split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axis import Axis as PlotAxis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from marfl.report.canvas import (
    HEIGHT,
    LOG_SPREAD,
    WIDTH,
    Drawing,
    canvas,
    legend,
    plot,
    styled,
)
from marfl.report.lines import Line
from marfl.report.looks import Look
from marfl.report.series import (
    Axis,
    Series,
    accuracy_line,
    bytes_sent,
    growth_lines,
    iterations,
    mean,
    virtual_time,
)
from marfl.report.ticks import byte_ticks, count_ticks, percent_ticks, time_ticks
from marfl.runs import Split

MOST_LABELS = 30  # of a split, that are written out beside it
POOLED = " Runs that differ only in the seed are pooled: their mean, and a band from the lowest to the highest."


@dataclass(frozen=True)
class View:
    """Accuracy seen over one axis."""

    name: str
    what: str  # is on the x axis
    axis: Axis
    ticks: Callable[[PlotAxis], None]
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
    return Drawing("bytes-techniques", caption + _pooled(series), figure)


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


def _pooled(series: Sequence[Series]) -> str:
    return POOLED if any(len(each.runs) > 1 for each in series) else ""
