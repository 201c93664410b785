"""Keep freed memory in the process: a training step allocates and frees the same large tensors every time."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the names of the two settings in glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


def keep_freed_memory() -> bool:
    """Ask glibc not to return freed memory to the system; False where there is no glibc, and nothing was done.

    A page that was returned must be cleared by the kernel when it is used again, at more than a tenth of a step on
    the paper's CNN (benchmarks/local_step.py). The setting is for the whole process and costs its peak in memory, so
    the processes that do nothing but train call it, and a library user decides for himself.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
