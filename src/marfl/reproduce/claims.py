"""What is claimed, and what our numbers say about it: plain data, and the rule that turns numbers into a verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from marfl.reproduce.cases import Case, Scale
from marfl.reproduce.numbers import Evidence, Number, Summary, fill

MOST_NAMED = 6  # cases that a verdict misses
_PLACEHOLDER = re.compile(r"\{[^}]*\}")


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

    def verdict(self, evidence: Evidence) -> ClaimVerdict:
        """Judge the evidence; without all of it, say what is missing."""
        missing = [case for case in self.needs() if not evidence.get(case)]
        if missing:
            more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
            return ClaimVerdict(Word.NOT_RUN, "–", f"Not run: {', '.join(missing[:MOST_NAMED])}{more}.", {})
        values = {name: number.value(evidence) for name, number in self.numbers.items()}
        known = {name: value for name, value in values.items() if value is not None}
        if len(known) < len(values):
            absent = ", ".join(self.numbers[name].formula() for name in values if name not in known)
            return ClaimVerdict(Word.NOT_RUN, "–", f"A run did not get there: there is no {absent}.", known)
        judged = self.judge(known)
        return ClaimVerdict(judged.word, fill(judged.ours, known), fill(judged.reason, known), known)


@dataclass(frozen=True)
class ClaimVerdict:
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
    def verdicts(self) -> tuple[tuple[Claim, ClaimVerdict], ...]:
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
