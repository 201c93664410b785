"""Deterministic simulation testing: hundreds of random fault schedules, every promise checked in every one."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest

from marfl.protocol.ballot import without
from marfl.protocol.roster import PIECE
from marfl.testing.faults import IDLE, MEMBER, WITNESS, conditions
from marfl.testing.promises import counted_once, nobody_left_out, nothing_lost
from marfl.testing.soak import main, missing, play, soak, table, verdict
from marfl.testing.world import World

# A choice of seeds in which every combination of fault, phase and exchange strikes once at least.
SEEDS = [
    3, 5, 8, 9, 11, 14, 17, 18, 22, 24, 25, 41, 42, 49, 57, 59, 64, 67, 69, 75, 83, 86, 88, 91, 96, 109, 110,
    113, 115, 117, 128, 131, 132, 133, 136, 138, 139, 140, 143, 145, 147, 148, 149, 150, 152, 153, 156, 159,
    160, 166, 167, 169, 170, 171, 172, 176, 178, 181, 185, 187, 188, 192, 195, 196, 200, 201, 204, 207, 211,
    212, 216, 217, 220, 222, 223, 227, 231, 232, 237, 239, 243, 244, 249, 252, 254, 255, 257, 258, 259, 261,
    262, 264, 267, 268, 271, 274, 277, 280, 282, 283, 287, 288, 289, 291, 293, 294, 297, 301, 304, 306, 307,
    316, 318, 321, 324, 328, 329, 333, 338, 339, 341, 342, 345, 346, 349, 369, 389, 397, 400, 402, 405, 412,
    425, 426, 439, 443, 511, 573, 577, 588, 596, 605, 639, 649, 653, 833, 1008, 1010, 1022, 1023, 1031, 1060,
    1082, 1106, 1125, 1133, 1141, 1142, 1149, 1169, 1180, 1181, 1186, 1192, 1197, 1204, 1205, 1235, 1236,
]  # fmt: skip


@pytest.mark.slow  # test_soak_choice.py plays a third of them
def test_hundreds_of_fault_schedules_break_no_promise_and_leave_no_fault_untested() -> None:
    reports = soak(SEEDS, processes=2)
    print(table(reports))
    assert verdict(reports) == []
    assert missing(reports) == []


def test_a_seed_replays_exactly_also_in_another_process() -> None:
    seeds = [0, 7, 41, 113]
    here = [play(seed).fingerprint for seed in seeds]
    assert here == [play(seed).fingerprint for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert [report.fingerprint for report in pool.map(play, seeds)] == here


@pytest.mark.parametrize("carries", [False, True])
def test_where_nothing_fails_nobody_is_left_out_and_nothing_is_lost(carries: bool) -> None:
    worlds = [World(seed, calm=True, carries=carries) for seed in (5000003, 5000010)]
    assert [world.run().broken for world in worlds] == [[], []]
    assert not any(world.faulty for world in worlds)
    late = {peer for world in worlds for decision in world.decisions for peer, _ in decision.record.roster.ages}
    assert bool(late) == carries


def test_what_is_lost_or_counts_twice_breaks_a_promise() -> None:
    world = World(5000003, calm=True, carries=True)
    assert world.run().broken == []
    world.lost.append(("peer01", 3))
    assert list(nothing_lost(world)) == ["iteration 3: what peer01 learned came too late and is in no sum"]
    late = next(decision for decision in world.decisions if decision.record.iteration == 5)
    roster = late.record.roster
    assert dict(roster.ages)["peer00"] == 2
    again = replace(roster, ages=(("peer00", 4),))  # what it learned first, which is in the sum of iteration 2
    world.decisions = [d for d in world.decisions if d.record.iteration != 5]
    world.decisions.append(replace(late, record=replace(late.record, roster=again)))
    assert list(counted_once(world)) == ["what peer00 learned once is in the sums of iterations 2, 5"]


def test_the_dice_may_start_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--start", "4000", "--processes", "1"]) == 1  # two worlds have not every fault
    assert "2 worlds (seeds 4000 to 4001)" in capsys.readouterr().out


def test_worlds_differ_in_who_takes_part_in_size_in_length_and_in_clocks() -> None:
    many = [conditions(seed) for seed in range(400)]
    for differs in (
        lambda world: world.watching, lambda world: world.idle, lambda world: world.size == 40,
        lambda world: world.delay > 5, lambda world: world.more == 4, lambda world: world.clocks,
        lambda world: world.empty,
    ):  # fmt: skip
        assert 0 < sum(map(bool, map(differs, many))) < 200
    parts = {many[0].part(index, iteration) for index in range(20) for iteration in range(20)}
    assert parts == {MEMBER}
    mixed = next(world for world in many if world.watching and world.idle)
    assert {mixed.part(index, 3) for index in range(40)} == {MEMBER, WITNESS, IDLE}


@pytest.mark.parametrize(
    ("seed", "piece"),
    [
        (336, PIECE),  # all who had announced the newest state were dead, and whoever held it did not say so
        (407, PIECE),  # a finished result was adopted for ever, because half of its roster was dead
        (100395, None),  # members that did not finish were not told the decision, and were late for the next iteration
        (101126, None),
        (101164, None),
        (101355, None),  # a leader without a majority did not say where it was
    ],
)
def test_worlds_that_once_got_stuck_or_left_somebody_out_go_on(seed: int, piece: int | None) -> None:
    assert World(seed, piece=piece, classic=True).run().broken == []  # with the dice by which they got stuck


@pytest.mark.parametrize(
    "seed",
    [
        800647,  # a newcomer began to train when the iteration had begun, and was late again and again
        # a leader died while it told the verdict, and 13 peers were not waited for
        pytest.param(800711, marks=pytest.mark.slow),  # forty peers
        800879,  # a newcomer in a minority did not hear that the others had gone on
        802431,  # one peer alone held the committed state, and died
        930915,  # newcomers that acked a roster did not let themselves be asked to hold its result
        932639,  # a leader whose messages came late missed the vote of a peer, and did not tell it what was decided
        940139,  # a majority waited for a peer that trained, founded lineages, and waited for one that waited for it
        951542,  # for a moment nobody lived: two power cuts, and not yet anybody back
        952187,  # a leader that heard nobody any more in the midst of a vote missed three peers
        902,  # whoever knew of a decision had forgotten its vote, and gave a lying leader a second one
        1315,
        790,  # a founding that took a second attempt named no electors, and could not be certified
        866,  # a lying leader told each of two halves that its own result was decided: both were stuck
        469,  # three voters that had lost their quorum waited for good, and did not follow those who had founded anew
        # who was away could not be shown that the others had gone on: nobody it asked had certificates without a gap
        pytest.param(1164, marks=pytest.mark.slow),  # forty peers
        1000253,  # a peer whose messages came late and a peer that waited for it were waited for alike
        1202947,  # a peer that had been late once was not waited for, and late again and again
        1300757,  # two who watched waited for those who trained, and took the first that was done for everybody
        1301069,  # a leader with bad links let two peers know late what was decided
        2001328,  # a peer was left out for one message that did not get through, though another was silent
        2302994,  # who founded a lineage did not name an elector that had stayed though it was missing
        2400834,  # nobody had the state of a commit any more, and those who knew of it kept all others from going on
        9800343,  # the only one that knew how the others went on gave no answer once, and was not asked again
        9901022,  # a donor with a bad link kept a peer from a state that all others had, and it was left out
        1001581,  # after a restart a peer voted once more in a decision that it had taken over, but not for sure
    ],
)
def test_worlds_that_were_broken_once_keep_their_promises(seed: int) -> None:
    assert play(seed).broken == []


def test_only_a_leader_with_bad_links_is_excused_for_a_peer_that_it_did_not_hear() -> None:
    world = World(932639)
    assert world.run().broken == []
    world.injector.ailing.clear()
    assert any("fault-free but left out: peer00" in line for line in nobody_left_out(world))


@pytest.mark.parametrize(("peer", "heard_late"), [("peer02", True), ("peer01", False)])
def test_who_heard_late_of_an_iteration_led_over_bad_links_may_be_missed_in_the_next_one(
    peer: str, heard_late: bool
) -> None:
    world = World(1301069)
    assert world.run().broken == []
    third = next(d for d in world.decisions if d.record.iteration == 3 and d.peer in world.well)
    made_up = replace(third.record, roster=without(third.record.roster, {peer}, "brings no update"))
    world.decisions.append(replace(third, record=made_up))
    broken = [f"iteration 3 attempt 0: fault-free but left out: {peer} (brings no update)"]
    assert list(nobody_left_out(world)) == ([] if heard_late else broken)
    world.injector.ailing.clear()
    assert list(nobody_left_out(world)) == broken


def test_an_iteration_goes_by_where_the_only_two_that_bring_something_accuse_each_other_and_else_not() -> None:
    world = World(2202371)
    assert world.run().broken == []
    world.injector.hits.clear()
    assert list(nobody_left_out(world)) == ["iteration 4 goes by, though peer00 bring something"]


@pytest.mark.slow
def test_two_thousand_fault_schedules_break_no_promise() -> None:
    assert verdict(soak(range(2000), processes=2)) == []


@pytest.mark.parametrize(
    "seed",
    [
        526,  # who had founded a lineage alone could not be shown that the others had gone on
        960051,  # the proof of the newest record was lost with a power cut, and the others would not believe it
        970399,  # records of a lineage that was left were a beginning for proofs, and two peers went to and fro
        980003,  # a lying leader told two halves that it was decided, and neither could go on
        980054,  # the second attempt of a founding named no electors, and could not be certified
    ],
)
def test_worlds_that_signed_votes_once_broke_go_on(seed: int) -> None:
    assert play(seed).broken == []
