"""The figures: every axis has its unit, no legend hides data, and lines that cover each other stay visible."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from marfl.report.overlap import widths_of
from marfl.report.series import (
    Axis,
    Curve,
    Growth,
    Series,
    accuracy_curve,
    bytes_sent,
    growths_of,
    iterations,
    mean,
    virtual_time,
)
from marfl.rundir import Split

WIDTH, HEIGHT = 5.4, 3.3  # inches without the legend: narrow, so that the letters stay readable on a phone
LEGEND_ROW = 0.24  # inches
LOG_SPREAD = 20  # an axis is logarithmic when its largest value is this many times its smallest
MARKERS = 8  # about so many on a line
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
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
    """A finished figure."""

    name: str  # of its files, without suffix
    caption: str
    png: bytes
    svg: bytes


@dataclass(frozen=True)
class View:
    """Accuracy seen over one axis."""

    name: str
    label: str  # of the x axis
    axis: Axis
    ticks: Callable[[Axes], None]
    may_be_log: bool


def drawings(series: Sequence[Series], splits: Sequence[tuple[str, Split]]) -> Iterator[Drawing]:
    """Every figure for which the runs have data."""
    with rc_context({**rcParamsDefault, **STYLE, "backend": "agg"}):  # whatever the user's matplotlibrc says
        for view in VIEWS:
            yield from _accuracy(series, view)
        yield from _bytes_of_techniques(series)
        yield from _bytes_against_peers(growths_of(series))
        for number, (owner, split) in enumerate(splits, start=1):
            yield _split(f"split-{number}" if len(splits) > 1 else "split", owner, split)


def _accuracy(series: Sequence[Series], view: View) -> Iterator[Drawing]:
    found = [(each, accuracy_curve(each, view.axis)) for each in series]
    curves = [(each, curve) for each, curve in found if curve is not None]
    if not curves:
        return
    figure, axes = _canvas([each.label for each, _ in curves])
    ends = [curve.x[-1] for _, curve in curves if curve.x[-1] > 0]
    log = view.may_be_log and bool(ends) and (view.axis is bytes_sent or max(ends) > LOG_SPREAD * min(ends))
    if log:
        axes.set_xscale("log")
    widths = widths_of([list(zip(curve.x, curve.mean, strict=True)) for _, curve in curves], log_x=log)
    for index, ((each, curve), width) in enumerate(zip(curves, widths, strict=True)):
        _line(axes, each, curve, width, index)
    view.ticks(axes)
    axes.set_xlabel(view.label)
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    _legend(figure, [each.label for each, _ in curves])
    left_out = [each.label for each, curve in found if curve is None]
    without = f" Without data: {', '.join(left_out)}." if left_out else ""
    yield _drawing(view.name, f"Test accuracy over {view.label}.{_same(curves, widths)}{_band(series)}{without}", figure)


def _line(axes: Axes, series: Series, curve: Curve, width: float, index: int) -> None:
    every = max(1, len(curve.x) // MARKERS)
    axes.plot(
        curve.x,
        curve.mean,
        label=series.label,
        color=series.look.colour,
        linestyle=series.dashes,
        linewidth=width,
        marker=series.look.marker,
        markersize=width + 3.5,
        markevery=(index % every, every),  # staggered, so that markers do not cover each other
    )
    if len(series.runs) > 1:
        axes.fill_between(curve.x, curve.low, curve.high, color=series.look.colour, alpha=0.2, linewidth=0)


def _bytes_of_techniques(series: Sequence[Series]) -> Iterator[Drawing]:
    sent = [(each, [facts.bytes_per_iteration for facts in each.facts]) for each in series]
    bars = sorted(((each, values) for each, values in sent if any(values)), key=lambda bar: mean(bar[1]))
    if not bars:
        return
    figure = Figure(figsize=(WIDTH, 1.1 + 0.36 * len(bars)))
    axes = figure.subplots()
    means = [mean(values) for _, values in bars]
    spans = [[at - min(values) for (_, values), at in zip(bars, means, strict=True)],
             [max(values) - at for (_, values), at in zip(bars, means, strict=True)]]
    drawn = axes.barh(
        [each.label for each, _ in bars],
        means,
        color=[each.look.colour for each, _ in bars],
        xerr=spans if any(map(any, spans)) else None,
        error_kw={"ecolor": "#666666", "capsize": 3},
    )
    log = max(means) > LOG_SPREAD * min(means)
    if log:
        axes.set_xscale("log")
    axes.bar_label(drawn, [_amount(each, at) for (each, _), at in zip(bars, means, strict=True)], padding=4, fontsize=10)
    low, high = (min(means) / 3, max(means)) if log else (0.0, max(means))
    axes.set_xlim(low, high * (high / low) ** 0.55 if log else high * 1.55)  # room for the amounts
    _byte_ticks(axes)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("bytes sent per iteration, all peers" + (" (log scale)" if log else ""))
    yield _drawing("bytes-techniques", "Bytes sent in an iteration by all peers together; S is one model, sent by "
                   f"each peer on average.{_band(series)}", figure)


def _amount(series: Series, sent: float) -> str:
    models = [facts.models_per_peer_iteration for facts in series.facts]
    shown = EngFormatter("B", places=1)(sent)
    known = [each for each in models if each is not None]
    return f"{shown} = {mean(known):.3g} S" if len(known) == len(models) else shown


def _bytes_against_peers(growths: Sequence[Growth]) -> Iterator[Drawing]:
    if not growths:
        return
    labels = [each.label for each in growths]
    figure, axes = _canvas([*labels, "∝ N", "∝ N²"])
    widths = widths_of([list(each.points) for each in growths], log_x=True, log_y=True)
    for each, width in zip(growths, widths, strict=True):
        axes.loglog(
            *zip(*each.points, strict=True),
            label=each.label,
            color=each.look.colour,
            linestyle=each.dashes,
            linewidth=width,
            marker=each.look.marker,
            markersize=width + 3.5,
        )
    counts = sorted({peers for each in growths for peers, _ in each.points})
    start = min(value for each in growths for _, value in each.points)
    for power, label, dashes in ((1, "∝ N", (0, (1, 2))), (2, "∝ N²", (0, (4, 3)))):
        values = [start * (peers / counts[0]) ** power for peers in counts]
        axes.plot(counts, values, label=label, color="#999999", linestyle=dashes, linewidth=1, zorder=1)
    axes.set_xticks(counts, [f"{peers:,}" for peers in counts])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(EngFormatter("B"))
    axes.set_xlabel("peers N")
    axes.set_ylabel("bytes per iteration, all peers")
    _legend(figure, [*labels, "∝ N", "∝ N²"])
    yield _drawing("bytes-peers", "Bytes sent in an iteration by all peers together, against their number; the grey "
                   "lines grow with N and with N².", figure)


def _split(name: str, owner: str, split: Split) -> Drawing:
    figure = Figure(figsize=(WIDTH, max(HEIGHT, 1.0 + 0.22 * min(len(split.labels), 30))))
    axes = figure.subplots()
    shown = axes.imshow(list(zip(*split.counts, strict=True)), aspect="auto", cmap="cividis", interpolation="nearest")
    axes.grid(visible=False)
    axes.set_xlabel("peer")
    axes.set_ylabel("label")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(split.labels) <= 30:
        axes.set_yticks(range(len(split.labels)), split.labels)
    figure.colorbar(shown, label="samples", format=MaxNLocatorFormat)
    sizes = [sum(row) for row in split.counts]
    caption = f"Who holds which samples ({owner}): {len(sizes):,} peers with {min(sizes):,} to {max(sizes):,} samples each."
    return _drawing(name, caption, figure)


def _canvas(labels: Sequence[str]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT + LEGEND_ROW * math.ceil(len(labels) / _columns(labels))))
    return figure, figure.subplots()


def _columns(labels: Sequence[str]) -> int:
    longest = max(map(len, labels))
    return 1 if longest > 26 else 2 if longest > 14 else 3


def _legend(figure: Figure, labels: Sequence[str]) -> None:
    figure.legend(loc="outside lower center", ncols=_columns(labels), handlelength=3.2, columnspacing=1.2)
