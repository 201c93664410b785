"""What an iteration took is free when it ends: by reference counting alone, the garbage collector never runs here."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import pytest
import torch

from marfl.errors import DeadlineExceeded, SyncError
from marfl.net.base import Net, Tag
from marfl.net.libp2p.connection import Limits
from marfl.net.libp2p.inbox import Inbox
from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.peer.api import Peer
from marfl.protocol.attempt import Attempt
from marfl.protocol.exchange import Contribution
from marfl.protocol.participant import Outcome, Participant
from marfl.protocol.roster import VOID
from marfl.protocol.standing import Standing
from marfl.testing.world import World
from stages.libp2p import Swarm as RealSwarm
from stages.libp2p import hivemind_warnings
from stages.masks import Death, Stage
from stages.virtual import Swarm, crash_on, leaders


@dataclass
class Seen:
    """Weak references to all that came into being: what it is, whose, and of which iteration."""

    refs: list[tuple[str, Net, int, ref[Any]]] = field(default_factory=list)

    def note(self, what: str, whose: Net, iteration: int, thing: Any) -> None:
        self.refs.append((what, whose, iteration, ref(thing)))

    def left(self, last: int) -> list[str]:
        """What the living still have of the iterations up to this one, which is over; its instance is the newest."""
        found = [
            (what, net, at)
            for what, net, at, thing in self.refs
            if at <= last - (what == "instance") and thing() is not None
        ]
        return sorted({f"{what} of {net.me} in {at}" for what, net, at in found if not net.port.dead})

    def kinds(self) -> set[str]:
        return {what for what, *_ in self.refs}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Whatever an iteration makes is noted; the collector is off until the test ends."""
    found = Seen()

    def watch(owner: type, name: str, after: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            after(self, result, *args)
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(Attempt, "__init__", lambda self, *_: found.note("attempt", self.net, self.roster.iteration, self))
    watch(Attempt, "_checked", lambda self, slice, *_: found.note("slice", self.net, self.roster.iteration, slice))
    watch(Standing, "enter", lambda self, now: found.note("instance", self.net, now.iteration, now))
    original = Participant.run_iteration

    async def run_iteration(me: Participant, mine: Contribution | None) -> Outcome:
        if mine is not None:  # over memory of its own: whatever view of it is left keeps that
            values = mine.delta.numpy().copy()
            found.note("contribution", me.net, me.record.iteration + 1, values)
            mine = replace(mine, delta=torch.from_numpy(values))
            del values
        return await original(me, mine)

    monkeypatch.setattr(Participant, "run_iteration", run_iteration)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


async def one_more(swarm: Swarm, seen: Seen) -> None:
    """Of what was before, nothing is left after another iteration."""
    assert seen.kinds() == {"attempt", "contribution", "instance", "slice"}
    await asyncio.gather(*(peer.catch_up() for name, peer in swarm.people.items() if swarm.network.alive(name)))
    after = await swarm.iterate()
    assert {outcome.status for outcome in after.values()} == {"committed"}
    await asyncio.sleep(0)  # what the last one to hear of it has cancelled comes to its end
    assert seen.left(min(outcome.iteration for outcome in after.values())) == []


@pytest.mark.parametrize("exchange", ["grid", "chunked", "full"])
def test_nothing_of_a_committed_iteration_is_left(seen: Seen, exchange: str) -> None:
    async def play() -> None:
        swarm = Swarm(9, exchange=exchange)
        assert {outcome.status for outcome in (await swarm.iterate()).values()} == {"committed"}
        await one_more(swarm, seen)

    run_virtual(play())


@pytest.mark.parametrize("exchange", ["grid", "chunked", "full"])
def test_nothing_is_left_of_an_attempt_that_waited_in_vain(seen: Seen, exchange: str) -> None:
    """A deadline is an error with a traceback: whose frames must not keep the attempt."""

    async def play() -> None:
        swarm = Swarm(9, exchange=exchange)
        swarm.network.intercept = cut_off_on("reduce", "p4")
        outcomes = await swarm.iterate()
        assert all("p4" in outcome.missing for name, outcome in outcomes.items() if name != "p4")
        swarm.network.heal()
        await one_more(swarm, seen)

    run_virtual(play())


def cut_off_on(channel: str, victim: str) -> Callable[[VirtualNetwork, Departure, Delivery], None]:
    """When it would send on this channel for the first time, nobody reaches it any more, nor it anybody."""
    done = False

    def intercept(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        nonlocal done
        if not done and event.source == victim and event.tag.channel == channel:
            done, delivery.copies = True, 0
            network.partition({victim: 1})

    return intercept


def test_nothing_is_left_of_a_result_that_was_adopted(seen: Seen) -> None:
    async def play() -> None:
        swarm = Swarm(5)
        swarm.network.intercept = crash_on("finish", leaders(swarm)[0])  # instead of telling that it is committed
        outcomes = await swarm.iterate()
        assert {(outcome.status, len(outcome.present)) for outcome in outcomes.values()} == {("committed", 5)}
        await one_more(swarm, seen)

    run_virtual(play())


@pytest.mark.parametrize("on_minority", ["fork", "wait"])
def test_nothing_is_left_of_what_was_stale_or_undecided(seen: Seen, on_minority: str) -> None:
    async def play() -> None:
        swarm = Swarm(8, on_minority=on_minority, minority_timeout=30.0, iteration_timeout=120.0)
        swarm.network.partition({name: int(name > "p4") for name in swarm.names})
        apart = await swarm.iterate()
        assert {apart[name].status for name in ("p5", "p6", "p7")} == (
            {"committed"} if on_minority == "fork" else {"undecided"}
        )
        swarm.network.heal()
        for _ in range(2):
            late = await swarm.iterate()
        assert "stale" in {outcome.status for outcome in late.values()}
        await one_more(swarm, seen)

    run_virtual(play())


@pytest.mark.parametrize("deaths", [(), (Death("p1", "reduce"),), (Death("p1", "shares"),), (Death("p0", "held"),)])
def test_nothing_is_left_of_a_masked_iteration(seen: Seen, deaths: tuple[Death, ...]) -> None:
    stage = Stage(6, deaths=deaths)
    stage.play(3)
    assert {person.record.iteration for person in stage.living} == {3}
    assert seen.kinds() == {"attempt", "contribution", "instance", "slice"}
    assert seen.left(3) == []


def test_nothing_is_left_of_an_iteration_that_went_by(seen: Seen) -> None:
    stage = Stage(4, fewest=(9, 9, 9, 9))
    stage.play(3)
    assert {person.record.roster.exchange for person in stage.living if person.record.roster} == {VOID}
    assert seen.kinds() == {"contribution", "instance"}
    assert seen.left(3) == []


@pytest.mark.parametrize(
    ("wire", "seed"),
    [("fp32", 17), ("masked", 5), *(pytest.param("fp32", more, marks=pytest.mark.slow) for more in (3, 40))],
)
def test_no_attempt_of_a_living_peer_is_garbage_in_a_world_of_faults(seen: Seen, wire: str, seed: int) -> None:
    world = World(seed, wire)
    ends: list[list[Attempt]] = []
    play = world._play

    async def watched() -> None:
        await play()
        ends.append([thing for thing in unreachable() if isinstance(thing, Attempt) and not thing.net.port.dead])

    world._play = watched  # type: ignore[method-assign]
    assert world.run().broken == []
    assert ends == [[]]
    assert "attempt" in seen.kinds()


def unreachable() -> list[Any]:
    """What only the collector would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_message_that_did_not_come_leaves_nothing_in_a_real_inbox(seen: Seen) -> None:
    class Caller:
        async def wait(self, inbox: Inbox) -> None:
            with pytest.raises(DeadlineExceeded):
                await inbox.recv("somebody", Tag("reduce"), asyncio.get_running_loop().time() + 1.0)

    async def play() -> ref[Caller]:
        caller = Caller()
        await caller.wait(Inbox(Limits()))
        return ref(caller)

    assert run_virtual(play())() is None


def test_an_error_that_a_library_user_sees_does_not_keep_the_update(seen: Seen) -> None:
    class Update:
        async def fail(self) -> None:
            raise SyncError("others went on")

    peer = Peer(torch.nn.Linear(1, 1), run="test")
    loop = peer._loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    update = Update()
    gone = ref(update)
    with pytest.raises(SyncError):
        peer._do(update.fail())
    del update
    peer._thread = thread
    peer._end()
    assert gone() is None


@hivemind_warnings
async def test_a_look_up_that_is_cut_short_leaves_no_task_to_be_destroyed() -> None:
    """A neighbour hangs, so the search lasts; whoever asked loses patience."""
    swarm, complaints = RealSwarm(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    other, one = await swarm.peers(2)  # who has joined the other, and knows it
    try:
        os.kill(other.daemon_pid, signal.SIGSTOP)
        asked = [asyncio.wait_for(one.lookup(f"key{i}"), 0.2) for i in range(4)]  # not every search needs the other
        asked += [asyncio.wait_for(one.announce("key", b"value", ttl=60.0), 0.2)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert TimeoutError in map(type, answers)
        gc.collect()
    finally:
        os.kill(other.daemon_pid, signal.SIGCONT)
        await asyncio.gather(one.close(), other.close())
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
