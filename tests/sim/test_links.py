"""Virtual seconds: the profiles, the model on schedules small enough to work out by hand, and the virtual network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.errors import InputError
from marfl.net.base import Parcel, Tag
from marfl.net.virtual import Link, VirtualNet, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan import keys_plan, plan
from marfl.plan.cost import Messages, exchange_messages
from marfl.plan.schedule import EXCHANGES, Phase, SliceTransfer, schedule
from marfl.sim.links import PROFILES, AccessKind, LinkProfile, Links, iteration_seconds, links
from marfl.techniques.catalogue import technique


def equal_links(peers: int, *, rate: float = 100.0, latency: float = 0.0, loss: float = 0.0) -> Links:
    """The same link for everybody, the server included: fp32 values a second, seconds."""
    access = AccessKind(4 * rate, 4 * rate, latency, loss)
    return links(LinkProfile(((1.0, access),), server=access, compute_spread=0.0), peers, seed=0)


def faster(network: Links, node: int, *, up: float = 1.0, down: float = 1.0) -> Links:
    """The same links, but one node's are so many times as fast."""
    up_factor, down_factor = np.ones(network.peers + 1), np.ones(network.peers + 1)
    up_factor[node], down_factor[node] = up, down
    return replace(network, up=network.up * up_factor, down=network.down * down_factor)


def as_messages(phase: Phase | Messages) -> Messages:
    """A phase spelled out, as arrays."""
    if isinstance(phase, Messages):
        return phase
    return Messages.of((source, dest, stop - start) for source, dest, start, stop in phase)


def seconds(
    phases: Iterable[Phase | Messages],
    network: Links,
    roster: Sequence[int] | None = None,
    updaters: Collection[int] = (),
    compute_seconds: float = 0.0,
) -> float:
    """The time of a schedule among everybody, unless a roster is given."""
    members = range(network.peers) if roster is None else roster
    messages = map(as_messages, phases)
    return iteration_seconds(messages, network, roster=members, updaters=updaters, compute_seconds=compute_seconds)


# --- the profiles ---


@pytest.mark.parametrize("name", PROFILES)
def test_one_more_peer_changes_no_other_peers_link(name: str) -> None:
    few, many = links(name, 7, seed=3), links(name, 50, seed=3)
    for field in ("up", "down", "latency", "loss", "slowness"):
        assert np.array_equal(getattr(few, field)[:7], getattr(many, field)[:7])


def test_links_follow_from_the_seed() -> None:
    assert np.array_equal(links("5g", 20, seed=1).up, links("5g", 20, seed=1).up)
    assert not np.array_equal(links("5g", 20, seed=1).up, links("5g", 20, seed=2).up)


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "mixed"])
def test_a_profiles_figures_are_the_medians_of_its_peers(name: str) -> None:
    network, access = links(name, 4001, seed=0), PROFILES[name].mix[0][1]
    assert np.median(network.up[:-1]) == pytest.approx(access.up, rel=0.05)
    assert np.median(network.down[:-1]) == pytest.approx(access.down, rel=0.05)
    assert np.median(network.latency[:-1]) == pytest.approx(access.latency, rel=0.05)
    assert np.median(network.slowness[:-1]) == pytest.approx(1.0, rel=0.05)
    assert np.std(np.log(network.slowness[:-1])) == pytest.approx(PROFILES[name].compute_spread, rel=0.1)


@pytest.mark.parametrize("name", PROFILES)
def test_the_last_link_is_the_servers(name: str) -> None:
    network, server = links(name, 5, seed=0), PROFILES[name].server
    assert (network.up[5], network.down[5], network.latency[5]) == (server.up, server.down, server.latency)
    assert network.peers == 5


def test_a_mixed_crowd_has_the_shares_it_was_told() -> None:
    one, other = AccessKind(1.0, 1.0, 0.0), AccessKind(2.0, 2.0, 0.0)
    network = links(LinkProfile(((0.25, one), (0.75, other)), server=one, compute_spread=0.0), 4000, seed=0)
    assert Counter(network.up[:-1].tolist()) == pytest.approx({1.0: 1000, 2.0: 3000}, rel=0.1)


def test_an_unknown_profile_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"links = 'wify': did you mean wifi\? must be one of lan, wifi, 5g"):
        links("wify", 5, seed=0)
    with pytest.raises(InputError, match=r"links = 'zzz': must be one of lan"):
        links("zzz", 5, seed=0)


def test_impossible_links_are_refused() -> None:
    with pytest.raises(InputError, match="up = 0, down = 1: must be above 0"):
        AccessKind(0, 1, 0.0)
    with pytest.raises(InputError, match=r"loss = 1\.0: must be at least 0 and below 1"):
        AccessKind(1, 1, 0.0, loss=1.0)
    with pytest.raises(InputError, match="latency = nan: must be a number"):
        AccessKind(1, 1, float("nan"))
    with pytest.raises(InputError, match=r"shares \[0\.5\]: must be above 0 and add up to 1"):
        LinkProfile(((0.5, AccessKind(1, 1, 0.0)),), server=AccessKind(1, 1, 0.0), compute_spread=0.0)
    with pytest.raises(InputError, match="compute_spread = -1: must be a number"):
        LinkProfile(((1.0, AccessKind(1, 1, 0.0)),), server=AccessKind(1, 1, 0.0), compute_spread=-1)
    with pytest.raises(InputError, match="peers = 0: must be at least 1"):
        links("lan", 0, seed=0)


# --- the model, worked out by hand ---


def test_a_message_takes_its_bytes_over_the_rate_and_the_latency_of_both_ends() -> None:
    assert seconds([(SliceTransfer(0, 1, 0, 300),)], equal_links(2, latency=0.5)) == pytest.approx(300 / 100 + 2 * 0.5)


def test_a_value_takes_four_bytes() -> None:
    access = AccessKind(100.0, 100.0, 0.0)
    network = links(LinkProfile(((1.0, access),), server=access, compute_spread=0.0), 2, seed=0)
    assert seconds([(SliceTransfer(0, 1, 0, 300),)], network) == pytest.approx(4 * 300 / 100)


@pytest.mark.parametrize(("up", "down"), [(0.25, 1.0), (1.0, 0.25)])
def test_a_message_passes_at_the_rate_of_the_slower_end(up: float, down: float) -> None:
    network = faster(faster(equal_links(2), 0, up=up), 1, down=down)
    assert seconds([(SliceTransfer(0, 1, 0, 100),)], network) == pytest.approx(4.0)


def test_an_uplink_sends_one_message_after_the_other() -> None:
    phase = (SliceTransfer(0, 1, 0, 100), SliceTransfer(0, 2, 0, 100), SliceTransfer(0, 3, 0, 100))
    assert seconds([phase], equal_links(4)) == pytest.approx(3.0)


def test_a_downlink_takes_in_all_messages_at_no_more_than_its_rate() -> None:
    phase = (SliceTransfer(1, 0, 0, 100), SliceTransfer(2, 0, 0, 100), SliceTransfer(3, 0, 0, 100))
    assert seconds([phase], equal_links(4)) == pytest.approx(3.0)
    assert seconds([phase], faster(equal_links(4), 0, down=3.0)) == pytest.approx(1.0)


def test_a_downlink_idles_until_something_arrives() -> None:
    phase = (SliceTransfer(1, 0, 0, 100), SliceTransfer(2, 0, 0, 100))
    network = equal_links(3)
    late = replace(network, latency=np.array([0.0, 0.0, 5.0, 0.0]))
    assert seconds([phase], late) == pytest.approx(5.0 + 1.0)


def test_a_peer_sends_a_phase_only_when_it_has_its_inputs_of_the_one_before() -> None:
    relay = [(SliceTransfer(0, 1, 0, 100),), (SliceTransfer(1, 2, 0, 100),)]
    assert seconds(relay, equal_links(3)) == pytest.approx(2.0)
    at_once = [(SliceTransfer(0, 1, 0, 100),), (SliceTransfer(3, 2, 0, 100),)]
    assert seconds(at_once, equal_links(4)) == pytest.approx(1.0)


def test_inputs_of_a_phase_may_be_late_for_one_peer_and_early_for_another() -> None:
    first = (SliceTransfer(0, 1, 0, 100), SliceTransfer(2, 3, 0, 700))
    phases = [first, (SliceTransfer(1, 0, 0, 100), SliceTransfer(3, 2, 0, 100))]
    assert seconds(phases, equal_links(4)) == pytest.approx(8.0)


def test_an_uplink_still_busy_with_one_phase_delays_the_next() -> None:
    phases = [(SliceTransfer(0, 1, 0, 500),), (SliceTransfer(0, 2, 0, 100),)]
    assert seconds(phases, equal_links(3)) == pytest.approx(6.0)


def test_a_downlink_still_busy_with_one_phase_delays_the_next() -> None:
    phases = [(SliceTransfer(0, 2, 0, 500),), (SliceTransfer(1, 2, 0, 100),)]
    assert seconds(phases, equal_links(3)) == pytest.approx(6.0)


def test_lost_packets_are_sent_again_by_the_sender_and_their_last_repeats_are_waited_for() -> None:
    network = replace(equal_links(2), loss=np.array([0.1, 0.2, 0.0]))
    out = 100 / 0.9 / 0.8 / 100  # both losses cost the uplink
    repeats = 0.2 * (1 - 0.9 * 0.8) / (0.9 * 0.8)
    assert seconds([(SliceTransfer(0, 1, 0, 100),)], network) == pytest.approx(out + repeats)
    fast_sender = faster(network, 0, up=1000.0)
    into = 100 / 0.8 / 100  # only the receiver's own loss costs its downlink
    assert seconds([(SliceTransfer(0, 1, 0, 100),)], fast_sender) == pytest.approx(into + repeats)


def test_on_a_slow_path_a_repeat_takes_a_ping() -> None:
    network = equal_links(2, latency=1.0, loss=0.5)
    assert seconds([(SliceTransfer(0, 1, 0, 1),)], network) == pytest.approx(0.04 + 2.0 + 4.0 * 0.75 / 0.25)


@pytest.mark.parametrize("n", [2, 3, 16, 25])
def test_all_to_all_on_equal_links_keeps_every_link_busy_without_incast(n: int) -> None:
    assert seconds(technique("arfl").messages(n, 100), equal_links(n, latency=0.1)) == pytest.approx((n - 1) + 0.2)


def test_a_ring_pays_the_latency_of_every_hop() -> None:
    assert seconds(technique("rdfl").messages(9, 100), equal_links(9, latency=0.1)) == pytest.approx(8 * (1.0 + 0.2))
    assert seconds(technique("ring").messages(10, 100), equal_links(10, latency=0.1)) == pytest.approx(18 * (0.1 + 0.2))


def test_a_perfect_grid_pays_two_vectors_and_the_latency_of_six_phases() -> None:
    length = 1250
    expected = 2 * length * (1 - 1 / 125) / 100 + 6 * 0.2
    assert seconds(schedule(plan(125, 5), "grid", length), equal_links(125, latency=0.1)) == pytest.approx(expected)


def test_fedavgs_server_shares_its_links_among_all() -> None:
    n, length = 20, 100
    network = equal_links(n, latency=0.1)
    assert seconds(technique("fedavg").messages(n, length), network) == pytest.approx(2 * (n * 1.0 + 0.2))
    wide = faster(network, n, up=1000.0, down=1000.0)
    alone = seconds(technique("fedavg").messages(1, length), equal_links(1, latency=0.1))
    assert seconds(technique("fedavg").messages(n, length), wide) == pytest.approx(alone, rel=0.02)


def test_fedavgs_server_is_the_rank_after_the_roster() -> None:
    network = faster(equal_links(9), 9, down=0.1, up=0.1)
    assert seconds(technique("fedavg").messages(2, 100), network, roster=[4, 7]) == pytest.approx(20.0 + 20.0)


def test_the_roster_says_whose_link_a_rank_has() -> None:
    network = faster(equal_links(10), 6, up=0.1)
    phases = [(SliceTransfer(0, 1, 0, 100),)]
    assert seconds(phases, network, roster=[6, 2]) == pytest.approx(10.0)
    assert seconds(phases, network, roster=[2, 6]) == pytest.approx(1.0)


def test_a_roster_of_peers_without_links_is_refused() -> None:
    for roster in ([0, 3], [-1, 0]):
        with pytest.raises(InputError, match="peers must be between 0 and 2"):
            iteration_seconds([], equal_links(3), roster=roster)


def test_an_iteration_starts_with_the_local_updates_each_at_its_peers_speed() -> None:
    network = replace(equal_links(3), slowness=np.array([1.0, 3.0, 2.0, 1.0]))
    phases = [(SliceTransfer(2, 0, 0, 100),)]
    assert seconds(phases, network, updaters=range(3), compute_seconds=10.0) == 30.0
    assert seconds([], network, roster=[0, 2], updaters=range(3), compute_seconds=10.0) == 20.0


def test_a_peer_sends_once_its_own_update_is_done() -> None:
    network = replace(equal_links(2), slowness=np.array([2.0, 1.0, 1.0]))
    phases = [(SliceTransfer(0, 1, 0, 100),)]
    assert seconds(phases, network, updaters=range(2), compute_seconds=10.0) == pytest.approx(21.0)


def test_only_updaters_of_the_roster_take_time_to_train() -> None:
    phases, network = [(SliceTransfer(0, 1, 0, 100),)], equal_links(4)
    # peer 2 sends at once, peer 0 is not in the roster
    assert seconds(phases, network, roster=[2, 3], updaters={0, 3}, compute_seconds=7.0) == 7.0
    assert seconds(phases, network, compute_seconds=7.0) == pytest.approx(1.0)


def test_an_iteration_without_peers_takes_no_time() -> None:
    assert seconds([], equal_links(3), roster=[], compute_seconds=5.0) == 0.0


def test_a_phase_in_which_nobody_sends_takes_no_time() -> None:
    phases: list[Phase] = [(), (SliceTransfer(0, 1, 0, 100),), ()]
    assert seconds(phases, equal_links(2)) == pytest.approx(1.0)


# --- properties ---


@given(st.integers(2, 30), st.integers(2, 6), st.sampled_from(EXCHANGES), st.integers(0, 9), st.integers(0, 29))
def test_a_faster_link_never_makes_an_iteration_slower(n: int, m: int, exchange: str, seed: int, node: int) -> None:
    network, phases = links("mixed", n, seed), schedule(plan(n, m), exchange, 10_000)
    before = seconds(phases, network)
    assert seconds(phases, faster(network, node % n, up=2.0)) <= before * (1 + 1e-9)
    assert seconds(phases, faster(network, node % n, down=2.0)) <= before * (1 + 1e-9)


@given(st.integers(2, 30), st.integers(2, 6), st.sampled_from(EXCHANGES), st.integers(0, 9))
def test_no_schedule_is_faster_than_its_busiest_link(n: int, m: int, exchange: str, seed: int) -> None:
    network, phases = links("lte", n, seed), schedule(plan(n, m), exchange, 10_000)
    sent, received = np.zeros(n + 1), np.zeros(n + 1)
    for source, dest, start, stop in (transfer for phase in phases for transfer in phase):
        sent[source] += stop - start
        received[dest] += stop - start
    assert seconds(phases, network) >= 4 * max((sent / network.up).max(), (received / network.down).max())


def as_counter(phase: Phase | Messages) -> Counter[tuple[int, int, int]]:
    if isinstance(phase, Messages):
        return Counter(zip(phase.source.tolist(), phase.dest.tolist(), phase.values.tolist(), strict=True))
    return Counter((source, dest, stop - start) for source, dest, start, stop in phase)


@given(st.integers(1, 40), st.integers(2, 7), st.sampled_from(EXCHANGES), st.integers(0, 50))
def test_exchanges_as_arrays_are_the_same_messages(n: int, m: int, exchange: str, length: int) -> None:
    arrays = list(map(as_counter, exchange_messages(plan(n, m), exchange, length)))
    assert arrays == list(map(as_counter, schedule(plan(n, m), exchange, length)))


def test_an_approximate_plan_as_arrays_is_the_same_messages() -> None:
    approximate = keys_plan(125, 3, rounds=4, dimension=4)
    arrays = list(map(as_counter, exchange_messages(approximate, "full", 7)))
    assert arrays == list(map(as_counter, schedule(approximate, "full", 7)))


# --- the same messages on the virtual network ---


async def play(net: VirtualNet, rank: int, ranks: int, phases: Sequence[Messages]) -> None:
    """One rank's part of a schedule: send a phase in ring order while its inputs come in, then go on."""
    for number, phase in enumerate(phases):
        tag = Tag("reduce", round=number)
        sources = phase.source[phase.dest == rank].tolist()
        inputs = [asyncio.ensure_future(net.recv(str(source), tag, deadline=1e9)) for source in sources]
        mine = phase.source == rank
        size = dict(zip(phase.dest[mine].tolist(), phase.values[mine].tolist(), strict=True))
        for dest in sorted(size, key=lambda dest: (dest - rank) % ranks):
            await net.send(str(dest), tag, Parcel(b"", bytes(4 * size[dest])), deadline=1e9)
        await asyncio.gather(*inputs)


async def played(phases: Sequence[Messages], network: Links) -> float:
    """The virtual network's time for a schedule on these links."""
    world, ranks = VirtualNetwork(log=False), network.peers + 1
    nets = [
        world.join(str(node), Link(network.up[node], network.down[node], network.latency[node]))
        for node in range(ranks)
    ]
    await asyncio.gather(*(play(net, rank, ranks, phases) for rank, net in enumerate(nets)))
    return world.time


@pytest.mark.parametrize("latency", [0.0, 0.05, 2.0])
@pytest.mark.parametrize("name", ["full", "chunked", "grid", "fedavg", "arfl", "rdfl", "ring", "butterfly"])
@pytest.mark.parametrize("n", [11, 16])
def test_the_virtual_network_takes_as_long_on_equal_links(name: str, n: int, latency: float) -> None:
    chosen = technique("mar", group_size=4, exchange=name) if name in EXCHANGES else technique(name)
    network, phases = equal_links(n, latency=latency), tuple(chosen.messages(n, 640))
    tolerance = 0.01 if latency else 0.05  # which of two messages of one instant is first, Python's event loop decides
    assert seconds(phases, network) == pytest.approx(run_virtual(played(phases, network)), rel=tolerance)


@pytest.mark.parametrize("exchange", ["full", "chunked", "grid"])
@pytest.mark.parametrize("profile", ["wifi", "5g", "mixed"])
def test_the_virtual_network_takes_about_as_long_on_unequal_links(exchange: str, profile: str) -> None:
    lossless = replace(links(profile, 27, seed=0), loss=np.zeros(28))
    phases = tuple(exchange_messages(plan(27, 3), exchange, 100_000))
    assert seconds(phases, lossless) == pytest.approx(run_virtual(played(phases, lossless)), rel=0.2)
