"""`wire = "fixed"` through every exchange and every engine: the same bits, at twice the bytes."""

from __future__ import annotations

import asyncio

import pytest
import torch

from marfl.config import load
from marfl.errors import InputError
from marfl.net.virtual import Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.exchange import Contribution, replay_mean
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import EXCHANGES, Settings
from marfl.sim.engine import Simulation, simulate
from marfl.state import Snapshot
from marfl.testing.world import LAYOUT, advance
from stages.virtual import Swarm

TINY = {"task": "digits", "peers": 7, "group_size": 3, "iterations": 3, "batch": 8, "test_every": 3}


def config(**changes):
    return load(overrides=TINY | changes)


def iterate(settings: Settings, updates: list[Contribution], length: int):
    """One iteration of as many peers as there are updates, with nobody failing; the participants after it."""
    swarm = Swarm(len(updates), length=length, network=VirtualNetwork(0, Link(latency=0.01)), settings=settings)
    outcomes = swarm.play_with(updates)
    return list(swarm.people.values()), outcomes


def updates(count: int, length: int, seed: int = 0) -> list[Contribution]:
    generator = torch.Generator().manual_seed(seed)
    weights = [1.0, 0.25, 3.0, 0.0]
    return [
        Contribution(b"", torch.randn(length, generator=generator), weights[i % 4] if count > 1 else 1.0)
        for i in range(count)
    ]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("count", [1, 2, 5, 7, 11])
def test_all_peers_of_every_exchange_end_on_the_replayed_mean(exchange, count):
    brought = updates(count, 23)
    settings = Settings(exchange=exchange, fallbacks=("full",), group_size=3, wire="fixed")
    people, outcomes = iterate(settings, brought, 23)
    roster = people[0].record.roster
    assert roster.wire == "fixed"
    expected = replay_mean(roster, {f"p{i}": one for i, one in enumerate(brought)})
    start = Snapshot(0, {"theta": torch.zeros(23)}, {})
    assert {person.state.hash for person in people} == {advance(start, expected, roster).hash}
    assert all(outcome.status == "committed" for outcome in outcomes)


def test_the_exchanges_end_on_the_same_bits():
    hashes = set()
    for exchange in EXCHANGES:
        settings = Settings(exchange=exchange, fallbacks=("full",), group_size=3, wire="fixed")
        people, _ = iterate(settings, updates(8, 9), 9)
        hashes.add(people[0].state.hash)
    assert len(hashes) == 1


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_engines_end_on_the_same_bits_and_bytes(exchange):
    runs = [Simulation(config(engine=name, wire="fixed", exchange=exchange)) for name in ("bitwise", "protocol")]
    for one, other in zip(*(run.rows() for run in runs), strict=True):
        assert one["model_hash"] == other["model_hash"]
        assert one["bytes_payload"] == other["bytes_payload"]


def test_a_value_takes_eight_bytes():
    sent = {}
    for wire in ("fp32", "fixed"):
        sent[wire] = [row["bytes_payload"] for row in Simulation(config(wire=wire)).rows()]
    assert sent["fixed"] == [2 * count for count in sent["fp32"]]


def test_integers_are_as_good_as_fp32():
    """The two differ by roundings only: after three iterations the models are as far apart as fp32's own rounding."""
    exact, fixed = (Simulation(config(wire=wire)) for wire in ("fp32", "fixed"))
    for run in (exact, fixed):
        list(run.rows())
    theta, other = (run.world.state.vectors["theta"] for run in (exact, fixed))
    assert not torch.equal(theta, other)
    assert torch.allclose(theta, other, rtol=0, atol=1e-6)


def test_the_fast_engine_takes_integers_peer_by_peer():
    summary = simulate(config(engine="fast", wire="fixed"))
    assert "wire = fixed" in summary["engine_reason"]


def test_an_update_beyond_the_range_abstains_and_says_so():
    rows = list(Simulation(config(wire="fixed", iterations=1, **{"optimizer.learning_rate": 1e9})).rows())
    assert "beyond ±16384, so it abstains" in rows[0]["checks"][0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wire": "fixed", "technique": "fedavg"}, "wire = fixed: needs technique = mar"),
        ({"wire": "fixed", "semantics": "paper"}, "wire = fixed: needs technique = mar and semantics = exact"),
        ({"wire": "fp16"}, "wire = 'fp16'"),
    ],
)
def test_what_integers_cannot_do_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        config(**changes)


def test_peers_that_send_values_in_another_way_are_left_out_by_name():
    length = 5
    start = Snapshot(0, {"theta": torch.zeros(length)}, {})
    network = VirtualNetwork(0, Link(latency=0.01))
    names = [f"peer{i}" for i in range(4)]
    record = genesis(start, tuple((name, i) for i, name in enumerate(names)))
    people = [
        Participant(network.join(name), Settings(wire="fp32" if i == 3 else "fixed"), i, LAYOUT, start, record, advance)
        for i, name in enumerate(names)
    ]

    async def play():
        mine = Contribution(start.hash, torch.ones(length))
        return await asyncio.gather(*(person.run_iteration(mine) for person in people))

    outcomes = run_virtual(play())
    assert {frozenset(outcome.present) for outcome in outcomes[:3]} == {frozenset(names[:3])}
    assert outcomes[3].present == ("peer3",)  # it goes on by itself: no commit mixes peers with other settings
    assert outcomes[0].missing.keys() == {"peer3"}
    assert outcomes[0].missing["peer3"].startswith("has other settings: wire is ")
