"""`marfl doctor`: what may keep a peer from taking part. `marfl id`: the name that a token needs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marfl.commands import flags as flag
from marfl.errors import InputError
from marfl.schema import settings_of, validated
from marfl.settings import Network

if TYPE_CHECKING:
    from marfl.peer.checkup import Finding

UNWELL = 1  # the exit code when something was found
Texts = list[str] | None
RunName = Annotated[str, typer.Option(help="The run's name: a token is for one run.")]
StateDir = Annotated[Path | None, typer.Option(help="The state directory of the peer.")]
Networks = Annotated[
    Texts,
    typer.Option(metavar="NAME=VALUE", help="A setting of the table network, such as relay=true; may be repeated."),
]


def doctor(  # noqa: PLR0913 - a command line has as many options as it has
    run: RunName = "seed-0",
    listen: Annotated[Texts, flag.joining("listen", "may be repeated")] = None,
    join: Annotated[Texts, flag.joining("join", "may be repeated")] = None,
    state_dir: StateDir = None,
    identity: Annotated[Path | None, flag.joining("identity", "by default in the state directory")] = None,
    token: Annotated[Path | None, flag.joining("token")] = None,
    authority: Annotated[str | None, flag.joining("authority")] = None,
    network: Networks = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Look for what may keep a peer from taking part: each problem in one line, within 20 seconds.

    Give what `marfl peer` would be given. It looks at versions, the disk, the token, the port, the DHT, the clock, the
    address that others see, and relays. The exit code is 1 when there is a problem. Examples:

      marfl doctor --listen /ip4/0.0.0.0/tcp/4001 --state-dir peer0

      marfl doctor --listen /ip4/0.0.0.0/tcp/0 --join /ip4/192.168.1.5/tcp/4001/p2p/12D3Koo…
    """
    from marfl.peer.checkup import Patient, anything_hangs, run_doctor

    known = settings_of(Network, "network.")
    pairs = dict(flag.parse_pair(pair, known, "--network", "network.") for pair in network or ())
    reached = validated(Network, {name.removeprefix("network."): value for name, value in pairs.items()}, "network.")
    patient = Patient(
        run, tuple(listen or ()), tuple(join or ()), state_dir, identity, token, authority, reached
    )  # fmt: skip
    found: list[Finding] = []

    def say(finding: Finding) -> None:
        found.append(finding)
        if not as_json:
            typer.echo(str(finding))

    well = asyncio.run(run_doctor(patient, say))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2))
    if anything_hangs():  # a library that is loaded in a thread cannot be stopped: Python would wait, or abort
        sys.stdout.flush()
        os._exit(UNWELL)
    if not well:
        raise typer.Exit(UNWELL)


def show_id(
    state_dir: Annotated[Path | None, typer.Option(help="The state directory of the peer; made if need be.")] = None,
    identity: Annotated[Path | None, typer.Option(help="Or its key file.")] = None,
) -> None:
    """Print the id of a peer, before its first start: a token is signed for it. A key is made where there is none.

    Examples:

      marfl id --state-dir peer0

      marfl swarm-key --key authority.key --sign $(marfl id --state-dir peer0) --run demo > peer0.token
    """
    from marfl.net.libp2p.identity import load_identity  # cryptography takes a moment

    if (state_dir is None) == (identity is None):
        raise InputError("id: give either --state-dir DIR or --identity FILE")
    if state_dir is not None:
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--state-dir {state_dir}: cannot be made ({error.strerror})") from None
        identity = state_dir / "identity"
    assert identity is not None
    typer.echo(load_identity(identity).peer)
