"""A member that keeps every rule but one: what it sends as its update is NaN. Arguments as those of `marfl`."""

from __future__ import annotations

import sys
import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # hivemind's own
    import marfl.peer.daemon  # noqa: F401 - while its warnings are ignored
from marfl.cli import main
from marfl.net.base import Buffer, Parcel
from marfl.protocol import attempt
from marfl.protocol.tensors import tensor_parcel


def spoilt(payload: Buffer, count: int, digest: bytes, layout: bytes) -> Parcel:
    return tensor_parcel(torch.full((count,), float("nan")), digest, layout)


if __name__ == "__main__":
    attempt.slice_parcel = spoilt
    sys.exit(main(sys.argv[1:]))
