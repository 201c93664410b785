"""`marfl reproduce`: the paper's experiments, and a verdict on each of its claims."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from marfl.commands.flags import one_of, option, whole_number
from marfl.commands.simulate import INTERRUPTED
from marfl.errors import InputError
from marfl.schema import nearest
from marfl.system import cores

if TYPE_CHECKING:
    from marfl.reproduce.archive import Archive
    from marfl.reproduce.cases import Scale
    from marfl.reproduce.runner import Bundle

SCALE_NAMES = ("quick", "laptop", "paper")

What = Annotated[
    str, typer.Argument(metavar="list|all|EXPERIMENT|CLAIM", help="What to reproduce.", show_default=False)
]
ScaleName = Annotated[
    str, typer.Option("--scale", parser=one_of(SCALE_NAMES), help="How large: quick, laptop or paper.")
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Where runs, figures and the page go.")]
Docs = Annotated[Path | None, typer.Option(metavar="DIR", help="Also renew the page and its figures in this folder.")]
Workers = Annotated[int, typer.Option(parser=whole_number(0), help="Processes; 0: one per core.")]
Minutes = Annotated[float | None, typer.Option(min=0.0, help="Stop after so long; the next call goes on.")]
OnCluster = Annotated[str | None, option("cluster")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def reproduce(  # noqa: PLR0913 - a command line has as many options as it has
    what: What,
    scale: ScaleName = "quick",
    out: Out = None,
    docs: Docs = None,
    workers: Workers = 0,
    cluster: OnCluster = None,
    minutes: Minutes = None,
    as_json: AsJson = False,
) -> None:
    """Run the paper's experiments and judge its claims by them.

    Finished runs are reused, so that an interrupted call goes on where it was. The page is made from whatever is
    finished in --out, of other experiments too, and says what is not. Examples:

      marfl reproduce list

      marfl reproduce all --scale quick

      marfl reproduce communication --scale laptop --out runs/laptop

      marfl reproduce mkd-text --scale laptop --docs docs

    With --docs, runs that the folder keeps (reproduction/runs.jsonl) count as finished: another machine goes on there.
    """
    from marfl.reproduce.archive import Archive, alone
    from marfl.reproduce.cases import SCALES
    from marfl.reproduce.experiments import EXPERIMENTS  # here, because they are many
    from marfl.reproduce.publish import kept_in, write_page

    root = Path("runs") / f"reproduce-{scale}" if out is None else out
    archive = Archive(root / "runs", kept_in(docs))
    if what == "list":
        _list(archive, SCALES[scale], as_json)
        return
    claims = {claim.name: (experiment, claim) for experiment in EXPERIMENTS.values() for claim in experiment.claims}
    if what not in ("all", *EXPERIMENTS, *claims):
        raise InputError(f"reproduce {what}: {nearest(what, ['list', 'all', *EXPERIMENTS, *claims])}")
    from marfl.reproduce.runner import todo_of  # only now, because it waits for torch

    experiments, claim = list(EXPERIMENTS.values()), None
    if what in EXPERIMENTS:
        experiments = [EXPERIMENTS[what]]
    elif what in claims:
        experiments, claim = [claims[what][0]], claims[what][1]
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with alone(root):
        todo = todo_of(archive, SCALES[scale], experiments, claim)
        problems, stopped = compute_todo(archive, todo, workers, deadline, cluster)
        written = write_page(archive, SCALES[scale], experiments, problems, root, docs)
    if as_json:
        typer.echo(json.dumps(written.results, indent=2))
    else:
        _say([line for line in written.lines if claim is None or line[0] == claim.name], root / "index.html")
    if stopped:
        typer.echo("marfl: stopped by Ctrl-C; the page holds what is finished, and the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED)


def compute_todo(
    archive: Archive, todo: list[Bundle], workers: int, deadline: float | None, cluster: str | None
) -> tuple[dict[str, str], bool]:
    """Compute what is missing, with a bar; what could not be computed and why, by key, and whether Ctrl-C ended it.

    On a cluster it is one run after the other, each of them on all nodes.
    """
    from marfl.reproduce.cases import key_of
    from marfl.reproduce.runner import Advanced, run_all, run_on_cluster

    problems: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False)
    events = (
        run_all(archive, todo, workers or cores(), deadline)
        if cluster is None
        else run_on_cluster(archive, todo, cluster, workers, deadline)
    )
    done = dict.fromkeys((key_of(bundle.first) for bundle in todo), 0.0)
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as bar:
        task = bar.add_task("reproducing", total=sum(bundle.seconds for bundle in todo))
        try:
            for event in events:
                if isinstance(event, Advanced):
                    done[key_of(event.bundle.first)] = event.seconds
                else:
                    done[key_of(event.bundle.first)] = event.bundle.seconds
                    if event.problem:
                        sources = (event.bundle.first, *event.bundle.others)
                        problems |= {key_of(source): event.problem for source in sources}
                        bar.console.print(f"{archive.path(event.bundle.first).name}: {event.problem}")
                bar.update(task, completed=sum(done.values()))
        except KeyboardInterrupt:
            return problems, True
    return problems, False


def _say(lines: list[tuple[str, str, str]], page: Path) -> None:
    width = max(len(name) for name, _, _ in lines)
    for name, word, ours in lines:
        typer.echo(f"{word:14} {name:{width}}  {ours}")
    typer.echo(f"{page}: the page, with figures")


def _list(archive: Archive, scale: Scale, as_json: bool) -> None:
    """The experiments, how many runs each has, how many are finished, and about how long the rest takes."""
    from marfl.reproduce.experiments import EXPERIMENTS
    from marfl.reproduce.runner import todo_of

    rows = []
    for experiment in EXPERIMENTS.values():
        sources = [source for case in experiment.cases(scale).values() for source in case.sources]
        finished = sum(archive.summary(source) is not None for source in sources)
        minutes = sum(bundle.seconds for bundle in todo_of(archive, scale, [experiment])) / 60
        rows.append(
            {
                "name": experiment.name, "title": experiment.title, "claims": len(experiment.claims),
                "runs": len(sources), "finished": finished, "cpu_minutes_left": round(minutes, 1),
            }
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(f"scale {scale.name}: {scale.about}")
    for row in rows:
        typer.echo(
            f"{row['name']:14} {row['claims']} claims, {row['finished']:3} of {row['runs']:3} runs finished, at most "
            f"{row['cpu_minutes_left']:6} CPU minutes left  {row['title']}"
        )
