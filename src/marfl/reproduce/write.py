"""From finished runs to files: figures, the page as Markdown and HTML, and everything for a program."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marfl.reproduce.claims import Experiment
from marfl.reproduce.figures import draw_figures
from marfl.reproduce.gather import findings_of, results
from marfl.reproduce.page import FIGURES, html_page, markdown_page
from marfl.reproduce.scales import Scale
from marfl.reproduce.store import Store
from marfl.rundir.files import write_atomic, write_json, writing

PAGE, HTML, RESULTS = "reproduction.md", "index.html", "results.json"


@dataclass(frozen=True)
class Written:
    """What was written."""

    results: Mapping[str, Any]
    lines: list[tuple[str, str, str]]  # claim, verdict, what we measured


def write_page(
    store: Store,
    scale: Scale,
    experiments: Sequence[Experiment],
    problems: Mapping[str, str],
    out: Path,
    docs: Path | None,
) -> Written:
    """Judge what is finished and write it to `out`; with `docs`, the page, its figures and results go there as well."""
    findings = findings_of(store, scale, experiments, problems)
    captions = draw_figures(store, findings, out / FIGURES)
    text = markdown_page(scale, findings, captions)
    found = results(store, scale, findings)
    write_json(out / FIGURES / RESULTS, found)
    write_atomic(out / PAGE, text.encode())
    write_atomic(out / HTML, html_page(text, out / FIGURES).encode())
    if docs is not None:
        _copy(out, docs, captions)
    lines = [(claim.name, verdict.word.value, verdict.ours) for each in findings for claim, verdict in each.verdicts]
    return Written(found, lines)


def _copy(out: Path, docs: Path, captions: Mapping[str, str]) -> None:
    with writing(docs):
        (docs / FIGURES).mkdir(parents=True, exist_ok=True)
        for old in (docs / FIGURES).iterdir():  # figures of an earlier page that this one does not have
            if old.suffix in (".svg", ".png") and old.stem not in captions:
                old.unlink()
        for name in [PAGE, *(f"{FIGURES}/{name}.{kind}" for name in captions for kind in ("svg", "png"))]:
            shutil.copyfile(out / name, docs / name)
        shutil.copyfile(out / FIGURES / RESULTS, docs / FIGURES / RESULTS)
