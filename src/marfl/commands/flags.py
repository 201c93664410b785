"""Flags that several commands share, each with its help, and how the ones with an inner form are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from marfl.commands.options import whole_number
from marfl.config import PRESETS
from marfl.errors import InputError

Text = str | None
SHARE = "a fraction above 0, at most 1"

Preset = Annotated[str | None, typer.Option(help=f"Start from one of {', '.join(PRESETS)}.")]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML file, such as a run's config.toml.")]
Task = Annotated[str | None, typer.Option(help="digits, mnist, 20ng, synthetic, or module:Class.")]
Technique = Annotated[str | None, typer.Option(help="mar, fedavg, arfl, rdfl, ring or butterfly.")]
Exchange = Annotated[str | None, typer.Option(help="mar: grid, chunked or full.")]
Coordination = Annotated[
    str | None, typer.Option(help="roster (default), or paper: the paper's semantics, by group keys in the DHT.")
]
Wire = Annotated[str | None, typer.Option(help="fp32 (default), or fixed: integers, summed exactly.")]
Masks = Annotated[bool, typer.Option("--masks", help="Mask updates: only their sum over all is ever seen.")]
Peers = Annotated[int | None, typer.Option(parser=whole_number(1), metavar="N")]
GroupSize = Annotated[int | None, typer.Option(parser=whole_number(2), metavar="M")]
Iterations = Annotated[int | None, typer.Option(parser=whole_number(1), metavar="T")]
LocalBatches = Annotated[int | None, typer.Option(parser=whole_number(1), metavar="B")]
Batch = Annotated[int | None, typer.Option(parser=whole_number(1), help="Rows of a mini-batch.")]
LearningRate = Annotated[float | None, typer.Option(help="η")]
Momentum = Annotated[str | None, typer.Option(help="derive, send or local.")]
Participation = Annotated[float | None, typer.Option(help=f"Share of peers in an iteration: {SHARE}.")]
UpdateParticipation = Annotated[float | None, typer.Option(help=f"Share that updates: {SHARE}.")]
AggregateParticipation = Annotated[float | None, typer.Option(help=f"Share that aggregates: {SHARE}.")]
Dropout = Annotated[float | None, typer.Option(help="Likelihood of being lost before the aggregation.")]
Sessions = Annotated[str | None, typer.Option(help="Mean iterations up and down, such as 20,5.")]
Trace = Annotated[Path | None, typer.Option(help="CSV of who is up when: time, peer, up or down.")]
Alpha = Annotated[float | None, typer.Option(help="Dirichlet concentration.")]
MinSamples = Annotated[int | None, typer.Option(parser=whole_number(1), help="Samples per peer, at least.")]
DistillK = Annotated[
    int | None,
    typer.Option("--distill", parser=whole_number(0), metavar="K", help="Moshpit-KD in the first K iterations."),
]
DistillTeacher = Annotated[str | None, typer.Option(help="group (default), or previous: the model before, no bytes.")]
DistillTemperature = Annotated[float | None, typer.Option(help="τ, 3 by default.")]
DistillKeep = Annotated[float | None, typer.Option(help="ρ: share of the group's models that teach, 0.4 by default.")]
DistillEpochs = Annotated[int | None, typer.Option(parser=whole_number(1), metavar="E", help="Passes in a round.")]
DistillBatches = Annotated[int | None, typer.Option(parser=whole_number(1), help="Mini-batches of a round.")]
MatchDistill = Annotated[
    bool, typer.Option("--local-steps-match-distill", help="No distillation, but as many local steps instead.")
]
PrivacyMode = Annotated[
    str | None, typer.Option("--privacy", metavar="MODE", help="off, sound (default where there is noise) or paper.")
]
NoiseMultiplier = Annotated[float | None, typer.Option(metavar="σ", help="Noise on the sum of updates, over the clip.")]
Clip = Annotated[float | None, typer.Option(metavar="C", help="Clipping bound of the first iteration.")]
ToleratedLoss = Annotated[float | None, typer.Option(help="Part of the shares of noise that may be lost.")]
Delta = Annotated[float | None, typer.Option(metavar="δ", help="By default N^-1.1.")]
TargetEpsilon = Annotated[float | None, typer.Option(metavar="ε", help="Stop before it is exceeded.")]
TargetObserver = Annotated[str | None, typer.Option(help="For whom: outsider, insider or insider_masked.")]
PrivacySetting = Annotated[
    list[str] | None, typer.Option(help="Another setting of the privacy table, name=value; may be repeated.")
]
Seed = Annotated[int | None, typer.Option(parser=whole_number(0))]
TestEvery = Annotated[int | None, typer.Option(parser=whole_number(1))]
TaskOption = Annotated[list[str] | None, typer.Option(help="Task option, name=value; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="Run directory to write.")]
Overwrite = Annotated[bool, typer.Option(help="Replace the run that is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


def parse_coordination(text: Text) -> dict[str, Text]:
    """`paper` brings the paper's semantics along."""
    return {"coordination": text, "semantics": "paper" if text == "paper" else None}


def parse_sessions(text: Text) -> dict[str, float] | None:
    """`20,5`: mean iterations up and down."""
    if text is None:
        return None
    try:
        up, down = map(float, text.split(","))
    except ValueError:
        raise InputError(f"--sessions {text}: must be two numbers, mean iterations up and down, such as 20,5") from None
    return {"up": up, "down": down}


def parse_privacy(pairs: list[str] | None) -> dict[str, Any]:
    """name=value pairs as dotted settings of `[privacy]`."""
    return {f"privacy.{name}": value for name, value in (parse_options(pairs, "--privacy-setting") or {}).items()}


def parse_options(pairs: list[str] | None, flag: str = "--option") -> dict[str, Any] | None:
    """name=value pairs; a value is JSON where it can be, else text."""
    if not pairs:
        return None
    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InputError(f"{flag} {pair}: must be name=value")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options
