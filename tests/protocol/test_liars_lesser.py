"""Lies that would gain a little: wrong histories, records that are not sure, patience without end, costly proofs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from marfl.errors import PeerGone, WireError
from marfl.net.base import Parcel, PeerId
from marfl.net.virtual_clock import run_virtual
from marfl.protocol import commits
from marfl.protocol.ballot import Told, Value, Way, choose, justified
from marfl.protocol.commits import Commits
from marfl.protocol.fraud import CONTRADICTION, Proof, check_fraud
from marfl.protocol.instance import Accepted
from marfl.protocol.messages import NOT_YET, Ack, Committed, Endorse, Finish, Ok, Overtaken, Propose, Ruling, State
from marfl.protocol.pedigree import Founding
from marfl.protocol.roster import VOID, DecisionId, Elector, brief, brief_record, ranked, unbrief
from marfl.protocol.seniority import Arrival, arrival, joined, pack_arrivals
from marfl.protocol.signed_slices import Signed
from marfl.protocol.standing import UNPROVEN
from marfl.protocol.statements import (
    Certificate,
    Promise,
    certificate,
    goodbye,
    lineage_after,
    link_of,
    seal_parts,
    statement,
)
from marfl.protocol.transfer import EMPTY
from marfl.protocol.voting import GROUNDLESS, promise_of
from stages.liars import FAR, Liar, Scene, fork, hop, packed, played, signed_by, takes_part, without
from stages.virtual import Swarm


@pytest.mark.parametrize("missed", [1, 3])
def test_a_donor_does_not_make_a_peer_believe_that_it_gave_something_up(missed: int):
    """Up to where its proof begins the history is the peer's own, whatever the donor says of it."""

    async def scenario() -> None:
        scene = Scene(5, 1, first=2)
        liar = await scene.begin()
        away = scene.honest.pop(0)
        me = scene.people[away]
        scene.swarm.network.partition({away: 1})
        await asyncio.gather(scene.go_on(missed), scene.reach(liar.name, 2 + missed))
        scene.swarm.network.heal()
        honest = liar.me.transfer.answer_sync

        async def answer(sender: PeerId, request: Parcel) -> Parcel:
            given = await honest(sender, request)
            said = State.decode(given.header)
            wrong = tuple(Committed(at, b"w" * 32) for at in range(1, 2 + missed))
            return replace(said, past=wrong).parcel(given.payload)

        liar.net.serve("sync", answer)
        before = dict(me.history)
        caught = await me.transfer.fetch([liar.name], None)
        me.standing.install(caught)
        assert me.record == scene.record
        assert me.discarded == 0
        assert before.items() <= me.history.items()

    run_virtual(scenario())


# --- a record that is not sure ---


def unsettled(scene: Scene, name: PeerId) -> Any:
    """A peer that went on at a leader's word: its record has no certificate here, and nobody vouches for it."""
    me = scene.people[name]
    standing = me.standing
    standing.proofs.settled = False
    standing.proofs._certificates.clear()
    standing.proofs.vouchers = set()
    return me


def test_a_restart_settles_nothing():
    async def scenario() -> None:
        scene = Scene(5, first=2)
        await scene.begin()
        name = scene.honest[0]
        me = unsettled(scene, name)
        kept, record, state = me.standing.kept, me.record, me.state
        scene.swarm.network.crash(name)
        scene.swarm.record, scene.swarm.start = record, state
        again = scene.people[name] = scene.swarm.join(name, me.index)
        again.standing.restore(kept)
        assert not again.standing.proofs.settled
        assert again.standing.before.iteration == record.iteration - 1
        again.standing.believe([scene.honest[1]])
        assert not again.standing.proofs.settled, "one voice is too few where one may lie"
        assert await again.transfer.settle()
        assert again.standing.proofs.settled

    run_virtual(scenario())


@pytest.mark.parametrize("founding", [True, False])
def test_who_is_not_sure_of_its_record_does_not_tell_others_that_they_are_behind(founding: bool):
    async def scenario() -> None:
        scene = Scene(5, first=2)
        await scene.begin()
        name, other = scene.honest[:2]
        me = unsettled(scene, name)
        before = me.standing.before
        scene.swarm.network.partition({name: 1})  # nobody makes it sure
        lineage = lineage_after(link_of(before), b"new") if founding else before.lineage
        asked = Propose(2, 0, -1, lineage, before.hash, founding, 0, me.terms.digest, True)
        assert me.voting.vote(other, asked).status == "stale"
        me.standing.proofs.settled = True
        assert me.voting.vote(other, asked).status == "behind"

    run_virtual(scenario())


def test_a_thousand_proposals_to_who_is_not_sure_have_it_ask_the_others_once():
    async def scenario() -> None:
        scene = Scene(5, first=2)
        await scene.begin()
        name, other = scene.honest[:2]
        me = unsettled(scene, name)
        before, sent = me.standing.before, me.net.sent.messages
        asked = Propose(2, 0, -1, before.lineage, before.hash, False, 0, me.terms.digest, True)
        for _ in range(1000):
            assert me.voting.vote(other, asked).status == "stale"
        await asyncio.sleep(10.0)
        assert me.standing.proofs.settled
        assert 0 < me.net.sent.messages - sent < 50

    run_virtual(scenario())


# --- who holds what is adopted ---


def test_a_result_whose_data_a_newcomer_alone_holds_is_adopted_all_the_same():
    """The leader hears so from the newcomer's ack, which is not among those that it shows: newcomers have no vote."""
    electors = tuple(Elector(str(i), i) for i in range(4))
    value = Value(b"r" * 32, b"h" * 32)
    votes = {str(i): Told(0, value, False) for i in range(3)}
    with_guest = votes | {"n": Told(0, value, True)}
    assert choose(electors, with_guest, 1) == (Way.ADOPT, value, ("n",))
    assert justified(electors, votes, value, 1)
    assert not justified(electors, votes, None, 1)
    assert not justified(electors, votes, Value(b"r" * 32, b"x" * 32), 1)
    alone = {"0": Told(0, value, True), "1": None, "2": None}
    assert not justified(electors, alone, value, 1), "one of those who stand behind it must be honest"


# --- patience ---


def test_who_says_for_ever_that_it_trains_is_not_waited_for_for_ever():
    """Nobody else brings anything: the iteration goes by without it, once that took as long as an iteration may."""

    async def scenario() -> None:
        scene = Scene(5, 2)
        liar = await scene.begin()
        honest = liar.me.voting.answer_propose

        async def trains(sender: PeerId, request: Parcel) -> Parcel:
            given = await honest(sender, request)
            return replace(Ack.decode(given.header), role=NOT_YET, join=False).parcel(given.payload)

        liar.net.serve("propose", trains)

        async def goes_on(name: PeerId) -> None:
            me = scene.people[name]
            while me.record.iteration < 2:
                await me.run_iteration(None)

        async with asyncio.timeout(FAR):
            await asyncio.gather(*map(goes_on, scene.honest))
        assert scene.record.roster is not None
        assert scene.record.roster.exchange == VOID
        assert {scene.people[name].record.lineage for name in scene.honest} == {liar.before.lineage}

    run_virtual(scenario())


# --- two words on one thing ---


@pytest.mark.parametrize("n", [5, 7, 16])
def test_a_leader_that_seals_two_rosters_in_one_attempt_is_named_and_left_out(n: int):
    """Each member sees one of them: they show them to the next leader with their acks."""

    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        half = len(liar.others) // 2
        await liar.seal(liar.roster(liar.others), to=liar.others[:half])
        await liar.seal(liar.roster(liar.others[1:]), to=liar.others[half:])

    scene = played(attack, n)
    assert len(scene.models()) == 1
    assert all(CONTRADICTION in scene.people[name].standing.banned.get(scene.liar.name, "") for name in scene.honest)
    assert scene.liar.name not in scene.record.roster.ids
    assert scene.models() == {without(n, 0)[0]}


@pytest.mark.parametrize("n", [4, 7])
def test_a_member_that_reports_two_hashes_in_one_attempt_is_named_and_left_out(n: int):
    async def attack(liar: Liar) -> None:
        call = liar.net.call

        async def lies(to: PeerId, channel: str, parcel: Parcel, **how: Any) -> Parcel:
            if channel == "finish" and (said := Finish.decode(parcel.header)).hash:
                roster = liar.me.instance.accepted.roster
                other = replace(said, hash=b"i" * 32, signature=liar.signed(roster, b"i" * 32, said.attempt))
                liar.swarm.network.spawn(liar.name, call(to, channel, other.parcel(), **how))
            return await call(to, channel, parcel, **how)

        liar.net.call = lies
        await takes_part(liar)

    scene = played(attack, n, rank=2)
    assert len(scene.models()) == 1
    assert all(CONTRADICTION in scene.people[name].standing.banned.get(scene.liar.name, "") for name in scene.honest)
    assert scene.liar.name not in scene.record.roster.ids


@pytest.mark.parametrize("rank", [1, 2])
def test_a_member_that_reports_one_hash_and_endorses_another_is_named_and_left_out(rank: int):
    """One of four dies, so the liar's vote is needed: it gives it long after it has said something else."""

    async def attack(liar: Liar) -> None:
        call, said_it = liar.net.call, False

        async def lies(to: PeerId, channel: str, parcel: Parcel, **how: Any) -> Parcel:
            nonlocal said_it
            if channel == "finish" and (said := Finish.decode(parcel.header)).hash:
                if said_it:
                    raise PeerGone("it has said it")
                liar.scene.honest.remove(liar.others[-1])
                liar.swarm.network.crash(liar.others[-1])
                said_it, instance = True, liar.me.instance
                vote = instance.vote(instance.accepted.roster, said.attempt, b"i" * 32)
                parcel = replace(said, hash=b"i" * 32, signature=liar.net.sign(vote.statement)).parcel()
            return await call(to, channel, parcel, **how)

        async def endorse(_: PeerId, request: Parcel) -> Parcel:
            asked, instance = Endorse.decode(request.header), liar.me.instance
            vote = instance.vote(unbrief(asked.roster, instance.electors), asked.attempt, asked.hash)
            return Ok("ok").parcel(liar.net.sign(vote.statement))

        liar.net.call = lies
        liar.net.serve("endorse", endorse)
        await takes_part(liar)

    scene = played(attack, 4, rank)
    assert len(scene.models()) == 1
    assert all(CONTRADICTION in scene.people[name].standing.banned.get(scene.liar.name, "") for name in scene.honest)


def test_who_points_at_many_peers_has_one_of_them_looked_at_at_a_time():
    most: list[int] = []

    async def attack(liar: Liar) -> None:
        words = [Overtaken(bytes([number]) * 32, 10**9, f"nobody{number}").parcel() for number in range(200)]
        await asyncio.gather(*(liar.ask("overtaken", word) for word in words))
        most.append(max(len(scene.people[name].transfer._looking) for scene in [liar.scene] for name in scene.honest))

    scene = played(attack, 4, 1)
    assert most == [1]
    assert scene.refused()[EMPTY] > 0
    assert scene.models() == {without(4, 1)[0]}


def test_seals_and_acks_that_contradict_each_other_are_proof_and_others_are_not():
    net = Swarm(1).people["p0"].net
    decision = DecisionId("test", 2, b"b" * 32, b"l" * 32)

    def seal(attempt: int, roster: bytes, promises: bytes = b"") -> Signed:
        parts = seal_parts(decision, attempt, roster, promises)
        return Signed("seal", parts, net.sign(statement("seal", *parts)))

    def promise(attempt: int, digest: bytes) -> Signed:
        said = Promise(attempt, 0, b"r" * 32, digest, True, -1, b"")
        parts = (*decision, *said)
        return Signed("promise", parts, net.sign(said.statement(decision)))

    for one, other, proves in (
        (seal(1, b"r" * 32), seal(1, b"s" * 32), True),
        (seal(1, b"r" * 32), seal(2, b"s" * 32), False),
        (seal(1, b"r" * 32), seal(1, b"r" * 32), False),
        (seal(1, b"r" * 32, b"p"), seal(1, b"r" * 32, b"q"), True),
        (promise(1, b"h" * 32), promise(1, b"i" * 32), True),
        (promise(1, b"h" * 32), promise(2, b"i" * 32), False),
        (promise(1, b"h" * 32), seal(1, b"i" * 32), False),
    ):
        proof = Proof.decode(Proof(CONTRADICTION, "p0", (one, other)).encoded)
        if proves:
            assert check_fraud(proof, net.verify) == "p0"
        else:
            with pytest.raises(WireError):
                check_fraud(proof, net.verify)


def test_an_honest_elector_gives_one_ack_of_an_attempt_however_often_it_is_asked():
    """It votes in between: a second ack with that vote would look like a lie."""

    async def scenario() -> None:
        scene = Scene(5, 1)
        liar = await scene.begin()
        first = await liar.propose(1)
        for name in scene.honest:
            me = scene.people[name]
            instance = me.standing.enter()
            roster = liar.roster(liar.others, 1)
            me.standing.accept(instance, Accepted(1, roster, b"h" * 32, None, None))
        again = await liar.propose(1)
        acks = {name for name in scene.honest if first[name].status == "ack"}
        assert len(acks) == 4
        assert all(promise_of(first[name]) == promise_of(again[name]) for name in acks)

    run_virtual(scenario())


# --- weights ---


@pytest.mark.parametrize("weight", [0.001, 2.0, 1e9])
@pytest.mark.parametrize("alike", [True, False])
def test_with_privacy_all_count_alike_and_nobody_for_more_than_the_run_allows(
    alike: bool, weight: float
):
    """The noise is cut for so many updates that count alike: who claims less makes the others stand out."""

    async def scenario() -> None:
        swarm = Swarm(4, alike=alike)
        liar = swarm.people["p2"]
        honest = liar.voting.answer_propose

        async def claims(sender: PeerId, request: Parcel) -> Parcel:
            given = await honest(sender, request)
            return replace(Ack.decode(given.header), weight=weight).parcel(given.payload)

        liar.net.serve("propose", claims)
        members = await asyncio.wait_for(_weights(swarm), FAR)
        assert "p2" not in members or (weight <= 1e6 and not alike)
        assert {members[name] for name in members.keys() - {"p2"}} == {1.0}

    run_virtual(scenario())


async def _weights(swarm: Swarm) -> dict[PeerId, float]:
    names = [name for name in swarm.names if name != "p2"]
    while swarm.people["p0"].record.iteration < 1:
        await swarm.iterate()
    roster = max((swarm.people[name].record for name in names), key=lambda record: record.iteration).roster
    assert roster is not None
    return {member.id: member.weight for member in roster.members}


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_a_roster_in_which_somebody_counts_for_more_is_not_begun_with_privacy(weight: float):
    async def attack(liar: Liar) -> None:
        roster = liar.roster(liar.others)
        unequal = (roster.members[0]._replace(weight=weight), *roster.members[1:])
        await liar.pause(5.0)
        await liar.propose(0)
        said = await liar.seal(replace(roster, members=unequal), to=liar.others)
        assert "ok" not in said.values()

    assert len(played(attack, 4, alike=True).models()) == 1


# --- goodbyes ---


def founded(scene: Scene, who: list[PeerId], leaving: list[PeerId], forged: str = "") -> tuple[Any, bytes]:
    """A founding that these sign, with the goodbyes of others, or what a liar makes of them; and its proof."""
    before = scene.people[who[0]].record
    made = fork([scene.people[name].net for name in who], before, named=before.electors)
    electors = ranked("test", before.iteration + 1, before.electors)
    link = link_of(scene.swarm.record) if forged == "of another record" else link_of(before)
    signer = {name: who[0] if forged == "in another's name" else name for name in leaving}
    said = {name: scene.people[signer[name]].net.sign(goodbye("test", link)) for name in leaving}
    rows = tuple((place, said[one.id]) for place, one in enumerate(electors) if one.id in said)
    rows = (*rows, (99, rows[0][1])) if forged == "of nobody" else rows
    return made, packed([hop(before, made.head, replace(made.certificates[0], goodbyes=rows))])


@pytest.mark.parametrize("forged", ["", "of another record", "in another's name", "of nobody"])
def test_goodbyes_count_for_the_founding_that_follows_them_if_they_are_signed(forged: str):
    async def scenario() -> None:
        scene = Scene(7)
        await scene.begin()
        names = list(scene.swarm.names)
        made, proof = founded(scene, names[:2], names[4:], forged)
        proofs = scene.people[names[3]].standing.proofs
        anchors = scene.people[names[3]].standing.anchors
        if forged:
            with pytest.raises(WireError):
                proofs.checked(anchors, made.head, proof)
            return
        shown = proofs.checked(anchors, made.head, proof)
        (founding,) = shown.end.foundings
        assert (founding.signers, founding.left, founding.support) == (2, 3, 5)
        assert founding.beats(Founding(2, 4, bytes(32))), "more of them signed it, or had left"
        assert Certificate.decode(replace(made.certificates[0], goodbyes=((1, b"g" * 64),)).encoded).goodbyes

    run_virtual(scenario())


def test_goodbyes_alone_lead_nobody_away():
    """A liar founds alone with the goodbyes of two who left: those who are there and may go on do not follow it."""

    async def scenario() -> None:
        scene = Scene(7)
        liar = await scene.begin()
        made, proof = founded(scene, [liar.name], list(liar.others[-2:]))
        victim = scene.people[liar.others[0]].standing
        shown = victim.proofs.checked(victim.anchors, made.head, proof)
        assert not victim.proofs.is_beaten(shown, made.head, victim.electors, 2)
        assert victim.proofs.is_beaten(shown, made.head, victim.electors, 1), "whoever is alone would"

    run_virtual(scenario())


@pytest.mark.parametrize("n", [4, 7])
def test_goodbyes_that_were_taken_back_give_a_liar_alone_no_lineage(n: int):
    """All are stopped and come back: nobody may vote on top of their record, and they found a lineage together.

    The liar has kept everybody's goodbye, and shows them with a founding of its own.
    """

    async def scenario() -> None:
        scene = Scene(n)
        liar = await scene.begin()
        others = list(liar.others)
        alone, theirs = founded(scene, [liar.name], others)
        together, ours = founded(scene, others, [])
        victim = scene.people[others[0]].standing
        evidence = [
            victim.proofs.checked(victim.anchors, made.head, proof)
            for made, proof in ((alone, theirs), (together, ours))
        ]
        (mine,), (his,) = evidence[1].end.foundings, evidence[0].end.foundings
        assert (his.signers, mine.signers) == (1, n - 1)
        assert mine.beats(his)
        assert not his.beats(mine)

    run_virtual(scenario())


@pytest.mark.parametrize("go", [3, 4])
def test_those_who_stay_show_the_goodbyes_of_those_who_went(go: int):
    async def scenario() -> None:
        swarm = Swarm(6, liars=1)
        await swarm.iterate()
        leave = swarm.names[-go:]
        for name in leave:
            await swarm.people[name].farewell()
            swarm.network.crash(name)
        for _ in range(2):
            await swarm.iterate()
        me = swarm.people["p0"]
        (founding,) = me.standing.proofs.chronicle.head.foundings
        assert (founding.signers, founding.left) == (6 - go, go)
        assert len(swarm.hashes()) == 1

    run_virtual(scenario())


# --- what a proof costs ---


def test_a_proof_with_more_signatures_than_anybody_needs_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commits, "MOST_VERIFIED", 20)
    swarm = Swarm(4)
    nets = [swarm.network.join(f"stranger{i}") for i in range(40)]
    theirs = fork(nets, swarm.record)
    asked: list[PeerId] = []

    def verify(peer: PeerId, digest: bytes, signature: bytes) -> bool:
        asked.append(peer)
        return nets[0].verify(peer, digest, signature)

    mine = Commits("test", 1, verify, swarm.record)
    with pytest.raises(WireError, match="more than 20 signatures"):
        mine.checked(mine.anchors([swarm.record]), theirs.head, theirs.proof)
    assert len(asked) == 20
    few = fork(nets[:20], swarm.record)
    assert mine.checked(mine.anchors([swarm.record]), few.head, few.proof).end.is_of(few.head)


def test_what_a_proof_shows_of_the_states_between_is_not_the_donor_s_to_say():
    async def scenario() -> None:
        swarm = Swarm(5, liars=1)
        await swarm.iterate()
        first = swarm.people["p0"].record
        await swarm.iterate()
        second = swarm.people["p0"].record
        nets = [me.net for me in swarm.people.values()]
        hops = [
            hop(swarm.record, first, signed_by(nets, swarm.record, first)),
            hop(first, second, signed_by(nets, first, second)),
        ]
        proofs = Commits("test", 1, nets[0].verify, swarm.record)
        shown = proofs.checked(proofs.anchors([swarm.record]), second, packed(hops))
        assert shown.hashes == {1: first.hash, 2: second.hash}
        assert shown.votes_of("p0") == (2, 5)
        assert shown.votes_of("nobody") == (0, 5)

    run_virtual(scenario())


# --- two that collude, where two are borne ---


async def two_silent(scene: Scene, liar: Liar, other: Liar) -> None:
    """Neither says anything: what the honest do without them."""


async def two_rule(scene: Scene, liar: Liar, other: Liar) -> None:
    """One leads and says "commit" of a state that the other signs as well."""
    state, roster = liar.state(), liar.roster(liar.others)
    record = liar.record_of(roster, state.hash)
    votes = signed_by([liar.net, other.net], liar.before, record)
    for one in (liar, other):
        one.donate(record, state, packed([hop(liar.before, record, votes)]))

    async def answer(_: PeerId, __: Parcel) -> Parcel:
        return Ruling("commit", brief_record(record, liar.electors), (liar.name, other.name), votes.encoded).parcel()

    liar.net.serve("finish", answer)
    await liar.pause(5.0)
    await liar.propose(0)
    await liar.seal(roster)
    for one in (liar, other):
        await one.announce(record, iteration=10**6)


async def two_vouch(scene: Scene, liar: Liar, other: Liar) -> None:
    """They are the only electors among the members, and show each other's votes for a state of their own."""
    state, roster = liar.state(), liar.roster([liar.name, other.name])
    members = tuple(Elector(member.id, member.index) for member in roster.members)
    votes = {one.name: one.signed(roster, state.hash) for one in (liar, other)}
    shown = certificate(members, 0, votes).encoded
    liar.donate(liar.record_of(roster, state.hash), state)
    await liar.pause(5.0)
    await liar.propose(0)
    named, seal = brief(roster, liar.electors), liar.seal_of(roster, 0)
    asked = Endorse(liar.iteration, 0, named, state.hash, shown, signature=seal)
    answers = await liar.ask("endorse", asked.parcel(), scene.honest)
    assert not any(answer.payload for answer in answers.values())


async def two_found(scene: Scene, liar: Liar, other: Liar) -> None:
    """A lineage of both, which goes on for long."""
    theirs = fork([liar.net, other.net], liar.before, 9, named=liar.electors)
    for one in (liar, other):
        one.donate(theirs.head, theirs.states[-1], theirs.proof)
        await one.announce(theirs.head)


async def two_bring_others(scene: Scene, liar: Liar, other: Liar) -> None:
    """Made-up witnesses, for whom both sign."""
    roster = liar.roster(liar.others)
    ghosts = tuple(Elector(f"ghost{i}", 100 + i) for i in range(20))
    roster = replace(roster, witnesses=(*roster.witnesses, *ghosts), juniors=tuple((one.id, 0) for one in ghosts))
    decision = liar.decision
    known = {one.id: Arrival(other.net.sign(arrival(decision, 0, one.index)), b"") for one in ghosts}
    await liar.pause(5.0)
    await liar.propose(0)
    said = await liar.seal(roster, to=scene.honest, promises=joined(b"", pack_arrivals(ghosts, known)))
    assert "ok" not in said.values()


@pytest.mark.parametrize("attack", [two_rule, two_vouch, two_found, two_bring_others])
@pytest.mark.parametrize("n", [7, 16])
def test_two_that_collude_get_nothing_where_two_are_borne(n: int, attack: Any):
    async def models(what: Any) -> tuple[set[bytes], set[bytes], Scene]:
        scene = Scene(n, liars=2)
        liar = await scene.begin()
        other = Liar(scene, liar.others[-1])
        scene.honest.remove(other.name)
        lying = asyncio.create_task(what(scene, liar, other))
        async with asyncio.timeout(FAR):
            await scene.go_on(2)
        if lying.done():
            lying.result()
        lying.cancel()
        return scene.models(), {scene.people[name].record.lineage for name in scene.honest}, scene

    quiet = run_virtual(models(two_silent))
    found = run_virtual(models(attack))
    assert found[:2] == quiet[:2]
    assert len(found[0]) == 1
    assert attack is two_found or found[2].refused()[UNPROVEN] + found[2].refused()[GROUNDLESS] > 0
