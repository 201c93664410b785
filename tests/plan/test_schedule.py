"""The schedules: playing their messages gives every peer the whole sum, whatever the exchange."""

from __future__ import annotations

import pytest

from marfl.errors import InputError
from marfl.plan import keys_plan, plan, random_plan
from marfl.plan.schedule import EXCHANGES, schedule, steps

SIZES = [(1, 2), (2, 2), (3, 2), (7, 2), (10, 3), (16, 4), (29, 5), (30, 5), (97, 5), (125, 5)]


def play(chosen, exchange: str, length: int) -> list[list[int]]:
    """What each peer holds for each value, as a bit mask of the peers whose contribution is in it."""
    held = [[1 << rank] * length for rank in range(chosen.peers)]
    for step in steps(chosen, exchange, length):
        before = [list(mine) for mine in held]
        for source, dest, start, stop in step.transfers():
            for place in range(start, stop):
                if step.inward:
                    assert held[dest][place] & before[source][place] == 0, "a value would be counted twice"
                    held[dest][place] |= before[source][place]
                else:
                    held[dest][place] = before[source][place]
    return held


@pytest.mark.parametrize(("n", "group_size"), SIZES)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("length", [1, 3, 13])
def test_playing_the_messages_gives_every_peer_the_sum_of_all_for_every_value(n, group_size, exchange, length):
    everyone = (1 << n) - 1
    assert play(plan(n, group_size), exchange, length) == [[everyone] * length] * n


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_papers_keys_work_with_every_exchange_on_a_perfect_grid(exchange):
    assert play(keys_plan(27, 3), exchange, 30) == [[(1 << 27) - 1] * 30] * 27


@pytest.mark.parametrize(("n", "group_size"), SIZES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_message_is_empty_and_no_pair_is_used_twice_in_a_phase(n, group_size, exchange):
    for phase in schedule(plan(n, group_size), exchange, 5):
        assert phase
        assert all(0 <= start < stop <= 5 for _, _, start, stop in phase)
        assert all(source != dest for source, dest, _, _ in phase)
        assert len({(source, dest) for source, dest, _, _ in phase}) == len(phase)


def test_a_spare_sends_its_whole_value_in_round_0_and_hears_only_at_the_end():
    for exchange, source in [("full", {0}), ("chunked", {0}), ("grid", {0, 3, 6})]:
        phases = schedule(plan(10, 3), exchange, 9)
        sent = {(number, dest) for number, phase in enumerate(phases) for s, dest, _, _ in phase if s == 9}
        heard = {(number, s) for number, phase in enumerate(phases) for s, dest, _, _ in phase if dest == 9}
        assert sent == {(0, 0), (0, 3), (0, 6)}
        assert heard == {(len(phases) - 1, rank) for rank in source}


def test_an_empty_vector_needs_no_messages():
    assert all(schedule(plan(97, 5), exchange, 0) == () for exchange in EXCHANGES)


def test_unknown_exchanges_negative_lengths_and_grid_without_a_grid_are_refused():
    with pytest.raises(InputError, match="exchange = 'foo': must be one of full, chunked, grid"):
        schedule(plan(4, 2), "foo", 3)
    with pytest.raises(InputError, match="length = -1"):
        schedule(plan(4, 2), "full", -1)
    with pytest.raises(InputError, match="'grid': needs an exact plan"):
        schedule(random_plan(9, 3, 2, seed=0), "grid", 3)
