"""The only way a number gets on the page: from the summaries of a case's runs, by a spelled-out formula."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

Summary = Mapping[str, Any]
Evidence = Mapping[str, Sequence[Summary]]  # by case: a summary for each seed


@dataclass(frozen=True)
class Mean:
    """The mean over a case's seeds of a field of their summaries; `bytes_by_kind.control` looks inside."""

    case: str
    field: str

    def value(self, evidence: Evidence) -> float | None:
        found = field_values(evidence[self.case], self.field)
        return None if None in found else statistics.fmean(value for value in found if value is not None)

    def formula(self) -> str:
        return f"{self.field} of {self.case}"


@dataclass(frozen=True)
class Ratio:
    """One number over another."""

    over: Number
    under: Number

    def value(self, evidence: Evidence) -> float | None:
        over, under = self.over.value(evidence), self.under.value(evidence)
        return None if over is None or not under else over / under

    def formula(self) -> str:
        return f"({self.over.formula()}) / ({self.under.formula()})"


@dataclass(frozen=True)
class Gap:
    """How much the one lies above the other."""

    high: Number
    low: Number

    def value(self, evidence: Evidence) -> float | None:
        high, low = self.high.value(evidence), self.low.value(evidence)
        return None if high is None or low is None else high - low

    def formula(self) -> str:
        return f"({self.high.formula()}) − ({self.low.formula()})"


Number = Mean | Ratio | Gap


def field_values(summaries: Sequence[Summary], field: str) -> list[float | None]:
    """A field of each summary; a dot looks inside, and null stays None."""
    found = []
    for summary in summaries:
        value: Any = summary
        for part in field.split("."):
            value = value[part]
        found.append(None if value is None else float(value))
    return found


class Shown(float):
    """A number that a template may show: {a:%} 61.3 %, {b:B} 4.5 GB, {c:x} 10.3×, {d:pt} 2.1 points, {e:s}, {f:n}."""

    def __format__(self, spec: str) -> str:
        shown = {
            "%": lambda: f"{100 * self:.1f} %" if not 0 < abs(self) < 0.001 else f"{100 * self:.1g} %",
            "B": lambda: decimal(round(self)),
            "x": lambda: f"{self:.1f}×" if abs(self) >= 2 else f"{self:.2f}×",
            "pt": lambda: f"{round(100 * self, 1) + 0.0:.1f} points",  # + 0.0: no -0.0
            "s": lambda: seconds(self),
            "n": lambda: f"{self:,.0f}" if self.is_integer() else f"{self:,.2f}",
            "g": lambda: f"{self:.3g}",
        }
        return shown[spec]() if spec in shown else super().__format__(spec)


def seconds(value: float) -> str:
    """A time for people: 4.2 s, 13.1 min, 3.5 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s"


def fill(template: str, numbers: Mapping[str, float | None]) -> str:
    """The template with its numbers; one that does not exist appears as –."""
    return template.format_map({name: _Absent() if v is None else Shown(v) for name, v in numbers.items()})


class _Absent:
    def __format__(self, spec: str) -> str:
        return "–"
