"""Seeded dropout: masks that are a function of (key, layer, unit) alone, and random enough."""

import numpy as np
import pytest
import torch
from torch import nn

from marfl.errors import InputError
from marfl.learn.data import row_keys
from marfl.learn.models import SeededDropout, dropout_context, keep_mask

KEYS = row_keys(seed=1, peer=2, iteration=3, step=0, rows=64)


def test_evaluation_and_probability_zero_change_nothing() -> None:
    inputs = torch.randn(4, 5)
    assert SeededDropout(0.5).eval()(inputs) is inputs
    assert SeededDropout(0.0)(inputs) is inputs


def test_training_outside_a_context_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(InputError, match="dropout_context"):
        SeededDropout(0.5)(torch.ones(2, 2))


def test_a_context_with_another_number_of_rows_is_an_error() -> None:
    with dropout_context(KEYS), pytest.raises(InputError, match="64 keys for 2 rows"):
        SeededDropout(0.5)(torch.ones(2, 2))


@pytest.mark.parametrize("probability", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_its_range_is_refused(probability: float) -> None:
    with pytest.raises(InputError, match="probability"):
        SeededDropout(probability)


def test_a_context_ends_with_its_block() -> None:
    with dropout_context(KEYS):
        SeededDropout(0.5)(torch.ones(64, 2))
    with pytest.raises(InputError):
        SeededDropout(0.5)(torch.ones(64, 2))


@pytest.mark.parametrize("shape", [(3,), (4,), (7, 5), (2, 3, 3)])
def test_a_row_gets_the_same_mask_whatever_the_other_rows(shape: tuple[int, ...]) -> None:
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for layer in (0, 1, 5):
        together = keep_mask(KEYS, layer, (64, *shape), 0.3)
        assert torch.equal(keep_mask(KEYS[shuffled], layer, (64, *shape), 0.3), together[shuffled])
        assert torch.equal(keep_mask(KEYS[7:8], layer, (1, *shape), 0.3), together[7:8])


def test_a_context_gives_the_same_masks_again_and_its_layers_different_ones() -> None:
    layers = nn.Sequential(SeededDropout(0.5), SeededDropout(0.5))
    ones = torch.ones(64, 100)
    with dropout_context(KEYS):
        first, second = layers[0](ones), layers[1](ones)
    with dropout_context(KEYS):
        assert torch.equal(layers(ones), first * second)
    assert not torch.equal(first, second)


def test_every_coordinate_of_the_key_changes_the_mask() -> None:
    coordinates = [(1, 2, 3, 0), (2, 2, 3, 0), (1, 3, 3, 0), (1, 2, 4, 0), (1, 2, 3, 1)]
    keys = torch.cat([row_keys(*name, rows=16) for name in coordinates])
    assert len(keys.unique()) == len(keys)


def test_the_first_rows_keep_their_keys_when_the_batch_grows() -> None:
    assert torch.equal(row_keys(1, 2, 3, 0, rows=10), KEYS[:10])


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_units_are_dropped_with_the_asked_probability_and_the_mean_is_kept(probability: float) -> None:
    mask = keep_mask(KEYS, 0, (64, 4096), probability)
    deviation = (probability * (1 - probability) / mask.numel()) ** 0.5
    assert abs((mask == 0).double().mean().item() - probability) < 4 * deviation
    assert mask.max().item() == pytest.approx(1 / (1 - probability), rel=1e-3)
    assert len(mask.unique()) == 2


def test_dropped_units_are_independent_of_their_neighbours_in_every_direction() -> None:
    first = (keep_mask(KEYS, 0, (64, 4096), 0.5) == 0).double() - 0.5
    second = (keep_mask(KEYS, 1, (64, 4096), 0.5) == 0).double() - 0.5
    other = (keep_mask(row_keys(1, 2, 4, 0, 64), 0, (64, 4096), 0.5) == 0).double() - 0.5
    pairs = {
        "layers": (first, second),
        "iterations": (first, other),
        "rows": (first[1:], first[:-1]),
        **{f"units {lag} apart": (first[:, lag:], first[:, :-lag]) for lag in (1, 2, 3, 4, 8)},
    }
    for name, (left, right) in pairs.items():
        correlation = 4 * (left * right).mean().item()
        assert abs(correlation) < 4.5 / left.numel() ** 0.5, name


def test_every_unit_and_every_row_is_dropped_equally_often() -> None:
    keys = torch.cat([row_keys(0, peer, 0, 0, 64) for peer in range(64)])
    dropped = (keep_mask(keys, 0, (4096, 256), 0.25) == 0).numpy()
    for axis in (0, 1):
        counts, trials = dropped.sum(axis=axis), dropped.shape[axis]
        chi_square = ((counts - trials / 4) ** 2 / (trials * 3 / 16)).sum()
        cells = len(counts)
        assert abs(chi_square - cells) < 5 * np.sqrt(2 * cells)


def test_the_gradient_passes_through_the_kept_units_only() -> None:
    inputs = torch.randn(64, 9, requires_grad=True)
    with dropout_context(KEYS):
        SeededDropout(0.5)(inputs).sum().backward()
    assert torch.equal(inputs.grad, keep_mask(KEYS, 0, (64, 9), 0.5))
