"""The paper's convolutional network in any size, and a dropout layer whose masks are the same in every engine.

The masks of `SeededDropout` derive from (seed, peer, iteration, local step, row). The engine that steps one peer at a
time, one pooled batch over many peers and a real peer therefore drop the same units. A plain `nn.Dropout` works too in
every engine that steps peers one by one (`learn/worker.py` seeds torch's generator from the same keys), but a pooled or
batched engine cannot reproduce its masks and refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from marfl.errors import InputError
from marfl.rng import counter_hash

_LEVELS = 1 << 16  # a mask bit is drawn from 16 random bits: four units share one 64-bit word


@dataclass
class _Masks:
    keys: NDArray[np.int64]  # one per row of the batch
    row: Tensor | None = None  # under vmap: which of the rows this is
    layer: int = 0  # how many dropout layers of this forward pass have drawn


_current: ContextVar[_Masks | None] = ContextVar("dropout masks", default=None)


@contextmanager
def dropout_context(keys: Tensor | NDArray[np.int64], row: Tensor | None = None) -> Iterator[None]:
    """Give every `SeededDropout` of ONE forward pass its masks: one key per row of the batch.

    Where vmap takes each record by itself, `row` says which of the batch it is; keys are then numpy's, because inside
    vmap no tensor can be read.
    """
    token = _current.set(_Masks(keys.numpy() if isinstance(keys, Tensor) else keys, row))
    try:
        yield
    finally:
        _current.reset(token)


def keep_mask(keys: Tensor | NDArray[np.int64], layer: int, shape: Sequence[int], probability: float) -> Tensor:
    """The mask of one dropout layer, already divided by the chance to be kept: fp32 of `shape`, rows first.

    The probability is rounded to 1/65,536 and the scale is that of the rounded one, so the mean is kept exactly.
    """
    width = math.prod(shape[1:])
    names = keys.numpy() if isinstance(keys, Tensor) else keys
    # Layers differ in where their row's stream starts.
    starts = counter_hash(names.view(np.uint64), layer + 1)[:, layer]
    words = counter_hash(starts, -(-width // 4)).view(np.uint16)[:, :width]
    dropped = min(round(probability * _LEVELS), _LEVELS - 1)
    mask = np.multiply(words >= dropped, np.float32(_LEVELS / (_LEVELS - dropped)), dtype=np.float32)
    return torch.from_numpy(mask).view(*shape)


class SeededDropout(nn.Module):
    """Inverted dropout (Srivastava et al. 2014) with the masks of the surrounding `dropout_context`.

    The first dimension of its input are the rows of the batch. Layers are told apart by the order of their calls.
    """

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise InputError(f"dropout probability {probability}: must be at least 0 and below 1")
        self.probability = probability

    @property
    def active(self) -> bool:
        return self.training and self.probability > 0

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.mask(inputs) if self.active else inputs

    def mask(self, inputs: Tensor) -> Tensor:
        """The mask for these rows; the next call in the same context is the next layer's."""
        masks = _current.get()
        if masks is None:
            raise InputError("SeededDropout in training mode: wrap the forward pass in `with dropout_context(keys)`")
        layer = masks.layer
        masks.layer += 1
        if masks.row is not None:
            all_rows = (len(masks.keys), *inputs.shape[1:])
            return keep_mask(masks.keys, layer, all_rows, self.probability).index_select(0, masks.row.reshape(1))
        if len(masks.keys) != len(inputs):
            raise InputError(f"SeededDropout: {len(masks.keys)} keys for {len(inputs)} rows: one key per row is needed")
        return keep_mask(masks.keys, layer, inputs.shape, self.probability).to(inputs)

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


class Cnn(nn.Module):
    """Two 3×3 convolutions, max-pool 2, dropout, a hidden layer, dropout and the ten logits.

    `Cnn(side=28, channels=(32, 64), hidden=128)` is the paper's network for MNIST, 1,199,882 parameters, which has no
    dropout in its code.
    """

    def __init__(
        self, side: int, channels: tuple[int, int], hidden: int, dropout: tuple[float, float] = (0.25, 0.5)
    ) -> None:
        super().__init__()
        first, second = channels
        pooled = (side - 4) // 2
        self.convolution1 = nn.Conv2d(1, first, 3)
        self.convolution2 = nn.Conv2d(first, second, 3)
        self.dropout1 = SeededDropout(dropout[0])
        self.linear1 = nn.Linear(second * pooled * pooled, hidden)
        self.dropout2 = SeededDropout(dropout[1])
        self.linear2 = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        masks = _current.get()
        if masks is None or masks.row is None:  # vmap knows no such order
            # Channels last takes a quarter off a training step on a CPU (benchmarks/local_step.py).
            images = images.to(memory_format=torch.channels_last)
        features = self.convolution2(functional.relu(self.convolution1(images)))
        # The maximum and ReLU commute, gradients too; in this order ReLU has a quarter of the work.
        features = functional.relu(functional.max_pool2d(features, 2))
        features = self.dropout1(features.flatten(1))
        logits: Tensor = self.linear2(self.dropout2(functional.relu(self.linear1(features))))
        return logits
