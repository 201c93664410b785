"""A stranger, and a peer of the run whom the plan does not name, ask everything on every channel, on any `Net`.

A transport's test class inherits `AccessContract` and says how a scene is played on it, as for `net_contract`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

from marfl.errors import DeadlineExceeded, NetError
from marfl.net.base import NOT_ENTITLED, Net, Parcel, Tag
from marfl.plan.grid import order, plan
from marfl.plan.schedule import steps
from marfl.protocol.access import TABLE, Who
from marfl.protocol.exchange import Contribution
from marfl.protocol.meetings import Meetings
from marfl.protocol.messages import (
    Ack,
    Audit,
    Audited,
    Decided,
    Endorse,
    Finish,
    Fraud,
    Held,
    Masked,
    Ok,
    Overtaken,
    Pledge,
    Propose,
    Recall,
    Recalled,
    Resend,
    Reveal,
    Revealed,
    Ruling,
    Seal,
    Share,
    State,
    Sync,
    Vouch,
)
from marfl.protocol.participant import Outcome, Participant, genesis
from marfl.protocol.protocol_settings import EXCHANGES, Settings
from marfl.protocol.roster import Elector, Member, Record, Roster, brief, decode_record, ranked
from marfl.state import Snapshot
from stages.net_contract import Meter, World, refused_of

T = TypeVar("T")
LAYOUT = bytes(31) + b"a"
LENGTH = 30
PEERS = 6
runs = itertools.count(1)


def advance(state: Snapshot, mean: torch.Tensor, _: Roster) -> Snapshot:
    return Snapshot(state.version + 1, {"theta": state.vectors["theta"] + mean}, {})


@dataclass
class Run:
    """Peers of one run; the last to lead brings nothing. Exchanges begin when the gate is open."""

    nets: list[Net]
    settings: Settings
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    sealed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        start = Snapshot(0, {"theta": torch.zeros(LENGTH)}, {})
        record = genesis(start, tuple((net.me, index) for index, net in enumerate(self.nets)))
        common = LAYOUT, start, record, advance
        self.people = [Participant(net, self.settings, index, *common) for index, net in enumerate(self.nets)]
        self._waiting = 0

    def order(self) -> list[Participant]:
        """In the order in which they lead the next iteration."""
        record = self.people[0].record
        place = {me.net.me: me for me in self.people}
        return [place[e.id] for e in ranked(self.settings.run, record.iteration + 1, record.electors)]

    def contribution(self, me: Participant) -> Contribution:
        async def prepare(_: Meetings) -> torch.Tensor:
            self._waiting += 1
            if self._waiting == len(self.people) - 1:
                self.sealed.set()
            await self.gate.wait()
            return delta

        generator = torch.Generator().manual_seed(1000 * me.record.iteration + me.index)
        delta = torch.randn(LENGTH, generator=generator)
        return Contribution(me.record.hash, delta, 1.0, prepare=prepare)

    async def iterate(self) -> list[Outcome]:
        self._waiting = 0
        self.sealed.clear()
        for me in self.people:
            assert not me.behind or await me.catch_up()
        witness = self.order()[-1]
        work = (me.run_iteration(None if me is witness else self.contribution(me)) for me in self.people)
        outcomes = await asyncio.gather(*work)
        found = [(o.status, o.attempt, len(o.present)) for o in outcomes]
        assert found == [("committed", 0, PEERS - 1)] * PEERS
        return outcomes

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """An iteration whose roster is sealed, and whose exchange waits; it ends well."""
        self.gate.clear()
        self.sealed.clear()
        task = asyncio.create_task(self.iterate())
        await self.sealed.wait()
        yield
        self.gate.set()
        await task

    def refused(self) -> int:
        return sum(me.net.refused[NOT_ENTITLED] for me in self.people)


def new_run(nets: list[Net], **settings: Any) -> Run:
    settings = {"run": f"access {next(runs)}", "group_size": 3, "meet_until": 99} | settings
    return Run(nets, Settings(**settings))


async def ask(net: Net, to: str, channel: str, parcel: Parcel) -> Parcel | None:
    try:
        return await net.call(to, channel, parcel, deadline=net.now() + 10.0)
    except NetError:
        return None


# --- the original attack ---


async def read_updates(net: Net, run: Run, victims: list[str], roster: Roster | None = None) -> list[Parcel]:
    """Sync the roster from anybody, then ask every member for everybody's inputs and sums, whole and in parts."""
    if roster is None:
        sync = Parcel(Sync(have=bytes(32), want=None).encoded)
        answers = [await ask(net, victim, "sync", sync) for victim in victims]
        given = [State.decode(answer.header).record for answer in answers if answer is not None]
        roster = decode_record(next(data for data in given if data)).roster
        assert roster is not None
    questions = [
        (victim, Resend(digest=roster.digest, done=done, rank=rank, start=start, stop=stop).encoded)
        for victim in victims
        for rank in range(len(roster.members))
        for done in (0, 1)
        for start, stop in ((0, LENGTH), (0, 1), (LENGTH - 1, LENGTH))
    ]
    answers = await asyncio.gather(*(ask(net, victim, "resend", Parcel(header)) for victim, header in questions))
    return [answer for answer in answers if answer is not None and len(answer.payload)]


def forged(run: Run, sender: str, victim: Participant) -> Roster:
    """Of the iteration under way, by somebody who leads nothing."""
    record, instance = victim.record, victim.instance
    assert instance is not None
    people, name = [(90, sender), (victim.index, victim.net.me)], run.settings.run
    members = tuple(Member(peer, index, 1.0) for index, peer in order(name, record.iteration + 1, people))
    return Roster(
        name, record.iteration + 1, 0, record.lineage, record.hash, LAYOUT, "full", 3, members, (),
        (Elector(sender, 90),), (), run.settings.wire, bytes(32) if run.settings.wire == "masked" else b"",
    )  # fmt: skip


def questions(run: Run, sender: str, victim: Participant) -> dict[str, Parcel]:
    """On every channel what would gain the sender most, with all that it could know of the iteration under way."""
    instance = victim.instance
    assert instance is not None
    real = next(iter(instance.sealed.values()))
    fake = forged(run, sender, victim)
    now = {"iteration": instance.iteration, "attempt": 0}
    lie = brief(fake, ())
    heavy = Record(fake, b"x" * 32)
    base = {"lineage": instance.lineage, "base": victim.record.hash}
    headers = {
        "propose": Propose(**now, seen=9, founding=False, incarnation=0, terms=victim.terms.digest, **base).encoded,
        "seal": Seal(roster=lie, attempt=0, adopt=b"x" * 32, holders=[sender]).encoded,
        "endorse": Endorse(**now, roster=lie, hash=b"x" * 32).encoded,
        "pledge": Pledge(**now, roster=lie).encoded,
        "reveal": Reveal(**now, roster=real.digest, votes=list(range(PEERS)), seeds_of=[0, 1], keys_of=[2]).encoded,
        "finish": Finish(**now, hash=None, final=True).encoded,
        "held": Held(**now, sum=b"x" * 32).encoded,
        "masked": Masked(roster=real.digest).encoded,
        "decided": Decided(iteration=heavy.iteration, record=heavy.packed(lie), holders=[sender]).encoded,
        "overtaken": Overtaken(hash=b"x" * 32, iteration=2**30).encoded,
        "resend": Resend(digest=real.digest, done=0, rank=0, start=0, stop=LENGTH).encoded,
        "share": Share(digest=real.digest).encoded,
        "audit": Audit(digest=real.digest, rank=real.ranks[victim.net.me], round=0, passing=False).encoded,
        "recall": Recall(digest=real.digest, rank=real.ranks[victim.net.me], done=0).encoded,
        "fraud": Fraud(culprit=victim.net.me).encoded,
        "vouch": Vouch(peer=sender, base=victim.record.hash).encoded,
    }
    return {channel: Parcel(header) for channel, header in headers.items()}


def what_counts(me: Participant) -> object:
    """All that a question could change."""
    instance = me.instance
    assert instance is not None
    masks = instance.masks
    return (
        me.record.encoded, me.state.hash, dict(me.standing.donors), dict(me.helped), me.standing.barred,
        me.standing.notices.about(instance), {by: dict(known) for by, known in me.standing.notices._vouched.items()},
        instance.promised, instance.known, instance.accepted, instance.founder, instance.work.attempt,
        instance.lead.attempt,
        instance.patience, instance.lineage, instance.electors, dict(instance.lead.finishes), instance.over.is_set(),
        instance.stale, instance.sealed.keys(), dict(masks.held), masks.pledge, masks.secrets, instance.holders,
    )  # fmt: skip


REFUSALS = {"refused", "unknown", "retry"}
ANSWERS = TABLE.keys() - {"hello", "layout", "clock", "about"}  # those of a participant
OPEN = {channel for channel in ANSWERS if TABLE[channel].who is Who.ADMITTED}
TO_ELECTORS = {"decided", "overtaken", "vouch", "fraud"}  # an elector may say these; it may not be believed


class AccessContract(ABC):
    """What strangers and the wrong members learn, change and cost: nothing, nothing, one more in the count."""

    @abstractmethod
    def play(self, scene: Callable[[World], Awaitable[T]]) -> T:
        """Play a scene to its end on this transport."""

    @pytest.mark.parametrize("wire", ["fp32", "fixed"])
    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_a_stranger_that_syncs_the_roster_reads_no_update(self, exchange: str, wire: str):
        async def scene(world: World) -> None:
            stranger = await world.newcomer()
            run = new_run(await world.peers(PEERS), exchange=exchange, wire=wire)
            names = [net.me for net in run.nets]
            await run.iterate()
            before = run.refused()
            assert await read_updates(stranger, run, names) == []  # after the commit
            assert run.refused() - before == PEERS * (PEERS - 1) * 6
            async with run.under_way():
                learned: list[Parcel] = []
                instance = run.order()[0].instance
                assert instance is not None
                roster = next(iter(instance.sealed.values()))

                async def spy() -> None:
                    while True:
                        learned.extend(await read_updates(stranger, run, names, roster))
                        await stranger.sleep_until(stranger.now() + 0.005)

                learned.extend(await read_updates(stranger, run, names, roster))
                spying = asyncio.create_task(spy())
            spying.cancel()
            await asyncio.gather(spying, return_exceptions=True)
            assert learned == []
            assert await read_updates(stranger, run, names) == []

        self.play(scene)

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_a_member_reads_what_the_plan_shows_it_while_the_exchange_lasts_and_nothing_after_it(self, exchange: str):
        async def scene(world: World) -> None:
            run = new_run(await world.peers(PEERS), exchange=exchange)
            curious = run.order()[1]
            names = [net.me for net in run.nets if net is not curious.net]
            async with run.under_way():
                instance = curious.instance
                assert instance is not None
                roster = next(iter(instance.sealed.values()))
                rank, learned = roster.ranks[curious.net.me], set()

                async def spy() -> None:
                    async def look(victim: str, source: int, at: int) -> None:
                        asked = Resend(digest=roster.digest, done=0, rank=source, start=at, stop=at + 1).encoded
                        answer = await ask(curious.net, victim, "resend", Parcel(asked))
                        if answer is not None and len(answer.payload):
                            learned.add((source, at))

                    everything = list(itertools.product(names, range(PEERS - 1), (0, 12, LENGTH - 1)))
                    while True:
                        await asyncio.gather(*(look(*each) for each in everything))
                        await curious.net.sleep_until(curious.net.now() + 0.005)

                spying = asyncio.create_task(spy())
            spying.cancel()
            await asyncio.gather(spying, return_exceptions=True)
            shown = {
                (transfer.source, at)
                for step in steps(plan(PEERS - 1, 3), exchange, LENGTH)
                for transfer in step.transfers()
                for at in (0, 12, LENGTH - 1)
                if step.done == 0 and transfer.dest == rank and transfer.start <= at < transfer.stop
            }
            assert learned <= shown
            assert run.refused() > 0
            before = run.refused()
            assert await read_updates(curious.net, run, names, roster) == []
            assert run.refused() == before  # it may be late: it is told that nothing is here any more
            assert all(me.instance is None or not _holds(me) for me in run.people)

        self.play(scene)

    @pytest.mark.parametrize("wire", ["fp32", "masked"])
    @pytest.mark.parametrize("who", ["stranger", "witness"])
    def test_whoever_is_not_entitled_learns_and_changes_nothing_and_is_counted(self, who: str, wire: str):
        async def scene(world: World) -> None:
            stranger = await world.newcomer()
            run = new_run(await world.peers(PEERS), wire=wire)
            await run.iterate()
            leader, *_, member, witness = run.order()
            asker = stranger if who == "stranger" else witness.net
            async with run.under_way():
                for victim in (leader, member):
                    asked = questions(run, asker.me, victim)
                    assert asked.keys() == ANSWERS - OPEN
                    for channel in asked.keys() - (TO_ELECTORS if who == "witness" else set()):
                        before, count = what_counts(victim), refused_of(victim.net, asker.me)[NOT_ENTITLED]
                        answer = await ask(asker, victim.net.me, channel, asked[channel])
                        assert answer is not None, channel
                        assert not len(answer.payload), channel
                        assert _status(channel, answer) in REFUSALS, channel
                        after = what_counts(victim)
                        assert after == before, channel
                        counted = refused_of(victim.net, asker.me)[NOT_ENTITLED] - count
                        late = who == "witness" and _may_be_late(channel, wire, victim is leader)
                        assert counted == (0 if late else 1), (channel, counted, victim is leader)

        self.play(scene)


    @pytest.mark.parametrize("who", ["stranger", "member"])
    def test_data_that_no_iteration_under_way_asks_for_is_not_kept(self, who: str):
        async def scene(world: World) -> None:
            stranger = await world.newcomer()
            run = new_run(await world.peers(PEERS))
            await run.iterate()
            victim, member = run.nets[0], run.nets[1]
            sender = stranger if who == "stranger" else member
            before, into = victim.refused[NOT_ENTITLED], Meter(victim)
            far = [Tag("reduce", 3), Tag("reduce", 2**60), Tag("reduce", 2**62, 5, 4, 3, 2)]
            for tag in far:
                with contextlib.suppress(NetError):
                    await sender.send(victim.me, tag, Parcel(b"h", bytes(10**6)), deadline=sender.now() + 10)
            for tag in far:
                with pytest.raises(DeadlineExceeded):
                    await victim.recv(sender.me, tag, deadline=victim.now() + 0.05)
            assert victim.refused[NOT_ENTITLED] - before == len(far)
            assert into.received.payload == 0
            await run.iterate()

        self.play(scene)


def _may_be_late(channel: str, wire: str, leads: bool) -> bool:
    """What an elector may ask of somebody that does not have it (any more), and is told so."""
    elsewhere = channel in ("finish", "held") and not leads
    return elsewhere or channel == "masked" or (channel == "share" and wire == "fp32")


def _holds(me: Participant) -> bool:
    attempt = me.instance.work.exchange if me.instance else None
    return attempt is not None and bool(attempt._held)


def _status(channel: str, answer: Parcel) -> str:
    kinds: dict[str, Any] = {
        "propose": Ack, "finish": Ruling, "reveal": Revealed, "audit": Audited, "recall": Recalled,
    }  # fmt: skip
    return str(kinds.get(channel, Ok).decode(answer.header).status)
