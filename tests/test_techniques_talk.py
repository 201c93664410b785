"""Techniques without a global average, as messages: what peers say to each other gives the bits of `mix`."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import torch

from marfl.net.base import Parcel
from marfl.net.virtual import Link, VirtualNetwork, run_virtual
from marfl.protocol.messages import Ok
from marfl.protocol.tensors import tensor_parcel
from marfl.techniques import Circle, MixContext, technique
from marfl.techniques.braintorrent import Newer, Version

LAYOUT = hashlib.sha256(b"layout").digest()
TALKERS = {
    "saps": technique("saps", compression=4),
    "braintorrent": technique("braintorrent"),
    "gossip": technique("gossip", fanout=3),
}


def updates(n: int, length: int = 30) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, generator=generator) for _ in range(n)]


def context(members, iteration, memory):
    samples = tuple(10 + member for member in members)
    return MixContext(tuple(members), iteration, 5, memory, samples, lambda a, b: float(a * b % 7))


def talk(tech, values, ctx, memories=None, *, dead=(), intercept=None):
    """One iteration of everybody on the virtual network: the turns by position, and what each sent."""
    network = VirtualNetwork(link=Link(latency=0.01))
    names = tuple(f"peer{member}" for member in ctx.members)

    async def one(place, net):
        own = ctx if memories is None else MixContext(**{**ctx.__dict__, "memory": memories[place]})
        return await tech.converse(net, Circle(names, own, LAYOUT), values[place])

    async def main():
        network.intercept = intercept
        nets = [network.join(name) for name in names]
        for place in dead:
            network.crash(names[place])
        live = [place for place in range(len(names)) if place not in dead]
        turns = await asyncio.gather(*(network.spawn(names[place], one(place, nets[place])) for place in live))
        return dict(zip(live, turns, strict=True)), nets

    return run_virtual(main())


@pytest.mark.parametrize("name", TALKERS)
@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_conversations_end_on_the_bits_of_mix_and_send_its_messages(name, n):
    tech, values, memory = TALKERS[name], updates(n), {}
    for iteration in range(1, 6):
        ctx = context(range(3, 3 + n), iteration, memory)
        mixed = tech.mix(values, ctx)
        turns, nets = talk(tech, values, ctx)
        for place, turn in turns.items():
            assert torch.equal(turn.value, mixed.values[place])
            assert turn.missing == {}
            said = sum(4 * (t.stop - t.start) for phase in mixed.phases for t in phase if t.source == place)
            assert nets[place].sent.payload == said
        values, memory = mixed.values, mixed.memory


@pytest.mark.parametrize("name", ["saps", "gossip"])
def test_a_conversation_costs_what_the_technique_says(name):
    tech = TALKERS[name]
    _, nets = talk(tech, updates(9), context(range(9), 1, {}))
    assert sum(net.sent.payload for net in nets) == tech.cost(9, 30).bytes_total


@pytest.mark.parametrize("name", TALKERS)
def test_peers_that_keep_only_their_own_memory_stay_in_step_with_mix(name):
    tech, values, memory = TALKERS[name], updates(6), {}
    memories = [{} for _ in values]
    for iteration in range(1, 13):
        ctx = context(range(6), iteration, memory)
        mixed = tech.mix(values, ctx)
        turns, _ = talk(tech, values, ctx, memories)
        assert all(torch.equal(turn.value, mixed.values[place]) for place, turn in turns.items())
        memories = [turns[place].memory for place in range(6)]
        values, memory = mixed.values, mixed.memory


# --- a lost peer ---


def test_without_its_partner_a_peer_of_saps_learns_nothing():
    tech, values, ctx = TALKERS["saps"], updates(8), context(range(8), 1, {})
    partner = tech.matching(ctx).partner(2)
    turns, _ = talk(tech, values, ctx, dead=[2])
    assert torch.equal(turns[partner].value, values[partner])
    assert list(turns[partner].missing) == ["peer2"]
    changed = [place for place, turn in turns.items() if not torch.equal(turn.value, values[place])]
    assert set(changed) == set(range(8)) - {2, partner}


def test_braintorrents_initiator_merges_whoever_answers():
    tech, values, ctx = TALKERS["braintorrent"], updates(6), context(range(6), 1, {})
    own = tech.initiator(ctx)
    lost = (own + 1) % 6
    turns, _ = talk(tech, values, ctx, dead=[lost])
    there = [place for place in range(6) if place != lost]
    weights = torch.tensor([float(ctx.samples[place]) for place in there])
    expected = (torch.stack([values[place] for place in there]) * weights[:, None]).sum(0) / weights.sum()
    assert torch.allclose(turns[own].value, expected, atol=1e-6)
    assert list(turns[own].missing) == [f"peer{lost}"]
    assert str(lost) not in turns[own].memory["seen"][str(own)]


def test_without_an_initiator_braintorrents_peers_keep_their_models():
    tech, values, ctx = TALKERS["braintorrent"], updates(4), context(range(4), 1, {})
    turns, nets = talk(tech, values, ctx, dead=[tech.initiator(ctx)])
    assert all(torch.equal(turn.value, values[place]) for place, turn in turns.items())
    assert sum(net.sent.payload for net in nets) == 0


def test_gossip_averages_those_who_are_there():
    tech, values, ctx = TALKERS["gossip"], updates(8), context(range(8), 1, {})
    turns, _ = talk(tech, values, ctx, dead=[5])
    for place, sources in enumerate(tech.pushed_by(ctx)):
        if place == 5:
            continue
        there = [values[place], *(values[source] for source in sources if source != 5)]
        assert torch.allclose(turns[place].value, torch.stack(there).mean(0), atol=1e-6)
        assert ("peer5" in turns[place].missing) == (5 in sources or place in tech.pushed_by(ctx)[5])


# --- nothing is trusted ---


def spoil(place: int, channel: str, parcel: Parcel):
    """Replace this peer's messages on a channel."""

    def intercept(network, event, delivery):
        if event.op == "send" and event.source == f"peer{place}" and event.tag.channel == channel:
            delivery.parcel = parcel

    return intercept


@pytest.mark.parametrize(
    ("vector", "digest", "reason"),
    [
        (torch.full((30,), torch.nan), None, "NaN"),
        (torch.zeros(29), None, "116 bytes where 120"),
        (torch.zeros(30), bytes(32), "another roster"),
    ],
)
def test_a_bad_vector_is_left_out_and_its_sender_named(vector, digest, reason):
    tech, values, ctx = TALKERS["gossip"], updates(5), context(range(5), 1, {})
    circle = Circle(tuple(f"peer{i}" for i in range(5)), ctx, LAYOUT)
    bad = tensor_parcel(vector, circle.digest if digest is None else digest, LAYOUT)
    turns, _ = talk(tech, values, ctx, intercept=spoil(1, "gossip", bad))
    heard = [place for place, sources in enumerate(tech.pushed_by(ctx)) if 1 in sources]
    assert len(heard) == 3
    assert all(reason in turns[place].missing["peer1"] for place in heard)
    assert all(torch.isfinite(turn.value).all() for turn in turns.values())


@pytest.mark.parametrize(
    ("channel", "parcel", "reason"),
    [
        ("version", Parcel(Ok(status="fine").encoded), "where 'version' was expected"),
        ("version", Parcel(Version(digest=bytes(32), version=3, samples=1).encoded), "another circle"),
        ("newer", Parcel(Newer(digest=bytes(32), than=-1).encoded), "another circle"),
    ],
)
def test_a_bad_request_or_version_is_left_out_and_its_sender_named(channel, parcel, reason):
    tech, values, ctx = TALKERS["braintorrent"], updates(3), context(range(3), 1, {})
    own = tech.initiator(ctx)
    liar = own if channel == "newer" else (own + 1) % 3
    turns, _ = talk(tech, values, ctx, intercept=spoil(liar, channel, parcel))
    victim = (own + 1) % 3 if channel == "newer" else own
    assert turns[victim].missing.keys() == {f"peer{liar}"}
    assert reason in turns[victim].missing[f"peer{liar}"]
