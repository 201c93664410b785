"""Fine-tune a Hugging Face encoder from a local folder among peers: only what is trainable travels.

    python examples/hugging_face.py FOLDER            # the first peer; it prints an address
    python examples/hugging_face.py FOLDER ADDRESS    # every other one

FOLDER holds a model and its tokenizer as `save_pretrained` writes them. The encoder is frozen (every peer loads the
same one, so it never travels); the head and, with --layers, the encoder's last layers are trained and averaged.
Needs the extra `text`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import marfl

TEXTS = [
    ("the match ended two to one after extra time", 0),
    ("the striker was sent off in the first half", 0),
    ("our goalkeeper saved the last penalty", 0),
    ("the probe entered orbit around the planet", 1),
    ("a telescope found water in its atmosphere", 1),
    ("the rocket's second stage was lost at sea", 1),
]


class Classifier(nn.Module):
    """A frozen encoder, mean pooling, and a head."""

    def __init__(self, folder: str, classes: int, layers: int) -> None:
        super().__init__()
        # In fp32, however it is kept: optimizers divide by what is 0 in fp16, and the update would be NaN.
        self.encoder = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False).float()
        self.encoder.requires_grad_(False)
        if layers:
            for layer in self.encoder.encoder.layer[-layers:]:
                layer.requires_grad_(True)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        hidden = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("join", nargs="*", help="address of any peer of the run")
    parser.add_argument("--layers", type=int, default=0, help="how many of the encoder's layers are trained, too")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--ready-timeout", type=float, default=10.0, help="seconds to wait for slower peers")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.folder, local_files_only=True)
    model = Classifier(options.folder, classes=2, layers=options.layers)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    tokens = dict(tokenizer([text for text, _ in TEXTS], padding=True, return_tensors="pt"))
    labels = torch.tensor([label for _, label in TEXTS])
    with marfl.Peer(model, run="hugging-face", join=options.join, ready_timeout=options.ready_timeout) as peer:
        print("others join with:", *peer.addresses, sep="\n  ", flush=True)
        for _ in range(options.iterations):
            loss = nn.functional.cross_entropy(model(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outcome = peer.aggregate()
            sent = outcome.sent.total()
            print(f"iteration {outcome.iteration}: {outcome.status}, {len(outcome.present)} averaged,"
                  f" loss {loss.item():.3f}, sent {sent} bytes"
                  + (f", discarded: {outcome.discarded}" if outcome.discarded else ""), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
