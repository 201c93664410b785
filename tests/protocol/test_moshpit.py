"""The paper's coordination: groups by keys in the DHT, no votes; on perfect grids it ends on the simulator's bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marfl.config import Config, load
from marfl.errors import InputError, WireError
from marfl.net.base import Parcel
from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.plan.keys import key_meetings
from marfl.protocol.messages import Averaging, Present
from marfl.protocol.moshpit import Averaged, Grouping, Moshpit, combined
from marfl.protocol.protocol_settings import Settings
from marfl.sim.engine import simulate
from marfl.techniques.mar import Mar
from stages.forgery import forged

LAYOUT = b"l" * 32
SETTINGS = Settings(run="test", group_size=2)
LENGTH = 7
World = Callable[[VirtualNetwork], None]


def grouping(peers: int, group_size: int) -> Grouping:
    return Grouping(peers, group_size, *Mar(group_size, "full", "keys").key_shape(peers))


def values(peers: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(peers)
    return [torch.randn(LENGTH, generator=generator) for _ in range(peers)]


def average(
    peers: int, group_size: int, arrange: World = lambda _: None, *, absent: tuple[int, ...] = ()
) -> tuple[VirtualNetwork, dict[int, Averaged], float]:
    """One averaging among all but the absent; those who crash have no result. Also how long it took."""
    network = VirtualNetwork(1, Link(latency=0.01))

    async def run() -> dict[int, Averaged]:
        tasks = {}
        mine = values(peers)
        for index in (index for index in range(peers) if index not in absent):
            moshpit = Moshpit(network.join(f"p{index}"), SETTINGS, index, LAYOUT, grouping(peers, group_size))
            tasks[index] = network.spawn(f"p{index}", moshpit.average(1, mine[index]))
        arrange(network)
        await asyncio.wait(tasks.values())
        spent.append(network.time)
        return {index: task.result() for index, task in tasks.items() if not task.cancelled()}

    spent: list[float] = []
    return network, run_virtual(run()), spent[0]


def plant(network: VirtualNetwork, peer: str, record: bytes) -> None:
    """Let a peer that does nothing else say this under the first key of a swarm that is one group."""
    network.join(peer)
    network.dht["key/1/0//test"][peer] = (record, 1e9)


@pytest.mark.parametrize(("peers", "group_size"), [(1, 2), (3, 3), (4, 2), (8, 2), (9, 3), (27, 3)])
def test_on_a_perfect_grid_everybody_ends_on_the_simulators_bits_and_bytes(peers, group_size):
    network, results, spent = average(peers, group_size)
    technique = Mar(group_size, "full", "keys")
    expected = technique.total(values(peers)) / peers
    assert [torch.equal(result.value, expected) for result in results.values()] == [True] * peers
    assert sum(port.net.sent.payload for port in network.ports.values()) == technique.cost(peers, LENGTH).bytes_total
    assert not any(result.missing for result in results.values())
    assert spent < SETTINGS.ready_timeout  # nobody waits for time to pass


@pytest.mark.parametrize(("peers", "group_size"), [(6, 3), (7, 2), (5, 3)])
def test_elsewhere_a_group_is_who_shares_a_key_and_nobody_waits_in_vain(peers, group_size):
    _, results, spent = average(peers, group_size)
    shape = grouping(peers, group_size)
    expected = values(peers)
    for groups in key_meetings(peers, group_size, shape.rounds, shape.dimension):
        before = expected.copy()
        for group in groups.values():
            for peer in group:
                expected[peer] = sum(before[other] for other in group) / len(group)
    for index, result in results.items():
        torch.testing.assert_close(result.value, expected[index])
        assert not result.missing
    assert spent < SETTINGS.ready_timeout


def test_peers_go_on_without_one_that_never_comes_and_name_it():
    _, results, spent = average(4, 2, absent=(0,))
    assert {name for result in results.values() for name in result.missing} >= {"0"}
    assert "0" in results[1].missing
    assert "0" not in results[3].missing  # it would not have met peer 0
    rounds = SETTINGS.ready_timeout + SETTINGS.call_timeout + SETTINGS.phase_timeout
    assert spent <= 2 * rounds
    one, two, three = (results[index].value for index in (1, 2, 3))
    torch.testing.assert_close(one, (values(4)[1] + (values(4)[2] + values(4)[3]) / 2) / 2)  # a mean of means
    assert torch.equal(one, two)
    assert not torch.equal(two, three)  # nobody decides which model counts


def test_a_late_peer_decides_with_the_first_whose_patience_ends():
    _, results, _ = average(3, 3, lambda network: network.hang("p2", 5.0), absent=(0,))
    assert [results[index].groups for index in (1, 2)] == [[("p1", "p2")]] * 2


def test_a_peer_that_dies_in_an_exchange_is_named_by_its_group_which_goes_on():
    def arrange(network: VirtualNetwork) -> None:
        def intercept(network: VirtualNetwork, event: Departure, _: Delivery) -> None:
            if event.op == "send" and event.source == "p3" and event.tag.round == 1:
                network.crash("p3")

        network.intercept = intercept

    _, results, _ = average(4, 2, arrange)
    assert sorted(results) == [0, 1, 2]
    assert "gave no vector in round 2" in results[1].missing["p3"]
    assert results[1].groups[1] == ("p1",)
    torch.testing.assert_close(results[1].value, (values(4)[0] + values(4)[1]) / 2)
    torch.testing.assert_close(results[0].value, sum(values(4)) / 4)


def test_whoever_lists_another_group_is_not_averaged_with():
    def arrange(network: VirtualNetwork) -> None:
        plant(network, "p1", Present(1, LAYOUT, view=b"v" * 32).encoded)

    network, results, _ = average(2, 2, arrange, absent=(1,))
    assert results[0].missing == {"1": "was not in the group of its key in round 1"}
    assert torch.equal(results[0].value, values(2)[0])
    assert network.ports["p0"].net.sent.payload == 0


@pytest.mark.parametrize(
    "record",
    [b"garbage", Present(1, b"m" * 32).encoded, Present(9, LAYOUT).encoded, forged(Present(1, LAYOUT), divisor=0)],
    ids=["garbage", "another model", "an index that cannot be", "no divisor"],
)
def test_records_that_are_not_of_a_peer_of_the_run_are_as_good_as_nobody(record):
    def arrange(network: VirtualNetwork) -> None:
        plant(network, "x", record)

    _, results, spent = average(2, 2, arrange)
    assert torch.equal(results[0].value, (values(2)[0] + values(2)[1]) / 2)
    assert results[0].groups == [("p0", "p1")]
    assert spent < SETTINGS.call_timeout  # nobody waits for its list


def test_a_vector_with_a_nan_never_reaches_another_model():
    def arrange(network: VirtualNetwork) -> None:
        def spoil(_: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
            if event.op == "send" and event.source == "p1":
                bad = torch.full((LENGTH,), float("nan")).numpy().tobytes()
                delivery.parcel = Parcel(delivery.parcel.header, bad)

        network.intercept = spoil

    _, results, _ = average(2, 2, arrange)
    assert "NaN" in results[0].missing["p1"]
    assert torch.equal(results[0].value, values(2)[0])


def test_a_dht_that_is_silent_for_a_moment_is_asked_again():
    _, results, spent = average(4, 2, lambda network: network.silence_dht("p2", 3.0))
    assert [result.missing for result in results.values()] == [{}] * 4
    assert spent > 3.0


def test_the_control_plane_is_metered_and_costs_at_least_four_operations_a_round():
    network, _, _ = average(9, 3)
    for port in network.ports.values():
        assert port.net.sent.dht >= 1 + 2 * 4  # its pace, and in both rounds: announce, look, list, look
        assert port.net.sent.control > 0
        assert port.net.received.control > 0


def test_means_of_different_weight_count_the_same():
    total, divisor = combined([torch.tensor([6.0]), torch.tensor([1.0])], [3, 1])
    assert (total / divisor).item() == (6.0 / 3 + 1.0) / 2


def test_a_peer_that_was_away_hears_where_the_others_are():
    async def run() -> tuple[int, int]:
        network = VirtualNetwork()
        one, two = (Moshpit(network.join(n), SETTINGS, i, LAYOUT, grouping(2, 2)) for i, n in enumerate("ab"))
        before = await two.pace()
        await one.talk.announce("pace", Averaging(iteration=7).encoded)
        await network.join("c").announce("pace/test", b"nonsense", ttl=60)
        return before, await two.pace()

    assert run_virtual(run()) == (0, 7)


def test_a_divisor_that_no_swarm_can_have_is_refused():
    with pytest.raises(WireError, match="does not fit"):
        Present.decode(forged(Present(0, LAYOUT), divisor=2**41))


# --- a daemon's iterations ---


class Inline(Executor):
    """Runs everything at once: virtual time knows no threads."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **named))
        return future


def paper_config(peers: int, group_size: int, **more: Any) -> Config:
    small = {"features": 6, "hidden": [4], "classes": 3, "samples": 120, "test_samples": 30}
    given = {"coordination": "paper", "semantics": "paper", "task": "synthetic", "task_options": small, "batch": 4}
    return load(overrides=given | {"peers": peers, "group_size": group_size, "iterations": 3} | more)


def run_daemons(config: Config, folder: Path, indices: tuple[int, ...]) -> list[Any]:
    """These peers' whole runs, on the virtual network."""
    pytest.importorskip("hivemind", reason="hivemind is not installed: the state directory needs its network settings")
    from marfl.peer.paper_loop import PaperLoop, grouping_of
    from marfl.peer.state_dir import Checkpoint, StateDir
    from marfl.peer.trainer import Trainer
    from marfl.protocol.participant import genesis

    async def run() -> list[Any]:
        network, courses = VirtualNetwork(2, Link(latency=0.01)), []
        patience = replace(SETTINGS, group_size=config.group_size)
        for index in indices:
            trainer, store = Trainer(config, index), StateDir(folder / str(index), "test")
            memory = store.load() or Checkpoint(trainer.start, genesis(trainer.start))
            layout = trainer.worker.layout.hash
            moshpit = Moshpit(network.join(f"p{index}"), patience, index, layout, grouping_of(config))
            courses.append(PaperLoop(config, trainer, store, memory, Inline(), moshpit))
        await asyncio.gather(*(course.run() for course in courses))
        for course in courses:
            course.store.close()
        return courses

    return run_virtual(run())


@pytest.mark.parametrize(("peers", "group_size"), [(4, 2), (9, 3)])
def test_peers_end_on_the_model_of_the_simulator(tmp_path, peers, group_size):
    config = paper_config(peers, group_size)
    courses = run_daemons(config, tmp_path, tuple(range(peers)))
    expected = simulate(config)
    assert {course.model_hash.hex() for course in courses} == {expected["model_hash"]}
    assert sum(course.sent.payload for course in courses) == expected["bytes_total"]
    assert {course.state for course in courses} == {"done"}


def test_a_restarted_peer_goes_on_after_its_checkpoint_and_keeps_its_rows(tmp_path):
    run_daemons(paper_config(4, 2, iterations=2), tmp_path, (0, 1, 2, 3))
    courses = run_daemons(paper_config(4, 2, iterations=3), tmp_path, (0, 1, 2, 3))
    assert {course.model_hash.hex() for course in courses} == {simulate(paper_config(4, 2))["model_hash"]}
    assert [course.store.rows.last for course in courses] == [3] * 4


@pytest.mark.parametrize(
    "given",
    [
        {"semantics": "exact"}, {"technique": "fedavg"}, {"exchange": "chunked"}, {"plan": "random"},
        {"momentum": "local"}, {"distill.iterations": 2}, {"churn.participation": 0.5}, {"churn.dropout": 0.1},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_what_the_papers_coordination_does_not_do_is_refused_by_name(given):
    with pytest.raises(InputError, match=next(iter(given)).split(".")[0] + ".*coordination = paper"):
        load(overrides={"coordination": "paper", "semantics": "paper"} | given)
