"""The library's `Peer` with integers of a few bits, over real sockets on loopback."""

from __future__ import annotations

import hashlib
import warnings
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marfl import Peer
from marfl.errors import InputError
from marfl.learn.feedback_files import save_feedback
from marfl.peer.state_dir import StateDir
from marfl.runs import checkpoint
from marfl.state import flatten, layout_of
from marfl.wire.error_feedback import CommittedSum, ErrorFeedback, OnItsWay, Residual
from marfl.wire.packing import SliceFormat
from stages.library import QUICK, small_model, together, train

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own, where this test is the first to need it
    import marfl.net.libp2p.transport  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")


def enter(stack: ExitStack, models: list[torch.nn.Module], places: list[Path], **options: Any) -> list[Peer]:
    found: list[Peer] = []
    for model, place in zip(models, places, strict=True):
        join = found[0].addresses if found else ()
        more = QUICK | options | {"state_dir": place}
        found.append(stack.enter_context(Peer(model, expected=len(models), join=join, **more)))
    return found


@pytest.mark.parametrize("masks", [False, True])
def test_peers_of_four_bits_end_on_one_model_and_keep_what_is_left(tmp_path: Path, masks: bool):
    models, places = [small_model(seed) for seed in range(3)], [tmp_path / str(place) for place in range(3)]
    learned, sizes = torch.zeros(flatten(models[0]).numel(), dtype=torch.float64), []
    with ExitStack() as stack:
        peers = enter(stack, models, places, wire="int4", masks=masks)
        start = flatten(models[0]).double()
        for _ in range(3):
            before = flatten(models[0])
            for seed, model in enumerate(models):
                train(model, seed)
            learned += sum((flatten(model) - before).double() for model in models) / 3
            outcomes = together(*(peer.aggregate for peer in peers))
            assert [outcome.status for outcome in outcomes] == ["committed"] * 3
            assert len({outcome.hash for outcome in outcomes}) == 1
            sizes.append(sum(outcome.sent.payload for outcome in outcomes))
        moved = flatten(models[0]).double() - start
    length = learned.numel()
    usual = 4 * SliceFormat(16).size(length) if masks else 2 * (length // 2) + 2 * (length // 2 + 1)
    assert sizes == [4 * 4 * length, usual, usual]
    left, owner = [], hashlib.sha256(f"test:{layout_of(models[0]).hash.hex()}".encode()).hexdigest()
    for place in places:
        store = StateDir(place, owner)
        memory = store.load_feedback()
        store.close()
        assert [each.iteration for each in memory.kept] == [3]
        assert (memory.on_its_way, memory.lost) == ([], 0)
        left.append(memory.kept[0].value)
    rounding = float(learned.abs().max()) / 4  # of the sum on its way back, in four bits
    assert float((learned - moved - sum(left) / 3).abs().max()) < rounding


def test_what_will_be_left_of_an_update_on_its_way_survives_a_kill(tmp_path: Path):
    store = StateDir(tmp_path, "test")
    assert store.load_feedback() == ErrorFeedback()
    values = [torch.tensor([0.25, -1.5]), torch.tensor([2.0**-38, 4096.0])]
    memory = ErrorFeedback([Residual(1, b"1", b"l", values[0]), Residual(2, b"2", b"l", values[0])], 1)
    memory.sent(b"roster", 3, values[1])
    store.save_feedback(memory)
    store.close()
    store = StateDir(tmp_path, "test")  # after a kill -9
    found = store.load_feedback()
    store.close()
    assert (found.lost, [each.iteration for each in found.kept]) == (1, [2])
    assert [each[:2] for each in found.on_its_way] == [OnItsWay(b"roster", 3, values[1])[:2]]
    found.decided(CommittedSum(3, b"roster", b"3", b"l"))
    np.testing.assert_array_equal(found.kept[-1].value, values[1])


def test_a_vector_of_what_is_left_is_written_once_and_goes_when_nobody_needs_it(tmp_path: Path):
    store, memory = StateDir(tmp_path, "test"), ErrorFeedback()
    written: list[dict[str, int]] = []
    for iteration in range(1, 6):
        memory.sent(b"%d" % iteration, iteration, torch.full((8,), float(iteration)))
        store.save_feedback(memory)
        written.append({path.name: path.stat().st_ino for path in tmp_path.glob("left.*.safetensors")})
        memory.decided(CommittedSum(iteration, b"%d" % iteration, b"record", b"l"))
        if iteration == 3:  # after a kill -9
            store.close()
            store = StateDir(tmp_path, "test")
            memory = store.load_feedback()
            memory.decided(CommittedSum(iteration, b"%d" % iteration, b"record", b"l"))
    store.close()
    assert [len(each) for each in written] == [1, 2, 2, 2, 2]
    for before, after in pairwise(written):
        assert len(before.items() & after.items()) == 1, "what was on its way stays where it is once it counts"
    assert float(memory.kept[-1].value[0]) == 5.0


def test_what_an_earlier_version_left_in_one_file_is_read_and_moves(tmp_path: Path):
    store, value = StateDir(tmp_path, "test"), torch.tensor([0.25, -1.5])
    tensors, rows = save_feedback([ErrorFeedback([Residual(2, b"2", b"l", value)], 1)])
    checkpoint.save(tmp_path / "left.safetensors", tensors, {"left": rows}, "test")
    for _ in range(2):  # as it was found, and as it is written now
        found = store.load_feedback()
        assert (found.lost, found.kept[-1].iteration) == (1, 2)
        np.testing.assert_array_equal(found.kept[-1].value, value)
        store.save_feedback(found)
        assert (tmp_path / "left.0.safetensors").exists()
    store.close()


def test_a_vector_of_what_is_left_that_is_gone_is_one_line(tmp_path: Path):
    store, memory = StateDir(tmp_path, "test"), ErrorFeedback()
    memory.sent(b"roster", 1, torch.zeros(3))
    store.save_feedback(memory)
    (tmp_path / "left.0.safetensors").unlink()
    with pytest.raises(InputError, match=r"left\.0\.safetensors: is gone; restore a copy, or remove left\.safetensors"):
        store.load_feedback()
    store.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wire": "int4", "audit": 0.5}, "audit = 0.5: rounded sums cannot be audited"),
        ({"wire": "int4", "wire_down": 5}, "wire_down = 5: must be 4, 8 or 16"),
        ({"wire_down": 8}, "is for wire = int8 or int4"),
        ({"wire": "int4", "privacy": {"noise_multiplier": 1.0, "shares": 20}, "state_dir": "here"}, "take fixed"),
    ],
)
def test_options_that_cannot_be_had_together_are_one_line(options, said):
    with pytest.raises(InputError, match=said):
        Peer(small_model(0), **options)
