"""Where noise comes from: a real peer has it from the OS, the simulator from a stream of its own for each peer.

A run's seed is known to every peer, so noise derived from it could be removed: real peers never do that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

from marfl.dp.discrete_gaussian import Words

NoiseSource: TypeAlias = Callable[[int], Tensor]  # count → so many independent draws from N(0, 1), as fp32

KEY_BYTES, BLOCK_BYTES = 32, 16


def system_words() -> Words:
    """Random words under a fresh key of 256 bits from the OS, expanded by AES in counter mode.

    That is how the OS makes its own, but ten times faster. A small seed, such as the 32 bits that torch's CPU generator
    keeps, could be tried out.
    """
    stream = Cipher(AES256(os.urandom(KEY_BYTES)), CTR(bytes(BLOCK_BYTES))).encryptor()
    return lambda count: np.frombuffer(stream.update(bytes(8 * count)), dtype=np.uint64)


def derived_words(generator: np.random.Generator) -> Words:
    """Words from a stream of (seed, peer, iteration, purpose): repeatable, so for simulations only."""

    def words(count: int) -> NDArray[np.uint64]:
        return generator.integers(0, 2**64 - 1, size=count, dtype=np.uint64, endpoint=True)

    return words


def derived_noise(generator: np.random.Generator) -> NoiseSource:
    """Noise in floating point, for the paper's mode alone: its low bits tell what it was added to."""
    return lambda count: torch.from_numpy(generator.standard_normal(count, dtype=np.float32))
