"""A library peer through its lives: it comes back to what it was, and a SIGTERM is a goodbye."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there, or this is skipped
from marfl import Aggregated, AsyncPeer, Peer
from marfl.errors import InputError
from marfl.state import flatten
from stages.library import QUICK, LibraryProcess, small_model, together, train

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
ALONE = QUICK | {"expected": 1}


def test_identity_model_and_iteration_survive_a_restart(tmp_path: Path):
    place, model = tmp_path / "peer", small_model(0)
    with Peer(model, state_dir=place, **ALONE) as peer:
        for seed in range(2):
            train(model, seed)
            assert peer.aggregate().status == "committed"
        before, kept = (peer.id, peer.iteration, peer.hash, peer.addresses), flatten(model)
    other = small_model(7)
    with Peer(other, state_dir=place, **ALONE | {"minority_timeout": 0.1}) as peer:
        assert (peer.id, peer.iteration, peer.hash, peer.addresses) == before, "also the port, when it is free"
        assert torch.equal(flatten(other), kept)
        train(other, 3)
        assert peer.aggregate().iteration == 3
    with pytest.raises(InputError, match="is of a run with other settings"):
        Peer(small_model(0), state_dir=place, **ALONE | {"run": "another"}).__enter__()


def test_who_comes_back_while_the_others_went_on_has_their_state_and_finds_them_by_itself(tmp_path: Path):
    models = [small_model(seed) for seed in range(3)]
    quick = QUICK | {"minority_timeout": 0.5, "ready_timeout": 3.0}
    with ExitStack() as stack:
        one = stack.enter_context(Peer(models[0], expected=3, **quick))
        two = stack.enter_context(Peer(models[1], expected=3, join=one.addresses, **quick))
        with Peer(models[2], expected=3, join=one.addresses, state_dir=tmp_path / "p", **quick) as away:
            assert {outcome.known for outcome in together(*(peer.aggregate for peer in (one, two, away)))} == {3}
            name = away.id
        without = together(one.aggregate, two.aggregate)
        assert {outcome.known for outcome in without} == {3}, "who has left is still known"
        assert {len(outcome.present) for outcome in without} == {2}
        back = stack.enter_context(Peer(models[2], state_dir=tmp_path / "p", **quick))  # it remembers whom it met
        assert (back.id, back.iteration, back.hash) == (name, 2, one.hash)
        outcomes = together(*(peer.aggregate for peer in (one, two, back)))
        assert [outcome.present for outcome in outcomes] == [outcomes[0].present] * 3
        assert name in outcomes[0].present


def test_a_peer_that_commits_alone_though_it_joined_somebody_is_warned(caplog: pytest.LogCaptureFixture):
    quick = QUICK | {"ready_timeout": 0.5, "minority_timeout": 0.1}
    models = [small_model(seed) for seed in range(2)]
    with caplog.at_level(logging.INFO, "marfl.peer"), Peer(models[0], **quick) as one:
        lone = one.aggregate()
        assert (lone.warning, lone.known) == ("", 1), "nobody else was ever there"
        with Peer(models[1], join=one.addresses, **quick) as two:
            outcome = two.aggregate()
            assert outcome.status in ("committed", "undecided", "stale")
            with torch.no_grad():
                models[0][0].weight.fill_(float("nan"))
            assert "this peer brought nothing" in together(one.aggregate, two.aggregate)[0].warning
        alone = one.aggregate()
        while alone.status != "committed":
            alone = one.aggregate()
        assert alone.warning == "committed alone: the other peer took no part"
        assert alone.known == 2
    assert any(record.levelno == logging.WARNING and "1 of 2 known" in record.message for record in caplog.records)


def test_a_peer_that_expected_others_and_begins_without_them_is_warned_and_does_not_wait_again():
    with Peer(small_model(0), **QUICK | {"expected": 2, "start_timeout": 0.1, "ready_timeout": 100.0}) as one:
        outcome = one.aggregate()
    assert (outcome.status, outcome.warning) == ("committed", "committed alone: nobody else has come")
    assert outcome.seconds < 50, "who did not come in start_timeout is not waited for as a peer that trains"


def test_a_peer_lives_beside_a_running_loop_as_in_a_notebook_and_is_entered_once_at_a_time():
    model = small_model(0)

    async def cell() -> list[int]:
        with Peer(model, **ALONE) as peer:
            with pytest.raises(InputError, match="is running already"), peer:
                pass
            first = peer.aggregate().iteration
        with peer:  # once more, from the beginning
            return [first, peer.aggregate().iteration]

    assert asyncio.run(cell()) == [1, 1]


def test_what_a_loop_does_wrong_is_one_line_and_the_peer_goes_on():
    model = small_model(0)
    peer = Peer(model, metrics="loss", **ALONE)
    with pytest.raises(InputError, match="is not running"):
        _ = peer.iteration
    with peer:
        for weight in ("3", None, [1]):
            with pytest.raises(InputError, match=r"weight = .*: must be a number"):
                peer.aggregate(weight)
        for metrics in ({"loss": "a"}, {"loss": None}, 5):
            with pytest.raises(InputError, match="mean: "):
                peer.mean(metrics)
        first = next(model.parameters())
        first.requires_grad_(False)
        with pytest.raises(InputError, match="is nothing now; what travels must stay the same"):
            peer.aggregate()
        first.requires_grad_(True)
        assert peer.aggregate().status == "committed"


async def test_a_peer_averages_one_update_after_the_other():
    async with AsyncPeer(small_model(0), **ALONE) as peer:
        ends = await asyncio.gather(peer.aggregate(), peer.aggregate(), return_exceptions=True)
        assert [type(end) for end in ends] == [Aggregated, InputError]
        assert (await peer.aggregate()).iteration == 2


def test_a_sigterm_is_a_goodbye():
    options = QUICK | {"expected": 2, "minority_timeout": 30.0}
    with LibraryProcess(**options) as one:
        with LibraryProcess(join=one.hear()["addresses"], **options) as two:
            name = two.hear()["id"]
            for peer in (one, two):
                peer.tell("aggregate")
            assert [peer.hear()["status"] for peer in (one, two)] == ["committed"] * 2
            os.kill(two.popen.pid, signal.SIGTERM)
            assert two.popen.wait() == 128 + signal.SIGTERM
        outcome = one.aggregate()
        assert outcome["missing"] == {name: "said goodbye"}
        assert one.quit() == 0


def test_a_handler_of_the_users_own_is_kept():
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with Peer(small_model(0), **ALONE) as peer:
            assert signal.getsignal(signal.SIGTERM) is mine
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
            assert peer.aggregate().status == "committed", "leaving is the user's to decide"
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(SystemExit) as ended, Peer(small_model(0), **ALONE):
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
