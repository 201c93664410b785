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
    """
    from marfl.dp.accounting import Observer  # torch takes a second: only when something is computed
    from marfl.dp.budget import PAPER_CNN_PARAMETERS, noise_for_budget, privacy_report
    from marfl.dp.calibration import NoisePlan

    if (noise_multiplier is None) == (target_epsilon is None):
        raise InputError("--noise-multiplier and --target-epsilon: give exactly one of them")
    if target_epsilon is not None:
        noise = noise_for_budget(
            target_epsilon, peers, iterations, delta=delta, observer=Observer(target_observer),
            indicator_noise=indicator_noise, tolerated_loss=tolerated_loss,
        )  # fmt: skip
    else:
        assert noise_multiplier is not None
        noise = NoisePlan(noise_multiplier, peers, indicator_noise, tolerated_loss)
    report = privacy_report(
        noise, iterations, delta=delta, group_size=group_size, exchange=exchange,
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
    stopped = f"\n{summary['stopped_because']}" if str(summary["stopped_because"]).startswith("target epsilon") else ""
    return f"epsilon at delta {told['delta']:.3g}: {shown}{stopped}"


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
    console.print(f"{peers:,} peers, {iterations:,} iterations, {noise}", style="bold")
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("observer")
    table.add_column("epsilon", justify="right", no_wrap=True)
    table.add_column("sees")
    for observer in OBSERVERS:
        table.add_row(observer, _epsilon(report[f"epsilon_{observer}"]), SEES[observer])
    console.print("", table, "", sep="\n")
    console.print(f"noise over clip, on the mean: {report['noise_to_clip_ratio']:.3g}; a model learns while it is low")
    console.print(f"\nadjacency, {report['adjacency']}\n\nassumed:")
    for line in report["assumptions"]:
        console.print(f"- {line}")
