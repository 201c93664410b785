"""A training by another library, as users write it, that averages with others; its callback is the one added line.

    python trained_peer.py transformers|lightning '{"steps": 8, "every": 2, "gate": 4, "options": {"run": "test", …}}'

It says who it is in a line of JSON, waits at the gate (a step) for a line on stdin, and says what came out at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

warnings.simplefilter("ignore")
SAMPLES, LABELS = 24, 3


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def begun(peer: Any, step: int) -> None:
    say(id=peer.id, addresses=peer.addresses, step=step, iteration=peer.iteration)


def model_hash(model: nn.Module) -> str:
    from marfl.state import flatten, vector_hash

    return vector_hash(flatten(model)).hex()


class Story:
    """What happened, told at the end."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.outcomes, self.saved = told, [], ""

    def after_step(self, step: int, outcome: Any, model: nn.Module) -> None:
        """Every optimizer step: remember the averages, and wait at the gate."""
        if outcome is not None and (not self.outcomes or outcome.iteration != self.outcomes[-1][0]):
            self.outcomes.append((outcome.iteration, outcome.status, len(outcome.present)))
        if step == self.told.get("gate"):
            self.saved = model_hash(model)
            say(at=step)
            sys.stdin.readline()

    def end(self, **more: Any) -> None:
        say(outcomes=self.outcomes, saved=self.saved, **more)


def with_transformers(told: dict[str, Any], folder: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    from marfl.integrations import TransformersCallback

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=LABELS, **sizes))
    rows = [{"input_ids": [each % 20, 3, 4], "labels": each % LABELS} for each in range(SAMPLES)]
    story, swarm = Story(told), TransformersCallback(every=told["every"], **told["options"])

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            begun(swarm.peer, state.global_step)

        def on_step_end(self, args, state, control, **more):
            story.after_step(state.global_step, swarm.last, model)
            if state.global_step == told.get("stop"):
                control.should_training_stop = True
            story.rate = more["lr_scheduler"].get_last_lr()[0]

    arguments = TrainingArguments(
        folder, max_steps=told["steps"], per_device_train_batch_size=4, gradient_accumulation_steps=2,
        seed=told["seed"], save_steps=told.get("gate", 500), save_strategy="steps" if told.get("saves") else "no",
        logging_steps=1, disable_tqdm=True, report_to="none", learning_rate=1e-2, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[swarm, Watch()])
    trainer.train()
    logged = [row["swarm_peers"] for row in trainer.state.log_history if "swarm_peers" in row]
    kept = ""
    if told.get("saves"):
        checkpoint = Path(folder) / f"checkpoint-{told['gate']}"
        kept = model_hash(BertForSequenceClassification.from_pretrained(checkpoint))
    story.end(step=trainer.state.global_step, rate=story.rate, hash=model_hash(model), kept=kept, logged=logged)


def with_lightning(told: dict[str, Any], folder: str) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from marfl.integrations import LightningCallback

    pl.seed_everything(told["seed"], verbose=False)
    swarm, story = LightningCallback(every=told["every"], **told["options"]), Story(told)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, LABELS)

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, told["steps"])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Watch(pl.Callback):
        def on_train_start(self, trainer, module):
            begun(swarm.peer, trainer.global_step)
            self.seen = trainer.global_step

        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step != self.seen:
                self.seen = trainer.global_step
                story.after_step(trainer.global_step, swarm.last, module)
                trainer.should_stop = trainer.should_stop or trainer.global_step == told.get("stop")

    inputs = torch.randn(SAMPLES, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.argmax(1) % LABELS), batch_size=4)
    module = Module()
    trainer = pl.Trainer(
        max_steps=told["steps"], accumulate_grad_batches=2, accelerator="cpu", logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[swarm, Watch()],
    )  # fmt: skip
    trainer.fit(module, loader)
    rate = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]
    logged = [float(trainer.callback_metrics.get("swarm_peers", 0))]
    story.end(step=trainer.global_step, rate=rate, hash=model_hash(module), logged=logged)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        {"transformers": with_transformers, "lightning": with_lightning}[sys.argv[1]](json.loads(sys.argv[2]), place)
