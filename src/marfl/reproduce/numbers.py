"""The only way a number gets on the page: from the summaries of a case's runs, by a spelled-out formula.

A number is worked out for every seed by itself, the cases paired by seed, so that what a seed does to all of them alike
drops out of ratios and differences. What is shown and judged is the mean over the seeds with its 95 % confidence
interval (Student's t).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.filesize import decimal

NOTICEABLE = 0.01  # accuracy: less than a point is nothing that anybody would notice
SUBSTANTIAL = 0.03
# t(0.975) of 2, 3, … 10 seeds
STUDENT = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
BY_LOT = "by_lot"  # in a summary that was found: whether it was drawn who takes part
SETTLED = (  # fields that follow from the settings alone: one seed says it all, unless it stopped at an accuracy
    "peers", "iterations", "model_bytes", "messages_total", "bytes_total", "bytes_by_kind", "steps_total", "privacy",
    "target_accuracy", "disagreement",
)  # fmt: skip

Summary = Mapping[str, Any]
Evidence = Mapping[str, Sequence[Summary]]  # by case: a summary for each seed


class Spread(float):
    """The mean over seeds, and how far it may be off: half of its 95 % confidence interval, infinite for one seed."""

    half: float
    seeds: int

    def __new__(cls, mean: float, half: float = 0.0, seeds: int = 1) -> Spread:
        found = super().__new__(cls, mean)
        found.half, found.seeds = half, seeds
        return found

    @property
    def known(self) -> bool:
        return math.isfinite(self.half)

    @property
    def ends(self) -> tuple[float, ...]:
        """The ends of the interval; one number where all seeds agree."""
        return (self - self.half, self + self.half) if self.half else (float(self),)


def spread_of(values: Sequence[float], *, settled: bool) -> Spread:
    """The mean of a number's values, one for each seed; `settled` when a single one is certain."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Spread(mean, 0.0 if settled else math.inf, 1)
    deviation = 0.0 if max(values) == min(values) else statistics.stdev(values)
    return Spread(mean, STUDENT[min(count - 2, len(STUDENT) - 1)] * deviation / math.sqrt(count), count)


@dataclass(frozen=True)
class Mean:
    """The mean over a case's seeds of a field of their summaries; `bytes_by_kind.control` looks inside."""

    case: str
    field: str

    @property
    def cases(self) -> tuple[str, ...]:
        return (self.case,)

    def values(self, evidence: Evidence) -> tuple[float, ...] | None:
        """One for each seed; None when a run has none."""
        found = [_looked_up(summary, self.field) for summary in evidence[self.case]]
        return None if None in found else tuple(map(float, found))

    def settled(self, evidence: Evidence) -> bool:
        """Whether one seed is certain: who takes part was not drawn, and no accuracy decided about the end."""
        first = evidence[self.case][0]
        free = first.get("target_accuracy") is not None or first.get(BY_LOT, False)
        return "seed" not in first or (self.field.split(".")[0] in SETTLED and not free)

    def formula(self) -> str:
        return f"{self.field} of {self.case}"


def _looked_up(summary: Summary, field: str) -> Any:
    """A field of a summary; a dot looks inside."""
    value: Any = summary
    for part in field.split("."):
        value = value[part]
    return value


@dataclass(frozen=True)
class Pair:
    """One number over another, or how far it lies above the other; None when that does not exist."""

    first: Number
    sign: Literal["/", "−"]
    second: Number

    @property
    def cases(self) -> tuple[str, ...]:
        return self.first.cases + self.second.cases

    def values(self, evidence: Evidence) -> tuple[float, ...] | None:
        """One for each seed, that of the one beside that of the other; what has no seeds goes with all of them."""
        first, second = self.first.values(evidence), self.second.values(evidence)
        if first is None or second is None or (self.sign == "/" and 0 in second):
            return None
        count = max(len(first), len(second))
        pairs = zip(*(each * count if len(each) == 1 else each for each in (first, second)), strict=True)
        return tuple(a - b if self.sign == "−" else a / b for a, b in pairs)

    def settled(self, evidence: Evidence) -> bool:
        return self.first.settled(evidence) and self.second.settled(evidence)

    def formula(self) -> str:
        return f"({self.first.formula()}) {self.sign} ({self.second.formula()})"


Number = Mean | Pair


def spread(number: Number, evidence: Evidence) -> Spread | None:
    """A number with its interval; None when a run has none."""
    values = number.values(evidence)
    return None if values is None else spread_of(values, settled=number.settled(evidence))


def ratio(over: Number, under: Number) -> Pair:
    """How many times the one is the other."""
    return Pair(over, "/", under)


def gap(high: Number, low: Number) -> Pair:
    """How much the one lies above the other."""
    return Pair(high, "−", low)


def peers(case: str) -> Mean:
    """How many there are, in all."""
    return Mean(case, "peers")


def accuracy(case: str) -> Mean:
    return Mean(case, "final_accuracy")


def sent(case: str) -> Mean:
    """Bytes of all peers in the whole run."""
    return Mean(case, "bytes_total")


def times(over: str, under: str) -> Pair:
    """How many times the bytes of the one are those of the other."""
    return ratio(sent(over), sent(under))


def to_target(case: str, what: str) -> Mean:
    """What it took to get to the target accuracy: bytes, iterations, seconds or steps."""
    return Mean(case, f"{what}_to_target")


def above(high: str, low: str) -> Pair:
    """How far the accuracy of the one is above that of the other."""
    return gap(accuracy(high), accuracy(low))


class Shown(float):
    """A number that a template may show: {a:%} 61.3 %, {b:B} 4.5 GB, {c:x} 10.3×, {d:pt} 2.1 points, {e:s}, {f:n}.

    Of a `Spread` the interval is shown as well, 61.3 ± 0.2 %, wherever the seeds differ. {d:pt2} has a digit
    more, for what differs by tenths of a point.
    """

    def __new__(cls, value: float) -> Shown:
        found = super().__new__(cls, value)
        half = value.half if isinstance(value, Spread) else 0.0
        found._half = half if math.isfinite(half) else 0.0
        return found

    _half: float

    def __format__(self, spec: str) -> str:
        value = float(self)
        shown = {
            "%": lambda: self._with(" %", 0.01, 1 if not 0 < abs(value) < 0.001 else 4),
            "B": lambda: self._bytes(),
            "x": lambda: self._with("×", 1.0, 1 if abs(value) >= 2 else 2),
            "pt": lambda: self._with(" points", 0.01, 1),
            "pt2": lambda: self._with(" points", 0.01, 2),
            "s": lambda: self._with(*_unit_of_time(value), 1),
            "n": lambda: self._with("", 1.0, 0 if value.is_integer() else 2, grouped=True),
            "g": lambda: f"{value:.3g}" + (f" ± {self._half:.1g}" if self._half else ""),
        }
        return shown[spec]() if spec in shown else super().__format__(spec)

    def _with(self, unit: str, size: float, digits: int, *, grouped: bool = False) -> str:
        comma = "," if grouped else ""
        mean = f"{round(self / size, digits) + 0.0:{comma}.{digits}f}"  # + 0.0: no -0.0
        return f"{mean}{_beside(self._half / size, f'{comma}.{digits}f')}{unit}"

    def _bytes(self) -> str:
        text = decimal(round(self))
        number, unit = text.rsplit(" ", 1)
        if not self._half or unit in ("byte", "bytes"):
            return text
        size = 1000 ** ("kB", "MB", "GB", "TB", "PB", "EB").index(unit) * 1000
        return f"{number}{_beside(self._half / size, '.1f')} {unit}"


def _beside(half: float, spec: str) -> str:
    """Half an interval beside its number; one that would round to nothing shows its first digit, if it is no error."""
    if half < 1e-9:
        return ""
    text = f"{half:{spec}}"
    return f" ± {text if text.strip('0.,') else f'{half:.1g}'}"


def _unit_of_time(value: float) -> tuple[str, float]:
    """The unit for people: 4.2 s, 13.1 min, 3.5 h."""
    for unit, size in ((" h", 3600.0), (" min", 60.0)):
        if value >= 2 * size:
            return unit, size
    return " s", 1.0


def fill(template: str, numbers: Mapping[str, float]) -> str:
    """The template with its numbers."""
    return template.format_map({name: Shown(value) for name, value in numbers.items()})
