"""The only way a number gets on the page: from the summaries of a case's runs, by a spelled-out formula."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.filesize import decimal

NOTICEABLE = 0.01  # accuracy: less than a point is within what seeds do
SUBSTANTIAL = 0.03

Summary = Mapping[str, Any]
Evidence = Mapping[str, Sequence[Summary]]  # by case: a summary for each seed


@dataclass(frozen=True)
class Mean:
    """The mean over a case's seeds of a field of their summaries; `bytes_by_kind.control` looks inside."""

    case: str
    field: str

    @property
    def cases(self) -> tuple[str, ...]:
        return (self.case,)

    def value(self, evidence: Evidence) -> float | None:
        found = [_looked_up(summary, self.field) for summary in evidence[self.case]]
        return None if None in found else statistics.fmean(found)

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

    def value(self, evidence: Evidence) -> float | None:
        first, second = self.first.value(evidence), self.second.value(evidence)
        if first is None or second is None:
            return None
        if self.sign == "−":
            return first - second
        return first / second if second else None

    def formula(self) -> str:
        return f"({self.first.formula()}) {self.sign} ({self.second.formula()})"


Number = Mean | Pair


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


def above(high: str, low: str) -> Pair:
    """How far the accuracy of the one is above that of the other."""
    return gap(accuracy(high), accuracy(low))


class Shown(float):
    """A number that a template may show: {a:%} 61.3 %, {b:B} 4.5 GB, {c:x} 10.3×, {d:pt} 2.1 points, {e:s}, {f:n}."""

    def __format__(self, spec: str) -> str:
        shown = {
            "%": lambda: f"{100 * self:.1f} %" if not 0 < abs(self) < 0.001 else f"{100 * self:.1g} %",
            "B": lambda: decimal(round(self)),
            "x": lambda: f"{self:.1f}×" if abs(self) >= 2 else f"{self:.2f}×",
            "pt": lambda: f"{round(100 * self, 1) + 0.0:.1f} points",  # + 0.0: no -0.0
            "s": lambda: _seconds(self),
            "n": lambda: f"{self:,.0f}" if self.is_integer() else f"{self:,.2f}",
            "g": lambda: f"{self:.3g}",
        }
        return shown[spec]() if spec in shown else super().__format__(spec)


def _seconds(value: float) -> str:
    """A time for people: 4.2 s, 13.1 min, 3.5 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s"


def fill(template: str, numbers: Mapping[str, float]) -> str:
    """The template with its numbers."""
    return template.format_map({name: Shown(value) for name, value in numbers.items()})
