"""Numbers that all peers average along with the model: by the rules, and among real peers."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
    import marfl.net.libp2p.transport  # noqa: F401 - while its warnings are ignored
from marfl import Peer
from marfl.errors import InputError
from marfl.peer.federated_metrics import FederatedMetrics
from stages.library import QUICK, small_model, together, train

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
NAMES = ("loss", "accuracy")


def test_numbers_count_as_much_as_their_examples_whatever_the_updates_count() -> None:
    one, two = FederatedMetrics(NAMES, "fp32"), FederatedMetrics(NAMES, "fp32")
    assert one.note({"loss": 2.0, "accuracy": 0.5}, 10) == []
    assert two.note({"loss": 1.0}, 30) == []
    weights, model = (1.0, 4.0), torch.zeros(3)
    brought = [each.brought(model, weight) for each, weight in zip((one, two), weights, strict=True)]
    mean = sum(weight * vector for weight, vector in zip(weights, brought, strict=True)) / sum(weights)
    assert one.told(mean, 3) == {"metrics/loss": 1.25, "metrics/accuracy": 0.5}
    one.forget()
    assert one.told(one.brought(model, 1.0), 3) == {}, "nobody has said anything"


def test_what_is_no_number_is_left_out_and_said() -> None:
    mine = FederatedMetrics(NAMES, "fp32")
    assert mine.note({"loss": math.nan, "accuracy": 0.25}, 1) == ["loss"]
    assert mine.told(mine.brought(torch.zeros(2), 1.0), 2) == {"metrics/accuracy": 0.25}
    assert not mine.brought(torch.zeros(2), 0.0)[2:].any(), "whose update does not count brings no numbers"


@pytest.mark.parametrize(
    ("values", "weight", "says"),
    [
        ({"speed": 1.0}, 1, "'speed' is not in metrics = loss, accuracy"),
        ({"loss": 1.0}, -1, "weight = -1: must be from 0 to 16384"),
        ({"loss": 1.0}, math.nan, "weight = nan"),
        ({"loss": 20.0}, 1000, "loss = 20 times weight 1000 is beyond ±16384"),
    ],
)
def test_what_cannot_be_averaged_is_refused_in_one_line(values: dict[str, float], weight: float, says: str) -> None:
    with pytest.raises(InputError, match=says):
        FederatedMetrics(NAMES, "fixed").note(values, weight)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics": ("loss", "loss")}, "each needs a name of its own"),
        ({"metrics": "loss", "wire": "int8"}, "fp32 or fixed, not int8 or int4"),
        ({"metrics": "loss", "privacy": {"noise_multiplier": 1.0}, "state_dir": "x"}, "with privacy there are none"),
    ],
)
def test_metrics_that_cannot_be_are_refused_in_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Peer(small_model(0), **options)


@pytest.mark.parametrize("masks", [False, True])
def test_real_peers_read_the_same_mean_of_all_their_numbers(masks: bool) -> None:
    models = [small_model(seed) for seed in range(3)]
    options = QUICK | {"expected": 3, "metrics": NAMES, "masks": masks}
    with ExitStack() as stack:
        first = stack.enter_context(Peer(models[0], **options))
        others = [stack.enter_context(Peer(model, join=first.addresses, **options)) for model in models[1:]]
        peers = [first, *others]
        for number, (peer, model) in enumerate(zip(peers, models, strict=True)):
            train(model, number)
            peer.mean({"loss": float(number), "accuracy": 0.5}, weight=number + 1)
        outcomes = together(*(peer.aggregate for peer in peers))
        assert len({peer.hash for peer in peers}) == 1
        for outcome in outcomes:
            assert outcome.metrics == pytest.approx({"loss": (0 + 2 + 6) / 6, "accuracy": 0.5})
        again = together(*(peer.aggregate for peer in peers))
        assert [outcome.metrics for outcome in again] == [{}] * 3, "nobody has said anything"


def test_who_averages_other_numbers_is_told_so_when_it_joins() -> None:
    with Peer(small_model(0), metrics=NAMES, **QUICK) as first:
        other = Peer(small_model(1), join=first.addresses, metrics="loss", **QUICK)
        with pytest.raises(InputError, match='metrics is "loss" here and "loss, accuracy" there'):
            other.__enter__()
