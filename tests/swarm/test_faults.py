"""What can be asked of a swarm's faults, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from marfl.errors import InputError
from marfl.peer.halts import Moment, halt_at, parse_moment
from marfl.swarm.fault_flags import Faults, Kill, NetworkSplit, Stop, parse_kills, parse_partition, parse_stops
from marfl.swarm.namespaces import parse_bandwidth


def test_kills_are_read_with_and_without_a_phase():
    assert parse_kills("2@3, 5@4:exchanging") == (Kill(2, Moment(3)), Kill(5, Moment(4, "exchanging")))
    assert parse_kills(None) == ()


def test_stops_have_a_length():
    assert parse_stops("2@3:20,0@1:0.5") == (Stop(2, Moment(3), 20.0), Stop(0, Moment(1), 0.5))


def test_a_partition_has_sides_a_beginning_and_a_length():
    partition = parse_partition("5+3@2:30")
    assert partition == NetworkSplit((5, 3), 2, 30.0)
    assert [partition.side_of(peer) for peer in range(9)] == [0, 0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("text", ["2@3", "2@3:exchanging"])
def test_a_kill_is_written_as_it_is_read(text):
    assert [str(kill) for kill in parse_kills(text)] == [f"--kill {text}"]


def test_stops_and_partitions_are_written_as_they_are_read():
    assert [str(stop) for stop in parse_stops("2@3:20")] == ["--stop 2@3:20"]
    assert str(parse_partition("5+3@2:30")) == "--partition 5+3@2:30"


def test_a_moment_without_a_phase_has_come_once_its_iteration_is_reached():
    assert [Moment(3).has_come(iteration, "waiting") for iteration in (2, 3, 4)] == [False, True, True]


def test_a_phase_that_was_missed_is_waited_for_in_a_later_iteration():
    moment = Moment(3, "exchanging")
    assert not moment.has_come(2, "exchanging")
    assert not moment.has_come(3, "training")
    assert moment.has_come(3, "exchanging")
    assert moment.has_come(5, "exchanging")


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_kills, "2"), (parse_kills, "2@"), (parse_kills, "2@3;5@4"), (parse_kills, "2@3:sleeping"),
        (parse_kills, "-1@3"), (parse_stops, "2@3"), (parse_stops, "2@3:x"), (parse_partition, "8@2:30"),
        (parse_partition, "5+3@2"), (parse_partition, "8+0@2:30"), (parse_bandwidth, "10"), (parse_bandwidth, "0mbit"),
        (parse_bandwidth, "fast"),
    ],
)  # fmt: skip
def test_what_is_not_a_fault_is_refused_in_one_line_with_an_example(parse, text):
    with pytest.raises(InputError, match=r"^--\w+ .*: must be .*such as") as refused:
        parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        (Faults(kills=parse_kills("8@3")), "--kill: peer 8 does not exist; there are 0 to 7"),
        (Faults(kills=parse_kills("2@0")), "--kill: iteration 0 does not exist; there are 1 to 5"),
        (Faults(stops=parse_stops("2@6:1")), "--stop: iteration 6 does not exist; there are 1 to 5"),
        (Faults(partition=parse_partition("5+4@2:1")), "--partition 5+4: the sides must add up to 8 peers"),
        (Faults(restart=3.0), "--restart 3: nobody is killed; name peers with --kill, such as 2@3"),
    ],
)
def test_a_fault_that_can_never_happen_is_refused(faults, complaint):
    with pytest.raises(InputError) as refused:
        faults.check(peers=8, iterations=5)
    assert str(refused.value) == complaint


def test_faults_that_can_happen_pass():
    kills, stops = parse_kills("0@1,7@5"), parse_stops("3@2:1")
    Faults(kills, stops, parse_partition("5+3@5:1"), 2.0).check(peers=8, iterations=5)


@dataclass
class Hurried:
    """A peer whose states last for one turn of the event loop each."""

    begun: int = 0
    doing: str = "waiting"

    async def work(self, iterations: int) -> None:
        for self.begun in range(1, iterations + 1):
            for self.doing in ("training", "waiting", "exchanging"):
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("moments", "hit"),
    [
        ("3", [(3, "training")]), ("3:exchanging", [(3, "exchanging")]), ("1", [(1, "training")]),
        ("2:training 2:exchanging 30", [(2, "training"), (2, "exchanging"), (30, "training")]), ("90", []),
    ],
)  # fmt: skip
async def test_a_peer_stops_at_the_moment_itself_however_short_it_is(moments, hit, monkeypatch):
    peer, stopped = Hurried(), []
    monkeypatch.setattr("os.kill", lambda pid, number: stopped.append((peer.begun, peer.doing)))
    monkeypatch.setattr("marfl.peer.halts.FAR", 0)  # seconds: of a peer in so great a hurry
    halting = asyncio.create_task(halt_at([parse_moment(text) for text in moments.split()], peer))
    await peer.work(40)
    halting.cancel()
    assert stopped == hit


@pytest.mark.parametrize("text", ["", "x", "3:", "3:sleeping", "-1", "3:training:2"])
def test_a_moment_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="--halt-at"):
        parse_moment(text)
