"""The dispatcher: who updates, who aggregates, who is lost, and when."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import InputError
from marfl.settings import Churn, Sessions
from marfl.sim import churn as module
from marfl.sim.churn import Participation, online_at, participation, read_trace

EVERYBODY = frozenset(range(125))
rates = st.floats(0.01, 1.0)
likelihoods = st.floats(0.0, 0.99)


@st.composite
def churns(draw: st.DrawFn) -> Churn:
    """Any settings without a trace."""
    separate = draw(st.booleans())
    return Churn(
        participation=1.0 if separate else draw(rates),
        update_participation=draw(st.none() | rates) if separate else None,
        aggregate_participation=draw(st.none() | rates) if separate else None,
        dropout=draw(likelihoods),
        death=draw(likelihoods),
        sessions=draw(st.none() | st.builds(Sessions, st.floats(0.5, 50), st.floats(0.5, 50))),
    )


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


# --- what always holds ---


def online(churn: Churn, peers: int, time: float, seed: int = 0) -> frozenset[int]:
    """Who is up at this time."""
    return frozenset(np.flatnonzero(online_at(churn, peers, seed, time)).tolist())


def dropped(churn: Churn, peers: int, iteration: int, seed: int = 0) -> frozenset[int]:
    """Who would aggregate, but is lost after its update."""
    without = participation(replace(churn, dropout=0.0), peers, iteration, seed)
    return without.aggregators - participation(churn, peers, iteration, seed).aggregators


@given(churns(), st.integers(1, 60), st.integers(1, 50), st.integers(-5, 5))
def test_who_does_what_fits_together(churn: Churn, peers: int, iteration: int, seed: int) -> None:
    who, up = participation(churn, peers, iteration, seed), online(churn, peers, float(iteration), seed)
    lost = dropped(churn, peers, iteration, seed)
    assert up <= set(range(peers))
    assert who.updaters | who.aggregators | lost <= up
    assert lost <= who.updaters
    assert who.dies.keys() == (who.aggregators if churn.death else set())
    assert bool(who.aggregators) == bool(who.updaters) == bool(up)


@given(churns(), st.integers(1, 40), st.integers(-5, 5))
def test_an_iteration_asked_for_alone_is_the_same_as_in_a_run(churn: Churn, peers: int, seed: int) -> None:
    run = [participation(churn, peers, iteration, seed) for iteration in range(1, 6)]
    module._timeline.cache_clear()
    assert participation(churn, peers, 5, seed) == run[4]
    assert participation(churn, peers, 2, seed) == run[1]


def test_by_default_everybody_takes_part_from_start_to_end() -> None:
    expected = Participation(updaters=EVERYBODY, aggregators=EVERYBODY, dies={})
    assert participation(Churn(), 125, 1, seed=0) == expected


def test_seeds_and_iterations_draw_different_participants() -> None:
    churn = Churn(participation=0.5)
    casts = {participation(churn, 125, iteration, seed).updaters for iteration in range(1, 11) for seed in range(10)}
    assert len(casts) == 100


# --- participation ---


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 125), (0.5, 62), (0.2, 25), (0.001, 1)])
def test_exactly_the_rounded_share_of_the_peers_takes_part_in_the_entire_iteration(rate: float, expected: int) -> None:
    who = participation(Churn(participation=rate), 125, 3, seed=0)
    assert len(who.updaters) == expected
    assert who.aggregators == who.updaters


def test_every_peer_takes_part_equally_often() -> None:
    churn = Churn(participation=0.3)
    counts = Counter(peer for iteration in range(2000) for peer in participation(churn, 10, iteration, seed=1).updaters)
    assert all(counts[peer] == pytest.approx(600, abs=90) for peer in range(10))  # 4.4 standard deviations


def test_a_higher_rate_picks_a_superset() -> None:
    few, many = (participation(Churn(participation=rate), 125, 7, seed=0).updaters for rate in (0.2, 0.6))
    assert few < many


def test_separate_rates_draw_updaters_and_aggregators_apart() -> None:
    who = participation(Churn(update_participation=0.4, aggregate_participation=0.8), 125, 1, seed=0)
    assert (len(who.updaters), len(who.aggregators)) == (50, 100)
    assert who.updaters - who.aggregators
    assert who.aggregators - who.updaters


def test_a_separate_rate_that_is_not_given_means_everybody() -> None:
    assert participation(Churn(update_participation=0.4), 125, 1, seed=0).aggregators == EVERYBODY
    assert participation(Churn(aggregate_participation=0.4), 125, 1, seed=0).updaters == EVERYBODY


# --- dropout ---


def test_dropouts_have_updated_and_do_not_aggregate() -> None:
    churn = Churn(participation=0.5, dropout=0.2)
    who, lost = participation(churn, 125, 1, seed=0), dropped(churn, 125, 1)
    assert lost
    assert who.updaters == who.aggregators | lost


def test_participants_drop_out_with_the_given_likelihood() -> None:
    churn = Churn(dropout=0.2)
    lost = sum(len(dropped(churn, 125, iteration)) for iteration in range(200))
    assert lost / (125 * 200) == pytest.approx(0.2, abs=0.01)  # 4 standard deviations


def test_dropout_does_not_change_who_updates() -> None:
    sure, unsure = (participation(Churn(participation=0.5, dropout=dropout), 125, 4, seed=0) for dropout in (0.0, 0.5))
    assert sure.updaters == unsure.updaters


def test_who_has_not_updated_cannot_drop_out_after_its_update() -> None:
    who = participation(Churn(update_participation=0.5, dropout=0.9), 125, 1, seed=0)
    assert EVERYBODY - who.updaters <= who.aggregators


def test_one_peer_stays_when_all_would_drop_out() -> None:
    for iteration in range(200):
        who = participation(Churn(dropout=0.99), 3, iteration, seed=0)
        assert who.aggregators
    assert dropped(Churn(dropout=0.99), 1, 1) == frozenset()


# --- death ---


def test_the_round_of_death_is_geometric() -> None:
    churn, died = Churn(death=0.1), Counter[int]()
    for iteration in range(200):
        died.update(participation(churn, 125, iteration, seed=0).deaths(rounds=3).values())
    shares = [died[when] / (125 * 200) for when in range(3)]
    assert shares == pytest.approx([0.1, 0.09, 0.081], abs=0.008)  # 4 standard deviations
    assert set(died) == {0, 1, 2}


def test_nobody_dies_in_an_exchange_without_rounds() -> None:
    assert participation(Churn(death=0.5), 125, 1, seed=0).deaths(rounds=0) == {}


# --- sessions ---


def test_the_share_of_peers_online_is_that_of_the_sessions_from_the_first_iteration_on() -> None:
    churn = Churn(sessions=Sessions(up=30, down=10))
    for iteration in (0, 1, 17, 400):
        assert len(online(churn, 8000, float(iteration))) / 8000 == pytest.approx(0.75, abs=0.02)


def test_sessions_last_as_long_as_they_should_on_average() -> None:
    churn, peers = Churn(sessions=Sessions(up=40, down=10)), 4000
    before, after = (online(churn, peers, time) for time in (100.0, 100.1))
    left = len(before - after) / len(before)
    joined = len(after - before) / (peers - len(before))
    assert left == pytest.approx(0.1 / 40, abs=0.0033)  # 4 standard deviations
    assert joined == pytest.approx(0.1 / 10, abs=0.014)


def test_random_access_to_sessions_is_a_replay_of_every_change() -> None:
    timeline = module._Timeline(Sessions(up=1, down=2), peers=30, seed=0)
    timeline.online(500.0)
    changes = np.hstack(timeline.blocks)
    assert changes.shape[1] > 5 * timeline.WIDTH
    assert (np.diff(changes, axis=1) > 0).all()
    for time in np.linspace(0.0, 500.0, 300):
        replayed = [up != (sum(row <= time) % 2 == 1) for up, row in zip(timeline.began_up, changes, strict=True)]
        assert timeline.online(time).tolist() == replayed


def test_a_peer_that_stays_keeps_its_state_between_changes() -> None:
    churn = Churn(sessions=Sessions(up=1000, down=1000))
    up = [online(churn, 50, float(iteration)) for iteration in range(20)]
    changes = sum(len(one ^ other) for one, other in pairwise(up))
    assert 0 < changes < 50  # some 19 are expected; peers drawn anew each time would change some 475 times


def test_one_more_peer_changes_no_other_peers_sessions_or_dropout() -> None:
    churn = Churn(dropout=0.5, sessions=Sessions(up=5, down=5))
    assert online(churn, 40, 99.0) == online(churn, 60, 99.0) & set(range(40))
    assert dropped(churn, 40, 99) == dropped(churn, 60, 99) & set(range(40))


def test_all_who_are_online_take_part_when_they_are_fewer_than_the_rate_asks_for(tmp_path: Path) -> None:
    path = write(tmp_path, "0,0,down\n0,1,down\n0,2,down\n")
    assert participation(Churn(participation=0.6, trace=path), 5, 1, seed=0).updaters == {3, 4}


def test_sessions_far_too_short_for_the_clock_are_refused_instead_of_filling_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module._Timeline, "LIMIT", 10_000)
    with pytest.raises(InputError, match=r"sessions up = 1e-09, down = 1e-09: far too short for a clock that reads 5"):
        participation(Churn(sessions=Sessions(1e-9, 1e-9)), 10, 5, seed=0)


# --- traces ---


def test_a_trace_says_who_is_up_and_when(tmp_path: Path) -> None:
    churn = Churn(trace=write(tmp_path, "time,peer,state\n1, 0, down\n\n2,1,up\n2.5,0,up\n"))
    up = {time: online(churn, 3, time) for time in (0.0, 1.0, 1.9, 2.0, 2.5)}
    assert up == {0.0: {0, 2}, 1.0: {2}, 1.9: {2}, 2.0: {1, 2}, 2.5: {0, 1, 2}}


def test_a_traces_clock_is_the_iteration(tmp_path: Path) -> None:
    churn = Churn(trace=write(tmp_path, "3,0,down\n4,0,up\n"))
    there = [participation(churn, 2, iteration, seed=0).updaters for iteration in range(1, 5)]
    assert there == [{0, 1}, {0, 1}, {1}, {0, 1}]


def test_nobody_takes_part_when_a_trace_has_nobody_up(tmp_path: Path) -> None:
    who = participation(Churn(dropout=0.5, death=0.5, trace=write(tmp_path, "0,0,down\n0,1,down\n")), 2, 1, seed=0)
    assert not (who.updaters | who.aggregators | who.dies.keys())


def test_an_empty_trace_leaves_everybody_up(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, ""), 4).online(10.0).all()


def test_a_trace_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "0,0,down\n")
    assert participation(Churn(trace=path), 2, 1, seed=0).updaters == {1}
    path.write_text("0,1,down\n")
    os.utime(path, ns=(1, 1))  # another time stamp, however coarse the file system's
    assert participation(Churn(trace=path), 2, 1, seed=0).updaters == {0}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1,0\n", r"line 1: has 2 fields, must have 3"),
        ("0,0,down\nsoon,1,up\n", r"line 2: time must be a number and peer a whole number \(.*soon"),
        ("0,0,down\n1,one,up\n", r"line 2: time must be a number and peer a whole number \(.*one"),
        ("nan,0,up\n", r"line 1: time nan must be finite"),
        ("0,5,up\n", r"line 1: .*peer 5 between 0 and 4"),
        ("0,-1,up\n", r"line 1: .*peer -1 between 0 and 4"),
        ("0,0,away\n", r"line 1: state 'away' must be up or down"),
        ("3,0,up\n\n2,1,up\n", r"line 3: time 2\.0 must not be before 3\.0"),
        ("3,0,up\n4,0,up\n", r"line 2: peer 0 is up already"),
        ("0,0,down\ntime,peer,state\n", r"line 2: time must be a number"),
    ],
)
def test_an_error_in_a_trace_names_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=rf"^trace .*trace\.csv, {complaint}"):
        participation(Churn(trace=write(tmp_path, text)), 5, 1, seed=0)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trace = .*absent\.csv: cannot be read \(No such file"):
        participation(Churn(trace=tmp_path / "absent.csv"), 5, 1, seed=0)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"trace = .*binary\.csv: cannot be read \('utf-8'"):
        participation(Churn(trace=binary), 5, 1, seed=0)


# --- wrong settings ---


@pytest.mark.parametrize("name", ["participation", "update_participation", "aggregate_participation"])
@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, float("nan")])
def test_a_rate_outside_0_to_1_is_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"^{name} = {value}: must be a number, above 0, at most 1$"):
        Churn(**{name: value})


@pytest.mark.parametrize("name", ["dropout", "death"])
@pytest.mark.parametrize("value", [1.0, -0.1, float("nan")])
def test_a_likelihood_outside_0_to_1_is_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"^{name} = {value}: must be a number, at least 0, below 1$"):
        Churn(**{name: value})


@pytest.mark.parametrize(("up", "down", "named"), [(0, 1, "up"), (1, -1, "down"), (float("inf"), 1, "up")])
def test_sessions_without_a_mean_time_are_refused(up: float, down: float, named: str) -> None:
    with pytest.raises(InputError, match=f"^{named} = .*: must be a finite number, above 0"):
        Sessions(up, down)


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"participation = 0\.5: is for the entire iteration, and excludes"):
        Churn(participation=0.5, update_participation=0.8)
    with pytest.raises(InputError, match=r"trace = .*: says who is up and when, and excludes sessions"):
        Churn(trace=tmp_path / "trace.csv", sessions=Sessions(1, 1))


def test_an_iteration_without_peers_is_refused() -> None:
    with pytest.raises(InputError, match="peers = 0: must be at least 1"):
        participation(Churn(), 0, 1, seed=0)


def test_a_seed_means_the_same_whatever_kind_of_integer_it_is() -> None:
    churn = Churn(participation=0.5)
    iteration, seed = np.array([1, 3])
    assert participation(churn, 125, iteration, seed) == participation(churn, 125, 1, seed=3)
