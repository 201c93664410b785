"""`marfl report`: figures and one page about runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from marfl.report import draw, without_copies
from marfl.runs import find_runs, open_run

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Run directories, or directories with runs below them.", show_default=False),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where the page and the figures go.")]
Title = Annotated[str | None, typer.Option(help="Title of the page.", show_default="tasks and peers")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def report(runs: Runs, out: Out = Path("report"), title: Title = None, as_json: AsJson = False) -> None:
    """Draw accuracy over iterations, bytes and time, what techniques send, and the split of the data.

    Writes each figure as PNG and SVG, runs.csv, and index.html: one page with a table and all figures, which needs no
    network. Runs that differ only in the seed are pooled: their mean and their range. Examples:

      marfl report runs/mar runs/fedavg --out figures

      marfl report runs --title "Digits on 125 peers"
    """
    paths = dict.fromkeys(run.resolve() for given in runs for run in find_runs(given))
    different, copies = without_copies([open_run(path) for path in paths])
    drawn = draw(different, out, title=title)
    if as_json:
        figures = [str(figure) for figure in drawn.figures]
        facts = [asdict(each) for each in drawn.facts]
        typer.echo(json.dumps({"page": str(drawn.page), "table": str(drawn.table), "figures": figures, "runs": facts}))
        return
    for copy, first in copies:
        typer.echo(f"{copy.path}: the same run as {first.path}, counted once")
    for each in drawn.facts:
        if each.state != "finished":
            typer.echo(f"{each.run}: {each.state}, drawn as far as it got ({each.iterations:,} iterations)")
    counted = f"{_counted(len(drawn.facts), 'run')}, {_counted(len(drawn.figures) // 2, 'figure')}"
    typer.echo(f"{drawn.page}: {counted}, beside it as PNG and SVG, and {drawn.table.name}")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
