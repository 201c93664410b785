"""One look for each technique, the same in every figure: name, colour and marker.

The colours stay apart for people with protanopia, deuteranopia and tritanopia; a test holds it. The markers and the
line styles say the same without colour.
"""

from __future__ import annotations

from typing import NamedTuple

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


def look_of(technique: str) -> Look:
    """The look of a technique; one that is not ours appears under its own name, in grey."""
    return LOOKS.get(technique, Look(technique, OTHER_COLOUR, OTHER_MARKER))


def rank_of(technique: str) -> int:
    """The place of a technique in figures and tables: as in `LOOKS`, those that are not ours last."""
    return list(LOOKS).index(technique) if technique in LOOKS else len(LOOKS)
