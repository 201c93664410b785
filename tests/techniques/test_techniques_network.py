"""The techniques as messages: every exchange on the virtual network ends on the bits and bytes that its technique says.

And what the paper's Table 1 says of a lost peer really happens: rings stand still, BAR loses parts, MAR goes on.
"""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import torch

from marfl.byte_kinds import ByteKind
from marfl.errors import InputError
from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.grid import order, plan
from marfl.protocol.attempt import Attempt, Stuck, resend
from marfl.protocol.ballot import Sealed
from marfl.protocol.exchange import EXCHANGES, PHASES, Contribution, mean
from marfl.protocol.pace import Pace
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import NO_HASH, Member, Roster
from marfl.state import Snapshot
from marfl.techniques.catalogue import technique

LAYOUT = hashlib.sha256(b"layout").digest()
RUN = "bench"
EXACT = {
    "mar grid": technique("mar", group_size=3),
    "mar chunked": technique("mar", group_size=3, exchange="chunked"),
    "mar full": technique("mar", group_size=3, exchange="full"),
    "fedavg": technique("fedavg"),
    "arfl": technique("arfl"),
    "rdfl": technique("rdfl"),
    "ring": technique("ring"),
    "butterfly": technique("butterfly"),
}


def updates(n: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) * 10 ** (i % 5 - 2) for i in range(n)]


def roster_for(tech, n: int) -> Roster:
    """Everybody with weight 1, in plan order; a server has the highest index, and weight 0."""
    settings = Settings(run=RUN, **tech.protocol(n))
    names = [(index, f"peer{index:02}") for index in range(n + tech.server)]
    members = tuple(Member(name, index, float(index < n)) for index, name in order(RUN, 1, names))
    return Roster(RUN, 1, 0, NO_HASH, NO_HASH, LAYOUT, settings.exchange, settings.group_size, members, (), (), ())


def run_exchange(tech, values, *, crash=None):
    """Every peer's mean (or why it has none), by rank without a server, and the network's doors by rank."""
    roster = roster_for(tech, len(values))
    layout = plan(len(roster.members), roster.group_size)
    network = VirtualNetwork()
    nets = [network.join(member.id) for member in roster.members]
    clients = iter(values)
    inputs = [next(clients) if member.weight else torch.zeros_like(values[0]) for member in roster.members]

    async def one(net, value):
        attempt = Attempt(net, roster, layout, value.numel(), Pace(4.0))
        net.serve("resend", lambda _, request: resend(attempt, request), kind=ByteKind.REPAIR)
        try:
            return await mean(attempt, value)
        except Stuck as stuck:
            return stuck

    async def main():
        if crash is not None:
            network.intercept = crash_at(roster.members[crash[0]].id, *crash[1:])
        tasks = [network.spawn(net.me, one(net, value)) for net, value in zip(nets, inputs, strict=True)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return run_virtual(main()), nets, roster


def crash_at(victim: str, channel: str, round: int):
    """The victim's process dies just before its first message on this channel in this round."""

    def intercept(network, event, delivery):
        if event.op == "send" and event.source == victim and event.tag[:1] == (channel,) and event.tag.round == round:
            delivery.copies = 0
            network.crash(victim)

    return intercept


@pytest.mark.parametrize("n", [5, 9, 16])
@pytest.mark.parametrize("name", EXACT)
def test_peers_of_an_exact_technique_end_on_the_bits_of_its_total_and_send_the_bytes_of_its_cost(name, n):
    tech, values = EXACT[name], updates(n, 41)
    results, nets, roster = run_exchange(tech, values)
    expected = tech.total(values) / n
    assert all(torch.equal(result, expected) for result in results)
    cost = tech.cost(n, 41)
    clients = [net for net, member in zip(nets, roster.members, strict=True) if member.weight]
    servers = [net for net, member in zip(nets, roster.members, strict=True) if not member.weight]
    assert tuple(net.sent.payload for net in (*clients, *servers)) == cost.bytes_sent
    assert tuple(net.received.payload for net in (*clients, *servers)) == cost.bytes_received
    assert sum(net.sent.messages for net in nets) == cost.messages
    assert sum(net.sent.repair for net in nets) == 0


@pytest.mark.parametrize("name", EXACT)
def test_vectors_shorter_than_the_group_and_the_smallest_rosters_work_as_well(name):
    for n, length in [(1, 3), (2, 1), (7, 3), (3, 0)]:
        tech, values = EXACT[name], updates(n, length)
        results, nets, _ = run_exchange(tech, values)
        assert all(torch.equal(result, tech.total(values) / n) for result in results)
        assert sum(net.sent.payload for net in nets) == tech.cost(n, length).bytes_total


@pytest.mark.parametrize("name", EXACT)
def test_the_agreed_number_of_phases_is_never_less_than_what_the_cost_says(name):
    tech = EXACT[name]
    roster = roster_for(tech, 9)
    agreed = PHASES[roster.exchange](plan(len(roster.members), roster.group_size))
    assert agreed >= tech.cost(9, 100).phases


# --- a lost peer ---


def fates(results) -> list[str]:
    return [
        "stuck" if isinstance(r, Stuck) else "dead" if isinstance(r, asyncio.CancelledError) else "done"
        for r in results
    ]


@pytest.mark.parametrize(("name", "round", "behind"), [("rdfl", 0, 8), ("rdfl", 5, 3), ("ring", 0, 8), ("ring", 7, 8)])
def test_a_ring_with_a_gap_stands_still_for_everybody_behind_it(name, round, behind):
    channel = "gather" if name == "rdfl" else "reduce"
    results, nets, _ = run_exchange(EXACT[name], updates(9, 36), crash=(0, channel, round))
    assert fates(results) == ["dead"] + ["stuck"] * behind + ["done"] * (8 - behind)
    assert sum(net.sent.repair for net in nets) == 0
    loss = EXACT[name].lost(9, 36, round, 1)
    assert loss.outcome == "stall"
    message = 4 * (36 if name == "rdfl" else 36 // 9)
    on_their_way = 2 * message  # when the peer dies: its own last one, and one to it
    assert 0 <= sum(net.sent.payload for net in nets) - loss.wasted_bytes <= on_their_way


@pytest.mark.parametrize(("channel", "phase"), [("reduce", 0), ("gather", 1)])
def test_butterfly_loses_the_part_of_a_dead_owner(channel, phase):
    results, nets, _ = run_exchange(EXACT["butterfly"], updates(8, 64), crash=(3, channel, 0))
    assert fates(results) == ["stuck"] * 3 + ["dead"] + ["stuck"] * 4
    loss = EXACT["butterfly"].lost(8, 64, phase, 1)
    assert loss.outcome == "partial"
    on_their_way = (7 + 1) * 64 // 8 * 4  # when the peer dies: the parts to it, and its own first one
    assert 0 <= sum(net.sent.payload for net in nets) - loss.wasted_bytes <= on_their_way


def test_in_butterfly_all_parts_but_the_dead_owners_arrive():
    results, nets, roster = run_exchange(EXACT["butterfly"], updates(8, 64), crash=(3, "gather", 0))
    missing = f"no slice of {roster.members[3].id} from anybody"
    assert [str(result) for rank, result in enumerate(results) if rank != 3] == [missing] * 7
    part = 64 // 8 * 4
    assert all(net.received.payload == (7 + 6) * part for rank, net in enumerate(nets) if rank != 3)


@pytest.mark.parametrize(
    ("name", "channel"), [("mar full", "reduce"), ("mar chunked", "reduce"), ("mar chunked", "gather")]
)
def test_mar_goes_on_from_replicas_when_a_peer_dies_after_the_first_round(name, channel):
    tech, values = EXACT[name], updates(9, 41)
    results, nets, _ = run_exchange(tech, values, crash=(4, channel, 1))
    assert fates(results) == ["done"] * 4 + ["dead"] + ["done"] * 4
    expected = tech.total(values) / 9
    assert all(torch.equal(results[rank], expected) for rank in range(9) if rank != 4)
    assert sum(net.sent.repair for net in nets) > 0
    assert tech.lost(9, 41, 1 if name == "mar full" else 2 + (channel == "gather"), 1).outcome == "absorbed"


@pytest.mark.parametrize(("channel", "round", "phase"), [("reduce", 0, 0), ("reduce", 1, 1), ("gather", 1, 2)])
def test_grid_has_no_replicas_and_wastes_what_the_plan_predicts(channel, round, phase):
    tech = EXACT["mar grid"]
    results, nets, _ = run_exchange(tech, updates(9, 36), crash=(0, channel, round))
    assert "done" not in fates(results)
    loss = tech.lost(9, 36, phase, 1)
    assert loss.outcome == "retry"
    on_their_way = 4 * 36  # when the peer dies: the slices to it, and its own first one
    assert 0 <= sum(net.sent.payload for net in nets) - loss.wasted_bytes <= on_their_way


def test_after_a_death_in_grids_last_phase_the_others_take_the_result_from_those_who_have_it():
    tech = EXACT["mar grid"]
    results, _, roster = run_exchange(tech, updates(9, 36), crash=(0, "gather", 0))
    assert fates(results).count("done") == 6
    assert tech.lost(9, 36, 3, 1).outcome == "absorbed"
    survivors, values = run_protocol(tech, 9, victim=roster.members[0].index, channel="gather", round=0)
    for outcome, me in survivors.values():
        assert (outcome.status, outcome.holds, outcome.attempt) == ("committed", True, 0)
        assert_holds_the_total(tech, me, values)


def test_a_star_without_a_server_gives_no_result():
    tech, values = EXACT["fedavg"], updates(4, 5)
    roster = roster_for(tech, 4)
    without = tuple(member for member in roster.members if member.weight)

    async def one(network, member):
        alone = Roster(RUN, 1, 0, NO_HASH, NO_HASH, LAYOUT, "star", 9, without, (), (), ())
        attempt = Attempt(network.join(member.id), alone, plan(4, 9), 5, Pace(4.0))
        with pytest.raises(Stuck, match="no server in the roster"):
            await EXCHANGES["star"](attempt, values[0])

    async def main():
        network = VirtualNetwork()
        await asyncio.gather(*(one(network, member) for member in without))

    run_virtual(main())


# --- the whole protocol ---


def run_protocol(tech, n, *, victim=None, channel="reduce", round=0, intercept=None, weights=None):
    """One iteration of real participants; the outcome and state of each survivor, and what they brought."""
    weights = weights or [1.0] * n
    values = dict(enumerate(updates(n, 24)))
    start = Snapshot(0, {"theta": torch.zeros(24)}, {})
    names = [f"peer{index:02}" for index in range(n + tech.server)]
    record = genesis(start, tuple((name, index) for index, name in enumerate(names)))
    settings = Settings(run=RUN, on_minority="wait", **tech.protocol(n))
    network = VirtualNetwork()

    def advance(state, update, roster):
        return Snapshot(state.version + 1, {"theta": state.vectors["theta"] + update}, {})

    async def main():
        network.intercept = intercept if victim is None else crash_at(names[victim], channel, round)
        people, tasks = [], []
        for index, name in enumerate(names):
            me = Participant(network.join(name), settings, index, LAYOUT, start, record, advance)
            mine = Contribution(start.hash, values.get(index, torch.zeros(24)), weights[index] if index < n else 0.0)
            people.append(me)
            tasks.append(network.spawn(name, me.run_iteration(mine)))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return {i: (outcomes[i], people[i]) for i in range(len(names)) if i != victim}

    return run_virtual(main()), values


def assert_holds_the_total(tech, me, values):
    """The state is what the technique makes of exactly the committed roster."""
    brought = [values[m.index] * m.weight for m in me.record.roster.members if m.index in values]
    assert torch.equal(me.state.vectors["theta"], tech.total(brought) / me.record.roster.weight)


@pytest.mark.parametrize("name", EXACT)
def test_real_participants_commit_the_techniques_own_bits_at_its_price(name):
    tech = EXACT[name]
    survivors, values = run_protocol(tech, 9)
    for outcome, me in survivors.values():
        assert (outcome.status, outcome.holds, outcome.attempt) == ("committed", True, 0)
        assert len(outcome.present) == 9 + tech.server
        assert_holds_the_total(tech, me, values)
    sent = sum(outcome.sent.payload for outcome, _ in survivors.values())
    assert sent == tech.cost(9, 24).bytes_total


@pytest.mark.parametrize("name", EXACT)
def test_weights_count_as_the_roster_says_whatever_the_technique(name):
    tech = EXACT[name]
    survivors, values = run_protocol(tech, 6, weights=[1.0, 0.25, 0.0, 3.0, 1.0, 0.5])
    for outcome, me in survivors.values():
        assert (outcome.status, outcome.attempt) == ("committed", 0)
        assert me.record.roster.weight == 5.75
        assert_holds_the_total(tech, me, values)


@pytest.mark.parametrize("name", ["rdfl", "ring", "fedavg"])
@pytest.mark.parametrize("fault", ["lost", "hung"])
def test_a_lost_message_leaves_nobody_out_and_a_hung_peer_only_itself(name, fault):
    struck = []

    def strike(network, event, delivery):
        if event.op == "send" and not struck and event.tag.round == 0:
            struck.append(event.source)
            delivery.copies = 0
            if fault == "hung":
                network.hang(event.source, 150.0)

    tech = EXACT[name]
    survivors, values = run_protocol(tech, 6, intercept=strike)
    for outcome, me in survivors.values():
        if fault == "hung" and me.net.me == struck[0]:
            continue  # it finds out when it wakes
        assert (outcome.status, outcome.holds) == ("committed", True)
        assert (struck[0] in outcome.present) is (fault == "lost")
        assert len(outcome.present) == 6 + tech.server - (fault == "hung")
        assert_holds_the_total(tech, me, values)


@pytest.mark.parametrize(
    ("name", "channel", "round"),
    [
        ("rdfl", "gather", 0),
        ("ring", "reduce", 2),
        ("ring", "reduce", 5),
        ("butterfly", "reduce", 0),
        ("butterfly", "gather", 0),
        ("fedavg", "reduce", 0),
        ("arfl", "reduce", 0),
        ("mar grid", "reduce", 1),
        ("mar chunked", "reduce", 0),
        ("mar full", "reduce", 0),
    ],
)
def test_after_a_death_the_next_attempt_is_rebuilt_from_the_survivors(name, channel, round):
    tech = EXACT[name]
    victim = next(member.index for member in roster_for(tech, 7).members if member.weight)
    survivors, values = run_protocol(tech, 7, victim=victim, channel=channel, round=round)
    assert len(survivors) == 6 + tech.server
    for outcome, me in survivors.values():
        assert (outcome.status, outcome.holds, outcome.exchange) == (
            "committed",
            True,
            tech.protocol(7)["fallbacks"][0],
        )
        assert outcome.attempt > 0
        assert set(outcome.present) == {f"peer{i:02}" for i in survivors}
        assert_holds_the_total(tech, me, values)


def test_a_roster_that_names_an_unknown_exchange_is_not_followed():
    start = Snapshot(0, {"theta": torch.zeros(3)}, {})
    record = genesis(start, (("a", 0), ("b", 1)))

    async def main():
        net = VirtualNetwork().join("a")
        me = Participant(net, Settings(run=RUN), 0, LAYOUT, start, record, lambda state, update, roster: state)
        instance = me.standing.enter()
        instance.mine = Contribution(start.hash, torch.zeros(3))
        leader = instance.leader(0)
        members = (Member("a", 0, 1.0), Member("b", 1, 1.0))
        for exchange, expected in [("telepathy", False), ("full", True)]:
            roster = Roster(RUN, 1, 0, NO_HASH, start.hash, LAYOUT, exchange, 5, members, (), (), ())
            assert me.member.begin(leader, roster, Sealed(0)) is expected
        instance.stop()

    run_virtual(main())


def test_settings_know_the_rivals_exchanges_and_no_others():
    assert {"star", "rdfl", "ring"} <= EXCHANGES.keys() == PHASES.keys()
    with pytest.raises(InputError, match=r"exchange: 'rong' is unknown; choose one of .*ring"):
        Settings(exchange="rong")
