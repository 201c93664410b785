"""`marfl peer`: one real peer on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from marfl.commands import flags as flag
from marfl.commands.flags import one_of, whole_number
from marfl.config import load, read_toml
from marfl.schema import validated
from marfl.settings import Network

Text = str | None
UNCOUNTED = 1  # the exit code of a peer that took part, and none of whose updates counted
MINE = {  # flags that are not for the other peers
    "index", "of", "state_dir", "run", "join", "listen", "identity", "status_port", "token", "cast", "server",
    "log_format", "device", "halt_at",
}  # fmt: skip


@flag.takes_settings(
    "peers", *flag.LEARNING, "coordination", "share_tests", "device", network=True, spelled={"peers": "--of"}
)
def run_peer(  # noqa: PLR0913 - a command line has as many options as it has
    context: typer.Context,
    index: Annotated[int, typer.Option(parser=whole_number(0), metavar="I", help="Which shard is mine, from 0.")],
    given: flag.Given,
    state_dir: Annotated[Path, typer.Option(help="Where this peer keeps its key, checkpoints and log.")] = Path("peer"),
    config: flag.ConfigFile = None,
    run: Annotated[Text, typer.Option(help="The run's name; only the default gives the simulator's bits.")] = None,
    join: Annotated[list[str] | None, flag.joining("join", "may be repeated")] = None,
    listen: Annotated[list[str] | None, flag.joining("listen", "may be repeated")] = None,
    identity: Annotated[Path | None, flag.joining("identity", "by default in the state directory")] = None,
    status_port: Annotated[
        int | None,
        typer.Option(
            "--status-port", "--status", parser=whole_number(0, 65535), metavar="PORT",
            help="On 127.0.0.1: the live page for a browser, JSON at /status, Prometheus at /metrics; 0: a free port.",
        ),
    ] = None,
    token: Annotated[Path | None, flag.joining("token")] = None,
    authority: Annotated[Text, flag.joining("authority")] = None,
    linger: Annotated[float, typer.Option(min=0, help="Seconds to serve others after the last iteration.")] = 60.0,
    cast: Annotated[Path | None, typer.Option(help="JSON: who updates and aggregates in which iteration.")] = None,
    log_format: Annotated[
        str, typer.Option(parser=one_of(("text", "json")), metavar="text|json", help="The log: lines, or JSON objects.")
    ] = "text",
    server: Annotated[bool, typer.Option("--server", help="Be FedAvg's server: no data, index N.")] = False,
    halt_at: Annotated[
        list[str] | None,
        typer.Option(hidden=True, metavar="ITERATION[:STATE]", help="Stop there (SIGSTOP); marfl swarm hits me so."),
    ] = None,
) -> None:
    """Be one real peer: train my shard, find the others, average with them over libp2p.

    Flags override the config file, whose `network` table holds time-outs and the ways through routers. Examples:

      marfl peer --index 0 --of 3 --task digits --iterations 20 --state-dir peer0 --listen /ip4/0.0.0.0/tcp/4001

      marfl peer --index 1 --of 3 --task digits --iterations 20 --state-dir peer1 --listen /ip4/0.0.0.0/tcp/4001
        --join /ip4/…/tcp/4001/p2p/12D3Koo…
    """
    from marfl.peer.daemon import Options, run_daemon  # torch and hivemind take seconds: only when something runs
    from marfl.peer.halts import parse_moment
    from marfl.peer.loop import ALONE, LEFT_OUT
    from marfl.runs import flattened

    tree = read_toml(config) if config else {}
    table = tree.pop("network", {})
    flags, network = flag.split_network(flag.with_coordination(given))
    settings = load(overrides=flattened(tree) | flags)
    reached = validated(Network, table | network, "network.")
    options = Options(
        index, state_dir, run or settings.run_name, tuple(join or ()), tuple(listen or ()), identity, status_port,
        token, authority, linger, cast, server, reached, shlex.join(_shared_flags(context)), log_format,
        tuple(map(parse_moment, halt_at or ())),
    )  # fmt: skip
    if run_daemon(settings, options).startswith((ALONE, LEFT_OUT)):
        raise typer.Exit(UNCOUNTED)


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
