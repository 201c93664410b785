"""Embeddings of texts, computed once and kept on the disk: whole and verified, or not used."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from marfl.errors import InputError
from marfl.learn.encoder import Encoder, encode

FORMAT = 1  # of the way texts become vectors: a change here makes every cache stale


def cache_folder() -> Path:
    """`$MARFL_CACHE`, else marfl/ in the user's cache."""
    if given := os.environ.get("MARFL_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marfl"


def embedded(name: str, encoder: Encoder, parts: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """The embeddings of each part's texts: from the cache, or computed now, with a bar, and kept there.

    The file's name holds a hash over encoder, texts and settings, so what changes any of them is another file.
    """
    key = _key(encoder, parts)
    path = cache_folder() / f"{name}-{key[:32]}.safetensors"
    with _alone(path):
        found = _read(path, key)
        if found is None:
            found = _compute(encoder, parts)
            _write(path, found, {"key": key, **{field: str(value) for field, value in asdict(encoder).items()}})
    return found


def _key(encoder: Encoder, parts: Mapping[str, Sequence[str]]) -> str:
    settings = {
        "format": FORMAT,
        "encoder": encoder.fingerprint(),
        "pooling": encoder.pooling,
        "tokens": encoder.tokens,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for part, texts in parts.items():
        digest.update(json.dumps([part, len(texts)]).encode())
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
    return digest.hexdigest()


def _compute(encoder: Encoder, parts: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"encoding with {encoder.name}", total=sum(map(len, parts.values())))
        return {part: encode(encoder, texts, lambda done: bar.advance(task, done)) for part, texts in parts.items()}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process encodes, the others wait and then read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _read(path: Path, key: str) -> dict[str, Tensor] | None:
    """What is kept at `path`, or None when nothing whole is."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError):
        header, tensors = {}, {}
    if header.get("key") == key and header.get("sha256") == _digest(tensors):
        return tensors
    logging.getLogger("marfl").warning("%s is damaged: its texts are encoded again", path)
    return None


def _write(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    fresh = path.with_suffix(".new")
    try:
        save_file(tensors, fresh, metadata={**header, "sha256": _digest(tensors)})
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except (SafetensorError, OSError) as error:
        raise _unwritable(path, error) from error
    finally:
        fresh.unlink(missing_ok=True)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _unwritable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path.parent}: embeddings cannot be kept there ({error}); set MARFL_CACHE to another folder")
