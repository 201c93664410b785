"""A leader that lies, and members that lie with it: nothing is unmasked but the sum over a roster that a quorum signed.

In every attack the first elector leads by hand. We look at what it was given, it vanishes, and the others go on.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from marfl.protocol import masked_rounds as rounds
from marfl.protocol.fraud import CONTRADICTION
from marfl.protocol.mask_pledges import BAD_SHARES, UNSIGNED, PledgeProof, card_statement, pledge_statement
from marfl.protocol.roster import VOID, Elector, Member, Roster
from marfl.secagg.crypto import SHARE_SIZE, KeyPair, seal_share
from marfl.secagg.graph import KEY_BYTES, degree, pledges_needed, threshold
from stages.lying_leader import LyingLeader
from stages.masks import MASKED, Stage
from stages.mutation import Edit, mutate

BOTH = pytest.mark.parametrize("liars", [0, 1])


def scene(count: int = 8, liars: int = 1, **changes) -> LyingLeader:
    return LyingLeader(Stage(count, settings=replace(MASKED, liars=liars, **changes)))


def went_on(leader: LyingLeader, played: list, *, summed: bool = True) -> bool:
    """Whether the honest agree, and have summed at least once what all of them brought."""
    stage = leader.stage
    honest = [stage.people[name] for name in leader.others if stage.network.alive(name)]
    decided = all({o.status for o in outcomes.values()} == {"committed"} for outcomes in played)
    last = honest[0].record.roster
    sums = last is not None and last.exchange != VOID and set(last.ids) == {person.net.me for person in honest}
    return decided and len({person.state.hash for person in honest}) == 1 and (sums or not summed)


def unmasked_in(leader: LyingLeader, iteration: int = 1) -> list[set[str]]:
    """Whose sums the honest have helped to unmask in an iteration."""
    return [set(roster.ids) for roster in leader.stage.helped.values() if roster.iteration == iteration]


# --- two rosters ---


def proofs_of_two(
    leader: LyingLeader, helpers: int, *, careful: bool = False, unnamed: str = ""
) -> tuple[list[PledgeProof | None], list]:
    """It asks electors for pledges to two rosters, some for the one first, some for the other, and signs both itself.

    One is of all the others, the other of all of them but one. So many helpers sign both, too. A careful leader asks
    nobody for both, so that nobody sees two seals.
    """
    proofs: list[PledgeProof | None] = []
    liars = leader.electors[: 1 + helpers]
    honest, by = [elector.id for elector in leader.electors if elector not in liars], [liar.id for liar in liars]

    async def attack():
        await leader.propose(0)
        rosters = leader.roster(leader.others), leader.roster(leader.others[:-1])
        halves = honest[::2], honest[1::2]
        given = [await leader.ask_pledges(roster, 0, half, by) for roster, half in zip(rosters, halves, strict=True)]
        for roster, signed in zip(rosters, given, strict=True):
            said = pledge_statement(roster, 0)
            mine = {elector.id: leader.stage.people[elector.id].net.sign(said) for elector in liars}
            more = {} if careful else await leader.ask_pledges(roster, 0, honest, by)
            proofs.append(leader.proof(mine | signed | more))

    return proofs, leader.play(attack, unnamed=unnamed)


@pytest.mark.parametrize(("count", "liars"), [(4, 1), (7, 1), (8, 1), (7, 2), (10, 3)])
def test_a_leader_that_tells_two_rosters_never_has_proofs_of_both(count, liars):
    leader = scene(count, liars)
    proofs, played = proofs_of_two(leader, liars - 1)
    assert len(proofs) == 2
    assert None in proofs
    assert len(unmasked_in(leader)) <= 1
    assert went_on(leader, played)


@pytest.mark.parametrize("count", [4, 7])
def test_a_leader_that_asks_for_pledges_to_two_rosters_is_named_and_left_out(count):
    """Without its signature of a roster it gets no pledge, and with two of them it is known for a liar."""
    leader = scene(count)
    _, played = proofs_of_two(leader, 0)
    honest = [leader.stage.people[name] for name in leader.others]
    assert all(CONTRADICTION in person.standing.banned.get(leader.name, "") for person in honest)
    assert went_on(leader, played)


def test_the_mutant_that_pledges_itself_to_what_nobody_sealed_is_caught(monkeypatch):
    mutate([Edit(rounds.MaskedRounds.pledge, "self._is_sealed(sender, instance, roster, asked)", "True")], monkeypatch)
    with pytest.raises(AssertionError):
        test_a_leader_that_asks_for_pledges_to_two_rosters_is_named_and_left_out(4)


@pytest.mark.parametrize(("liars", "helpers"), [(0, 0), (1, 2)])
def test_more_liars_than_are_borne_may_have_two_proofs(liars, helpers):
    """What the setting means: with `liars = 0` the leader alone is one too many."""
    unnamed = "" if liars else "no leader is taken for a liar, and this one asks nobody for both"
    proofs, _ = proofs_of_two(scene(8, liars), helpers, careful=True, unnamed=unnamed)
    assert None not in proofs


@pytest.mark.parametrize("liars", [0])  # where votes bear a liar, nobody begins a later attempt that nothing justifies
def test_who_gave_its_seed_for_one_roster_gives_no_shares_for_another_of_the_same_masks(liars, monkeypatch):
    """First the sum over all. Then one of them is said to be lost, under the same masks: with its key as well as its
    seed its value could be read. Even who is shown pledges to both gives nothing more."""
    leader = scene(liars=liars)
    first, second, third = [], [], []

    async def attack():
        await leader.propose(0)
        everybody = leader.roster(leader.others)
        assert await leader.seal(everybody) == set(leader.others)
        await leader.pause(2.0)
        proof = leader.proof(leader.pledges(everybody, 0))
        first.append(await leader.reveal(everybody, 0, proof, seeds_of=(0,)))
        attempt = len(leader.electors)
        await leader.propose(attempt)
        victim, rest = everybody.ids[0], everybody.ids[1:]
        without = replace(leader.roster(rest, attempt), masks=everybody.masks, circle=everybody.ids)
        begun = await leader.seal(without, attempt, rest)
        assert begun == set(rest)
        await leader.pause(2.0)
        signed = leader.pledges(without, attempt) | await leader.ask_pledges(without, attempt, leader.others)
        signed = {peer: signature for peer, signature in signed.items() if signature}
        assert set(signed) == {leader.name}  # all others are bound to the first
        places = tuple(range(pledges_needed(len(leader.electors), liars)))
        forged = PledgeProof(places, b"".join(leader.net.sign(pledge_statement(without, attempt)) for _ in places))
        second.append(await leader.reveal(without, attempt, forged, keys_of=(0,)))
        monkeypatch.setattr(rounds, "proves", lambda *_: True)  # as if a quorum of the electors lied
        third.append(await leader.reveal(without, attempt, forged, keys_of=(0,)))
        monkeypatch.undo()
        assert victim not in without.ranks

    played = leader.play(attack)
    assert all(len(payload) in (32, 32 + SHARE_SIZE) for payload in first[0].values())
    assert set(first[0]) == set(leader.others)
    assert second == third == [{}]
    assert unmasked_in(leader) == [set(leader.others)]
    assert went_on(leader, played)


@pytest.mark.parametrize("liars", [0])  # as above
def test_pledges_of_another_attempt_or_to_another_roster_open_nothing(liars):
    leader = scene(liars=liars)
    given = []

    async def attack():
        await leader.propose(0)
        roster = leader.roster(leader.others)
        await leader.seal(roster)
        await leader.pause(2.0)
        old = leader.proof(leader.pledges(roster, 0))
        other = replace(roster, group_size=5)
        given.append(await leader.reveal(other, 0, old))
        attempt = len(leader.electors)
        await leader.propose(attempt)
        given.append(await leader.reveal(roster, attempt, old))  # of attempt 0
        await leader.seal(roster, attempt)
        await leader.pause(2.0)
        given.append(await leader.reveal(roster, attempt, old))
        new = leader.proof(leader.pledges(roster, attempt))
        given.append(await leader.reveal(roster, attempt, new))

    played = leader.play(attack)
    assert [len(each) for each in given] == [0, 0, 0, len(leader.others)]
    assert went_on(leader, played)


@BOTH
def test_votes_without_signatures_open_nothing(liars):
    leader = scene(liars=liars)
    given = []

    async def attack():
        await leader.propose(0)
        roster = leader.roster(leader.others)
        await leader.seal(roster)
        await leader.pause(2.0)
        places, said = tuple(range(8)), pledge_statement(roster, 0)
        mine = leader.net.sign(said)
        proof = leader.proof(leader.pledges(roster, 0))
        for lie in (
            PledgeProof(places, b""),
            PledgeProof(places, bytes(64 * 8)),
            PledgeProof(places, mine * 8),
            PledgeProof((0,) * 8, mine * 8),
            PledgeProof(proof.places, proof.signatures[:-64] + mine),
            PledgeProof(proof.places[1:], proof.signatures[64:]) if liars else PledgeProof((), b""),
        ):
            given.append(await leader.reveal(roster, 0, lie))

    played = leader.play(attack)
    assert given == [{}] * 6
    assert went_on(leader, played)


# --- made-up members, swapped keys, tiny rosters ---


def begins(leader: LyingLeader, make, unnamed: str = "") -> set[str]:
    """Who begins with a roster and keys that this makes of the first attempt's acks; then all of them go on.

    Whoever does not begin names the leader with what it refused.
    """
    found, asked = [], []

    async def attack():
        await leader.propose(0)
        roster, keys = make()
        asked.extend(name for name in roster.ids if name in leader.others)
        found.append(await leader.seal(roster, keys=keys))

    played = leader.play(attack, unnamed=unnamed)
    assert went_on(leader, played)
    assert all(leader.name in refusals_of(leader, name) for name in asked if name not in found[0])
    return found[0]


def refusals_of(leader: LyingLeader, name: str) -> dict[str, dict[str, int]]:
    """What one of the others has refused, by the name of who sent it."""
    return leader.stage.people[name].net.refused.named()


def made_up(leader: LyingLeader, name: str, attempt: int = 0) -> bytes:
    """The card of a peer that does not exist, with its signature."""
    card = KeyPair().public
    net = leader.stage.network.join(name)
    decision = leader.stage.people[leader.others[0]].instance.decision
    return card + net.sign(card_statement(decision, attempt, card))


@BOTH
def test_nobody_is_summed_with_made_up_members_alone(liars):
    leader = scene(liars=liars)

    def make():
        keys = leader.keys[0] | {name: made_up(leader, name) for name in ("ghost1", "ghost2", "ghost3")}
        return leader.roster([leader.others[0], "ghost1", "ghost2", "ghost3"], keys=keys), keys

    assert begins(leader, make) == set()


@BOTH
def test_nobody_masks_its_value_under_a_key_that_its_owner_did_not_sign_for_this_attempt(liars):
    """The victim's keys are the leader's own; or those that it offered for another attempt."""
    leader = scene(liars=liars)
    victim = leader.others[2]

    def swapped():
        stolen = KeyPair().public + leader.keys[0][victim][KEY_BYTES:]
        keys = leader.keys[0] | {victim: stolen}
        return leader.roster(leader.others, keys=keys), keys

    assert begins(leader, swapped) == set()
    late, found = scene(liars=liars), []

    async def attack():
        await late.propose(0)
        await late.propose(len(late.electors))
        keys = late.keys[len(late.electors)] | {victim: late.keys[0][victim]}
        roster = late.roster(late.others, len(late.electors), keys)
        found.append(await late.seal(roster, len(late.electors), keys=keys))

    assert went_on(late, late.play(attack))
    assert found == [set()]


def test_in_a_large_roster_the_neighbours_of_a_swapped_key_do_not_begin():
    leader = scene(38)
    victim = leader.others[2]
    rosters = []

    def swapped():
        keys = leader.keys[0] | {victim: KeyPair().public + leader.keys[0][victim][KEY_BYTES:]}
        rosters.append(leader.roster(leader.others, keys=keys))
        return rosters[0], keys

    begun = begins(leader, swapped)
    (roster,) = rosters
    graph = rounds.neighbours(roster.base, roster.ids)
    circle = {roster.ids[rank] for rank in graph[roster.ranks[victim]]}
    assert len(circle) == degree(37) < 36
    assert begun == set(leader.others) - circle - {victim}
    assert unmasked_in(leader) == [set(leader.others)]


@BOTH
@pytest.mark.parametrize("train", [False, True])
def test_a_victim_and_two_accomplices_get_no_pledges_of_those_who_bring_something_too(liars, train):
    """Ten electors; the roster is of three. All others bring an update, or might still: they still train."""
    leader = scene(10, liars=liars)
    victim, *helpers = leader.others[:3]
    rest = leader.others[3:]
    signed, given = {}, []

    async def attack():
        trainers = [leader.stage.people[name].instance for name in rest if train]
        brought = [instance.mine for instance in trainers]
        for instance in trainers:
            instance.begun, instance.mine = False, None
        await leader.propose(0)
        tiny = leader.roster([victim, *helpers])
        assert victim in await leader.seal(tiny)
        signed.update(await leader.ask_pledges(tiny, 0, rest, helpers))
        await leader.pause(1.0)
        liars_all = [leader.name, *helpers]
        mine = {name: leader.stage.people[name].net.sign(pledge_statement(tiny, 0)) for name in liars_all}
        everything = mine | leader.pledges(tiny, 0)
        assert leader.proof(everything) is None
        places = tuple(at for at, elector in enumerate(leader.electors) if elector.id in everything)
        signatures = b"".join(everything[leader.electors[at].id] for at in places)
        given.append(await leader.reveal(tiny, 0, PledgeProof(places, signatures)))
        for instance, mine in zip(trainers, brought, strict=True):
            instance.begun, instance.mine = True, mine

    played = leader.play(attack, iterations=2)
    assert signed == {}
    assert given == [{}]
    assert all(len(ids) > 3 for ids in unmasked_in(leader))
    assert went_on(leader, played)


def test_a_roster_smaller_than_the_run_allows_is_not_begun():
    leader = scene(smallest_sum=5)
    assert begins(leader, lambda: (leader.roster(leader.others[:4]), None)) == set()
    leader = scene(smallest_sum=4)
    four = leader.others[:4]
    assert begins(leader, lambda: (leader.roster(four), None), "such a roster is allowed") == set(four)


def test_a_roster_without_a_quorum_of_the_known_electors_is_not_begun():
    leader = scene()
    assert begins(leader, lambda: (replace(leader.roster(leader.others[:4]), witnesses=()), None)) == set()


def test_a_leader_cannot_name_other_electors_than_those_that_are_known():
    leader = scene()
    mine = (Elector(leader.name, 0), Elector(leader.others[0], 1))

    def make():
        return replace(leader.roster(leader.others), electors=mine), None

    assert begins(leader, make) == set()


def test_a_member_whose_weight_is_told_wrongly_does_not_begin():
    leader = scene()

    def make():
        roster = leader.roster(leader.others)
        first = roster.members[0]._replace(weight=2.0)
        return replace(roster, members=(first, *roster.members[1:])), None

    assert begins(leader, make) == set(leader.others) - {leader.others[0]}


# --- members that lie ---


def deal_badly(stage: Stage, name: str, *, spoilt: int) -> None:
    """This peer deals so many neighbours shares of nothing, and gives its own seed to nobody."""
    person = stage.people[name]
    trade = person.masked._trade_shares

    async def cheat(attempt, session):
        junk = torch.arange(2 * SHARE_SIZE, dtype=torch.uint8).numpy().tobytes()
        session.deal()
        for other in list(session._dealt)[:spoilt]:
            context = session._context(session.rank, other)
            session._dealt[other] = seal_share(session.pair, session.keys[other], context, junk)
        await trade(attempt, session)

    async def nothing(*_):
        return rounds.Revealed("refused", ()).parcel()

    person.masked._trade_shares = cheat
    person.net.serve("reveal", nothing)


def last_elector(stage: Stage) -> str:
    return rounds.ranked("run", 1, stage.record.electors)[-1].id


@BOTH
def test_a_few_bad_shares_spoil_nothing(liars):
    stage = Stage(9, settings=replace(MASKED, liars=liars))
    dealer = last_elector(stage)
    assert (8 - threshold(8)) // 2 == 1
    deal_badly(stage, dealer, spoilt=1)
    outcomes = stage.play()
    roster = stage.people["p0"].record.roster
    assert dealer in roster.ids
    assert {outcome.hash for outcome in outcomes.values()} == {stage.expected(roster)}


@BOTH
def test_whoever_deals_bad_shares_is_named_and_sits_out_while_the_others_go_on(liars):
    stage = Stage(9, settings=replace(MASKED, liars=liars))
    dealer = last_elector(stage)
    deal_badly(stage, dealer, spoilt=8)
    stage.play(2)
    rosters = [stage.people["p0"].history[at].roster for at in (1, 2)]
    assert [roster.exchange == VOID for roster in rosters] == [True, False]
    assert BAD_SHARES in dict(rosters[0].omitted).get(dealer, "")
    assert dealer not in rosters[1].ids
    assert len(rosters[1].ids) >= 7
    assert len({person.state.hash for person in stage.people.values()}) == 1


@BOTH
def test_a_wrong_seed_is_not_taken_and_follows_from_its_owners_shares_instead(liars):
    stage = Stage(9, settings=replace(MASKED, liars=liars))
    liar = last_elector(stage)

    def watch(event, delivery):
        if event.op == "answer" and event.tag.channel == "reveal" and event.source == liar:
            payload = bytes(delivery.parcel.payload)
            delivery.parcel = delivery.parcel._replace(payload=bytes(32) + payload[32:])

    stage.watch = watch
    outcomes = stage.play()
    roster = stage.people["p0"].record.roster
    assert liar in roster.ids
    assert stage.people["p0"].instance.promised == 0  # at once
    assert {outcome.hash for outcome in outcomes.values()} == {stage.expected(roster)}


@BOTH
def test_wrong_secrets_of_a_leader_unmask_nothing_and_the_next_one_sees_the_roster_through(liars):
    stage = Stage(7, settings=replace(MASKED, liars=liars))
    leader = rounds.ranked("run", 1, stage.record.electors)[0].id

    def watch(event, delivery):
        payload = bytes(delivery.parcel.payload)
        if event.op == "answer" and event.tag.channel == "held" and event.source == leader and payload:
            delivery.parcel = delivery.parcel._replace(payload=payload[32:64] + payload[32:])

    stage.watch = watch
    outcomes = stage.play()
    roster = stage.people["p0"].record.roster
    assert set(roster.ids) == set(stage.people)
    assert not any(person.instance.masks.hopeless for person in stage.people.values())
    assert {outcome.hash for outcome in outcomes.values()} == {stage.expected(roster)}


def test_whose_keys_are_not_signed_is_left_out_by_name_and_the_others_sum():
    stage = Stage(7, settings=replace(MASKED, liars=1))
    sloppy = last_elector(stage)
    stage.people[sloppy].voting.offered_keys = lambda _: KeyPair().public + bytes(64)
    stage.play()
    roster = stage.people["p0"].record.roster
    assert roster is not None
    assert (roster.exchange, roster.attempt) == ("full", 0)
    assert dict(roster.omitted) == {sloppy: UNSIGNED}


@BOTH
def test_an_elector_that_makes_up_a_pledge_stops_nobody(liars):
    """It says in every vote that it has pledged itself to a roster that nobody else has heard of."""
    stage = Stage(7, settings=replace(MASKED, liars=liars))
    liar = stage.people[last_elector(stage)]
    ack, record = liar.voting.ack, stage.record
    fake = Roster(
        "run", 1, 0, record.lineage, record.hash, liar.standing.layout, "full", 3, (Member("p0", 0, 1.0),), (), (), (),
        "masked", bytes(32),
    )  # fmt: skip

    def lying_ack(status, instance=None, **said):
        told = ack(status, instance, **said)
        return replace(told, pledged=fake.encoded, pledged_attempt=0, sum_here=True) if status == "ack" else told

    liar.voting.ack = lying_ack
    outcomes = stage.play()
    if liars:
        assert {outcome.exchange for outcome in outcomes.values()} == {"full"}
    else:  # without liars everybody's word counts: the iteration goes by, and nothing is revealed
        assert not stage.lifted
