"""Liars that want to decide alone: made-up peers in rosters, many names, electors whose votes are taken away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marfl.errors import InputError, WireError
from marfl.net.base import Net
from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.peer.state_dir import VoteLog
from marfl.peer.voter import VoteDiary, keep_votes
from marfl.protocol.ballot import BAD_ACK
from marfl.protocol.messages import Ack, Endorse
from marfl.protocol.participant import Participant
from marfl.protocol.roster import (
    DecisionId,
    Elector,
    Member,
    Record,
    Roster,
    Staying,
    brief,
    decode_roster,
    ranked,
    unbrief,
)
from marfl.protocol.seniority import (
    Arrival,
    arrival,
    arriving,
    graded,
    hasty,
    joined,
    juniors_after,
    pack_arrivals,
    parted,
    unpack_arrivals,
)
from marfl.protocol.statements import certificate, lineage_after, link_of
from marfl.protocol.voting import GROUNDLESS
from stages.liars import FAR, Liar, Scene, hop, packed, play, signed_by, takes_part
from stages.virtual import LAYOUT, Swarm

# --- the rules ---

OLD = tuple(Elector(f"p{i}", i) for i in range(4))


def roster_of(members: Collection[str], witnesses: Collection[str] = (), **changes: Any) -> Roster:
    """A roster of peers whose names end with their index."""
    people = tuple(Member(name, int(name[1:]), 1.0) for name in members)
    rest = tuple(Elector(name, int(name[1:])) for name in witnesses)
    whole = Roster("test", 1, 0, bytes(32), bytes(32), LAYOUT, "full", 3, people, rest, (), ())
    return replace(whole, **changes)


BEGIN = Record(None, bytes(32), OLD)
FOUR = [elector.id for elector in OLD]
FEWER = roster_of([*FOUR[:3], "n9"])


@pytest.mark.parametrize(
    ("roster", "seniority", "juniors"),
    [
        (roster_of(FOUR), 2, ()),
        (roster_of([*FOUR, "n9"]), 2, (("n9", 1),)),
        (roster_of([*FOUR, "n9"]), 1, ()),
        (roster_of(FOUR, ["n9"]), 1, (("n9", 0),)),  # it only votes: that is no contribution
        (roster_of(FOUR[:1], [*FOUR[1:], "n9"]), 2, (("n9", 0),)),  # electors stay so whatever they bring
        (roster_of([*FOUR, "n9"], exchange="none"), 1, (("n9", 0),)),  # nothing was summed
        (FEWER, 2, ()),  # fewer than four would vote, and none of them may lie
        (roster_of(FOUR[:3], ["n9"]), 2, (("n9", 0),)),
        (roster_of([*FOUR[:3], "n8", "n9"]), 2, ()),
    ],
)
def test_who_does_not_vote_yet_follows_from_the_roster(roster: Roster, seniority: int, juniors: tuple[Any, ...]):
    assert juniors_after(BEGIN, OLD, roster, seniority, 0) == juniors
    whole = graded(BEGIN, OLD, roster, seniority, 0)
    assert {elector.id for elector in whole.voters} == {one.id for one in roster.party} - {p for p, _ in juniors}
    assert decode_roster(whole.encoded) == whole == unbrief(brief(whole, OLD), OLD)


def missed(*names: str, by: str = "p0") -> tuple[Staying, ...]:
    return tuple(Staying(name, int(name[1:]), by) for name in names)


@pytest.mark.parametrize(
    ("roster", "liars", "stays"),
    [
        (roster_of(FOUR), 1, ()),
        (roster_of(FOUR[:3]), 1, missed("p3")),  # of three none may lie: one leader does not bring it to that
        (roster_of(FOUR[:3]), 0, ()),  # nor of four
        (roster_of([*FOUR[:3], "n9"]), 1, missed("p3")),  # and what it brings instead does not vote yet
        (roster_of(FOUR[:3], attempt=2), 1, missed("p3", by="p2")),  # who led is known by the attempt
        (roster_of(FOUR[:3], electors=OLD[:3]), 1, ()),  # who founds a lineage names its electors
    ],
)
def test_electors_that_one_leader_leaves_out_stay_where_fewer_liars_would_be_borne(
    roster: Roster, liars: int, stays: tuple[Staying, ...]
):
    whole = graded(BEGIN, OLD, roster, 2, liars)
    assert whole.stays == stays
    assert whole.next_electors == (*whole.voters, *(Elector(one.id, one.index) for one in stays))
    assert decode_roster(whole.encoded) == whole == unbrief(brief(whole, OLD), OLD)


@pytest.mark.parametrize(("attempt", "left"), [(0, 4), (1, 3), (3, 3), (4, 4)])
def test_a_second_leader_that_misses_somebody_is_enough_and_the_same_one_again_is_not(attempt: int, left: int):
    first = graded(BEGIN, OLD, roster_of(FOUR[:3]), 2, 1)
    record = BEGIN.after(first, bytes(32))
    second = graded(record, record.electors, roster_of(FOUR[:3], iteration=2, attempt=attempt), 2, 1)
    assert len(second.next_electors) == left


def test_of_four_the_one_that_died_is_an_elector_until_two_leaders_have_missed_it():
    async def scenario() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        swarm.network.crash("p3")
        kept = []
        while not kept or kept[-1] > 3:
            outcomes = await swarm.iterate()
            assert {outcome.status for outcome in outcomes.values()} == {"committed"}
            kept.append(len(swarm.people["p0"].record.electors))
            assert len(kept) < 8
        assert kept[0] == 4

    run_virtual(scenario())


def test_who_votes_early_because_few_seniors_are_left_is_named():
    assert hasty(BEGIN, graded(BEGIN, OLD, FEWER, 2, 0), 2) == ("n9",)
    assert hasty(BEGIN, graded(BEGIN, OLD, roster_of([*FOUR, "n9"]), 2, 0), 2) == ()
    assert hasty(BEGIN, graded(BEGIN, OLD, roster_of([*FOUR, "n9"]), 1, 0), 1) == ()

    async def scenario() -> None:
        swarm = Swarm(3)
        await swarm.iterate()
        await joins(swarm, "n9", 9)
        outcomes = await swarm.iterate()
        assert {outcome.hasty for outcome in outcomes.values()} == {("n9",)}

    run_virtual(scenario())


def test_who_was_missing_in_between_begins_again():
    first = graded(BEGIN, OLD, roster_of([*FOUR, "n8", "n9"]), 3, 0)
    record = BEGIN.after(first, b"1" * 32)
    second = graded(record, record.electors, roster_of([*FOUR, "n8"], ["n7"], iteration=2), 3, 0)
    assert second.juniors == (("n8", 2), ("n7", 0))
    record = record.after(second, b"2" * 32)
    third = graded(record, record.electors, roster_of([*FOUR, "n9"], ["n8"], iteration=3), 3, 0)
    assert third.juniors == (("n9", 1), ("n8", 2))  # who only votes keeps what it has
    record = record.after(third, b"3" * 32)
    assert graded(record, record.electors, roster_of([*FOUR, "n8"], iteration=4), 3, 0).juniors == ()


@pytest.mark.parametrize(
    "juniors", [(("n9", 0),), (("p0", 0), ("p0", 0)), tuple((peer, 0) for peer in FOUR), (("p0", -1),)]
)
def test_a_roster_with_juniors_that_cannot_be_is_not_read(juniors: tuple[Any, ...]):
    with pytest.raises(WireError):
        decode_roster(roster_of(FOUR, juniors=juniors).encoded)


@pytest.mark.parametrize("promises", [b"", b"\x90", b"p" * 100])
def test_what_a_leader_shows_is_parted_again(promises: bytes):
    wanted = (Elector("n8", 8), Elector("n9", 9))
    known = {"n8": Arrival(b"s" * 64, b""), "n9": Arrival(b"t" * 64, b"token")}
    packed = pack_arrivals(wanted, known)
    assert parted(joined(promises, packed)) == (promises, packed)
    assert unpack_arrivals(packed, wanted) == known
    assert joined(promises, b"") == promises
    for bad in (b"\xc1", b"\xc1\x00\x00\x01\x00", b"\xc1\xff\xff\xff\xff" + packed):
        with pytest.raises(WireError):
            unpack_arrivals(parted(bad)[1], wanted)


# --- rosters with made-up peers ---


def with_witnesses(liar: Liar, sybils: Collection[Elector], **changes: Any) -> Roster:
    roster = liar.roster(liar.others)
    return replace(roster, witnesses=(*roster.witnesses, *sybils), **changes)


def arrivals_of(liar: Liar, roster: Roster, nets: dict[str, Net], **others: Any) -> bytes:
    """What these sign for a roster's newcomers, as an ack would bring it."""
    decision = DecisionId(roster.run, roster.iteration, link_of(liar.before), roster.lineage)
    attempt, shift = others.get("attempt", roster.attempt), others.get("shift", 0)
    wanted = arriving(liar.electors, roster)
    known = {
        one.id: Arrival(nets[one.id].sign(arrival(decision, attempt, one.index + shift)), others.get("token", b""))
        for one in wanted
    }
    return pack_arrivals(wanted, known)


MADE_UP = [
    "without a word", "signed by the leader", "of another attempt", "of another place", "too few", "twice as heavy",
    "as electors at once", "with commits that never were", "instead of an elector", "and one is nobody's",
]  # fmt: skip


def made_up(liar: Liar, what: str) -> tuple[Roster, bytes]:
    """A roster with many peers of the liar's own, and what it shows for them."""
    sybils = tuple(Elector(f"sybil{i}", 100 + i) for i in range(3 * len(liar.electors)))
    nets: dict[str, Net] = {one.id: liar.swarm.network.join(one.id) for one in sybils}
    young = tuple((one.id, 0) for one in sybils)
    roster = with_witnesses(liar, sybils, juniors=young)
    shown = {
        "without a word": b"",
        "signed by the leader": arrivals_of(liar, roster, dict.fromkeys(nets, liar.net)),
        "of another attempt": arrivals_of(liar, roster, nets, attempt=len(liar.electors)),
        "of another place": arrivals_of(liar, roster, nets, shift=1),
        "too few": pack_arrivals(sybils[:1], {sybils[0].id: Arrival(b"s" * 64, b"")}),
        "and one is nobody's": arrivals_of(liar, roster, nets | {sybils[0].id: liar.net}),
    }
    members = (*roster.members, *(Member(*one, 1.0) for one in sybils))
    changes: dict[str, dict[str, Any]] = {
        "twice as heavy": {"members": members, "witnesses": ()},
        "as electors at once": {"juniors": ()},
        "with commits that never were": {"juniors": tuple((one.id, 1) for one in sybils)},
        "instead of an elector": {"juniors": ((liar.others[0], 0), *young)},
    }
    return replace(roster, **changes.get(what, {})), shown.get(what, arrivals_of(liar, roster, nets))


@pytest.mark.parametrize("what", MADE_UP)
@pytest.mark.parametrize("n", [4, 7, 16])
def test_a_leader_makes_up_no_electors(n: int, what: str):
    """Whom it names without having its signature, or with a vote that it has not earned, costs it its attempt."""

    async def attack(liar: Liar) -> None:
        roster, shown = made_up(liar, what)
        await liar.pause(5.0)
        await liar.propose(0)
        said = await liar.seal(roster, to=liar.others, promises=joined(b"", shown))
        assert {*said.values()} <= {"refused", ""}, said

    assert play(attack, n).refused()[GROUNDLESS] > 0


@pytest.mark.parametrize("token", [b"", b"made up", b"p1's"])
def test_in_a_closed_run_nobody_without_a_token_becomes_an_elector(token: bytes):
    """The liar has keys for its made-up peers, and signs for them: what it lacks is the authority's word."""

    async def attack(liar: Liar) -> None:
        network = liar.swarm.network
        sybils = tuple(Elector(f"sybil{i}", 100 + i) for i in range(9))
        nets: dict[str, Net] = {one.id: network.join(one.id) for one in sybils}
        network.tokens = {name: f"{name}'s".encode() for name in liar.swarm.names}
        roster = with_witnesses(liar, sybils, juniors=tuple((one.id, 0) for one in sybils))
        await liar.pause(5.0)
        await liar.propose(0)
        shown = arrivals_of(liar, roster, nets, token=token)
        said = await liar.seal(roster, to=liar.others, promises=joined(b"", shown))
        assert {*said.values()} == {"refused"}

    assert play(attack, 4).refused()[GROUNDLESS] > 0


@pytest.mark.parametrize("beside", [0, 2])
@pytest.mark.parametrize("n", [4, 7])
def test_made_up_members_do_not_vouch_for_a_result(n: int, beside: int):
    """The liar brings enough members of its own, who all show the same state; and names so many others beside them."""

    async def attack(liar: Liar) -> None:
        sybils = tuple(Elector(f"sybil{i}", 100 + i) for i in range(n))
        nets: dict[str, Net] = {one.id: liar.swarm.network.join(one.id) for one in sybils}
        nets[liar.name] = liar.net
        roster, state = liar.roster([liar.name, *liar.others[:beside]]), liar.state()
        roster = replace(roster, members=(*roster.members, *(Member(*one, 1.0) for one in sybils)))
        roster = graded(liar.before, liar.electors, roster, liar.me.settings.seniority, liar.me.settings.liars)
        members = tuple(Elector(member.id, member.index) for member in roster.members)
        said = liar.me.standing.enter().vote(roster, 0, state.hash).statement
        votes = certificate(members, 0, {peer: net.sign(said) for peer, net in nets.items()}).encoded
        shown = joined(b"", arrivals_of(liar, roster, nets))
        liar.donate(liar.record_of(roster, state.hash), state)
        await liar.pause(5.0)
        await liar.propose(0)
        named, seal = brief(roster, liar.electors), liar.seal_of(roster, 0, shown)
        asked = Endorse(liar.iteration, 0, named, state.hash, votes, shown, seal)
        assert not any(answer.payload for answer in (await liar.ask("endorse", asked.parcel())).values())
        kept = {"adopt": state.hash, "holders": (liar.name,), "votes": votes, "promises": shown}
        assert "ok" not in (await liar.seal(roster, to=liar.others, **kept)).values()

    assert play(attack, n).refused()[GROUNDLESS] > 0


@pytest.mark.parametrize("n", [4, 7])
def test_founders_that_have_not_signed_found_nothing(n: int):
    """A founder names electors of its own beside those who follow it: they do not begin."""

    async def scenario() -> None:
        swarm = Swarm(n, named=False, expected=n)
        stranger = swarm.network.join("a")  # of two founders the lower name wins
        asked = dict.fromkeys(swarm.names, "")

        async def found() -> None:
            me = swarm.people["p0"]
            liar = Participant(stranger, swarm.settings, 99, LAYOUT, swarm.start, swarm.record, lambda s, *_: s)
            instance = liar.standing.enter()
            sybils = {f"sybil{i}": 100 + i for i in range(3 * n)}
            for name in sybils:
                swarm.network.join(name)
            instance.found(lineage_after(link_of(swarm.record), b"mine"), "a")
            promises = await liar.leader.propose(instance, 0, {*swarm.names}, founding=True)
            assert promises is not None
            acks = dict(promises.acks)
            example = acks["a"]
            acks |= {name: replace(example, index=index) for name, index in sybils.items()}
            assert me.net.me in acks
            honest_seal = liar.member.begin
            liar.member.begin = lambda *_: False  # type: ignore[method-assign]
            await liar.leader._seal(instance, 0, type(promises)(acks, dict.fromkeys(acks, b"")), {})
            liar.member.begin = honest_seal  # type: ignore[method-assign]
            for name in swarm.names:
                asked[name] = str(swarm.people[name].net.refused[GROUNDLESS])

        swarm.network.spawn("a", found())
        outcomes = await swarm.iterate()
        assert "0" not in asked.values(), asked
        assert len(swarm.hashes(swarm.names)) == 1
        assert {outcome.status for outcome in outcomes.values()} == {"committed"}
        assert {elector.id for elector in swarm.people["p0"].record.electors} <= {*swarm.names, "a"}

    run_virtual(scenario())


def test_an_ack_of_a_newcomer_counts_only_with_its_signature():
    async def scenario() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        swarm.people["n9"] = me = swarm.join("n9", 9)
        assert await me.catch_up()
        honest = me.voting.answer_propose

        async def answer(sender: str, request: Any) -> Any:
            given = await honest(sender, request)
            return replace(Ack.decode(given.header), signature=b"s" * 64).parcel(given.payload)

        me.net.serve("propose", answer)
        await swarm.iterate()
        record = swarm.people["p0"].record
        assert record.roster is not None
        assert "n9" not in {one.id for one in record.roster.party}
        assert sum(swarm.people[name].net.refused[BAD_ACK] for name in swarm.names) > 0

    run_virtual(scenario())


# --- many names, and few seniors ---


async def joins(swarm: Swarm, name: str, index: int) -> None:
    swarm.people[name] = swarm.join(name, index)
    assert await swarm.people[name].catch_up()


def electors(swarm: Swarm, name: str = "p0") -> set[str]:
    return {elector.id for elector in swarm.people[name].record.electors}


@pytest.mark.parametrize("seniority", [1, 2, 3])
def test_a_newcomer_votes_once_it_has_contributed_to_so_many_commits(seniority: int):
    async def scenario() -> None:
        swarm = Swarm(4, seniority=seniority)
        await swarm.iterate()
        await joins(swarm, "n9", 9)
        for _ in range(seniority):
            assert "n9" not in electors(swarm)
            await swarm.iterate()
        assert electors(swarm) == {*swarm.names, "n9"} == electors(swarm, "n9")

    run_virtual(scenario())


def test_many_names_that_only_vote_never_decide():
    """Twelve strangers ack every roster and bring nothing."""

    async def scenario() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        sybils = [f"s{i}" for i in range(12)]
        for i, name in enumerate(sybils):
            await joins(swarm, name, 100 + i)
        for _ in range(4):
            await swarm.iterate(witnesses=tuple(sybils))
            assert electors(swarm) == {*swarm.names}
        assert len(swarm.hashes(swarm.names)) == 1

    run_virtual(scenario())


@pytest.mark.parametrize("seniority", [2, 5])
def test_a_run_of_three_that_loses_two_and_gains_two_goes_on(seniority: int):
    async def scenario() -> None:
        swarm = Swarm(3, seniority=seniority)
        await swarm.iterate()
        for i in (7, 8):
            await joins(swarm, f"n{i}", i)
        for name in ("p1", "p2"):
            swarm.network.crash(name)
        async with asyncio.timeout(FAR):
            while swarm.people["p0"].record.iteration < 6:
                for name in ("p0", "n7", "n8"):
                    await swarm.people[name].catch_up()
                await swarm.iterate()
        for name in ("n7", "n8"):
            await swarm.people[name].catch_up()
        assert len(swarm.hashes()) == 1
        assert electors(swarm) == {"p0", "n7", "n8"}

    run_virtual(scenario())


def test_an_elector_that_was_missed_votes_again_once_it_has_contributed():
    async def scenario() -> None:
        swarm = Swarm(6)
        await swarm.iterate()
        swarm.network.partition({"p5": 1})
        await swarm.iterate(skip=("p5",))
        swarm.network.heal()
        assert electors(swarm) == {*swarm.names} - {"p5"}
        await swarm.people["p5"].catch_up()
        for _ in range(2):
            assert "p5" not in electors(swarm)
            await swarm.iterate()
        assert electors(swarm) == {*swarm.names}

    run_virtual(scenario())


def test_a_leader_cannot_give_an_elector_another_place():
    async def attack(liar: Liar) -> None:
        roster = liar.roster(liar.others)
        moved = (roster.members[0]._replace(index=77), *roster.members[1:])
        await liar.pause(5.0)
        await liar.propose(0)
        said = await liar.seal(replace(roster, members=moved), to=liar.others)
        assert "ok" not in said.values()

    assert play(attack, 4).refused()[GROUNDLESS] > 0


def adds(liar: Liar, more: Collection[Elector]) -> None:
    """Have it lead as the others do, but name these as witnesses in every roster that it seals."""
    honest = liar.me.leader._trimmed

    def trimmed(instance: Any, roster: Roster, acks: Any, keys: Any) -> Roster | None:
        made = honest(instance, roster, acks, keys)
        for one in more:
            acks.setdefault(one.id, acks[liar.name])
        there = {one.id for one in made.party} if made else set()
        new = tuple(one for one in ranked("test", roster.iteration, tuple(more)) if one.id not in there)
        return replace(made, witnesses=(*made.witnesses, *new)) if made else None

    liar.me.leader._trimmed = trimmed  # type: ignore[method-assign]


def test_a_liar_that_takes_part_brings_in_nobody():
    """It acks, leads and votes as the others do, and adds made-up witnesses to every roster that it leads."""

    async def scenario() -> None:
        scene = Scene(4)
        liar = await scene.begin()
        adds(liar, [Elector(f"sybil{i}", 100 + i) for i in range(20)])
        async with asyncio.timeout(FAR):
            await asyncio.gather(scene.go_on(3), takes_part(liar))
        assert {elector.id for elector in scene.record.electors} <= {*scene.swarm.names}
        assert scene.refused()[GROUNDLESS] > 0
        assert len(scene.models()) == 1

    run_virtual(scenario())


# --- whose vote is counted that it has not cast ---


def keeps_votes(me: Participant, key: Path) -> VoteLog:
    """It writes its votes down from now on."""
    log = VoteLog(key)
    log.begin(me.net.me, "test")
    keep_votes(me, log)
    return log


def unasked(leader: str, victim: str) -> Callable[[VirtualNetwork, Departure, Delivery], None]:
    """No proposal of this leader reaches the victim."""

    def intercept(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        if (event.op, event.source, event.dest, event.tag.channel) == ("call", leader, victim, "propose"):
            delivery.copies = 0

    return intercept


@pytest.mark.parametrize("back", ["away", "there", "restarted"])
def test_who_is_named_without_having_answered_does_not_take_its_votes_for_lost(back: str, tmp_path: Path):
    """A leader names an elector that never acked: only a signature of its own says that somebody has its key."""

    async def scenario() -> None:
        scene = Scene(6)
        logs = {name: keeps_votes(scene.people[name], tmp_path / name) for name in scene.swarm.names}
        liar = await scene.begin()
        victim = liar.others[2]
        me = scene.people[victim]
        adds(liar, [elector for elector in liar.electors if elector.id == victim])
        if back == "there":
            scene.swarm.network.intercept = unasked(liar.name, victim)
        else:
            scene.swarm.network.partition({victim: 1})
            scene.honest.remove(victim)
        await asyncio.gather(scene.go_on(1), scene.reach(liar.name, 2))
        named = scene.record
        assert victim in {elector.id for elector in named.electors}
        assert victim not in {member.id for member in named.roster.members}
        scene.swarm.network.heal()
        scene.swarm.network.intercept = None
        scene.honest = [name for name in scene.swarm.names if name != liar.name]
        if back == "restarted":
            scene.swarm.network.crash(victim)
            logs.pop(victim).close()
            me = scene.people[victim] = scene.swarm.join(victim, me.index)
            logs[victim] = keeps_votes(me, tmp_path / victim)
        async with asyncio.timeout(FAR):
            await asyncio.gather(scene.go_on(3), scene.reach(liar.name, 3))
        assert me.record == scene.record
        assert not me.standing.diary.revoked
        assert victim in scene.record.roster.ids, "it goes on"
        assert len(scene.models()) == 1
        for log in logs.values():
            log.close()

    run_virtual(scenario())


@pytest.mark.parametrize("how", ["decided", "given"])
def test_who_is_shown_its_own_signature_of_a_vote_that_it_has_not_cast_votes_no_more(how: str, tmp_path: Path):
    """Another process has its key, or its log is old."""

    async def scenario() -> None:
        scene = Scene(5)
        twin = scene.honest[0]
        me = scene.people[twin]
        log = keeps_votes(me, tmp_path / "key")
        await scene.go_on(0)
        before, instance = me.record, me.standing.enter()
        electors = ranked("test", 2, before.electors)
        people = tuple(Member(*one, 1.0) for one in electors)
        roster = Roster("test", 2, 0, before.lineage, before.hash, LAYOUT, "full", 3, people, (), (), ())
        record = before.after(roster, b"h" * 32)
        proof = signed_by([scene.people[name].net for name in scene.swarm.names], before, record)
        if how == "decided":
            me.standing.decide(instance, record, (), proof)
        else:
            me.standing.diary = VoteDiary(me.net, "test", VoteLog())
            shown = me.standing.proofs.checked(me.standing.anchors, record, packed([hop(before, record, proof)]))
            with pytest.raises(InputError, match="go on with a new key"):
                me.standing.look_back(record, *shown.votes_of(twin))
        with pytest.raises(InputError, match="go on with a new key"):
            me.standing.enter()
        log.close()

    run_virtual(scenario())
