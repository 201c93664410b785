"""`marfl privacy`: what a run would give away to whom, or the noise that a budget needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marfl.commands.flags import SETTINGS, option, whole_number
from marfl.errors import InputError

OBSERVERS = SETTINGS["privacy.target_observer"].choices
SEES = {
    "outsider": "the global models and clipping bounds",
    "insider": "a peer's noised vector in its group, every time",
    "insider_masked": "totals only, and knows its own noise",
}
INFINITE = "infinite: hardly any noise, or none that this observer does not know, protects the peer"

Number = float | None


def show_privacy(  # noqa: PLR0913 - a command line has as many options as it has
    peers: Annotated[int, option("peers")],
    iterations: Annotated[int, option("iterations")],
    noise_multiplier: Annotated[Number, option("privacy.noise_multiplier")] = None,
    target_epsilon: Annotated[
        Number, typer.Option(metavar="NUMBER", help="Instead of noise: find the least that keeps ε below this.")
    ] = None,
    target_observer: Annotated[str, option("privacy.target_observer")] = "insider",
    delta: Annotated[Number, option("privacy.delta")] = None,
    tolerated_loss: Annotated[float, option("privacy.tolerated_loss")] = SETTINGS["privacy.tolerated_loss"].default,
    indicator_noise: Annotated[Number, option("privacy.indicator_noise")] = None,
    colluders: Annotated[int, option("privacy.colluders")] = SETTINGS["privacy.colluders"].default,
    unit: Annotated[str, option("privacy.unit")] = SETTINGS["privacy.unit"].default,
    records: Annotated[int | None, option("privacy.records")] = None,
    batch: Annotated[int, option("batch")] = SETTINGS["batch"].default,
    group_size: Annotated[int, option("group_size")] = SETTINGS["group_size"].default,
    exchange: Annotated[str, option("exchange")] = "full",
    parameters: Annotated[
        int | None, typer.Option(parser=whole_number(1), metavar="P", help="Of the model; default: the paper's CNN.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Show the epsilon of a run for three observers, or find the noise for a budget.

    Everybody is taken to be there in every iteration. Examples:

      marfl privacy --noise-multiplier 1 --peers 125 --iterations 30

      marfl privacy --target-epsilon 8 --target-observer outsider --peers 125 --iterations 100 --json

      marfl privacy --unit record --records 5000 --batch 64 --peers 16 --noise-multiplier 1 --iterations 100
    """
    from marfl.dp.accounting import Observer  # torch takes a second: only when something is computed
    from marfl.dp.budget import PAPER_CNN_PARAMETERS, default_delta, noise_for_budget, privacy_report
    from marfl.dp.calibration import NoisePlan
    from marfl.dp.record_level import Sampling

    if (noise_multiplier is None) == (target_epsilon is None):
        raise InputError("--noise-multiplier and --target-epsilon: give exactly one of them")
    if (unit == "record") != (records is not None):
        raise InputError("--unit record and --records: go together; batch / records is the rate at which peers sample")
    sampling = Sampling(batch, records) if records is not None else None
    given = 1e-9 if noise_multiplier is None else noise_multiplier  # what a budget needs is found below
    noise = NoisePlan(
        given, peers, indicator_noise, tolerated_loss, adaptive=sampling is None, colluders=colluders,
        sampling=sampling.rate if sampling else 1.0,
    )  # fmt: skip
    delta = default_delta(peers * (records or 1)) if delta is None else delta
    if target_epsilon is not None:
        noise = noise_for_budget(target_epsilon, iterations, noise, delta=delta, observer=Observer(target_observer))
    report = privacy_report(
        noise, iterations, delta=delta, group_size=group_size, exchange=exchange, sampling=sampling,
        parameters=parameters or PAPER_CNN_PARAMETERS,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(_strict(report), ensure_ascii=False))
    else:
        _print(report)


def run_line(summary: Mapping[str, Any]) -> str | None:
    """What a private run gave away, in a line for a person; None for a run without a guarantee."""
    told = summary["privacy"]
    if told is None or told["mode"] != "sound":
        return None
    shown = ", ".join(f"{observer} {_epsilon(told[f'epsilon_{observer}'])}" for observer in OBSERVERS)
    stopped = [summary["stopped_because"]] if str(summary["stopped_because"]).startswith("target epsilon") else []
    warnings = [f"warning: {line}" for line in told.get("warnings", ())]
    of_record = ", of one record" if told.get("unit") == "record" else ""
    return "\n".join([f"epsilon at delta {told['delta']:.3g}{of_record}: {shown}", *stopped, *warnings])


def _epsilon(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{value:,.4g}"


def _strict(report: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: null, and the reason beside it."""
    infinite = {name: INFINITE for name, value in report.items() if value == math.inf}
    return {**report, **dict.fromkeys(infinite), **({"reasons": infinite} if infinite else {})}


def _print(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    peers, iterations = report["peers"], report["iterations"]
    noise = f"noise multiplier {report['noise_multiplier']:.4g}, delta {report['delta']:.3g}"
    colluders = f", {report['colluders']} colluders" if report["colluders"] else ""
    console.print(f"{peers:,} peers, {iterations:,} iterations, {noise}{colluders}", style="bold")
    if report["unit"] == "record":
        rate = f"{report['batch']:,} of {report['records']:,} records of a peer, rate {report['sampling_rate']:.4g}"
        console.print(f"one record is hidden; a batch is a secret sample of {rate}")
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("observer")
    for name in ("epsilon", f"at delta {report['second_delta']:g}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sees")
    for observer in OBSERVERS:
        shown = [_epsilon(report[f"epsilon_{observer}{kind}"]) for kind in ("", "_at_second_delta")]
        table.add_row(observer, *shown, SEES[observer])
    console.print("", table, "", sep="\n")
    replacing = ", ".join(f"{observer} {_epsilon(report[f'epsilon_{observer}_replacing'])}" for observer in OBSERVERS)
    what = "one record" if report["unit"] == "record" else "all data of a peer"
    console.print(f"if {what} is replaced by any other, not left out: {replacing}")
    for line in report["warnings"]:
        console.print(f"warning: {line}")
    console.print(f"noise over clip, on the mean: {report['noise_to_clip_ratio']:.3g}; a model learns while it is low")
    console.print(f"\nadjacency, {report['adjacency']}\n\nassumed:")
    for line in report["assumptions"]:
        console.print(f"- {line}")
