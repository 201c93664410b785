"""What a peer says of itself to whoever may ask, and who is in a run, as somebody sees it who only looks.

`serve_about` answers; `look_at` enters the DHT as a guest that keeps nothing, finds everybody who says that it is here
and asks each: `marfl peers` and `marfl watch` show it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from marfl.errors import InputError, NetError, PeerGone, WireError
from marfl.net.base import Net, Parcel, PeerId
from marfl.peer.discovery import Presence, decode_presence

if TYPE_CHECKING:
    from marfl.net.libp2p.transport import Libp2pNet

CHANNEL = "about"
PATIENCE = 5.0  # seconds for one peer to answer
DAEMON, LIBRARY = "daemon", "library"  # kinds of peers
MOST = 1000  # peers that one names
LONGEST = 200  # characters of a text that another peer says of itself


@dataclass(frozen=True)
class Last:
    """An iteration as a peer tells it."""

    iteration: int
    present: tuple[str, ...]  # in the order of the roster
    missing: Mapping[str, str]
    exchange: str
    hash: str  # in hex
    seconds: float
    sent: int  # bytes of this peer, in this iteration
    accuracy: float | None = None  # when it last tested


@dataclass(frozen=True)
class About:
    """What a peer says of itself."""

    run: str
    version: str  # of marfl
    kind: str  # "daemon": marfl peer; "library": marfl.Peer
    index: int
    iteration: int  # the last one that is over for it
    state: str  # training, waiting, exchanging, syncing, done
    model: str  # the hash of what it holds, in hex
    up: float = 0.0  # seconds since it began
    sees: str = ""  # where it sees whoever asks
    group_size: int = 0
    sent: int = 0  # bytes, since it began
    last: Last | None = None  # the newest iteration that it took part in

    @property
    def encoded(self) -> bytes:
        data: bytes = msgpack.packb(asdict(self))
        return data


def version() -> str:
    """Of marfl, as it is installed."""
    try:
        return metadata.version("marfl")
    except metadata.PackageNotFoundError:
        return "unknown"


def decode_about(data: bytes) -> About:
    """What these bytes say, or `WireError`. A later version may say more."""
    kinds: dict[str, type] = {"index": int, "iteration": int, "up": float, "group_size": int, "sent": int}
    try:
        said = msgpack.unpackb(data, raw=False, max_ext_len=0)
        names = [each.name for each in fields(About) if each.name != "last"]
        known = {name: kinds.get(name, str)(said[name]) for name in names}
        last = _decode_last(said["last"])
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"about: not what a peer says of itself: {type(error).__name__}") from None
    texts = {name: _printable(value) for name, value in known.items() if isinstance(value, str)}
    return About(**known | texts, last=last)


def _decode_last(said: Any) -> Last | None:
    """What a peer says of its newest iteration; ValueError, TypeError or KeyError for what is nonsense."""
    if said is None:
        return None
    present = tuple(_printable(str(peer)) for peer in list(said["present"])[:MOST])
    missing = {_printable(str(peer)): _printable(str(why)) for peer, why in list(said["missing"].items())[:MOST]}
    accuracy = None if said["accuracy"] is None else float(said["accuracy"])
    numbers = int(said["iteration"]), float(said["seconds"]), int(said["sent"])
    return Last(
        numbers[0], present, missing, _printable(str(said["exchange"])), _printable(str(said["hash"])), *numbers[1:],
        accuracy,
    )  # fmt: skip


def _printable(text: str) -> str:
    """What others say goes to a terminal: nothing in it may move the cursor there."""
    return "".join(each if each.isprintable() else "?" for each in text[:LONGEST])


def serve_about(net: Net, say: Callable[[], About], seen: Callable[[PeerId], Awaitable[str]] | None = None) -> None:
    """Tell whoever asks how this peer is."""
    begun = time.monotonic()

    async def tell(sender: PeerId, _: Parcel) -> Parcel:
        sees = await seen(sender) if seen else ""
        return Parcel(replace(say(), up=time.monotonic() - begun, sees=sees).encoded)

    net.serve(CHANNEL, tell)


async def ask_about(net: Net, peer: PeerId, patience: float = PATIENCE) -> About:
    """What another peer says of itself. `NetError`, or `WireError`."""
    answer = await net.call(peer, CHANNEL, Parcel(b""), deadline=net.now() + patience)
    return decode_about(bytes(answer.header))


# --- a run, seen by somebody who only looks ---


@dataclass(frozen=True)
class Seen:
    """One peer of a run."""

    peer: PeerId
    index: int
    addresses: tuple[str, ...]
    about: About | None  # None: it cannot be reached, or does not answer
    why: str = ""  # why not


@dataclass(frozen=True)
class Guest:
    """Somebody who looks at a run, and takes no part."""

    net: Libp2pNet
    run: str

    async def look(self) -> list[Seen]:
        """Everybody who says that it is here, each asked how it is; by index and name."""
        records = await self.net.lookup(f"peers/{self.run}")
        shown = {peer: decode_presence(value) for peer, value in records.items() if peer != self.net.me}
        there = {peer: presence for peer, presence in shown.items() if presence is not None and presence.here}
        found = await asyncio.gather(*(self._ask(peer, presence) for peer, presence in there.items()))
        return sorted(found, key=lambda seen: (seen.index, seen.peer))

    async def _ask(self, peer: PeerId, presence: Presence) -> Seen:
        about, why = None, ""
        try:
            about = await ask_about(self.net, peer)
        except (NetError, WireError):  # perhaps it was never dialled: its own addresses are tried
            failed = await self.net.join(presence.addresses[:1])
            try:
                about = await ask_about(self.net, peer)
            except (NetError, WireError) as error:
                why = next(iter(failed.values()), str(error))
        return Seen(peer, presence.index, presence.addresses, about, why)


@asynccontextmanager
async def guest(address: str, run: str | None = None, **secrets: Any) -> AsyncIterator[Guest]:
    """Look at the run of the peer at this address; `secrets` are the identity, token and authority of a closed one."""
    from marfl.net.libp2p.admission import NotAdmitted, admission_of
    from marfl.net.libp2p.connection import Libp2pSettings
    from marfl.net.libp2p.transport import Libp2pNet  # hivemind takes a second: only when something is asked

    identity: Path | None = secrets.get("identity")
    if secrets.get("authority") and run is None:
        raise InputError("authority: a token is for one run; name it (--run)")
    admission = admission_of(run or "", secrets.get("authority"), secrets.get("token"))
    settings = Libp2pSettings(join=(address,), identity=identity, watches=True)
    async with Libp2pNet.create(settings, admission) as net:
        host = address.rpartition("/p2p/")[2]
        try:
            name = run or (await ask_about(net, host)).run
        except NotAdmitted:
            raise InputError(f"{address} refuses to answer: the run is closed (identity, token, authority)") from None
        except (NetError, WireError) as error:
            raise PeerGone(f"{address} does not say which run it is in ({error}); name it (--run)") from None
        yield Guest(net, name)


def as_row(seen: Seen) -> Mapping[str, Any]:
    """A peer of a run as plain values."""
    known = {"peer": seen.peer, "index": seen.index, "addresses": list(seen.addresses)}
    row: dict[str, Any] = known | {"reachable": seen.about is not None}
    return row | ({"why": seen.why} if seen.about is None else asdict(seen.about))
