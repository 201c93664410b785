"""Real sockets keep the contract; what a real peer needs besides: addresses, an identity, a clean end."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there
from marfl.errors import DeadlineExceeded, InputError, NetError, PeerGone
from marfl.net.base import Parcel, Tag
from marfl.net.libp2p import p2pd, transport
from marfl.net.libp2p.admission import TOKEN_BYTES
from marfl.net.libp2p.connection import MIB, Libp2pSettings, Limits
from marfl.net.libp2p.frames import Code, Frame, Refusal, Wire
from marfl.net.libp2p.identity import load_identity, new_identity, public_key, verified
from marfl.net.libp2p.inbox import Inbox
from marfl.net.libp2p.p2pd import with_ports
from marfl.net.libp2p.streams import Dialer
from marfl.net.libp2p.transport import DIED, Libp2pNet, dial_failure
from stages.libp2p import Stage, Swarm, freeze, hivemind_warnings, new_closed_stage, new_stage, open_stage, until
from stages.net_contract import NetContract, World, echo, new_name, new_tag, soon

T = TypeVar("T")
pytestmark = hivemind_warnings
stage = new_stage
closed_stage = new_closed_stage


class TestLibp2pNet(NetContract):
    @pytest.fixture(autouse=True)
    def _on_stage(self, stage: Stage) -> None:
        self.stage = stage

    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        return self.stage.play(scene)


class TestClosedNet(NetContract):
    """The same among holders of tokens."""

    record_front = TOKEN_BYTES
    crowd = 4  # whatever they say, a token is shown once

    @pytest.fixture(autouse=True)
    def _on_stage(self, closed_stage: Stage) -> None:
        self.stage = closed_stage

    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        return self.stage.play(scene)

    @pytest.mark.slow  # each takes daemons of its own; tokens make no difference to how these die
    def test_a_peer_that_dies_before_it_answers_is_gone(self):
        super().test_a_peer_that_dies_before_it_answers_is_gone()

    @pytest.mark.slow
    def test_a_dead_peers_record_outlives_it(self):
        super().test_a_dead_peers_record_outlives_it()

    @pytest.mark.slow
    def test_a_dht_that_fails_is_said_and_nothing_is_pretended(self):
        super().test_a_dht_that_fails_is_said_and_nothing_is_pretended()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- the end ---


def test_nothing_is_left_of_a_net_that_was_closed():
    """On a loop of its own: tasks of the stage's other peers would come and go meanwhile."""

    async def scene(swarm: Swarm) -> None:
        (other,) = await swarm.peers(1)
        async with Libp2pNet.create(await swarm.joining(dht_timeout=1000.0)) as net:
            swarm.daemons.append(net.daemon_pid)
            traces = [net._daemon.scratch, Path(net._daemon.p2p.daemon_listen_maddr["unix"])]
            assert all(trace.exists() for trace in traces)
            assert alive(net.daemon_pid)
            kinds = sorted(re.split(r"[-.]", file.name)[0] for file in net._daemon.scratch.iterdir())
            assert kinds in (["lock", "p2pd", "streams"], ["lock", "p2pclient", "p2pd", "streams"])  # and not the key
            await net.announce(new_name("key"), b"value", ttl=60)
            await freeze(other.daemon_pid)
            looking = asyncio.create_task(net.lookup(new_name("key")))  # under way when the net closes
            await until(lambda looking=looking, requests=net._daemon.requests: looking.done() or bool(requests))
            assert not looking.done()
        await asyncio.wait([looking])
        os.kill(other.daemon_pid, signal.SIGCONT)
        assert not alive(net.daemon_pid)
        assert not any(trace.exists() for trace in traces)
        await other.close()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        del net, looking
        gc.collect()  # whatever was not closed properly warns now, and warnings are errors

    with open_stage(Swarm) as stage:
        stage.play(scene)


def test_a_net_can_be_closed_when_its_daemon_hangs(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    async def scene(swarm: Swarm) -> None:
        net = await swarm.start()
        await freeze(net.daemon_pid)
        await net.close()
        assert not alive(net.daemon_pid)

    monkeypatch.setattr(p2pd, "STOP_TIMEOUT", 0.05)
    stage.play(scene)


def test_a_daemon_that_dies_is_started_again_with_its_name_its_addresses_and_its_records(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        (a,) = await swarm.peers(1)
        net = await swarm.newcomer()
        channel, key = new_name("echo"), new_name("head/")
        for each in (a, net):
            each.serve(channel, echo)
        addresses, before = await net.addresses(), net.daemon_pid
        await net.announce(key, b"kept", ttl=60)
        os.kill(before, signal.SIGKILL)
        await until(lambda: net._daemon.p2p._child.returncode is not None)
        with pytest.raises(NetError, match="own p2p daemon is gone"):
            await net.lookup(key)
        answer = await net.call(a.me, channel, Parcel(b"still?"), deadline=soon(net))  # waits for the new daemon
        assert answer.header == b"still?"
        await net.returned.wait()
        swarm.daemons.append(net.daemon_pid)
        assert (await a.call(net.me, channel, Parcel(b"back?"), deadline=soon(a))).header == b"back?"
        assert net.daemon_pid != before
        assert await net.addresses() == addresses
        assert dict(await net.lookup(key)) == dict(await a.lookup(key)) == {net.me: b"kept"}
        assert net.refused[DIED] == 1

    stage.play(scene)


def test_a_net_whose_daemon_cannot_be_started_again_says_so_and_can_be_closed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transport, "RESTART_PAUSE", 0.001)
    gone = "own p2p daemon is gone: started 5 times in vain .*Address already in use"

    async def scene(swarm: Swarm) -> None:
        (a,) = await swarm.peers(1)
        net = await swarm.newcomer()
        await swarm.silence_dht(net)  # its port is taken
        assert re.search(gone, await net.lost)
        with pytest.raises(PeerGone, match=gone):
            await net.call(a.me, new_name("echo"), Parcel(b"?"), deadline=soon(net))
        with pytest.raises(NetError, match=gone):
            await net.announce(new_name("key"), b"value", ttl=60)
        with pytest.raises(NetError, match=gone):
            await net.lookup(new_name("key"))
        await net.close()
        swarm.taken.pop(net.me).close()
        assert not net._daemon.scratch.exists()
        assert not Path(net._daemon.p2p.daemon_listen_maddr["unix"]).exists()

    stage.play(scene)


def test_a_net_can_be_closed_while_its_daemon_is_being_started_again(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        net = await swarm.newcomer()
        os.kill(net.daemon_pid, signal.SIGKILL)
        await until(lambda: net.refused[DIED] == 1)
        await net.close()
        assert not alive(net.daemon_pid)

    stage.play(scene)


@pytest.mark.parametrize(
    ("listen", "addresses", "fixed"),
    [
        ("/ip4/127.0.0.1/tcp/0", ["/ip4/127.0.0.1/tcp/4001/p2p/Q"], "/ip4/127.0.0.1/tcp/4001"),
        ("/ip4/0.0.0.0/tcp/0", ["/ip4/10.0.0.7/tcp/4001/p2p/Q"], "/ip4/0.0.0.0/tcp/4001"),
        ("/ip6/::/udp/0/quic", ["/ip4/1.2.3.4/tcp/1/p2p/Q", "/ip6/::1/udp/2/quic/p2p/Q"], "/ip6/::/udp/2/quic"),
        ("/ip4/127.0.0.1/tcp/5", ["/ip4/127.0.0.1/tcp/4001/p2p/Q"], "/ip4/127.0.0.1/tcp/5"),
        ("/ip4/0.0.0.0/tcp/0", ["/ip4/1.2.3.4/tcp/9/p2p/R/p2p-circuit/p2p/Q"], "/ip4/0.0.0.0/tcp/0"),
    ],
)
def test_a_new_daemon_listens_on_the_port_that_the_old_one_had(listen: str, addresses: list[str], fixed: str):
    assert with_ports([listen], addresses) == (fixed,)


def test_an_address_that_another_peer_made_up_is_only_not_reached(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        (a,) = await swarm.peers(1)
        assert list(await a.join(["nonsense", "/ip4/127.0.0.1/tcp/1"])) == ["nonsense", "/ip4/127.0.0.1/tcp/1"]

    stage.play(scene)


def test_whoever_waits_for_an_answer_when_its_net_closes_is_told(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        (a,) = await swarm.peers(1)
        net = await swarm.newcomer()
        asked = asyncio.Event()

        async def never(_: str, __: Parcel) -> Parcel:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        channel = new_name("never")
        a.serve(channel, never)
        call = asyncio.create_task(net.call(a.me, channel, Parcel(b"?"), deadline=soon(net)))
        await asked.wait()
        await net.close()
        with pytest.raises(NetError):
            await call

    stage.play(scene)


def test_a_hung_peer_is_given_up_at_the_deadline_and_not_before(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        (a,) = await swarm.peers(1)
        hung = await swarm.newcomer()
        channel = new_name("echo")
        hung.serve(channel, echo)
        await a.call(hung.me, channel, Parcel(b"?"), deadline=soon(a))
        await freeze(hung.daemon_pid)
        try:
            for payload in (b"", bytes(20 * MIB)):
                deadline = a.now() + 0.1
                with pytest.raises(DeadlineExceeded):
                    await a.send(hung.me, new_tag(), Parcel(b"h", payload), deadline=deadline)
                assert a.now() >= deadline
            with pytest.raises(DeadlineExceeded):
                await a.call(hung.me, channel, Parcel(b"?"), deadline=a.now() + 0.1)
        finally:
            os.kill(hung.daemon_pid, signal.SIGCONT)
        assert (await a.call(hung.me, channel, Parcel(b"awake?"), deadline=soon(a))).header == b"awake?"

    stage.play(scene)


# --- streams are kept ---


def test_a_stream_is_opened_once_for_many_messages(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        (a,) = await swarm.peers(1)
        caller = await swarm.newcomer()
        opened: list[str] = []
        open_stream = caller._daemon.open_stream
        caller._daemon.open_stream = lambda peer: (opened.append(peer), open_stream(peer))[1]
        for _ in range(5):
            await caller.send(a.me, new_tag(), Parcel(b"h"), deadline=soon(caller))
        assert opened == [a.me]

    stage.play(scene)


def test_a_kept_stream_that_the_other_side_has_closed_is_replaced(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        caller = await swarm.newcomer()
        (a,) = await swarm.peers(1)
        streams = []
        for _ in range(2):
            await caller.send(a.me, new_tag(), Parcel(b"h"), deadline=soon(caller))
            (kept,) = caller._dialer._idle
            streams.append(kept)
            for task in a._listener._tasks:
                if task.get_coro().__name__ == "_serve":
                    task.cancel()
            await until(lambda kept=kept: kept.has_news)
        assert streams[0] is not streams[1]

    stage.play(scene)


def test_a_kept_stream_that_dies_unseen_is_replaced_while_it_is_used(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    async def scene(swarm: Swarm) -> None:
        caller = await swarm.newcomer()
        (a,) = await swarm.peers(1)
        await caller.send(a.me, new_tag(), Parcel(b"h"), deadline=soon(caller))
        for task in a._listener._tasks:
            if task.get_coro().__name__ == "_serve":
                task.cancel()
        tag = new_tag()
        with monkeypatch.context() as blind:
            blind.setattr(Wire, "has_news", False)
            await caller.send(a.me, tag, Parcel(b"again"), deadline=soon(caller))
        assert (await a.recv(caller.me, tag, deadline=soon(a))).header == b"again"

    stage.play(scene)


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_one():
    ends = [socket.socketpair() for _ in range(2)]
    for end in (end for pair in ends for end in pair):
        end.setblocking(False)

    class Pairs:
        def __init__(self) -> None:
            self.near = [near for near, _ in ends]

        async def open_stream(self, _: str) -> socket.socket:
            return self.near.pop(0)

    async def answer(wire: Wire, *headers: bytes) -> None:
        await wire.read()
        for header in headers:
            await wire.write(Frame(Code.ANSWER, "control", Parcel(header)))

    limits = Limits()
    dialer = Dialer(Pairs(), limits)
    far = [Wire(end, limits) for _, end in ends]
    question = Frame(Code.CALL, "x", Parcel(b"?"))
    first, _ = await asyncio.gather(dialer.ask("b", question, lambda _: None), answer(far[0], b"one", b"unasked"))
    await until(lambda: next(iter(dialer._idle)).has_news)
    second, _ = await asyncio.gather(dialer.ask("b", question, lambda _: None), answer(far[1], b"two"))
    dialer.close()
    for wire in far:
        wire.close()
    assert [first.parcel.header, second.parcel.header] == [b"one", b"two"]


def test_only_so_many_streams_are_kept(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        caller = await swarm.newcomer(await swarm.joining(limits=Limits(idle_streams=2)))
        for peer in await swarm.peers(4):
            await caller.send(peer.me, new_tag(), Parcel(b"h"), deadline=soon(caller))
        assert [peer for _, peer in caller._dialer._idle.items()] == [net.me for net in (await swarm.peers(4))[2:]]

    stage.play(scene)


# --- addresses and joining ---


def test_a_peer_with_the_same_identity_file_keeps_its_name_and_replaces_its_records(stage: Stage, tmp_path: Path):
    async def scene(swarm: Swarm) -> None:
        (a,) = await swarm.peers(1)
        settings = await swarm.joining(identity=tmp_path / "key")
        key, names = new_name("head/"), set()
        for value, ttl in [(b"before", 600.0), (b"after", 60.0)]:
            async with Libp2pNet.create(settings) as net:
                swarm.daemons.append(net.daemon_pid)
                names.add(net.me)
                await net.announce(key, value, ttl=ttl)
                assert dict(await a.lookup(key)) == {net.me: value}
        assert names == {load_identity(tmp_path / "key").peer}

    stage.play(scene)


def test_a_swarm_is_entered_through_any_peer_that_answers_and_again_later(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        a, b = await swarm.peers(2)
        dead = await swarm.newcomer()
        (gone,) = await dead.addresses()
        await swarm.kill(dead)
        net = await swarm.newcomer(Libp2pSettings(join=(gone, *await b.addresses())))
        key = new_name("ready/")
        await net.announce(key, b"here", ttl=60)
        assert dict(await a.lookup(key)) == {net.me: b"here"}
        alone = await swarm.newcomer(Libp2pSettings())
        assert dict(await alone.lookup(key)) == {}
        assert list(await alone.join([gone, *await a.addresses()])) == [gone]
        assert dict(await alone.lookup(key)) == {net.me: b"here"}

    stage.play(scene)


def test_joining_nobody_says_whom_and_why(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        dead = await swarm.newcomer()
        (gone,) = await dead.addresses()
        await swarm.kill(dead)
        with pytest.raises(PeerGone, match=rf"^join: nobody answers; {gone}: connection refused"):
            await swarm.start(Libp2pSettings(join=(gone,)))

    stage.play(scene)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"join": ("somewhere",)}, "join: 'somewhere' is not a multiaddress"),
        ({"join": ("/ip4/127.0.0.1/tcp/4001",)}, "join: '/ip4/127.0.0.1/tcp/4001' does not name its peer"),
        ({"listen": ("/ip4/127.0.0.1/tcp/99999",)}, "listen: '/ip4/127.0.0.1/tcp/99999' is not a multiaddress"),
        ({"listen": ("/ip4/192.0.2.7/tcp/0",)}, "listen: /ip4/192.0.2.7/tcp/0 cannot be used"),
        ({"announce": ("/ip4/1",)}, "announce: '/ip4/1' is not a multiaddress"),
        ({"identity": Path("/nowhere/key")}, "identity: /nowhere/key cannot be used: No such file or directory"),
    ],
)
def test_wrong_settings_are_one_clear_line(stage: Stage, settings: dict[str, object], says: str):
    async def scene(swarm: Swarm) -> None:
        with pytest.raises(InputError) as caught:
            await swarm.start(Libp2pSettings(**settings))
        assert str(caught.value).startswith(says)
        assert "\n" not in str(caught.value)

    stage.play(scene)


def test_a_port_in_use_is_refused(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
            with pytest.raises(InputError, match=f"listen: {address} cannot be used: Address already in use"):
                await swarm.start(Libp2pSettings(listen=(address,)))

    stage.play(scene)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"chunk": 1000}, "limits.chunk: 1000 bytes"),
        ({"patience": 0}, "limits.patience: 0 must be more than 0"),
        ({"message": 10, "sender_memory": 9}, "limits.sender_memory: 9 is less than one message"),
        ({"peer_streams": 1}, "limits.peer_streams: 1 is too small"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int], says: str):
    with pytest.raises(InputError, match=says):
        Limits(**limits)


def test_to_be_reached_through_relays_needs_relays():
    with pytest.raises(InputError, match="auto_relay"):
        Libp2pSettings(auto_relay=True)


# --- identity ---


def test_an_identity_file_is_made_once_for_its_owners_eyes_only(tmp_path: Path):
    made = load_identity(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert load_identity(tmp_path / "key") == made
    assert made.secret.hex() not in repr(made)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x08\x00\x12\x04abcd", new_identity().encoded[:-32] + new_identity().encoded[-32:]],
    ids=["empty", "text", "another kind of key", "a changed key"],
)
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(InputError, match="does not hold an Ed25519 libp2p key"):
        load_identity(tmp_path / "key")


def test_a_peers_name_is_its_key_and_checks_its_signatures():
    one, other = new_identity(), new_identity()
    digest = bytes(32)
    assert verified(one.peer, digest, one.sign(digest))
    assert not verified(other.peer, digest, one.sign(digest))
    assert not verified(one.peer, bytes(31) + b"!", one.sign(digest))
    for name in ("", "nobody", "Ω", one.peer + "1", one.peer[:-1], "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"):
        assert public_key(name) is None
        assert not verified(name, digest, one.sign(digest))


# --- the inbox ---


async def test_a_message_that_arrives_when_its_waiter_has_just_given_up_is_not_lost():
    inbox, tag, loop = Inbox(Limits()), Tag("reduce", 1), asyncio.get_running_loop()
    deadline = loop.time() + 0.01
    await inbox.reserve("a", 1)
    waiting = asyncio.create_task(inbox.recv("a", tag, deadline))
    await asyncio.sleep(0)
    loop.call_at(deadline + 1e-9, inbox.deliver, "a", tag, Parcel(b"x"))  # runs before the waiter does
    with pytest.raises(DeadlineExceeded):
        await waiting
    assert await inbox.recv("a", tag, loop.time()) == Parcel(b"x")


async def test_a_sender_without_room_waits_until_there_is_some_and_is_refused_if_there_is_none():
    inbox = Inbox(Limits(message=1000, sender_memory=3000, memory=6000, patience=0.02))
    await inbox.reserve("a", 1000)
    with pytest.raises(Refusal, match="over cap"):
        await inbox.reserve("a", 1000)
    waiting = asyncio.create_task(inbox.reserve("a", 1000))
    await asyncio.sleep(0)
    inbox.deliver("a", Tag("x", 1), Parcel(bytes(1000)))
    inbox.forget(1)
    await waiting
    await inbox.reserve("b", 1000)
    with pytest.raises(Refusal, match="over cap"):
        await inbox.reserve("c", 1000)  # there is no room left for anybody


def test_why_an_address_was_not_reached_is_said_in_its_last_words_and_stays_the_same_while_libp2p_waits():
    dialled = "failed to dial: failed to dial 12D3Koo: all dials failed * [/ip4/127.0.0.1/tcp/1] "
    refused = dial_failure(f"{dialled}dial tcp4 127.0.0.1:1: connect: connection refused")
    assert refused == "connection refused"
    assert dial_failure(f"{dialled}dial backoff", refused) == refused
    assert dial_failure(f"{dialled}dial backoff") == "it could not be reached a moment ago"
    assert dial_failure(f"{dialled}dial tcp4 10.0.0.9:1: i/o timeout") == "i/o timeout"
    assert dial_failure("join: /ip4/1.2.3.4 is no address of a peer") == "join: /ip4/1.2.3.4 is no address of a peer"


async def test_a_message_that_is_awaited_needs_no_room():
    inbox = Inbox(Limits(message=1000, sender_memory=3000, memory=6000, patience=0.02))
    tag = Tag("x", 1)
    await inbox.reserve("a", 1000)
    blocked = asyncio.create_task(inbox.reserve("a", 1000, tag))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(inbox.recv("a", tag, asyncio.get_running_loop().time() + 10))
    await blocked
    inbox.deliver("a", tag, Parcel(bytes(1000)))
    assert (await waiting).size == 1000
