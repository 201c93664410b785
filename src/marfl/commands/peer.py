"""`marfl peer`: one real peer on this machine."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from marfl.commands import flags as flag
from marfl.commands.options import whole_number
from marfl.errors import InputError

Text = str | None
Number = float | None
MINE = {"index", "of", "state_dir", "run", "join", "listen", "identity", "status_port", "token", "cast", "server"}


def run_peer(  # noqa: PLR0913 - a command line has as many options as it has
    context: typer.Context,
    index: Annotated[int, typer.Option(parser=whole_number(0), metavar="I", help="Which shard is mine, from 0.")],
    of: Annotated[int | None, typer.Option(parser=whole_number(1), metavar="N", help="Shards in all.")] = None,
    state_dir: Annotated[Path, typer.Option(help="Where this peer keeps its key, checkpoints and log.")] = Path("peer"),
    config: Annotated[Path | None, typer.Option(help="TOML file, such as a run's config.toml.")] = None,
    run: Annotated[Text, typer.Option(help="The run's name; only the default gives the simulator's bits.")] = None,
    join: Annotated[list[str] | None, typer.Option(help="Address of any peer of the run; may be repeated.")] = None,
    listen: Annotated[list[str] | None, typer.Option(help="Multiaddress to listen on; loopback by default.")] = None,
    identity: Annotated[Path | None, typer.Option(help="Key file; by default in the state directory.")] = None,
    status_port: Annotated[
        int | None, typer.Option(parser=whole_number(0, 65535), help="JSON on 127.0.0.1; 0: a free port.")
    ] = None,
    token: Annotated[Path | None, typer.Option(help="My token, for a closed run.")] = None,
    authority: Annotated[Text, typer.Option(help="The closed run's authority, in hex.")] = None,
    linger: Annotated[float, typer.Option(min=0, help="Seconds to serve others after the last iteration.")] = 60.0,
    cast: Annotated[Path | None, typer.Option(help="JSON: who updates and aggregates in which iteration.")] = None,
    server: Annotated[bool, typer.Option(help="Be FedAvg's server: no data, index N.")] = False,
    task: Annotated[Text, typer.Option(help="digits, mnist, 20ng, synthetic, or module:Class.")] = None,
    technique: Annotated[Text, typer.Option(help="mar, fedavg, arfl, rdfl, ring or butterfly.")] = None,
    exchange: Annotated[Text, typer.Option(help="mar: grid, chunked or full.")] = None,
    coordination: flag.Coordination = None,
    wire: flag.Wire = None,
    masks: flag.Masks = False,
    group_size: Annotated[int | None, typer.Option(parser=whole_number(2), metavar="M")] = None,
    iterations: Annotated[int | None, typer.Option(parser=whole_number(1), metavar="T")] = None,
    local_batches: Annotated[int | None, typer.Option(parser=whole_number(1), metavar="B")] = None,
    batch: Annotated[int | None, typer.Option(parser=whole_number(1), help="Rows of a mini-batch.")] = None,
    learning_rate: Annotated[Number, typer.Option(help="η")] = None,
    momentum: Annotated[Text, typer.Option(help="derive, send or local.")] = None,
    distill: flag.DistillK = None,
    distill_teacher: flag.DistillTeacher = None,
    distill_temperature: flag.DistillTemperature = None,
    distill_keep: flag.DistillKeep = None,
    distill_epochs: flag.DistillEpochs = None,
    distill_batches: flag.DistillBatches = None,
    local_steps_match_distill: flag.MatchDistill = False,
    privacy: flag.PrivacyMode = None,
    noise_multiplier: flag.NoiseMultiplier = None,
    clip: flag.Clip = None,
    tolerated_loss: flag.ToleratedLoss = None,
    delta: flag.Delta = None,
    target_epsilon: flag.TargetEpsilon = None,
    target_observer: flag.TargetObserver = None,
    privacy_setting: flag.PrivacySetting = None,
    seed: Annotated[int | None, typer.Option(parser=whole_number(0))] = None,
    test_every: Annotated[int | None, typer.Option(parser=whole_number(1))] = None,
    network: Annotated[
        list[str] | None, typer.Option(help="A setting of the network table, name=value; may be repeated.")
    ] = None,
) -> None:
    """Be one real peer: train my shard, find the others, average with them over libp2p.

    Flags override the config file, whose `network` table holds time-outs and the ways through routers. Examples:

      marfl peer --index 0 --of 3 --task digits --iterations 20 --state-dir peer0 --listen /ip4/0.0.0.0/tcp/4001

      marfl peer --index 1 --of 3 --task digits --iterations 20 --state-dir peer1 --listen /ip4/0.0.0.0/tcp/4001
        --join /ip4/…/tcp/4001/p2p/12D3Koo…
    """
    from marfl.config import load  # torch and hivemind take seconds: only when something runs
    from marfl.peer.daemon import Options, run_daemon
    from marfl.peer.network import network_config
    from marfl.runs import flattened

    tree = _read(config)
    table = tree.pop("network", {}) | (flag.parse_options(network, "--network") or {})
    flags = {
        **flag.parse_coordination(coordination),
        "peers": of, "task": task, "technique": technique, "exchange": exchange, "wire": wire, "group_size": group_size,
        "iterations": iterations, "local_batches": local_batches, "batch": batch,
        "distill.iterations": distill, "distill.teacher": distill_teacher,
        "distill.temperature": distill_temperature, "distill.keep": distill_keep, "distill.epochs": distill_epochs,
        "distill.batches": distill_batches, "distill.match_local_steps": local_steps_match_distill or None,
        "privacy.masks": masks or None,
        "privacy.mode": privacy, "privacy.noise_multiplier": noise_multiplier, "privacy.clip": clip,
        "privacy.tolerated_loss": tolerated_loss, "privacy.delta": delta, "privacy.target_epsilon": target_epsilon,
        "privacy.target_observer": target_observer, **flag.parse_privacy(privacy_setting),
        "optimizer.learning_rate": learning_rate, "momentum": momentum, "seed": seed, "test_every": test_every,
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    settings = load(overrides=flattened(tree) | given)
    options = Options(
        index, state_dir, run or settings.run_name, tuple(join or ()), tuple(listen or ()), identity, status_port,
        token, authority, linger, cast, server, network_config(table), shlex.join(_shared_flags(context)),
    )  # fmt: skip
    run_daemon(settings, options)


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--config {path}: cannot be read ({error})") from None


def _shared_flags(context: typer.Context) -> Iterator[str]:
    """What was typed here and is to be typed at every other peer, too."""
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name in MINE or source is None or source.name != "COMMANDLINE":
            continue
        given = context.params[name]
        for value in given if isinstance(given, list | tuple) else [given]:
            yield parameter.opts[0]
            if value is not True:
                yield str(value)
