"""`20ng`: the paper's text task. Posts of 20 newsgroups (Lang 1995), a frozen encoder, and a small head that learns."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from marfl.errors import InputError
from marfl.learn.embeddings import Encoder, embedded
from marfl.learn.models import SeededDropout
from marfl.learn.task import ClassificationTask

CLASSES = 20
SOURCE = "SetFit/20_newsgroups"  # on the hub of Hugging Face
FILES = {"train": "train.jsonl.gz", "test": "test.jsonl.gz"}


@dataclass(frozen=True)
class Posts:
    """Texts and their groups."""

    texts: list[str]
    labels: Tensor  # int64, 0 … 19


class News20(ClassificationTask):
    """11,314 training and 7,532 test posts; Dropout → Linear(width, 72) → ReLU → Dropout → Linear(72, 20).

    The encoder runs once over all texts, when the task is first made on a machine; later the embeddings are read from
    the cache. With `samples`, only so many posts of each part are used.
    """

    def __init__(
        self,
        *,
        encoder: str = Encoder.name,
        pooling: str = Encoder.pooling,
        tokens: int = Encoder.tokens,
        samples: int | None = None,
    ) -> None:
        if samples is not None and samples < CLASSES:
            raise InputError(f"task 20ng: samples {samples}: must be at least {CLASSES}")
        chosen = Encoder(encoder, pooling, tokens)
        posts = {part: _first(loaded, samples) for part, loaded in load_posts().items()}
        # At once, not with the first batch: what is missing is said before anything starts.
        self._inputs = embedded("20ng", chosen, {part: each.texts for part, each in posts.items()})
        self._labels = {part: each.labels for part, each in posts.items()}

    def model(self) -> nn.Module:
        width = self._inputs["train"].shape[1]
        return nn.Sequential(
            SeededDropout(0.2), nn.Linear(width, 72), nn.ReLU(), SeededDropout(0.2), nn.Linear(72, CLASSES)
        )

    def train_set(self) -> Dataset[Any]:
        return TensorDataset(self._inputs["train"], self._labels["train"])

    def test_set(self) -> Dataset[Any]:
        return TensorDataset(self._inputs["test"], self._labels["test"])


def load_posts() -> dict[str, Posts]:
    """Both parts: from `$MARFL_DATA/20news`, else downloaded with the extra `data`, else an error that says both."""
    root = os.environ.get("MARFL_DATA")
    folder = Path(root or "DATA") / "20news"
    if root and all((folder / file).is_file() for file in FILES.values()):
        return {part: _read(folder / file) for part, file in FILES.items()}
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError:
        problem = f"{folder} lacks {' or '.join(FILES.values())}" if root else "MARFL_DATA is not set"
        raise InputError(
            f"task 20ng: {problem}; either set MARFL_DATA to the folder that holds 20news/, "
            f"or let it be downloaded ({SOURCE}) after: pip install 'marfl[data]'"
        ) from None
    try:
        found = datasets.load_dataset(SOURCE)
    except (OSError, ValueError) as error:
        raise InputError(
            f"task 20ng: {SOURCE} cannot be downloaded ({type(error).__name__}); "
            "or set MARFL_DATA to the folder that holds 20news/"
        ) from error
    return {part: Posts(list(found[part]["text"]), torch.tensor(found[part]["label"])) for part in FILES}


def _first(posts: Posts, samples: int | None) -> Posts:
    return Posts(posts.texts[:samples], posts.labels[:samples])


def _read(path: Path) -> Posts:
    """One part, from lines of JSON with `text` and `label`; a text may be empty."""
    try:
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        texts, labels = [str(row["text"]) for row in rows], [int(row["label"]) for row in rows]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is not gzipped lines of JSON with text and label ({error})") from error
    if not labels or not 0 <= min(labels) <= max(labels) < CLASSES:
        raise InputError(f"{path}: must hold posts with labels from 0 to {CLASSES - 1}")
    return Posts(texts, torch.tensor(labels))
