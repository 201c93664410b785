"""The library's `Peer` with masks and with differential privacy, over real sockets on loopback."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from marfl import Peer, RecordData
from marfl.dp.accounting import Observer, PrivacyLedger
from marfl.dp.calibration import NoisePlan
from marfl.errors import InputError
from marfl.peer.compatibility import library_terms
from marfl.peer.privacy_ledger import Private
from marfl.peer.state_dir import StateDir
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.terms import difference
from marfl.state import flatten, layout_of
from stages.library import QUICK, small_model, together, train

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
NOISE = {"noise_multiplier": 0.2, "shares": 3, "clip": 0.5, "delta": 0.05}
PLAN = NoisePlan(0.2, 3)


def enter(stack: ExitStack, models: list[torch.nn.Module], **options: Any) -> list[Peer]:
    """A peer for every model; options that are lists have one value for each of them."""
    found: list[Peer] = []
    for place, model in enumerate(models):
        own = {name: value[place] if isinstance(value, list) else value for name, value in options.items()}
        join = found[0].addresses if found else ()
        found.append(stack.enter_context(Peer(model, expected=len(models), join=join, **QUICK, **own)))
    return found


def test_masked_peers_end_on_the_mean_and_send_nothing_but_random_numbers():
    models = [small_model(seed) for seed in range(3)]
    with ExitStack() as stack:
        peers = enter(stack, models, masks=True)
        start = flatten(models[0])
        for seed, model in enumerate(models):
            train(model, seed)
        expected = start + sum(flatten(model) - start for model in models) / 3
        outcomes = together(*(peer.aggregate for peer in peers))
    assert [outcome.status for outcome in outcomes] == ["committed"] * 3
    assert len({outcome.hash for outcome in outcomes}) == 1
    torch.testing.assert_close(flatten(models[2]), expected, rtol=0, atol=1e-6)
    assert all(outcome.sent.masks > 0 for outcome in outcomes)
    assert sum(outcome.sent.payload for outcome in outcomes) == 8 * 4 * start.numel()  # integers of eight bytes
    assert {len(outcome.epsilons) for outcome in outcomes} == {0}


def test_private_peers_send_a_noised_update_once_and_stop_before_their_target(tmp_path: Path):
    """A budget for two iterations: after them everybody is told so, and brings nothing any more."""
    delta, release = 0.05, PLAN.release(3)
    ledgers = [PrivacyLedger().add(release, times) for times in (1, 2)]
    target = ledgers[1].epsilon(Observer.OUTSIDER, delta) * 1.01
    given = NOISE | {"target_epsilon": target, "target_observer": "outsider"}
    models, places = [small_model(seed) for seed in range(3)], [tmp_path / str(place) for place in range(3)]
    with ExitStack() as stack:
        peers = enter(stack, models, privacy=given, state_dir=places)
        for ledger in ledgers:
            before = flatten(models[0])
            for seed, model in enumerate(models):
                train(model, seed)
            outcomes = together(*(peer.aggregate for peer in peers))
            assert [outcome.status for outcome in outcomes] == ["committed"] * 3
            assert len({outcome.hash for outcome in outcomes}) == 1
            told = {observer: ledger.epsilon(observer, delta) for observer in Observer}
            assert [outcome.epsilons for outcome in outcomes] == [told] * 3
            assert [outcome.spent for outcome in outcomes] == [ledger is ledgers[-1]] * 3
            moved = float((flatten(models[0]) - before).norm()) / math.sqrt(before.numel())
            assert 0.2 < moved / (PLAN.update_multiplier * 0.5 / 3) < 5  # the noise is far larger than the updates
        with pytest.raises(InputError, match="weight: 2 must be 1 with privacy"):
            peers[0].aggregate(weight=2.0)
        one = Peer(models[0], privacy=given, state_dir=places[0], **QUICK)
        with pytest.raises(InputError, match="another process"), one:
            pass
    for place in places:
        account = json.loads((place / "privacy.json").read_text())
        assert PrivacyLedger.from_rows(account["releases"]).entries == ledgers[1].entries
        assert account["open"] is None
        later = Private(given, "fp32")  # another process
        store = StateDir(place, "test")
        later.begin(store, "another name")
        mine, why = later.contribution(later.agreement.start(torch.zeros(5)), torch.ones(5))
        assert (mine, why) == (None, f"target epsilon {target:g} for the outsider: one more iteration would exceed it")
        store.close()


def test_a_second_try_brings_the_same_vector_and_a_nan_brings_noise(tmp_path: Path):
    once = PrivacyLedger().add(PLAN.release(3)).epsilon(Observer.INSIDER, 0.05) * 1.01  # a budget for one vector
    private, store = Private(NOISE | {"target_epsilon": once}, "fp32"), StateDir(tmp_path, "test")
    private.begin(store, "me")
    state = replace(private.agreement.start(torch.zeros(50)), version=99)
    first, _ = private.contribution(state, torch.full((50,), math.nan))
    again, _ = private.contribution(state, torch.ones(50))
    assert first.delta is again.delta
    assert bool(torch.isfinite(first.delta).all())
    assert first.delta.numel() == 51
    assert private.contribution(replace(state, version=100), torch.ones(50))[0] is None  # the first may have left
    store.close()


def test_peers_with_other_privacy_settings_are_told_apart_by_name():
    layout = layout_of(small_model(0))
    mine, same, others = (
        Private(given, "fp32").layout(layout)
        for given in (NOISE, NOISE | {"delta": 0.01}, NOISE | {"noise_multiplier": 0.1})
    )
    assert mine.hash == same.hash != others.hash
    assert mine.length == layout.length + 1
    assert "noise_multiplier = 0.2" in mine.difference(others)
    assert "nothing there" in mine.difference(layout)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"privacy": NOISE}, "privacy needs state_dir"),
        ({"privacy": {"noise_multiplier": 1.0}, "state_dir": "here"}, "privacy needs shares"),
        ({"privacy": {"shares": 20}, "state_dir": "here"}, "privacy needs noise_multiplier"),
        ({"privacy": NOISE | {"sigma": 1}, "state_dir": "here"}, "privacy has no setting sigma; there are clip, "),
        ({"privacy": NOISE | {"indicator_noise": 0.1}, "state_dir": "here"}, "must be a number above noise_multip"),
        ({"privacy": NOISE | {"target_epsilon": 0.1}, "state_dir": "here"}, "must be at least .*, which one iteration"),
        ({"privacy": NOISE | {"shares": 2, "indicator_noise": 1.0}, "state_dir": "here", "masks": True}, "needs 3"),
    ],
)
def test_privacy_without_a_guarantee_is_refused_and_nothing_is_written(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=says):
        Peer(small_model(0), **options)
    assert list(tmp_path.iterdir()) == []


# --- single records ---

RECORD = {"unit": "record", "records": 40, "noise_multiplier": 1.0, "shares": 3, "clip": 1.0, "delta": 1e-3}


def record_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def records(seed: int, **more: Any) -> RecordData:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(seed))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loss = torch.nn.functional.cross_entropy
    return RecordData(data, lambda model, batch: loss(model(batch[0]), batch[1]), 8, **more)


def test_peers_that_hide_single_records_step_together_and_account_for_a_secret_sample(tmp_path: Path):
    models, places = [record_model(seed) for seed in range(3)], [tmp_path / str(place) for place in range(3)]
    ledger = PrivacyLedger().add(NoisePlan(1.0, 3, adaptive=False, sampling=0.2).release(3), 2)
    with ExitStack() as stack:
        data = [records(seed) for seed in range(3)]
        peers = enter(stack, models, privacy=RECORD, records=data, state_dir=places, masks=True)
        start = flatten(models[0])
        for _ in range(2):
            outcomes = together(*(peer.aggregate for peer in peers))
        assert [outcome.status for outcome in outcomes] == ["committed"] * 3
        assert outcomes[0].epsilons == {observer: ledger.epsilon(observer, 1e-3) for observer in Observer}
        assert [torch.equal(flatten(model), flatten(models[0])) for model in models] == [True] * 3
        moved = float((flatten(models[0]) - start).norm())
        assert 0 < moved < 1  # 0.1·0.1·(noise and gradients) of two steps
        train_would_be_lost = models[0][0].weight
        with torch.no_grad():
            train_would_be_lost.add_(1.0)
        with pytest.raises(InputError, match="the model is stepped by aggregate"):
            peers[0].aggregate()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"privacy": RECORD, "state_dir": "here"}, "records go together"),
        ({"privacy": NOISE, "records": records(0), "state_dir": "here"}, "records go together"),
        ({"privacy": RECORD, "records": [1, 2], "state_dir": "here"}, "records must be marfl.RecordData"),
        (
            {"privacy": RECORD | {"records": 5}, "records": records(0), "state_dir": "here"},
            "batch = 8: must be at most privacy.records = 5",
        ),
    ],
)
def test_records_that_do_not_fit_the_privacy_are_refused(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=says):
        Peer(record_model(0), **options)


def test_peers_that_step_on_records_in_another_way_are_told_apart_by_name():
    mine, theirs = (
        Private(RECORD, "masked", records(0, learning_rate=rate), record_model(0)).config for rate in (0.1, 0.2)
    )
    settings = Settings(wire="masked")
    found = difference(library_terms(mine, settings), library_terms(theirs, settings))
    assert found is not None
    assert found.name == "optimizer.learning_rate"
