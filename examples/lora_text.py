"""Fine-tune a small text encoder with LoRA (r = 8) among three peers, in Hugging Face's Trainer: one line is added.

    python examples/lora_text.py                     # the first peer; it prints an address
    python examples/lora_text.py ADDRESS --shard 1   # the second, and so on
    python examples/lora_text.py ADDRESS --shard 2

Only the adapters and the head travel; the encoder is frozen, and peers compare a hash of it when they join. With
--exact (on all peers) every A is frozen as well and only B is averaged: then the mean is that of what was learned.
--folder names an encoder of your own, as `save_pretrained` writes it; without it a tiny one is made from a fixed seed.
Needs the extras `trainer` and `peft`.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, BertConfig, Trainer, TrainerCallback, TrainingArguments

from marfl.integrations import TransformersCallback, exact_lora

VOCABULARY, LENGTH, PEERS = 500, 8, 3
SPORT = ("the striker scored", "our keeper saved", "the match ended", "the coach praised", "fans sang in")
SPACE = ("the probe entered", "a telescope found", "the rocket left", "the crew repaired", "dust covered")
ENDS = ("late in the evening", "after a long wait", "to great surprise", "for the second time", "without any trouble")


def samples(shard: int) -> list[dict[str, object]]:
    """One peer's sentences: a third of them all, with their topic as the label."""
    topics = enumerate((SPORT, SPACE))
    texts = [(f"{start} {end}", label) for label, starts in topics for start in starts for end in ENDS]
    return [{"input_ids": tokens(text), "labels": label} for text, label in texts[shard::PEERS]]


def tokens(text: str) -> list[int]:
    """Words by their hash: a tokenizer that needs no file."""
    ids = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in text.split()]
    return (ids + [0] * LENGTH)[:LENGTH]


def encoder(folder: str | None) -> torch.nn.Module:
    """The frozen base with adapters: the same base on all peers."""
    torch.manual_seed(0)
    if folder:
        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, local_files_only=True)
    else:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        base = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=VOCABULARY, num_labels=2, **sizes))
    wanted = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(base, wanted)


class Says(TrainerCallback):
    """Prints every average, and what it cost."""

    def __init__(self, swarm: TransformersCallback) -> None:
        self.swarm, self.said = swarm, 0

    def on_train_begin(self, args, state, control, **_):
        print("others join with:", *self.swarm.peer.addresses, sep="\n  ", flush=True)

    def on_step_end(self, args, state, control, **_):
        outcome = self.swarm.last
        if outcome is not None and outcome.iteration != self.said:
            self.said = outcome.iteration
            print(f"iteration {outcome.iteration}: {outcome.status}, {len(outcome.present)} of {outcome.known} known"
                  f" averaged, {outcome.sent.total():,} bytes sent{outcome.warning and '; ' + outcome.warning}",
                  flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("join", nargs="*", help="address of any peer of the run")
    parser.add_argument("--shard", type=int, default=0, help=f"which part of the text is mine, below {PEERS}")
    parser.add_argument("--expected", type=int, default=PEERS, help="peers to wait for at the start")
    parser.add_argument("--exact", action="store_true", help="freeze every A and average B alone")
    parser.add_argument("--folder", help="an encoder of your own")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    model = encoder(options.folder)
    if options.exact:
        exact_lora(model)
    travels = sum(each.numel() for each in model.parameters() if each.requires_grad)
    print(f"{4 * travels:,} bytes travel of {4 * sum(each.numel() for each in model.parameters()):,}", flush=True)
    swarm = TransformersCallback(run="lora-text", join=options.join, expected=options.expected, every=10)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=8, learning_rate=2e-2, save_strategy="no",
            disable_tqdm=True, report_to="none", use_cpu=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=samples(options.shard), callbacks=[swarm, Says(swarm)])
        trainer.train()
    model.eval()
    rows = [row for shard in range(PEERS) for row in samples(shard)]
    with torch.no_grad():
        said = model(input_ids=torch.tensor([row["input_ids"] for row in rows])).logits.argmax(1)
    right = sum(int(label) == row["labels"] for label, row in zip(said, rows, strict=True))
    print(f"accuracy {right / len(rows):.1%} on the text of all {PEERS} peers", flush=True)


if __name__ == "__main__":
    main()
