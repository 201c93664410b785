"""`Net` over real sockets: libp2p streams for messages, a Kademlia DHT for records.

Each net starts one `p2pd` daemon (go-libp2p), which encrypts every stream and vouches for who is at its other end, and
one node of the DHT beside it, in this process. The daemon ends with its net, and also when this process is killed. One
that dies before is started again, under the same name and at the same addresses. Who may speak is decided by the
`Admission` that a net is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Self

from hivemind.utils.logging import use_hivemind_log_handler

from marfl.byte_kinds import ByteKind
from marfl.errors import DeadlineExceeded, InputError, NetError, PeerGone, WireError
from marfl.net.base import BAD_QUESTION, NOT_ENTITLED, Handler, Judge, Parcel, PeerId, Refusals, Tag, Traffic, Verdict
from marfl.net.libp2p.admission import Admission, NotAdmitted, OpenAdmission
from marfl.net.libp2p.connection import Libp2pSettings, check_free
from marfl.net.libp2p.frames import NOT_ALLOWED, Code, Frame, Opening, Refusal, Wire, nothing
from marfl.net.libp2p.identity import Identity, load_identity, new_identity, verified
from marfl.net.libp2p.inbox import Inbox
from marfl.net.libp2p.p2pd import P2pDaemon, check_addresses, one_line, parse_address
from marfl.net.libp2p.records import Counts, Records
from marfl.net.libp2p.streams import Dialer, Doorkeeper, Listener

HELLO = "hello"  # the channel on which tokens are shown
BAD_TOKEN = "bad token"  # counted in `Net.refused`
DIED = "p2p daemon died"  # counted in `Net.refused`
RESTARTS = 5  # so many times in `RESTART_WINDOW` seconds a daemon is started again; after that the net is lost
RESTART_WINDOW = 60.0
REJOINED = 32  # peers at most through which it then finds the swarm again
RESTART_PAUSE = 0.25  # seconds before the second of them; twice as many before each that follows
NO_ANSWER = b"\xc1refused"  # 0xc1 is never valid msgpack: no handler can answer this

log = logging.getLogger("marfl.peer.net")

use_hivemind_log_handler("nowhere")  # whoever uses us decides where log messages go


def dial_failure(said: str, before: str = "") -> str:
    """Why libp2p did not reach an address, in its last words; `before` is what it said the last time.

    It dials an address that failed only after a while again, and until then says nothing but "dial backoff".
    """
    _, found, last = said.rpartition("] ")  # all dials failed * [ADDRESS] dial tcp4 …: connect: connection refused
    reason = last.rpartition(": ")[2] if found else said
    return before or "it could not be reached a moment ago" if reason == "dial backoff" else reason


class Libp2pNet:
    """A real peer's end of the network: implements `marfl.net.base.Net`. Use `create`, or `start` and `close`."""

    def __init__(self, identity: Identity, settings: Libp2pSettings, admission: Admission) -> None:
        self.me = identity.peer
        self._identity = identity
        self.sent = Traffic()
        self.received = Traffic()
        self.refused = Refusals(admits=admission.admits)
        self.acquaintances: Callable[[], Iterable[str]] = lambda: ()  # addresses of more peers, the newest last
        self.returned = asyncio.Event()  # set whenever a daemon that died runs again; whoever waits for it clears it
        self._settings, self._limits = settings, settings.limits
        self._admission = admission
        self._greeted: set[PeerId] = set()
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[str, tuple[Handler, ByteKind]] = {}
        self._inbox = Inbox(settings.limits)
        self._judge: Judge | None = None
        self._judged_anew = asyncio.Event()
        self._daemon = P2pDaemon(identity, settings)
        self._records = Records(identity, settings, admission, Counts(self.sent, self.received, self.refused))
        # where tokens are shown, a stranger must get in so far that it can show one
        door = Doorkeeper(lambda peer: admission.greets or admission.admits(peer), self.refused)
        self._dialer = Dialer(self._daemon, settings.limits)
        self._dialer.hears = self._hears
        self._heard: dict[PeerId, float] = {}  # whose bytes came when
        self._listener = Listener(self._daemon, self._take, door, settings.limits)
        self._entered: dict[str, None] = {}  # addresses through which this peer has met others
        self._undialled: dict[str, str] = {}  # addresses that failed, and why
        self._restarting = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        if admission.greets:
            self.serve(HELLO, self._on_hello)

    # --- beginning and end ---

    @classmethod
    @contextlib.asynccontextmanager
    async def create(
        cls, settings: Libp2pSettings | None = None, admission: Admission | None = None
    ) -> AsyncIterator[Self]:
        """A net that is closed at the end of the `async with` block."""
        net = await cls.start(settings, admission)
        try:
            yield net
        finally:
            await net.close()

    @classmethod
    async def start(cls, settings: Libp2pSettings | None = None, admission: Admission | None = None) -> Self:
        """Start the daemon, listen, join the swarm; without `admission` everybody may speak.

        `InputError` for wrong settings, and for a token of mine that is not valid: nobody would talk to me. `PeerGone`
        if nobody answers.
        """
        settings, admission = settings or Libp2pSettings(), admission or OpenAdmission()
        check_addresses(settings)
        identity = load_identity(settings.identity) if settings.identity else new_identity()
        admission.check_own(identity.peer, named=settings.identity is not None)
        net = cls(identity, settings, admission)
        try:
            await net._begin()
        except BaseException:
            await net.close()
            raise
        return net

    async def _begin(self) -> None:
        self._listener.start(self._daemon.door)
        await self._start_daemon()
        self._daemon.ready()
        self._watcher = asyncio.create_task(self._watch())
        failed = await self.join(self._settings.join)
        if failed and len(failed) == len(self._settings.join):
            raise PeerGone("join: nobody answers; " + "; ".join(f"{where}: {why}" for where, why in failed.items()))

    async def _start_daemon(self) -> None:
        await self._daemon.start()
        await self._records.start(self._daemon.p2p)

    async def _watch(self) -> None:
        """Start the daemon again whenever it dies, but not for ever."""
        tries: list[float] = []
        while True:
            why = await self._daemon.ended()
            self.refused[DIED] += 1
            log.warning("the p2p daemon of this peer died (%s); starting it again", why)
            while why:
                tries = [each for each in tries if each > self.now() - RESTART_WINDOW]
                if len(tries) == RESTARTS:
                    self._daemon.give_up(f"started {RESTARTS} times in vain ({why})")
                    return
                await asyncio.sleep(RESTART_PAUSE * 2 ** len(tries) if tries else 0)
                tries.append(self.now())
                async with self._restarting:
                    why = await self._restart()
            await self._rejoin()
            log.warning("the p2p daemon of this peer runs again")
            self.returned.set()

    async def _restart(self) -> str:
        """The same daemon once more: its name, its addresses, what the DHT gave it to keep. Empty, or why not."""
        try:
            await self._daemon.stop()
            for address in self._daemon.listen:
                check_free(address)
            async with asyncio.timeout(self._settings.start_timeout):  # it may die while it is being set up
                await self._start_daemon()
        except (InputError, NetError, OSError) as error:
            return one_line(error) or "it does not answer"
        return ""

    async def _rejoin(self) -> None:
        """Find the swarm again. Whoever waits for the daemon goes on once a peer has answered, or none does."""

        async def enter(address: str) -> None:
            if not await self._enter(address):
                self._daemon.ready()

        places = [*self._entered, *self.acquaintances()]
        await asyncio.gather(*map(enter, dict.fromkeys(places[-REJOINED:])))
        self._daemon.ready()

    @property
    def lost(self) -> asyncio.Future[str]:
        """Why this peer has no daemon any more, once it is given up: then nothing can be sent or heard."""
        return self._daemon.lost

    async def close(self) -> None:
        """End the streams, the DHT node and the daemon, and remove what they left on disk."""
        async with self._restarting:  # a start that is cut short would leave a process
            if self._watcher is not None:
                self._watcher.cancel()
        await asyncio.gather(*filter(None, [self._watcher]), return_exceptions=True)
        self._daemon.give_up("this net is closed")
        self._dialer.close()  # whoever still waits for an answer is told when the daemon ends
        await self._listener.close()
        await self._daemon.stop()
        await self._records.end()
        self._daemon.clean_up()

    @property
    def daemon_pid(self) -> int:
        return self._daemon.pid

    async def addresses(self) -> tuple[str, ...]:
        """Where others reach this peer: what they put in `join`."""
        return await self._daemon.addresses()

    async def seen(self, peer: PeerId) -> str:
        """Where this peer sees another one: its address after all routers; empty when they are not connected."""
        return await self._daemon.seen(peer)

    async def join(self, addresses: Iterable[str]) -> dict[str, str]:
        """Get to know the swarm through these peers, also later, when all others are lost. Who failed, and why."""
        places = list(addresses)
        failures = await asyncio.gather(*map(self._enter, places))
        return {place: why for place, why in zip(places, failures, strict=True) if why}

    async def _enter(self, address: str) -> str:
        """Enter the swarm through one peer; empty, or why not."""
        try:
            async with asyncio.timeout(self._settings.join_timeout):
                await self._records.meet(await self._daemon.connect(parse_address(address, "join", peer=True)))
                self._entered[address] = None
                self._undialled.pop(address, None)
        except TimeoutError:
            return f"no answer in {self._settings.join_timeout:g} seconds"
        except (NetError, InputError) as error:  # others may say that they are at places that are none
            self._undialled[address] = why = dial_failure(str(error), self._undialled.get(address, ""))
            return why
        return ""

    # --- the DHT ---

    async def announce(self, key: str, value: bytes, *, ttl: float) -> None:
        with self._daemon.checked():
            await self._records.announce(key, value, ttl)

    async def lookup(self, key: str) -> Mapping[PeerId, bytes]:
        with self._daemon.checked():
            return await self._records.lookup(key)

    # --- keys ---

    def sign(self, digest: bytes) -> bytes:
        return self._identity.sign(digest)

    def verify(self, peer: PeerId, digest: bytes, signature: bytes) -> bool:
        return verified(peer, digest, signature)

    @property
    def token(self) -> bytes:
        return self._admission.token

    def entitled(self, peer: PeerId, token: bytes) -> bool:
        return self._admission.admit(peer, token)

    # --- time ---

    def now(self) -> float:
        return self._loop.time()

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self.now()))

    # --- messages ---

    async def send(
        self, to: PeerId, tag: Tag, parcel: Parcel, *, kind: ByteKind = ByteKind.PAYLOAD, deadline: float
    ) -> None:
        late = f"{to} has not taken {tag.channel}"
        if to == self.me:
            async with _before(deadline, late):
                await self._note(tag, parcel, kind)
        else:
            await self._ask(to, Frame(Code.SEND, tag, parcel), kind, deadline, late)

    async def recv(self, source: PeerId, tag: Tag, *, deadline: float) -> Parcel:
        return await self._inbox.recv(source, tag, deadline)

    async def call(
        self, to: PeerId, channel: str, parcel: Parcel, *, kind: ByteKind = ByteKind.CONTROL, deadline: float
    ) -> Parcel:
        late = f"no {channel} answered by {to}"
        if to == self.me:
            self.sent.add(kind, parcel)
            async with _before(deadline, late):
                answer = await self._answer(to, channel, parcel)
        else:
            answer = await self._ask(to, Frame(Code.CALL, channel, parcel), kind, deadline, late)
        return self._opened(to, channel, answer)

    def serve(self, channel: str, handler: Handler, *, kind: ByteKind = ByteKind.CONTROL) -> None:
        self._handlers[channel] = (handler, kind)

    def admit(self, judge: Judge | None) -> None:
        self._judge = judge
        self._judged_anew.set()
        self._judged_anew = asyncio.Event()

    def forget(self, iteration: int) -> None:
        self._inbox.forget(iteration)

    def last_heard(self, peer: PeerId) -> float:
        return self._heard.get(peer, -math.inf)

    def _hears(self, peer: PeerId) -> None:
        """Bytes of a message that is taken, or of an answer that was asked for: nobody else's are noted."""
        self._heard[peer] = self.now()

    # --- how others are asked ---

    async def _ask(self, to: PeerId, question: Frame, kind: ByteKind, deadline: float, late: str) -> Frame:
        """What another peer answers, after a hello where tokens are shown."""
        if self._admission.greets and to not in self._greeted:
            await self._greet(to, deadline)
        try:
            return await self._ask_once(to, question, kind, deadline, late)
        except NotAdmitted:
            if not self._admission.greets:
                raise
        await self._greet(to, deadline)  # it has restarted, and knows nobody
        return await self._ask_once(to, question, kind, deadline, late)

    async def _ask_once(self, to: PeerId, question: Frame, kind: ByteKind, deadline: float, late: str) -> Frame:
        async with _before(deadline, late):
            return await self._dialer.ask(to, question, self._meter(kind, question.parcel))

    def _opened(self, to: PeerId, channel: str, answer: Frame) -> Parcel:
        self.received.add(answer.tag, answer.parcel)
        if answer.parcel.header == NO_ANSWER:
            raise PeerGone(f"{to} does not answer {channel}")
        return answer.parcel

    async def _greet(self, to: PeerId, deadline: float) -> None:
        """Show my token to a peer that has not seen it from me, and look at its own."""
        question = Frame(Code.CALL, HELLO, Parcel(self._admission.token))
        answer = await self._ask_once(to, question, ByteKind.CONTROL, deadline, f"no {HELLO} answered by {to}")
        if not self._admission.admit(to, self._opened(to, HELLO, answer).header):
            self.refused.note(BAD_TOKEN, to)
            raise NotAdmitted(f"{to} has no valid token of this run, or does not take mine")
        self._greeted.add(to)

    async def _on_hello(self, sender: PeerId, request: Parcel) -> Parcel:
        if not self._admission.admit(sender, request.header):
            self.refused.note(BAD_TOKEN, sender)
            return Parcel(b"")
        return Parcel(self._admission.token)

    # --- how they are metered and taken ---

    def _meter(self, kind: ByteKind, parcel: Parcel) -> Callable[[int], None]:
        """Counts what has really left: all of it, or as much as went out before the other side was gone."""
        return lambda left: self.sent.add(kind, Parcel(parcel.header, memoryview(parcel.payload)[:left]))

    async def _take(self, source: PeerId, wire: Wire, opening: Opening) -> Frame:
        """Read the rest of what another peer has begun to say, into room that it may take up; what to answer."""
        hello = self._admission.greets and opening.code is Code.CALL and opening.tag == HELLO
        if not hello and not self._admission.admits(source):
            raise Refusal(NOT_ALLOWED)
        if opening.code not in (Code.SEND, Code.CALL):
            raise Refusal("garbage")
        message = opening.tag if opening.code is Code.SEND else None
        kept = message is None or await self._judged(source, message) is Verdict.TAKE
        await self._inbox.reserve(source, opening.size, message)
        wire.hears = partial(self._hears, source) if kept and message else nothing
        if message is None:
            try:
                return await self._answer(source, opening.tag, await wire.read_parcel(opening))
            finally:
                self._inbox.release(source, opening.size)
        try:
            parcel = await wire.read_parcel(opening)
        except BaseException:
            self._inbox.release(source, opening.size)
            raise
        if kept:
            self._deliver(source, message, parcel)
        else:
            self.received.add(message.kind, parcel)
            self._inbox.release(source, opening.size)
        return Frame(Code.TAKEN, None)

    async def _judged(self, source: PeerId, tag: Tag) -> Verdict:
        """Whether to keep a message, or `Refusal`. While nobody can tell it stays unread, and so its sender waits."""
        try:
            async with asyncio.timeout(self._limits.patience):
                while self._judge is not None:
                    verdict = self._judge(source, tag)
                    if verdict is Verdict.REFUSE:
                        raise Refusal(NOT_ENTITLED)
                    if verdict is not Verdict.LATER:
                        return verdict
                    await self._judged_anew.wait()
        except TimeoutError:
            raise Refusal(NOT_ENTITLED) from None
        return Verdict.TAKE

    async def _note(self, tag: Tag, parcel: Parcel, kind: ByteKind) -> None:
        """A message to myself: a daemon cannot dial itself."""
        self.sent.add(kind, parcel)
        try:
            await self._inbox.reserve(self.me, parcel.size, tag)
        except Refusal as refusal:
            raise PeerGone(f"{self.me} refused: {refusal.reason}") from None
        self._deliver(self.me, tag, parcel)

    def _deliver(self, source: PeerId, tag: Tag, parcel: Parcel) -> None:
        if self._inbox.deliver(source, tag, parcel):
            self.received.add(tag.kind, parcel)

    async def _answer(self, source: PeerId, channel: str, parcel: Parcel) -> Frame:
        self.received.add(ByteKind.CONTROL, parcel)
        handler, kind = self._handlers.get(channel, (_refuse, ByteKind.CONTROL))
        try:
            answer = await handler(source, parcel)
        except WireError:
            self.refused.note(BAD_QUESTION, source)
            answer = Parcel(NO_ANSWER)
        self.sent.add(kind, answer)
        return Frame(Code.ANSWER, kind, answer)


@contextlib.asynccontextmanager
async def _before(deadline: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} in time") from None


async def _refuse(_: PeerId, __: Parcel) -> Parcel:
    return Parcel(NO_ANSWER)
