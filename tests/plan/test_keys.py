"""The paper's group keys and random groups: where they are exact, and how much variance they leave elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from marfl.errors import InputError
from marfl.plan import Plan, keys_plan, random_plan
from marfl.plan.cost import cost
from marfl.plan.keys import key_meetings


def variance_left(plan: Plan) -> float:
    """The share of the peers' variance that averaging in these groups leaves, for values drawn independently."""
    mixing = np.eye(plan.peers)
    for groups in plan.rounds:
        for group in map(list, groups):
            mixing[group] = mixing[group].mean(axis=0)
    return float(((mixing - 1 / plan.peers) ** 2).sum() / (plan.peers - 1))


@pytest.mark.parametrize(("n", "group_size"), [(2, 2), (3, 5), (8, 2), (9, 3), (64, 4), (125, 5), (1000, 10)])
def test_the_papers_keys_are_exact_on_perfect_grids(n, group_size):
    plan = keys_plan(n, group_size)
    assert plan.exact
    assert variance_left(plan) < 1e-12


@pytest.mark.parametrize(("n", "rounds", "group_size"), [(2, 1, 2), (8, 3, 2), (9, 2, 3), (64, 3, 4), (125, 3, 5)])
def test_peers_that_see_only_their_own_key_form_the_same_groups_on_perfect_grids(n, rounds, group_size):
    met = [set(groups.values()) for groups in key_meetings(n, group_size, rounds, rounds)]
    assert met == [set(groups) for groups in keys_plan(n, group_size).rounds]


@pytest.mark.parametrize(("n", "rounds", "group_size"), [(6, 2, 3), (7, 3, 2), (97, 3, 5)])
def test_elsewhere_they_meet_everybody_once_per_round_in_groups_that_are_never_too_large(n, rounds, group_size):
    for groups in key_meetings(n, group_size, rounds, rounds):
        assert sorted(peer for group in groups.values() for peer in group) == list(range(n))
        assert max(map(len, groups.values())) <= group_size


@pytest.mark.parametrize(("n", "group_size"), [(6, 2), (7, 2), (100, 5), (97, 5), (124, 5), (126, 5), (10, 3)])
def test_elsewhere_they_are_not_and_say_so(n, group_size):
    plan = keys_plan(n, group_size)
    assert not plan.exact
    assert plan.factors == ()
    assert variance_left(plan) > 1e-6


def test_too_few_rounds_on_a_perfect_grid_are_not_exact():
    assert not keys_plan(125, 5, rounds=2).exact


def test_the_papers_approximate_setting_leaves_less_variance_than_random_groups_at_the_same_price():
    papers = keys_plan(125, 3, rounds=4, dimension=4)
    chance = [random_plan(125, 3, rounds=4, seed=seed) for seed in range(50)]
    assert variance_left(papers) == pytest.approx(0.0061, abs=0.0002)
    assert np.mean([variance_left(plan) for plan in chance]) == pytest.approx(0.012, abs=0.0005)
    for plan in (papers, chance[0]):
        assert cost("full", plan, 1000).bytes_per_peer / 4000 == pytest.approx(7.94, abs=0.005)


def test_groups_of_the_approximate_setting_never_exceed_the_group_size():
    plan = keys_plan(125, 3, rounds=4, dimension=4)
    assert {len(group) for groups in plan.rounds for group in groups} == {2, 3}
    assert all(sorted(rank for group in groups for rank in group) == list(range(125)) for groups in plan.rounds)


@pytest.mark.parametrize(("n", "group_size"), [(20, 4), (22, 4), (125, 3)])
def test_a_random_partition_in_r_groups_leaves_r_minus_1_over_n_minus_1_of_the_variance(n, group_size):
    values = np.random.default_rng(7).normal(size=n)
    left = []
    for seed in range(3000):
        after = values.copy()
        for group in map(list, random_plan(n, group_size, rounds=1, seed=seed).rounds[0]):
            after[group] = values[group].mean()
        left.append(after.var() / values.var())
    groups = -(-n // group_size)
    standard_error = np.std(left) / len(left) ** 0.5
    assert abs(np.mean(left) - (groups - 1) / (n - 1)) < 4 * standard_error
    assert standard_error < 0.02 * (groups - 1) / (n - 1)  # tight enough to tell it from 1 / group_size


def test_random_groups_repeat_with_their_seed_and_only_with_it():
    assert random_plan(50, 4, 3, seed=1) == random_plan(50, 4, 3, seed=1)
    assert random_plan(50, 4, 3, seed=1) != random_plan(50, 4, 3, seed=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keys_plan(0, 5), "peers = 0"),
        (lambda: keys_plan(5, 1), "group_size = 1"),
        (lambda: keys_plan(5, 2, rounds=0), "rounds = 0"),
        (lambda: keys_plan(5, 2, dimension=0), "dimension = 0"),
        (lambda: random_plan(5, 2, rounds=0, seed=0), "rounds = 0"),
    ],
)
def test_impossible_settings_are_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        make()
