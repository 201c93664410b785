"""Two words on one thing: who says two is found, and nobody honest ever does, whatever it is led into."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.net.virtual_clock import run_virtual
from marfl.protocol import audit
from marfl.protocol.fraud import CONTRADICTION, Proof, check_fraud, contradicts
from marfl.protocol.instance import Accepted, Instance, passed_by
from marfl.protocol.messages import Endorse, Fraud, Propose, status_of
from marfl.protocol.roster import VOID, DecisionId, Record, Roster, brief
from marfl.protocol.signed_slices import Signed
from marfl.protocol.standing import Standing
from marfl.protocol.statements import (
    LONGEST_GROUNDS,
    Promise,
    SignedPromise,
    SignedSeal,
    cast,
    lineage_after,
    link_of,
    pack_promises,
    seal_parts,
    statement,
    unpack_promises,
)
from marfl.protocol.voting import promise_of
from stages.liars import FAR, Liar, Scene, ask_all, nothing, played, signed_by, staged, without
from stages.virtual import Swarm

# --- two acks in one attempt ---


def own(liar: Liar, attempt: int, digest: bytes = b"") -> SignedPromise:
    """An ack of its own: it has voted for nothing, or for something that it makes up."""
    said = Promise(attempt, 0 if digest else -1, digest and b"r" * 32, digest, False, -1, b"")
    place = [elector.id for elector in liar.electors].index(liar.name)
    return SignedPromise(place, said, liar.net.sign(said.statement(liar.decision)))


def with_row(liar: Liar, attempt: int, *rows: SignedPromise) -> bytes:
    """The promises that it was given, with these instead of those of the same electors."""
    places = {row.place for row in rows}
    given = [row for row in unpack_promises(liar.promises(attempt), attempt) if row.place not in places]
    return pack_promises(sorted([*given, *rows]))


async def shows_two_sets(liar: Liar, first: bytes, second: bytes, to: list[PeerId]) -> None:
    """One roster, and a set of promises for each half of these."""
    roster, half = liar.roster(liar.others, 1), len(to) // 2
    for shown, some in ((first, to[:half]), (second, to[half:])):
        assert set((await liar.seal(roster, to=some, promises=shown)).values()) == {"ok"}


@pytest.mark.parametrize("n", [5, 7])
def test_a_leader_that_shows_two_acks_of_its_own_in_one_attempt_is_named_and_left_out(n: int):
    async def attack(liar: Liar) -> None:
        await liar.propose(1)
        acks = with_row(liar, 1, own(liar, 1)), with_row(liar, 1, own(liar, 1, b"h" * 32))
        await shows_two_sets(liar, *acks, list(liar.others))

    scene = played(attack, n, 1)
    assert all(CONTRADICTION in scene.people[name].standing.banned.get(scene.liar.name, "") for name in scene.honest)
    assert len(scene.models()) == 1
    assert scene.liar.name not in scene.record.roster.ids
    assert scene.models() == staged(nothing, n, 1).models()


def test_who_gives_a_lying_leader_two_acks_is_named_with_it():
    """Both are known to be liars at the end: the leader by its seals, the other by the acks in them."""

    async def scenario() -> None:
        scene = Scene(7, 1, liars=2)
        liar = await scene.begin()
        helper = Liar(scene, liar.others[-1])
        scene.honest.remove(helper.name)
        going = asyncio.create_task(scene.go_on(2))
        await liar.pause(1.0)
        await liar.propose(1)
        acks = [with_row(liar, 1, own(helper, 1, digest)) for digest in (b"", b"h" * 32)]
        await shows_two_sets(liar, *acks, list(scene.honest))
        async with asyncio.timeout(FAR):
            await going
        for name in scene.honest:
            banned = scene.people[name].standing.banned
            assert set(banned) == {liar.name, helper.name}
            assert all(CONTRADICTION in why for why in banned.values())
        assert len(scene.models()) == 1

    run_virtual(scenario())


def test_a_leader_compares_the_acks_that_it_is_given_itself():
    """It asks once more for an attempt, and one elector has another story."""

    async def scenario() -> None:
        scene = Scene(5)
        liar = await scene.begin()
        me = scene.people[scene.honest[0]]
        instance = me.standing.enter()
        attempt = instance.next_attempt(instance.rank(me.net.me))
        ack = replace(scene.people[liar.name].voting.ack("ack", instance), attempt=attempt)
        roster = liar.roster(liar.others).encoded
        two = ack, replace(ack, accepted=roster, accepted_hash=b"h" * 32, accepted_attempt=0)
        for each in two:
            said = promise_of(each)
            signed = replace(each, signature=liar.net.sign(said.statement(instance.signed_id)))
            assert me.leader._read_ack(instance, attempt, liar.name, signed.parcel()) is not None
        await me.net.sleep_until(me.net.now() + 5.0)
        assert all(liar.name in scene.people[name].standing.banned for name in scene.honest)

    run_virtual(scenario())


@pytest.mark.parametrize("n", [5, 7])
@pytest.mark.parametrize("signed", [True, False])
def test_a_leader_that_has_others_endorse_another_roster_than_it_sealed_is_refused_and_named(n: int, signed: bool):
    got: list[bytes] = []

    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        victim, *members = liar.others
        await liar.seal(liar.roster(liar.others), to=[victim])
        roster, digest = liar.roster(members), b"h" * 32
        votes = signed_by([liar.net], liar.before, liar.record_of(roster, digest)).encoded
        seal = liar.seal_of(roster, 0) if signed else b""
        asked = Endorse(liar.iteration, 0, brief(roster, liar.electors), digest, votes, b"", seal)
        got.extend(bytes(each.payload) for each in (await liar.ask("endorse", asked.parcel(), [victim])).values())

    scene = played(attack, n)
    assert got == [b""]
    for name in scene.honest:
        assert (scene.liar.name in scene.people[name].standing.banned) is signed
    assert scene.models() == {without(n, 0)[0]}


def test_who_hides_a_vote_from_a_later_leader_is_named_once_the_vote_is_seen():
    """The result was committed with its vote; the leader of the next attempt was told that there is none."""

    async def scenario() -> None:
        scene = Scene(5)
        liar = await scene.begin()
        me = scene.people[scene.honest[0]]
        instance = me.standing.enter()
        place = [elector.id for elector in liar.electors].index(liar.name)
        me.standing.note_promise(instance, liar.name, own(liar, 1))
        me.standing.note_promise(instance, scene.honest[1], own(Liar(scene, scene.honest[1]), 0))
        roster = replace(liar.roster(liar.others), exchange=VOID)
        record = liar.record_of(roster, passed_by(me.state, roster).hash)
        nets = [scene.people[elector.id].net for elector in liar.electors]
        assert instance.promises[1][liar.name].place == place
        me.standing.decide(instance, record, (), signed_by(nets, liar.before, record))
        await me.net.sleep_until(me.net.now() + 5.0)
        for name in scene.honest:
            assert set(scene.people[name].standing.banned) == {liar.name}

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("told", "promised", "hides"),
    [
        ((-1, b"", b""), 3, True),
        ((1, b"r" * 32, b"h" * 32), 3, True),
        ((2, b"r" * 32, b"h" * 32), 3, False),  # it tells of this very vote
        ((2, b"r" * 32, b"i" * 32), 3, True),  # or of another one of the same attempt
        ((3, b"r" * 32, b"i" * 32), 4, False),  # it has voted again since
        ((-1, b"", b""), 2, False),  # it voted after this promise
        ((-1, b"", b""), 1, False),
    ],
)
def test_a_promise_hides_a_vote_if_it_came_later_and_tells_of_none(told: Any, promised: int, hides: bool):
    here = DecisionId("test", 2, b"p" * 32, b"l" * 32)
    vote = Signed("vote", ("test", 2, 2, b"l" * 32, b"p" * 32, b"r" * 32, b"n" * 32, b"e" * 32, b"h" * 32), b"")
    promise = Signed("promise", (*here, *Promise(promised, *told, False, -1, b"")), b"")
    assert contradicts(vote, promise) is hides
    elsewhere = Signed("promise", (*here._replace(base=b"q" * 32), *promise.parts[4:]), b"")
    assert not contradicts(vote, elsewhere)


def test_long_grounds_are_told_by_their_digest():
    said = SignedSeal(1, b"r" * 32, b"p" * (LONGEST_GROUNDS + 1), b"s" * 64)
    told = SignedSeal.decode(said.encoded)
    assert len(said.encoded) < 200
    decision = DecisionId("test", 2, b"b" * 32, b"l" * 32)
    assert told.parts(decision) == said.parts(decision)
    short = SignedSeal(1, b"r" * 32, b"p" * LONGEST_GROUNDS, b"s" * 64)
    assert SignedSeal.decode(short.encoded) == short


# --- nobody honest says two things ---


def founds(record: Record, salt: bytes, **changes: Any) -> Propose:
    lineage = lineage_after(link_of(record), salt)
    proposal = Propose(record.iteration + 1, 0, -1, lineage, record.hash, True, 0, b"t" * 32, True)
    return replace(proposal, **changes)


def test_nobody_returns_to_a_lineage_that_it_has_left():
    """A founder that comes back with it would be given a second vote in its first attempt, and could prove both."""

    async def scenario() -> None:
        swarm = Swarm(4, named=False)
        me, terms = swarm.people["p3"], swarm.people["p0"].standing.terms.digest
        first, second = (founds(swarm.record, salt, terms=terms) for salt in (b"one", b"two"))
        assert me.voting.vote("p1", first).status == "ack"
        me.standing.accept(me.instance, _vote(me.instance, first.lineage))
        assert me.voting.vote("p0", second).status == "ack"
        assert me.voting.vote("p1", first).status == "refused"
        assert me.voting.vote("p0", second).status == "ack"  # where it is it may be asked again

    run_virtual(scenario())


def _vote(instance: Instance, lineage: bytes) -> Accepted:
    roster = Roster("test", 1, 0, lineage, instance.base, b"l" * 32, VOID, 3, (), (), (), ())
    return Accepted(0, roster, b"h" * 32, None, None)


def test_who_gives_a_record_up_and_finds_it_certified_after_all_has_not_forgotten_its_promises():
    """It would vote in an attempt before the one that it has promised, and say two things in one."""

    async def scenario() -> None:
        swarm = Swarm(7, liars=1)
        await swarm.iterate()
        me = swarm.people["p0"]
        standing, before = me.standing, me.record
        others = [person.net for name, person in swarm.people.items() if name != "p0"]
        roster = Roster(
            "test", 2, 0, before.lineage, before.hash, standing.layout, VOID, 3, before.roster.members, (), (), ()
        )
        record = before.after(roster, passed_by(standing.state, roster).hash)
        certificate = signed_by(others, before, record)

        def decide(proof: Any) -> None:
            instance = standing.enter()
            standing.accept(instance, _held(standing, roster))
            standing.decide(instance, record, (), proof, vouchers=["p1"])

        decide(None)
        assert not standing.proofs.settled
        instance = standing.enter()
        leader = instance.electors[5].id
        asked = Propose(3, 5, 4, record.lineage, record.hash, False, 0, standing.terms.digest)
        first = me.voting.vote(leader, asked)
        assert first.status == "ack"
        assert standing.step_back()
        decide(certificate)
        again = standing.enter()
        assert again.promised == 5
        assert again.given[5] == first
        early = replace(asked, attempt=3, seen=2)
        assert me.voting.vote(instance.electors[3].id, early).status == "refused"

    run_virtual(scenario())


def _held(standing: Standing, roster: Roster) -> Accepted:
    state = passed_by(standing.state, roster)
    return Accepted(roster.attempt, roster, state.hash, state, None)


def test_two_records_that_lead_to_one_state_are_two_decisions():
    """What was promised on top of the one says nothing on top of the other, or the honest would contradict themselves.

    Two leaders let an iteration go by; the state after it is the same, the record is not.
    """

    async def scenario() -> None:
        swarm = Swarm(7, liars=1)
        await swarm.iterate()
        me = swarm.people["p0"]
        standing, before = me.standing, me.record
        same = before.lineage, before.hash, standing.layout, VOID, 3, before.roster.members, (), (), ()
        rosters = [Roster("test", 2, attempt, *same) for attempt in (0, 1)]
        decided = []
        for roster in rosters:
            instance = standing.enter()
            state = passed_by(standing.state, roster)
            record = before.after(roster, state.hash)
            standing.accept(instance, _held(standing, roster))
            standing.decide(instance, record, (), None, vouchers=["p1"])
            instance = standing.enter()
            leader = instance.electors[1].id
            asked = Propose(3, 1, 0, record.lineage, record.hash, False, 0, standing.terms.digest)
            ack = me.voting.vote(leader, asked)
            decided.append((instance, ack))
            assert standing.step_back()
        (one, _), (two, _) = decided
        assert one is not two
        assert one.base == two.base
        assert one.signed_id != two.signed_id
        words = [
            Signed("promise", (*instance.signed_id, *promise_of(ack)), ack.signature)
            for instance, ack in decided
        ]
        assert all(me.net.verify("p0", word.statement, word.signature) for word in words)
        with pytest.raises(WireError, match="do not contradict"):
            check_fraud(Proof(CONTRADICTION, "p0", tuple(words)), me.net.verify)

    run_virtual(scenario())


def test_a_decision_follows_its_record_and_not_a_state_of_the_same_hash():
    """Another lineage came to the same state by the same sum: its electors decide there, and nobody else's."""

    async def scenario() -> None:
        swarm = Swarm(5, liars=1)
        await swarm.iterate()
        me = swarm.people["p0"]
        mine = me.standing.enter()
        other = replace(me.record.roster, lineage=lineage_after(link_of(swarm.record), b"theirs"))
        me.standing.record = swarm.record.after(other, me.record.hash)
        assert me.standing.enter() is not mine
        assert me.instance.lineage == other.lineage

    run_virtual(scenario())


# --- what a proof says, and of which run ---


def two_votes(scene: Scene, run: str = "test") -> tuple[Signed, Signed]:
    liar = scene.liar
    roster = replace(liar.roster(liar.others), run=run)
    said = [cast(roster, 0, liar.before, digest) for digest in (b"h" * 32, b"i" * 32)]
    return tuple(Signed("vote", tuple(one), liar.net.sign(one.statement)) for one in said)  # type: ignore[return-value]


@pytest.mark.parametrize(("run", "counts"), [("test", True), ("another", False)])
def test_a_lie_in_another_run_bans_nobody_in_this_one(run: str, counts: bool):
    async def scenario() -> None:
        scene = Scene(4)
        liar = await scene.begin()
        me = scene.people[scene.honest[0]]
        proof = Proof(CONTRADICTION, liar.name, two_votes(scene, run))
        if counts:
            await me.audits.accuse(proof)
        else:
            with pytest.raises(WireError, match="another run"):
                await me.audits.accuse(proof)
        assert (liar.name in me.standing.banned) is counts

    run_virtual(scenario())


def test_two_votes_do_not_taint_a_sum_that_somebody_puts_beside_them():
    """Else whoever finds a liar could have a run go back to before any iteration of the liar's."""

    async def scenario() -> None:
        scene = Scene(4)
        liar = await scene.begin()
        me = scene.people[scene.honest[0]]
        roster = liar.before.roster
        parts = (roster.digest, 60, 0, 0, 20, b"d" * 32)
        slice_ = Signed("slice", parts, liar.net.sign(statement("slice", *parts)))
        for said in ((*two_votes(scene), slice_), two_votes(scene)):
            with pytest.raises(WireError):
                await me.audits.accuse(Proof(CONTRADICTION, liar.name, said, roster.encoded))
        assert not me.standing.lies
        assert not me.standing.banned

    run_virtual(scenario())


def test_liars_that_somebody_makes_up_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch):
    """Every name that contradicts itself is a liar, truly; but names cost nothing, and bans are written down."""
    monkeypatch.setattr(audit, "MOST_BANNED", 3)

    async def scenario() -> None:
        scene = Scene(4)
        liar = await scene.begin()
        me = scene.people[scene.honest[0]]
        told = []
        for number in range(6):
            net = scene.swarm.network.join(f"nobody{number}")
            said = [Signed("vote", one.parts, net.sign(one.statement)) for one in two_votes(scene)]
            proof = Proof(CONTRADICTION, net.me, tuple(said))
            told.append(await ask_all(liar.net, "fraud", Fraud(net.me).parcel(proof.encoded), [me.net.me]))
        assert [status_of(answer[me.net.me]) for answer in told] == ["ok"] * 3 + ["refused"] * 3
        assert len(me.standing.banned) == 3
        await me.audits.accuse(Proof(CONTRADICTION, liar.name, two_votes(scene)))
        assert liar.name in me.standing.banned  # who takes part is always heard of

    run_virtual(scenario())


def test_what_is_signed_of_one_kind_is_nothing_of_another():
    """The same parts under every name: no signature of one kind is good for a second."""
    kinds = ("vote", "promise", "seal", "goodbye", "arrival", "pledge", "mask keys", "slice", "inputs", "record",
             "lineage", "salt", "grounds", "certificate", "auditors", "spot checks")  # fmt: skip
    assert len({statement(kind, "run", 1, b"x") for kind in kinds}) == len(kinds)
    assert statement("a", "bc") != statement("ab", "c") != statement("abc")
    assert statement("a", b"1") == statement("a", "1") == statement("a", 1)  # so shapes must be fixed: see `fraud`
    seal = seal_parts(DecisionId("test", 2, b"b" * 32, b"l" * 32), 0, b"r" * 32, b"")
    assert [type(part) for part in seal] == [str, int, bytes, bytes, int, bytes, bytes]
