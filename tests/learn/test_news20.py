"""The task `20ng`: a frozen encoder that runs once, a cache that is right or not used, and a head that learns."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from marfl.config import load
from marfl.errors import InputError
from marfl.learn import embeddings, load_task
from marfl.learn.embeddings import Encoder, encode
from marfl.learn.tasks.news20 import News20
from marfl.sim.engine import simulate
from stages.news20 import ENCODER, make_encoder, make_posts, write_posts


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / ENCODER
    make_encoder(folder)
    return folder


@pytest.fixture
def stage(tmp_path: Path, encoder_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with 20news/ and encoder/tiny, and a cache of its own; returns the root of both."""
    make_posts(tmp_path / "data" / "20news")
    shutil.copytree(encoder_folder, tmp_path / "data" / "encoder" / ENCODER)
    monkeypatch.setenv("MARFL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MARFL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts were encoded, one entry for each part."""
    counts: list[int] = []

    def counting(encoder: Encoder, texts: Sequence[str], on_done: Any) -> torch.Tensor:
        counts.append(len(texts))
        return encode(encoder, texts, on_done)

    monkeypatch.setattr(embeddings, "encode", counting)
    return counts


def cached(stage: Path) -> list[Path]:
    return sorted((stage / "cache").glob("*.safetensors"))


def test_a_second_run_reads_the_cache_and_never_loads_the_encoder(stage: Path, encoded: list[int]) -> None:
    first = News20(encoder=ENCODER)
    second = News20(encoder=ENCODER)
    assert encoded == [240, 60]
    assert torch.equal(first.train_set()[:][0], second.train_set()[:][0])


@pytest.mark.parametrize("change", ["text", "weights", "pooling", "tokens"])
def test_another_text_encoder_or_setting_is_encoded_anew(stage: Path, encoded: list[int], change: str) -> None:
    News20(encoder=ENCODER)
    options: dict[str, Any] = {"pooling": {"pooling": "mean"}, "tokens": {"tokens": 3}}.get(change, {})
    if change == "text":
        write_posts(stage / "data/20news/test.jsonl.gz", [{"text": f"w{n}x0", "label": n} for n in range(20)])
    if change == "weights":
        (stage / "data/encoder" / ENCODER).rename(stage / "old")
        make_encoder(stage / "data/encoder" / ENCODER, seed=1)
    News20(encoder=ENCODER, **options)
    assert len(encoded) == 4
    assert len(cached(stage)) == 2


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty"])
def test_a_damaged_cache_is_not_used_and_that_is_said(
    stage: Path, encoded: list[int], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    right = News20(encoder=ENCODER).train_set()[:][0]
    content = bytearray(cached(stage)[0].read_bytes())
    content[-7] ^= 1
    damaged = {"torn": content[: len(content) // 2], "flipped": content, "empty": b""}[damage]
    cached(stage)[0].write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "marfl"):
        again = News20(encoder=ENCODER).train_set()[:][0]
    assert len(encoded) == 4
    assert "is damaged" in caplog.text
    assert torch.equal(again, right)


def test_an_encoding_that_was_cut_short_leaves_no_cache(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(embeddings, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        News20(encoder=ENCODER)
    assert cached(stage) == []


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_an_empty_text_has_an_embedding_of_its_own(stage: Path, pooling: str) -> None:
    found = encode(Encoder(ENCODER, pooling), ["w1x0 w1x1", "", "w2x0"], lambda done: None)
    assert torch.isfinite(found).all()
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_an_embedding_does_not_depend_on_its_neighbours_in_the_batch(stage: Path, pooling: str) -> None:
    encoder = Encoder(ENCODER, pooling)
    together = encode(encoder, ["w1x0", "w3x1 w3x2 w3x0 w4x1"], lambda done: None)
    alone = encode(encoder, ["w1x0"], lambda done: None)
    torch.testing.assert_close(together[:1], alone)


def test_the_number_of_threads_changes_no_bit(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(f"w{n % 20}x{word % 3}" for word in range(n % 7)) for n in range(100)]
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found.append(encode(Encoder(ENCODER, "mean"), texts, lambda done: None))
    assert torch.equal(*found)


def test_torch_keeps_its_threads(stage: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        encode(Encoder(ENCODER), ["w1x0"], lambda done: None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_progress_is_said_where_there_is_no_terminal(
    stage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embeddings, "LINES_EVERY", 0.0)
    News20(encoder=ENCODER)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "encoding with tiny: 300 texts, once; they are kept for later runs"
    assert lines[1].startswith("encoding with tiny: 16 of 300 texts, about ")
    assert lines[-1].startswith("encoding with tiny: 300 of 300 texts")
    News20(encoder=ENCODER)
    assert capsys.readouterr().err == ""


def test_words_after_the_last_token_do_not_count(stage: Path) -> None:
    encoder = Encoder(ENCODER, "mean", tokens=4)
    found = encode(encoder, ["w1x0 w1x1", "w1x0 w1x1 w5x0 w6x0"], lambda done: None)
    torch.testing.assert_close(found[0], found[1])


def test_the_head_learns_on_a_tiny_random_encoder_and_the_settings_name_it(stage: Path) -> None:
    settings = {"task": "20ng", "task_options": {"encoder": ENCODER, "pooling": "mean"}, "peers": 8, "group_size": 2}
    config = load(overrides={**settings, "engine": "fast", "iterations": 150, "batch": 16})
    summary = simulate(config)
    assert summary["final_accuracy"] > 0.5  # one of twenty by chance
    assert summary["task_options"] == {"encoder": ENCODER, "pooling": "mean"}


def test_the_default_encoder_is_named_in_the_settings_too() -> None:
    assert load(overrides={"task": "20ng"}).task_options["encoder"] == "distilbert-base-uncased"


def test_the_head_is_the_papers(stage: Path) -> None:
    shapes = [tuple(each.shape) for each in News20(encoder=ENCODER).model().parameters()]
    assert shapes == [(72, 32), (72,), (20, 72), (20,)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"encoder": "no/such\\name"}, "encoder no/such\\name: neither a folder with config.json nor"),
        ({"pooling": "max"}, "pooling = 'max': must be one of first, mean"),
        ({"tokens": 0}, "tokens = 0: must be at least 1"),
        ({"samples": 3}, "samples 3: must be at least 20"),
    ],
)
def test_wrong_options_are_refused_in_one_line(stage: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        load_task("20ng", **{"encoder": ENCODER, **options})
    assert says in str(error.value)


def test_missing_posts_are_an_error_that_says_both_ways(
    stage: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MARFL_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputError, match=r"set MARFL_DATA to the folder that holds 20news/.*pip install 'marfl\[data\]'"
    ):
        News20(encoder=ENCODER)


@pytest.mark.parametrize("content", [b"not gzip", json.dumps({"text": "no label"}).encode()])
def test_broken_posts_are_refused(stage: Path, content: bytes) -> None:
    (stage / "data/20news/train.jsonl.gz").write_bytes(content)
    with pytest.raises(InputError, match="is not gzipped lines of JSON"):
        News20(encoder=ENCODER)


def test_a_cache_that_cannot_be_written_is_one_line(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stage / "file").write_text("")
    monkeypatch.setenv("MARFL_CACHE", str(stage / "file"))
    with pytest.raises(InputError, match="set MARFL_CACHE to another folder"):
        News20(encoder=ENCODER)
