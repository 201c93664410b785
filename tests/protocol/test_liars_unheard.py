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
from marfl.protocol import commits
from marfl.protocol.ballot import MOST_STRANGERS, is_terse
from marfl.protocol.fraud import CONTRADICTION, Proof
from marfl.protocol.messages import Ack, Committed, Endorse, Fraud, Head, Overtaken, State, Sync
from marfl.protocol.roster import BACK, Roster, brief
from marfl.protocol.signed_slices import Signed
from marfl.protocol.standing import MOST_SEALS
from marfl.protocol.statements import Promise, SignedPromise, SignedSeal, link_of, pack_promises, statement
from marfl.protocol.transfer import BAD_ANSWER, EMPTY
from marfl.protocol.voting import GROUNDLESS, UNFIT
from stages.liars import FAR, Fork, Liar, Scene, announce, ask_all, fork, given, packed, play

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
        "a long reason": {"omitted": (("p9", "w" * 10_000),)},
        "a long name": {"omitted": (("n" * 10_000, "did not answer"),)},
        "many names": {"omitted": tuple((f"stranger{at}", "did not answer") for at in range(MOST_STRANGERS + 1))},
        "one name many times": {"omitted": (("p9", "did not answer"),) * 2},
        "a circle without masks": {"circle": ("p9",)},
    }


OVERLONG = [
    "an iteration of thousands of digits", "a long reason", "a long name", "many names", "one name many times",
    "a circle without masks",
]  # fmt: skip


@pytest.mark.parametrize("what", OVERLONG)
def test_a_roster_that_is_longer_than_any_honest_one_is_not_begun(what: str):
    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        said = await liar.seal(replace(liar.roster(liar.others), **overlong(liar)[what]), to=liar.others)
        assert {*said.values()} == {"refused"}

    assert play(attack, 4).refused()[UNFIT] > 0


@pytest.mark.parametrize("strangers", [0, 2 * MOST_STRANGERS])
def test_an_honest_leader_names_no_more_strangers_than_others_accept(strangers: int):
    async def scenario() -> None:
        scene = Scene(4, 1)
        liar = await scene.begin()
        await asyncio.gather(scene.go_on(1), scene.reach(liar.name, 2))
        leader = scene.people[scene.honest[0]]
        instance = leader.standing.enter()
        blank = liar.me.voting.ack("ack", instance)
        acks = {name: replace(blank, join=True, role="member", weight=1.0) for name in scene.swarm.names}
        said = leader.readiness._said("member", 1.0)
        ready = {f"stranger{at:04d}": said for at in range(strangers)}
        roster = leader.leader._roster(instance, 0, acks, ready)
        assert roster is not None
        assert len(roster.omitted) == min(strangers, MOST_STRANGERS)
        assert is_terse(instance.before, instance.electors, roster)

    run_virtual(scenario())


def test_a_leader_that_speaks_of_attempts_far_away_has_nobody_forget_what_was_promised():
    """Else it could hide a vote from a later leader, and have it forget that it did."""

    async def scenario() -> None:
        scene = Scene(4, 2)
        liar = await scene.begin()
        me = scene.people[scene.honest[0]]
        instance = me.standing.enter()
        instance.promise(1)
        hides = SignedPromise(2, Promise(1, -1, b"", b"", False, -1, b""), b"s" * 64)
        me.standing.note_promise(instance, liar.name, hides, checked=True)
        roster, me.standing.proofs.settled = liar.roster(liar.others), True
        for attempt in range(6, 6 + 4 * 100, 4):
            said = Promise(attempt, -1, b"", b"", False, -1, b"")
            signed = liar.net.sign(said.statement(liar.decision))
            shown = pack_promises([SignedPromise(2, said, signed)])
            seal = liar.seal_of(roster, attempt, shown)
            named = brief(roster, liar.electors)
            asked = Endorse(liar.iteration, attempt, named, b"h" * 32, promises=shown, signature=seal)
            await liar.ask("endorse", asked.parcel(), [me.net.me])
        assert instance.promises[1] == {liar.name: hides}
        assert 0 < len(instance.seals) <= MOST_SEALS
        assert scene.refused()[GROUNDLESS] == 100

    run_virtual(scenario())


def test_a_seal_is_not_remembered_with_more_promises_than_there_are_electors():
    async def scenario() -> None:
        scene = Scene(4, 0)
        liar = await scene.begin()
        me, junk = scene.people[scene.honest[0]], b"j" * 10**6
        instance, roster = me.standing.enter(), liar.roster(liar.others)
        assert me.standing.note_seal(instance, SignedSeal(0, roster.digest, junk, liar.seal_of(roster, 0, junk)))
        assert len(instance.seals[0].encoded) < 200
        assert me.standing.note_seal(instance, SignedSeal(0, roster.digest, junk, liar.seal_of(roster, 0, junk)))
        assert not me.standing.banned

    run_virtual(scenario())


# --- heads ---


@pytest.mark.parametrize("strangers", [1, 16])
def test_strangers_that_announce_heads_and_never_answer_hold_nobody_up_for_long(strangers: int):
    async def scenario() -> None:
        scene = Scene(4, 3)
        liar = await scene.begin()
        scene.honest.append(liar.name)  # nobody of the run lies

        async def never(_: PeerId, __: Parcel) -> Parcel:
            await asyncio.sleep(1e6)
            raise AssertionError

        for each in range(strangers):
            net = scene.swarm.network.join(f"stranger{each}")
            net.serve("sync", never)
            await announce(net, liar.before, liar.me.terms.digest, iteration=2**30, hash=bytes([each + 1]) * 32)
        begun = liar.net.now()
        await scene.go_on(5)
        assert liar.net.now() - begun < 2 * scene.swarm.settings.ready_timeout

    run_virtual(scenario())


def founds(liar: Liar, salt: bytes = b"made up") -> Fork:
    """The liar founds a lineage alone, and proves so to whoever asks."""
    theirs, begin = fork([liar.net], liar.before, 1, named=liar.electors, salt=salt), link_of(liar.before)

    async def sync(_: PeerId, request: Parcel) -> Parcel:
        asked = Sync.decode(request.header)
        place = [link for _, link in asked.links].index(begin)
        return given(theirs.head, theirs.states[-1], packed(theirs.hops, place), light=asked.light)

    liar.net.serve("sync", sync)
    return theirs


def test_who_shows_a_founding_that_loses_says_nothing_of_others_in_a_lineage_of_that_name():
    """Anybody can found a lineage of any name alone: the honest ones who founded it are looked at all the same."""

    async def scenario() -> None:
        scene = Scene(7, 1)
        liar = await scene.begin()
        await scene.go_on(1)
        theirs = founds(liar)
        me = scene.people[scene.honest[0]]
        assert not await me.transfer.is_ahead(liar.name)
        head = Head(2, b"h" * 32, theirs.head.lineage, me.terms.digest)
        assert not me.standing.may_win(liar.name, head)
        assert me.standing.may_win(scene.honest[1], head)

    run_virtual(scenario())


def test_who_founds_lineages_without_end_fills_nobody_s_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commits, "MOST_LOSERS", 3)

    async def scenario() -> None:
        scene = Scene(4, 1)
        liar = await scene.begin()
        await scene.go_on(1)
        me = scene.people[scene.honest[0]]
        for each in range(6):
            founds(liar, bytes([each]))
            await me.transfer.look(liar.name)
        assert len(me.standing.proofs.losers) == 3

    run_virtual(scenario())


# --- words of a head that is not there ---


@pytest.mark.parametrize("what", ["propose", "behind", "head"])
@pytest.mark.parametrize("n", [4, 7])
def test_who_speaks_of_a_commit_and_shows_where_it_is_has_said_an_empty_word(n: int, what: str):
    async def attack(liar: Liar) -> None:
        later = liar.iteration + 4
        record = liar.record_of(replace(liar.roster(liar.others), iteration=later), b"m" * 32)
        if what == "propose":
            await liar.propose(0, base=record.hash, iteration=later)
        elif what == "head":
            await liar.announce(record, iteration=2**30)
        else:
            honest = liar.me.voting.answer_propose

            async def answer(sender: PeerId, request: Parcel) -> Parcel:
                ack = Ack.decode((await honest(sender, request)).header)
                return replace(ack, status="behind", record=record.encoded).parcel()

            liar.net.serve("propose", answer)

    assert play(attack, n, rank=1).refused()[EMPTY] > 0


def test_a_stranger_sends_nobody_to_look_at_anything():
    """Not even if it speaks of an iteration that is over: who is late may say so, and is answered."""

    async def scenario() -> None:
        scene = Scene(4, 1)
        liar = await scene.begin()
        stranger, asked = scene.swarm.network.join("stranger"), []

        async def sync(sender: PeerId, _: Parcel) -> Parcel:
            asked.append(sender)
            return given(liar.before, liar.state())

        stranger.serve("sync", sync)
        for iteration in (0, 1, 2**30):
            await ask_all(stranger, "overtaken", Overtaken(b"z" * 32, iteration).parcel(), scene.honest)
        await liar.pause(1.0)
        assert not asked

    run_virtual(scenario())
