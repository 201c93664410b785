"""A peer whose clock is wrong says so, by name and in seconds, and does not go on alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
from marfl.errors import WireError
from marfl.net.base import Parcel
from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.peer.discovery import CLOCK_CHANNEL, Clock, ask_clock, far_off, serve_clock
from stages.library import LibraryProcess
from stages.net_contract import new_contribution, new_participant

PATIENCE: dict[str, Any] = {"ready_timeout": 1.0, "minority_timeout": 1.0, "takeover": 0.2, "refresh": 1.0}
QUICK: dict[str, Any] = {"run": "test", "expected": 2, "join_patience": 10.0, "iteration_timeout": 8.0} | PATIENCE


@pytest.mark.parametrize(
    ("ahead", "found"),
    [
        ({}, None),
        ({"a": 59.0}, None),
        ({"a": -300.0}, ("a", -300.0)),
        ({"a": 300.0, "b": 0.0}, None),
        ({"a": 300.0, "b": 310.0, "c": 0.0}, ("b", 310.0)),
        ({"a": 300.0, "b": -310.0, "c": 0.0}, ("a", 300.0)),
        ({"a": 300.0, "b": 300.0, "c": 0.0, "d": 1.0}, None),
    ],
)
def test_a_clock_is_wrong_when_most_of_the_others_are_far_from_it(ahead, found):
    assert far_off(ahead) == found


def test_whose_clock_was_moved_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    clock = Clock()
    clock.note("other", 1.0)
    clock.note("other", 400.0)
    assert not clock.astray(), "the other's clock was moved"
    shift[0] = 300.0
    assert clock.ahead["other"] == pytest.approx(-299.0, abs=0.1)
    assert clock.astray(), "mine was moved"
    assert clock.jump() == pytest.approx(300.0, abs=0.1)
    assert clock.jump() == 0.0
    shift[0] = 0.0
    assert not clock.astray()


@pytest.mark.parametrize("answer", [b"", b"noon", bytes(9), b"\x7f\xf8" + bytes(6), b"\x7f\xf0" + bytes(6)])
def test_what_is_not_a_time_is_not_taken_for_one(answer):
    async def scene() -> None:
        network = VirtualNetwork()
        one, other = network.join("one"), network.join("other")
        serve_clock(other)
        assert abs(await ask_clock(one, "other", one.now() + 1)) < 1

        async def tell(_: str, __: Parcel) -> Parcel:
            return Parcel(answer)

        other.serve(CLOCK_CHANNEL, tell)
        with pytest.raises(WireError):
            await ask_clock(one, "other", one.now() + 1)

    run_virtual(scene())


@pytest.mark.parametrize("astray", [True, False])
def test_a_participant_that_knows_it_is_astray_commits_nothing_alone(astray):
    async def scene() -> str:
        me = new_participant(VirtualNetwork().join("me"))
        me.talk.dht.astray = lambda: astray
        return (await me.run_iteration(new_contribution(me, 1))).status

    assert run_virtual(scene()) == ("undecided" if astray else "committed")


@pytest.mark.parametrize(("shift", "says"), [(900.0, "900 seconds ahead of"), (-900.0, "900 seconds behind")])
def test_a_peer_with_a_wrong_clock_is_told_so_when_it_joins(shift, says):
    with LibraryProcess(**QUICK) as one:
        first = one.hear()
        with LibraryProcess(clock=shift, join=first["addresses"], **QUICK) as other:
            answer = other.hear()
            assert answer["error"] == "InputError"
            assert f"this peer's clock is {says} that of {first['id']}" in answer["says"]


def test_a_peer_whose_clock_is_moved_says_so_and_does_not_go_on_alone():
    with LibraryProcess(**QUICK) as one:
        first = one.hear()
        with LibraryProcess(join=first["addresses"], **QUICK) as other:
            other.hear()
            for peer in (one, other):
                peer.tell("aggregate")
            assert [peer.hear()["status"] for peer in (one, other)] == ["committed"] * 2
            other.ask("clock 900")
            one.kill()
            outcome = other.ask("aggregate")
            assert outcome["status"] == "undecided", outcome
            assert "this peer's clock was moved by +900 seconds" in other.said
            assert f"this peer's clock is 900 seconds ahead of that of {first['id']}" in other.said
            other.ask("clock 0")
            assert other.ask("aggregate")["status"] == "committed", "the others are gone, and its clock is right"
