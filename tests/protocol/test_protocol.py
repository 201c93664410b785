"""Whole iterations on the virtual network: who is missing is named, bytes add up, lineages heal."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

from marfl.net.base import Parcel, Traffic
from marfl.net.virtual import Delivery, Departure, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.grid import order, plan
from marfl.plan.schedule import schedule
from marfl.protocol.exchange import Contribution
from marfl.protocol.messages import LEFT
from marfl.protocol.roster import ranked
from marfl.protocol.tensors import raw
from stages.virtual import LENGTH, Swarm, crash_on, leaders


@pytest.mark.parametrize("exchange", ["grid", "chunked", "full"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_death_in_the_exchange_is_named_and_every_byte_of_it_is_counted(exchange: str, after: int) -> None:
    async def play() -> None:
        swarm = Swarm(9, exchange=exchange)
        swarm.network.intercept = crash_on("reduce", "p4", after)
        outcomes = await swarm.iterate()
        assert {o.status for o in outcomes.values()} == {"committed"}
        assert len(swarm.hashes()) == 1
        assert all(("p4" in o.present) != ("p4" in o.missing) for o in outcomes.values())
        events = [e for e in swarm.network.events or [] if e.op in ("send", "call", "answer")]
        for kind in ("payload", "repair", "sync"):
            logged = sum(e.payload for e in events if e.kind == kind)
            assert logged == sum(getattr(p.net.sent, kind) for p in swarm.people.values()), kind
        first = next(e.tag for e in events if e.tag.channel == "reduce")
        predicted = {
            (t.source, t.dest, 4 * (t.stop - t.start))
            for phase in schedule(plan(9, 3), exchange, LENGTH)
            for t in phase
        }
        ranks = {name: place for place, name in enumerate(_order(swarm, 1))}
        for event in events:
            if event.op == "send" and event.tag.attempt == first.attempt and event.tag.part == first.part:
                assert (ranks[event.source], ranks[event.dest], event.payload) in predicted

    run_virtual(play())


def _order(swarm: Swarm, iteration: int) -> list[str]:
    return [name for _, name in order("test", iteration, [(p.index, name) for name, p in swarm.people.items()])]


def test_an_update_that_is_not_finite_stays_at_home_and_its_peer_catches_up_by_one_vector() -> None:
    async def play() -> None:
        swarm = Swarm(5)
        swarm.mine = lambda name, weight=1.0: Contribution(  # type: ignore[method-assign]
            swarm.record.hash, torch.full((LENGTH,), float("nan") if name == "p2" else 1.0), weight
        )
        outcomes = await swarm.iterate()
        assert all("p2" not in o.present and o.missing == {"p2": "brings no update"} for o in outcomes.values())
        assert swarm.people["p2"].behind
        before = sum(p.net.sent.sync for p in swarm.people.values())
        assert await swarm.people["p2"].catch_up()
        assert sum(p.net.sent.sync for p in swarm.people.values()) - before == 4 * LENGTH
        assert len(swarm.hashes()) == 1

    run_virtual(play())


@pytest.mark.parametrize("ranks", [(5, 6, 7), (0,), (0, 1, 2), (0, 3, 5)])
def test_peers_that_say_goodbye_are_not_waited_for_even_if_they_are_the_next_to_lead(ranks: tuple[int, ...]) -> None:
    async def play() -> None:
        swarm = Swarm(8)
        await swarm.iterate()
        leaving = [leaders(swarm)[rank] for rank in ranks]
        await asyncio.gather(*(swarm.people[name].readiness.announce(LEFT) for name in leaving))
        for name in leaving:
            swarm.network.crash(name)
        outcomes = await swarm.iterate()
        assert len(outcomes) == 8 - len(ranks)
        for outcome in outcomes.values():
            assert (outcome.status, outcome.exchange) == ("committed", "grid")  # of the first roster that was sealed
            assert outcome.missing.keys() == set(leaving)
            assert outcome.seconds < 1.0

    run_virtual(play())


def test_a_leader_that_says_goodbye_while_others_wait_for_it_is_followed_soon() -> None:
    async def play() -> None:
        swarm = Swarm(8)
        await swarm.iterate()
        leader = leaders(swarm)[0]
        waiting = asyncio.create_task(swarm.iterate(skip=(leader,)))
        await asyncio.sleep(1.0)
        await swarm.people[leader].readiness.announce(LEFT)
        swarm.network.crash(leader)
        for outcome in (await waiting).values():
            assert (outcome.status, outcome.missing.keys()) == ("committed", {leader})
            assert outcome.seconds < 1.0 + 2 * swarm.settings.takeover < swarm.settings.ready_timeout

    run_virtual(play())


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("peers", "ranks"), [(2, (0,)), (4, (0, 2)), (5, (1, 2, 4)), (8, (0, 1, 2, 3, 5))])
def test_who_is_left_when_a_majority_says_goodbye_goes_on_at_once(
    peers: int, ranks: tuple[int, ...], *, waits: bool
) -> None:
    async def play() -> None:
        swarm = Swarm(peers)
        await swarm.iterate()
        leaving = [leaders(swarm)[rank] for rank in ranks]
        waiting = asyncio.create_task(swarm.iterate(skip=tuple(leaving)))
        await asyncio.sleep(3.0 if waits else 0.0)
        await asyncio.gather(*(swarm.people[name].readiness.announce(LEFT) for name in leaving))
        for name in leaving:
            swarm.network.crash(name)
        outcomes = await waiting
        assert len(outcomes) == peers - len(ranks)
        assert {outcome.status for outcome in outcomes.values()} == {"committed"}
        assert {frozenset(outcome.present) for outcome in outcomes.values()} == {frozenset(outcomes)}
        assert max(outcome.seconds for outcome in outcomes.values()) < 15 < swarm.settings.minority_timeout
        again = await swarm.iterate(skip=tuple(leaving))
        assert max(outcome.seconds for outcome in again.values()) < 1.0
        assert len(swarm.hashes()) == 1

    run_virtual(play())


def test_a_peer_that_left_and_comes_back_counts_again() -> None:
    async def play() -> None:
        swarm = Swarm(2)
        await swarm.iterate()
        gone, stays = leaders(swarm)
        await swarm.people[gone].readiness.announce(LEFT)
        alone = await swarm.iterate(skip=(gone,))
        assert alone[stays].present == (stays,)
        assert await swarm.people[gone].catch_up()
        together = await swarm.iterate()
        assert {frozenset(outcome.present) for outcome in together.values()} == {frozenset((gone, stays))}
        again = await swarm.iterate()
        assert {outcome.status for outcome in again.values()} == {"committed"}
        swarm.network.crash(leaders(swarm)[0])  # without a word
        outcomes = await swarm.iterate()
        assert min(outcome.seconds for outcome in outcomes.values()) >= swarm.settings.minority_timeout

    run_virtual(play())


def test_a_goodbye_during_an_iteration_holds_for_the_next_one_when_that_is_committed_all_the_same() -> None:
    async def play() -> None:
        swarm = Swarm(2)
        await swarm.iterate()
        before = swarm.people["p0"].record
        gone, stays = (elector.id for elector in ranked("test", 3, before.electors))
        leaving: list[asyncio.Task[None]] = []

        def leave(_: VirtualNetwork, event: Departure, __: Delivery) -> None:
            if event.source == gone and event.tag.channel == "reduce" and not leaving:
                leaving.append(asyncio.create_task(swarm.people[gone].readiness.announce(LEFT)))

        swarm.network.intercept = leave
        both = await swarm.iterate()
        await leaving[0]
        assert {frozenset(outcome.present) for outcome in both.values()} == {frozenset((gone, stays))}
        swarm.network.crash(gone)
        outcomes = await swarm.iterate()
        assert outcomes[stays].missing == {gone: "said goodbye"}
        assert outcomes[stays].seconds < 15

    run_virtual(play())


def test_a_minority_whose_majority_is_only_silent_waits_for_it() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        first, *others = leaders(swarm)
        for name in (first, others[0]):
            swarm.network.crash(name)
        await swarm.people[others[1]].readiness.announce(LEFT)  # one goodbye is not enough to call it a day
        swarm.network.crash(others[1])
        outcomes = await swarm.iterate()
        assert min(outcome.seconds for outcome in outcomes.values()) >= swarm.settings.minority_timeout

    run_virtual(play())


def test_witnesses_vote_learn_the_record_and_can_vote_again() -> None:
    async def play() -> None:
        swarm = Swarm(7)
        for witnesses in (("p0", "p3", "p5"), ("p0", "p3", "p5"), ("p1",)):
            for name, peer in swarm.people.items():
                if name not in witnesses and peer.behind:
                    assert await peer.catch_up()
            outcomes = await swarm.iterate(witnesses=witnesses)
            assert {o.status for o in outcomes.values()} == {"committed"}
            assert len({p.record.hash for p in swarm.people.values()}) == 1
            assert set(outcomes["p6"].present) == set(swarm.names) - set(witnesses)

    run_virtual(play())


def test_peers_that_do_not_know_each_other_found_one_lineage() -> None:
    async def play() -> None:
        swarm = Swarm(6, named=False, expected=6)
        outcomes = await swarm.iterate()
        assert {len(o.present) for o in outcomes.values()} == {6}
        assert len(swarm.hashes()) == 1
        again = await swarm.iterate()
        assert {o.status for o in again.values()} == {"committed"}

    run_virtual(play())


def test_a_late_joiner_starts_from_the_swarms_model_and_takes_part() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        await swarm.iterate()
        await swarm.iterate()
        swarm.people["new"] = swarm.join("new", 9)
        assert await swarm.people["new"].catch_up()
        assert len(swarm.hashes()) == 1
        outcomes = await swarm.iterate()
        assert all("new" in o.present for o in outcomes.values())

    run_virtual(play())


def test_a_peer_with_another_layout_is_left_out_and_named() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        swarm.people["p3"].standing.layout = b"x" * 32
        outcomes = await swarm.iterate()
        assert all(o.missing == {"p3": "brings another model layout"} for n, o in outcomes.items() if n != "p3")

    run_virtual(play())


def test_weight_zero_helps_to_aggregate_and_counts_nothing() -> None:
    async def play() -> None:
        swarm = Swarm(3)
        own = swarm.mine
        swarm.mine = lambda name, weight=1.0: own(name, 0.0 if name == "p1" else 1.0)  # type: ignore[method-assign]
        expected = (own("p0").delta.double() + own("p2").delta.double()) / 2
        await swarm.iterate()
        theta = swarm.people["p1"].state.vectors["theta"].double()
        assert torch.allclose(theta, expected, atol=1e-6)

    run_virtual(play())


@pytest.mark.parametrize("on_minority", ["fork", "wait"])
def test_a_partition_of_five_and_three_heals_to_one_model(on_minority: str) -> None:
    async def play() -> None:
        swarm = Swarm(8, on_minority=on_minority, minority_timeout=30.0, iteration_timeout=120.0)
        await swarm.iterate()
        away = ["p5", "p6", "p7"]
        swarm.network.partition({name: int(name in away) for name in swarm.names})
        apart = await swarm.iterate()
        assert all(apart[name].status == "committed" for name in swarm.names if name not in away)
        assert len(swarm.hashes(swarm.names[:5])) == 1
        assert {apart[name].status for name in away} == ({"committed"} if on_minority == "fork" else {"undecided"})
        swarm.network.heal()
        for _ in range(2):
            await asyncio.gather(*(peer.catch_up() for peer in swarm.people.values()))
            together = await swarm.iterate()
        assert {o.status for o in together.values()} == {"committed"}
        assert len(swarm.hashes()) == 1
        assert all(len(o.present) == 8 for o in together.values())
        discarded = {swarm.people[name].discarded for name in away}
        assert discarded == ({1} if on_minority == "fork" else {0})

    run_virtual(play())


def test_a_sender_of_values_too_large_to_be_summed_is_named_and_not_the_owner_of_the_sum() -> None:
    """Two values of 3e38 are finite and their sum is not: whoever adds them up is not to blame."""

    async def play() -> None:
        swarm = Swarm(9)

        def inflate(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.source == "p4" and event.tag.channel == "reduce" and event.tag.round == 0:
                huge = torch.full((event.payload // 4,), 3e38)
                delivery.parcel = Parcel(delivery.parcel.header, raw(huge))

        swarm.network.intercept = inflate
        outcomes = await swarm.iterate()
        missing = {tuple(o.missing.items()) for name, o in outcomes.items() if name != "p4"}
        assert missing == {(("p4", "a chunk with values beyond 1.3e+30"),)}
        counted = sum((me.net.refused for me in swarm.people.values()), Counter())
        assert counted.keys() == {"bad data"}

    run_virtual(play())


def test_an_update_too_large_to_be_summed_stays_at_home() -> None:
    async def play() -> None:
        swarm = Swarm(4)
        swarm.mine = lambda name, weight=1.0: Contribution(  # type: ignore[method-assign]
            swarm.record.hash, torch.full((LENGTH,), 1e38 if name == "p1" else 1.0), 1.0
        )
        outcomes = await swarm.iterate()
        assert all(o.missing == {"p1": "brings no update"} for o in outcomes.values())

    run_virtual(play())


def test_outcomes_add_up_to_the_nets_own_meter() -> None:
    async def play() -> None:
        swarm = Swarm(7)
        sent = {name: Traffic() for name in swarm.names}
        received = {name: Traffic() for name in swarm.names}
        for skip in ((), ("p3",), ()):
            for name in swarm.names:
                if name not in skip and swarm.people[name].behind:
                    assert await swarm.people[name].catch_up()
            for name, outcome in (await swarm.iterate(skip)).items():
                sent[name], received[name] = sent[name].plus(outcome.sent), received[name].plus(outcome.received)
        idle = {name: await peer.run_iteration(_stale(swarm)) for name, peer in swarm.people.items()}  # what came late
        for name, peer in swarm.people.items():
            assert sent[name].plus(idle[name].sent) == peer.net.sent
            assert received[name].plus(idle[name].received) == peer.net.received
        assert any(outcome.sent.total() for outcome in idle.values())

    run_virtual(play())


def _stale(swarm: Swarm) -> Contribution:
    return Contribution(swarm.record.hash, torch.zeros(LENGTH))


@pytest.mark.parametrize("seconds", [5.0, 1000.0])
def test_a_peer_that_the_dht_does_not_answer_takes_part_all_the_same(seconds: float) -> None:
    async def play() -> None:
        swarm = Swarm(5)
        await swarm.iterate()
        swarm.network.silence_dht("p2", seconds)
        outcomes = await swarm.iterate()
        assert {(o.status, o.holds, len(o.present)) for o in outcomes.values()} == {("committed", True, 5)}

    run_virtual(play())


def test_peers_that_wait_for_a_slow_one_ask_the_dht_a_few_times_and_no_more() -> None:
    async def play() -> None:
        swarm = Swarm(8, ready_timeout=60.0, takeover=2.0)
        await swarm.iterate()
        leader, *others, slow = _order(swarm, 2)
        before = {name: me.net.sent.dht for name, me in swarm.people.items()}
        early = [swarm.network.spawn(n, swarm.people[n].run_iteration(swarm.mine(n))) for n in (leader, *others)]
        await asyncio.sleep(25.0)  # virtual
        late = swarm.network.spawn(slow, swarm.people[slow].run_iteration(swarm.mine(slow)))
        outcomes = [await task for task in (*early, late)]
        assert {(outcome.status, len(outcome.present)) for outcome in outcomes} == {("committed", 8)}
        asked = {name: me.net.sent.dht - before[name] for name, me in swarm.people.items()}
        assert max(asked[name] for name in (*others, slow)) <= 4, asked

    run_virtual(play())
