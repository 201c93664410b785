"""How a peer's net is started: open, or closed to all who have no token."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from marfl.errors import InputError
from marfl.net.libp2p import Libp2pNet, check_addresses
from marfl.net.libp2p_settings import Libp2pSettings, is_loopback
from marfl.peer.closed import start_closed
from marfl.settings import Network
from marfl.tokens import Gate, parse_authority, read_token

log = logging.getLogger("marfl.peer")


def gate_of(run: str, authority: str | None, token: Path | None) -> tuple[Gate | None, bytes]:
    """The door of a closed run, and the token that opens it; neither in an open run."""
    if authority is None and token is None:
        return None, b""
    if authority is None or token is None:
        raise InputError("--authority and --token: a closed run needs both")
    return Gate(parse_authority(authority), run), read_token(token)


def check_places(network: Network, listen: tuple[str, ...], join: tuple[str, ...]) -> None:
    """`InputError` for an address that is malformed or taken, before anything is started or written."""
    sockets = Libp2pSettings.of(network, listen, None)
    check_addresses(replace(sockets, join=join))
    away = [address for address in join if not is_loopback(address)]
    if away and all(map(is_loopback, sockets.listen)) and not sockets.auto_relay:
        log.warning("this peer listens on loopback only: peers on other machines, such as %s, cannot call it; "
                    "listen on /ip4/0.0.0.0/tcp/0", away[0])  # fmt: skip


async def start_net(settings: Libp2pSettings, gate: Gate | None = None, token: bytes = b"") -> Libp2pNet:
    """A listening net that has joined nobody yet: open, or closed when there is a gate."""
    if gate is None:
        return await Libp2pNet.start(settings)
    return await start_closed(settings, gate, token)
