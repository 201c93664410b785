"""What is claimed, and what our numbers say about it: plain data, and the rules that turn numbers into a verdict.

A claim's `judge` says what numbers mean. `ruled` asks it at the mean and at all ends of the intervals of the numbers
that it looks at: a verdict stands where it gives one answer everywhere, and *refuted* needs three seeds and the paper's
own settings besides. Everything else is *not shown here*.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import product

from marfl.reproduce.cases import Case, Scale, departures
from marfl.reproduce.numbers import Evidence, Number, Spread, Summary, fill, spread

MOST_NAMED = 6  # cases that a verdict misses
ENOUGH = 3  # seeds for a refutation
MOST_ENDS = 12  # numbers whose intervals a verdict is asked at all ends of
OURS = "ours"  # the source of a claim that the paper does not make
_PLACEHOLDER = re.compile(r"\{[^}]*\}")


class Word(StrEnum):
    """A verdict in a word."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    REFINED = "refined"  # true under conditions that the paper does not name, or with another number
    NOT_SHOWN = "not shown here"  # the intervals leave it open, or what would refute it is not the paper's experiment
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


class _Noting(Mapping[str, float]):
    """Values that note which of them are looked at, in whichever way."""

    def __init__(self, values: Mapping[str, float], read: set[str]) -> None:
        self._values, self._read = values, read

    def __getitem__(self, name: str) -> float:
        self._read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def ruled(judge: Judge, values: Mapping[str, Spread], departs: str = "") -> tuple[Judgement, str]:
    """What the judge says of these numbers, and why it is not the verdict, or nothing.

    `departs` says in which settings the runs differ from those that the claim was made on.
    """
    read: set[str] = set()
    judged = judge(_Noting(values, read))
    words = {judged.word}
    asked: set[str] = set()
    while asked != read:  # another answer may look at further numbers
        asked = set(read)
        if any(not values[name].known for name in asked):
            return judged, "One seed tells nothing of the spread."
        wide = [name for name in sorted(asked) if values[name].half]
        if len(wide) > MOST_ENDS:
            raise ValueError(f"a verdict rests on {len(wide)} numbers; give it a number that combines them")
        for ends in product(*(values[name].ends for name in wide)):
            words.add(judge(_Noting({**values, **dict(zip(wide, ends, strict=True))}, read)).word)
    if len(words) > 1:
        return judged, "The intervals leave it open."
    if judged.word is not Word.REFUTED:
        return judged, ""
    if any(values[name].half and values[name].seeds < ENOUGH for name in asked):
        return judged, "A refutation needs three seeds."
    return judged, f"These are not the paper's own settings ({departs})." if departs else ""


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

    def verdict(self, evidence: Evidence, departs: str = "") -> ClaimVerdict:
        """Judge the evidence, whose settings depart from the paper's so; without all of it, say what is missing."""
        missing = [case for case in self.needs() if not evidence.get(case)]
        if missing:
            more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
            return ClaimVerdict(Word.NOT_RUN, "–", f"Not run: {', '.join(missing[:MOST_NAMED])}{more}.", {})
        values = {name: spread(number, evidence) for name, number in self.numbers.items()}
        known = {name: value for name, value in values.items() if value is not None}
        if len(known) < len(values):
            absent = ", ".join(self.numbers[name].formula() for name in values if name not in known)
            return ClaimVerdict(Word.NOT_RUN, "–", f"A run did not get there: there is no {absent}.", known)
        judged, doubt = ruled(self.judge, known, "" if self.source == OURS else departs)
        ours, reason = fill(judged.ours, known), fill(judged.reason, known)
        if doubt:
            reason = f"{doubt} By the mean alone it would be {judged.word.value}: {reason}"
            return ClaimVerdict(Word.NOT_SHOWN, ours, reason, known)
        return ClaimVerdict(judged.word, ours, reason, known)


@dataclass(frozen=True)
class ClaimVerdict:
    """A judgement with its numbers filled in."""

    word: Word
    ours: str
    reason: str
    numbers: Mapping[str, Spread]


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


@dataclass(frozen=True, eq=False)  # itself alone, as a scale is
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
        return tuple((claim, claim.verdict(self.used(claim), self.departs(claim))) for claim in self.experiment.claims)

    def departs(self, claim: Claim) -> str:
        """In which settings the runs behind a claim differ from the paper's own, in words."""
        sources = [source for name in claim.needs() for source in self.cases[name].sources]
        return ", ".join(dict.fromkeys(words for source in sources for words in departures(source)))

    @property
    def unfinished(self) -> list[str]:
        return [name for name in self.cases if name not in self.evidence]

    @property
    def sparse(self) -> list[str]:
        """The cases of which some seeds are still missing."""
        return [name for name, done in self.evidence.items() if len(done) < len(self.cases[name].sources)]

    def has_rows(self, case: str) -> bool:
        """Whether a finished case can be drawn."""
        return all(summary.get("rows_kept", True) for summary in self.evidence[case])

    def used(self, claim: Claim) -> dict[str, tuple[Summary, ...]]:
        """What a claim is judged by: its repeated cases all with as many seeds as the one that has fewest so far."""
        known = {name: self.evidence[name] for name in claim.needs() if name in self.evidence}
        repeated = [name for name in known if len(self.cases[name].sources) > 1]
        fewest = min((len(known[name]) for name in repeated), default=0)
        return {name: done[:fewest] if name in repeated else done for name, done in known.items()}
