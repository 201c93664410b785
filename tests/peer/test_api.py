"""The library's `Peer`, over real sockets on loopback: they agree, joiners start right, the late are told so."""

from __future__ import annotations

import asyncio
import logging
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
    import marfl.net.libp2p.transport  # noqa: F401 - while its warnings are ignored
from marfl import AsyncPeer, Peer
from marfl.errors import InputError, PeerGone
from marfl.net.libp2p.admission import new_authority, sign_token
from marfl.net.libp2p.identity import load_identity
from marfl.state import flatten
from stages.library import QUICK, small_model, together, train

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
def test_two_peers_agree_a_joiner_gets_the_model_and_a_late_one_is_told_so():
    models = [small_model(seed) for seed in range(3)]
    with ExitStack() as stack:
        one = stack.enter_context(Peer(models[0], expected=2, **QUICK))
        start = flatten(models[0])
        two = stack.enter_context(Peer(models[1], expected=2, join=one.addresses, **QUICK))
        assert torch.equal(flatten(models[1]), start), "a joiner starts from the swarm's model"

        train(models[0], 1)
        train(models[1], 2)
        deltas = [flatten(model) - start for model in models[:2]]
        first = together(one.aggregate, lambda: two.aggregate(weight=3.0))
        assert [outcome.status for outcome in first] == ["committed"] * 2
        assert set(first[0].present) == {one.id, two.id}
        assert not first[0].missing
        assert first[0].hash == first[1].hash == one.hash
        assert torch.equal(flatten(models[0]), flatten(models[1]))
        expected = start + (deltas[0] + 3 * deltas[1]) / 4
        torch.testing.assert_close(flatten(models[0]), expected)
        assert first[0].sent.payload + first[1].sent.payload == 2 * 4 * start.numel()

        three = stack.enter_context(Peer(models[2], join=two.addresses, **QUICK))
        assert three.iteration == 1
        assert three.hash == one.hash
        assert torch.equal(flatten(models[2]), flatten(models[0]))
        with torch.no_grad():
            models[1][0].weight[0, 0] = float("nan")
        second = together(one.aggregate, two.aggregate, three.aggregate)
        assert [outcome.status for outcome in second] == ["committed", "abstained", "committed"]
        assert "NaN" in second[1].discarded
        assert set(second[0].present) == {one.id, three.id}
        assert second[0].missing == {two.id: "brings no update"}
        assert torch.equal(flatten(models[1]), flatten(models[0])), "who abstained is given the agreed state"
        assert len({one.hash, two.hash, three.hash}) == 1


async def test_async_peers_agree_inside_one_event_loop_and_one_goes_on_when_the_other_has_left():
    models = [small_model(seed) for seed in range(2)]
    patience = {"ready_timeout": 2.0, "minority_timeout": 0.1}  # one of two may not be a majority
    settings = QUICK | patience | {"expected": 2}
    async with AsyncPeer(models[0], **settings) as one:
        async with AsyncPeer(models[1], join=one.addresses, **settings) as two:
            for seed, model in enumerate(models):
                await asyncio.to_thread(train, model, seed)
            first = await asyncio.gather(one.aggregate(), two.aggregate())
            assert [outcome.status for outcome in first] == ["committed"] * 2
            assert first[0].hash == first[1].hash == one.hash == two.hash
            assert torch.equal(flatten(models[0]), flatten(models[1]))
            assert [set(outcome.present) for outcome in first] == [{one.id, two.id}] * 2
            gone = two.id
        alone = await one.aggregate()
        assert alone.present == (one.id,)
        assert gone in alone.missing
        assert one.iteration == 2


@pytest.mark.parametrize("seed", [0, 1], ids=["the run's first model", "a model of its own"])
async def test_a_joiner_that_hears_of_an_old_state_takes_the_newest_and_never_goes_on_from_its_own(monkeypatch, seed):
    heads = AsyncPeer._heads
    async with AsyncPeer(small_model(0), **QUICK) as one:
        first = one.hash
        for _ in range(5):  # so many that lineages which began apart would stay so
            await one.aggregate()

        async def outdated(self: AsyncPeer) -> list[Any]:
            return [(peer, replace(head, hash=first, iteration=0)) for peer, head in await heads(self)]

        monkeypatch.setattr(AsyncPeer, "_heads", outdated)
        async with AsyncPeer(small_model(seed), join=one.addresses, **QUICK) as two:
            assert (two.hash, two.iteration) == (one.hash, 5)


async def test_an_async_peer_that_cannot_begin_leaves_nothing_behind():
    before = asyncio.all_tasks()
    with pytest.raises(InputError, match="listen"):
        async with AsyncPeer(small_model(0), listen=["/ip4/192.0.2.1/tcp/4001"], **QUICK):
            pass
    assert asyncio.all_tasks() == before


def test_a_peer_that_was_away_brings_its_update_to_the_next_iteration():
    models = [small_model(seed) for seed in range(2)]
    settings = QUICK | {"ready_timeout": 0.5}
    with Peer(models[0], **settings) as one, Peer(models[1], join=one.addresses, **settings) as late:
        train(models[1], 1)
        assert one.aggregate().present == (one.id,)
        start = flatten(models[0])
        delta = flatten(models[1]) - start
        outcome = late.aggregate()
        assert (outcome.status, outcome.age, outcome.discarded) == ("committed", 1, "")
        assert late.id in outcome.present
        torch.testing.assert_close(flatten(models[1]), start + delta / len(outcome.present))


def test_tied_and_half_precision_layers_are_averaged_and_an_optimizer_is_reset():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3, dtype=torch.bfloat16)
            self.decoder.weight = self.encoder.weight

    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    with Peer(model, reset=optimizer, **QUICK | {"expected": 1}) as peer:
        model.encoder(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        trained = flatten(model)
        assert optimizer.state
        assert peer.aggregate().status == "committed"
        assert torch.equal(flatten(model), trained), "alone, the average is one's own model"
        assert model.decoder.weight is model.encoder.weight
        assert not optimizer.state
        assert peer.aggregate().status == "committed"
        assert torch.equal(flatten(model), trained), "what was not trained does not move"


def test_a_closed_run_admits_token_holders_and_refuses_and_counts_the_others(tmp_path):
    authority = new_authority(tmp_path / "authority.key")

    def member(name: str) -> dict[str, Any]:
        me = load_identity(tmp_path / name).peer
        (tmp_path / f"{name}.token").write_text(sign_token(tmp_path / "authority.key", "test", me, days=1))
        return {"identity": tmp_path / name, "token": tmp_path / f"{name}.token", "authority": authority}

    models = [small_model(seed) for seed in range(4)]
    with ExitStack() as stack:
        one = stack.enter_context(Peer(models[0], expected=2, **member("one"), **QUICK))
        two = stack.enter_context(Peer(models[1], expected=2, join=one.addresses, **member("two"), **QUICK))
        with pytest.raises(InputError, match="the run is closed"), Peer(models[2], join=one.addresses, **QUICK):
            pass
        assert one.refused["not allowed"] > 0
        stolen = member("three") | {"token": tmp_path / "two.token"}
        with pytest.raises(InputError, match="has not signed it for"), Peer(models[3], **stolen, **QUICK):
            pass
        outcomes = together(one.aggregate, two.aggregate)
        assert [set(outcome.present) for outcome in outcomes] == [{one.id, two.id}] * 2
        assert one.hash == two.hash


def test_another_model_in_the_same_run_is_refused_and_the_layer_is_named():
    with (
        Peer(small_model(0), **QUICK) as one,
        pytest.raises(InputError, match=r"another model: layouts differ: 0\.weight \[6, 5\]"),
        Peer(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), join=one.addresses, **QUICK),
    ):
        pass


def test_an_address_where_nobody_answers_is_said_and_given_up(caplog):
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{'12D3KooWLxPvRbAFbmjfKtvJ3BRwfS3pNiCsvGUkQtkNzapMmFvx'}"
    with (
        caplog.at_level(logging.INFO, "marfl.peer"),
        pytest.raises(PeerGone, match="nobody answers"),
        Peer(small_model(0), join=[nobody], join_patience=0.5, **QUICK),
    ):
        pass
    assert "waiting for a peer of the swarm" in caplog.text
    assert f"({nobody}: connection refused)" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group_size": 1}, "group_size = 1: must be a whole number, at least 2"),
        ({"ready_timeout": -1}, "ready_timeout = -1: must be a number, above 0"),
        ({"exchange": "magic"}, "exchange: 'magic'"),
    ],
)
def test_a_wrong_option_is_one_clear_line(options, says):
    with pytest.raises(InputError, match=says):
        Peer(small_model(0), **options)


def test_a_peer_that_is_not_running_says_so():
    with pytest.raises(InputError, match="is not running"):
        Peer(small_model(0)).aggregate()


def test_a_lone_peer_and_two_that_are_there_wait_for_nobody_else_at_the_beginning():
    patient = QUICK | {"ready_timeout": 60.0}
    models = [small_model(seed) for seed in range(2)]
    with Peer(models[0], **patient) as one:
        train(models[0], 1)
        assert one.aggregate().seconds < 30
    with Peer(models[0], **patient) as one, Peer(models[1], join=one.addresses, **patient) as two:
        train(models[0], 1)
        train(models[1], 2)
        for outcome in together(one.aggregate, two.aggregate):
            assert (outcome.status, len(outcome.present)) == ("committed", 2)
            assert outcome.seconds < 30


def test_an_iteration_in_which_everybody_abstains_ends_at_once_and_says_why():
    models = [small_model(seed) for seed in range(2)]
    patient = QUICK | {"ready_timeout": 60.0}
    with Peer(models[0], expected=2, **patient) as one, Peer(models[1], join=one.addresses, **patient) as two:
        start = flatten(models[0])
        for model in models:
            with torch.no_grad():
                model[0].weight[0, 0] = float("nan")
        for outcome in together(one.aggregate, two.aggregate):
            assert outcome.status == "abstained"
            assert outcome.discarded.startswith("its update holds NaN, infinity")
            assert outcome.warning == f"this peer brought nothing: {outcome.discarded}"
            assert outcome.seconds < 30
        assert all(torch.equal(flatten(model), start) for model in models)
