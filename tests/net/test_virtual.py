"""The virtual network keeps the contract, in virtual time: links are slow, processes hang, clocks differ, at will."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from marfl.errors import BrokenPromise, DeadlineExceeded, NetError, PeerGone
from marfl.net.base import MOST_NAMED, Parcel, Refusals, Tag
from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from stages.net_contract import NetContract, World, echo, play_virtually

T = TypeVar("T")
TAG = Tag("reduce", 1)


class TestVirtualNet(NetContract):
    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        return play_virtually(scene)


def test_refusals_are_counted_by_name_and_names_that_cost_nothing_do_not_fill_the_memory():
    refused = Refusals()
    for name in ("a", "b", "a"):
        refused.note("garbage", name)
    for number in range(2 * MOST_NAMED):
        refused.note("bad token", f"stranger{number}")
    refused.note("oversized", "a")
    assert refused.named()["a"] == {"garbage": 2, "oversized": 1}
    assert refused.named()["b"] == {"garbage": 1}
    assert len(refused.named()) == MOST_NAMED
    assert refused == {"garbage": 3, "bad token": 2 * MOST_NAMED, "oversized": 1}


def test_strangers_without_a_token_leave_room_for_the_names_of_members_that_lie():
    refused = Refusals(admits=lambda name: name == "member")
    for number in range(2 * MOST_NAMED):
        refused.note("bad token", f"stranger{number}")
    refused.note("groundless request", "member")
    assert refused.named()["member"] == {"groundless request": 1}
    assert len(refused.named()) == MOST_NAMED // 2 + 1


def test_the_name_of_who_takes_part_pushes_out_a_stranger_s_where_anybody_is_admitted():
    refused = Refusals()
    refused.known = lambda name: name.startswith("elector")
    for number in range(2 * MOST_NAMED):
        refused.note("unproven record", f"stranger{number}")
    for name in ("elector1", "elector2", "elector1"):
        refused.note("groundless request", name)
    for number in range(2 * MOST_NAMED):
        refused.note("unproven record", f"another{number}")
    assert refused.named()["elector1"] == {"groundless request": 2}
    assert refused.named()["elector2"] == {"groundless request": 1}
    assert len(refused.named()) == MOST_NAMED


def test_a_message_takes_as_long_as_its_links_need():
    async def scene() -> None:
        network = VirtualNetwork(link=Link(up=1000.0, down=1000.0, latency=0.5))
        a, b = network.join("a"), network.join("b")
        await a.send("b", TAG, Parcel(b"", bytes(2000)), deadline=60)
        assert a.now() == pytest.approx(2.0)  # it has left
        await b.recv("a", TAG, deadline=60)
        assert b.now() == pytest.approx(3.0)

    run_virtual(scene())


def test_a_link_takes_one_message_after_the_other():
    async def scene() -> None:
        network = VirtualNetwork(link=Link(up=1000.0))
        nets = [network.join(name) for name in "abc"]
        await asyncio.gather(*(nets[0].send(to, TAG, Parcel(b"", bytes(1000)), deadline=60) for to in "bc"))
        assert nets[0].now() == pytest.approx(2.0)

    run_virtual(scene())


def test_a_sender_on_a_slow_link_gives_up_at_its_deadline():
    async def scene() -> None:
        network = VirtualNetwork(link=Link(up=10.0))
        a, _ = network.join("a"), network.join("b")
        with pytest.raises(DeadlineExceeded):
            await a.send("b", TAG, Parcel(b"", bytes(1000)), deadline=5)
        assert a.now() == pytest.approx(5.0)

    run_virtual(scene())


def test_the_other_side_of_a_partition_is_given_up_at_the_deadline_and_back_when_it_heals():
    async def scene() -> None:
        network = VirtualNetwork()
        a, b = network.join("a"), network.join("b")
        b.serve("echo", echo)
        await b.announce("key", b"value", ttl=1000)
        network.partition({"b": 1})
        with pytest.raises(PeerGone):
            await a.call("b", "echo", Parcel(b"?"), deadline=7)
        assert a.now() == pytest.approx(7.0)
        assert dict(await a.lookup("key")) == {}
        network.heal()
        assert (await a.call("b", "echo", Parcel(b"?"), deadline=60)).header == b"?"
        assert dict(await a.lookup("key")) == {"b": b"value"}

    run_virtual(scene())


def test_a_hung_peer_does_nothing_and_then_goes_on():
    async def scene() -> None:
        network = VirtualNetwork()
        a, b = network.join("a"), network.join("b")
        b.serve("echo", echo)
        network.hang("b", 10.0)
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", Parcel(b"?"), deadline=4)
        await a.call("b", "echo", Parcel(b"?"), deadline=60)
        assert a.now() == pytest.approx(10.0)

    run_virtual(scene())


def test_a_crashed_peers_tasks_end_and_it_comes_back_with_an_empty_inbox():
    async def scene() -> None:
        network = VirtualNetwork()
        a, b = network.join("a"), network.join("b")
        await a.send("b", TAG, Parcel(b"old"), deadline=60)
        task = network.spawn("b", b.sleep_until(1000))
        network.crash("b")
        await asyncio.wait([task])
        assert task.cancelled()
        again = network.join("b")
        with pytest.raises(DeadlineExceeded):
            await again.recv("a", TAG, deadline=1)

    run_virtual(scene())


def test_peers_have_their_own_clocks():
    async def scene() -> None:
        network = VirtualNetwork()
        a, b = network.join("a"), network.join("b")
        network.skew("b", rate=2.0, offset=100.0)
        await b.sleep_until(b.now() + 10)
        assert a.now() == pytest.approx(5.0, abs=1e-3)
        assert b.now() == pytest.approx(110.0, abs=1e-3)

    run_virtual(scene())


def test_when_everybody_waits_for_ever_it_is_a_deadlock():
    async def scene() -> None:
        await asyncio.Event().wait()

    with pytest.raises(BrokenPromise, match="deadlock"):
        run_virtual(scene())


def test_one_seed_gives_one_history():
    def history(seed: int) -> list[Departure]:
        async def scene() -> list[Departure]:
            network = VirtualNetwork(seed, Link(latency=0.1, jitter=0.1, loss=0.2))
            nets = [network.join(name) for name in "abc"]
            for net in nets:
                net.serve("echo", echo)
            for to in "bcbc":
                await nets[0].call(to, "echo", Parcel(b"?"), deadline=1000)
            assert network.events is not None
            return network.events

        return run_virtual(scene())

    assert history(1) == history(1)
    assert history(1) != history(2)


def test_a_fault_injector_may_change_double_delay_and_drop_messages():
    async def scene() -> None:
        network = VirtualNetwork()
        a, b = network.join("a"), network.join("b")

        def tamper(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.op == "send":
                delivery.parcel = Parcel(b"changed")
                delivery.copies = {1: 2, 2: 0}[event.tag.iteration]
                delivery.delay = 3.0

        network.intercept = tamper
        for iteration in (1, 2):
            await a.send("b", Tag("x", iteration), Parcel(b"as sent"), deadline=60)
        assert (await b.recv("a", Tag("x", 1), deadline=60)).header == b"changed"
        assert b.now() == pytest.approx(3.0)
        with pytest.raises(DeadlineExceeded):
            await b.recv("a", Tag("x", 2), deadline=60)

    run_virtual(scene())


def test_a_cut_goes_one_way_and_ends():
    async def scene() -> None:
        network = VirtualNetwork()
        a, b = network.join("a"), network.join("b")
        for net in (a, b):
            net.serve("echo", echo)
        await b.announce("key", b"value", ttl=1000)
        network.cut([("a", "b")], 20.0)
        with pytest.raises(PeerGone):  # what it asks does not get there
            await a.call("b", "echo", Parcel(b"?"), deadline=3)
        with pytest.raises(DeadlineExceeded):  # what it is asked does; its answer does not
            await b.call("a", "echo", Parcel(b"?"), deadline=6)
        assert a.received.messages == 1
        with pytest.raises(PeerGone):
            await a.send("b", TAG, Parcel(b"lost"), deadline=9)
        await b.send("a", TAG, Parcel(b"heard"), deadline=9)
        assert (await a.recv("b", TAG, deadline=9)).header == b"heard"
        assert dict(await a.lookup("key")) == {"b": b"value"}  # records go by way of others
        await a.sleep_until(20)
        assert (await a.call("b", "echo", Parcel(b"?"), deadline=60)).header == b"?"

    run_virtual(scene())


def test_what_was_on_its_way_when_a_link_was_cut_does_not_arrive():
    async def scene() -> None:
        network = VirtualNetwork(link=Link(latency=1.0))
        a, b = network.join("a"), network.join("b")
        await a.send("b", TAG, Parcel(b"under way"), deadline=60)
        network.cut([("a", "b")], 5.0)
        with pytest.raises(DeadlineExceeded):
            await b.recv("a", TAG, deadline=60)

    run_virtual(scene())


def test_a_peer_without_its_daemon_hears_and_says_nothing_and_keeps_what_it_has():
    async def scene() -> None:
        network = VirtualNetwork(link=Link(latency=0.5))
        a, b = network.join("a"), network.join("b")
        for net in (a, b):
            net.serve("echo", echo)
        await b.send("a", TAG, Parcel(b"before"), deadline=60)
        await a.sleep_until(2)
        asks = asyncio.create_task(a.call("b", "echo", Parcel(b"?"), deadline=60))
        asked = asyncio.create_task(b.call("a", "echo", Parcel(b"?"), deadline=60))
        await asyncio.sleep(0.1)
        network.sever("a", 10.0)
        for task, why in ((asks, NetError), (asked, PeerGone)):
            with pytest.raises(why):
                await task
        for act in (
            a.call("b", "echo", Parcel(b"?"), deadline=60), a.send("b", TAG, Parcel(b""), deadline=60),
            a.announce("key", b"value", ttl=60), a.lookup("key"),
        ):  # fmt: skip
            with pytest.raises(NetError, match="daemon is gone"):
                await act
        with pytest.raises(PeerGone):
            await b.call("a", "echo", Parcel(b"?"), deadline=60)
        assert b.now() < 5  # refused at once
        assert (await a.recv("b", TAG, deadline=60)).header == b"before"
        await a.sleep_until(13)
        assert (await b.call("a", "echo", Parcel(b"?"), deadline=60)).header == b"?"

    run_virtual(scene())


def test_a_blurred_dht_shows_old_records_or_not_everybodys_and_takes_none():
    async def scene() -> None:
        network = VirtualNetwork()
        a, b, c = (network.join(name) for name in "abc")
        await b.announce("key", b"first", ttl=1000)
        await c.announce("key", b"only", ttl=1000)
        await a.sleep_until(10)
        await b.announce("key", b"second", ttl=1000)
        network.blur_dht("a", 50.0, lag=5.0, hidden="c", refuses=True)
        assert dict(await a.lookup("key")) == {"b": b"first"}
        assert dict(await b.lookup("key")) == {"b": b"second", "c": b"only"}
        with pytest.raises(NetError, match="no node"):
            await a.announce("key", b"mine", ttl=1000)
        await a.sleep_until(20)
        assert dict(await a.lookup("key")) == {"b": b"second"}
        network.blur_dht("a", 50.0, lag=15.0)
        assert dict(await a.lookup("key")) == {"b": b"first", "c": b"only"}
        await a.sleep_until(80)
        await a.announce("key", b"mine", ttl=1000)
        assert dict(await a.lookup("key")) == {"a": b"mine", "b": b"second", "c": b"only"}

    run_virtual(scene())


def test_a_doubled_question_is_asked_again_later():
    async def scene() -> None:
        network = VirtualNetwork()
        a, b = network.join("a"), network.join("b")
        heard: list[float] = []

        async def note(_: str, parcel: Parcel) -> Parcel:
            heard.append(b.now())
            return parcel

        def double(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.op == "call":
                delivery.copies, delivery.later = 2, 7.0

        b.serve("note", note)
        network.intercept = double
        await a.call("b", "note", Parcel(b"?"), deadline=60)
        await a.sleep_until(30)
        assert heard == pytest.approx([0.0, 7.0])

    run_virtual(scene())
