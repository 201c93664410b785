"""`marfl simulate`: one experiment, or several side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from marfl.commands import flags as flag
from marfl.commands.privacy import run_line
from marfl.config import Config, load
from marfl.errors import InputError

if TYPE_CHECKING:
    from marfl.runs import Row, RunDir
    from marfl.sim.engine import Simulation

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C has ended


@flag.takes_settings(
    *flag.LEARNING, *flag.OF_MANY, "semantics", "plan", "rounds", "churn.death", "links", "partition.kind", "engine",
    "device", "workers", "target_accuracy", "patience", "checkpoint_every",
)  # fmt: skip
def run_simulation(  # noqa: PLR0913 - a command line has as many options as it has
    given: flag.Given,
    preset: flag.Preset = None,
    config: flag.ConfigFile = None,
    option: flag.TaskOption = None,
    encoder: Annotated[str | None, typer.Option(help="20ng: a folder, or a name on the hub of Hugging Face.")] = None,
    compare: Annotated[str | None, typer.Option(help="Several techniques, comma-separated, in one table.")] = None,
    out: flag.Out = None,
    overwrite: flag.Overwrite = False,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    as_json: flag.AsJson = False,
) -> None:
    """Simulate federated learning over many peers on this machine.

    Flags override the config file, which overrides the preset. Examples:

      marfl simulate --task digits --peers 125 --iterations 100 --out runs/mar

      marfl simulate --compare mar,fedavg,rdfl,arfl --peers 64 --out runs/compare

      marfl simulate --preset paper-mnist --participation 0.5 --set optimizer.decay=0.8
    """
    flags = {"task_options": flag.parse_options(option), "task_options.encoder": encoder, **given}
    if compare is not None and "technique" in given:
        raise InputError("--compare: names the techniques already; leave --technique out")
    if overwrite and resume:
        raise InputError("--overwrite and --resume: choose one")
    if resume and out is None:
        raise InputError("--resume: needs --out, the run directory to go on with")
    names = compare.split(",") if compare else [None]
    configs = [load(preset, config, flags | ({"technique": name.strip()} if name else {})) for name in names]
    places = [out / each.technique if out is not None and compare else out for each in configs]
    runs = [_Planned(each, place, overwrite, resume) for each, place in zip(configs, places, strict=True)]
    for planned in runs:
        planned.check()  # all of them before the first begins
    console = Console(stderr=True, highlight=False)
    if any(each.privacy.mode == "paper" for each in configs):
        from marfl.dp.paper import WARNING

        console.print(f"warning: {WARNING}")
    summaries = [_run(planned, console) for planned in runs]
    if as_json:
        typer.echo(json.dumps(summaries if compare else summaries[0], indent=2))
    else:
        Console(highlight=False).print(summary_table(summaries))
        for line in filter(None, map(run_line, summaries)):
            typer.echo(line)
        if out is not None:
            typer.echo(f"Run directory: {out}")


@dataclass(frozen=True)
class _Planned:
    """A simulation to come, and where its run directory goes."""

    config: Config
    out: Path | None
    overwrite: bool
    resume: bool

    def check(self) -> None:
        """Refuse what can be refused without loading data."""
        from marfl.runs import RunDir
        from marfl.sim.engine import check  # torch takes a second: only when something runs

        check(self.config)
        if self.out is not None:
            RunDir.check(self.out, self.config.as_dict(), overwrite=self.overwrite, resume=self.resume)

    def create(self) -> RunDir | None:
        from marfl.runs import RunDir

        if self.out is None:
            return None
        return RunDir.create(self.out, self.config.as_dict(), overwrite=self.overwrite, resume=self.resume)


def _run(planned: _Planned, console: Console) -> dict[str, Any]:
    """One simulation with a live display. Ctrl-C leaves a usable run directory."""
    from marfl.sim.engine import Simulation

    simulation, run = Simulation(planned.config), None  # whatever is wrong is said before anything is written
    try:
        run = planned.create()
        if run is not None:
            simulation.open(run, resume=planned.resume)
        if planned.config.engine == "fast":
            console.print(f"{planned.config.technique}: engine fast: {simulation.world.reason}", soft_wrap=True)
        _show(simulation, console)
    except KeyboardInterrupt:
        where = f"; go on with --resume --out {planned.out}" if run is not None else ""
        console.print(f"marfl: stopped by Ctrl-C{where}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        simulation.world.close()
        if run is not None:
            run.close()
    return dict(simulation.summary())


def _show(simulation: Simulation, console: Console) -> None:
    """Run to the end with a progress bar, and say what the checks of each row found."""
    config, accuracy = simulation.config, simulation.progress.final_accuracy
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(config.technique, total=config.iterations, completed=simulation.progress.iteration)
        for row in simulation.rows():
            accuracy = row["test_accuracy"] if row["test_accuracy"] is not None else accuracy
            bar.update(task, completed=row["iteration"], description=_line(config, row, accuracy))
            for check in row["checks"]:
                bar.console.print(f"iteration {row['iteration']}: {check}")


def _line(config: Config, row: Row, accuracy: float | None) -> str:
    shown = "" if accuracy is None else f" accuracy {accuracy:.1%}"
    return f"{config.technique} {row['iteration']}/{config.iterations}{shown} {decimal(row['bytes_total'])}"


def summary_table(summaries: list[dict[str, Any]]) -> Table:
    """The final table: a row per run. S/peer: models that a peer sends in an iteration, on average."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    virtual = any(summary["virtual_seconds"] is not None for summary in summaries)
    names = ("technique", "peers", "iter.", "acc.", "bytes", "S/peer", "hash", "wall s")
    for head in (*names, *(["virt. s"] if virtual else [])):
        table.add_column(head, justify="left" if head in ("technique", "hash") else "right", no_wrap=True)
    for s in summaries:
        kind = s["exchange"] or ""
        name = f"{s['technique']} {kind}".strip() + (" (paper)" if s["semantics"] == "paper" else "")
        name += f" {s['wire']}" if "wire" in s else ""
        accuracy = "–" if s["final_accuracy"] is None else f"{s['final_accuracy']:.1%}"
        seconds = "–" if s["virtual_seconds"] is None else f"{s['virtual_seconds']:,.1f}"
        cells = [
            name, f"{s['peers']:,}", f"{s['iterations']:,}", accuracy, decimal(s["bytes_total"]),
            f"{s['bytes_per_peer_iteration'] / s['model_bytes']:.3f}", s["model_hash"][:8], f"{s['wall_seconds']:.1f}",
        ]  # fmt: skip
        table.add_row(*cells, *([seconds] if virtual else []))
    return table
