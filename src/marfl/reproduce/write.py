"""From finished runs to files: figures, the page as Markdown and HTML, and everything for a program."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marfl.reproduce.claims import Experiment, Word
from marfl.reproduce.experiments import EXPERIMENTS
from marfl.reproduce.figures import draw_figures
from marfl.reproduce.gather import Findings, findings_of, results
from marfl.reproduce.page import FIGURES, html_page, markdown_page
from marfl.reproduce.scales import Scale
from marfl.reproduce.store import Store
from marfl.runs.files import write_atomic, write_json, writing

PAGE, HTML, RESULTS = "reproduction.md", "index.html", "results.json"


@dataclass(frozen=True)
class Written:
    """What was written."""

    results: Mapping[str, Any]
    lines: list[tuple[str, str, str]]  # of the experiments that were asked for: claim, verdict, what we measured


def write_page(
    store: Store,
    scale: Scale,
    experiments: Sequence[Experiment],
    problems: Mapping[str, str],
    out: Path,
    docs: Path | None,
) -> Written:
    """Judge what is finished and write it to `out`; with `docs`, the page, its figures and results go there as well.

    Beside `experiments` the page keeps every other one of which the store can judge a claim, so that asking for one
    never takes another from the page.
    """
    names = {experiment.name for experiment in experiments}
    known = findings_of(store, scale, list(EXPERIMENTS.values()), problems)
    findings = [found for found in known if found.experiment.name in names or _judged(found)]
    absent = [name for name in EXPERIMENTS if name not in {found.experiment.name for found in findings}]
    captions = draw_figures(store, findings, out / FIGURES)
    text = markdown_page(scale, findings, captions, absent)
    found = results(store, scale, findings)
    write_json(out / FIGURES / RESULTS, found)
    write_atomic(out / PAGE, text.encode())
    write_atomic(out / HTML, html_page(text, out / FIGURES).encode())
    if docs is not None:
        _copy(out, docs, captions)
    asked = [each for each in findings if each.experiment.name in names]
    lines = [(claim.name, verdict.word.value, verdict.ours) for each in asked for claim, verdict in each.verdicts]
    return Written(found, lines)


def _judged(found: Findings) -> bool:
    return any(verdict.word is not Word.NOT_RUN for _, verdict in found.verdicts)


def _copy(out: Path, docs: Path, captions: Mapping[str, str]) -> None:
    with writing(docs):
        (docs / FIGURES).mkdir(parents=True, exist_ok=True)
        for old in (docs / FIGURES).iterdir():  # figures of an earlier page that this one does not have
            if old.suffix in (".svg", ".png") and old.stem not in captions:
                old.unlink()
        for name in [PAGE, *(f"{FIGURES}/{name}.{kind}" for name in captions for kind in ("svg", "png"))]:
            shutil.copyfile(out / name, docs / name)
        shutil.copyfile(out / FIGURES / RESULTS, docs / FIGURES / RESULTS)
