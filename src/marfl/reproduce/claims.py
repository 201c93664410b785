"""What is claimed, and what our numbers say about it: plain data, and the rule that turns numbers into a verdict.

A number gets on the page in one way only: from the summaries of a case's runs, by a spelled-out formula (`Number`).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from rich.filesize import decimal

from marfl.reproduce.cases import Case, Scale

NOTICEABLE = 0.01  # accuracy: less than a point is within what seeds do
SUBSTANTIAL = 0.03
MOST_NAMED = 6  # cases that a verdict misses
_PLACEHOLDER = re.compile(r"\{[^}]*\}")

# --- numbers ---

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


# --- numbers as text ---


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


# --- claims and verdicts ---


class Word(StrEnum):
    """A verdict in a word."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    REFINED = "refined"  # true under conditions that the paper does not name, or with another number
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Judgement:
    """A word, what we measured and why: templates, whose numbers are filled in from summaries and from nowhere else."""

    word: Word
    ours: str
    reason: str

    def __post_init__(self) -> None:
        for template in (self.ours, self.reason):
            if re.search(r"\d", _PLACEHOLDER.sub("", template)):
                raise ValueError(f"a number that comes from no run: {template!r}")


Values = Mapping[str, float]
Judge = Callable[[Values], Judgement]


@dataclass(frozen=True)
class Claim:
    """A sentence that can be true or false."""

    name: str
    source: str  # where the paper says it; "ours" for what it does not say
    says: str  # in our words, with its number
    numbers: Mapping[str, Number]
    judge: Judge
    cases: tuple[str, ...] = ()  # shown beside those that the numbers name

    def needs(self) -> tuple[str, ...]:
        """The cases it rests on, in order."""
        named = [case for number in self.numbers.values() for case in number.cases]
        return tuple(dict.fromkeys([*named, *self.cases]))

    def verdict(self, evidence: Evidence) -> Verdict:
        """Judge the evidence; without all of it, say what is missing."""
        missing = [case for case in self.needs() if not evidence.get(case)]
        if missing:
            more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
            return Verdict(Word.NOT_RUN, "–", f"Not run: {', '.join(missing[:MOST_NAMED])}{more}.", {})
        values = {name: number.value(evidence) for name, number in self.numbers.items()}
        known = {name: value for name, value in values.items() if value is not None}
        if len(known) < len(values):
            absent = ", ".join(self.numbers[name].formula() for name in values if name not in known)
            return Verdict(Word.NOT_RUN, "–", f"A run did not get there: there is no {absent}.", known)
        judged = self.judge(known)
        return Verdict(judged.word, fill(judged.ours, known), fill(judged.reason, known), known)


@dataclass(frozen=True)
class Verdict:
    """A judgement with its numbers filled in."""

    word: Word
    ours: str
    reason: str
    numbers: Values


@dataclass(frozen=True)
class Figure:
    """Runs drawn as `marfl report` draws them."""

    name: str
    view: str  # accuracy-iterations, accuracy-bytes, accuracy-time, bytes-techniques or bytes-peers
    title: str
    lines: Mapping[str, str]  # by case: what the legend calls it

    @property
    def cases(self) -> tuple[str, ...]:
        return tuple(self.lines)


@dataclass(frozen=True)
class Experiment:
    """A question, the runs that answer it, and the claims it decides."""

    name: str
    title: str
    about: str
    cases: Callable[[Scale], Mapping[str, Case]]
    claims: tuple[Claim, ...]
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Findings:
    """An experiment and what is known about it."""

    experiment: Experiment
    cases: Mapping[str, Case]
    evidence: Mapping[str, tuple[Summary, ...]]  # of the cases that are finished, for the first seed at least
    problems: Mapping[str, str]  # why a case could not be run

    @cached_property
    def verdicts(self) -> tuple[tuple[Claim, Verdict], ...]:
        return tuple((claim, claim.verdict(self.used(claim))) for claim in self.experiment.claims)

    @property
    def unfinished(self) -> list[str]:
        return [name for name in self.cases if name not in self.evidence]

    @property
    def sparse(self) -> list[str]:
        """The cases of which some seeds are still missing."""
        return [name for name, done in self.evidence.items() if len(done) < len(self.cases[name].sources)]

    def used(self, claim: Claim) -> dict[str, tuple[Summary, ...]]:
        """What a claim is judged by: its repeated cases all with as many seeds as the one that has fewest so far."""
        known = {name: self.evidence[name] for name in claim.needs() if name in self.evidence}
        repeated = [name for name in known if len(self.cases[name].sources) > 1]
        fewest = min((len(known[name]) for name in repeated), default=0)
        return {name: done[:fewest] if name in repeated else done for name, done in known.items()}
