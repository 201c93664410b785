"""The core-and-spares planner: exact for every n, and the arithmetic other parts rely on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import InputError
from marfl.plan import Plan, keys_plan, order, plan, random_plan, split

GROUP_SIZES = range(2, 11)


def replay(rounds, spares, n: int) -> list[int]:
    """What each peer holds at the end, as a bit mask of whose values are in its sum; nobody's is ever added twice."""
    held = [1 << rank for rank in range(n)]
    for groups in rounds:
        assert sorted(rank for group in groups for rank in group) == sorted({r for group in groups for r in group})
        for group in groups:
            total = 0
            for rank in group:
                assert total & held[rank] == 0, "a value would be counted twice"
                total |= held[rank]
            for rank in group:
                held[rank] = total
    for spare, helper in spares:
        held[spare] = held[helper]
    return held


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_replaying_the_plan_gives_every_peer_the_full_sum_for_every_n(group_size):
    for n in range(1, 301):
        chosen = plan(n, group_size)
        assert replay(chosen.rounds, chosen.spares, n) == [(1 << n) - 1] * n, n
        assert chosen.exact


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_no_group_exceeds_the_group_size_but_by_its_spare(group_size):
    for n in range(1, 301):
        chosen = plan(n, group_size)
        for table in chosen.tables:
            assert max(len(seat.core) for seat in table) <= group_size
            assert max(len(seat.members) for seat in table) <= group_size + 1


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_spares_sit_out_after_the_first_round_and_their_helper_is_a_core_cellmate(group_size):
    for n in range(1, 301):
        chosen = plan(n, group_size)
        for spare, helper in chosen.spares:
            first, *later = chosen.seats(spare)
            assert first is not None
            assert first.spare == spare
            assert helper in first.core
            assert later == [None] * len(later)


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_fewest_rounds_decide_then_the_smallest_largest_group_then_the_fewest_spares(group_size):
    def candidates(n: int, rounds: int, radices: tuple[int, ...] = ()) -> list[tuple[int, int, int]]:
        cells = 1
        for radix in radices:
            cells *= radix
        core = n // cells
        spares = n - core * cells
        mine = [(rounds, max(core + (spares > 0), *radices, 0), spares)] if 1 <= core <= group_size else []
        longer = range(2, group_size + 1) if cells * 2 <= n else ()
        return mine + [found for r in longer for found in candidates(n, rounds + 1, (*radices, r))]

    for n in range(2, 60):
        chosen = plan(n, group_size)
        largest = max(len(group) for groups in chosen.rounds for group in groups)
        assert (len(chosen.rounds), largest, len(chosen.spares)) == min(candidates(n, 1)), n


@pytest.mark.parametrize(("n", "side", "dimension"), [(8, 2, 3), (16, 4, 2), (64, 4, 3), (125, 5, 3), (1000, 10, 3)])
def test_on_perfect_grids_the_groups_are_those_of_the_papers_keys(n, side, dimension):
    ours, papers = plan(n, side), keys_plan(n, side)
    assert ours.factors == papers.factors == (side,) * dimension
    assert ours.spares == papers.spares == ()
    assert {frozenset(map(frozenset, groups)) for groups in ours.rounds} == {
        frozenset(map(frozenset, groups)) for groups in papers.rounds
    }


@pytest.mark.parametrize(("n", "group_size"), [(8, 2), (16, 4), (125, 5), (97, 5), (300, 7)])
def test_no_two_peers_meet_twice_in_an_iteration(n, group_size):
    met = set()
    for groups in plan(n, group_size).rounds:
        for group in groups:
            pairs = {frozenset((a, b)) for a in group for b in group if a < b}
            assert not met & pairs
            met |= pairs


def test_ranks_positions_and_digits_are_laid_out_as_documented():
    chosen = plan(97, 5)
    assert chosen.factors == (4, 4, 5)  # 20 cells of 4, in a 4 by 5 grid; 17 spares
    assert chosen.rounds[0][3] == (3, 23, 43, 63, 83)
    assert chosen.rounds[1][0] == (0, 1, 2, 3)  # digit 2 of the cell is cell mod 4
    assert chosen.rounds[2][0] == (0, 4, 8, 12, 16)  # digit 3 is cell div 4
    assert chosen.spares[:5] == ((80, 0), (81, 21), (82, 42), (83, 63), (84, 4))


@pytest.mark.parametrize(("n", "group_size"), [(1, 2), (7, 2), (10, 3), (97, 5), (125, 5)])
def test_a_seat_is_the_group_that_lists_the_rank_in_that_round(n, group_size):
    chosen = plan(n, group_size)
    spares = dict(chosen.spares)
    for rank in range(n):
        for seat, groups in zip(chosen.seats(rank), chosen.rounds, strict=True):
            group = next((group for group in groups if rank in group), None)
            assert (seat.members if seat else None) == group
            assert seat is None or seat.spare == (group[-1] if group[-1] in spares else None)


@pytest.mark.parametrize(("n", "group_size"), [(1, 2), (7, 2), (10, 3), (97, 5), (64, 4)])
def test_replicas_are_exactly_the_other_core_ranks_with_the_same_partial_sum(n, group_size):
    chosen = plan(n, group_size)
    spares = {spare for spare, _ in chosen.spares}
    for done in range(len(chosen.rounds) + 1):
        held = replay(chosen.rounds[:done], (), n)
        for rank in set(range(n)) - spares:
            same = tuple(k for k in range(n) if k not in spares and k != rank and held[k] == held[rank])
            assert chosen.replicas(rank, done) == same
    assert all(chosen.replicas(spare, done=1) == () for spare in spares)


def test_one_peer_needs_no_rounds_and_one_group_needs_one():
    assert plan(1, 5).rounds == ()
    assert plan(5, 5).rounds == (((0, 1, 2, 3, 4),),)
    assert plan(3, 10**30).rounds == (((0, 1, 2),),)


@pytest.mark.parametrize(("n", "group_size"), [(0, 5), (-1, 5), (1_000_001, 5), (5, 1), (5, 0)])
def test_impossible_sizes_are_refused_with_the_setting_and_what_is_allowed(n, group_size):
    with pytest.raises(InputError, match=r"^(peers|group_size) = -?\d+: must be"):
        plan(n, group_size)


def test_ranks_rounds_and_inexact_plans_that_have_no_answer_are_refused():
    with pytest.raises(InputError, match="rank = 5: must be between 0 and 4"):
        plan(5, 2).seats(5)
    with pytest.raises(InputError, match="done = 9"):
        plan(5, 2).replicas(0, done=9)
    with pytest.raises(InputError, match="exact"):
        random_plan(9, 3, rounds=2, seed=1).replicas(0, done=1)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_split_covers_everything_in_order_with_sizes_that_differ_by_at_most_one(length, parts):
    slices = split(length, parts)
    sizes = [stop - start for start, stop in slices]
    assert len(slices) == parts
    assert [start for start, _ in slices] == [0, *(stop for _, stop in slices[:-1])]
    assert slices[-1][1] == length
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


MEMBERS = [(index, f"peer-{index % 7}-{index}") for index in range(50)]


def test_the_order_does_not_depend_on_how_the_members_are_listed_or_what_their_ids_are():
    expected = order("run", 3, MEMBERS)
    shuffled = random.Random(0).sample(MEMBERS, len(MEMBERS))
    assert order("run", 3, shuffled) == expected
    renamed = order("run", 3, [(index, f"other-{50 - index}") for index, _ in MEMBERS])
    assert [index for index, _ in renamed] == [index for index, _ in expected]


def test_the_order_changes_with_the_run_and_the_iteration():
    orders = [order("run", 3, MEMBERS), order("run", 4, MEMBERS), order("other", 3, MEMBERS), order("run3", 3, MEMBERS)]
    assert len({tuple(each) for each in orders}) == 4
    assert all(sorted(each) == sorted(MEMBERS) for each in orders)


def test_members_that_claim_one_index_are_ordered_by_id():
    assert order("run", 0, [(1, "b"), (1, "c"), (1, "a")]) == [(1, "a"), (1, "b"), (1, "c")]


def test_plans_of_ten_thousand_peers_know_every_seat():
    chosen: Plan = plan(10_000, 10)
    assert all(len(chosen.seats(rank)) == 4 for rank in range(0, 10_000, 97))
    assert len(chosen.replicas(0, done=3)) == 999
