"""`marfl.Peer(strategy=…)` over real sockets: the outer step by hand, a late joiner, a restart, and what is refused."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    pytest.importorskip("hivemind", reason="hivemind is not installed: nothing here is tested")
    import marfl.net.libp2p.transport  # noqa: F401 - while its warnings are ignored
from marfl import DiLoCo, Peer
from marfl.errors import InputError
from marfl.state import flatten
from stages.library import QUICK, small_model, together, train

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")


def test_peers_make_the_outer_step_and_a_late_joiner_and_a_restart_have_its_velocity(tmp_path: Path) -> None:
    models = [small_model(seed) for seed in range(3)]
    outer: dict[str, Any] = {"strategy": DiLoCo(learning_rate=0.5, momentum=0.8), **QUICK}
    trainable = sum(parameter.numel() for parameter in models[0].parameters())
    with ExitStack() as stack:
        one = stack.enter_context(Peer(models[0], expected=2, **outer))
        two = stack.enter_context(Peer(models[1], expected=2, join=one.addresses, state_dir=tmp_path / "two", **outer))
        theta, velocity = flatten(models[0]), torch.zeros(trainable)
        for turn in range(2):
            for place, model in enumerate(models[:2]):
                train(model, 2 * turn + place)
            mean = (flatten(models[0]) - theta + flatten(models[1]) - theta) / 2
            found = together(one.aggregate, two.aggregate)
            assert found[0].hash == found[1].hash
            velocity = 0.8 * velocity + mean[:trainable]
            step = torch.cat((0.5 * (mean[:trainable] + 0.8 * velocity), mean[trainable:]))  # buffers: the plain mean
            torch.testing.assert_close(flatten(models[0]), theta + step)
            theta = flatten(models[0])
        with Peer(models[2], join=one.addresses, **outer) as three:
            assert three.hash == one.hash, "the velocity is part of what a joiner is given"
        with pytest.raises(InputError, match='strategy is "plain" here and "diloco" there'):
            Peer(small_model(0), join=one.addresses, **QUICK).__enter__()
        kept = two.hash
    with Peer(models[1], state_dir=tmp_path / "two", **outer) as two:
        assert two.hash == kept
    with pytest.raises(InputError, match="is of a run with other settings"):
        Peer(models[1], state_dir=tmp_path / "two", **QUICK).__enter__()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "fedprox"}, "Peer: strategy = fedprox: changes local steps, and those are yours; choose diloco"),
        ({"strategy": "scaffold"}, "Peer: strategy = scaffold: changes local steps"),
        ({"strategy": 3}, "Peer: strategy = 3: must be a name, or a marfl.Strategy"),
        ({"strategy": "delico"}, "strategy 'delico': unknown. Did you mean diloco?"),
        (
            {"strategy": "diloco", "state_dir": "x", "privacy": {"noise_multiplier": 1.0, "shares": 3}},
            "Peer: strategy = diloco: with privacy choose plain, or run marfl peer, which has both",
        ),
    ],
)
def test_what_a_training_loop_of_ones_own_cannot_have_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        Peer(small_model(0), **options)
    assert str(caught.value).startswith(says)


def test_layers_that_stay_at_home_are_each_peers_own_and_must_be_the_same_ones() -> None:
    models = [small_model(seed) for seed in range(2)]
    with ExitStack() as stack:
        one = stack.enter_context(Peer(models[0], expected=2, local="2.*", **QUICK))
        two = stack.enter_context(Peer(models[1], expected=2, local=["2.*"], join=one.addresses, **QUICK))
        heads = [model[2].weight.detach().clone() for model in models]  # type: ignore[index,union-attr]
        assert torch.equal(models[0][0].weight, models[1][0].weight)  # type: ignore[index]
        assert not torch.equal(*heads), "a joiner keeps its own"
        for seed, model in enumerate(models):
            train(model, seed)
        found = together(one.aggregate, two.aggregate)
        assert found[0].hash == found[1].hash
        assert torch.equal(models[0][0].weight, models[1][0].weight)  # type: ignore[index]
        assert not torch.equal(models[0][2].weight, models[1][2].weight)  # type: ignore[index]
        assert not torch.equal(models[0][2].weight, heads[0]), "what was learned at home stays"  # type: ignore[index]
        with pytest.raises(InputError, match=r"its peers train another model: layouts differ: 2\.weight"):
            Peer(small_model(0), join=one.addresses, **QUICK).__enter__()
