"""`marfl sweep`: a grid of settings and seeds, from one file to one table, one CSV and one report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from marfl.commands.flags import option
from marfl.commands.reproduce import Minutes, Workers, compute_todo
from marfl.commands.simulate import INTERRUPTED
from marfl.errors import InputError

if TYPE_CHECKING:
    from marfl.reproduce.archive import Archive
    from marfl.reproduce.run_grid import Point

File = Annotated[Path, typer.Argument(metavar="FILE.toml", help="Settings, and the grid to run.", show_default=False)]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs and the report go; default runs/NAME.")]
OnCluster = Annotated[str | None, option("cluster")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the runs, and do nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def sweep(
    file: File,
    out: Out = None,
    workers: Workers = 0,
    cluster: OnCluster = None,
    minutes: Minutes = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run every combination of settings that a file names, and report on them together.

    Finished runs are reused, so that an interrupted call goes on where it was, and a value that is added to the file
    costs its own runs alone. Examples:

      marfl sweep examples/sweep.toml --dry-run

      marfl sweep examples/sweep.toml --out runs/participation
    """
    from marfl.reproduce.archive import Archive, alone
    from marfl.reproduce.run_grid import read_sweep, todo_of_sweep  # here, because they wait for torch

    root = Path("runs") / file.stem if out is None else out
    archive, points = Archive(root / "runs"), read_sweep(file)
    if dry_run:
        _list(archive, points, as_json)
        return
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with alone(root):
        problems, stopped = compute_todo(archive, todo_of_sweep(archive, points), workers, deadline, cluster)
        finished = [point for point in points if archive.summary(point.config) is not None]
        page = _report(archive, finished, root) if finished else None
    if as_json:
        typer.echo(json.dumps([_row(archive, point) for point in finished], indent=2))
    elif page is not None:
        Console(highlight=False).print(_table(archive, finished))
        typer.echo(f"{page}: the report, with figures; beside it runs.csv, a line for each run")
    if problems and not stopped:
        first = next(iter(problems.values()))
        raise InputError(f"{len(problems)} of {len(points)} runs could not be made, first: {first}")
    if len(finished) < len(points):
        why, left = "stopped by Ctrl-C; " if stopped else "", len(points) - len(finished)
        typer.echo(f"marfl: {why}{left} of {len(points)} runs are left, and the same command goes on", err=True)
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _list(archive: Archive, points: Sequence[Point], as_json: bool) -> None:
    from marfl.reproduce.runner import estimate

    rows: list[dict[str, Any]] = []
    for point in points:
        finished = archive.summary(point.config) is not None
        seconds = 0.0 if finished else round(estimate(point.config), 1)
        rows.append({**point.varied, "finished": finished, "cpu_seconds_left": seconds})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for point, row in zip(points, rows, strict=True):
        state = "finished" if row["finished"] else f"about {row['cpu_seconds_left']:,.0f} CPU seconds"
        typer.echo(f"{point.name}: {state}")
    done = sum(row["finished"] for row in rows)
    left = sum(row["cpu_seconds_left"] for row in rows) / 60
    typer.echo(f"{len(rows)} runs, {done} of them finished, about {left:,.1f} CPU minutes left")


def _report(archive: Archive, points: Sequence[Point], root: Path) -> Path:
    from marfl.report import draw

    return draw([archive.run(point.config) for point in points], root, title=root.name).page


def _row(archive: Archive, point: Point) -> dict[str, Any]:
    summary = archive.summary(point.config)
    assert summary is not None
    names = ("iterations", "final_accuracy", "best_accuracy", "bytes_total", "virtual_seconds", "model_hash")
    return {**point.varied, **{name: summary[name] for name in names}}


def _table(archive: Archive, points: Sequence[Point]) -> Table:
    """A line for each point of the grid, its seeds pooled."""
    pooled: dict[Any, list[dict[str, Any]]] = {}
    for point in points:
        pooled.setdefault(json.dumps(point.but_seed), []).append(_row(archive, point))
    axes = [name for name, _ in points[0].but_seed]
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    virtual = any(row["virtual_seconds"] is not None for rows in pooled.values() for row in rows)
    for head in (*axes, "runs", "acc.", "low", "high", "bytes", *(["virt. s"] if virtual else [])):
        table.add_column(head, justify="left" if head in axes else "right", no_wrap=True)
    for rows in pooled.values():
        cells = [*_cells(rows)][: None if virtual else -1]
        table.add_row(*(str(rows[0][name]) for name in axes), str(len(rows)), *cells)
    return table


def _cells(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    accuracies = [row["final_accuracy"] for row in rows if row["final_accuracy"] is not None]
    for number in (_mean(accuracies), min(accuracies, default=None), max(accuracies, default=None)):
        yield "–" if number is None else f"{number:.1%}"
    yield decimal(round(_mean([row["bytes_total"] for row in rows]) or 0))
    seconds = _mean([row["virtual_seconds"] for row in rows if row["virtual_seconds"] is not None])
    yield "–" if seconds is None else f"{seconds:,.1f}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
