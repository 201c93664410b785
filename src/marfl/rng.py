"""The streams of random numbers: each derives from (seed, peer, iteration, purpose), whatever the scheduling.

Nothing here keeps state between calls: a stream is found again from its name alone, so a resumed run, an absent peer
and any number of processes see the same draws. Secrets never come from here: keys, masks and the noise of real private
peers come from the operating system.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import SupportsIndex, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

Purpose: TypeAlias = SupportsIndex | str  # one part of a stream's name: "dropout", a peer, an iteration, …

# The increment and the two multipliers of SplitMix64 (Steele, Lea and Flood 2014, figure 17).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _digest(seed: SupportsIndex, purpose: tuple[Purpose, ...], size: int) -> bytes:
    """A hash of the name; lengths are part of it, so that ("ab", "c") and ("a", "bc") differ."""
    name = "".join(f"s{len(p)}:{p}" if isinstance(p, str) else f"i{operator.index(p)};" for p in (seed, *purpose))
    return blake2b(name.encode(), digest_size=size).digest()


def key(seed: SupportsIndex, *purpose: Purpose) -> int:
    """The 64-bit name of one purpose."""
    return int.from_bytes(_digest(seed, purpose, 8), "little")


def numpy_stream(seed: SupportsIndex, *purpose: Purpose) -> np.random.Generator:
    """A numpy generator (Philox, all 128 bits of its key used) for one purpose.

    torch has no such function here: it seeds its CPU generator with 32 bits only, so that two of 65,000 streams may
    well coincide.
    """
    return _philox(_digest(seed, purpose, 16))


def byte_stream(seed: SupportsIndex, *purpose: Purpose) -> Callable[[int], bytes]:
    """Random bytes for one purpose, so many with each call: AES in counter mode, four times as fast as Philox."""
    stream = Cipher(AES128(_digest(seed, purpose, 16)), CTR(bytes(16))).encryptor()
    return lambda count: stream.update(bytes(count))


def churn_stream(seed: SupportsIndex, *purpose: Purpose) -> np.random.Generator:
    """A numpy generator for one purpose of churn or links, by a name with slashes: recorded runs depend on it."""
    name = "/".join(part if isinstance(part, str) else str(operator.index(part)) for part in (seed, *purpose))
    return _philox(blake2b(name.encode(), digest_size=16).digest())


def _philox(digest: bytes) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


@contextmanager
def seeded_torch(seed: SupportsIndex, *purpose: Purpose) -> Iterator[None]:
    """Seed torch's global generator inside the block (model initialisation, a plain `nn.Dropout`); restore it after.

    The global generator belongs to the process: two threads must not be inside at once.
    """
    import torch  # takes a second: only for those who train

    before = torch.get_rng_state()
    torch.default_generator.manual_seed(key(seed, *purpose))
    try:
        yield
    finally:
        torch.set_rng_state(before)


def counter_hash(keys: NDArray[np.uint64], width: int) -> NDArray[np.uint64]:
    """`width` random 64-bit words for every key: [rows] → [rows, width].

    Word j of a row is output j of a SplitMix64 generator started at the row's key: a function of (key, j) alone,
    whatever the other rows are.
    """
    words = keys[:, None] + np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
    words ^= words >> np.uint64(30)
    words *= _FIRST
    words ^= words >> np.uint64(27)
    words *= _SECOND
    words ^= words >> np.uint64(31)
    return words


def permutation(name: int, length: int) -> NDArray[np.int64]:
    """The permutation of 0 … length−1 named by a key: the order of its `counter_hash` words."""
    words = counter_hash(np.array([name], dtype=np.uint64), length)
    return np.argsort(words[0], kind="stable")
