"""What strangers may send to a real peer: everything is refused, counted, and cheap; honest peers notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there
from marfl.byte_kinds import ByteKind
from marfl.errors import PeerGone, WireError
from marfl.net.base import Parcel, PeerId, Tag, Verdict
from marfl.net.libp2p import frames
from marfl.net.libp2p.admission import OpenAdmission
from marfl.net.libp2p.connection import GIB, MIB, Libp2pSettings, Limits
from marfl.net.libp2p.frames import MAGIC, REASONS, Code, Frame, Hangup, Refusal, Wire
from marfl.net.libp2p.identity import new_identity
from marfl.net.libp2p.p2pd import Requests
from marfl.net.libp2p.records import DHTID, Place, open_record, sign_record
from marfl.net.libp2p.transport import Libp2pNet
from stages.attackers import opening, prefix, put
from stages.libp2p import Stage, Swarm, hivemind_warnings, new_stage, until
from stages.net_contract import echo, new_name, new_tag, soon

pytestmark = hivemind_warnings
stage = new_stage
MILLION_YEARS = 3e13


@contextlib.asynccontextmanager
async def raw_stream(attacker: Libp2pNet, victim: Libp2pNet) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """A stream on which an attacker writes what it likes; it is closed once the victim has begun to read that."""
    stream = await attacker._daemon.open_stream(victim.me)
    loop, refused = asyncio.get_running_loop(), victim.refused.total()
    reading, wrote = False, False

    async def write(data: bytes) -> None:
        nonlocal wrote
        wrote = True
        with contextlib.suppress(OSError):  # it may be thrown out before it has finished
            await loop.sock_sendall(stream, data)

    async def noted(wire: Wire, size: int) -> bytes:
        nonlocal reading
        reading = reading or wire._paced
        return await take(wire, size)

    with pytest.MonkeyPatch.context() as patch, stream:
        take = Wire._take
        patch.setattr(Wire, "_take", noted)
        yield write
        if wrote:  # to close at once resets the stream, and that may overtake what was written
            await until(lambda: reading or victim.refused.total() > refused)


async def assert_works(victim: Libp2pNet, honest: Libp2pNet) -> None:
    channel = new_name("echo")
    victim.serve(channel, echo)
    assert (await honest.call(victim.me, channel, Parcel(b"well?"), deadline=soon(honest))).header == b"well?"


def resident() -> int:
    """This process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# --- streams ---


@pytest.mark.parametrize("hundreds", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_random_bytes_are_refused_and_counted(stage: Stage, hundreds: int):
    dice = random.Random(7)

    async def scene(swarm: Swarm) -> None:
        victim, attacker, honest = await swarm.peers(3)
        before = victim.refused.total()
        for _ in range(100):
            async with raw_stream(attacker, victim) as write:
                await write(dice.choice([b"", MAGIC]) + dice.randbytes(dice.randint(1, 5000)))
        await until(lambda: victim.refused.total() == before + 100)
        await assert_works(victim, honest)

    for _ in range(hundreds):
        stage.play(scene)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", "garbage"),
        (prefix(code=9), "garbage"),
        (prefix(code=Code.TAKEN), "garbage"),
        (prefix(tag=2000) + bytes(2000), "garbage"),
        (prefix(tag=4) + b"\xc1\xc1\xc1\xc1", "garbage"),
        (opening(1), "garbage"),
        (opening(["x", -1, 0, 0, 0]), "garbage"),
        (opening(["x", True, 0, 0, 0]), "garbage"),
        (opening(["x", 2**63, 0, 0, 0]), "garbage"),
        (opening([1, 1, 0, 0, 0]), "garbage"),
        (opening(["x", 1, 0, 0, 0, -1]), "garbage"),
        (opening(["x", 1, 0, 0, 0, 0, 0]), "garbage"),
        (opening(["x", 1]), "garbage"),
        (opening(b"x", Code.CALL), "garbage"),
        (prefix(payload=2**63), "oversized"),
        (prefix(header=2**32 - 1), "oversized"),
        (prefix()[:-1], "truncated"),
        (opening(["x", 1, 0, 0, 0], header=100) + b"half", "truncated"),
        (opening(["x", 1, 0, 0, 0], payload=100) + b"half", "truncated"),
        (opening("x", Code.CALL, payload=100) + b"half", "truncated"),
    ],
)
def test_what_is_no_frame_is_refused_for_its_reason(stage: Stage, said: bytes, reason: str):
    async def scene(swarm: Swarm) -> None:
        victim, attacker = await swarm.peers(2)
        before = victim.refused.copy()
        async with raw_stream(attacker, victim) as write:
            await write(said)
        await until(lambda: victim.refused.total() > before.total())
        assert victim.refused - before == {reason: 1}
        assert not victim._inbox._held

    stage.play(scene)


def test_announcing_a_large_message_does_not_use_up_memory(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim, attacker = await swarm.peers(2)
        before, refused = resident(), victim.refused["truncated"]
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                write = await stack.enter_async_context(raw_stream(attacker, victim))
                await write(opening(new_tag(), payload=GIB - 10 * MIB) + b"the rest follows")
            await until(lambda: bool(victim._inbox._held[attacker.me]))
            assert resident() - before < GIB // 4
        await until(lambda: victim.refused["truncated"] == refused + 3)

    stage.play(scene)


def test_a_message_that_nobody_can_judge_takes_no_memory_and_is_refused_when_its_time_is_over(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim = await swarm.newcomer(await swarm.joining(limits=Limits(patience=0.3)))
        attacker, honest = await swarm.peers(2)
        victim.admit(lambda source, _: Verdict.LATER if source == attacker.me else Verdict.TAKE)
        sending = attacker.send(victim.me, new_tag(), Parcel(b"", bytes(MIB)), deadline=soon(attacker))
        unsure = asyncio.create_task(sending)
        tag = new_tag()
        await honest.send(victim.me, tag, Parcel(b"h"), deadline=soon(honest))
        assert (await victim.recv(honest.me, tag, deadline=soon(victim))).header == b"h"
        assert not victim._inbox._held
        with pytest.raises(PeerGone, match="not entitled"):
            await unsure
        assert victim.refused["not entitled"] == 1

    stage.play(scene)


def test_a_stream_that_trickles_is_cut_off(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim = await swarm.newcomer(await swarm.joining(limits=Limits(grace=0.05)))
        attacker, honest = await swarm.peers(2)
        for said in (prefix()[:5], opening(new_tag(), payload=MIB) + bytes(100)):
            before = victim.refused["too slow"]
            async with raw_stream(attacker, victim) as write:
                await write(said)
                await until(lambda before=before: victim.refused["too slow"] > before)
        await assert_works(victim, honest)

    stage.play(scene)


def test_an_answer_that_is_not_fetched_is_given_up(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim = await swarm.newcomer(await swarm.joining(limits=Limits(grace=0.05, rate=10**12)))
        (attacker,) = await swarm.peers(1)

        async def large(_: str, __: Parcel) -> Parcel:
            return Parcel(b"", bytes(100 * MIB))

        victim.serve("large", large)
        async with raw_stream(attacker, victim) as write:
            await write(opening("large", Code.CALL))
            await until(lambda: victim.refused["too slow"] == 1)

    stage.play(scene)


def test_a_sender_over_its_memory_waits_and_then_is_refused_while_others_are_served(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        limits = Limits(message=MIB, sender_memory=3 * MIB, patience=0.1)
        victim = await swarm.newcomer(await swarm.joining(limits=limits))
        greedy, honest = await swarm.peers(2)
        full = Parcel(b"", bytes(MIB))
        tags = [new_tag(), new_tag()]
        for tag in tags:
            await greedy.send(victim.me, tag, full, deadline=soon(greedy))
        with pytest.raises(PeerGone, match="refused: over cap"):
            await greedy.send(victim.me, new_tag(), full, deadline=soon(greedy))
        assert victim.refused["over cap"] == 1
        await honest.send(victim.me, new_tag(), full, deadline=soon(honest))
        waiting = asyncio.create_task(greedy.send(victim.me, new_tag(), full, deadline=soon(greedy)))
        await victim.recv(greedy.me, tags[0], deadline=soon(victim))
        await waiting

    stage.play(scene)


def test_a_message_over_the_limit_is_refused_before_it_is_sent_whole(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    async def scene(swarm: Swarm) -> None:
        victim = await swarm.newcomer(await swarm.joining(limits=Limits(message=MIB)))
        (sender,) = await swarm.peers(1)
        sent = sender.sent.payload
        with pytest.raises(PeerGone, match="refused: oversized"):
            await sender.send(victim.me, new_tag(), Parcel(b"", bytes(200 * MIB)), deadline=soon(sender))
        assert victim.refused["oversized"] == 1
        assert sender.sent.payload - sent < 200 * MIB

    monkeypatch.setattr(frames, "LINGER", 60.0)  # the victim would hear it out: the sender stops by itself
    stage.play(scene)


def test_one_peer_cannot_open_all_streams(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim = await swarm.newcomer(await swarm.joining(limits=Limits(peer_streams=4)))
        attacker, honest = await swarm.peers(2)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(6):
                await stack.enter_async_context(raw_stream(attacker, victim))
            await until(lambda: victim.refused["too many streams"] == 2)
            await assert_works(victim, honest)

    stage.play(scene)


def test_all_peers_together_cannot_open_more_streams_than_there_are(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim = await swarm.newcomer(await swarm.joining(limits=Limits(streams=3)))
        (attacker,) = await swarm.peers(1)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(5):
                await stack.enter_async_context(raw_stream(attacker, victim))
            await until(lambda: victim.refused["too many streams"] == 2)
        await until(lambda: len(victim._listener._tasks) == 1)
        await assert_works(victim, attacker)

    stage.play(scene)


class Friends(OpenAdmission):
    """A rule of its own: these few, by name."""

    def __init__(self, *names: PeerId) -> None:
        self.names = set(names)

    def admits(self, peer: PeerId) -> bool:
        return peer in self.names


def test_a_closed_run_takes_neither_streams_nor_records_of_strangers(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        friend, stranger = await swarm.peers(2)
        admission = Friends(friend.me)
        closed = await swarm.newcomer(admission=admission)
        with pytest.raises(PeerGone, match="refused: not allowed"):
            await stranger.send(closed.me, new_tag(), Parcel(b"h", bytes(MIB)), deadline=soon(stranger))
        assert closed.refused["not allowed"] >= 1  # its new neighbours may have handed it records of strangers, too
        await assert_works(closed, friend)
        key = new_name("ready/")
        for net in (friend, stranger):
            await net.announce(key, b"here", ttl=60)
        before = closed.refused["not allowed"]
        assert dict(await closed.lookup(key)) == {friend.me: b"here"}
        assert closed.refused["not allowed"] > before
        record = (await friend._records._get(key))[friend.me]
        await put(friend, closed.me, key, friend.me, msgpack.packb(record.value), record.expiration_time)
        admission.names.clear()  # also what its own node holds is not believed any more
        assert dict(await closed.lookup(key)) == {}
        await closed.close()

    stage.play(scene)


def test_a_node_that_refuses_a_record_does_not_spoil_it_for_those_that_take_it(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        closed = await swarm.newcomer(Libp2pSettings(), Friends())
        stranger = await swarm.newcomer(Libp2pSettings(join=await closed.addresses()))
        key = new_name("ready/")
        await stranger.announce(key, b"here", ttl=60)
        assert closed.refused["not allowed"] >= 1
        assert dict(await stranger.lookup(key)) == {stranger.me: b"here"}

    stage.play(scene)


def test_a_record_from_before_the_clock_was_set_back_is_replaced(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        net = await swarm.newcomer()
        (other,) = await swarm.peers(1)
        key = new_name("head/")
        net._records._listed = time.time() + 3600
        await net.announce(key, b"before", ttl=60)
        net._records._listed = 0.0  # as after a restart
        await net.announce(key, b"after", ttl=60)
        assert dict(await other.lookup(key)) == {net.me: b"after"}

    stage.play(scene)


def test_a_bug_in_a_handler_is_reported_and_ends_only_its_own_stream(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim, honest = await swarm.peers(2)
        channel, reports = new_name("buggy"), []

        async def buggy(_: str, __: Parcel) -> Parcel:
            raise FileNotFoundError("state.bin")

        victim.serve(channel, buggy)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reports.append(context["exception"]))
        try:
            with pytest.raises(PeerGone):
                await honest.call(victim.me, channel, Parcel(b"?"), deadline=soon(honest))
        finally:
            loop.set_exception_handler(None)
        # the question was asked again on a new stream after the kept one had ended
        assert reports
        assert all(isinstance(report, FileNotFoundError) for report in reports)
        await assert_works(victim, honest)

    stage.play(scene)


# --- records ---


def test_nobody_can_write_in_anothers_name(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim, attacker, honest = await swarm.peers(3)
        key = new_name("head/")
        await honest.announce(key, b"truth", ttl=60)
        before = victim.refused.copy()
        later = time.time() + 1000
        place = Place(DHTID.generate(key).to_bytes(), honest.me, later)
        forged = msgpack.packb(sign_record(attacker._daemon.identity, place, b"lie", later))
        for owner, value in [(honest.me, forged), (honest.me, b"lie"), (None, forged), (7, forged), ("x", forged)]:
            assert await put(attacker, victim.me, key, owner, value, later) == [False]
        assert (victim.refused - before).total() == 5
        assert (victim.refused - before)["bad signature"] >= 2
        assert dict(await victim.lookup(key)) == {honest.me: b"truth"}

    stage.play(scene)


def test_a_record_that_lives_too_long_or_is_too_large_is_refused(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim, attacker = await swarm.peers(2)
        key = new_name("head/")
        name, me = DHTID.generate(key).to_bytes(), attacker._daemon.identity
        for value, listed in [(b"x", time.time() + MILLION_YEARS), (bytes(20_000), time.time() + 60)]:
            record = msgpack.packb(sign_record(me, Place(name, me.peer, listed), value, listed))
            assert await put(attacker, victim.me, key, me.peer, record, listed) == [False]
        assert dict(await victim.lookup(key)) == {}

    stage.play(scene)


def test_an_old_record_played_again_does_not_come_back(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        victim, attacker, honest = await swarm.peers(3)
        key = new_name("head/")
        await honest.announce(key, b"old", ttl=60)
        ((_, old),) = (await attacker._records._get(key)).items()
        await honest.announce(key, b"new", ttl=30)
        replayed = msgpack.packb(old.value)
        await put(attacker, victim.me, key, honest.me, replayed, old.expiration_time)
        assert await put(attacker, victim.me, key, honest.me, replayed, old.expiration_time + 100) == [False]
        assert dict(await victim.lookup(key)) == {honest.me: b"new"}

    stage.play(scene)


def test_a_lying_node_can_neither_change_nor_hide_what_others_announced(stage: Stage):
    async def scene(swarm: Swarm) -> None:
        liar = await swarm.newcomer(Libp2pSettings())
        victim = await swarm.newcomer(Libp2pSettings(join=await liar.addresses()))
        honest, key, ends = new_identity(), new_name("ready/"), time.time() + 600
        true = sign_record(honest, Place(DHTID.generate(key).to_bytes(), honest.peer, ends), b"truth", ends)
        lies = [(new_identity().peer, true), ("nobody", b"lie"), (7, b"lie"), (liar.me, b"lie")]
        for later, (owner, record) in enumerate([(honest.peer, true), *lies]):
            storage = liar._records._node.protocol.storage  # the only one that has them
            storage.store_subkey(DHTID.generate(key), owner, msgpack.packb(record), ends + later)
        assert dict(await victim.lookup(key)) == {honest.peer: b"truth"}
        assert victim.refused == {"bad signature": 3, "garbage": 1}

    stage.play(scene)


def test_a_signature_holds_for_one_value_one_place_and_one_time():
    me, other = new_identity(), new_identity()
    place = Place(b"key", me.peer, 100.0)
    record = sign_record(me, place, b"value", 90.0)
    assert open_record(place, record) == (b"value", 90.0)
    wrong = [
        (place._replace(key=b"other"), record),
        (place._replace(owner=other.peer), record),
        (place._replace(listed_until=101.0), record),
        (place._replace(listed_until=float("nan")), record),
        (place, record[:-1]),
        (place, record + b"!"),
        (place, b"\x00" * 8 + record[8:]),
        (place, b""),
        (place, sign_record(other, place, b"value", 90.0)),
        (place, sign_record(me, place, b"value", 101.0)),
    ]
    for where, what in wrong:
        with pytest.raises(WireError):
            open_record(where, what)


async def test_a_request_that_was_just_given_up_is_not_under_way():
    loop, requests = asyncio.get_running_loop(), Requests()
    requests["alive"], requests["dead"] = loop.create_future(), loop.create_future()
    requests["dead"].cancel()
    assert "alive" in requests
    assert "dead" not in requests


# --- frames ---


@contextlib.contextmanager
def two_ends(limits: Limits):
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield Wire(left, limits), Wire(right, limits)


async def test_a_stream_on_which_nothing_is_asked_ends():
    with two_ends(Limits()) as (_, receiver), pytest.raises(Hangup):
        await receiver.read_opening(idle=0.01)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_frame_or_a_refusal(data: bytes, ours: bool):
    async def read() -> None:
        with two_ends(Limits(message=MIB)) as (sender, receiver):
            await asyncio.get_running_loop().sock_sendall(sender._socket, (MAGIC if ours else b"") + data)
            sender.close()
            with contextlib.suppress(Refusal, Hangup):
                while True:
                    assert isinstance(await receiver.read(), Frame)

    asyncio.run(read())


TAGS = {
    Code.SEND: st.builds(Tag, st.text(max_size=20), *[st.integers(0, 2**63 - 1)] * 5),
    Code.CALL: st.text(max_size=20),
    Code.TAKEN: st.none(),
    Code.ANSWER: st.sampled_from(ByteKind),
    Code.REFUSED: st.sampled_from(REASONS),
}
FRAMES = st.sampled_from(list(Code)).flatmap(
    lambda code: st.builds(Frame, st.just(code), TAGS[code], st.builds(Parcel, st.binary(), st.binary(max_size=9000)))
)


@given(st.lists(FRAMES, max_size=4))
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames: list[Frame]):
    async def pass_on() -> list[Frame]:
        with two_ends(Limits()) as (sender, receiver):
            for frame in frames:
                await sender.write(frame)
            return [await receiver.read() for _ in frames]

    got = asyncio.run(pass_on())
    assert [(f.code, f.tag, f.parcel.header, bytes(f.parcel.payload)) for f in got] == [
        (f.code, f.tag, f.parcel.header, f.parcel.payload) for f in frames
    ]


def test_a_peer_that_asks_too_often_is_refused_and_the_others_are_not(stage: Stage) -> None:
    async def scene(swarm: Swarm) -> None:
        victim = await swarm.newcomer(await swarm.joining(limits=Limits(requests=5)))
        victim.serve("echo", echo)
        hasty, calm = [await swarm.newcomer() for _ in range(2)]
        asked = [hasty.call(victim.me, "echo", Parcel(b"x"), deadline=soon(hasty)) for _ in range(40)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refusals = [answer for answer in answers if isinstance(answer, PeerGone)]
        assert any("too many requests" in str(refusal) for refusal in refusals)
        assert len(answers) - len(refusals) >= 10  # as much as anybody may ask at once
        assert victim.refused["too many requests"] >= 1
        assert (await calm.call(victim.me, "echo", Parcel(b"y"), deadline=soon(calm))).header == b"y"

    stage.play(scene)
