"""Where noise comes from: a real peer draws it from the OS, the simulator from a stream of its own per peer.

A run's seed is known to every peer, so noise derived from it could be removed: real peers never do that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

NoiseSource: TypeAlias = Callable[[int], Tensor]  # count → so many independent draws from N(0, 1), as fp32


def os_noise(count: int) -> Tensor:
    """Standard normal draws straight from the OS's entropy (Box and Muller 1958, in float64).

    No generator stands between: torch's CPU generator keeps 32 bits of a seed, which an observer could try out.
    """
    pairs = (count + 1) // 2
    words = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64).reshape(2, pairs) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((words[0] + np.uint64(1)) * 2.0**-53))  # (0, 1]: the logarithm stays finite
    angle = words[1] * (2.0**-53 * 2 * np.pi)
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(normal.astype(np.float32))


def derived_noise(generator: np.random.Generator) -> NoiseSource:
    """Draws from a stream of (seed, peer, iteration, purpose): repeatable, so for simulations only."""
    return lambda count: torch.from_numpy(generator.standard_normal(count, dtype=np.float32))
