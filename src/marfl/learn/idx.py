"""A reader for IDX files, the format of MNIST (Yann LeCun): a header, then the values, all big-endian."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from marfl.errors import InputError

_UNSIGNED_BYTE = 8  # the type code of every MNIST file


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in a gzipped IDX file of unsigned bytes; an `InputError` of one line for anything else."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be unpacked ({error}); download it again") from error
    dimensions = content[3] if len(content) >= 4 else 0
    start = 4 + 4 * dimensions
    if len(content) < start or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise InputError(f"{path}: not an IDX file of unsigned bytes; download it again")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    if len(content) - start != math.prod(shape):
        raise InputError(f"{path}: holds {len(content) - start} values, its header says {shape}; download it again")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
