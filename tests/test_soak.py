"""Deterministic simulation testing: hundreds of random fault schedules, every promise checked in every one."""

from __future__ import annotations

import multiprocessing

import pytest

from marfl.protocol.roster import PIECE
from marfl.testing.soak import missing, play, soak, table, verdict
from marfl.testing.world import World

SEEDS = 540  # every combination of fault, phase and exchange comes first in at least two of them


def test_hundreds_of_fault_schedules_break_no_promise_and_leave_no_fault_untested() -> None:
    reports = soak(range(SEEDS), processes=2)
    print(table(reports))
    assert verdict(reports) == []
    assert missing(reports) == []


def test_a_seed_replays_exactly_also_in_another_process() -> None:
    seeds = [0, 7, 41, 113]
    here = [play(seed).fingerprint for seed in seeds]
    assert here == [play(seed).fingerprint for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert [report.fingerprint for report in pool.map(play, seeds)] == here


@pytest.mark.parametrize(
    "seed",
    [
        336,  # all who had announced the newest state were dead, and whoever held it did not say so
        407,  # a finished result was adopted for ever, because half of its roster was dead
    ],
)
def test_worlds_that_once_got_stuck_go_on(seed: int) -> None:
    assert World(seed, piece=PIECE).run().broken == []  # with whole slices, as they got stuck


@pytest.mark.slow
def test_two_thousand_fault_schedules_break_no_promise() -> None:
    assert verdict(soak(range(2000), processes=2)) == []
