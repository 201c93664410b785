"""Masked sums among peers: the very sum of a run without masks, whoever dies when; and nothing else to be seen."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from random import Random

import pytest
import torch

from marfl.config import load
from marfl.errors import InputError
from marfl.net.base import Parcel
from marfl.net.virtual import VirtualNetwork
from marfl.peer.voter import real_participant
from marfl.plan.grid import order
from marfl.protocol.fixed_point import encode
from marfl.protocol.messages import Reveal
from marfl.protocol.participant import ABANDONED, genesis
from marfl.protocol.protocol_settings import EXCHANGES, Settings
from marfl.protocol.roster import VOID
from marfl.secagg.graph import KEY_BYTES, degree, mask_cost, threshold
from marfl.sim.engine import Simulation
from marfl.state import Snapshot, layout_of
from marfl.testing.world import World, advance
from stages.masks import Death, Stage

MASKED = Settings(wire="masked", group_size=3, exchange="full", on_minority="wait")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("count", [3, 4, 7, 11])
def test_a_masked_run_ends_on_the_bits_of_an_unmasked_one(exchange, count):
    settings = replace(MASKED, exchange=exchange)
    weights = (0.25, 1.0, 3.0, 1.0, 0.0)
    hidden = Stage(count, settings=settings, weights=weights)
    plain = Stage(count, settings=replace(settings, wire="fixed"), weights=weights)
    outcomes = hidden.play(2)
    plain.play(2)
    assert {o.status for o in outcomes.values()} == {"committed"}
    states = {person.state.hash for stage in (hidden, plain) for person in stage.people.values()}
    assert len(states) == 1
    assert hidden.people["p0"].record.roster.masks != b""


@pytest.mark.parametrize("liars", [0, 1])
@pytest.mark.parametrize("count", [3, 8, 36])
def test_what_masks_cost_is_what_the_plan_says(count, liars):
    sent = {}
    for wire in ("fixed", "masked"):
        stage = Stage(count, settings=replace(MASKED, wire=wire, exchange="grid", liars=liars))
        stage.play()
        ledgers = [person.net.sent for person in stage.people.values()]
        sent[wire] = [sum(getattr(one, name) for one in ledgers) for name in ("payload", "masks", "messages")]
    cost = mask_cost(count, liars=liars)
    assert sent["masked"] == [sent["fixed"][0], cost.bytes_total, sent["fixed"][2] + cost.messages]


def test_masks_are_expanded_and_taken_off_where_a_peer_may_answer_meanwhile():
    made: list[torch.Tensor] = []

    async def spy(work):
        made.append(work())
        return made[-1]

    stage = Stage(5)
    for person in stage.people.values():
        person.talk.compute = spy
    stage.play()
    assert len(made) == 2 * 5
    assert sum(int(values.abs().max()) > 2**48 for values in made) == 5  # masked; and five plain sums


async def test_a_real_peer_answers_while_it_computes():
    net = VirtualNetwork(0).join("me")
    state = Snapshot(0, {"theta": torch.zeros(1)}, {})
    voter = real_participant(net, MASKED, 0, layout_of(torch.nn.Linear(1, 1)), state, genesis(state), advance)
    heard = threading.Event()
    work = asyncio.create_task(voter.talk.compute(lambda: heard.wait(10)))
    await asyncio.sleep(0)  # it has begun
    heard.set()  # somebody was answered
    assert await work


# --- deaths ---


def in_order(count: int) -> list[str]:
    """Who leads the attempts of the first iteration, one after the other."""
    return [peer for _, peer in order("run", 1, [(i, f"p{i}") for i in range(count)])]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("turn", [0, 5])
def test_a_death_before_the_first_value_is_sent_costs_a_recovery_with_the_same_masks(exchange, turn):
    victim = in_order(8)[turn]
    stage = Stage(8, deaths=(Death(victim, "reduce"),), settings=replace(MASKED, exchange=exchange))
    outcomes = stage.play()
    roster = stage.living[0].record.roster
    assert victim in roster.circle
    assert len(roster.circle) == 8
    assert roster.masks == next(iter({person.instance.masks.session.epoch for person in stage.living}))
    assert all(outcome.missing.keys() == {victim} for outcome in outcomes.values())
    assert {person.state.hash for person in stage.living} == {stage.expected(roster)}


@pytest.mark.parametrize("channel", ["held", "reveal"])
def test_a_death_after_the_sum_costs_its_neighbours_shares_and_no_attempt(channel):
    victim = in_order(8)[5]
    stage = Stage(8, deaths=(Death(victim, channel),))
    outcomes = stage.play()
    roster = stage.living[0].record.roster
    assert victim in roster.ids
    assert roster.attempt == 0
    assert set(outcomes) == set(stage.people) - {victim}
    assert {outcome.hash for outcome in outcomes.values()} == {stage.expected(roster)}


@pytest.mark.parametrize("channel", ["held", "reveal"])
def test_when_the_leader_dies_after_the_sum_the_next_one_sees_the_same_roster_through(channel):
    leader = in_order(8)[0]
    stage = Stage(8)

    calls: list[object] = []

    def watch(event, delivery):
        if (event.op, event.tag.channel) == ("call", channel):
            calls.append(event)
            if len(calls) == 4:
                delivery.copies = 0
                stage.network.crash(leader)

    stage.watch = watch
    outcomes = stage.play()
    roster = stage.living[0].record.roster
    assert roster is not None
    assert leader in roster.ids
    assert leader not in outcomes
    assert {outcome.hash for outcome in outcomes.values()} == {stage.expected(roster)}
    assert set(stage.helped) <= {roster.digest}


@pytest.mark.parametrize("channel", ["reduce", "shares"])
def test_a_death_in_between_costs_an_attempt_with_fresh_keys(channel):
    victim = in_order(8)[5]
    stage = Stage(8, deaths=(Death(victim, channel, after=1),), settings=replace(MASKED, exchange="grid"))
    keys: list[bytes] = []

    def watch(event, delivery):
        if event.op == "answer" and event.tag.channel == "propose":
            keys.append(bytes(delivery.parcel.payload)[:KEY_BYTES])

    stage.watch = watch
    stage.play()
    roster = stage.living[0].record.roster
    assert victim not in roster.ids
    assert roster.circle == ()
    assert len(keys) == len(set(keys)) == 7 + 6  # nobody offers a key twice
    assert {person.state.hash for person in stage.living} == {stage.expected(roster)}


def nothing_revealed(stage: Stage) -> bool:
    """Whether nobody ever had all the secrets of a sum, and the models are as they were."""
    kept = all(torch.equal(p.state.vectors["theta"], stage.start.vectors["theta"]) for p in stage.living)
    return kept and not stage.lifted


@pytest.mark.parametrize("liars", [0, 1])
def test_too_few_answers_to_unmask_let_the_iteration_go_by_with_nothing_revealed(liars):
    """All nine live and vote, but only five answers about secrets ever arrive, and six shares are needed."""
    assert threshold(degree(9)) == 6
    heard = set(in_order(9)[:5])
    stage = Stage(9, settings=replace(MASKED, liars=liars))

    def watch(event, delivery):
        if event.op == "answer" and event.tag.channel == "reveal" and event.source not in heard:
            delivery.copies = 0

    stage.watch = watch
    outcomes = stage.play()
    assert {person.record.roster.exchange for person in stage.living} == {VOID}
    assert {person.state.version for person in stage.living} == {1}
    assert nothing_revealed(stage)
    assert all(outcome.present == () and "abandoned" in outcome.missing["p0"] for outcome in outcomes.values())


@pytest.mark.parametrize("on_minority", ["wait", "fork"])
def test_survivors_of_a_lost_majority_cannot_unmask_what_they_hold(on_minority):
    """Four of nine die after the sum, a fifth when it is asked: whether the rest waits or goes on, it has nothing."""
    ranks = in_order(9)
    deaths = (*(Death(name, "held") for name in ranks[5:]), Death(ranks[4], "reveal"))
    settings = replace(MASKED, liars=0, on_minority=on_minority, minority_timeout=20.0)
    stage = Stage(9, deaths=deaths, settings=settings)
    outcomes = stage.play()
    assert {outcome.exchange for outcome in outcomes.values()} == {VOID if on_minority == "fork" else ""}
    assert nothing_revealed(stage)


def test_a_wrong_value_spoils_the_sum_and_nobody_is_named_for_it():
    """A receiver cannot check what is masked; the unmasked sum is out of range, so the iteration goes by."""
    stage = Stage(8, settings=replace(MASKED, exchange="grid"))
    spoilt: list[str] = []

    def watch(event, delivery):
        if event.op == "send" and event.tag.channel == "reduce" and not spoilt:
            spoilt.append(event.source)
            delivery.parcel = Parcel(delivery.parcel.header, Random(0).randbytes(len(delivery.parcel.payload)))

    stage.watch = watch
    outcomes = stage.play()
    assert spoilt
    assert {person.record.roster.exchange for person in stage.living} == {VOID}
    assert len({outcome.missing[spoilt[0]] for outcome in outcomes.values()}) == 1
    assert {outcome.missing[spoilt[0]] for outcome in outcomes.values()} == {ABANDONED}
    assert len(stage.helped) == 1


def test_a_run_says_what_is_checked_instead_of_values():
    common = {"peers": 4, "iterations": 1, "batch": 8}
    said = [
        Simulation(load(overrides=common | way)).summary()["value_checks"]
        for way in ({}, {"wire": "fixed"}, {"privacy.masks": True})
    ]
    assert "NaN" in said[0]
    assert "name their sender" in said[1]
    assert "cannot check values under masks; senders check their own range, everybody that of the sum" in said[2]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1.0, 0.0, 0.0)])
def test_fewer_than_three_contributions_are_never_summed(weights):
    stage = Stage(len(weights), weights=weights)
    stage.play()
    assert stage.people["p0"].record.roster.exchange == VOID
    assert stage.helped == {}
    assert stage.seen == []


def test_the_next_iteration_sums_again():
    stage = Stage(4, deaths=(Death("p3", "reduce", after=1),))
    stage.play(2)
    assert stage.people["p0"].record.iteration == 2
    assert stage.people["p0"].record.roster.exchange != VOID


def schedule(seed: int) -> Stage:
    """Some roster, some weights, some deaths, anywhere."""
    draw = Random(seed)
    count = draw.choice([3, 4, 5, 5, 6, 7, 8, 9])
    places = ["propose", "seal", "shares", "reduce", "gather", "held", "reveal", "finish"]
    victims = draw.sample(range(count), draw.randint(0, max(1, count // 2)))
    deaths = tuple(
        Death(f"p{i}", draw.choice(places), after=draw.choice([0, 0, 1, 2]), round=draw.choice([0, 0, 1]))
        for i in victims
    )
    weights = tuple(draw.choice([1.0, 1.0, 0.25, 0.0]) for _ in range(count))
    settings = replace(MASKED, exchange=draw.choice(EXCHANGES), group_size=draw.choice([2, 3, 5]))
    return Stage(count, draw.choice([1, 4, 9]), deaths=deaths, weights=weights, settings=settings)


@pytest.mark.parametrize("block", [0, 2, *(pytest.param(more, marks=pytest.mark.slow) for more in (1, 3, 4, 5, 6, 7))])
def test_random_rosters_and_deaths_end_in_the_exact_sum_or_in_nothing(block):
    """25 of 200 schedules: whoever lives holds the sum over exactly the roster, or the model as it was."""
    for seed in range(25 * block, 25 * block + 25):
        stage = schedule(seed)
        outcomes = stage.play()
        for name, outcome in outcomes.items():
            if outcome.status != "committed":
                assert not stage.network.alive(name) or outcome.hash is None, seed
                continue
            roster = stage.people[name].record.roster
            if roster.exchange == VOID:
                assert torch.equal(stage.people[name].state.vectors["theta"], stage.start.vectors["theta"]), seed
            else:
                assert outcome.hash == stage.expected(roster), seed
                assert set(stage.helped) == {roster.digest}, seed
        assert len(stage.helped) <= 1, seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_every_promise_holds_with_masks_whatever_strikes(seed):
    """The soak's faults (hangs, losses, partitions, rivals, …), in the phases that masks add as well."""
    assert World(seed, "masked").run().broken == []


# --- who helps whom ---


@pytest.mark.parametrize(("liars", "votes"), [(0, 3), (1, 4)])
def test_nobody_helps_to_unmask_without_a_quorum_or_for_a_second_roster(liars, votes):
    stage = Stage(5, settings=replace(MASKED, liars=liars))
    answers: list[int] = []  # what is wrong in here would end in somebody's task: it is looked at below

    def watch(event, delivery):
        if event.op == "call" and event.tag.channel == "reveal" and not answers:
            me, leader = stage.people[event.dest], event.source
            roster = me.instance.masks.working
            question, proof = Reveal.decode(delivery.parcel.header), bytes(delivery.parcel.payload)
            assert len(question.votes) == votes
            one, rest = proof[:64], proof[64:]
            reveal = me.masked.reveal
            given = [
                reveal(leader, question, b""),
                reveal(leader, replace(question, votes=question.votes[1:]), rest),
                reveal(leader, replace(question, votes=(*question.votes[1:], question.votes[-1])), rest + proof[-64:]),
                reveal(leader, replace(question, votes=(*question.votes[:-1], 99)), proof),
                reveal(leader, question, rest + one),
                reveal(leader, replace(question, roster=bytes(32)), proof),
                reveal(leader, replace(question, attempt=me.instance.promised + 1), proof),
                reveal(me.net.me if leader != me.net.me else "p0", question, proof),
            ]
            me.helped[1] = replace(roster, attempt=roster.attempt + 1)  # it has helped with another one
            given.append(reveal(leader, question, proof))
            del me.helped[1]
            given.append(reveal(leader, question, proof))
            answers.extend(len(answer.payload) for answer in given)

    stage.watch = watch
    stage.play()
    assert answers == [0] * 9 + [32]


def test_a_value_that_may_be_in_one_lineages_sum_is_in_no_others():
    """Three of eight are cut off after they sent their values; alone they found a lineage, and sum nothing there."""
    settings = replace(MASKED, on_minority="fork", minority_timeout=20.0, iteration_timeout=60.0)
    stage = Stage(8, settings=settings)
    away = {"p4", "p5", "p6"}  # two of p5, p6 and p7 would found at one moment, and sum nothing for that reason

    def watch(event, _):
        if event.tag.channel == "gather" or event.tag.channel == "held":
            stage.network.partition({name: int(name in away) for name in stage.people})

    stage.watch = watch
    stage.play()
    for one in stage.helped.values():
        for other in stage.helped.values():
            assert one is other or not set(one.ids) & set(other.ids)
    forked = [stage.people[name].record.roster for name in away]
    assert all(roster is None or roster.exchange == VOID or set(roster.ids) > away for roster in forked)


def test_after_a_restart_nobody_brings_again_what_may_have_left_before():
    """All of a swarm come back in the iteration they had voted in: they let it go by, and sum the next one."""
    settings = replace(MASKED, on_minority="fork", minority_timeout=20.0)
    stage = Stage(4, settings=settings)
    for person in stage.people.values():
        person.standing.barred = 1
    stage.play(2)
    for person in stage.living:
        assert [person.history[t].roster.exchange for t in (1, 2)] == [VOID, "full"]
    assert {roster.iteration for roster in stage.helped.values()} == {2}


# --- what others see ---


def test_slices_and_partial_sums_are_uniform_and_tell_nothing_about_the_values():
    """Every byte of every slice, against equal bins; and the correlation with the true values and sums."""
    stage = Stage(7, length=600, settings=replace(MASKED, exchange="full", fallbacks=("full",)))
    stage.play()
    own = {name: encode(stage.mine(name).delta).double() for name in stage.people}
    total = sum(own.values())
    reduce = [(event, values) for event, values in stage.seen if event.tag.channel == "reduce"]
    assert {event.tag.round for event, _ in reduce} == {0, 1}  # values, and partial sums
    for event, values in stage.seen:
        counts = torch.bincount(values.view(torch.uint8).long(), minlength=256).double()
        expected = counts.sum() / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 255 + 6 * math.sqrt(2 * 255)  # six sigma
        for truth in (own[event.source], total):
            seen = values.double()
            if seen.numel() == truth.numel():
                correlation = float(torch.corrcoef(torch.stack((seen, truth)))[0, 1])
                assert abs(correlation) < 6 / math.sqrt(600)


def test_the_same_values_look_different_every_time():
    runs = [Stage(4), Stage(4)]
    for stage in runs:
        stage.play()
    first, second = ({(e.source, e.dest, e.tag.round): v for e, v in stage.seen} for stage in runs)
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[key], second[key]) for key in first)


# --- settings ---


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wire": "fp32"}, "wire = fp32: privacy.masks adds integers"),
        ({"technique": "ring"}, "privacy.masks = true: needs technique = mar"),
        ({"semantics": "paper"}, "privacy.masks = true: needs technique = mar and semantics = exact"),
        ({"peers": 2}, "peers = 2: privacy.masks needs 3"),
        ({"distill.iterations": 2, "momentum": "send"}, "distill.teacher = group shows whole models"),
    ],
)
def test_what_masks_cannot_hide_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        load(overrides={"privacy.masks": True} | changes)


@pytest.mark.parametrize("changes", [{}, {"churn.participation": 0.6}, {"momentum": "send"}])
def test_masks_change_no_bit_in_any_engine(changes):
    common = {"peers": 7, "group_size": 3, "iterations": 3, "batch": 8, "test_every": 3} | changes
    ways = [
        {"engine": engine} | masks
        for engine in ("bitwise", "protocol")
        for masks in ({"wire": "fixed"}, {"privacy.masks": True})
    ]
    runs = [list(Simulation(load(overrides=common | way)).rows()) for way in ways]
    for rows in zip(*runs, strict=True):
        assert len({row["model_hash"] for row in rows}) == 1
        assert len({row["bytes_payload"] for row in rows}) == 1
        assert [row["bytes_masks"] for row in rows] == [0, rows[1]["bytes_masks"], 0, rows[1]["bytes_masks"]]


def test_an_iteration_with_two_contributions_goes_by_in_every_engine():
    common = {"peers": 4, "iterations": 4, "batch": 8, "churn.participation": 0.6, "privacy.masks": True}
    configs = [load(overrides=common | {"engine": engine}) for engine in ("bitwise", "protocol")]
    bitwise, protocol = (list(Simulation(config).rows()) for config in configs)
    assert [row["model_hash"] for row in bitwise] == [row["model_hash"] for row in protocol]
    assert any("abandoned" in check for row in bitwise for check in row["checks"])
