"""How fast texts become embeddings: 20 Newsgroups through a frozen encoder, against the ways not taken.

    python benchmarks/encoding.py [--encoder all-MiniLM-L6-v2-fp16] [--texts 256] [--turns 2]

All take turns on the same random posts. "before" is the way of the first release: batches of 64 texts, by characters,
on the threads inside of torch.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from marfl.learn.embeddings import Encoder, _embed, _load, encode
from marfl.learn.tasks.news20 import load_posts
from marfl.system import cores


def before(encoder: Encoder, texts: list[str], dtype: torch.dtype = torch.float32) -> Tensor:
    tokenizer, model = _load(encoder)
    model = model.to(dtype)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found = torch.empty(len(texts), model.config.hidden_size)
    torch.set_num_threads(cores())
    with torch.inference_mode():
        for first in range(0, len(order), 64):
            rows = order[first : first + 64]
            chosen = [texts[row] for row in rows]
            batch = tokenizer(chosen, truncation=True, max_length=encoder.tokens, padding=True, return_tensors="pt")
            found[rows] = _embed(encoder, batch, model).float()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="all-MiniLM-L6-v2-fp16")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    encoder = Encoder(options.encoder, "mean")
    texts = random.Random(0).sample(load_posts()["train"].texts, options.texts)
    encode(encoder, texts[:16], lambda done: None)  # imports
    ways: dict[str, Callable[[], Tensor]] = {
        "now": lambda: encode(encoder, texts, lambda done: None),
        "before": lambda: before(encoder, texts),
        "before, bf16": lambda: before(encoder, texts, torch.bfloat16),
    }
    clock, cpu = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    found = {}
    for _ in range(options.turns):
        for way, run in ways.items():
            started, used = time.monotonic(), time.process_time()
            found[way] = run()
            clock[way] += time.monotonic() - started
            cpu[way] += time.process_time() - used
    print(f"{options.encoder}, {options.texts} posts, {options.turns} turns, {cores()} cores")
    for way in ways:
        away = (found[way] - found["now"]).abs().max()
        spent = 1000 * cpu[way] / options.texts / options.turns
        print(f"  {way:14} clock {clock[way] / clock['now']:5.2f} ×   CPU {cpu[way] / cpu['now']:5.2f} ×", end="   ")
        print(f"({spent:.0f} ms of CPU a post; at most {away:.0e} away)")


if __name__ == "__main__":
    main()
