"""An elector and a stranger lie on real sockets; `tests/protocol/test_liars.py` has every lie, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from marfl.net.base import Net, Parcel, PeerId
from marfl.protocol.attempt import Attempt
from marfl.protocol.exchange import Contribution
from marfl.protocol.fraud import WRONG_SUM
from marfl.protocol.messages import Decided, Overtaken, Sync
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import ranked
from marfl.protocol.standing import UNPROVEN
from marfl.state import Snapshot
from marfl.testing.miscounts import adds
from stages.liars import Fork, announce, ask_all, fork, given
from stages.libp2p import Stage, hivemind_warnings, new_stage
from stages.net_contract import World
from stages.virtual import LAYOUT, LENGTH, advance

pytestmark = [hivemind_warnings, pytest.mark.slow]
stage = new_stage


def donate(net: Net, theirs: Fork, proof: bytes) -> None:
    """Answer everybody who syncs with the head of a lineage that was made up."""

    async def answer(_: PeerId, request: Parcel) -> Parcel:
        return given(theirs.head, theirs.states[-1], proof, light=Sync.decode(request.header).light)

    net.serve("sync", answer)


async def reach(me: Participant, iteration: int) -> None:
    while me.record.iteration < iteration or me.behind:
        if await me.catch_up() and me.record.iteration < iteration:
            delta = torch.full((LENGTH,), float(me.index))
            await me.run_iteration(Contribution(me.record.hash, delta, 1.0))


def test_what_liars_announce_prove_and_say_on_real_sockets_changes_no_model(stage: Stage) -> None:
    async def scene(world: World) -> None:
        *nets, stranger = await world.peers(6)
        start = Snapshot(0, {"theta": torch.zeros(LENGTH)}, {})
        record = genesis(start, tuple((net.me, index) for index, net in enumerate(nets)))
        settings = Settings(run="test", group_size=3, ready_timeout=3.0, takeover=0.5, liars=1)
        people = [Participant(net, settings, i, LAYOUT, start, record, advance) for i, net in enumerate(nets)]
        await asyncio.gather(*(reach(me, 1) for me in people))
        *honest, liar = people
        before, names = liar.record, [me.net.me for me in honest]
        alone, made_up = fork([liar.net], before, 5, named=before.electors), fork([stranger], before, 9)
        donate(liar.net, alone, alone.proof)
        donate(stranger, made_up, b"")
        for net, theirs in ((liar.net, alone), (stranger, made_up)):
            await announce(net, theirs.head, liar.terms.digest, ttl=600.0, iteration=10**6)
        going = asyncio.gather(*(reach(me, 3) for me in honest))
        said = Decided(2, alone.records[0].encoded, (liar.net.me,), alone.certificates[0].encoded)
        while not going.done():
            await ask_all(liar.net, "decided", said.parcel(), names)
            await ask_all(liar.net, "overtaken", Overtaken(alone.head.hash, 10**9).parcel(), names)
            await asyncio.wait([going], timeout=0.5)
        await going
        assert {me.record.lineage for me in honest} == {before.lineage}
        # All five in the first iteration, the honest four in the others.
        assert {me.state.vectors["theta"][0].item() for me in honest} == {2.0 + 1.5 + 1.5}
        assert sum(me.net.refused[UNPROVEN] for me in honest) > 0

    stage.play(scene)


@pytest.mark.parametrize("peers", [4, 7])
@pytest.mark.parametrize("on_fraud", ["go on", "rollback"])
def test_a_leader_that_miscounts_on_real_sockets_is_named_and_left_out(stage: Stage, on_fraud: str, peers: int) -> None:
    async def scene(world: World) -> None:
        nets = await world.peers(peers)
        start = Snapshot(0, {"theta": torch.zeros(LENGTH)}, {})
        record = genesis(start, tuple((net.me, index) for index, net in enumerate(nets)))
        patient = Settings(run="test", group_size=2, ready_timeout=3.0, takeover=0.5, audit=1.0)
        settings = replace(patient, on_fraud=on_fraud)  # type: ignore[arg-type]
        people = [Participant(net, settings, i, LAYOUT, start, record, advance) for i, net in enumerate(nets)]
        leader = ranked("test", 1, record.electors)[0].id  # the first in the plan, too: it owns a part of the sum
        liar = next(me for me in people if me.net.me == leader)
        honest = [me for me in people if me is not liar]
        begin = liar.audits.begin

        def lying(attempt: Attempt) -> None:
            begin(attempt)
            if attempt.roster.iteration == 1:
                adds(len(attempt.plan.rounds) - 1, 0)(attempt)  # what it sums last everybody takes from it

        liar.audits.begin = lying  # type: ignore[method-assign]
        await asyncio.gather(*(reach(me, 1) for me in people))
        async with asyncio.timeout(30.0):
            while not all(me.standing.banned for me in honest):
                await asyncio.sleep(0.1)
        await asyncio.gather(*(reach(me, 3) for me in honest))
        for me in honest:
            assert list(me.standing.banned) == [liar.net.me]
            assert WRONG_SUM in me.standing.banned[liar.net.me]
            assert list(me.standing.lies) == [1]
        for me in people:
            me.talk.drop_asides()
        mean = sum(me.index for me in honest) / len(honest)
        value = {float(me.state.vectors["theta"].max()) for me in honest}
        if on_fraud == "rollback":  # nothing is left of iterations 1 and 2
            assert list(value) == [pytest.approx(mean)]
        else:  # the lie stays in the model, and everybody knows in which iteration
            assert len(value) == 1
            assert min(value) > 100

    stage.play(scene)
