"""From finished runs to files: verdicts, figures, the page as Markdown and HTML, and everything for a program."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from marfl.config import Config
from marfl.report.page import needing_plots
from marfl.report.series import FURTHER_MARKERS, LINE_STYLES, OURS, Dashes, Look, Series, colours_of, look_of, series_of
from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import SCALES, Case, Scale, Source
from marfl.reproduce.claims import Claim, ClaimVerdict, Experiment, Figure, Findings, Word
from marfl.reproduce.digest import LEARNED, LEARNED_HTML, learned_html, learned_page, lessons, renew_readme
from marfl.reproduce.experiments import EXPERIMENTS
from marfl.reproduce.kept import KeptRuns
from marfl.reproduce.numbers import BY_LOT, Summary
from marfl.reproduce.verdict_page import FIGURES, html_page, markdown_page
from marfl.runs.files import write_atomic, write_json, writing
from marfl.settings import Churn

PAGE, HTML, RESULTS, RUNS = "reproduction.md", "index.html", "results.json", "runs.jsonl"


@dataclass(frozen=True)
class Written:
    """What was written."""

    results: Mapping[str, Any]
    lines: list[tuple[str, str, str]]  # of the experiments that were asked for: claim, verdict, what we measured


def write_page(
    archive: Archive,
    scale: Scale,
    experiments: Sequence[Experiment],
    problems: Mapping[str, str],
    out: Path,
    docs: Path | None,
) -> Written:
    """Judge what is finished and write it to `out`; with `docs`, the page, its figures and results go there as well.

    Beside `experiments` the page keeps every other one of which the archive can judge a claim, so that asking for one
    never takes another from the page.
    """
    names = {experiment.name for experiment in experiments}
    known = findings_of(archive, scale, list(EXPERIMENTS.values()), problems)
    findings = [found for found in known if found.experiment.name in names or _judged(found)]
    absent = [name for name in EXPERIMENTS if name not in {found.experiment.name for found in findings}]
    captions = draw_figures(archive, findings, out / FIGURES, None if docs is None else docs / FIGURES)
    text = markdown_page(scale, findings, captions, absent, costs())
    found = results(scale, findings)
    write_json(out / FIGURES / RESULTS, found)
    KeptRuns(out / FIGURES / RUNS).write(archive.lines(all_sources()))
    write_atomic(out / PAGE, text.encode())
    write_atomic(out / HTML, html_page(text, out / FIGURES).encode())
    learned = lessons(findings, captions)
    write_atomic(out / LEARNED, learned_page(learned).encode())
    write_atomic(out / LEARNED_HTML, learned_html(learned, scale).encode())
    if docs is not None:
        _copy(out, docs, captions)
        renew_readme(docs.parent / "README.md", findings)
    asked = [each for each in findings if each.experiment.name in names]
    lines = [(claim.name, verdict.word.value, verdict.ours) for each in asked for claim, verdict in each.verdicts]
    return Written(found, lines)


def kept_in(docs: Path | None) -> KeptRuns | None:
    """The runs that a folder of documentation keeps."""
    return None if docs is None else KeptRuns(docs / FIGURES / RUNS)


def all_sources() -> Iterator[Source]:
    """Everything that any scale runs: what else was kept is of an earlier version."""
    for scale in SCALES.values():
        yield from _sources_of(scale)


@cache
def _sources_of(scale: Scale) -> tuple[Source, ...]:
    cases = (case for experiment in EXPERIMENTS.values() for case in experiment.cases(scale).values())
    return tuple(source for case in cases for source in case.sources)


def costs() -> dict[str, dict[str, float]]:
    """About how many CPU seconds each experiment takes by itself, by scale."""
    from marfl.reproduce.runner import total_seconds  # here, because it waits for torch

    return {
        scale.name: {name: total_seconds(scale, experiment) for name, experiment in EXPERIMENTS.items()}
        for scale in SCALES.values()
    }


def _judged(found: Findings) -> bool:
    return any(verdict.word is not Word.NOT_RUN for _, verdict in found.verdicts)


def _copy(out: Path, docs: Path, captions: Mapping[str, str]) -> None:
    with writing(docs):
        (docs / FIGURES).mkdir(parents=True, exist_ok=True)
        for old in (docs / FIGURES).iterdir():  # figures of an earlier page that this one does not have
            if old.suffix in (".svg", ".png") and old.stem not in captions:
                old.unlink()
        figures = [f"{FIGURES}/{name}.{kind}" for name in captions for kind in ("svg", "png")]
        for name in [PAGE, LEARNED, LEARNED_HTML, f"{FIGURES}/{RESULTS}", f"{FIGURES}/{RUNS}", *figures]:
            shutil.copyfile(out / name, docs / name)


# --- verdicts ---


def findings_of(
    archive: Archive, scale: Scale, experiments: Sequence[Experiment], problems: Mapping[str, str]
) -> list[Findings]:
    """Judge every experiment by what the archive holds; `problems` says, by key, what could not be run and why."""
    found = []
    for experiment in experiments:
        cases = experiment.cases(scale)
        evidence = {name: done for name, case in cases.items() if (done := _finished(archive, case))}
        reasons = {name: problems[key] for name, case in cases.items() for key in case.keys if key in problems}
        found.append(Findings(experiment, cases, evidence, reasons))
    return found


def _finished(archive: Archive, case: Case) -> tuple[Summary, ...] | None:
    """The summaries of the seeds up to the first that is missing, or None when it is the very first."""
    found: list[Summary] = []
    for source in case.sources:
        summary = archive.summary(source)
        if summary is None:
            break
        found.append({**summary, BY_LOT: isinstance(source, Config) and source.churn != Churn()})
    return tuple(found) or None


def results(scale: Scale, findings: Sequence[Findings]) -> dict[str, Any]:
    """The page for a program: verdicts with their numbers and formulas; the runs behind them are in `runs.jsonl`."""
    return {
        "scale": scale.name,
        "claims": [_claim(found, claim, verdict) for found in findings for claim, verdict in found.verdicts],
        "cases": {
            found.experiment.name: {
                name: list(found.cases[name].keys[: len(done)]) for name, done in found.evidence.items()
            }
            for found in findings
        },
    }


def _claim(found: Findings, claim: Claim, verdict: ClaimVerdict) -> dict[str, Any]:
    return {
        "experiment": found.experiment.name,
        "name": claim.name,
        "source": claim.source,
        "paper": claim.says,
        "verdict": verdict.word.value,
        "ours": verdict.ours,
        "reason": verdict.reason,
        "numbers": {name: float(number) for name, number in verdict.numbers.items()},
        "halves": {name: number.half for name, number in verdict.numbers.items() if number.known},
        "departs": found.departs(claim),
        "formulas": {name: number.formula() for name, number in claim.numbers.items()},
        "runs": {case: list(found.cases[case].keys[: len(done)]) for case, done in found.used(claim).items()},
    }


# --- figures, drawn as `marfl report` draws runs: a technique has one colour everywhere ---


def draw_figures(
    archive: Archive, findings: Sequence[Findings], out: Path, earlier: Path | None = None
) -> dict[str, str]:
    """Draw every figure that has runs into `out`, as SVG and PNG; returns the captions by the figures' names.

    A picture in `earlier` of runs whose rows were not kept stays.
    """
    with needing_plots("reproduce"):
        from marfl.report.figures import drawing  # here, because it needs matplotlib, which is an extra
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    captions = {}
    for found in findings:
        for figure in found.experiment.figures:
            if earlier is not None and _stays(found, figure) and (earlier / f"{figure.name}.svg").is_file():
                for kind in ("svg", "png"):
                    shutil.copyfile(earlier / f"{figure.name}.{kind}", out / f"{figure.name}.{kind}")
                captions[figure.name] = f"{_task_of(figure)}: {figure.title}. Drawn by the version that ran it"
                continue
            drawn = drawing(figure.view, list(_series(archive, found, figure)))
            if drawn is None:
                continue
            for kind in ("svg", "png"):
                write_atomic(out / f"{figure.name}.{kind}", drawn.rendered(kind))
            captions[figure.name] = f"{_titled(found, figure)}. {drawn.caption}"
    return captions


def _stays(found: Findings, figure: Figure) -> bool:
    """Whether all of a figure was run, but some of it by a version that kept no rows."""
    finished = [case for case in figure.cases if case in found.evidence]
    return len(finished) == len(figure.cases) and not all(map(found.has_rows, finished))


def _task_of(figure: Figure) -> str:
    return figure.cases[0].split(" ", 1)[0].capitalize()


def _titled(found: Findings, figure: Figure) -> str:
    missing = [case for case in figure.cases if case not in found.evidence or not found.has_rows(case)]
    task = _task_of(figure)
    without = f" (not run, or no rows kept: {', '.join(missing)})" if missing else ""
    return f"{task}: {figure.title}{without}"


def _series(archive: Archive, found: Findings, figure: Figure) -> Iterator[Series]:
    """A line for each finished case."""
    shown = [case for case in figure.lines if case in found.evidence and found.has_rows(case)]
    configs = {case: list(_configs(found, case)) for case in shown}
    for case, (look, dashes) in zip(shown, told_apart([_usual(configs[case][0]) for case in shown]), strict=True):
        for series in series_of([archive.run(config) for config in configs[case]]):
            yield replace(series, label=figure.lines[case], dashes=dashes, given=look)


def told_apart(looks: Sequence[Look]) -> list[tuple[Look, Dashes]]:
    """Looks of a figure's lines: several of one look differ in dashes and markers; where all are one, in colour too."""
    colours = colours_of(looks) if len(set(looks)) == 1 else [look.colour for look in looks]
    nth = [looks[:place].count(look) % len(LINE_STYLES) for place, look in enumerate(looks)]
    return [
        (look._replace(marker=(look.marker, *FURTHER_MARKERS)[further], colour=colour), LINE_STYLES[further])
        for look, further, colour in zip(looks, nth, colours, strict=True)
    ]


def _configs(found: Findings, case: str) -> Iterator[Config]:
    finished = found.cases[case].sources[: len(found.evidence[case])]
    return (source for source in finished if isinstance(source, Config))


def _usual(config: Config) -> Look:
    """The look of a technique; ours, beside MAR-FL as published, has one of its own."""
    return OURS if config.technique == "mar" and config.semantics == "exact" else look_of(config.technique)
