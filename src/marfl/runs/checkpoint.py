"""The newest state to resume from, as safetensors: whole and verified, or refused; never pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from marfl.errors import InputError
from marfl.runs.files import replacing

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # the tensors by name, and what else there is to know


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], owner: str) -> None:
    """Replace the checkpoint at `path`; the one before stays until this one is whole and on the disk.

    The header holds `meta` (what JSON can hold), `owner` (the hash of the run's config) and a sha256 over all of it.
    """
    held = _apart(tensors)
    text = json.dumps(meta, sort_keys=True)
    header = {"meta": text, "owner": owner, "sha256": _digest(held, text, owner)}
    with replacing(path) as fresh:
        try:
            save_file(held, fresh, metadata=header)
        except SafetensorError as error:
            raise OSError(str(error)) from error  # what the disk refused, in the library's words


def load(path: Path, *owners: str) -> Checkpoint | None:
    """The checkpoint at `path`, in memory of its own, or None when there is none; refused unless every bit is right.

    It may be of any of these owners: earlier versions named them otherwise.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a dict
        meta = json.loads(header["meta"])
        whole = header["sha256"] == _digest(tensors, header["meta"], header["owner"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _corrupt(path) from error
    if not whole:
        raise _corrupt(path)
    if header["owner"] not in owners:
        raise InputError(f"{path}: is of a run with other settings; choose another directory, or remove the file")
    return tensors, meta


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors wants them: on the CPU, dense, no two at the same address."""
    held: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        held[name] = dense.clone() if dense.data_ptr() in addresses else dense
        addresses.add(dense.data_ptr())
    return held


def _digest(tensors: Mapping[str, Tensor], meta: str, owner: str) -> str:
    digest = hashlib.sha256(json.dumps([meta, owner]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _corrupt(path: Path) -> InputError:
    return InputError(f"{path}: the checkpoint is damaged; restore a copy, or remove it to resume from the start")
