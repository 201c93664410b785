"""Real peers that were started with other settings are told which, and are never averaged with."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import stages.libp2p  # noqa: F401 - hivemind's own warnings are ignored there, or this is skipped
from marfl import Peer
from marfl.dp.accounting import PrivacyLedger
from marfl.dp.calibration import NoisePlan
from marfl.errors import InputError
from stages.library import QUICK, small_model
from stages.processes import PROGRAMS, Stage, new_stage

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")
stage = new_stage
CARELESS = (str(PROGRAMS / "careless_peer.py"),)


def test_library_peers_with_other_settings_are_refused_and_the_setting_is_named(tmp_path):
    noise = {"noise_multiplier": 0.2, "shares": 3}
    with Peer(small_model(0), **QUICK) as one:
        for options, says in (
            ({"group_size": 3}, "group_size is 3 here and 5 there"),
            ({"wire": "fixed"}, 'wire is "fixed" here and "fp32" there'),
            ({"masks": True}, 'wire is "masked" here and "fp32" there'),
            ({"exchange": "full"}, 'exchange is "full" here and "grid" there'),
            ({"privacy": noise, "state_dir": tmp_path}, 'privacy.mode is "sound" here and "off" there'),
        ):
            with (
                pytest.raises(InputError, match=f"run 'test': its peers have other settings: {says} .{one.id}.$"),
                Peer(small_model(0), join=one.addresses, **QUICK, **options),
            ):
                pass


def test_peers_over_other_frozen_weights_are_refused_and_the_first_layer_is_named():
    def model(base: int) -> nn.Module:
        made = small_model(0)
        made[0].requires_grad_(False)
        made[2].weight.requires_grad_(False)
        torch.manual_seed(base)
        nn.init.normal_(made[2].weight)
        return made

    with Peer(model(1), **QUICK) as one:
        says = rf"its peers have other frozen weights: 2.weight \(float32, \w+\) here, 2.weight .* there .{one.id}.$"
        with pytest.raises(InputError, match=says), Peer(model(2), join=one.addresses, **QUICK):
            pass
        everything = small_model(0)
        with pytest.raises(InputError, match=r"frozen weights: nothing here, 0\.weight"):
            Peer(everything, join=one.addresses, **QUICK).__enter__()
        with Peer(model(1), join=one.addresses, **QUICK) as two:
            assert two.hash == one.hash


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(InputError, match="nothing in it is trainable"):
        Peer(small_model(0).requires_grad_(False), **QUICK)


@pytest.mark.parametrize("stage", [(3, 2)], indirect=True)
def test_a_daemon_with_another_noise_is_told_so_and_if_it_goes_on_is_named_and_not_averaged_in(stage: Stage):
    sigma = ["--noise-multiplier", "0.2"]
    first = stage.start(0, *sigma)
    first.until("to join this run")
    join = ["--join", stage.read(0, "address").split()[0]]
    second = stage.start(1, *join, *sigma)
    other = ["--noise-multiplier", "0.00002"]
    refused = stage.start(2, *join, *other)
    line = refused.until("marfl: ")
    assert "its peers have other settings: privacy.noise_multiplier is 2e-05 here and 0.2 there" in line
    assert refused.popen.wait() == 2

    careless = stage.start(2, *join, *other, program=CARELESS)
    careless.until("peer 2 of 3 is")
    for process in (first, second):
        process.until("all 2 iterations are done")
    names = [stage.status(index)["peer"] for index in range(3)]
    for index in (0, 1):
        rows = stage.rows(index)
        assert [sorted(row["present"]) for row in rows] == [sorted(names[:2])] * 2
        assert rows[0]["missing"] == {names[2]: "has other settings: privacy.noise_multiplier is 2e-05, not 0.2"}
        account = json.loads(stage.read(index, "privacy.json"))
        ledger = PrivacyLedger().add(NoisePlan(0.2, 3).release(2), 2)
        assert PrivacyLedger.from_rows(account["releases"]).entries == ledger.entries, "two shares of noise, not three"
    assert sum(stage.status(index)["refused"].get("other settings", 0) for index in (0, 1)) > 0
