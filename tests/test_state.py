"""The flat state: what travels, exactly and in which order, and hashes that see every bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from marfl.errors import InputError
from marfl.state import Snapshot, all_finite, flatten, layout_of, unflatten, vector_hash

BIT_PATTERNS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8)  # every float there is, all NaNs included


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def test_a_flat_vector_survives_a_round_trip_through_another_model_bit_for_bit():
    source, target = small_model(), small_model()
    unflatten(flatten(source), target)
    assert torch.equal(flatten(source), flatten(target))
    assert torch.equal(source[3].weight, target[3].weight)


def test_parameters_come_first_and_running_statistics_after_them_but_no_counters():
    layout = layout_of(small_model())
    names = [slot.name for slot in layout.slots]
    assert names[-2:] == ["1.running_mean", "1.running_var"]
    assert "1.num_batches_tracked" not in names
    assert layout.length == (2 * 9 + 2) + (2 + 2) + (3 * 8 + 3) + (2 + 2)
    assert [slot.offset for slot in layout.slots] == [0, 18, 20, 22, 24, 48, 51, 53]


def test_counters_and_frozen_parameters_stay_as_they_are_when_a_vector_is_loaded():
    model = small_model()
    model[0].weight.requires_grad_(False)
    model[1].num_batches_tracked.fill_(7)
    frozen = model[0].weight.clone()
    unflatten(torch.full_like(flatten(model), 0.5), model)
    assert torch.equal(model[0].weight, frozen)
    assert model[1].num_batches_tracked.item() == 7
    assert model[1].running_mean.tolist() == [0.5, 0.5]


def test_buffers_that_a_checkpoint_leaves_out_do_not_travel():
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.tensor([float("-inf")]), persistent=False)
    assert [slot.name for slot in layout_of(model).slots] == ["weight", "bias"]


def test_tied_parameters_travel_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert layout_of(model).length == 9
    unflatten(torch.arange(9.0), model)
    assert model[1].weight[2].tolist() == [6.0, 7.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_survive_the_round_trip_exactly(dtype):
    every_value = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    model = nn.Module()
    model.values = nn.Parameter(every_value[every_value.isfinite()].clone())
    before = vector_hash(model.values)
    vector = flatten(model)
    assert vector.dtype == torch.float32
    with torch.no_grad():
        model.values.zero_()
    unflatten(vector, model)
    assert vector_hash(model.values) == before


def test_double_precision_parameters_are_rounded_to_single():
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(0.1)
    assert flatten(model).item() == torch.tensor(0.1, dtype=torch.float32).item()


def test_the_memory_format_of_a_layer_does_not_change_its_vector():
    model = nn.Conv2d(3, 4, 3)
    expected = flatten(model)
    assert torch.equal(flatten(model.to(memory_format=torch.channels_last)), expected)


def test_the_flat_vector_is_fresh_memory():
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    flatten(model).zero_()
    assert torch.equal(model.weight, before)


def test_a_model_without_anything_to_train_has_an_empty_vector():
    model = nn.ReLU()
    unflatten(flatten(model), model)
    assert layout_of(model).length == flatten(model).numel() == 0


@pytest.mark.parametrize("vector", [torch.zeros(5), torch.zeros(7), torch.zeros(2, 3), torch.zeros(6).double()])
def test_a_vector_that_does_not_fit_is_refused_and_changes_nothing(vector):
    model = nn.Linear(2, 2)
    before = flatten(model)
    with pytest.raises(InputError, match=r"needs torch.float32 of shape \[6\]"):
        unflatten(vector, model)
    assert torch.equal(flatten(model), before)


def test_layers_that_cannot_be_averaged_are_refused_by_name():
    complex_model, sparse_model = nn.Module(), nn.Module()
    complex_model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    sparse_model.table = nn.Parameter(torch.zeros(2, 2).to_sparse())
    for model, message in [
        (complex_model, "layer phase is torch.complex64"),
        (sparse_model, "layer table is torch.sparse_coo"),
        (nn.Sequential(nn.LazyLinear(3)), "layer 0.weight has no shape yet"),
    ]:
        with pytest.raises(InputError, match=message):
            layout_of(model)


def test_equal_architectures_have_equal_layouts_and_hashes():
    one, other = layout_of(small_model()), layout_of(small_model())
    assert one == other
    assert one.hash == other.hash
    assert len(one.hash) == 32
    assert one.difference(other) is None


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), "[1, 3] float32 here, 1.weight [2, 3] float32 there"),
        (nn.Sequential(nn.Linear(2, 3)), "1.weight [1, 3] float32 here, nothing there"),
        (nn.Sequential(nn.Linear(2, 3).half(), nn.Linear(3, 1)), "float32 here, 0.weight [3, 2] float16 there"),
    ],
)
def test_the_first_layer_that_differs_is_named_and_the_hash_differs(other, named):
    layout = layout_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    assert named in (layout.difference(layout_of(other)) or "")
    assert layout.hash != layout_of(other).hash


@given(BIT_PATTERNS, BIT_PATTERNS)
def test_two_vectors_have_one_hash_if_and_only_if_their_bits_are_equal(one, other):
    assert (vector_hash(floats(one)) == vector_hash(floats(other))) == (one == other)


def test_the_hash_tells_signed_zeros_types_lengths_and_boundaries_apart():
    zeros = torch.zeros(4)
    seen = [
        vector_hash(zeros),
        vector_hash(-zeros),
        vector_hash(zeros.half()),
        vector_hash(zeros.double()[:2]),
        vector_hash(zeros[:2], zeros[2:]),
        vector_hash(zeros[:3]),
        vector_hash(),
    ]
    assert len(set(seen)) == len(seen)


def test_the_hash_of_a_strided_view_is_that_of_its_values():
    table = torch.arange(12.0).view(3, 4)
    assert vector_hash(table[:, 1]) == vector_hash(torch.tensor([1.0, 5.0, 9.0]))


def snapshot(version: int = 3, theta: float = 1.0, clip: float = 0.1, name: str = "theta") -> Snapshot:
    vectors = {name: torch.tensor([theta, 2.0]), "momentum": torch.tensor([0.0, 0.0])}
    return Snapshot(version, vectors, {"clip": clip})


def test_a_snapshot_hash_covers_version_names_vectors_and_scalars():
    variants = [snapshot(), snapshot(version=4), snapshot(theta=-1.0), snapshot(clip=0.2), snapshot(name="phi")]
    assert len({variant.hash for variant in variants}) == len(variants)
    assert snapshot().hash == snapshot().hash
    assert len(snapshot().hash) == 32


def test_a_snapshot_hash_does_not_depend_on_the_order_of_names_but_on_which_is_which():
    a, b = torch.zeros(2), torch.ones(2)
    assert Snapshot(0, {"a": a, "b": b}, {}).hash == Snapshot(0, {"b": b, "a": a}, {}).hash
    assert Snapshot(0, {"a": a, "b": b}, {}).hash != Snapshot(0, {"a": b, "b": a}, {}).hash


@given(BIT_PATTERNS)
def test_the_quick_finite_check_agrees_with_the_elementwise_one(bits):
    vector = floats(bits)
    assert all_finite(vector) == bool(torch.isfinite(vector).all())


def test_opposite_infinities_do_not_cancel_and_an_overflowing_sum_is_not_mistaken_for_one():
    assert not all_finite(torch.tensor([float("inf"), float("-inf")]))
    assert all_finite(torch.tensor([3e38, 3e38]))
    assert all_finite(torch.empty(0))
