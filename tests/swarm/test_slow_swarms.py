"""Real swarms that take their time: every exchange, every way to be lost, and a network that falls apart and heals."""

from __future__ import annotations

import math

import pytest

from marfl.config import Config
from marfl.plan.grid import order, plan
from marfl.plan.schedule import schedule
from marfl.protocol.roster import PIECE
from marfl.swarm.namespaces import why_not
from stages.swarms import BULKY, HUGE, HUGE_VALUES, QUICK, TINY, Result, simulated, swarm

pytestmark = pytest.mark.slow
HURT = ("--peers", "8", "--iterations", "6", *BULKY, *QUICK)


def same_as_simulated(tmp_path, *flags: str) -> Result:
    expected = simulated(*flags)
    result = swarm(tmp_path / "run", *flags)
    assert result.summary["model_hash"] == expected["model_hash"]
    assert sum(row["bytes_payload"] for row in result.rows()) == expected["bytes_total"]
    return result


@pytest.mark.parametrize("exchange", ["grid", "chunked", "full"])
@pytest.mark.parametrize("peers", [5, 8, 9])
def test_every_exchange_among_any_number_of_peers_equals_the_simulator(tmp_path, peers, exchange):
    same_as_simulated(tmp_path, "--peers", str(peers), "--iterations", "3", "--exchange", exchange, *TINY)


@pytest.mark.parametrize("exchange", ["grid", "full"])
def test_slices_that_travel_in_pieces_change_neither_model_nor_bytes(tmp_path, exchange):
    result = same_as_simulated(tmp_path, "--peers", "5", "--iterations", "2", "--exchange", exchange, *HUGE)
    slices = [t for phase in schedule(plan(5, 5), exchange, HUGE_VALUES) for t in phase]
    pieces = sum(math.ceil(4 * (each.stop - each.start) / PIECE) for each in slices)
    assert pieces > 2 * len(slices)
    assert min(row["messages"] for row in result.rows()) > pieces


@pytest.mark.parametrize("technique", ["ring", "butterfly", "arfl", "rdfl"])
def test_rivals_equal_the_simulator(tmp_path, technique):
    same_as_simulated(tmp_path, "--peers", "4", "--iterations", "3", "--technique", technique, *TINY)


def test_the_papers_coordination_ends_on_the_simulators_model_and_says_what_it_costs(tmp_path):
    grid = ("--peers", "4", "--group-size", "2", "--iterations", "3", *TINY)
    expected = simulated("--semantics", "paper", "--plan", "keys", *grid)
    result = swarm(tmp_path / "run", "--coordination", "paper", *grid, *QUICK)
    summary = result.summary
    assert {process["model_hash"] for process in summary["processes"]} == {expected["model_hash"]}
    assert sum(row["bytes_payload"] for row in result.rows()) == expected["bytes_total"]
    assert summary["coordination"] == "paper"
    assert summary["dht_operations_per_peer_iteration"] >= 9  # its pace, and four in each of two rounds
    assert [row["checks"] for row in result.rows()] == [[], [], []]


def test_under_the_papers_coordination_a_killed_peer_is_named_and_the_others_go_on(tmp_path):
    hurt = ("--peers", "4", "--group-size", "2", "--iterations", "4", "--kill", "3@2", "--network", "ready_timeout=3")
    result = swarm(tmp_path / "run", "--coordination", "paper", *hurt, *TINY, "--network", "phase_timeout=4")
    assert set(result.summary["missing"]) == {"3"}
    assert [result.peer_rows(index)[4]["status"] for index in range(3)] == ["averaged"] * 3
    assert any("peer 3 is missing" in check for check in result.rows()[-1]["checks"])


def test_fedavg_has_one_more_process_the_server(tmp_path):
    result = same_as_simulated(tmp_path, "--peers", "4", "--iterations", "3", "--technique", "fedavg", *TINY)
    assert len(set(result.daemons)) == 5


def test_partial_participation_is_the_simulators_draw(tmp_path):
    flags = ("--peers", "6", "--iterations", "5", "--participation", "0.5", "--dropout", "0.2", *TINY)
    expected = simulated(*flags)
    result = swarm(tmp_path / "run", *flags)
    assert result.summary["model_hash"] == expected["model_hash"]


def survivors_agree(result: Result, killed: set[int]) -> None:
    """All but the killed went through all iterations on one model, and said who is missing."""
    summary = result.summary
    assert set(map(int, summary["missing"])) == killed
    finals = {p["model_hash"] for p in summary["processes"] if p["index"] not in killed}
    assert finals == {summary["model_hash"]}
    assert summary["iterations"] == 6
    for index in set(range(8)) - killed:
        named = {name for row in result.peer_rows(index).values() for name in row["missing"]}
        assert named == {result.name(lost) for lost in killed}


def within_the_deadline(result: Result, killed: set[int]) -> None:
    """The first attempt, a new seal and one fallback, with the time-outs of `QUICK`: each at most once in a row."""
    ready, phases, phase, call, takeover = 8.0, 4, 4.0, 3.0, 1.0
    limit = 2 * (ready + phases * phase + 3 * call) + (len(killed) + 1) * (call + takeover)
    rows = [row for index in set(range(8)) - killed for row in result.peer_rows(index).values()]
    assert max(row["aggregate_seconds"] or 0.0 for row in rows) < limit


def sealer(iteration: int) -> int:
    """Who seals the roster of an iteration as long as everybody is there."""
    return order(Config().run_name, iteration, [(index, "") for index in range(8)])[0][0]


@pytest.mark.parametrize("who", ["a peer", "the bootstrap peer", "the sealer", "three at once"])
def test_the_others_finish_agree_and_name_who_was_killed_in_an_exchange(tmp_path, who):
    victims = {"a peer": {5}, "the bootstrap peer": {0}, "the sealer": {sealer(3)}, "three at once": {1, 4, 6}}[who]
    result = swarm(tmp_path / "run", *HURT, "--kill", ",".join(f"{peer}@3:exchanging" for peer in sorted(victims)))
    survivors_agree(result, victims)
    within_the_deadline(result, victims)
    assert result.summary["model_hash"] != simulated("--peers", "8", "--iterations", "6", *BULKY)["model_hash"]


def test_the_others_finish_agree_and_name_who_was_killed_between_pieces(tmp_path):
    hurt = ("--peers", "8", "--iterations", "6", *HUGE, *QUICK)
    result = swarm(tmp_path / "run", *hurt, "--kill", "2@3:exchanging,7@3:exchanging")
    survivors_agree(result, {2, 7})
    within_the_deadline(result, {2, 7})


def test_a_killed_bootstrap_peer_comes_back_through_peers_it_has_met(tmp_path):
    result = swarm(tmp_path / "run", *HURT, "--kill", "0@2", "--restart", "2")
    assert result.summary["missing"] == {}
    assert {p["model_hash"] for p in result.summary["processes"]} == {result.summary["model_hash"]}


def test_a_hung_peer_is_left_out_like_a_dead_one_and_comes_back_like_a_newcomer(tmp_path):
    result = swarm(tmp_path / "run", *HURT, "--stop", "4@3:25")
    assert result.summary["missing"] == {}
    assert {p["model_hash"] for p in result.summary["processes"]} == {result.summary["model_hash"]}
    assert any(result.name(4) in row["missing"] for row in result.peer_rows(0).values())


@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}; partitions are not tested")
@pytest.mark.parametrize("minority", ["fork", "wait"])
def test_a_partition_of_five_and_three_heals_to_one_model(tmp_path, minority):
    # iterations of a second or two: whoever comes back needs about that long to be heard
    flags = ("--peers", "8", "--iterations", "30", *BULKY, "--local-batches", "60", *QUICK)
    flags += ("--network", f"on_minority={minority}")
    flags += ("--network", "minority_timeout=5", "--network", "refresh=3", "--network", "join_timeout=2")
    result = swarm(tmp_path / "run", *flags, "--partition", "5+3@3:20")
    assert {p["model_hash"] for p in result.summary["processes"]} == {result.summary["model_hash"]}
    discarded = [sum(row.get("discarded", 0) for row in result.peer_rows(index).values()) for index in range(8)]
    assert discarded[:5] == [0] * 5  # the larger side keeps its work
    assert all((count > 0) == (minority == "fork") for count in discarded[5:])
    back = {index: caught_up(result, index) for index in (5, 6, 7)}
    assert max(back.values()) < 28, "it healed only when all was over"
    for iteration in range(3, 31):
        rows = {index: result.peer_rows(index).get(iteration) for index in range(8)}
        here = [row for index, row in rows.items() if row and iteration >= back.get(index, 0)]
        assert len({row["model_hash"] for row in here}) == 1  # one lineage: nothing is in two averages
        present = [row["present"] for row in here if row["status"] == "committed"]
        assert all(names == present[0] and len(set(names)) == len(names) for names in present)
        assert iteration < max(back.values()) + 2 or {len(names) for names in present} == {8}


def caught_up(result: Result, index: int) -> int:
    """The iteration at which a peer of the lighter side came back for good."""
    return max(row["iteration"] for row in result.peer_rows(index).values() if row["status"] == "stale")


@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}; slow links are not tested")
def test_slow_links_change_the_time_and_not_the_model(tmp_path):
    flags = ("--peers", "4", "--iterations", "3", *TINY)
    result = swarm(tmp_path / "run", *flags, "--bandwidth", "10mbit")
    assert result.summary["model_hash"] == simulated(*flags)["model_hash"]


@pytest.mark.skipif(why_not() is not None, reason=f"network namespaces: {why_not()}; slow links are not tested")
def test_a_model_that_takes_longer_than_a_phase_on_its_links_is_averaged_by_all_at_the_first_attempt(tmp_path):
    """At 8 Mbit/s a phase of this model takes 8 s and more, where a peer has five to show that it lives."""
    flags = ("--peers", "4", "--iterations", "2", *HUGE)
    slow = ("--bandwidth", "8mbit", "--network", "phase_timeout=5", "--network", "slowest_link=4")
    result = swarm(tmp_path / "run", *flags, *slow)
    assert result.summary["model_hash"] == simulated(*flags)["model_hash"]
    assert [(len(row["present"]), row["attempt"]) for row in result.peer_rows(0).values()] == [(4, 0), (4, 0)]
