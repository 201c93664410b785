"""Ticks that a person can read: SI bytes, percent, and times as 30 s, 10 min, 3 h."""

from __future__ import annotations

from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

MOST = 6  # labels beside each other
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
    if axis.get_scale() == "log":
        between = (1, 2, 5) if high < 30 * low else (1, 3) if high < 1000 * low else (1,)
        axis.set_major_locator(LogLocator(subs=between, numticks=MOST))
    else:
        axis.set_major_locator(MaxNLocator(MOST - 2))
    axis.set_major_formatter(EngFormatter("B"))
    axis.set_minor_formatter(NullFormatter())


def time_ticks(axis: Axis) -> None:
    """Ticks as 30 s, 10 min, 3 h; on a linear axis all in one unit."""
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log":
        ticks = _spread_times(low, high)
    else:
        steps = MaxNLocator(MOST, steps=[1, 2, 2.5, 5, 10])
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
    return dict(list(times.items())[:: 1 + len(times) // (MOST + 1)])
