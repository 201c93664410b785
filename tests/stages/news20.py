"""A stage for the text task: a tiny random encoder and a few made-up posts, on the disk as the real ones are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

WORDS = [f"w{label}x{number}" for label in range(20) for number in range(3)]  # three words of each group's own
ENCODER = "tiny"


def make_encoder(folder: Path, seed: int = 0) -> None:
    """A random BERT of one layer with a vocabulary of our words, as `save_pretrained` writes it."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizerFast(vocab={word: number for number, word in enumerate(vocabulary)}).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)


def make_posts(folder: Path, train: int = 240, test: int = 60) -> None:
    """Posts whose words tell their group; every fortieth is empty."""
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("test", test)):
        write_posts(folder / f"{part}.jsonl.gz", [{"text": post(each), "label": each % 20} for each in range(count)])


def post(index: int) -> str:
    return "" if index % 40 == 39 else " ".join(f"w{index % 20}x{(index // 20 + turn) % 3}" for turn in range(4))


def write_posts(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
