"""Liars that say the same again and again: by nothing that one peer repeats is a run stopped, or another kept out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest

from marfl.net.base import Parcel, PeerId, Tag
from marfl.net.virtual import Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol import audit, standing
from marfl.protocol.attempt import Attempt, Outgoing, Stuck
from marfl.protocol.audit import Audits
from marfl.protocol.ballot import (
    ACCUSES_ALONE,
    ACCUSES_MANY,
    AT_ODDS,
    Court,
    Reply,
    at_odds,
    culprits,
    some_of,
    turns_between,
)
from marfl.protocol.fraud import CONTRADICTION, Proof
from marfl.protocol.instance import Instance
from marfl.protocol.leader import Leader
from marfl.protocol.mask_pledges import BAD_SHARES, took_place, witnesses_of
from marfl.protocol.masked_rounds import MaskedRounds
from marfl.protocol.messages import Ack, Complaint, Fraud, Pledge
from marfl.protocol.notices import remember_ours
from marfl.protocol.participant import Participant
from marfl.protocol.protocol_settings import EXCHANGES, Settings
from marfl.protocol.roster import VOID, Elector, Member, Roster, brief
from marfl.protocol.signed_slices import UNANSWERED, Signed
from marfl.protocol.standing import OTHER_RESULT
from marfl.protocol.statements import SignedSeal, seal_parts, statement
from marfl.protocol.voting import GROUNDLESS, OUT_OF_TURN, Voting
from stages.forgery import an_ack
from stages.liars import FAR, Liar, Scene, ask_all, nothing, staged
from stages.mutation import Edit, mutate
from stages.virtual import LAYOUT, Swarm
from test_audited_sums import PAUSE, adds_to_its_sum
from test_audited_sums import Court as Hearing

LIAR, VICTIM = "p1", "p2"


# --- a run with one who lies all the time ---


@dataclass
class Story:
    """What became of a run: its rosters by iteration, and whether the honest got as far as they wanted."""

    swarm: Swarm
    rosters: dict[int, Roster]
    ended: bool

    @property
    def honest(self) -> list[Participant]:
        return [me for name, me in self.swarm.people.items() if name != LIAR]

    @property
    def sums(self) -> list[Roster]:
        return [roster for _, roster in sorted(self.rosters.items()) if roster.is_sum]

    def refused(self, name: PeerId) -> set[str]:
        return {why for me in self.honest for why in me.net.refused.senders.get(name, {})}

    def check(self, *, but: str = "") -> None:
        """The honest go on together, and none of them is named (`but` for this), or proven to lie."""
        assert self.ended
        names = [me.net.me for me in self.honest]
        assert len({me.record.lineage for me in self.honest}) == 1
        assert not any(found := {name: self.refused(name) - {but} for name in names}.values()), found
        assert not any({*me.standing.banned} & {*names} for me in self.honest)


Corrupt = Callable[[Swarm, Participant], None]
Says = Callable[[Participant], Awaitable[None]]


def told(
    n: int, corrupt: Corrupt, iterations: int, says: Says | None = None, limit: float = FAR, **others: Any
) -> Story:
    """So many iterations of honest peers with one who does as they do, but for what is corrupted, or says more."""
    settings = Settings(**({"run": "test", "liars": 1, "exchange": "chunked", "group_size": 3} | others))
    swarm = Swarm(n, network=VirtualNetwork(0, Link(latency=0.01)), settings=settings)
    corrupt(swarm, swarm.people[LIAR])
    rosters: dict[int, Roster] = {}

    async def reach(name: PeerId) -> None:
        me = swarm.people[name]
        while me.record.iteration < iterations or me.behind:
            if await me.catch_up() and me.record.iteration < iterations:
                await me.run_iteration(swarm.mine(name))
            else:
                await me.net.sleep_until(me.net.now() + 1.0)
            rosters.update({at: r.roster for at, r in me.standing.history.items() if r.roster is not None})

    async def all_of_it() -> Story:
        work = {name: swarm.network.spawn(name, reach(name)) for name in swarm.names}
        more = asyncio.create_task(says(swarm.people[LIAR])) if says else None
        _, late = await asyncio.wait([task for name, task in work.items() if name != LIAR], timeout=limit)
        for task in (*work.values(), *([more] if more else [])):
            task.cancel()
        return Story(swarm, rosters, not late)

    story = run_virtual(all_of_it())
    assert {*story.rosters} >= {*range(1, iterations + 1)} or not story.ended
    return story


def honestly(_: Swarm, __: Participant) -> None:
    """Nothing is corrupted."""


# --- a leader that does not wait for its turn ---


@pytest.mark.parametrize("pause", [0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("n", [4, 7])
def test_an_elector_that_proposes_all_the_time_stops_nobody(n: int, pause: float):
    """Each of its proposals would end an attempt of somebody else."""

    async def attack(liar: Liar) -> None:
        rank = [elector.id for elector in liar.electors].index(liar.name)
        attempt = rank
        while True:
            acks = await liar.propose(attempt)
            highest = max([attempt, *(ack.attempt for ack in acks.values())])
            attempt = highest + 1 + (rank - highest - 1) % n
            await liar.pause(pause)

    network = VirtualNetwork(0, Link(latency=0.05))
    scene = staged(attack, n, 1, network=network)
    assert scene.models() == staged(nothing, n, 1, network=VirtualNetwork(0, Link(latency=0.05))).models()
    assert not scene.named() & {*scene.honest}
    if pause < 0.5:  # who waits in between may be an honest leader that nobody hears
        assert scene.refused()[OUT_OF_TURN] > 0


@pytest.mark.parametrize(("promised", "attempt", "turns"), [(1, 5, 1), (1, 2, 0), (2, 5, 1), (3, 5, 1), (1, 4001, 1)])
def test_who_has_led_in_vain_waits_for_one_who_does_not_lie(promised: int, attempt: int, turns: int):
    electors = [Elector(f"p{at}", at) for at in range(4)]
    assert turns_between(electors, promised, attempt, 1) == turns


def test_an_honest_leader_whose_attempt_fails_may_lead_again_at_once():
    async def scenario() -> None:
        swarm = Swarm(4, liars=1)
        me = swarm.people["p0"]
        instance = me.standing.enter()
        leader = next(elector.id for elector in instance.electors if elector.id != me.net.me)
        scene = Scene(4)
        scene.swarm = swarm
        rank = instance.rank(leader)
        said = []
        for lap in range(3):
            liar = Liar.__new__(Liar)
            liar.__dict__ |= {"me": swarm.people[leader], "net": swarm.people[leader].net, "before": me.record}
            liar.others, liar.acks = (me.net.me,), {}
            said.append((await liar.propose(rank + 4 * lap))[me.net.me].status)
        assert said == [Reply.ACK.value] * 3

    run_virtual(scenario())


@pytest.mark.parametrize("n", [4, 7])
def test_who_is_not_told_of_an_attempt_far_away_names_nobody_for_it(n: int):
    """The next leader hears refusals that name it, of honest electors, and must not take them for lies."""

    async def attack(liar: Liar) -> None:
        rank = [elector.id for elector in liar.electors].index(liar.name)
        after = liar.electors[(rank + 1) % n].id
        await liar.pause(0.5)
        far = rank + n * (200_000 // n)
        acks = await liar.propose(far, [peer for peer in liar.others if peer != after], seen=far - 1)
        assert {ack.status for ack in acks.values()} == {Reply.ACK.value}

    scene = staged(attack, n, 1)
    assert scene.models() == staged(nothing, n, 1).models()
    assert not scene.named() & {*scene.honest}


# --- a member that shows everybody something else ---


def shows_each(_: Swarm, me: Participant) -> None:
    """Whatever it sends, each receiver is sent another value."""
    begin = me.audits.begin

    def lying(attempt: Attempt) -> None:
        begin(attempt)
        honest = attempt._outgoing

        def other(rank: int, tag: Tag, value: Any) -> Outgoing:
            if tag.channel in ("reduce", "gather"):
                value = value.clone()
                value[:1] += 1000 * (rank + 1)
            return honest(rank, tag, value)

        attempt._outgoing = other  # type: ignore[method-assign]

    me.audits.begin = lying  # type: ignore[method-assign]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("n", [4, 7])
def test_a_member_that_shows_everybody_something_else_stops_nobody(n: int, exchange: str):
    """All are in one group, so no two of them have one result. Nobody can tell why; in the end it sits out."""
    story = told(n, shows_each, 3, exchange=exchange, fallbacks=(exchange,), group_size=n)
    story.check(but=OTHER_RESULT)  # of whoever was shown a wrong sum
    for roster in story.rosters.values():
        assert roster.is_sum
        assert dict(roster.omitted)[LIAR] == AT_ODDS
    assert len(story.swarm.hashes([me.net.me for me in story.honest])) == 1


@pytest.mark.parametrize("n", [4, 5, 7])
def test_a_member_that_spoils_masked_sums_does_not_spoil_all_of_them(n: int):
    # Keys are fresh in every run, and so is the coin: it never fails in 30 iterations but once in a thousand runs.
    story = told(n, shows_each, 30, wire="masked", group_size=n, limit=4 * FAR)
    story.check(but="bad question")  # one of an honest peer that is late may be
    assert story.sums
    assert all(LIAR not in roster.ids for roster in story.sums)


def ack_of(digest: bytes, roster: Roster, attempt: int = 1) -> Ack:
    return replace(
        an_ack(), join=True, accepted=roster.encoded, accepted_hash=digest, accepted_attempt=attempt, holds=True
    )


A_ROSTER = Roster(
    "test", 1, 1, bytes(32), bytes(32), LAYOUT, "full", 3, tuple(Member(f"p{at}", at, 1.0) for at in range(7)),
    (), (), (),
)  # fmt: skip


@pytest.mark.parametrize(
    ("results", "attempt", "liars", "out"),
    [
        ("abcdefg", 1, 1, 2),
        ("abcdefg", 0, 1, 0),  # once may be a mistake
        ("abcdefg", 1, 0, 0),  # where nobody lies
        ("aaaaaab", 1, 1, 0),  # one that says something else is a liar, or was shown a lie
        ("aaaabcd", 1, 2, 2),
        ("aaaaabb", 1, 2, 0),  # as many as may lie
        ("a", 1, 1, 0),
        ("", 1, 1, 0),
    ],
)
def test_somebody_sits_out_where_more_results_differ_than_there_are_liars(
    results: str, attempt: int, liars: int, out: int
):
    electors = [Elector(f"p{at}", at) for at in range(7)]
    acks = {e.id: replace(an_ack(), join=True) for e in electors}
    acks |= {f"p{at}": ack_of(each.encode() * 32, A_ROSTER, attempt) for at, each in enumerate(results)}
    found = at_odds(electors, acks, 2, liars)
    assert len(found) == out
    assert {*found.values()} <= {AT_ODDS}


def test_everybody_sits_out_sooner_or_later():
    acks = {f"p{at}": replace(an_ack(), join=True) for at in range(7)}
    out = {peer for attempt in range(40) for peer in some_of(acks, attempt.to_bytes(8))}
    assert out == {*acks}


# --- somebody that accuses an honest peer in every iteration ---


def accuses(why: str, *, caught: bool) -> Corrupt:
    """In every ack it holds this against the same honest peer."""

    def corrupt(_: Swarm, me: Participant) -> None:
        honest = me.voting.ack

        def ack(status: str, instance: Instance | None = None, **others: Any) -> Ack:
            said = honest(status, instance, **others)
            return replace(said, blamed=(*said.blamed, Complaint(VICTIM, why, caught)))

        me.voting.ack = ack  # type: ignore[method-assign]

    return corrupt


@pytest.mark.parametrize(
    ("why", "caught", "settings"),
    [
        ("sent NaN", True, {}),
        (UNANSWERED, False, {"audit": 0.1}),
        ("sent NaN", True, {"wire": "masked"}),
        (BAD_SHARES, True, {"wire": "masked"}),
    ],
)
@pytest.mark.parametrize("n", [4, 7])
def test_an_accuser_keeps_nobody_out_for_good(n: int, why: str, caught: bool, settings: dict[str, Any]):
    story = told(n, accuses(why, caught=caught), 24, **settings)
    story.check()
    there = [VICTIM in roster.ids for roster in story.sums]
    assert sum(there) >= 4
    assert sum(LIAR not in roster.ids for roster in story.sums) >= 4


def test_nobody_complains_of_audits_where_there_are_none():
    story = told(4, accuses(UNANSWERED, caught=False), 3)
    story.check()
    assert all(len(roster.ids) == 4 for roster in story.rosters.values())


def blamed(*by: str, why: str = "sent NaN") -> dict[PeerId, Ack]:
    acks = {f"p{at}": an_ack() for at in range(7)} | {"new": an_ack(), "newer": an_ack()}
    return acks | {name: replace(an_ack(), blamed=(Complaint("p0", why, True),)) for name in by}


ELECTORS = tuple(f"p{at}" for at in range(7))


@pytest.mark.parametrize(
    ("by", "liars", "out"),
    [
        (["p1", "p2"], 1, {"p0"}),  # one of them does not lie
        (["p1", "p2"], 2, {"p0", "p1"}),  # both may
        (["p1", "new"], 1, {"p0", "p1"}),  # of newcomers anybody can have many
        (["new", "newer"], 1, {"p0", "new"}),
        (["p1", "p2", "p3"], 2, {"p0"}),
    ],
)
def test_as_many_as_may_lie_leave_nobody_out_alone(by: Collection[str], liars: int, out: set[str]):
    found = culprits(blamed(*by), patient=True, court=Court(ELECTORS, liars))
    assert {*found} == out


def test_one_word_against_another_is_the_coins_from_the_second_time_on():
    fresh = Court(ELECTORS, 1)
    both = culprits(blamed("p1"), patient=True, court=fresh)
    assert both == {"p0": "sent NaN, says p1", "p1": ACCUSES_ALONE}
    for omitted in (both, {"p0": "sent NaN, says p6"}, {"p1": ACCUSES_ALONE}):
        tossed = [
            {*culprits(blamed("p1"), patient=True, court=fresh._replace(omitted=omitted, coin=bytes([at])))}
            for at in range(40)
        ]
        assert all(len(out) == 1 for out in tossed)
        assert 10 < sum(out == {"p0"} for out in tossed) < 30
    many = blamed("p1") | {"p1": replace(an_ack(), blamed=(Complaint("p0", "x", True), Complaint("p2", "x", True)))}
    assert culprits(many, patient=True, court=fresh._replace(omitted=both)) == {"p1": ACCUSES_MANY}


# --- a leader that binds others to a roster that it never sealed ---


def leads_nothing(_: Swarm, me: Participant) -> None:
    """It signs no roster but the one that it asks pledges to."""

    async def lead(instance: Instance, *_: Any) -> None:
        me.standing.wait_for_leader(instance, 2.0)

    me.leader.lead = lead  # type: ignore[method-assign]


async def asks_for_pledges(me: Participant) -> None:
    """In every iteration, before anybody else: to a roster of all, which it has sealed to nobody."""
    while True:
        instance = me.standing.instance
        if instance is not None and instance.electors and not instance.over.is_set():
            attempt, electors = instance.rank(me.net.me), instance.electors
            members = tuple(Member(elector.id, elector.index, 1.0) for elector in electors)
            roster = Roster(
                "test", instance.iteration, attempt, instance.lineage, instance.base, LAYOUT, "chunked", 3, members,
                (), (), (), "masked", b"m" * 32,
            )  # fmt: skip
            parts = seal_parts(instance.signed_id, attempt, roster.digest, b"")
            sealed = SignedSeal(attempt, roster.digest, b"", me.net.sign(statement("seal", *parts)))
            asked = Pledge(instance.iteration, attempt, brief(roster, electors), sealed.encoded)
            others = [elector.id for elector in electors if elector.id != me.net.me]
            answers: dict[PeerId, Parcel] = await ask_all(me.net, "pledge", asked.parcel(), others)
            assert not any(answer.payload for answer in answers.values())
        await me.net.sleep_until(me.net.now() + 0.02)


@pytest.mark.parametrize("n", [4, 7])
def test_nobody_pledges_itself_to_a_roster_whose_exchange_never_was(n: int):
    """Else all would be bound to it, and every iteration would go by."""
    story = told(n, leads_nothing, 4, asks_for_pledges, wire="masked")
    story.check()
    assert len(story.sums) == 4
    assert story.refused(LIAR) >= {GROUNDLESS}


def test_whose_pledges_show_that_a_sum_is_there():
    electors = [Elector(f"p{at}", at) for at in range(4)]
    roster = replace(A_ROSTER, members=A_ROSTER.members[:3])
    signed = {f"p{at}": bytes([at]) * 64 for at in range(4)}

    def shows(names: Collection[str], verifies: bool = True) -> bool:
        shown = witnesses_of(electors, roster, {name: signed[name] for name in names}, 1)
        return shown is not None and took_place(shown, roster, 1, electors, 1, lambda *_: verifies)

    assert shows(["p0", "p1"])
    assert shows(["p0", "p1", "p2", "p3"])
    assert not shows(["p0", "p1"], verifies=False)
    assert not shows(["p0"])
    assert not shows(["p0", "p3"])  # p3 is not in the sum
    alone = replace(roster, members=roster.members[:1])
    shown = witnesses_of(electors, alone, signed, 1)
    assert shown is not None
    assert took_place(shown, alone, 1, electors, 1, lambda *_: True)


# --- proofs of lies ---


def two_votes(name: PeerId, sign: Callable[[bytes], bytes], run: str = "test") -> Proof:
    """Somebody proves itself a liar, of no sum."""
    said = []
    for digest in (b"d" * 32, b"e" * 32):
        parts = (run, 9, 0, bytes(32), bytes(32), bytes(32), bytes(32), bytes(32), digest)
        said.append(Signed("vote", parts, sign(statement("vote", *parts))))
    return Proof(CONTRADICTION, name, tuple(said))


@pytest.mark.parametrize("on_fraud", ["rollback", "go on"])
def test_who_has_itself_caught_for_less_does_not_save_its_wrong_sum(on_fraud: str):
    """Everybody knows already that it lies when the audit proves the sum wrong: they go back before it all the same."""
    court = Hearing(8, {LIAR: adds_to_its_sum(2)}, on_fraud=on_fraud, bear=1)

    async def scene() -> None:
        liar = court.people[LIAR]
        proof = two_votes(LIAR, liar.net.sign)
        others = [name for name in court.names if name != LIAR]
        for name in others:
            await court.people[name].audits.answer_fraud("p0", Fraud(LIAR).parcel(proof.encoded))
            court.people[name].standing.banned.clear()  # it still takes part in this one
        await court.iterate()
        await asyncio.sleep(PAUSE)
        after = await court.iterate()
        for name in others:
            assert after[name].tainted == (1,)
            assert after[name].restored == (0 if on_fraud == "rollback" else None)

    run_virtual(scene())


@pytest.mark.parametrize("of", ["contradictions", "sums"])
def test_made_up_liars_push_out_no_proof_of_one_who_takes_part(of: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "MOST_PROOFS", 5)
    monkeypatch.setattr(standing, "MOST_LIES", 5)

    async def scenario() -> None:
        scene = Scene(4, 1, first=2, audit=0.1, on_fraud="rollback")
        liar = await scene.begin()
        roster = liar.before.roster
        assert roster is not None
        me = scene.people[scene.honest[0]]

        def lie(name: PeerId, sign: Callable[[bytes], bytes], of_roster: Roster) -> Proof:
            said = []
            for digest in (b"d" * 32, b"e" * 32):
                parts = (of_roster.digest, 60, 0, 0, 20, digest)
                said.append(Signed("slice", parts, sign(statement("slice", *parts))))
            return Proof(CONTRADICTION, name, tuple(said), of_roster.encoded)

        await me.audits.accuse(lie(liar.name, liar.net.sign, roster))
        for number in range(12):
            net = scene.swarm.network.join(f"nobody{number}")
            made_up = replace(roster, piece=1000 + number)
            proof = lie(net.me, net.sign, made_up) if of == "sums" else two_votes(net.me, net.sign)
            await ask_all(liar.net, "fraud", Fraud(net.me).parcel(proof.encoded), [me.net.me])
            await me.audits.answer_fraud(scene.honest[1], Fraud(net.me).parcel(proof.encoded))
        assert liar.name in me.audits.proofs
        assert roster.digest in me.audits.lies
        assert len(me.audits.proofs) == 5
        assert me.standing.lies == {2: liar.name}

    run_virtual(scenario())


def test_what_is_ours_is_forgotten_last():
    kept: dict[str, int] = {}
    for at, name in enumerate(["ours", "a", "b", "c", "ours too", "d"]):
        remember_ours(kept, name, at, lambda each: each.startswith("ours"), 3)
    assert list(kept) == ["ours", "ours too", "d"]
    remember_ours(kept, "ours at last", 9, lambda _: True, 3)
    assert list(kept) == ["ours too", "d", "ours at last"]


# --- claims ---


def test_who_still_sends_when_the_iteration_is_decided_signs_nothing_any_more():
    """What it would sign is not there as a whole: it must not be proven a liar for it."""
    seen: set[type[BaseException]] = set()

    def closes(attempt: Attempt) -> None:
        honest, outgoing = attempt.sum_in_order, attempt._outgoing

        async def summed(*work: Any) -> Any:
            total = await honest(*work)
            attempt.book.keep_for([])
            return total

        def sends(*what: Any) -> Outgoing:
            try:
                return outgoing(*what)
            except Exception as error:
                seen.add(type(error))
                raise

        attempt.sum_in_order, attempt._outgoing = summed, sends  # type: ignore[method-assign]

    court = Hearing(8, {"p3": closes})
    court.play()
    assert seen == {Stuck}


def test_a_void_roster_is_what_the_honest_never_seal_here():
    """The stories above are of runs that sum in every iteration where nobody lies."""
    for wire in ("fp32", "masked"):
        story = told(4, honestly, 4, wire=wire)
        story.check()
        assert VOID not in {roster.exchange for roster in story.rosters.values()}


# --- each rule on purpose broken ---


@pytest.mark.parametrize(
    ("edit", "test"),
    [
        (
            Edit(Voting.vote, "self._is_out_of_turn(instance, sender, proposal)", "False"),
            lambda _: test_an_elector_that_proposes_all_the_time_stops_nobody(4, 0.3),
        ),
        (
            Edit(Leader._roster, " or at_odds(instance.electors, acks, attempt, settings.liars)", ""),
            lambda _: test_a_member_that_shows_everybody_something_else_stops_nobody(4, "full"),
        ),
        (
            Edit(Leader._roster, " or self._spoilt(instance, acks)", ""),
            lambda _: test_a_member_that_spoils_masked_sums_does_not_spoil_all_of_them(4),
        ),
        (
            Edit(Court.out, "if before else both", "if False else both"),
            lambda _: test_an_accuser_keeps_nobody_out_for_good(4, "sent NaN", True, {}),
        ),
        (
            Edit(MaskedRounds.pledge, "self._took_place(instance, roster, asked, shown)", "True"),
            lambda _: test_nobody_pledges_itself_to_a_roster_whose_exchange_never_was(4),
        ),
        (
            Edit(Audits.answer_fraud, "not self._is_new(proof)", "True"),
            lambda _: test_who_has_itself_caught_for_less_does_not_save_its_wrong_sum("rollback"),
        ),
        (
            Edit(Attempt._outgoing, "self.book.closed", "False"),
            lambda _: test_who_still_sends_when_the_iteration_is_decided_signs_nothing_any_more(),
        ),
        (
            Edit(remember_ours, "not is_ours(each)", "True"),
            lambda patch: test_made_up_liars_push_out_no_proof_of_one_who_takes_part("sums", patch),
        ),
    ],
)
def test_without_any_of_these_rules_a_liar_has_its_way(
    edit: Edit, test: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    mutate([edit], monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        test(monkeypatch)
