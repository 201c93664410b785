"""The exchanges: the same bits on every peer and by every exchange, the plain mean, and the bytes of the plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marfl.net.virtual import Link, VirtualNetwork
from marfl.plan.cost import cost
from marfl.plan.grid import order, plan
from marfl.protocol.exchange import Contribution, replay_mean
from marfl.protocol.participant import Outcome, Participant
from marfl.protocol.protocol_settings import Settings
from stages.virtual import Swarm

EXCHANGES = ("grid", "chunked", "full")


def aggregate(
    deltas: list[torch.Tensor], weights: list[float], exchange: str, group_size: int, link: Link | None = None
) -> tuple[list[Participant], list[Outcome]]:
    """One iteration of the real protocol on the virtual network."""
    chosen = Settings(run="test", exchange=exchange, group_size=group_size)
    swarm = Swarm(len(deltas), length=deltas[0].numel(), network=VirtualNetwork(1, link), settings=chosen)
    outcomes = swarm.play_with([Contribution(b"", *each) for each in zip(deltas, weights, strict=True)])
    return list(swarm.people.values()), outcomes


@given(
    n=st.integers(1, 30),
    group_size=st.integers(2, 6),
    length=st.integers(1, 60),
    seed=st.integers(0, 99),
    equal=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_all_exchanges_end_on_the_same_bits_which_are_the_weighted_mean(
    n: int, group_size: int, length: int, seed: int, equal: bool
) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    deltas = [torch.randn(length, generator=generator) for _ in range(n)]
    weights = [1.0] * n if equal else [float(w) for w in torch.rand(n, generator=generator).double() + 0.1]
    hashes = set()
    for exchange in EXCHANGES:
        people, outcomes = aggregate(deltas, weights, exchange, group_size)
        assert {o.status for o in outcomes} == {"committed"}
        assert all(o.holds and o.present == outcomes[0].present and not o.missing for o in outcomes)
        hashes |= {p.state.hash for p in people}
    assert len(hashes) == 1
    roster = people[0].record.roster
    assert roster is not None
    mine = {f"p{i}": Contribution(b"", d, w) for i, (d, w) in enumerate(zip(deltas, weights, strict=True))}
    theta = people[0].state.vectors["theta"]
    assert torch.equal(theta, torch.zeros(length) + replay_mean(roster, mine))
    exact = sum(d.double() * w for d, w in zip(deltas, weights, strict=True)) / sum(weights)
    assert float((theta.double() - exact).norm()) <= 1e-6 * max(1.0, float(sum(d.double().norm() for d in deltas)) / n)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("n", "group_size"), [(1, 2), (2, 2), (5, 3), (8, 2), (9, 3), (11, 4), (27, 3), (31, 5)])
@pytest.mark.parametrize("length", [1, 7, 500])
def test_metered_bytes_are_the_plans_to_the_byte_for_every_peer(
    exchange: str, n: int, group_size: int, length: int
) -> None:
    people, outcomes = aggregate([torch.ones(length)] * n, [1.0] * n, exchange, group_size)
    predicted = cost(exchange, plan(n, group_size), length)
    ranks = [index for index, _ in order("test", 1, [(p.index, p.net.me) for p in people])]
    sent = [outcomes[index].sent.payload for index in ranks]
    received = [outcomes[index].received.payload for index in ranks]
    assert tuple(sent) == predicted.bytes_sent
    assert tuple(received) == predicted.bytes_received
    assert sum(o.sent.repair + o.sent.sync for o in outcomes) == 0


def test_bytes_and_bits_do_not_depend_on_the_links() -> None:
    deltas = [torch.randn(100, generator=torch.Generator().manual_seed(i)) for i in range(10)]
    fast, slow = (
        aggregate(deltas, [1.0] * 10, "grid", 3, link)
        for link in (None, Link(up=2e4, down=3e4, latency=0.05, jitter=0.02, loss=0.05))
    )
    assert {p.state.hash for p in fast[0]} == {p.state.hash for p in slow[0]}
    assert [o.sent.payload for o in fast[1]] == [o.sent.payload for o in slow[1]]
    assert slow[1][0].seconds > fast[1][0].seconds
