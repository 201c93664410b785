"""`Net` over real sockets: libp2p streams for messages, a Kademlia DHT for records. The only file that uses hivemind.

Each net starts one `p2pd` daemon (go-libp2p), which encrypts every stream and vouches for who is at its other end, and
one `DHTNode` beside it, in this process. The daemon ends with its net, and also when this process is killed.

From hivemind 1.1.12 we use the daemon's life cycle (`P2P`), its control messages and the DHT. Streams are opened and
taken by ourselves, over the daemon's own protocol, so that payloads go straight from and into their buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from marfl.errors import DeadlineExceeded, InputError, NetError, PeerGone, WireError
from marfl.net.base import PeerId
from marfl.net.libp2p_frames import Hangup, Refusal
from marfl.net.libp2p_identity import Identity, load_identity, new_identity, save_identity
from marfl.net.libp2p_messages import Messenger, everybody
from marfl.net.libp2p_records import Place, open_record, sign_record
from marfl.net.libp2p_settings import Libp2pSettings, Limits

PROTOCOL = "/marfl/1"
MAX_CONTROL = 2**20  # bytes of one message from our own daemon
CLOCK_SKEW = 60.0  # seconds by which other peers' clocks may be ahead
STOP_TIMEOUT = 3.0
log = logging.getLogger(__name__)
use_hivemind_log_handler("nowhere")  # whoever uses us decides where its messages go


class Libp2pNet(Messenger):
    """A real peer's door to the network: implements `marfl.net.base.Net`. Make one with `create`, or `start` and `close`."""

    def __init__(self, identity: Identity, settings: Libp2pSettings, allow: Callable[[PeerId], bool]) -> None:
        super().__init__(identity.peer, allow, settings.limits)
        self._identity = identity
        self._settings = settings
        self._scratch = Path(tempfile.mkdtemp(prefix="marfl-"))  # only this user may enter: it holds the stream socket
        self._listed: dict[str, float] = {}  # until when the DHT keeps my record under a key
        self._daemon: Daemon | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def create(
        cls, settings: Libp2pSettings | None = None, *, allow: Callable[[PeerId], bool] = everybody
    ) -> AsyncIterator[Libp2pNet]:
        """A net that is closed at the end of the `async with` block."""
        net = await cls.start(settings, allow=allow)
        try:
            yield net
        finally:
            await net.close()

    @classmethod
    async def start(
        cls, settings: Libp2pSettings | None = None, *, allow: Callable[[PeerId], bool] = everybody
    ) -> Libp2pNet:
        """Start the daemon, listen, and join the swarm. `InputError` for wrong settings, `PeerGone` if nobody answers."""
        settings = settings or Libp2pSettings()
        check_addresses(settings)
        identity = load_identity(settings.identity) if settings.identity else new_identity()
        net = cls(identity, settings, allow)
        try:
            await net._begin()
        except BaseException:
            await net.close()
            raise
        return net
