"""The rules of pledges as tables: which proofs count, which rosters are sound, who agrees, what is seen through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from marfl.net.virtual import VirtualNetwork
from marfl.protocol.instance import Instance
from marfl.protocol.mask_pledges import (
    BAD_SHARES,
    SUSPECTED,
    Masking,
    Needs,
    PledgeProof,
    agrees,
    card_statement,
    decision_of,
    is_signed_card,
    is_sound,
    keys_for,
    keys_to,
    known_contributions,
    masked,
    pledge_statement,
    promised,
    proof_of,
    proves,
    suspected,
)
from marfl.protocol.messages import Complaint
from marfl.protocol.participant import genesis
from marfl.protocol.roster import VOID, Elector, Member, Roster
from marfl.protocol.voting import names_electors_rightly
from marfl.secagg.crypto import KeyPair
from marfl.secagg.graph import neighbours
from marfl.secagg.session import epoch_of
from marfl.state import Snapshot
from stages.forgery import an_ack

NAMES = tuple(f"p{i}" for i in range(7))
ELECTORS = tuple(Elector(name, i) for i, name in enumerate(NAMES))
NET = VirtualNetwork(0)
NETS = {name: NET.join(name) for name in (*NAMES, "new1", "new2", "new3")}
VERIFY = NETS["p0"].verify


def a_roster(members=NAMES, witnesses=(), **changes) -> Roster:
    people = tuple(Member(name, at, 1.0) for at, name in enumerate(members))
    voters = tuple(Elector(name, 100 + at) for at, name in enumerate(witnesses))
    blank = Roster(
        "run", 1, 0, bytes(32), b"b" * 32, bytes(32), "full", 3, people, voters, (), (), "masked", b"e" * 32
    )  # fmt: skip
    return replace(blank, **changes)


def signed(roster: Roster, attempt: int, names) -> dict[str, bytes]:
    return {name: NETS[name].sign(pledge_statement(roster, attempt)) for name in names}


# --- proofs ---


@pytest.mark.parametrize(("liars", "needed"), [(0, 4), (1, 5), (2, 5)])
def test_a_proof_is_a_quorum_of_signatures_and_no_more(liars, needed):
    roster = a_roster()
    assert proof_of(ELECTORS, signed(roster, 3, NAMES[: needed - 1]), liars) is None
    proof = proof_of(ELECTORS, signed(roster, 3, NAMES), liars)
    assert proof.places == tuple(range(needed))
    assert proves(proof, roster, 3, ELECTORS, liars, VERIFY)
    assert not proves(proof, roster, 4, ELECTORS, liars, VERIFY)
    assert not proves(proof, replace(roster, group_size=4), 3, ELECTORS, liars, VERIFY)
    assert not proves(proof, replace(roster, lineage=b"l" * 32), 3, ELECTORS, liars, VERIFY)
    assert not proves(proof, roster, 3, ELECTORS[::-1], liars, VERIFY)


def test_a_proof_with_a_vote_twice_or_out_of_place_proves_nothing():
    roster = a_roster()
    places, signatures = proof_of(ELECTORS, signed(roster, 0, NAMES), 1)
    one, last = signatures[:64], signatures[-64:]
    for lie in (
        PledgeProof((0, 0, 1, 2, 3), one + signatures[:-64]),
        PledgeProof((*places[:-1], 7), signatures),
        PledgeProof((-1, *places[1:]), signatures),
        PledgeProof(places, signatures[:-1]),
        PledgeProof(places, signatures[64:] + one),
        PledgeProof((4, 0, 1, 2, 3), last + signatures[:-64]),
        PledgeProof((), b""),
    ):
        assert not proves(lie, roster, 0, ELECTORS, 1, VERIFY)


def test_half_of_the_electors_are_a_proof_only_with_the_first():
    electors, roster = ELECTORS[:4], a_roster(NAMES[:4])
    assert proof_of(electors, signed(roster, 0, ("p0", "p3")), 0).places == (0, 3)
    assert proof_of(electors, signed(roster, 0, ("p1", "p3")), 0) is None


def test_an_elector_signs_pledges_to_one_roster_of_a_lineage_in_all_attempts():
    masks, sign = Masking(), NETS["p0"].sign
    first, second = a_roster(), a_roster(NAMES[:6])
    assert masks.bind(first, 0, sign) == sign(pledge_statement(first, 0))
    assert masks.bind(second, 1, sign) == b""
    assert masks.pledge.roster == first
    assert masks.bind(first, 2, sign) == sign(pledge_statement(first, 2))
    assert masks.bind(replace(second, lineage=b"l" * 32), 0, sign)


# --- cards ---


def cards(roster: Roster) -> tuple[dict[str, KeyPair], dict[str, bytes]]:
    pairs = {name: KeyPair() for name in roster.ids}
    told = {
        name: pair.public + NETS[name].sign(card_statement(decision_of(roster), roster.attempt, pair.public))
        for name, pair in pairs.items()
    }
    return pairs, told


def test_a_card_is_its_owners_for_one_attempt_at_one_decision():
    roster = a_roster()
    _, told = cards(roster)
    decision = decision_of(roster)
    assert is_signed_card("p0", decision, 0, told["p0"], VERIFY)
    assert not is_signed_card("p1", decision, 0, told["p0"], VERIFY)
    assert not is_signed_card("p0", decision, 1, told["p0"], VERIFY)
    for other in (decision._replace(iteration=2), decision._replace(base=bytes(32)), decision._replace(run="other")):
        assert not is_signed_card("p0", other, 0, told["p0"], VERIFY)
    assert not is_signed_card("p0", decision, 0, told["p1"][:96] + told["p0"][96:], VERIFY)
    assert not is_signed_card("p0", decision, 0, told["p0"][:-1], VERIFY)
    assert not is_signed_card("p0", decision, 0, b"", VERIFY)


def test_a_card_covers_the_hash_of_the_seed():
    roster = a_roster()
    told = cards(roster)[1]["p0"]
    changed = told[:64] + bytes(32) + told[96:]
    assert not is_signed_card("p0", decision_of(roster), 0, changed, VERIFY)


@pytest.mark.parametrize("count", [7, 40])
def test_a_member_is_sent_all_cards_and_its_neighbours_signatures(count):
    names = tuple(f"p{i}" for i in range(count))
    NETS.update({name: NET.join(name) for name in names if name not in NETS})
    roster = a_roster(names)
    pairs, told = cards(roster)
    roster = replace(roster, masks=epoch_of("run", 1, names, [told[name][:96] for name in names]))
    everything = keys_for(roster, told)
    circle = neighbours(roster.base, names)[3]
    mine = keys_to("p3", roster, everything)
    assert len(mine) == 96 * count + 64 * len(circle)
    masks = Masking(offered={0: pairs["p3"]})
    assert masks.open(roster, "p3", mine, VERIFY)
    assert masks.session.keys == tuple(told[name][:96] for name in names)
    session = masks.session
    assert masks.open(replace(roster, attempt=0, members=roster.members[:-1], circle=names), "p3", b"", VERIFY)
    assert masks.open(roster, "p3", mine, VERIFY)
    assert masks.session is session  # with all that it remembers to have given away
    for lie in (mine[:-1], mine[:-64] + bytes(64), mine + bytes(64), b"", keys_to("p4", roster, everything)[:-1]):
        assert not Masking(offered={0: pairs["p3"]}).open(roster, "p3", lie, VERIFY)
    assert not Masking(offered={0: KeyPair()}).open(roster, "p3", mine, VERIFY)
    assert not Masking(offered={1: pairs["p3"]}).open(roster, "p3", mine, VERIFY)
    assert keys_to("stranger", roster, everything) == b""


# --- which rosters are sound, and who agrees ---


@pytest.mark.parametrize(
    ("members", "witnesses", "smallest", "liars", "sound"),
    [
        (NAMES, (), 3, 1, True),
        (NAMES[:4], (), 3, 0, True),
        (NAMES[:4], (), 3, 1, False),  # five of seven must be there
        (NAMES[:3], NAMES[3:], 3, 1, True),
        (NAMES[:3], NAMES[3:], 4, 1, False),
        (NAMES[:2], NAMES[2:], 3, 1, False),
        (("p0", "new1", "new2", "new3"), NAMES[1:], 3, 1, False),  # whom only the leader knows
        (("p0", "p1", "p2", "new1"), NAMES[3:], 4, 1, False),
    ],
)
def test_a_sound_roster_has_a_quorum_of_known_electors_and_enough_of_their_contributions(
    members, witnesses, smallest, liars, sound
):
    assert is_sound(a_roster(members, witnesses), ELECTORS, smallest, liars) is sound


def test_those_who_only_help_to_aggregate_are_no_contributions():
    roster = a_roster()
    idle = tuple(member._replace(weight=0.0) for member in roster.members[2:])
    assert not is_sound(replace(roster, members=(*roster.members[:2], *idle)), ELECTORS, 3, 1)


@pytest.mark.parametrize(
    ("peer", "said", "agreed"),
    [
        ("p0", {}, True),  # in the sum
        ("p6", {}, False),  # it brings something, and is left out
        ("p6", {"role": "witness", "join": False}, True),
        ("p6", {"role": "training", "join": False}, False),
        ("p6", {"role": "behind", "join": False}, False),
        ("p6", {"spent": True}, True),
        ("p6", {"fewest": 7}, True),
        ("p6", {"fewest": 6}, False),
        ("p6", {"layout": b"x" * 32}, True),
        ("p6", {"blamed": (Complaint("p1", "NaN", True),)}, True),
        ("p6", {"blamed": (Complaint("p1", "late", False),)}, False),
    ],
)
def test_whoever_could_bring_something_agrees_to_no_sum_without_it(peer, said, agreed):
    assert agrees(peer, an_ack(**said), a_roster(NAMES[:6])) is agreed


# --- what a leader seals ---


def seal(acks, *, unsigned=(), liars=1, smallest=3) -> Roster | None:
    members, others = ([name for name, ack in acks.items() if ack.join is joins] for joins in (True, False))
    roster = a_roster(members, others, masks=b"", wire="masked")
    _, told = cards(roster)
    told |= dict.fromkeys(unsigned, b"")
    return masked(None, roster, acks, told, Needs(ELECTORS, smallest, liars))


def test_a_leader_leaves_out_whose_keys_are_not_signed_by_name():
    roster = seal({name: an_ack() for name in NAMES}, unsigned=("p2",))
    assert "p2" not in roster.ranks
    assert "signed" in dict(roster.omitted)["p2"]
    assert len(roster.masks) == 32


def test_a_leader_waits_where_too_many_still_train():
    here = {name: an_ack() for name in NAMES[:4]}
    busy = {name: an_ack(join=False, role="training") for name in ("p4", "p5")}
    assert seal(here | busy) is None
    assert seal(here | busy | {"p5": an_ack(join=False, role="behind")}) is not None  # it may only vote
    assert seal(here | busy, liars=0) is not None  # four of seven will do
    witness = {"p4": an_ack(join=False, role="witness")}
    assert seal(here | witness).exchange == "full"
    assert seal(here).exchange == VOID  # nobody is waited for who does not answer


def test_a_leader_lets_an_iteration_go_by_whose_sum_would_be_too_small():
    acks = {name: an_ack() for name in NAMES[:4]} | {name: an_ack(join=False, role="witness") for name in NAMES[4:]}
    assert seal(acks, smallest=4).exchange == "full"
    assert seal(acks, smallest=5).exchange == VOID


def pledging(roster: Roster, names, attempt: int = 0, **said):
    return {name: an_ack(pledged=roster.encoded, pledged_attempt=attempt, **said) for name in names}


def test_a_leader_sees_the_roster_through_that_more_than_the_liars_have_pledged_themselves_to():
    roster = a_roster()
    free = {name: an_ack() for name in NAMES}
    assert promised(ELECTORS, free, 1) is None
    assert promised(ELECTORS, free | pledging(roster, ("p6",)), 1) is None
    assert promised(ELECTORS, free | pledging(roster, ("p6",)), 0).roster == roster
    assert promised(ELECTORS, free | pledging(roster, ("p6",)), 1, {roster.digest}).roster == roster
    found = promised(ELECTORS, free | pledging(roster, ("p5", "p6"), sum_here=True), 1)
    assert found.holders == ("p5", "p6")


def test_a_roster_is_lost_that_too_few_can_pledge_themselves_to():
    one, two = a_roster(), a_roster(NAMES[:6])
    free = {name: an_ack() for name in NAMES}
    torn = free | pledging(one, NAMES[:3], sum_here=True) | pledging(two, NAMES[3:6], 1, sum_here=True)
    assert promised(ELECTORS, torn, 1).lost
    tiny = a_roster(NAMES[:3], NAMES[3:])
    assert promised(ELECTORS, free | pledging(tiny, NAMES[:3], sum_here=True), 1).lost
    assert not promised(ELECTORS, free | pledging(one, NAMES[:3], sum_here=True), 1).lost


@pytest.mark.parametrize(("liars", "claims", "lost"), [(0, 0, False), (0, 1, True), (1, 1, False), (1, 2, True)])
def test_a_roster_is_hopeless_when_more_than_the_liars_say_so(liars, claims, lost):
    roster = a_roster()
    acks = pledging(roster, NAMES, sum_here=True)
    acks |= pledging(roster, NAMES[:claims], sum_here=True, hopeless=True)
    assert promised(ELECTORS, acks, liars).lost is lost


def test_who_dealt_bad_shares_is_complained_of_for_some_iterations_while_it_votes():
    complaint = (Complaint("p3", BAD_SHARES, True),)
    assert suspected({"p3": 5, "gone": 5}, ELECTORS, 6) == complaint
    assert suspected({"p3": 5}, ELECTORS, 5 + SUSPECTED) == complaint
    assert suspected({"p3": 5}, ELECTORS, 6 + SUSPECTED) == ()


def test_of_made_up_members_none_counts_towards_a_sum_that_is_large_enough() -> None:
    assert known_contributions(a_roster(("p0", "new1", "new2", "new3")), ELECTORS) == 1
    assert known_contributions(a_roster(), ELECTORS) == len(NAMES)


def test_only_who_founds_a_lineage_names_its_electors() -> None:
    state = Snapshot(0, {}, {})
    instance = Instance.after("run", genesis(state, tuple((elector.id, elector.index) for elector in ELECTORS)), 0.0)
    named = a_roster(electors=ELECTORS[:3])
    assert names_electors_rightly(instance, a_roster())
    assert not names_electors_rightly(instance, named)
    instance.found(b"l" * 32, "p0")
    assert names_electors_rightly(instance, named)
