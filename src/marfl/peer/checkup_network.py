"""The checks of `marfl doctor` that take a network, or libraries that are slow to load: see `checkup`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from dataclasses import replace

from marfl.errors import MarflError, NetError, WireError
from marfl.net.libp2p.admission import Admission, NotAdmitted, TokenAdmission, admission_of
from marfl.net.libp2p.connection import CLOCK_SKEW, Libp2pSettings, check_free, is_loopback
from marfl.net.libp2p.identity import load_identity
from marfl.net.libp2p.p2pd import check_addresses
from marfl.net.libp2p.transport import Libp2pNet
from marfl.peer.about import About, ask_about, version
from marfl.peer.checkup import Checks, Finding, Patient
from marfl.peer.discovery import ask_clock
from marfl.peer.state_dir import VoteLog

EACH = 6.0  # seconds for one answer of another peer
SOON = 3.0  # days: a token that ends within them is worth a word


class Visit:
    """The patient's place in the network: a daemon of our own where the peer would listen, and whom it asks."""

    def __init__(self, patient: Patient) -> None:
        self._patient = patient
        self._begun = time.monotonic()
        self._net: asyncio.Task[Libp2pNet] = asyncio.get_running_loop().create_task(self._start())

    def begin(self, checks: Checks) -> None:
        """Begin all checks; what needs the daemon waits for it, and is silent where it does not start."""
        patient = self._patient
        if patient.token is not None or patient.authority is not None:
            checks.begin("token", "the key's file", self._token())
        checks.begin("port", "our own p2p daemon", self._port())
        checks.begin("DHT", "a look-up", self._dht())
        for address in patient.join:
            checks.begin("join", address, self._host(address))
        for relay in patient.network.trusted_relays:
            checks.begin("relay", relay, self._relay(relay))

    async def close(self) -> None:
        self._net.cancel()
        await asyncio.wait({self._net})
        if not self._net.cancelled() and self._net.exception() is None:
            await self._net.result().close()

    # --- a token, and a daemon ---

    async def _token(self) -> AsyncIterator[Finding]:
        """Whether this peer's token is the authority's, for this run and key, and how long it holds."""
        patient = self._patient
        try:
            admission = self._admission()
            if patient.key is None:
                yield Finding("token", False, "belongs to a key: name its file (--identity) or a --state-dir")
                return
            VoteLog(patient.key).close()  # it says when another process uses the key
            me = load_identity(patient.key).peer
            admission.check_own(me, named=True)
        except MarflError as error:
            yield Finding("token", False, str(error).removeprefix("token: "))
            return
        assert isinstance(admission, TokenAdmission)
        days = ((admission.expiry(me, admission.token) or 0.0) - time.time()) / 86_400
        yield Finding("token", days > SOON, f"of {me} in run {patient.run!r} holds for {days:.1f} more days")

    def _may_be_shown(self) -> bool:
        """Whether the token is this peer's; else the port and the others are looked at without it."""
        key = self._patient.key
        try:
            if key is not None:
                self._admission().check_own(load_identity(key).peer, named=True)
        except MarflError:
            return False  # which `_token` says
        return key is not None

    def _admission(self) -> Admission:
        return admission_of(self._patient.run, self._patient.authority, self._patient.token)

    async def _start(self) -> Libp2pNet:
        patient = self._patient
        closed = patient.token is not None and patient.authority is not None and self._may_be_shown()
        # in an open run a key of its own will do: the peer itself may be running
        settings = Libp2pSettings.of(patient.network, patient.listen, patient.key if closed else None)
        check_addresses(replace(settings, join=patient.join))
        for address in settings.listen:
            check_free(address)
        admission = self._admission() if closed else None
        return await Libp2pNet.start(replace(settings, watches=True), admission)

    async def _port(self) -> AsyncIterator[Finding]:
        try:
            mine = await (await asyncio.shield(self._net)).addresses()
        except MarflError as error:
            yield Finding("port", False, str(error))
            return
        took = time.monotonic() - self._begun
        yield Finding("port", True, f"listens on {', '.join(_places(mine))}, after {took:.1f} seconds")

    async def _started(self) -> Libp2pNet | None:
        """Our own net, once it is there; None where it cannot start, which `_port` says."""
        try:
            return await asyncio.shield(self._net)
        except MarflError:
            return None

    # --- others ---

    async def _dht(self) -> AsyncIterator[Finding]:
        """Whether a look-up comes back. Alone, a node asks itself."""
        net = await self._started()
        if net is None:
            return
        begun = time.monotonic()
        try:
            async with asyncio.timeout(EACH):
                await net.lookup("doctor")
        except (NetError, TimeoutError) as error:
            yield Finding("DHT", False, f"does not answer ({str(error) or 'in time'})")
            return
        yield Finding("DHT", True, f"answers in {time.monotonic() - begun:.2f} seconds")

    async def _relay(self, relay: str) -> AsyncIterator[Finding]:
        net = await self._started()
        if net is not None:
            failed = await _within(net.join([relay]), relay)
            yield Finding("relay", not failed, f"{relay}: {failed}" if failed else f"{relay} answers")

    async def _host(self, address: str) -> AsyncIterator[Finding]:
        """What the peer there says: whether it lets me in, its run and version, its clock, where it sees me."""
        net = await self._started()
        if net is None:
            return
        peer = address.rpartition("/p2p/")[2]
        failed = await _within(net.join([address]), address)
        if failed:
            yield Finding("join", False, f"{address}: {failed}")
            return
        try:
            about = await ask_about(net, peer, EACH)
        except NotAdmitted:
            says = f"{address} answers, but refuses this peer: the run is closed, and needs a token"
            yield Finding("join", False, says)
            return
        except (NetError, WireError) as error:
            yield Finding("join", False, f"{address} answers, but not as a peer of this version does ({error})")
            return
        yield Finding("join", True, f"{address} answers: run {about.run!r}, iteration {about.iteration}, {about.state}")
        if about.version != version():
            yield Finding("versions", False, f"{address} runs marfl {about.version}, this is {version()}")
        yield await _clock(net, peer)
        yield _address(about, await net.addresses())


def _places(addresses: Iterable[str]) -> Iterator[str]:
    for address in addresses:
        yield address.partition("/p2p/")[0]


async def _within(joining: Awaitable[dict[str, str]], address: str) -> str:
    """Why this address could not be joined in the time for one answer; empty if it could."""
    try:
        async with asyncio.timeout(EACH):
            return (await joining).get(address, "")
    except TimeoutError:
        return f"no answer in {EACH:g} seconds"


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
