"""`marfl swarm-key`: the authority of a closed run, and the tokens it signs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marfl.errors import InputError


def swarm_key(
    out: Annotated[Path | None, typer.Option(help="Make an authority: where its secret key goes.")] = None,
    sign: Annotated[str | None, typer.Option(metavar="PEERID", help="Make a token for this peer.")] = None,
    run: Annotated[str | None, typer.Option(help="The run that the token is for.")] = None,
    days: Annotated[float, typer.Option(help="How long the token holds.")] = 30.0,
    key: Annotated[Path, typer.Option(help="The authority's secret key, to sign with.")] = Path("authority.key"),
) -> None:
    """Close a run: make an authority, and sign tokens for the peers that may take part.

    Examples:

      marfl swarm-key --out authority.key

      marfl swarm-key --key authority.key --sign 12D3Koo… --run demo --days 30 > peer1.token

    The first prints the public part, which every peer is given as --authority; a peer shows its token with --token.
    """
    from marfl.net.libp2p.admission import (  # cryptography takes a moment: only when something is signed
        new_authority,
        sign_token,
    )

    if (out is None) == (sign is None):
        raise InputError("swarm-key: give either --out FILE, to make an authority, or --sign PEERID, to make a token")
    if out is not None:
        typer.echo(new_authority(out))
        return
    if run is None:
        raise InputError("--sign: needs --run, the name of the run that the token is for")
    assert sign is not None
    typer.echo(sign_token(key, run, sign, days))
