"""Packed slices: every exchange ends on the rounded sum, in pieces and around a death; what cannot be is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marfl.errors import BadPayload
from marfl.net.base import Net
from marfl.net.virtual import Interceptor, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.cost import contributions_in
from marfl.plan.grid import order, plan
from marfl.protocol.attempt import Attempt, Stuck, resend, wanted
from marfl.protocol.exchange import mean
from marfl.protocol.messages import Resend
from marfl.protocol.pace import Pace
from marfl.protocol.protocol_settings import EXCHANGES
from marfl.protocol.roster import NO_HASH, PIECE, Member, Roster
from marfl.protocol.slice_codec import PackedCodec, packed_delta, unpacked_delta
from marfl.wire.packing import BLOCK, IntegerWire, largest
from marfl.wire.rounded_sum import round_back
from stages.virtual import crash_on

INT4 = IntegerWire(4, 4)
LAYOUT = b"l" * 32


def roster_of(count: int, exchange: str, piece: int = PIECE) -> Roster:
    names = [(index, f"p{index}") for index in range(count)]
    people = tuple(Member(name, index, 1.0) for index, name in order("run", 1, names))
    return Roster("run", 1, 0, NO_HASH, NO_HASH, LAYOUT, exchange, 3, people, (), (), (), "int4", piece=piece)


def brought(roster: Roster, length: int, wire: IntegerWire) -> dict[str, torch.Tensor]:
    dice = np.random.default_rng(length)
    limit = min(wire.limit(len(roster.members)), 2**20)
    return {
        name: torch.from_numpy(dice.integers(-limit, limit + 1, length).astype(np.int32)) for name in sorted(roster.ids)
    }


async def added(net: Net, roster: Roster, value: torch.Tensor, wire: IntegerWire) -> torch.Tensor:
    attempt = Attempt(net, roster, plan(len(roster.members), 3), value.numel(), Pace(4.0))
    attempt.pack(wire)
    net.serve("resend", lambda _, request: resend(attempt, request), kind="repair")
    return await mean(attempt, value)


def play(roster: Roster, mine: dict[str, torch.Tensor], wire: IntegerWire, strike: Interceptor | None = None):
    """What every member ends on, or the error that it ends with, and the network."""
    network = VirtualNetwork(0)
    network.intercept = strike
    lives = {name: network.join(name) for name in roster.ids}

    async def everybody():
        tasks = [network.spawn(name, added(net, roster, mine[name], wire)) for name, net in lives.items()]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return run_virtual(everybody()), network


@pytest.mark.parametrize("exchange", EXCHANGES)
@settings(max_examples=12)
@given(
    count=st.integers(1, 11), blocks=st.integers(0, 5), rest=st.integers(1, BLOCK),
    piece=st.sampled_from([8, 600, PIECE]),
    wire=st.sampled_from([INT4, IntegerWire(8, 8), IntegerWire(4, 8), INT4.first]),
)  # fmt: skip
def test_everybody_ends_on_the_rounded_sum(exchange, count, blocks, rest, piece, wire):
    roster = roster_of(count, exchange, piece)
    mine = brought(roster, blocks * BLOCK + rest, wire)
    total = torch.stack(list(mine.values())).sum(0)
    expected = total if wire.down == 32 else round_back(total, wire.down)
    for found in play(roster, mine, wire)[0]:
        assert torch.equal(found.to(torch.int64), expected.to(torch.int64))


@pytest.mark.parametrize("exchange", ["chunked", "full"])
def test_a_death_after_the_first_round_changes_not_a_bit(exchange):
    roster = roster_of(9, exchange)
    mine = brought(roster, 5 * BLOCK, INT4)
    victim = roster.ids[4]
    found, _ = play(roster, mine, INT4, crash_on("reduce", victim, after=2))
    expected = round_back(torch.stack(list(mine.values())).sum(0), 4).to(torch.int16)
    assert sum(isinstance(each, torch.Tensor) and torch.equal(each, expected) for each in found) == 8


def test_whoever_sends_more_than_a_contribution_can_be_is_named():
    roster = roster_of(4, "grid")
    mine = brought(roster, 3 * BLOCK, INT4)
    liar = roster.ids[1]
    mine[liar] = torch.full((3 * BLOCK,), -8, dtype=torch.int32)  # four bits hold it, a contribution is at most 7
    found, _ = play(roster, mine, INT4)
    assert any(isinstance(each, Stuck) and f"{liar} sent a sum that" in str(each) for each in found)


def test_what_a_partial_sum_cannot_be_is_refused_in_every_round():
    layout = plan(27, 3)
    codec = PackedCodec(IntegerWire(8, 8), layout, 27)
    for done in range(len(layout.rounds)):
        most = contributions_in(layout, done) * largest(8)
        codec.check(torch.tensor([most, -most]), done)
        with pytest.raises(BadPayload, match="cannot have brought"):
            codec.check(torch.tensor([0, -most - 1]), done)
    with pytest.raises(BadPayload, match="bytes where"):
        codec.decode(bytes(7), 8, 0)


def test_a_question_that_cuts_a_block_is_refused():
    roster = roster_of(3, "chunked")

    async def begun() -> Attempt:
        return Attempt(VirtualNetwork(0).join("p0"), roster, plan(3, 3), 2 * BLOCK + 9, Pace(4.0))

    attempt = run_virtual(begun())
    attempt.pack(INT4)
    for start, stop in ((0, BLOCK), (BLOCK, 2 * BLOCK + 9)):
        assert wanted(attempt, Resend(roster.digest, 0, 0, start, stop)) is not None
    for start, stop in ((1, BLOCK), (0, BLOCK + 1), (0, 2 * BLOCK + 8)):
        with pytest.raises(BadPayload, match="cuts a block"):
            wanted(attempt, Resend(roster.digest, 0, 0, start, stop))


@given(length=st.integers(1, 3 * BLOCK), down=st.sampled_from([4, 8, 16]), limit=st.integers(1, 2**30))
def test_a_sum_for_whoever_missed_it_comes_back_whole_rounded_or_not(length, down, limit):
    total = torch.from_numpy(np.random.default_rng(limit).integers(-limit, limit + 1, length).astype(np.int32))
    for values in (total, round_back(total.clamp(-(2**23), 2**23), down)):
        name, payload = packed_delta(values, down)
        assert torch.equal(unpacked_delta(name, payload, length), values)
        with pytest.raises(BadPayload, match="another length"):
            unpacked_delta(name, payload, length + BLOCK)
