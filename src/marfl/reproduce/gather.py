"""What has been finished so far, as evidence: from it come all verdicts, figures and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from marfl.config import Config
from marfl.reproduce.cases import Case, key_of
from marfl.reproduce.claims import Claim, Experiment, Verdict
from marfl.reproduce.numbers import Summary
from marfl.reproduce.scales import Scale
from marfl.reproduce.store import Store


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


def findings_of(
    store: Store, scale: Scale, experiments: Sequence[Experiment], problems: Mapping[str, str]
) -> list[Findings]:
    """Judge every experiment by what the store holds; `problems` says, by key, what could not be run and why."""
    found = []
    for experiment in experiments:
        cases = experiment.cases(scale)
        evidence = {name: done for name, case in cases.items() if (done := _finished(store, case))}
        reasons = {name: problems[key] for name, case in cases.items() for key in case.keys if key in problems}
        found.append(Findings(experiment, cases, evidence, reasons))
    return found


def _finished(store: Store, case: Case) -> tuple[Summary, ...] | None:
    """The summaries of the seeds up to the first that is missing, or None when it is the very first."""
    found: list[Summary] = []
    for source in case.sources:
        summary = store.summary(source)
        if summary is None:
            break
        found.append(summary)
    return tuple(found) or None


def results(store: Store, scale: Scale, findings: Sequence[Findings]) -> dict[str, Any]:
    """Everything on the page for a program: verdicts with their numbers and formulas, and the summaries behind them."""
    runs = {}
    for found in findings:
        for name in found.evidence:
            for source, summary in zip(found.cases[name].sources, found.evidence[name], strict=False):
                directory = store.path(source).name
                settings = source.as_dict() if isinstance(source, Config) else source.settings()
                runs[key_of(source)] = {"directory": directory, "settings": settings, "summary": dict(summary)}
    return {
        "scale": scale.name,
        "claims": [_claim(found, claim, verdict) for found in findings for claim, verdict in found.verdicts],
        "cases": {
            found.experiment.name: {
                name: list(found.cases[name].keys[: len(done)]) for name, done in found.evidence.items()
            }
            for found in findings
        },
        "runs": dict(sorted(runs.items())),
    }


def _claim(found: Findings, claim: Claim, verdict: Verdict) -> dict[str, Any]:
    return {
        "experiment": found.experiment.name,
        "name": claim.name,
        "source": claim.source,
        "paper": claim.says,
        "verdict": verdict.word.value,
        "ours": verdict.ours,
        "reason": verdict.reason,
        "numbers": dict(verdict.numbers),
        "formulas": {name: number.formula() for name, number in claim.numbers.items()},
        "runs": {case: list(found.cases[case].keys[: len(done)]) for case, done in found.used(claim).items()},
    }
