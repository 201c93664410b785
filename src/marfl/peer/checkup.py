"""What may keep a peer from taking part, looked for before it tries: each finding is one line.

Every check has a few seconds; together they take less than twenty (`LIMIT`), whatever hangs.
"""

from __future__ import annotations

import asyncio
import platform
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from marfl.errors import MarflError, NetError, WireError
from marfl.net.libp2p.admission import Admission, NotAdmitted, TokenAdmission, admission_of
from marfl.net.libp2p.connection import CLOCK_SKEW, Libp2pSettings, check_free, is_loopback
from marfl.net.libp2p.identity import load_identity
from marfl.net.libp2p.p2pd import check_addresses
from marfl.net.libp2p.transport import Libp2pNet
from marfl.peer.about import About, ask_about, version
from marfl.peer.discovery import ask_clock
from marfl.peer.state_dir import VoteLog
from marfl.settings import Network

LIMIT = 20.0  # seconds for everything
EACH = 4.0  # for one peer's answer
ROOM = 200 * 2**20  # bytes: a checkpoint is written beside the one before
SOON = 3.0  # days: a token that ends within them is worth a word
LIBRARIES = ("torch", "hivemind", "numpy", "cryptography")


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    subject: str
    good: bool
    says: str

    def __str__(self) -> str:
        return f"{'ok     ' if self.good else 'PROBLEM'}  {self.subject}: {self.says}"


@dataclass(frozen=True)
class Patient:
    """The peer that would be started."""

    run: str
    listen: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    state_dir: Path | None = None
    identity: Path | None = None
    token: Path | None = None
    authority: str | None = None
    network: Network = field(default_factory=Network)

    @property
    def key(self) -> Path | None:
        return self.identity or (self.state_dir / "identity" if self.state_dir else None)


async def examine(patient: Patient) -> AsyncIterator[Finding]:
    """All findings, as they come; the last says so when time ran out."""
    limit = time.monotonic() + LIMIT
    yield _versions()
    for found in _on_the_disk(patient):
        yield found
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + limit - time.monotonic()):
            async for found in _on_the_network(patient):
                yield found
    except TimeoutError:
        yield Finding("time", False, f"not everything answered within {LIMIT:g} seconds; the lines above are what did")


def _versions() -> Finding:
    parts = [f"Python {platform.python_version()}", *(f"{name} {metadata.version(name)}" for name in LIBRARIES)]
    good = sys.version_info >= (3, 11)
    return Finding("versions", good, f"marfl {version()}, {', '.join(parts)}")


# --- what can be seen without a network ---


def _on_the_disk(patient: Patient) -> Iterator[Finding]:
    if patient.state_dir is not None:
        yield _disk(patient.state_dir)
    if patient.token is not None or patient.authority is not None:
        yield _token(patient)


def _disk(folder: Path) -> Finding:
    """Whether the state directory can be written, and has room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".doctor"
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("disk", False, f"{folder} cannot be written ({error.strerror})")
    says = f"{folder} can be written, {free / 2**30:,.1f} GiB are free"
    return Finding("disk", free >= ROOM, says if free >= ROOM else f"{says}: too little for checkpoints")


def _token(patient: Patient) -> Finding:
    """Whether this peer's token is the authority's, for this run and key, and how long it holds."""
    try:
        admission = _admission(patient)
        if patient.key is None:
            return Finding("token", False, "belongs to a key: name its file (--identity) or a --state-dir")
        VoteLog(patient.key).close()  # it says when another process uses the key
        me = load_identity(patient.key).peer
        admission.check_own(me, named=True)
    except MarflError as error:
        return Finding("token", False, str(error).removeprefix("token: "))
    assert isinstance(admission, TokenAdmission)
    days = ((admission.expiry(me, admission.token) or 0.0) - time.time()) / 86_400
    return Finding("token", days > SOON, f"of {me} in run {patient.run!r} holds for {days:.1f} more days")


def _admission(patient: Patient) -> Admission:
    return admission_of(patient.run, patient.authority, patient.token)


# --- what takes a network ---


async def _on_the_network(patient: Patient) -> AsyncIterator[Finding]:
    """The port, then with a daemon of our own: the DHT, those to join, the clock, the address that they see, relays."""
    closed = patient.token is not None and patient.authority is not None
    # in an open run a key of its own will do: the peer itself may be running
    settings = Libp2pSettings.of(patient.network, patient.listen, patient.key if closed else None)
    try:
        check_addresses(replace(settings, join=patient.join))
        for address in settings.listen:
            check_free(address)
        begun = time.monotonic()
        admission = _admission(patient) if closed else None
        net = await Libp2pNet.start(replace(settings, watches=True), admission)
    except MarflError as error:
        yield Finding("port", False, str(error))
        return
    try:
        mine = await net.addresses()
        took = time.monotonic() - begun
        yield Finding("port", True, f"listens on {', '.join(_places(mine))}, after {took:.1f} seconds")
        yield await _dht(net)
        for address in patient.join:
            async for found in _host(net, address, mine):
                yield found
        for relay in patient.network.trusted_relays:
            failed = await net.join([relay])
            yield Finding("relay", not failed, f"{relay} {failed.get(relay) or 'answers'}")
    finally:
        await net.close()


def _places(addresses: Iterable[str]) -> Iterator[str]:
    for address in addresses:
        yield address.partition("/p2p/")[0]


async def _dht(net: Libp2pNet) -> Finding:
    """Whether a look-up comes back. Alone, a node asks itself."""
    begun = time.monotonic()
    try:
        async with asyncio.timeout(EACH):
            await net.lookup("doctor")
    except (NetError, TimeoutError) as error:
        return Finding("DHT", False, f"does not answer ({error or 'in time'})")
    return Finding("DHT", True, f"answers in {time.monotonic() - begun:.2f} seconds")


async def _host(net: Libp2pNet, address: str, mine: tuple[str, ...]) -> AsyncIterator[Finding]:
    """What the peer at this address says: whether it lets me in, its run and version, its clock, where it sees me."""
    peer = address.rpartition("/p2p/")[2]
    failed = await _within(net.join([address]), {address: f"no answer in {EACH:g} seconds"})
    if failed:
        yield Finding("join", False, f"{address}: {failed[address]}")
        return
    try:
        about = await ask_about(net, peer, EACH)
    except NotAdmitted:
        yield Finding("join", False, f"{address} answers, but refuses this peer: the run is closed, and needs a token")
        return
    except (NetError, WireError) as error:
        yield Finding("join", False, f"{address} answers, but not as a peer of this version does ({error})")
        return
    yield Finding("join", True, f"{address} answers: run {about.run!r}, iteration {about.iteration}, {about.state}")
    if about.version != version():
        yield Finding("versions", False, f"{address} runs marfl {about.version}, this is {version()}")
    yield await _clock(net, peer)
    yield _address(about, mine)


async def _within(work: Awaitable[dict[str, str]], otherwise: dict[str, str]) -> dict[str, str]:
    try:
        async with asyncio.timeout(EACH):
            return await work
    except TimeoutError:
        return otherwise


async def _clock(net: Libp2pNet, peer: str) -> Finding:
    try:
        ahead = await ask_clock(net, peer, net.now() + EACH)
    except (NetError, WireError) as error:
        return Finding("clock", False, f"cannot be compared ({error})")
    way = "behind" if ahead > 0 else "ahead of"
    good = abs(ahead) <= CLOCK_SKEW
    says = f"{abs(ahead):.1f} seconds {way} that of {peer}"
    return Finding("clock", good, says if good else f"{says}; at most {CLOCK_SKEW:g} are tolerated: set it right")


def _address(about: About, mine: tuple[str, ...]) -> Finding:
    """Whether others see this peer where it listens."""
    host = _host_of(about.sees)
    if host is None:
        return Finding("address", False, "the other peer does not say where it sees this one")
    listening = {_host_of(place) for place in mine}
    if host in listening:
        return Finding("address", True, f"others see this peer at {host}, where it listens")
    if all(map(is_loopback, mine)):
        return Finding("address", False, f"others see {host}, but this peer listens on loopback alone: give --listen")
    return Finding(
        "address", False, f"others see {host}, this peer listens on {', '.join(sorted(filter(None, listening)))}: "
        "a router is between them; forward the port and announce it, or use a relay (docs/machines.md)",
    )  # fmt: skip


def _host_of(address: str) -> str | None:
    match = re.match(r"/(?:ip4|ip6|dns[46]?)/([^/]+)", address)
    return match[1] if match else None


Report = Callable[[Finding], None]


async def run_doctor(patient: Patient, say: Report) -> bool:
    """Say every finding as it comes; whether all is well."""
    well = True
    async for found in examine(patient):
        say(found)
        well = well and found.good
    return well
