"""What every `Net` promises. A transport's test class inherits `NetContract` and says how a scene is played on it.

A scene is an async function of a `World`: peers on one network, some of whom may be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import pytest
import torch

from marfl.errors import BrokenPromise, DeadlineExceeded, NetError, PeerGone, WireError
from marfl.net.base import NOT_ENTITLED, Net, Parcel, PeerId, Tag, Traffic, Verdict
from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import EXCHANGES, Settings
from marfl.protocol.roster import PIECE, Roster
from marfl.protocol.speaker import DHT_FAILED
from marfl.state import Snapshot

T = TypeVar("T")
MB = 10**6
LAYOUT = hashlib.sha256(b"contract").digest()
LENGTH = 1001  # not a multiple of anything
fresh = itertools.count(1)  # no two tests share an iteration, a channel or a key: a world may be used for all of them


class World(Protocol):
    """Peers that share one network."""

    async def peers(self, count: int) -> list[Net]:
        """So many peers that live to the end."""

    async def newcomer(self) -> Net:
        """A peer that may be killed."""

    async def kill(self, peer: Net) -> None:
        """End a peer's process."""

    async def silence_dht(self, peer: Net) -> None:
        """From now on the DHT does nothing for this peer."""

    async def mend_dht(self, peer: Net) -> None:
        """And now it does again, soon."""


class VirtualWorld:
    """Peers on a virtual network."""

    def __init__(self) -> None:
        self.network = VirtualNetwork()
        self.known: list[Net] = []

    async def peers(self, count: int) -> list[Net]:
        while len(self.known) < count:
            self.known.append(self.network.join(f"peer{len(self.known)}"))
        return self.known[:count]

    async def newcomer(self) -> Net:
        return self.network.join(f"newcomer{next(fresh)}")

    async def kill(self, peer: Net) -> None:
        self.network.crash(peer.me)

    async def silence_dht(self, peer: Net) -> None:
        self.network.silence_dht(peer.me, 3600)

    async def mend_dht(self, peer: Net) -> None:
        self.network.silence_dht(peer.me, 0)


def play_virtually(scene: Callable[[World], Awaitable[T]]) -> T:
    async def whole() -> T:
        return await scene(VirtualWorld())

    return run_virtual(whole())


def soon(net: Net) -> float:
    """A deadline that is only met when something is wrong."""
    return net.now() + 30.0


def at_once(net: Net) -> float:
    """A deadline for what never happens."""
    return net.now() + 0.05


def refused_of(net: Net, peer: PeerId) -> Counter[str]:
    """What this peer was refused, by reason: it is counted by its name."""
    return Counter(net.refused.senders.get(peer))


def new_tag(channel: str = "reduce") -> Tag:
    return Tag(channel, next(fresh))


def new_name(name: str) -> str:
    return f"{name}{next(fresh)}"


def pattern(size: int) -> bytes:
    """Bytes in which any shift or gap shows."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def content(parcel: Parcel) -> tuple[bytes, bytes]:
    return parcel.header, bytes(parcel.payload)


class Meter:
    """What went over a net since this was made."""

    def __init__(self, net: Net) -> None:
        self.net, self._sent, self._received = net, net.sent.copy(), net.received.copy()

    @property
    def sent(self) -> Traffic:
        return self.net.sent.minus(self._sent)

    @property
    def received(self) -> Traffic:
        return self.net.received.minus(self._received)


class NetContract(ABC):
    """The promises, one test each."""

    record_front = 0  # bytes that this transport puts in front of every record
    crowd = 8  # how many speak the protocol

    @abstractmethod
    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        """Play a scene to its end on this transport."""

    # --- keys ---

    def test_whoever_knows_a_peer_can_tell_what_it_signed(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            one, other = hashlib.sha256(b"one").digest(), hashlib.sha256(b"other").digest()
            signature = a.sign(one)
            assert len(signature) == 64
            assert b.verify(a.me, one, signature)
            assert not b.verify(a.me, other, signature)
            assert not b.verify(b.me, one, signature)
            assert not b.verify(a.me, one, signature[:-1])

        self.play(scene)

    # --- messages ---

    @pytest.mark.parametrize("size", [0, 1, 3 * MB])
    def test_a_message_arrives_whole(self, size: int):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag, sent = new_tag(), Parcel(b"header", memoryview(pattern(size)))
            await a.send(b.me, tag, sent, deadline=soon(a))
            assert content(await b.recv(a.me, tag, deadline=soon(b))) == content(sent)

        self.play(scene)

    def test_a_payload_of_other_items_than_bytes_arrives_as_its_bytes(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag, numbers = new_tag(), torch.arange(100_000, dtype=torch.float32)
            await a.send(b.me, tag, Parcel(b"h", memoryview(numbers.numpy()).cast("B")), deadline=soon(a))
            got = await b.recv(a.me, tag, deadline=soon(b))
            assert bytes(got.payload) == numbers.numpy().tobytes()

        self.play(scene)

    def test_a_message_may_be_awaited_before_it_is_sent(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag = new_tag()
            waiting = asyncio.create_task(b.recv(a.me, tag, deadline=soon(b)))
            await asyncio.sleep(0)
            await a.send(b.me, tag, Parcel(b"late"), deadline=soon(a))
            assert content(await waiting) == (b"late", b"")

        self.play(scene)

    def test_messages_are_told_apart_by_sender_and_every_field_of_the_tag_whatever_their_order(self):
        async def scene(world: World) -> None:
            a, b, c = await world.peers(3)
            base = new_tag()
            tags = [base, *(base._replace(**{field: 7}) for field in ("attempt", "round", "part", "piece"))]
            tags += [base._replace(channel="gather"), new_tag()]
            sends = [(net, tag) for tag in tags for net in (a, c)]
            for net, tag in sends:
                await net.send(b.me, tag, Parcel(repr((net.me, tag)).encode()), deadline=soon(net))
            for net, tag in reversed(sends):
                got = await b.recv(net.me, tag, deadline=soon(b))
                assert got.header == repr((net.me, tag)).encode()

        self.play(scene)

    def test_of_two_messages_with_one_name_the_first_counts(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag = new_tag()
            await a.send(b.me, tag, Parcel(b"first"), deadline=soon(a))
            await a.send(b.me, tag, Parcel(b"second"), deadline=soon(a))
            assert (await b.recv(a.me, tag, deadline=soon(b))).header == b"first"
            await a.send(b.me, tag, Parcel(b"third"), deadline=soon(a))
            with pytest.raises(BrokenPromise):
                await b.recv(a.me, tag, deadline=at_once(b))

        self.play(scene)

    def test_a_message_is_awaited_by_one_task_only(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag = new_tag()
            waiting = asyncio.create_task(b.recv(a.me, tag, deadline=soon(b)))
            await asyncio.sleep(0)
            with pytest.raises(BrokenPromise):
                await b.recv(a.me, tag, deadline=soon(b))
            await a.send(b.me, tag, Parcel(b"mine"), deadline=soon(a))
            assert (await waiting).header == b"mine"

        self.play(scene)

    def test_recv_gives_up_at_its_deadline_and_may_ask_again(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag = new_tag()
            deadline = at_once(b)
            with pytest.raises(DeadlineExceeded):
                await b.recv(a.me, tag, deadline=deadline)
            assert b.now() >= deadline
            await a.send(b.me, tag, Parcel(b"at last"), deadline=soon(a))
            assert (await b.recv(a.me, tag, deadline=soon(b))).header == b"at last"

        self.play(scene)

    def test_a_recv_that_was_cancelled_leaves_the_message_to_the_next_one(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag = new_tag()
            given_up = asyncio.create_task(b.recv(a.me, tag, deadline=soon(b)))
            await b.sleep_until(b.now())
            given_up.cancel()
            await asyncio.wait([given_up])
            again = asyncio.create_task(b.recv(a.me, tag, deadline=soon(b)))
            await a.send(b.me, tag, Parcel(b"after all"), deadline=soon(a))
            assert (await again).header == b"after all"

        self.play(scene)

    def test_a_message_that_is_there_is_received_even_after_the_deadline(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag = new_tag()
            await a.send(b.me, tag, Parcel(b"here"), deadline=soon(a))
            await b.sleep_until(at_once(b))
            assert (await b.recv(a.me, tag, deadline=b.now() - 1)).header == b"here"

        self.play(scene)

    def test_a_judge_lets_messages_in_drops_or_refuses_them_and_without_one_all_are_taken(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            rule = {0: Verdict.TAKE, 1: Verdict.DROP, 2: Verdict.REFUSE}
            tag, before, into = new_tag(), refused_of(b, a.me)[NOT_ENTITLED], Meter(b)
            b.admit(lambda source, tag: rule[tag.round] if source == a.me else Verdict.REFUSE)
            try:
                for number in rule:
                    with contextlib.suppress(PeerGone):  # a refusal may be told, or not
                        await a.send(b.me, tag._replace(round=number), Parcel(b"h", b"abc"), deadline=soon(a))
                assert content(await b.recv(a.me, tag, deadline=soon(b))) == (b"h", b"abc")
                for number in (1, 2):
                    with pytest.raises(DeadlineExceeded):
                        await b.recv(a.me, tag._replace(round=number), deadline=at_once(b))
                assert refused_of(b, a.me)[NOT_ENTITLED] == before + 1
                assert into.received == Traffic(payload=6, control=2, messages=2)  # what is dropped has come as well
            finally:
                b.admit(None)
            await a.send(b.me, tag._replace(round=2), Parcel(b"h"), deadline=soon(a))
            assert content(await b.recv(a.me, tag._replace(round=2), deadline=soon(b))) == (b"h", b"")

        self.play(scene)

    def test_a_message_that_nobody_can_judge_yet_waits_until_somebody_can(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag, before, into = new_tag(), b.refused[NOT_ENTITLED], Meter(b)
            b.admit(lambda _, __: Verdict.LATER)
            try:
                sending = asyncio.create_task(a.send(b.me, tag, Parcel(b"h", pattern(3 * MB)), deadline=soon(a)))
                with pytest.raises(DeadlineExceeded):
                    await b.recv(a.me, tag, deadline=at_once(b))
                b.admit(lambda _, __: Verdict.LATER)  # still not
                with pytest.raises(DeadlineExceeded):
                    await b.recv(a.me, tag, deadline=at_once(b))
                assert into.received == Traffic()
                b.admit(lambda _, __: Verdict.TAKE)
                assert content(await b.recv(a.me, tag, deadline=soon(b))) == (b"h", pattern(3 * MB))
                await sending
                assert b.refused[NOT_ENTITLED] == before
            finally:
                b.admit(None)

        self.play(scene)

    def test_forgotten_messages_are_gone_and_later_ones_are_kept(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            old, now, later = new_tag(), new_tag(), new_tag()
            for tag in (old, now, later):
                await a.send(b.me, tag, Parcel(b"x"), deadline=soon(a))
            await b.sleep_until(at_once(b))  # a message is on its way for a moment, also when `send` has returned
            b.forget(now.iteration)
            for tag in (old, now):
                with pytest.raises(DeadlineExceeded):
                    await b.recv(a.me, tag, deadline=at_once(b))
            assert (await b.recv(a.me, later, deadline=soon(b))).header == b"x"

        self.play(scene)

    def test_a_peer_can_talk_to_itself(self):
        async def scene(world: World) -> None:
            (a,) = await world.peers(1)
            tag, channel = new_tag(), new_name("echo")
            a.serve(channel, echo)
            await a.send(a.me, tag, Parcel(b"note"), deadline=soon(a))
            assert (await a.recv(a.me, tag, deadline=soon(a))).header == b"note"
            assert (await a.call(a.me, channel, Parcel(b"hm"), deadline=soon(a))).header == b"hm"

        self.play(scene)

    # --- the dead ---

    def test_a_dead_peer_is_gone_for_messages_and_for_calls(self):
        async def scene(world: World) -> None:
            (a,) = await world.peers(1)
            doomed = await world.newcomer()
            channel = new_name("echo")
            doomed.serve(channel, echo)
            await a.call(doomed.me, channel, Parcel(b"alive?"), deadline=soon(a))
            await world.kill(doomed)
            before = Meter(a)
            for _ in range(2):
                with pytest.raises(PeerGone):
                    await a.send(doomed.me, new_tag(), Parcel(b"h", pattern(MB)), deadline=soon(a))
                with pytest.raises(PeerGone):
                    await a.call(doomed.me, channel, Parcel(b"h"), deadline=soon(a))
            assert before.sent.payload == 0

        self.play(scene)

    def test_a_peer_that_nobody_has_heard_of_is_gone(self):
        async def scene(world: World) -> None:
            (a,) = await world.peers(1)
            for stranger in ("nobody", "12D3KooWKn619HTsgg3NiDWZXwpnfp5TCpKLk3Z3boU3qUGKfuLU"):
                with pytest.raises(PeerGone):
                    await a.send(stranger, new_tag(), Parcel(b"h"), deadline=soon(a))

        self.play(scene)

    def test_a_peer_that_dies_before_it_answers_is_gone(self):
        async def scene(world: World) -> None:
            (a,) = await world.peers(1)
            doomed = await world.newcomer()
            asked = asyncio.Event()

            async def never(_: PeerId, __: Parcel) -> Parcel:
                asked.set()
                await doomed.sleep_until(soon(doomed) + 1000)
                return Parcel(b"too late")

            channel = new_name("never")
            doomed.serve(channel, never)
            call = asyncio.create_task(a.call(doomed.me, channel, Parcel(b"?"), deadline=soon(a)))
            await asked.wait()
            await world.kill(doomed)
            with pytest.raises(PeerGone):
                await call

        self.play(scene)

    # --- calls ---

    @pytest.mark.parametrize("size", [0, 3 * MB, 20 * MB])
    def test_questions_and_answers_may_be_of_any_size(self, size: int):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            channel = new_name("reverse")

            async def reverse(_: PeerId, question: Parcel) -> Parcel:
                return Parcel(question.header + b"!", bytes(question.payload)[::-1])

            b.serve(channel, reverse)
            answer = await a.call(b.me, channel, Parcel(b"q", pattern(size)), deadline=soon(a))
            assert content(answer) == (b"q!", pattern(size)[::-1])

        self.play(scene)

    def test_whoever_answers_knows_who_asks(self):
        async def scene(world: World) -> None:
            a, b, c = await world.peers(3)
            channel = new_name("who")

            async def who(sender: PeerId, _: Parcel) -> Parcel:
                return Parcel(sender.encode())

            b.serve(channel, who)
            for net in (a, c):
                assert (await net.call(b.me, channel, Parcel(b""), deadline=soon(net))).header == net.me.encode()

        self.play(scene)

    def test_the_last_handler_of_a_channel_answers(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            channel = new_name("swap")

            async def old(_: PeerId, __: Parcel) -> Parcel:
                return Parcel(b"old")

            b.serve(channel, old)
            b.serve(channel, echo)
            assert (await a.call(b.me, channel, Parcel(b"new"), deadline=soon(a))).header == b"new"

        self.play(scene)

    def test_concurrent_calls_get_their_own_answers_in_any_order(self):
        async def scene(world: World) -> None:
            a, b, c = await world.peers(3)
            channel = new_name("slow")
            numbers = [bytes([n]) * 1000 for n in range(100)]
            everybody_asked = asyncio.Event()
            asked: list[bytes] = []

            async def slow(_: PeerId, question: Parcel) -> Parcel:
                asked.append(question.header)
                if len(asked) >= 24:  # so many are answered at the same time, the first ones last
                    everybody_asked.set()
                await everybody_asked.wait()
                return Parcel(question.header, question.header)

            b.serve(channel, slow)
            calls = [
                net.call(b.me, channel, Parcel(number), deadline=soon(net)) for net in (a, c) for number in numbers
            ]
            answers = await asyncio.gather(*calls)
            assert [content(answer) for answer in answers] == [(n, n) for n in numbers * 2]

        self.play(scene)

    def test_a_call_on_an_unknown_channel_is_refused(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            with pytest.raises(PeerGone):
                await a.call(b.me, new_name("unheard"), Parcel(b"?"), deadline=soon(a))

        self.play(scene)

    def test_a_handler_that_cannot_read_the_question_refuses_it_counts_it_and_goes_on(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            channel = new_name("strict")

            async def strict(_: PeerId, question: Parcel) -> Parcel:
                if question.header != b"please":
                    raise WireError("not like that")
                return Parcel(b"yes")

            b.serve(channel, strict)
            before = refused_of(b, a.me)["bad question"]
            with pytest.raises(PeerGone):
                await a.call(b.me, channel, Parcel(b"now!"), deadline=soon(a))
            assert refused_of(b, a.me)["bad question"] == before + 1
            assert (await a.call(b.me, channel, Parcel(b"please"), deadline=soon(a))).header == b"yes"

        self.play(scene)

    def test_a_call_gives_up_at_its_deadline_and_the_next_one_is_answered(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            channel, gate = new_name("gate"), asyncio.Event()

            async def gated(_: PeerId, question: Parcel) -> Parcel:
                await gate.wait()
                return question

            b.serve(channel, gated)
            deadline = at_once(a)
            with pytest.raises(DeadlineExceeded):
                await a.call(b.me, channel, Parcel(b"?"), deadline=deadline)
            assert a.now() >= deadline
            gate.set()
            assert (await a.call(b.me, channel, Parcel(b"again"), deadline=soon(a))).header == b"again"

        self.play(scene)

    # --- records ---

    def test_everybody_finds_what_everybody_announced(self):
        async def scene(world: World) -> None:
            nets = await world.peers(3)
            key = new_name("ready/")
            for net in nets:
                await net.announce(key, net.me.encode(), ttl=60)
            for net in nets:
                assert dict(await net.lookup(key)) == {other.me: other.me.encode() for other in nets}

        self.play(scene)

    def test_a_key_under_which_nothing_lies_is_empty(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            await a.announce(new_name("some/"), b"thing", ttl=60)
            assert dict(await b.lookup(new_name("other/"))) == {}

        self.play(scene)

    def test_a_later_record_replaces_an_earlier_one_even_if_it_expires_before_it(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            key = new_name("head/")
            for value, ttl in [(b"one", 600.0), (b"two", 600.0), (b"three", 30.0)]:
                await a.announce(key, value, ttl=ttl)
                for net in (a, b):
                    assert dict(await net.lookup(key)) == {a.me: value}

        self.play(scene)

    def test_a_record_is_gone_after_its_time_and_the_others_stay(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            key = new_name("head/")
            await b.announce(key, b"stays", ttl=60)
            await a.announce(key, b"long", ttl=60)
            await a.announce(key, b"short", ttl=0.2)
            await b.sleep_until(b.now() + 0.25)
            for net in (a, b):
                assert dict(await net.lookup(key)) == {b.me: b"stays"}
            await a.announce(key, b"back", ttl=60)
            assert dict(await b.lookup(key)) == {a.me: b"back", b.me: b"stays"}

        self.play(scene)

    def test_a_dead_peers_record_outlives_it(self):
        async def scene(world: World) -> None:
            nets = await world.peers(3)
            doomed = await world.newcomer()
            key = new_name("head/")
            await doomed.announce(key, b"testament", ttl=60)
            await world.kill(doomed)
            for net in nets:
                assert dict(await net.lookup(key)) == {doomed.me: b"testament"}

        self.play(scene)

    # --- ledgers ---

    def test_a_message_weighs_the_same_on_both_sides(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag = new_tag()
            out, into = Meter(a), Meter(b)
            await a.send(b.me, tag, Parcel(b"h" * 10, pattern(MB)), deadline=soon(a))
            await b.recv(a.me, tag, deadline=soon(b))
            assert out.sent == into.received == Traffic(payload=MB, control=10, messages=1)
            assert out.received == into.sent == Traffic()

        self.play(scene)

    @pytest.mark.parametrize("kind", ["repair", "sync", "distill"])
    def test_a_sent_payload_is_counted_as_what_it_was_for(self, kind: str):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag, out = new_tag(), Meter(a)
            await a.send(b.me, tag, Parcel(b"h", b"abc"), kind=kind, deadline=soon(a))
            assert out.sent == Traffic(control=1, messages=1, **{kind: 3})

        self.play(scene)

    def test_an_answer_is_counted_on_both_sides_as_what_its_channel_is_for(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            channel = new_name("state")

            async def state(_: PeerId, __: Parcel) -> Parcel:
                return Parcel(b"here", pattern(5000))

            b.serve(channel, state, kind="sync")
            out, into = Meter(a), Meter(b)
            await a.call(b.me, channel, Parcel(b"please"), deadline=soon(a))
            assert out.sent == into.received == Traffic(control=6, messages=1)
            assert into.sent == out.received == Traffic(control=4, sync=5000, messages=1)

        self.play(scene)

    def test_a_refused_call_costs_the_same_everywhere(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            out, into = Meter(a), Meter(b)
            with pytest.raises(PeerGone):
                await a.call(b.me, new_name("unheard"), Parcel(b"hello"), deadline=soon(a))
            assert out.sent == into.received == Traffic(control=5, messages=1)
            assert into.sent == out.received == Traffic(control=8, messages=1)

        self.play(scene)

    def test_a_duplicate_is_received_and_counted_once(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            tag, out, into = new_tag(), Meter(a), Meter(b)
            for _ in range(2):
                await a.send(b.me, tag, Parcel(b"h", b"abc"), deadline=soon(a))
            await b.recv(a.me, tag, deadline=soon(b))
            await b.sleep_until(at_once(b))
            assert out.sent == Traffic(payload=6, control=2, messages=2)
            assert into.received == Traffic(payload=3, control=1, messages=1)

        self.play(scene)

    def test_records_are_control_bytes_and_dht_operations(self):
        async def scene(world: World) -> None:
            a, b = await world.peers(2)
            key, out, into = new_name("ready/"), Meter(a), Meter(b)
            await a.announce(key, b"12345", ttl=60)
            await b.lookup(key)
            assert out.sent == Traffic(control=len(key) + self.record_front + 5, dht=1)
            assert into.sent == Traffic(dht=1)
            assert into.received == Traffic(control=len(key) + self.record_front + 5)
            assert out.received == Traffic()

        self.play(scene)

    def test_a_dht_that_fails_is_said_and_nothing_is_pretended(self):
        async def scene(world: World) -> None:
            (a,) = await world.peers(1)
            net = await world.newcomer()
            key = new_name("ready/")
            await net.announce(key, b"before", ttl=60)
            await world.silence_dht(net)
            with pytest.raises(NetError):
                await net.announce(key, b"unheard", ttl=60)
            with pytest.raises(NetError):
                await net.lookup(key)
            assert dict(await a.lookup(key)) == {net.me: b"before"}
            await world.mend_dht(net)
            await until_heard(net, key, b"after")
            assert dict(await a.lookup(key)) == {net.me: b"after"}

        self.play(scene)

    def test_a_peer_says_again_what_the_dht_did_not_hear_and_counts_it(self):
        async def scene(world: World) -> None:
            (a,) = await world.peers(1)
            net = await world.newcomer()
            me = new_participant(net)
            said: list[str] = []
            me.talk.dht.say = said.append
            key = me.talk.key("head")
            await world.silence_dht(net)
            await me.standing.announce_head()
            assert dict(await me.talk.look_up("head")) == {}
            assert net.refused[DHT_FAILED] == 2
            assert len(said) == 1
            await world.mend_dht(net)
            limit = soon(a)
            while not await a.lookup(key) and a.now() < limit:
                await a.sleep_until(a.now() + 0.05)
            await me.talk.rest()
            assert list(await a.lookup(key)) == [net.me]

        self.play(scene)

    # --- the protocol itself ---

    @pytest.mark.parametrize("piece", [PIECE, 400])
    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_participants_agree_on_the_hash_and_the_bytes_of_the_virtual_network(self, exchange: str, piece: int):
        async def scene(world: World) -> tuple[set[bytes | None], list[int]]:
            return await two_iterations(await world.peers(self.crowd), exchange, piece)

        hashes, payload = self.play(scene)
        assert len(hashes) == 1
        assert (hashes, payload) == play_virtually(scene)
        if exchange == "grid":
            assert sum(payload) == 2 * 2 * (self.crowd - 1) * 4 * LENGTH  # 2(n-1) vectors in each of two iterations


async def echo(_: PeerId, question: Parcel) -> Parcel:
    return question


async def until_heard(net: Net, key: str, value: bytes) -> None:
    """Announce, as often as it takes."""
    while True:
        try:
            return await net.announce(key, value, ttl=60)
        except NetError:
            await net.sleep_until(net.now() + 0.05)


def new_participant(net: Net) -> Participant:
    """Of a run of its own."""
    start = Snapshot(0, {"theta": torch.zeros(LENGTH)}, {})
    settings = Settings(run=new_name("contract"), takeover=0.1)
    return Participant(net, settings, 0, LAYOUT, start, genesis(start), _advance)


async def two_iterations(nets: list[Net], exchange: str, piece: int) -> tuple[set[bytes | None], list[int]]:
    """The hashes on which the peers end (one, if they agree), and the payload that each of them has sent."""
    run = f"contract {exchange} {piece}"
    start = Snapshot(0, {"theta": torch.zeros(LENGTH)}, {})
    record = genesis(start, tuple((net.me, index) for index, net in enumerate(nets)))
    settings = Settings(run=run, group_size=3, exchange=exchange, piece=piece)
    people = [Participant(net, settings, i, LAYOUT, start, record, _advance) for i, net in enumerate(nets)]
    try:
        return await _iterate_twice(people)
    finally:
        for net in nets:
            net.admit(None)  # they are used on, without a participant


async def _iterate_twice(people: list[Participant]) -> tuple[set[bytes | None], list[int]]:
    nets = [me.net for me in people]
    before = [Meter(net) for net in nets]
    for iteration in (1, 2):
        outcomes = await asyncio.gather(*(me.run_iteration(new_contribution(me, iteration)) for me in people))
        assert {(o.status, o.attempt, len(o.present), bool(o.missing)) for o in outcomes} == {
            ("committed", 0, len(people), False)
        }
    return {outcome.hash for outcome in outcomes}, [traffic.sent.payload for traffic in before]


def new_contribution(me: Participant, iteration: int) -> Contribution:
    generator = torch.Generator().manual_seed(97 * iteration + me.index)
    return Contribution(me.state.hash, torch.randn(LENGTH, generator=generator), 1.0 + me.index)


def _advance(state: Snapshot, mean: torch.Tensor, roster: Roster) -> Snapshot:
    return Snapshot(state.version + 1, {"theta": state.vectors["theta"] + mean}, {})
