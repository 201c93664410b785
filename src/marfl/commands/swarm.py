"""`marfl swarm`: real peers on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from marfl.commands import flags as flag
from marfl.commands.privacy import run_line
from marfl.commands.simulate import INTERRUPTED as STOPPED
from marfl.commands.simulate import LINES_EVERY, summary_table
from marfl.config import Config, load
from marfl.errors import InputError
from marfl.swarm.fault_flags import Faults, parse_kills, parse_partition, parse_stops
from marfl.swarm.namespaces import parse_bandwidth, why_not

if TYPE_CHECKING:
    from marfl.swarm.record import Recorder
    from marfl.swarm.run import Orders, Swarm

INTERRUPTED = "interrupted"  # why a run ended
WAYS = ("dirichlet", "iid")  # to split the data: the other meaning of --partition


def fault(help: str) -> Any:
    """A flag that hurts peers, or their network."""
    return typer.Option(help=help, rich_help_panel=flag.FAULTS)


@flag.takes_settings(*flag.LEARNING, *flag.OF_MANY, "coordination", "share_tests", network=True)
def run_swarm(  # noqa: PLR0913 - a command line has as many options as it has
    given: flag.Given,
    preset: flag.Preset = None,
    config: flag.ConfigFile = None,
    option: flag.TaskOption = None,
    kill: Annotated[str | None, fault("SIGKILL peers: 2@3,5@4 or 2@3:exchanging.")] = None,
    stop: Annotated[str | None, fault("SIGSTOP peers for a while: 2@3:20.")] = None,
    restart: Annotated[float | None, fault("Killed peers come back after so many seconds.")] = None,
    partition: Annotated[
        list[str] | None,
        fault("Cut the network, 5+3@2:30; or how data is split, dirichlet or iid. May be repeated."),
    ] = None,
    bandwidth: Annotated[str | None, fault("Limit every peer's link: 10mbit.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Give up after so many seconds.")] = None,
    out: flag.Out = None,
    overwrite: flag.Overwrite = False,
    resume: flag.Resume = False,
    as_json: flag.AsJson = False,
) -> None:
    """Run federated learning with real peer processes on this machine, over real sockets.

    The same flags and seed end on the same model as `marfl simulate`. Examples:

      marfl swarm --peers 8 --task digits --iterations 10

      marfl swarm --peers 8 --iterations 10 --kill 2@3,5@4 --restart 5 --out runs/hurt

      marfl swarm --peers 8 --iterations 12 --partition 5+3@2:30 --bandwidth 10mbit

      marfl swarm --resume --out runs/hurt --iterations 20
    """
    if resume and (overwrite or out is None):
        raise InputError("--resume: needs --out, the run directory to go on with, and no --overwrite")
    ways, cuts = _partitions(partition)
    flags, network = flag.split_network(flag.with_coordination(given))
    flags = {"task_options": flag.parse_options(option), "partition.kind": ways, **flags}
    settings = _swarmable(load(preset, _config_of(out) if resume and out else config, flags))
    faults = Faults(parse_kills(kill), parse_stops(stop), parse_partition(cuts), restart)
    faults.check(settings.peers, settings.iterations)
    needs = "--partition" if faults.partition else "--bandwidth" if parse_bandwidth(bandwidth) else None
    if needs and (reason := why_not()):
        raise InputError(f"{needs}: {reason}, because peers get networks of their own")
    with _folder(out) as folder:
        from marfl.swarm.record import orders_for  # torch takes a second: only when something runs

        orders = orders_for(settings, folder, faults, bandwidth, timeout)
        summary, missed = _run(settings, orders, _Place(out, overwrite, resume), network)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print(settings, summary, out)
    if missed:
        raise InputError("; ".join(missed))


def _config_of(out: Path) -> Path:
    """The settings of the run to go on with."""
    if not (out / "peers").is_dir() or not (out / "config.toml").is_file():
        raise InputError(f"--resume --out {out}: holds no swarm to go on with")
    return out / "config.toml"


def _print(settings: Config, summary: dict[str, Any], out: Path | None) -> None:
    console = Console(highlight=False)
    console.print(summary_table([summary]))
    if line := run_line(summary):
        console.print(line)
    for line in summary["notes"]:
        console.print(line)
    if settings.coordination == "paper":
        _print_coordination(summary)
    if out is not None:
        typer.echo(f"Run directory: {out}")


def _print_coordination(summary: dict[str, Any]) -> None:
    """What the paper's coordination cost, and a warning of what it does not promise."""
    operations, sent, received = (summary[f"{name}_per_peer_iteration"] for name in (
        "dht_operations", "control_bytes", "control_bytes_received"
    ))  # fmt: skip
    typer.echo(f"control plane, per peer and iteration: {operations:.1f} DHT operations, {decimal(round(sent))} sent, "
               f"{decimal(round(received))} received")  # fmt: skip
    models = "all peers hold one model" if summary["agreed"] else "peers hold different models"
    typer.echo(f"warning: coordination = paper has no roster and no commit; {models}", err=True)


def _partitions(given: list[str] | None) -> tuple[str | None, str | None]:
    """(how the data is split, how the network is cut): `--partition` says either, by its form."""
    ways = [text for text in given or () if text in WAYS]
    cuts = [text for text in given or () if text not in WAYS]
    if len(ways) > 1 or len(cuts) > 1:
        raise InputError(f"--partition {' '.join(given or ())}: at most one way to split the data, and one cut")
    return next(iter(ways), None), next(iter(cuts), None)


def _swarmable(config: Config) -> Config:
    """The config, when real peers can run it; `InputError` for what only a simulator does."""
    if config.semantics == "paper" and config.coordination != "paper":
        raise InputError("semantics = paper: is simulated (marfl simulate); real peers take --coordination paper")
    only_simulated = {
        "churn.death": config.churn.death, "target_accuracy": config.target_accuracy, "patience": config.patience,
    }  # fmt: skip
    for name, value in only_simulated.items():
        if value:
            raise InputError(f"{name} = {value}: is for marfl simulate; a swarm has --kill and --iterations")
    return config.model_copy(update={"links": None})  # they give virtual seconds; a swarm takes real ones


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where the run is written: --out, or a place that is gone afterwards."""
    if out is not None:
        yield out.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="marfl-run-") as place:
        yield Path(place)


class _Place(NamedTuple):
    """Where the run goes, and what becomes of the one that is there."""

    out: Path | None
    overwrite: bool
    resume: bool

    @property
    def how_to_go_on(self) -> str:
        return f"; go on with marfl swarm --resume --out {self.out}" if self.out else ""


def _run(
    config: Config, orders: Orders, place: _Place, network: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """One swarm with a live table, and the faults that went wrong. Ctrl-C leaves a usable run, and no process."""
    from marfl.runs import RunDir
    from marfl.swarm.record import Recorder, check_free, network_of, prepare
    from marfl.swarm.run import Swarm

    out = orders.folder.parent
    check_free(out)
    with RunDir.create(out, config.as_dict(), overwrite=place.overwrite, resume=place.resume) as run:
        swarm = Swarm(orders)
        network = network_of(out) | network if place.resume else network
        recorder = Recorder(config, run, swarm, prepare(config, run, network, resume=place.resume))
        ended = "it failed"
        try:
            ended = _watch(swarm, recorder)
        finally:
            summary = dict(recorder.finish(ended))
    if ended == INTERRUPTED:
        said = f"marfl: stopped by Ctrl-C; all {len(swarm.peers)} peers have ended{place.how_to_go_on}"
        typer.echo(said, err=True)
        raise typer.Exit(STOPPED)
    return summary, swarm.missed


def _watch(swarm: Swarm, recorder: Recorder) -> str:
    """Run to the end under a live table; why it ended."""
    console = Console(stderr=True, highlight=False)

    async def watched() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with swarm, Live(console=console, transient=True, auto_refresh=False) as live:

            lines = _Lines(console, recorder.iterations)

            def show(_: Swarm) -> None:
                recorder.look()
                if console.is_terminal:
                    live.update(table(swarm), refresh=True)
                else:
                    lines.show(swarm)

            await swarm.run(show)

    try:
        asyncio.run(watched())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    return "all iterations done"


@dataclass
class _Lines:
    """Progress where there is no terminal: what happens to peers at once, and now and then how far they are."""

    console: Console
    iterations: int
    said: float = field(default_factory=time.monotonic)
    noted: int = 0

    def show(self, swarm: Swarm) -> None:
        for note in swarm.notes[self.noted :]:
            self.console.print(note, soft_wrap=True)
        self.noted = len(swarm.notes)
        if time.monotonic() - self.said < LINES_EVERY:
            return
        self.said = time.monotonic()
        last, first = (choose((peer.committed for peer in swarm.peers), default=0) for choose in (max, min))
        there = sum(peer.alive for peer in swarm.peers)
        sent = decimal(sum(peer.bytes_sent for peer in swarm.peers))
        where = f"iteration {last} of {self.iterations} (the last peer: {first})"
        self.console.print(f"{where}, {there} of {len(swarm.peers)} peers here, {sent} sent", soft_wrap=True)


def table(swarm: Swarm) -> Table:
    """How everybody is."""
    shown = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for head in ("peer", "iteration", "accuracy", "sent", "state"):
        shown.add_column(head, justify="left" if head == "state" else "right", no_wrap=True)
    for peer in swarm.peers:
        accuracy = peer.status.get("accuracy")
        cells = [f"{peer.committed:,}", "–" if accuracy is None else f"{accuracy:.1%}", decimal(peer.bytes_sent)]
        name = "server" if peer.index == swarm.orders.peers else str(peer.index)
        shown.add_row(name, *cells, peer.state)
    return shown
