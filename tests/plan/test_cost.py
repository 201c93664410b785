"""What an aggregation costs: equal to a count of its messages, and to the table of section 4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import InputError
from marfl.plan import keys_plan, plan
from marfl.plan.cost import BYTES_PER_VALUE, contributions_in, cost, count, exchange_messages
from marfl.plan.grid import split
from marfl.plan.schedule import EXCHANGES, steps
from marfl.plan.sight import inputs
from marfl.techniques.catalogue import technique
from marfl.wire.packing import BLOCK, IntegerWire

PAPER_CNN = 1_199_882


@pytest.mark.parametrize("group_size", range(2, 11))
def test_grid_sends_exactly_twice_n_minus_1_vectors_for_every_n(group_size):
    for n in (*range(1, 131), *range(211, 301, 10)):
        assert cost("grid", plan(n, group_size), 1013).bytes_total == 2 * (n - 1) * 1013 * BYTES_PER_VALUE


def test_full_on_a_perfect_grid_of_125_is_12_vectors_for_every_single_peer():
    expected = (12 * PAPER_CNN * BYTES_PER_VALUE,) * 125
    measured = cost("full", plan(125, 5), PAPER_CNN)
    assert measured.bytes_sent == measured.bytes_received == expected


@pytest.mark.parametrize(
    ("name", "per_peer", "phases_at_125"),
    [
        ("fedavg", [2, 2, 2, 2], 2),
        ("arfl", [15, 63, 124, 999], 1),
        ("rdfl", [15, 63, 124, 999], 124),
        ("full", [6, 9, 12, 27], 3),
        ("chunked", [3.0, 4.5, 4.8, 5.4], 6),
        ("grid", [1.875, 1.969, 1.984, 1.998], 6),
        ("ring", [1.875, 1.969, 1.984, 1.998], 248),
        ("butterfly", [1.875, 1.969, 1.984, 1.998], 2),
    ],
)
def test_the_published_table_of_vectors_per_peer_and_phases_is_reproduced(name, per_peer, phases_at_125):
    plans = [plan(16, 4), plan(64, 4), plan(125, 5), plan(1000, 10)]
    costs = [
        cost(name, each, PAPER_CNN) if name in EXCHANGES else technique(name).cost(each.peers, PAPER_CNN)
        for each in plans
    ]
    vector = PAPER_CNN * BYTES_PER_VALUE
    assert [round(each.bytes_per_peer / vector, 3) for each in costs] == per_peer
    assert costs[2].phases == phases_at_125


@given(n=st.integers(1, 60), group_size=st.integers(2, 8), length=st.integers(0, 40), name=st.sampled_from(EXCHANGES))
def test_the_cost_of_an_exchange_is_a_count_of_its_messages(n, group_size, length, name):
    chosen = plan(n, group_size)
    assert cost(name, chosen, length) == count(exchange_messages(chosen, name, length), n)


@given(n=st.integers(1, 12), length=st.integers(0, 40), name=st.sampled_from(["arfl", "rdfl", "ring", "butterfly"]))
def test_closed_forms_equal_a_count_of_the_messages(n, length, name):
    assert technique(name).cost(n, length) == count(technique(name).messages(n, length), n)


@given(n=st.integers(1, 60), group_size=st.integers(2, 8), length=st.integers(0, 40), name=st.sampled_from(EXCHANGES))
def test_what_is_sent_is_received(n, group_size, length, name):
    each = cost(name, plan(n, group_size), length)
    assert sum(each.bytes_sent) == sum(each.bytes_received) == each.bytes_total


def test_fedavgs_server_comes_after_the_peers_and_carries_all_the_load():
    each = technique("fedavg").cost(10, 5)
    assert each.bytes_sent == (20,) * 10 + (200,)
    assert each.bytes_received == (20,) * 10 + (200,)
    assert each.bytes_per_peer == 40
    assert each.busiest == 400


def test_the_rivals_with_parameters_cost_what_their_parameters_say():
    saps, gossip = technique("saps", compression=100), technique("gossip", fanout=2)
    assert saps.cost(9, 1000).bytes_total == 8 * 10 * BYTES_PER_VALUE  # one peer has no pair
    assert technique("braintorrent").cost(4, 1000).bytes_received[0] == 3000 * BYTES_PER_VALUE
    assert gossip.cost(9, 1000).bytes_sent == (2000 * BYTES_PER_VALUE,) * 9


def test_no_core_member_of_a_cell_without_a_spare_pays_more_than_two_vectors_in_grid():
    chosen = plan(97, 5)
    with_spare = {rank for rank in range(97) if chosen.seats(rank)[0].spare is not None}
    sent = cost("grid", chosen, PAPER_CNN).bytes_sent
    assert all(sent[rank] <= 2 * PAPER_CNN * BYTES_PER_VALUE for rank in range(97) if rank not in with_spare)


def test_costs_of_a_million_messages_a_round_are_counted_without_spelling_them_out():
    assert cost("full", plan(1000, 1000), 3).messages == 1000 * 999
    assert technique("arfl").cost(10_000, 3).messages == 10_000 * 9_999


def test_only_full_and_chunked_have_a_cost_on_an_inexact_plan():
    inexact = keys_plan(125, 3, rounds=4, dimension=4)
    assert cost("chunked", inexact, 300).bytes_total < cost("full", inexact, 300).bytes_total
    with pytest.raises(InputError, match="needs an exact plan"):
        cost("grid", inexact, 300)


def test_an_exchange_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="foo"):
        cost("foo", plan(4, 2), 3)


# --- values as integers of a few bits ---

INT4, INT8 = IntegerWire(4, 4), IntegerWire(8, 8)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("wire", [INT4, INT8, IntegerWire(4, 8), INT4.first, IntegerWire(8, 8, masked=True)])
@given(n=st.integers(1, 70), group_size=st.integers(2, 6), length=st.integers(1, 40_000))
def test_a_packed_exchange_costs_what_its_slices_weigh(exchange, wire, n, group_size, length):
    layout = plan(n, group_size)
    sent, received, down = [0] * n, [0] * n, 0
    for step in steps(layout, exchange, length, BLOCK):
        last = step.done == len(layout.rounds)
        form = wire.result(n) if last else wire.partial(contributions_in(layout, step.done), n)
        for source, dest, start, stop in step.transfers():
            assert start % BLOCK == 0
            sent[source] += form.size(stop - start)
            received[dest] += form.size(stop - start)
            down += form.size(stop - start) if last else 0
    measured = cost(exchange, layout, length, wire)
    assert (measured.bytes_sent, measured.bytes_received, measured.bytes_down) == (tuple(sent), tuple(received), down)
    assert measured == count(exchange_messages(layout, exchange, length, wire), n)


@given(n=st.integers(1, 70), group_size=st.integers(2, 6), data=st.data())
def test_no_partial_sum_has_more_contributions_than_its_field_is_made_for(n, group_size, data):
    layout = plan(n, group_size)
    done, rank = data.draw(st.integers(0, len(layout.rounds))), data.draw(st.integers(0, n - 1))
    assert len(list(inputs(layout, rank, done))) <= contributions_in(layout, done)


def test_packed_slices_cover_the_vector_once_and_lose_nobody():
    for length in (1, BLOCK, 3 * BLOCK + 5, 50_890):
        for parts in range(1, 9):
            cuts = split(length, parts, BLOCK)
            assert [at for cut in cuts for at in range(*cut)] == list(range(length))


def test_fedavg_with_the_same_integers_is_a_little_cheaper():
    for wire in (INT4, INT8):
        ours = cost("grid", plan(125, 5), PAPER_CNN, wire).bytes_total
        theirs = technique("fedavg", wire=wire).cost(125, PAPER_CNN).bytes_total
        assert 0.8 * ours < theirs < ours
