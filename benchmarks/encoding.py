"""How fast texts become embeddings: 20 Newsgroups through a frozen encoder, against the ways not taken.

    python benchmarks/encoding.py [--encoder all-MiniLM-L6-v2-fp16] [--texts 256] [--turns 2] [--bf16]

All take turns on the same random posts. "before" is the way of the first release: batches of 64 texts, by characters,
on the threads inside of torch. "products" are the encoder's matrix products alone, on as many tokens as there are and
none of padding, on one core: what no order of the texts can save. The goal is the row "before, one core": three times
the clock of today's way on all cores. The encoder is loaded before the clock starts.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from marfl.learn import embeddings
from marfl.learn.embeddings import BATCH, Encoder, _embed, encode
from marfl.learn.tasks.news20 import load_posts
from marfl.system import cores

embeddings._load = loaded = lru_cache(embeddings._load)  # once in all: a sample is so short that it would count


def now(encoder: Encoder, texts: list[str], threads: int) -> Tensor:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return encode(encoder, texts, lambda done: None)


def before(encoder: Encoder, texts: list[str], threads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tokenizer, model = loaded(encoder)
    model = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found = torch.empty(len(texts), model.config.hidden_size)
    torch.set_num_threads(threads)
    with torch.inference_mode():
        for first in range(0, len(order), 64):
            rows = order[first : first + 64]
            chosen = [texts[row] for row in rows]
            batch = tokenizer(chosen, truncation=True, max_length=encoder.tokens, padding=True, return_tensors="pt")
            found[rows] = _embed(encoder, batch, model).float()
    return found


def products(encoder: Encoder, texts: list[str]) -> None:
    tokenizer, model = loaded(encoder)
    lengths = sorted(map(len, tokenizer(texts, truncation=True, max_length=encoder.tokens)["input_ids"]))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    torch.set_num_threads(1)
    with torch.inference_mode():
        for first in range(0, len(lengths), BATCH):
            tokens = sum(lengths[first : first + BATCH])
            inputs = {width: torch.ones(tokens, width) for width in {layer.in_features for layer in layers}}
            for layer in layers:
                layer(inputs[layer.in_features])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2-fp16")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="and in bf16, the way before")
    options = parser.parse_args()
    encoder, most = Encoder(options.encoder, "mean"), cores()
    texts = random.Random(0).sample(load_posts()["train"].texts, options.texts)
    now(encoder, texts[:16], 1)  # imports and weights
    ways: dict[str, Callable[[], Tensor | None]] = {
        f"now, {most} cores": lambda: now(encoder, texts, most),
        "now, one core": lambda: now(encoder, texts, 1),
        f"before, {most} cores": lambda: before(encoder, texts, most),
        "before, one core": lambda: before(encoder, texts, 1),
        "products, one core": lambda: products(encoder, texts),
    }
    if options.bf16:
        ways["before, bf16"] = lambda: before(encoder, texts, most, torch.bfloat16)
    clock, cpu = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    found = {}
    for _ in range(options.turns):
        for way, run in ways.items():
            started, used = time.monotonic(), time.process_time()
            found[way] = run()
            clock[way] += time.monotonic() - started
            cpu[way] += time.process_time() - used
    print(f"{options.encoder}, {options.texts} posts, {options.turns} turns, {most} cores")
    first = next(iter(ways))
    for way in ways:
        spent = 1000 * cpu[way] / options.texts / options.turns
        print(f"  {way:18} clock {clock[way] / clock[first]:5.2f} ×   CPU {cpu[way] / cpu[first]:5.2f} ×", end="   ")
        got, mine = found[way], found[first]
        away = f"; at most {(got - mine).abs().max():.0e} away" if got is not None and mine is not None else ""
        print(f"({spent:.0f} ms of CPU a post{away})")


if __name__ == "__main__":
    main()
