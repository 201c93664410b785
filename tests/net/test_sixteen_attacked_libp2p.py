"""Sixteen real peers of a closed run, and five attackers one after the other, each of another kind.

A stranger and a token holder that was never in a roster announce huge heads and give states of their own all along. A
leader seals two rosters, a voter reports two hashes, an owner adds to its sum. Each liar is named by everybody honest,
and the run ends on what the honest and those who lied only later have brought.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marfl.errors import NetError
from marfl.net.base import Parcel, PeerId
from marfl.protocol.attempt import Attempt
from marfl.protocol.fraud import CONTRADICTION, WRONG_SUM
from marfl.protocol.messages import Finish
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import ranked
from marfl.state import Snapshot
from marfl.testing.miscounts import adds
from stages import libp2p
from stages.liars import Liar, announce, fork
from stages.libp2p import ClosedSwarm, Libp2pNet, Stage, Swarm, hivemind_warnings, new_closed_stage
from stages.virtual import LAYOUT, LENGTH, advance
from test_liars_libp2p import donate, reach

pytestmark = [hivemind_warnings, pytest.mark.slow]
stage = new_closed_stage
PEERS = 16


def equivocates(liar: Participant) -> None:
    """With every vote it sends another one, of the same attempt."""
    call = liar.net.call

    async def lies(to: PeerId, channel: str, parcel: Parcel, **how: Any) -> Parcel:
        instance = liar.instance
        if channel == "finish" and (said := Finish.decode(parcel.header)).hash and instance and instance.accepted:
            vote = instance.vote(instance.accepted.roster, said.attempt, b"i" * 32)
            other = Finish(said.iteration, said.attempt, b"i" * 32, True, liar.net.sign(vote.statement))
            liar.talk.aside(call(to, channel, other.parcel(), **how))
        return await call(to, channel, parcel, **how)

    liar.net.call = lies  # type: ignore[method-assign]


def miscounts(liar: Participant) -> None:
    """In the iteration to come it adds to the last sum that it owns, which everybody takes from it."""
    begin, when = liar.audits.begin, liar.record.iteration + 1

    def lying(attempt: Attempt) -> None:
        begin(attempt)
        if attempt.roster.iteration == when:
            adds(len(attempt.plan.rounds) - 1, 0)(attempt)

    liar.audits.begin = lying  # type: ignore[method-assign]


async def named(honest: list[Participant], liar: PeerId, why: str) -> None:
    """Until everybody honest has seen the proof."""
    async with asyncio.timeout(60.0):
        while not all(why in me.standing.banned.get(liar, "") for me in honest):
            await asyncio.sleep(0.1)


async def leads_twice(people: dict[PeerId, Participant], name: PeerId) -> None:
    """It seals two rosters in the first attempt of the next iteration, one for each half of the others."""
    scene: Any = SimpleNamespace(swarm=SimpleNamespace(length=LENGTH), people=people)
    liar = Liar(scene, name)
    while len(await liar.propose(0)) < PEERS - 1 or len(liar.acks[0]) < PEERS - 1:
        await asyncio.sleep(0.5)
    half = len(liar.others) // 2
    await liar.seal(liar.roster(liar.others), to=liar.others[:half])
    await liar.seal(liar.roster(liar.others[1:]), to=liar.others[half:])


def test_sixteen_peers_name_every_liar_and_end_on_what_the_honest_bring(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libp2p, "SCENE_TIMEOUT", 600.0)

    async def scene(world: ClosedSwarm) -> None:
        for count in range(1, PEERS + 2):  # one by one: on a busy machine seventeen at once find nobody
            await Swarm.peers(world, count)
        *nets, holder = await world.peers(PEERS + 1)
        stranger = await Libp2pNet.start(await world.joining())
        world.others.append(stranger)
        world.daemons.append(stranger.daemon_pid)
        start = Snapshot(0, {"theta": torch.zeros(LENGTH)}, {})
        record = genesis(start, tuple((net.me, index) for index, net in enumerate(nets)))
        settings = Settings(
            run="test", group_size=3, liars=3, audit=1.0, on_fraud="rollback", ready_timeout=10.0, takeover=2.0,
            phase_timeout=10.0, call_timeout=5.0,
        )  # fmt: skip
        everybody = [Participant(net, settings, i, LAYOUT, start, record, advance) for i, net in enumerate(nets)]
        people = {me.net.me: me for me in everybody}
        await asyncio.gather(*(reach(me, 1) for me in everybody))
        before, terms = everybody[0].record, everybody[0].terms.digest
        for net in (holder, stranger):
            theirs = fork([net], before, 9)
            donate(net, theirs, theirs.proof)
        await announce(holder, fork([holder], before, 9).head, terms, ttl=600.0, iteration=10**6)
        with pytest.raises(NetError, match="no node of the DHT takes"):  # without a token nobody keeps its record
            await announce(stranger, fork([stranger], before, 9).head, terms, ttl=600.0, iteration=10**6)

        first = ranked("test", 2, before.electors)[0].id
        honest = [me for me in everybody if me.net.me != first]
        going = asyncio.gather(*(reach(me, 2) for me in honest))
        await leads_twice(people, first)
        await going
        await named(honest, first, CONTRADICTION)

        second = ranked("test", 3, honest[0].record.electors)[3].id
        equivocates(people[second])
        await asyncio.gather(*(reach(me, 3) for me in honest))
        honest = [me for me in honest if me.net.me != second]
        await named(honest, second, CONTRADICTION)

        left = {me.net.me for me in honest}
        third = next(one.id for one in ranked("test", 4, honest[0].record.electors) if one.id in left)
        miscounts(people[third])
        good = honest[0].state.vectors["theta"].clone()
        await asyncio.gather(*(reach(me, 4) for me in honest))
        honest = [me for me in honest if me.net.me != third]
        await named(honest, third, WRONG_SUM)
        await asyncio.gather(*(reach(me, 6) for me in honest))

        for me in honest:
            assert set(me.standing.banned) == {first, second, third}
            assert list(me.standing.lies) == [4]
        assert {me.record.lineage for me in honest} == {before.lineage}
        assert len({me.state.hash for me in honest}) == 1
        mean = sum(me.index for me in honest) / len(honest)  # iteration 5 goes back to 3, and 6 adds one mean
        expected = float(good[0]) + mean
        assert torch.allclose(honest[0].state.vectors["theta"], torch.full((LENGTH,), expected), atol=1e-4)
        for me in everybody:
            me.talk.drop_asides()

    stage.play(scene)
