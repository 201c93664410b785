"""Lines of a figure, and how they stay visible where they cover each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from marfl.report.looks import Dashes, Look

SAME_PLACE = 0.01  # points this near, as a share of both axes, cover each other: about a line's width
THIN, STEP, WIDEST = 1.8, 2.4, 12.0  # line widths in points: on top, how much wider each one below is, at most


@dataclass(frozen=True)
class Line:
    """Points with a look; where runs are pooled, with the lowest and the highest of them."""

    label: str
    look: Look
    dashes: Dashes
    x: tuple[float, ...]
    y: tuple[float, ...]
    band: tuple[tuple[float, ...], tuple[float, ...]] | None = None


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
