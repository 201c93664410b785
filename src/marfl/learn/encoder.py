"""A frozen transformer encoder: found by folder or name, run once over texts, one embedding for each."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marfl.errors import InputError

POOLINGS = ("first", "mean")
BATCH = 64  # texts per forward pass
_FILES = ("*.json", "*.txt", "*.safetensors", "*.model")  # what decides an embedding: settings, vocabulary, weights


@dataclass(frozen=True)
class Encoder:
    """Which encoder, and how its token states become one vector; by default as in the paper."""

    name: str = "distilbert-base-uncased"  # a folder, a folder in $MARFL_DATA/encoder, or a name on the hub
    pooling: str = "first"
    tokens: int = 128

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise InputError(f"pooling = {self.pooling!r}: must be one of {', '.join(POOLINGS)}")
        if self.tokens < 1:
            raise InputError(f"tokens = {self.tokens}: must be at least 1")

    def folder(self) -> Path:
        """Where the encoder lies, downloading it if it must; an `InputError` that says how to get it otherwise."""
        data = os.environ.get("MARFL_DATA")
        for folder in (Path(self.name), *([Path(data) / "encoder" / self.name] if data else [])):
            if (folder / "config.json").is_file():
                return folder
        try:
            hub = importlib.import_module("huggingface_hub")
        except ModuleNotFoundError:
            raise self._missing("transformers is not installed: pip install 'marfl[text]'") from None
        try:
            return Path(hub.snapshot_download(self.name, allow_patterns=list(_FILES)))
        except (OSError, ValueError, hub.errors.HfHubHTTPError, hub.errors.HFValidationError) as error:
            raise self._missing(f"it cannot be downloaded ({type(error).__name__})") from error

    def fingerprint(self) -> str:
        """sha256 over the encoder's files, by name: another weight or vocabulary is another encoder."""
        folder = self.folder()
        digest = hashlib.sha256()
        for file in sorted({path for pattern in _FILES for path in folder.glob(pattern)}):
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()

    def _missing(self, problem: str) -> InputError:
        return InputError(
            f"encoder {self.name}: neither a folder with config.json nor in $MARFL_DATA/encoder, and {problem}; "
            "name a local folder with --encoder, or put the encoder's folder into $MARFL_DATA/encoder"
        )


def encode(encoder: Encoder, texts: Sequence[str], on_done: Callable[[int], None]) -> Tensor:
    """The embedding of every text, fp32 [texts, width]; `on_done` hears how many more are done.

    Texts of similar length share a batch, so little is padded. A text without any token gets zeros.
    """
    tokenizer, model = _load(encoder)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    embeddings = torch.empty(len(texts), model.config.hidden_size)
    with torch.inference_mode(), _threads():
        for first in range(0, len(order), BATCH):
            rows = order[first : first + BATCH]
            embeddings[rows] = _embed(encoder, tokenizer, model, [texts[row] for row in rows])
            on_done(len(rows))
    return embeddings


def _embed(encoder: Encoder, tokenizer: Any, model: Any, texts: list[str]) -> Tensor:
    batch = tokenizer(texts, truncation=True, max_length=encoder.tokens, padding=True, return_tensors="pt")
    if not batch["input_ids"].shape[1]:
        return torch.zeros(len(texts), model.config.hidden_size)
    states = model(**batch).last_hidden_state
    present = batch["attention_mask"].unsqueeze(2).to(states.dtype)
    if encoder.pooling == "mean":
        return (states * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)  # type: ignore[no-any-return]
    return states[:, 0] * (present.sum(dim=1) > 0)  # type: ignore[no-any-return]


def _load(encoder: Encoder) -> tuple[Any, Any]:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise InputError(f"encoder {encoder.name}: transformers is not installed; pip install 'marfl[text]'") from error
    transformers.utils.logging.disable_progress_bar()  # ours shows the texts, which take longer than the weights
    folder = str(encoder.folder())
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = transformers.MODEL_MAPPING[type(config)]
        # A pooling layer would be made up when the weights have none, and nobody would use it.
        pooler = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind).parameters else {}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, **pooler)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"encoder {encoder.name}: {folder} cannot be loaded ({reason})") from error
    return tokenizer, model.eval()


@contextmanager
def _threads() -> Iterator[None]:
    """As many threads as OMP_NUM_THREADS says, else all cores, and afterwards as before: encoding is nobody's step."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    try:
        yield
    finally:
        torch.set_num_threads(before)
