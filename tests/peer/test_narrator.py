"""What a peer says while it works: who is waited for, and what a person should look at."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from marfl.net.virtual import VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.peer.discovery import Wait
from marfl.peer.narrator import Narrator, awaited, gathers, short, waiting_line
from marfl.protocol.messages import LEFT, MEMBER, NOT_YET

PEERS = ("12D3KooWaaaaaaaaq7", "12D3KooWbbbbbbbbz1", "me", "d")


def voter(me: str = "me", first: str = "me", over: bool = False, answered: tuple[str, ...] = (), **roles: str) -> Any:
    """As much of a participant as is looked at: its electors, in rank order, and what they said last."""
    lead = SimpleNamespace(answered=set(answered))
    electors = [SimpleNamespace(id=peer) for peer in sorted(PEERS, key=lambda peer: peer != first)]
    instance = SimpleNamespace(over=SimpleNamespace(is_set=lambda: over), electors=electors, lead=lead)
    notices = {peer: SimpleNamespace(role=role) for peer, role in roles.items()}
    standing = SimpleNamespace(notices=SimpleNamespace(about=lambda _: notices), is_barred=False)
    net = VirtualNetwork(0).join(me)
    return SimpleNamespace(net=net, instance=instance, standing=standing, record=SimpleNamespace(iteration=4))


def test_a_leader_names_who_trains_and_who_was_not_heard_of():
    found = awaited(voter(**{PEERS[0]: NOT_YET, PEERS[1]: MEMBER}))
    assert found == {PEERS[0]: "training", "d": "not heard of"}
    assert waiting_line(found, 8.2, 20.0) == "waiting for 12D3…aaq7 (training), d (not heard of), 8 of 20 s"
    assert awaited(voter(**{PEERS[0]: LEFT, PEERS[1]: MEMBER, "d": MEMBER})) == {}, "who has left is not waited for"
    assert awaited(voter(first="d")) == {"d": "leads it"}
    assert awaited(voter(over=True)) == {}
    asked = voter(answered=("d", PEERS[1]), **{PEERS[0]: NOT_YET, PEERS[1]: MEMBER})
    assert awaited(asked) == {PEERS[0]: "training", "d": "training"}, "who answers and brings nothing yet, trains"
    many = {f"p{number}": "training" for number in range(5)}
    assert waiting_line(many, 0, 3) == "waiting for p0 (training), p1 (training), p2 (training) and 2 more, 0 of 3 s"
    assert short("12D3KooWabcd") == "12D3KooWabcd"


def test_before_there_are_electors_a_wait_is_for_the_others(caplog: pytest.LogCaptureFixture):
    async def scene(promised: int = -1, closed: bool = False) -> bool:
        waiting = voter()
        waiting.instance.electors, waiting.instance.promised, waiting.instance.lead.closed = (), promised, closed
        await Narrator(20.0).during(waiting, waiting.net.sleep_until(waiting.net.now() + 3.0))
        return gathers(waiting)

    with caplog.at_level(logging.INFO, "marfl.peer"):
        assert run_virtual(scene())
        assert not run_virtual(scene(promised=0)), "a leader has come forward: they average"
        assert not run_virtual(scene(closed=True))
    assert [record.message for record in caplog.records] == ["iteration 5: waiting for the others, 2 of 20 s"]


def test_a_wait_is_said_after_two_seconds_and_every_five(caplog: pytest.LogCaptureFixture):
    async def scene() -> str:
        waiting = voter(**{PEERS[0]: NOT_YET, PEERS[1]: MEMBER, "d": MEMBER})

        async def work() -> str:
            await waiting.net.sleep_until(waiting.net.now() + 9.0)
            return "done"

        return await Narrator(20.0).during(waiting, work())

    with caplog.at_level(logging.INFO, "marfl.peer"):
        assert run_virtual(scene()) == "done"
    assert [record.message for record in caplog.records] == [
        "iteration 5: waiting for 12D3…aaq7 (training), 2 of 20 s",
        "iteration 5: waiting for 12D3…aaq7 (training), 7 of 20 s",
    ]


def test_after_its_patience_it_is_a_majority_that_is_waited_for(caplog: pytest.LogCaptureFixture):
    async def scene() -> None:
        waiting = voter(first="d")
        await Narrator(4.0, minority=15.0).during(waiting, waiting.net.sleep_until(waiting.net.now() + 18.5))

    with caplog.at_level(logging.INFO, "marfl.peer"):
        run_virtual(scene())
    assert [record.message for record in caplog.records] == [
        "iteration 5: waiting for d (leads it), 2 of 4 s",
        "iteration 5: waiting for a majority of 4 peers to answer, 7 of 15 s",
        "iteration 5: waiting for a majority of 4 peers to answer, 12 of 15 s",
        "iteration 5: waiting for a majority of 4 peers to answer, 17 s",
    ]


def test_who_may_not_vote_again_says_so(caplog: pytest.LogCaptureFixture):
    async def scene() -> None:
        waiting = voter(**dict.fromkeys(PEERS, MEMBER))
        waiting.standing.is_barred = True
        await Narrator(4.0, minority=15.0).during(waiting, waiting.net.sleep_until(waiting.net.now() + 3))

    with caplog.at_level(logging.INFO, "marfl.peer"):
        run_virtual(scene())
    (record,) = caplog.records
    assert record.message.endswith("before a restart and may not again, waiting for the others to decide, 2 of 15 s")


def test_a_bar_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")

    async def scene() -> None:
        waiting = voter(**{PEERS[0]: NOT_YET, PEERS[1]: MEMBER, "d": MEMBER})
        await Narrator(20.0, progress=True).during(waiting, waiting.net.sleep_until(waiting.net.now() + 1.0))

    run_virtual(scene())
    assert "iteration 5" in capsys.readouterr().err


def test_a_wait_for_the_expected_peers_is_on_the_bar_and_counts_for_no_iteration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("FORCE_COLOR", "1")

    async def scene(ends: float) -> None:
        waiting = voter(**{PEERS[0]: NOT_YET, PEERS[1]: MEMBER, "d": MEMBER})

        def beginning() -> Wait | None:
            waited = waiting.net.now()
            return Wait("waiting for 3 peers to begin: 1 here", waited, 120.0) if waited < 10 else None

        await Narrator(20.0, progress=True).during(waiting, waiting.net.sleep_until(ends), beginning)

    with caplog.at_level(logging.INFO, "marfl.peer"):
        run_virtual(scene(9.0))
        assert "waiting for 3 peers to begin: 1 here" in capsys.readouterr().err
        run_virtual(scene(13.0))
    assert [record.message for record in caplog.records] == ["iteration 5: waiting for 12D3…aaq7 (training), 2 of 20 s"]


def test_an_outcome_is_printed_once_and_after_the_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(logging.getLogger("marfl.peer"), "hasHandlers", lambda: False)
    narrator = Narrator(20.0, progress=True)

    async def scene() -> None:
        waiting = voter(**{PEERS[0]: NOT_YET, PEERS[1]: MEMBER, "d": MEMBER})

        async def work() -> None:
            await waiting.net.sleep_until(waiting.net.now() + 1.0)
            narrator.met(PEERS)
            narrator.told(5, "committed", 1, "", joined=True)

        await narrator.during(waiting, work())

    run_virtual(scene())
    shown = capsys.readouterr().err
    assert shown.count("committed alone") == 1
    assert "━" not in shown[shown.index("committed alone") :], "the bar is gone by then"
    assert "\x1b[2K" in shown[: shown.index("iteration 5: committed")].rpartition("━")[2], "and its line is free"


def test_where_there_is_no_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]):
    async def scene() -> None:
        waiting = voter(**{PEERS[0]: NOT_YET, PEERS[1]: MEMBER, "d": MEMBER})
        await Narrator(20.0, progress=True).during(waiting, waiting.net.sleep_until(waiting.net.now() + 1.0))

    run_virtual(scene())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("status", "present", "joined", "says"),
    [
        ("committed", 3, True, ""),
        ("committed", 1, True, "committed alone: none of 2 other peers known took part"),
        ("abstained", 2, True, "this peer brought nothing: NaN"),
        ("undecided", 0, True, "no majority was heard of in time"),
        ("stale", 0, True, ""),
    ],
)
def test_a_warning_is_for_what_a_person_should_look_at(status: str, present: int, joined: bool, says: str):
    narrator = Narrator(20.0)
    assert narrator.met({"me"}, ["a"], {"b": "gone"}) == 3
    assert narrator.met(["a"]) == 3, "it never gets less"
    assert narrator.told(1, status, present, "NaN", joined=joined) == says


def test_stale_twice_in_a_row_is_a_warning_and_a_lone_peer_that_met_nobody_is_none():
    narrator = Narrator(20.0)
    found = [narrator.told(1, status, 2, "", joined=True) for status in ("stale", "stale", "committed", "stale")]
    assert [bool(each) for each in found] == [False, True, False, False]
    narrator.met({"me"})
    assert narrator.told(1, "committed", 1, "", joined=False) == ""
