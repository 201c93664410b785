"""Who may be given a slice again: exactly those to whom the plan shows it, and for sums whoever shares in them."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan import plan
from marfl.plan.schedule import EXCHANGES, SliceTransfer, steps
from marfl.plan.sight import inputs, may_see
from marfl.protocol.attempt import Attempt, Want
from marfl.protocol.exchange import mean
from marfl.protocol.pace import Pace
from marfl.protocol.roster import NO_HASH, PIECE, Member, Roster

LAYOUT = bytes(32)
sizes = {"n": st.integers(2, 14), "group_size": st.integers(2, 6), "exchange": st.sampled_from(EXCHANGES)}


def asked(n: int, group_size: int, exchange: str, length: int, weights: list[float] | None = None):
    """Whether rank `dest` may see [start, stop) of `source`'s sum after `done` rounds, as a function."""
    chosen = plan(n, group_size)
    listed = list(steps(chosen, exchange, length))

    def question(done: int, source: int, dest: int, start: int, stop: int) -> bool:
        return may_see(chosen, exchange, listed, weights or [1.0] * n, done, SliceTransfer(source, dest, start, stop))

    return question, chosen, listed


@given(**sizes, length=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_a_single_input_is_for_those_alone_to_whom_the_schedule_sends_that_slice(n, group_size, exchange, length):
    question, _, listed = asked(n, group_size, exchange, length)
    sent = {transfer for step in listed if step.done == 0 for transfer in step.transfers()}
    for source, dest, start in product(range(n), range(n), range(length)):
        for stop in range(start + 1, length + 1):
            shown = any(t[:2] == (source, dest) and t.start <= start and stop <= t.stop for t in sent)
            assert question(0, source, dest, start, stop) == shown


@given(**sizes, length=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_whatever_the_schedule_sends_may_be_asked_for_again(n, group_size, exchange, length):
    question, _, listed = asked(n, group_size, exchange, length, [0.0] * n)
    for step in listed:
        for source, dest, start, stop in step.transfers():
            assert question(step.done, source, dest, start, stop)
            assert question(step.done, source, dest, stop - 1, stop)


@given(**sizes, length=st.integers(1, 5), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_sum_that_hides_nothing_is_seen_by_those_alone_to_whom_the_schedule_sends_it(
    n, group_size, exchange, length, data
):
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=n, max_size=n))
    question, chosen, listed = asked(n, group_size, exchange, length, weights)
    sent = {(step.done, transfer) for step in listed for transfer in step.transfers()}
    for done, source, dest in product(range(1, len(chosen.rounds) + 1), range(n), range(n)):
        if sum(weights[rank] for rank in inputs(chosen, source, done)) < 2:
            shown = any(d == done and t[:2] == (source, dest) and t[2:] == (0, length) for d, t in sent)
            assert question(done, source, dest, 0, length) == shown


@given(n=sizes["n"], group_size=sizes["group_size"])
@settings(max_examples=100, deadline=None)
def test_the_inputs_of_a_sum_are_those_that_playing_the_rounds_brings_together(n, group_size):
    chosen = plan(n, group_size)
    held = [{rank} for rank in range(n)]
    for done, table in enumerate(chosen.tables, 1):
        for seat in table:
            total = set().union(*(held[rank] for rank in seat.members))
            for rank in seat.core:
                held[rank] = total
        spares = {spare for spare, _ in chosen.spares}
        for rank in set(range(n)) - (spares if done > 1 else set()):
            shared = held[chosen.seats(rank)[0].core[0] if rank in spares else rank]
            assert set(inputs(chosen, rank, done)) == shared


@given(**sizes, length=st.integers(1, 40), piece=st.sampled_from([8, 24, PIECE]))
@settings(max_examples=60, deadline=None)
def test_what_a_peer_waits_for_in_an_exchange_is_what_the_plan_shows_it(n, group_size, exchange, length, piece):
    """The labels of the steps (how many rounds are done) are those of the slices that really travel."""
    question, chosen, listed = asked(n, group_size, exchange, length, [0.0] * n)
    people = tuple(Member(f"p{rank}", rank, 1.0) for rank in range(n))
    roster = Roster("r", 1, 0, NO_HASH, NO_HASH, LAYOUT, exchange, group_size, people, (), (), (), piece=piece)
    seen: list[tuple[int, Want]] = []

    class Noted(Attempt):
        async def _take(self, phase, tag, want, inputs=()):
            seen.append((self.rank, want))
            return await super()._take(phase, tag, want, inputs)

    async def everybody() -> None:
        network = VirtualNetwork(0)
        nets = [network.join(member.id) for member in people]
        parts = [Noted(net, roster, chosen, length, Pace(4.0)) for net in nets]
        await asyncio.gather(*(mean(part, torch.ones(length)) for part in parts))

    run_virtual(everybody())
    assert all(question(want.done, want.rank, rank, want.start, want.stop) for rank, want in seen)
    sent = [(step.done, t) for step in listed for t in step.transfers()]
    assert sum(want.stop - want.start for _, want in seen) == sum(t.stop - t.start for _, t in sent)


@pytest.mark.parametrize(
    ("done", "dest", "seen"), [(1, 3, True), (1, 6, True), (1, 1, True), (1, 4, False), (0, 3, False)]
)
def test_in_chunked_a_cell_sum_is_for_the_cell_and_for_those_who_add_it_up(done: int, dest: int, seen: bool):
    question, chosen, _ = asked(9, 3, "chunked", 9)
    assert [seat.core for seat in chosen.seats(0)] == [(0, 3, 6), (0, 1, 2)]
    assert question(done, 0, dest, 0, 9) == seen
