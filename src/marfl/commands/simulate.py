"""`marfl simulate`: one experiment, or several side by side."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
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
from marfl.wire.packing import is_small

if TYPE_CHECKING:
    from marfl.runs import Row, RunDir
    from marfl.sim.engine import Simulation

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C has ended
MOST_SEEDS = 1000
LINES_EVERY = 10.0  # seconds between two lines of progress where there is no terminal


@flag.takes_settings(
    *flag.LEARNING, *flag.OF_MANY, "semantics", "plan", "rounds", "churn.death", "links", "partition.kind", "engine",
    "device", "workers", "cluster", "target_accuracy", "patience", "checkpoint_every",
)  # fmt: skip
def run_simulation(  # noqa: PLR0913 - a command line has as many options as it has
    given: flag.Given,
    preset: flag.Preset = None,
    config: flag.ConfigFile = None,
    option: flag.TaskOption = None,
    encoder: Annotated[str | None, typer.Option(help="20ng: a folder, or a name on the hub of Hugging Face.")] = None,
    compare: Annotated[str | None, typer.Option(help="Several techniques, comma-separated, in one table.")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="0-4", help="A run for each of these seeds, such as 0-4 or 1,5,7.")
    ] = None,
    out: flag.Out = None,
    overwrite: flag.Overwrite = False,
    resume: flag.Resume = False,
    as_json: flag.AsJson = False,
) -> None:
    """Simulate federated learning over many peers on this machine.

    Flags override the config file, which overrides the preset. Examples:

      marfl simulate --task digits --peers 125 --iterations 100 --out runs/mar

      marfl simulate --compare mar,fedavg,rdfl,arfl --peers 64 --out runs/compare

      marfl simulate --preset paper-mnist --participation 0.5 --set optimizer.decay=0.8

    --resume --out DIR goes on with the run that is there, by its own settings; --iterations prolongs it:

      marfl simulate --resume --out runs/mar --iterations 200
    """
    flags = {"task_options": flag.parse_options(option), "task_options.encoder": encoder, **given}
    given_twice = {"--compare": ("technique", compare), "--seeds": ("seed", seeds)}
    for name, (setting, several) in given_twice.items():
        if several is not None and setting in given:
            raise InputError(f"{name}: names each {setting} already; leave --{setting} out")
    if overwrite and resume:
        raise InputError("--overwrite and --resume: choose one")
    if resume and out is None:
        raise InputError("--resume: needs --out, the run directory to go on with")
    asked = _Asked(preset, config, flags, out, overwrite, resume, compare, seeds)
    runs = asked.runs()
    for planned in runs:
        planned.check()  # all of them before the first begins
    console = Console(stderr=True, highlight=False)
    if any(each.config.privacy.mode == "paper" for each in runs):
        from marfl.dp.paper import WARNING

        console.print(f"warning: {WARNING}")
    with _joined(runs):
        summaries = [_run(planned, console, asked.how_to_go_on) for planned in runs]
    if as_json:
        typer.echo(json.dumps(summaries if asked.several else summaries[0], indent=2))
    else:
        _print(summaries, out, by_seed=seeds is not None)


def _joined(runs: list[_Planned]) -> AbstractContextManager[None]:
    """In a cluster, several runs join it once."""
    first = runs[0].config
    if first.cluster is None or len(runs) == 1:
        return nullcontext()
    from marfl.sim.cluster import joined

    return joined(first.cluster, first.workers)


def _print(summaries: list[dict[str, Any]], out: Path | None, *, by_seed: bool) -> None:
    Console(highlight=False).print(summary_table(summaries, by_seed=by_seed))
    for line in _pooled(summaries) if by_seed else ():
        typer.echo(line)
    for line in filter(None, map(run_line, summaries)):
        typer.echo(line)
    if out is not None:
        typer.echo(f"Run directory: {out}")


def _pooled(summaries: list[dict[str, Any]]) -> Iterator[str]:
    """What the seeds of each technique come to: mean and range."""
    for name in dict.fromkeys(summary["technique"] for summary in summaries):
        found = [s["final_accuracy"] for s in summaries if s["technique"] == name and s["final_accuracy"] is not None]
        if found:
            low, mean, high = min(found), sum(found) / len(found), max(found)
            yield f"{name}: accuracy {mean:.1%} on average over {_counted(len(found))}, from {low:.1%} to {high:.1%}"


def _counted(seeds: int) -> str:
    return f"{seeds} seed" if seeds == 1 else f"{seeds} seeds"


@dataclass(frozen=True)
class _Asked:
    """What the command line asks for: one run, or one for each technique and seed."""

    preset: str | None
    config: Path | None
    flags: dict[str, Any]
    out: Path | None
    overwrite: bool
    resume: bool
    compare: str | None
    seeds: str | None

    @property
    def several(self) -> bool:
        return self.compare is not None or self.seeds is not None

    @property
    def how_to_go_on(self) -> str:
        """What to type after a Ctrl-C."""
        more = f" --compare {self.compare}" if self.compare else ""
        return more + (f" --seeds {self.seeds}" if self.seeds else "") + f" --resume --out {self.out}"

    def runs(self) -> list[_Planned]:
        techniques = [name.strip() for name in self.compare.split(",")] if self.compare else [None]
        seeds = parse_seeds(self.seeds) if self.seeds is not None else [None]
        found = [(name, seed, self._place(name, seed)) for name in techniques for seed in seeds]
        begun = [place for _, _, place in found if place is not None and (place / "config.toml").is_file()]
        return [self._planned(name, seed, place, begun) for name, seed, place in found]

    def _place(self, technique: str | None, seed: int | None) -> Path | None:
        parts = [technique, None if seed is None else f"seed-{seed}"]
        return self.out.joinpath(*filter(None, parts)) if self.out is not None else None

    def _planned(self, technique: str | None, seed: int | None, place: Path | None, begun: list[Path]) -> _Planned:
        """A resumed run knows its settings; one of several that was not begun yet has those of the others."""
        config, resume = self.config, self.resume and (place in begun or not begun)
        if self.resume and begun and config is None and self.preset is None:
            config = next((each for each in begun if each == place), begun[0]) / "config.toml"
        own = {name: value for name, value in (("technique", technique), ("seed", seed)) if value is not None}
        return _Planned(load(self.preset, config, self.flags | own), place, self.overwrite, resume)


def parse_seeds(text: str) -> list[int]:
    """`0-4` or `1,5,7-9`: each seed once, in this order."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 0 <= high - low < MOST_SEEDS:
            raise InputError(f"--seeds {text}: must be seeds such as 0-4 or 1,5,7, at most {MOST_SEEDS} in a row")
        found += range(low, high + 1)
    return list(dict.fromkeys(found))


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


def _run(planned: _Planned, console: Console, how_to_go_on: str) -> dict[str, Any]:
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
        where = f"; go on with marfl simulate{how_to_go_on}" if run is not None else ""
        console.print(f"marfl: stopped by Ctrl-C{where}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        simulation.world.close()
        if run is not None:
            run.close()
    return dict(simulation.summary())


def _show(simulation: Simulation, console: Console) -> None:
    """Run to the end with a progress bar, or lines where there is no terminal; what checks found is said."""
    config, accuracy = simulation.config, simulation.progress.final_accuracy
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    said = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(config.technique, total=config.iterations, completed=simulation.progress.iteration)
        for row in simulation.rows():
            accuracy = row["test_accuracy"] if row["test_accuracy"] is not None else accuracy
            bar.update(task, completed=row["iteration"], description=_line(config, row, accuracy))
            if not console.is_terminal and time.monotonic() - said > LINES_EVERY:
                said = time.monotonic()
                console.print(_line(config, row, accuracy), soft_wrap=True)
            for check in row["checks"]:
                console.print(f"iteration {row['iteration']}: {check}")


def _line(config: Config, row: Row, accuracy: float | None) -> str:
    shown = "" if accuracy is None else f" accuracy {accuracy:.1%}"
    return f"{config.technique} {row['iteration']}/{config.iterations}{shown} {decimal(row['bytes_total'])}"


def summary_table(summaries: list[dict[str, Any]], *, by_seed: bool = False) -> Table:
    """The final table: a row per run. S/peer: models that a peer sends in an iteration, on average."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    virtual = any(summary["virtual_seconds"] is not None for summary in summaries)
    names = ("technique", "peers", "iter.", "acc.", "bytes", "S/peer", "hash", "wall s")
    names = (names[0], "seed", *names[1:-1]) if by_seed else names
    for head in (*names, *(["virt. s"] if virtual else [])):
        long = head == "technique"  # a name that is too long gives way to the numbers
        table.add_column(head, justify="left" if long or head == "hash" else "right", no_wrap=not long)
    for s in summaries:
        kind = s["exchange"] or ""
        name = f"{s['technique']} {kind}".strip() + (" (paper)" if s["semantics"] == "paper" else "")
        name += f" {s['wire']}" if is_small(s.get("wire", "fp32")) else ""
        accuracy = "–" if s["final_accuracy"] is None else f"{s['final_accuracy']:.1%}"
        seconds = "–" if s["virtual_seconds"] is None else f"{s['virtual_seconds']:,.1f}"
        cells = [
            name, f"{s['peers']:,}", f"{s['iterations']:,}", accuracy, decimal(s["bytes_total"]),
            f"{s['bytes_per_peer_iteration'] / s['model_bytes']:.3f}", s["model_hash"][:8], f"{s['wall_seconds']:.1f}",
        ]  # fmt: skip
        if by_seed:  # a column more: the seconds that a run took make room for it
            cells = [cells[0], str(s["seed"]), *cells[1:-1]]
        table.add_row(*cells, *([seconds] if virtual else []))
    return table
