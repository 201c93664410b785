"""Peers that lie: whatever one of them says, the others end on the model that they have without it, and count it."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from marfl.net.base import Parcel, PeerId
from marfl.protocol.commits import electors_of
from marfl.protocol.messages import (
    Decided,
    Endorse,
    Finish,
    Ruling,
)
from marfl.protocol.roster import Elector, Member, Record, brief, brief_record
from marfl.protocol.statements import Certificate, certificate
from marfl.protocol.transfer import UNPROVEN
from marfl.protocol.voting import GROUNDLESS
from stages.liars import (
    Liar,
    announce,
    fork,
    given,
    play,
    played,
    signed_by,
    without_lineage,
)

SIZES = pytest.mark.parametrize("n", [4, 7, 16])


# --- strangers and newcomers ---


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("own_lineage", [False, True])
@pytest.mark.parametrize(("n", "liars"), [(4, 1), (7, 0), (16, 1)])
def test_a_head_that_nobody_certified_is_not_followed(n: int, liars: int, own_lineage: bool, when: str):
    async def attack(liar: Liar) -> None:
        stranger = liar.swarm.network.join("stranger")
        state = liar.state(10**6)
        lineage = b"x" * 32 if own_lineage else liar.before.lineage
        roster = liar.roster(liar.others, iteration=10**6, lineage=lineage)
        record = Record(roster, state.hash, 10**9)

        async def sync(_: PeerId, __: Parcel) -> Parcel:
            return given(record, state)

        stranger.serve("sync", sync)
        await announce(stranger, record, liar.me.terms.digest)

    scene = play(attack, n, liars=liars, before=when == "before")
    assert scene.refused()[UNPROVEN] > 0


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("n", "liars", "length"), [(4, 1, 1), (4, 1, 30), (7, 0, 5), (16, 1, 5)])
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


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("length", [1, 30])
@SIZES
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

    play(attack, n)


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
        liar.swarm.network.crash(liar.name)

    play(attack, n)


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
    assert scene.record.lineage == without_lineage(n, 0)


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
        request = Endorse(liar.iteration, 0, brief(roster, liar.electors), state.hash, votes)
        signed = {peer: bytes(a.payload) for peer, a in (await liar.ask("endorse", request.parcel())).items()}
        given_away = {peer: vote for peer, vote in signed.items() if vote}
        assert not given_away
        proof = certificate(liar.electors, 0, given_away | {liar.name: liar.signed(roster, state.hash)})
        notice = Decided(liar.iteration, brief_record(record, liar.electors), (liar.name,), proof.encoded)
        await liar.ask("decided", notice.parcel())

    scene = play(attack, n)
    assert scene.refused()[GROUNDLESS] > 0


# --- attempts ---


@pytest.mark.parametrize("n", [4, 7])
def test_a_proposal_of_a_far_away_attempt_does_not_end_all_attempts(n: int):
    async def attack(liar: Liar) -> None:
        await liar.pause(5.0)
        rank = [elector.id for elector in liar.electors].index(liar.name)
        for power in (2**20, 2**40, 2**52, 2**53, 2**62):
            await liar.propose(power - power % n + rank)

    play(attack, n)


@pytest.mark.parametrize("n", [4, 7])
def test_a_refusal_that_names_a_far_away_attempt_does_not_end_all_attempts(n: int):
    async def attack(liar: Liar) -> None:
        async def answer(sender: PeerId, request: Parcel) -> Parcel:
            return replace(liar.me.voting.ack("refused"), attempt=2**62).parcel()

        liar.net.serve("propose", answer)

    play(attack, n, rank=2)
