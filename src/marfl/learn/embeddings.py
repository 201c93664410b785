"""Embeddings of texts by a frozen transformer encoder: computed once and kept on the disk, whole and verified.

An `Encoder` is found by folder or name. `embedded` gives one vector for each text, from the cache where there is one.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from marfl.errors import InputError
from marfl.system import cores, hold

FORMAT = 2  # of the way texts become vectors: a change here makes every cache stale
POOLINGS = ("first", "mean")
BATCH = 16  # texts per forward pass: what they need between two layers stays in a core's cache
LINES_EVERY = 15.0  # seconds, where there is no terminal
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

    Texts of like length share a batch, so little is padded. A batch is computed by one thread: which texts share one,
    and so the last bit of an embedding, does not depend on the number of cores. A text without any token gets zeros.
    """
    tokenizer, model = _load(encoder)
    tokenised = tokenizer(list(texts), truncation=True, max_length=encoder.tokens)
    order = sorted(range(len(texts)), key=lambda index: len(tokenised["input_ids"][index]), reverse=True)
    batches = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
    embeddings = torch.empty(len(texts), model.config.hidden_size)

    def work(rows: list[int]) -> int:
        chosen = {name: [values[row] for row in rows] for name, values in tokenised.items()}
        with torch.inference_mode():
            embeddings[rows] = _embed(encoder, tokenizer.pad(chosen, return_tensors="pt"), model)
        return len(rows)

    with _threads() as count, ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for done in pool.map(work, batches):
                on_done(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for the batches that are under way alone
            raise
    return embeddings


def _embed(encoder: Encoder, batch: Any, model: Any) -> Tensor:
    if not batch["input_ids"].shape[1]:
        return torch.zeros(len(batch["input_ids"]), model.config.hidden_size)
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
    tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True  # we pad what it has tokenised already
    return tokenizer, model.eval()


@contextmanager
def _threads() -> Iterator[int]:
    """How many threads encode: as many as OMP_NUM_THREADS says, else all cores; torch's own setting is left as it was.

    Each of them computes on one core. Threads inside of torch would wait for each other after every layer, which takes
    several times as long where other work runs on the cores (benchmarks/encoding.py).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield int(os.environ.get("OMP_NUM_THREADS") or cores())
    finally:
        torch.set_num_threads(before)


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
    with _progress(f"encoding with {encoder.name}", sum(map(len, parts.values()))) as on_done:
        return {part: encode(encoder, texts, on_done) for part, texts in parts.items()}


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere a line at the beginning and then now and then."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        count, started = 0, time.monotonic()
        said = started

        def on_done(more: int) -> None:
            nonlocal count, said
            count += more
            bar.advance(task, more)
            now = time.monotonic()
            if not console.is_terminal and now - said > LINES_EVERY:
                said = now
                left = (now - started) * (total - count) / count
                _say(f"{what}: {count:,} of {total:,} texts, about {left / 60:.0f} min left")

        if not console.is_terminal:
            _say(f"{what}: {total:,} texts, once; they are kept for later runs")
        yield on_done


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process encodes, the others wait and then read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        hold(lock, wait=True)
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
