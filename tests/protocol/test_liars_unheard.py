"""Lies that break a rule nobody had written down: donors, proofs, heads and rosters that no honest peer would give."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from marfl.errors import SyncError
from marfl.net.base import Parcel, PeerId
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.fraud import CONTRADICTION, Proof
from marfl.protocol.messages import Committed, Fraud, State
from marfl.protocol.roster import BACK, Roster
from marfl.protocol.signed_slices import Signed
from marfl.protocol.statements import link_of, statement
from marfl.protocol.transfer import BAD_ANSWER
from marfl.protocol.voting import UNFIT
from stages.liars import FAR, Liar, Scene, play

# --- proofs of lies ---


def two_slices(liar: Liar, roster: Roster) -> Proof:
    """The liar signs two claims of one slice, and shows so itself."""
    said = []
    for digest in (b"d" * 32, b"e" * 32):
        parts = (roster.digest, 60, 0, 0, 20, digest)
        said.append(Signed("slice", parts, liar.net.sign(statement("slice", *parts))))
    return Proof(CONTRADICTION, liar.name, tuple(said), roster.encoded)


@pytest.mark.parametrize("committed", [True, False])
def test_who_lies_in_a_roster_that_nobody_sealed_has_no_run_go_back(committed: bool):
    """It gives itself up for that: else one peer could undo the last iterations of all others."""

    async def scenario() -> None:
        scene = Scene(4, 1, first=2, audit=1.0, on_fraud="rollback")
        liar = await scene.begin()
        roster = liar.before.roster
        assert roster is not None
        proof = two_slices(liar, roster if committed else replace(roster, piece=999))
        await liar.ask("fraud", Fraud(liar.name).parcel(proof.encoded))
        async with asyncio.timeout(FAR):
            await scene.go_on(1)
        for me in (scene.people[name] for name in scene.honest):
            assert liar.name in me.standing.banned
            assert {*me.standing.lies} == ({2} if committed else set())
            assert me.record.roster is not None
            assert (me.record.roster.restores == 1) is committed

    run_virtual(scenario())


def test_a_lie_in_a_sum_counts_for_whoever_hears_of_it_before_the_commit():
    async def scenario() -> None:
        scene = Scene(4, 1, first=1, audit=1.0, on_fraud="rollback")
        liar = await scene.begin()
        me = scene.people[scene.honest[0]]
        await asyncio.gather(scene.go_on(1), scene.reach(liar.name, 2))
        late = scene.people[scene.honest[1]].standing
        digest = late.record.roster.digest
        late.history.pop(2)
        late.record, newest = late.history[1], late.record
        late.note_lie(digest, liar.name)
        assert not late.lies
        late.record = newest
        late.note_lie(b"of another roster".ljust(32), liar.name)
        assert late.lies == {2: liar.name}
        assert not me.standing.lies

    run_virtual(scenario())


# --- donors ---


@pytest.mark.parametrize("length", [7, 61])
def test_a_mean_update_of_another_length_ends_nobody_s_run(length: int):
    async def scenario() -> None:
        scene = Scene(5, 1)
        liar = await scene.begin()
        away = scene.honest[0]
        scene.swarm.network.partition({away: 1})
        scene.honest[0] = liar.name  # it does as the others do, for now
        await scene.go_on(1)
        scene.swarm.network.heal()
        theirs, me = liar.me.standing, scene.people[away]
        proof = theirs.proofs.proof([Committed(1, link_of(liar.before))])
        said = State("delta", ("mean",), (length,), theirs.record.encoded, (), 2, {}, proof, True)

        async def answer(_: PeerId, __: Parcel) -> Parcel:
            return said.parcel(torch.zeros(length).numpy().tobytes())

        liar.net.serve("sync", answer)
        with pytest.raises(SyncError, match="does not fit"):
            await me.transfer.fetch([liar.name], None)
        assert me.net.refused.named()[liar.name] == {BAD_ANSWER: 1}

    run_virtual(scenario())


# --- rosters ---


def overlong(liar: Liar) -> dict[str, dict[str, Any]]:
    """What a leader may write into a roster that everybody keeps."""
    return {
        "an iteration of thousands of digits": {"exchange": BACK + "0" * 5000 + "1"},
    }


@pytest.mark.parametrize("what", ["an iteration of thousands of digits"])
def test_a_roster_that_is_longer_than_any_honest_one_is_not_begun(what: str):
    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        said = await liar.seal(replace(liar.roster(liar.others), **overlong(liar)[what]), to=liar.others)
        assert {*said.values()} == {"refused"}

    assert play(attack, 4).refused()[UNFIT] > 0
