"""Peers that lie: whatever one of them says, the others end on the model that they have without it, and count it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from marfl.net.base import NOT_ENTITLED, Parcel, PeerId
from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.ballot import BAD_ACK
from marfl.protocol.chain import Signer, Skip
from marfl.protocol.commits import electors_of
from marfl.protocol.member import BAD_VOTE, ELSEWHERE
from marfl.protocol.messages import (
    Ack,
    Committed,
    Decided,
    Endorse,
    Finish,
    Overtaken,
    Propose,
    Ready,
    Ruling,
    Sync,
    Vouch,
)
from marfl.protocol.readiness import IN_VAIN, OTHER_INDEX, UNSIGNED
from marfl.protocol.roster import Elector, Member, Record, brief, brief_record
from marfl.protocol.standing import OTHER_RESULT, UNPROVEN
from marfl.protocol.statements import (
    Certificate,
    Promise,
    SignedPromise,
    cast,
    certificate,
    lineage_after,
    link_of,
    pack_promises,
)
from marfl.protocol.transfer import BAD_ANSWER, EMPTY, WRONG_STATE
from marfl.protocol.voting import GROUNDLESS
from stages.liars import (
    FAR,
    Liar,
    Scene,
    announce,
    ask_all,
    fork,
    given,
    hop,
    packed,
    play,
    played,
    signed_by,
    takes_part,
    without,
)
from stages.virtual import Swarm

# --- strangers and newcomers ---


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(
    ("n", "liars", "own_lineage"), [(4, 1, False), (4, 1, True), (7, 0, True), (7, 0, False), (16, 1, False)]
)
def test_a_head_that_nobody_certified_is_not_followed(n: int, liars: int, own_lineage: bool, when: str):
    async def attack(liar: Liar) -> None:
        stranger = liar.swarm.network.join("stranger")
        state = liar.state(10**6)
        lineage = b"x" * 32 if own_lineage else liar.before.lineage
        roster = liar.roster(liar.others, iteration=10**6, lineage=lineage)
        record = Record(roster, state.hash)

        async def sync(_: PeerId, __: Parcel) -> Parcel:
            return given(record, state)

        stranger.serve("sync", sync)
        await announce(stranger, record, liar.me.terms.digest)

    scene = play(attack, n, liars=liars, before=when == "before")
    assert scene.refused("stranger")[UNPROVEN] > 0


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("n", "liars", "length"), [(4, 1, 1), (4, 1, 9), (7, 0, 3), (16, 1, 3)])
def test_a_lineage_that_strangers_found_among_themselves_is_not_followed(n: int, liars: int, length: int, when: str):
    async def attack(liar: Liar) -> None:
        nets = [liar.swarm.network.join(f"stranger{i}") for i in range(5)]
        theirs = fork(nets, liar.before, length)
        for net in nets:

            async def sync(_: PeerId, request: Parcel) -> Parcel:
                return given(theirs.head, theirs.states[-1], theirs.proof)

            net.serve("sync", sync)
            await announce(net, theirs.head, liar.me.terms.digest)

    play(attack, n, liars=liars, before=when == "before")


@pytest.mark.parametrize("iterations", [1, 3, 5])
@pytest.mark.parametrize("n", [4, 7])
def test_more_strangers_than_began_a_run_do_not_begin_it_again(n: int, iterations: int):
    """Nobody was named at the beginning: most of those who were expected began together."""

    async def scenario() -> None:
        swarm = Swarm(n, named=False, expected=n)
        for _ in range(iterations):
            await swarm.iterate()
        model = swarm.hashes()
        nets = [swarm.network.join(f"stranger{i}") for i in range(4 * n)]
        theirs, begin = fork(nets, swarm.record), link_of(swarm.record)

        async def sync(_: PeerId, request: Parcel) -> Parcel:
            asked = Sync.decode(request.header)
            place = [link for _, link in asked.links].index(begin)
            return given(theirs.head, theirs.states[-1], packed(theirs.hops, place), light=asked.light)

        for net in nets:
            net.serve("sync", sync)
            await announce(net, theirs.head, swarm.people["p0"].terms.digest)
        for me in swarm.people.values():
            assert await me.catch_up()
        assert swarm.hashes() == model

    run_virtual(scenario())


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("n", "length"), [(4, 1), (4, 20), (7, 9), (16, 9)])
def test_an_elector_that_forks_alone_is_not_followed_however_long_its_chain_is(n: int, length: int, when: str):
    async def attack(liar: Liar) -> None:
        theirs = fork([liar.net], liar.before, length, named=liar.electors)
        liar.donate(theirs.head, theirs.states[-1], theirs.proof)
        await liar.announce(theirs.head)

    play(attack, n, before=when == "before")


# --- a leader that says what was not decided ---


def rules(liar: Liar, record: Record, proof: bytes, only: int | None = None) -> None:
    """Answer every report (or those of the first few) with this verdict."""
    told: dict[PeerId, None] = {}

    async def answer(sender: PeerId, _: Parcel) -> Parcel:
        told[sender] = None
        if only is None or sender in [*told][:only]:
            return Ruling("commit", brief_record(record, liar.electors), (liar.name,), proof).parcel()
        return Ruling("retry", None, ()).parcel()

    liar.net.serve("finish", answer)


async def lead(liar: Liar, attempt: int = 0) -> None:
    """As an honest leader would: propose, and seal a roster of all others."""
    await liar.pause(5.0)
    await liar.propose(attempt)
    await liar.seal(liar.roster(liar.others, attempt), promises=liar.promises(attempt))


def forgeries(liar: Liar, record: Record) -> dict[str, bytes]:
    """What a liar may show instead of a certificate."""
    roster, other = record.roster, liar.others[0]
    assert roster is not None
    electors, mine = electors_of(liar.before, record), liar.signed(roster, record.hash)
    places = range(len(electors))
    places_of = {elector.id: place for place, elector in enumerate(electors)}
    twice = msgpack.packb([0, [places_of[liar.name]] * len(electors), mine * len(electors)])
    before = liar.me.standing.proofs.certificate(liar.before)
    return {
        "none": b"",
        "my own vote alone": liar.alone(record).encoded,
        "my signature in everybody's place": Certificate(0, tuple((place, mine) for place in places)).encoded,
        "my signature in another's place": Certificate(0, ((places_of[other], mine),)).encoded,
        "my signature many times": twice,
        "of the iteration before": before.encoded if before else b"?",
        "of another attempt": signed_by([liar.net], liar.before, record, attempt=3).encoded,
        "places that are none": Certificate(0, ((10**6, mine),)).encoded,
        "no bytes of one": b"\xc1",
    }


FORGED = [
    "none", "my own vote alone", "my signature in everybody's place", "my signature in another's place",
    "my signature many times", "of the iteration before", "of another attempt", "places that are none",
    "no bytes of one",
]  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
@pytest.mark.parametrize(("n", "liars"), [(4, 1), (7, 0)])
def test_a_verdict_without_a_quorum_s_signatures_is_not_believed(n: int, liars: int, what: str):
    async def attack(liar: Liar) -> None:
        record = liar.record_of(liar.roster(liar.others), liar.state().hash)
        liar.donate(record, liar.state())
        rules(liar, record, forgeries(liar, record)[what])
        await lead(liar)

    scene = play(attack, n, liars=liars)
    assert what == "none" or scene.refused()[UNPROVEN] > 0


@pytest.mark.parametrize("n", [4, 7])
def test_a_lineage_that_a_leader_founds_in_its_verdict_is_not_entered(n: int):
    async def attack(liar: Liar) -> None:
        theirs = fork([liar.net], liar.before, 1, named=liar.electors)
        liar.donate(theirs.head, theirs.states[-1], theirs.proof)
        rules(liar, theirs.head, theirs.certificates[0].encoded)
        await lead(liar)

    assert play(attack, n).refused()[ELSEWHERE] > 0


@pytest.mark.parametrize("half", [1, 2])
@pytest.mark.parametrize("n", [4, 7])
def test_who_is_told_that_its_own_result_is_decided_does_not_build_on_it_until_that_is_certain(n: int, half: int):
    """The liar says "commit" of what was computed rightly, to some, without a quorum, and falls silent."""

    async def attack(liar: Liar) -> None:
        hashes: list[bytes] = []

        async def answer(sender: PeerId, request: Parcel) -> Parcel:
            said = Finish.decode(request.header)
            if said.hash is None or len(hashes) >= half:
                return Ruling("retry", None, ()).parcel()
            hashes.append(said.hash)
            record = liar.record_of(liar.roster(liar.others), said.hash)
            return Ruling("commit", brief_record(record, liar.electors), (sender,)).parcel()

        liar.net.serve("finish", answer)
        await lead(liar)
        while len(hashes) < half:
            await liar.pause(0.01)
        await liar.pause(0.1)
        liar.swarm.network.crash(liar.name)

    assert play(attack, n).refused()[UNPROVEN] >= half


@pytest.mark.parametrize("n", [4, 7])
def test_two_rosters_in_one_attempt_decide_nothing_twice(n: int):
    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        half = len(liar.others) // 2
        for some in (liar.others[:half], liar.others[half:]):
            await liar.seal(liar.roster(some))
            await liar.seal(liar.roster(some, exchange="grid"), to=some)

    scene = played(attack, n)
    assert len(scene.models()) == 1
    assert len({scene.people[name].history[2].hash for name in scene.honest}) == 1
    assert len({scene.people[name].record.lineage for name in scene.honest}) == 1
    # Of 4 electors all others would have to vote, once the liar is out; who voted for its first roster may not.
    assert n == 4 or scene.record.lineage == without(n, 0)[1]
    assert all(liar_of(scene) in scene.people[name].standing.banned for name in scene.honest)


def liar_of(scene: Scene) -> PeerId:
    assert scene.liar is not None
    return scene.liar.name


# --- rosters that no honest leader seals ---


def crooked(liar: Liar) -> dict[str, dict[str, object]]:
    """What a leader may change in a roster."""
    everybody = liar.roster(liar.others).members
    me = next(elector for elector in liar.electors if elector.id == liar.name)
    heavy = tuple(replace_weight(member, 1e-3) for member in everybody)
    return {
        "groups of nobody": {"group_size": 0},
        "groups of another size": {"group_size": 2},
        "weights that are not the members'": {"members": heavy},
        "weights out of bounds": {"members": tuple(replace_weight(member, 1e30) for member in everybody)},
        "a voter many times": {"witnesses": (me,) * 9},
        "a member that witnesses": {"witnesses": (me, *(Elector(m.id, m.index) for m in everybody))},
        "electors of its own": {"electors": (me,)},
        "another layout": {"layout": b"z" * 32},
        "another exchange": {"exchange": "none such"},
        "another run": {"run": "other"},
        "another base": {"base": b"b" * 32},
    }


def replace_weight(member: Member, weight: float) -> Member:
    return member._replace(weight=weight)


CROOKED = [
    "groups of nobody", "groups of another size", "weights that are not the members'", "weights out of bounds",
    "a voter many times", "a member that witnesses", "electors of its own", "another layout", "another exchange",
    "another run", "another base",
]  # fmt: skip


@pytest.mark.parametrize("what", CROOKED)
def test_a_roster_that_no_honest_leader_seals_is_not_begun(what: str):
    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        roster = replace(liar.roster(liar.others), **crooked(liar)[what])
        said = await liar.seal(roster, to=liar.others)
        assert "ok" not in said.values(), said

    play(attack, 4)


@pytest.mark.parametrize("channel", ["endorse", "seal"])
@pytest.mark.parametrize("n", [4, 7])
def test_a_leader_that_names_itself_as_the_only_member_replaces_no_model_of_those_who_bring_something(
    n: int, channel: str
):
    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        roster, state = liar.roster([liar.name]), liar.state()
        record = liar.record_of(roster, state.hash)
        liar.donate(record, state)
        members = tuple(Elector(m.id, m.index) for m in roster.members)
        votes = certificate(members, 0, {liar.name: liar.signed(roster, state.hash)}).encoded
        if channel == "seal":
            said = await liar.seal(roster, to=liar.others, adopt=state.hash, holders=(liar.name,), votes=votes)
            assert "ok" not in said.values()
            return
        request = Endorse(
            liar.iteration, 0, brief(roster, liar.electors), state.hash, votes, signature=liar.seal_of(roster, 0)
        )
        signed = {peer: bytes(a.payload) for peer, a in (await liar.ask("endorse", request.parcel())).items()}
        given_away = {peer: vote for peer, vote in signed.items() if vote}
        assert not given_away
        proof = certificate(liar.electors, 0, given_away | {liar.name: liar.signed(roster, state.hash)})
        notice = Decided(liar.iteration, brief_record(record, liar.electors), (liar.name,), proof.encoded)
        await liar.ask("decided", notice.parcel())

    scene = play(attack, n)
    assert scene.refused()[GROUNDLESS] > 0


@pytest.mark.parametrize("n", [4, 7])
def test_a_hash_that_one_member_alone_shows_is_not_endorsed(n: int):
    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        await liar.propose(0)
        roster, state = liar.roster([liar.name, liar.others[0]]), liar.state()
        members = tuple(Elector(m.id, m.index) for m in roster.members)
        votes = certificate(members, 0, {liar.name: liar.signed(roster, state.hash)}).encoded
        asked = Endorse(
            liar.iteration, 0, brief(roster, liar.electors), state.hash, votes, signature=liar.seal_of(roster, 0)
        )
        assert not any(answer.payload for answer in (await liar.ask("endorse", asked.parcel())).values())

    assert play(attack, n).refused()[GROUNDLESS] > 0


@pytest.mark.parametrize("n", [4, 7])
def test_a_certificate_needs_a_quorum_that_bears_liars(n: int):
    """A majority that would do without liars says so of a state of its own: too few, where one may lie."""

    async def scenario() -> None:
        scene = Scene(n)
        liar = await scene.begin()
        victim, *some = liar.others
        few = [liar.net, *(scene.people[name].net for name in some[: n // 2 - 1])]  # with the first elector
        record = liar.record_of(liar.roster(liar.others), liar.state().hash)
        standing = scene.people[victim].standing
        instance = standing.enter()
        proof = signed_by(few, liar.before, record).encoded
        assert not scene.people[victim].verdicts.take_over(instance, liar.name, record, (), proof)
        assert standing.record == liar.before
        assert standing.net.refused[UNPROVEN] == 1

    run_virtual(scenario())


# --- attempts ---


@pytest.mark.parametrize("n", [4, 7])
def test_a_proposal_of_a_far_away_attempt_does_not_end_all_attempts(n: int):
    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        rank = [elector.id for elector in liar.electors].index(liar.name)
        for power in (2**20, 2**40, 2**52, 2**53, 2**62):
            await liar.propose(power - power % n + rank)

    assert play(attack, n).refused()[NOT_ENTITLED] > 0


@pytest.mark.parametrize("n", [4, 7])
def test_a_refusal_that_names_a_far_away_attempt_does_not_end_all_attempts(n: int):
    async def attack(liar: Liar) -> None:
        async def answer(sender: PeerId, request: Parcel) -> Parcel:
            return replace(liar.me.voting.ack("refused"), attempt=2**62).parcel()

        liar.net.serve("propose", answer)

    play(attack, n, rank=2)


# --- a leader of a later attempt ---


def deaf(channel: str, source: PeerId, seconds: float) -> Callable[[VirtualNetwork, Departure, Delivery], None]:
    """For so long nobody hears what one peer answers on a channel."""

    def intercept(network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "answer" and event.source == source and event.tag.channel == channel and network.time < seconds:
            delivery.copies = 0

    return intercept


async def until_they_voted(liar: Liar) -> None:
    """The first leader decides, but nobody hears of it: the others have voted, and wait."""
    first = liar.electors[0].id
    network = liar.swarm.network
    network.intercept = deaf("finish", first, network.time + 20.0)
    while not all(_vote_of(liar, peer) for peer in liar.others):
        await liar.pause(0.1)


def _vote_of(liar: Liar, peer: PeerId) -> bytes | None:
    standing = liar.scene.people[peer].standing
    if standing.record.iteration >= liar.iteration:
        return standing.record.hash
    instance = standing.instance
    return instance.accepted.hash if instance and instance.accepted and instance.base == liar.before.hash else None


UNJUSTIFIED = [
    "no promises", "too few", "forged", "of another attempt", "a subset", "another hash is adopted",
    "a hash of this attempt is kept", "an endorsement of an invented hash", "an endorsement of another roster",
]  # fmt: skip


@pytest.mark.parametrize("what", UNJUSTIFIED)
@pytest.mark.parametrize("n", [4, 7])
def test_a_later_attempt_that_its_promises_do_not_justify_gets_no_vote(n: int, what: str):
    got: list[str] = []

    async def attack(liar: Liar) -> None:
        await until_they_voted(liar)
        attempt, invented = 1, liar.state()
        acks = await liar.propose(attempt)
        promised = [peer for peer, ack in acks.items() if ack.status == "ack"]
        if what == "of another attempt":
            attempt += n
            await liar.propose(attempt)
        roster = liar.roster(liar.others, attempt)
        shown = {
            "no promises": b"",
            "too few": liar.promises(1, promised[:1]),
            "forged": forged_promises(liar, attempt),
            "a subset": liar.promises(1, promised[: n // 2]),
            "of another attempt": liar.promises(1),
        }.get(what, liar.promises(1))
        record = liar.record_of(roster, invented.hash)
        liar.donate(record, invented)
        votes = certificate(roster.voters, attempt, {liar.name: liar.signed(roster, invented.hash)}).encoded
        if "endorsement" in what:
            old = liar.roster(liar.others, 0 if "another roster" in what else attempt)
            named, seal = brief(old, liar.electors), liar.seal_of(old, attempt, shown)
            asked = Endorse(liar.iteration, attempt, named, invented.hash, votes, shown, seal)
            got.extend(bytes(each.payload).hex() for each in (await liar.ask("endorse", asked.parcel())).values())
        elif "hash" in what:
            old = liar.roster(liar.others, attempt if "kept" in what else 0)
            said = {"adopt": invented.hash, "holders": (liar.name,), "promises": shown, "votes": votes}
            got.extend((await liar.seal(old, attempt, **said)).values())
        else:
            got.extend((await liar.seal(roster, promises=shown)).values())

    scene = play(attack, n, rank=1)
    assert {*got} <= {"refused", ""}
    assert got
    assert scene.refused()[GROUNDLESS] > 0


def forged_promises(liar: Liar, attempt: int) -> bytes:
    """Everybody promises, says the liar, and signs for all."""
    blank = Promise(attempt, -1, b"", b"", False, -1, b"")
    decision = liar.decision
    signature = liar.net.sign(blank.statement(decision))
    return pack_promises([SignedPromise(place, blank, signature) for place in range(len(liar.electors))])


# --- an elector's votes ---


def acks(liar: Liar, **changes: Any) -> None:
    """Give acks with some fields changed."""
    honest = liar.me.voting.answer_propose

    async def answer(sender: PeerId, request: Parcel) -> Parcel:
        answer = await honest(sender, request)
        return replace(Ack.decode(answer.header), **changes).parcel(answer.payload)

    liar.net.serve("propose", answer)


@pytest.mark.parametrize("what", ["far away", "now", "of another decision", "too heavy", "weightless index"])
@pytest.mark.parametrize("n", [4, 7])
def test_an_ack_with_a_vote_that_was_never_cast_holds_nobody_up(n: int, what: str):
    async def attack(liar: Liar) -> None:
        when = 10**9 if what == "far away" else 0
        roster = liar.roster([liar.name], iteration=liar.iteration + (what == "of another decision"))
        invented = {"accepted": roster.encoded, "accepted_hash": b"i" * 32, "accepted_attempt": when, "holds": True}
        others: dict[str, dict[str, Any]] = {"too heavy": {"weight": 1e9}, "weightless index": {"index": 2**52}}
        acks(liar, **others.get(what, invented))

    scene = play(attack, n, rank=2)
    why = {"weightless index": OTHER_INDEX}.get(what, BAD_ACK)
    assert what == "now" or scene.refused()[why] > 0


async def first_leader_dies(liar: Liar) -> None:
    await liar.pause(0.1)
    liar.scene.honest.remove(liar.electors[0].id)
    liar.swarm.network.crash(liar.electors[0].id)


@pytest.mark.parametrize("signature", [b"", b"s" * 64])
def test_an_ack_of_a_later_attempt_counts_only_with_its_elector_s_signature(signature: bytes):
    async def attack(liar: Liar) -> None:
        acks(liar, signature=signature)
        await first_leader_dies(liar)

    scene = play(attack, 7, rank=3, quiet=first_leader_dies)
    assert scene.refused()[BAD_ACK] > 0


@pytest.mark.parametrize("what", ["another key", "no signature", "two hashes", "another hash"])
@pytest.mark.parametrize("n", [4, 7])
def test_a_member_that_votes_wrongly_or_twice_is_not_counted(n: int, what: str):
    async def attack(liar: Liar) -> None:
        stranger = liar.swarm.network.join("stranger")
        call, verdicts = liar.net.call, liar.me.verdicts

        async def lies(to: PeerId, channel: str, parcel: Parcel, **how: Any) -> Parcel:
            if channel == "finish" and (said := Finish.decode(parcel.header)).hash:
                roster = liar.me.instance.accepted.roster
                vote = liar.me.instance.vote(roster, said.attempt, b"i" * 32)
                invented = replace(said, hash=b"i" * 32, signature=liar.net.sign(vote.statement))
                if what == "two hashes":
                    await call(to, channel, invented.parcel(), **how)
                elif what == "another hash":
                    parcel = invented.parcel()
                elif what == "no signature":
                    parcel = replace(said, signature=b"").parcel()
            return await call(to, channel, parcel, **how)

        liar.net.call = lies
        if what == "another key":
            verdicts._signed = lambda *_: stranger.sign(b"d" * 32)
        await takes_part(liar)

    if what == "two hashes":  # it is out before the second iteration: the others go on without it
        scene = played(attack, n, rank=2)
        assert len(scene.models()) == 1
        assert all(liar_of(scene) in scene.people[name].standing.banned for name in scene.honest)
        return
    scene = play(attack, n, rank=2, quiet=takes_part)
    assert scene.refused()[OTHER_RESULT if what == "another hash" else BAD_VOTE] > 0


# --- what is said to be elsewhere ---


@pytest.mark.parametrize("what", ["decided", "overtaken", "propose", "behind", "ready", "a stranger's word"])
@pytest.mark.parametrize("n", [4, 7])
def test_nobody_leaves_its_iteration_for_somebody_s_word(n: int, what: str):
    async def attack(liar: Liar) -> None:
        state = liar.state()
        record = liar.record_of(liar.roster(liar.others), state.hash)
        named = brief_record(record, liar.electors)
        liar.donate(record, state)
        terms = liar.me.terms.digest
        later = Ready(liar.iteration + 5, state.hash, 0, 1.0, b"l" * 32, "training", 0, terms)
        said = {
            "decided": ("decided", Decided(liar.iteration, named, (liar.name,), b"").parcel()),
            "overtaken": ("overtaken", Overtaken(state.hash, 10**9).parcel()),
            "a stranger's word": ("overtaken", Overtaken(state.hash, 10**9, "stranger").parcel()),
            "ready": ("ready", later.parcel()),
        }
        if what == "behind":
            acks(liar, status="behind", record=record.encoded)
            return
        for _ in range(10):
            await liar.pause(2.0)
            if what == "propose":
                await liar.propose(0, base=state.hash, iteration=liar.iteration + 1)
            else:
                await liar.ask(*said[what])

    assert play(attack, n, rank=1).refused()[EMPTY if what == "a stranger's word" else UNPROVEN] > 0


@pytest.mark.parametrize("base", ["made up", "of a commit that all have"])
@pytest.mark.parametrize("n", [4, 7])
def test_who_claims_to_be_ahead_and_shows_where_it_is_has_said_an_empty_word(n: int, base: str):
    async def attack(liar: Liar) -> None:
        digest = liar.before.hash if base == "of a commit that all have" else b"m" * 32
        said = Ready(liar.iteration + 3, digest, 0, 1.0, b"l" * 32, "training", 0, liar.me.terms.digest)
        await liar.ask("ready", said.parcel())

    assert play(attack, n, rank=1).refused()[EMPTY] > 0


# --- proofs and states ---


PROOFS = ["truncated", "huge", "of another run", "of an old record", "from nowhere", "not even a row", "of another"]


def bad_proof(liar: Liar, what: str) -> tuple[Record, bytes]:
    """A record that a liar shows, and its proof."""
    state = liar.state()
    record = liar.record_of(liar.roster(liar.others), state.hash)
    mine = packed([hop(liar.before, record, liar.alone(record))])
    other = replace(liar.roster(liar.others), run="another")
    elsewhere = liar.record_of(other, state.hash)
    old = liar.me.standing.proofs.proof([Committed(0, link_of(liar.swarm.record))])
    assert old
    return {
        "truncated": (record, mine[: len(mine) // 2]),
        "huge": (record, packed([hop(liar.before, record, liar.alone(record))] * 2000)),
        "of another run": (elsewhere, packed([hop(liar.before, elsewhere, liar.alone(elsewhere))])),
        "of an old record": (record, old),
        "from nowhere": (record, packed([hop(liar.before, record, liar.alone(record))], place=10**6)),
        "not even a row": (record, b"\xc1" * 100),
        "of another": (record, packed([hop(liar.before, liar.before, liar.alone(record))])),
    }[what]


@pytest.mark.parametrize("what", PROOFS)
@pytest.mark.parametrize(("n", "liars"), [(4, 1), (7, 0)])
def test_a_proof_that_proves_nothing_moves_nobody(n: int, liars: int, what: str):
    async def attack(liar: Liar) -> None:
        record, proof = bad_proof(liar, what)
        liar.donate(record, liar.state(), proof)
        await liar.announce(record, iteration=10**6)
        for _ in range(3):
            await liar.ask("overtaken", Overtaken(record.hash, 10**9).parcel())
            await liar.ask("decided", Decided(liar.iteration, record.encoded, (liar.name,), proof).parcel())
            await liar.pause(2.0)

    assert play(attack, n, rank=1, liars=liars).refused()[UNPROVEN] > 0


@pytest.mark.parametrize("what", ["", "a proof that ends with a skip", "another state", "another roster", "founders"])
def test_who_was_away_is_given_the_certified_record_or_nothing(what: str):
    """It asks the liar first, and the honest after that."""

    async def scenario() -> None:
        scene = Scene(5, 1)
        liar = await scene.begin()
        away = scene.honest[0]
        me = scene.people[away]
        scene.swarm.network.partition({away: 1})
        scene.honest[0] = liar.name  # it does as the others do, for now
        await scene.go_on(1)
        earlier = liar.me.state
        await scene.go_on(1)
        scene.honest[0] = away
        scene.swarm.network.heal()
        theirs = liar.me.standing
        before, newest = theirs.history[2], theirs.record
        proof = theirs.proofs.proof([Committed(1, link_of(liar.before))])
        assert proof
        if what == "a proof that ends with a skip":
            certificate = theirs.proofs.certificate(newest)
            said = cast(newest.roster, certificate.attempt, before, newest.hash)
            electors = electors_of(before, newest)
            signed = [Signer(electors[place], place, signature) for place, signature in certificate.signatures]
            signed = [each for each in signed if each.elector in liar.before.electors]
            liar.donate(before, earlier, packed([Skip(said, tuple(signed))]))
        elif what == "another state":
            liar.donate(newest, liar.state(), proof)
        elif what == "another roster":
            forged = replace(newest, roster=replace(newest.roster, witnesses=(Elector("stranger", 9),)))
            liar.donate(forged, theirs.state, proof)
        elif what == "founders":
            liar.donate(replace(newest, founders=(Elector("stranger", 9),)), theirs.state, proof)
        await liar.announce(newest, iteration=10**6)
        async with asyncio.timeout(FAR):
            await scene.go_on(2)
        assert len(scene.models()) == 1
        assert {scene.people[name].record.lineage for name in scene.honest} == {newest.lineage}
        found = {"": None, "another state": WRONG_STATE, "founders": BAD_ANSWER}.get(what, UNPROVEN)
        assert found is None or me.net.refused.named()[liar.name][found] > 0

    run_virtual(scenario())


def test_who_gives_a_state_does_not_say_who_votes_next():
    """A peer that knows the decision and lacks its data is given them with another roster."""

    async def scenario() -> None:
        scene = Scene(4, 1)
        liar = await scene.begin()
        await asyncio.gather(scene.go_on(1), takes_part(liar))
        me, theirs = scene.people[scene.honest[0]], liar.me.standing
        mine = me.record
        forged = replace(mine, roster=replace(mine.roster, members=mine.roster.members[:1], witnesses=()))
        liar.donate(forged, theirs.state)
        caught = await me.transfer.fetch([liar.name], mine.hash)
        me.standing.install(caught)
        assert me.record == mine

    run_virtual(scenario())


@pytest.mark.parametrize("strangers", [40])
def test_strangers_heads_do_not_hide_those_of_electors(strangers: int):
    async def scenario() -> None:
        scene = Scene(4, 1)
        liar = await scene.begin()
        away = scene.honest.pop(0)
        scene.swarm.network.partition({away: 1})
        for each in range(strangers):
            net = scene.swarm.network.join(f"stranger{each}")
            await announce(net, liar.before, liar.me.terms.digest, iteration=10**6, hash=bytes([each]) * 32)
        await asyncio.gather(scene.go_on(2), takes_part(liar))
        scene.swarm.network.heal()
        me = scene.people[away]
        first, _ = (await me.standing.heads())[0]
        assert me.standing.is_elector(first)
        assert await me.catch_up()
        assert me.record == scene.record

    run_virtual(scenario())


# --- more of what somebody would gain by ---


def test_strangers_that_found_lineages_while_all_train_are_not_followed():
    async def scenario() -> None:
        scene = Scene(4, 1)
        liar = await scene.begin()
        stranger = scene.swarm.network.join("stranger")
        record, terms = liar.before, liar.me.terms.digest
        lineage = lineage_after(link_of(record), b"mine")
        proposal = Propose(record.iteration + 1, 0, -1, lineage, record.hash, True, 0, terms, True)
        said = set()
        for _ in range(5):  # all train for long
            answers = await ask_all(stranger, "propose", proposal.parcel(), scene.honest)
            said |= {Ack.decode(answer.header).status for answer in answers.values()}
            await liar.pause(20.0)
        assert said == {"refused"}
        assert scene.refused("stranger")[NOT_ENTITLED] > 0
        async with asyncio.timeout(FAR):
            await scene.go_on(2)
        assert {scene.people[name].record.lineage for name in scene.honest} == {record.lineage}

    run_virtual(scenario())


@pytest.mark.parametrize("n", [4, 7])
def test_an_elector_that_vouches_for_strangers_who_never_come_holds_the_others_up_for_a_while_only(n: int):
    async def attack(liar: Liar) -> None:
        terms, first = liar.me.terms.digest, liar.electors[0].id
        for each in range(20):
            name = f"stranger{each}"
            net = liar.swarm.network.join(name)
            said = Ready(liar.iteration, liar.before.hash, 0, 1.0, b"l" * 32, "training", 0, terms)
            await liar.ask("vouch", Vouch(name, liar.before.hash).parcel(), [first])
            await ask_all(net, "ready", said.parcel(), [first])

    assert play(attack, n, rank=1).refused()[IN_VAIN] > 0


@pytest.mark.parametrize("n", [4, 7])
def test_a_goodbye_is_its_sender_s_alone(n: int):
    async def attack(liar: Liar) -> None:
        terms = liar.me.terms.digest
        for index in range(n):
            said = Ready(liar.iteration, liar.before.hash, index, 1.0, b"l" * 32, "left", 0, terms)
            await liar.ask("ready", said.parcel())
            await liar.net.announce(f"ready/{liar.iteration}/test", said.encoded, ttl=1e6)

    scene = play(attack, n, rank=1)
    assert not any(scene.people[name].discarded for name in scene.honest)
    assert scene.refused()[UNSIGNED] > scene.refused()[OTHER_INDEX] > 0


@pytest.mark.parametrize("n", [4, 7])
def test_what_was_said_in_an_earlier_iteration_says_nothing_in_a_later_one(n: int):
    heard: list[tuple[PeerId, str, Parcel]] = []

    def note(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if event.op == "call":
            heard.append((event.dest, event.tag.channel, delivery.parcel))

    async def attack(liar: Liar) -> None:
        liar.swarm.network.intercept = note
        while liar.scene.record.iteration < liar.iteration:
            await liar.pause(0.1)
        for dest, channel, parcel in heard[:]:
            if dest != liar.name:
                await liar.ask(channel, parcel, [dest])

    assert play(attack, n, rank=1).refused()[OTHER_INDEX] > 0


@pytest.mark.parametrize("n", [4, 7])
def test_who_says_that_everything_is_settled_settles_nothing_alone(n: int):
    """The liar leads, says "commit" of what it alone and one other voted for, and vouches for it again and again."""

    async def attack(liar: Liar) -> None:
        done: list[bytes] = []

        async def answer(sender: PeerId, request: Parcel) -> Parcel:
            said = Finish.decode(request.header)
            if said.hash is None or (done and done[0] != sender.encode()):
                return Ruling("retry", None, ()).parcel()
            done.append(sender.encode())
            record = liar.record_of(liar.roster(liar.others), said.hash)
            liar.donate(record, liar.state(), settled=True)
            return Ruling("commit", brief_record(record, liar.electors), (sender,)).parcel()

        liar.net.serve("finish", answer)
        await lead(liar)
        for _ in range(10):
            await liar.propose(0, settled=True)
            await liar.pause(1.0)

    play(attack, n)


@pytest.mark.parametrize("n", [4, 7])
def test_an_elector_that_votes_in_two_lineages_wins_for_neither(n: int):
    async def attack(liar: Liar) -> None:
        theirs = fork([liar.net], liar.before, 3, named=liar.electors)
        serve, answer = liar.net.serve, liar.me.transfer.answer_sync

        async def either(sender: PeerId, request: Parcel) -> Parcel:
            if len(sender) % 2:
                return await answer(sender, request)
            return given(theirs.head, theirs.states[-1], theirs.proof, light=Sync.decode(request.header).light)

        serve("sync", either)
        await liar.announce(theirs.head)
        await takes_part(liar)

    play(attack, n, rank=2, quiet=takes_part)


@pytest.mark.parametrize("n", [4, 7])
def test_an_iteration_that_goes_by_changes_no_model_whatever_its_leader_says(n: int):
    """Nobody brings anything; the leader has the others vote for a state of its own."""

    async def scenario() -> None:
        scene = Scene(n)
        liar = await scene.begin()
        before = liar.me.state.hash
        going = [
            asyncio.create_task(scene.people[name].run_iteration(None)) for name in scene.honest
        ]
        await liar.pause(5.0)
        await liar.propose(0)
        state, me = liar.state(), next(e for e in liar.electors if e.id == liar.name)
        roster = replace(liar.roster([liar.name]), exchange="none", members=(Member(me.id, me.index, 0.0),))
        votes = certificate((me,), 0, {liar.name: liar.signed(roster, state.hash)}).encoded
        liar.donate(liar.record_of(roster, state.hash), state)
        asked = Endorse(
            liar.iteration, 0, brief(roster, liar.electors), state.hash, votes, signature=liar.seal_of(roster, 0)
        )
        assert not any(answer.payload for answer in (await liar.ask("endorse", asked.parcel())).values())
        said = await liar.seal(roster, to=liar.others, adopt=state.hash, holders=(liar.name,), votes=votes)
        assert "ok" not in said.values()
        scene.swarm.network.crash(liar.name)
        await asyncio.wait(going)
        models = {scene.people[name].state.vectors["theta"].sum().item() for name in scene.honest}
        assert models == {liar.me.state.vectors["theta"].sum().item()}
        assert before == liar.before.hash
        assert scene.refused()[GROUNDLESS] > 0

    run_virtual(scenario())
