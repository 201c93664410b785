"""Lightning's `Trainer` among peers: one callback, and nothing else in the script changes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from marfl.integrations.averaging import SwarmCallback, advance


class LightningCallback(SwarmCallback, pl.Callback):
    """Averages the module with the others every so many optimizer steps.

        lightning.Trainer(max_steps=1000, callbacks=[LightningCallback(run="demo", join=[…], every=50)])

    Who joins late, or comes back with `state_dir`, goes on at the swarm's step, schedules that count steps included.
    Whatever ends the training (an early stop, an exception) is a goodbye to the others.
    """

    _seen = 0  # optimizer steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Join the run; a checkpoint that Lightning resumes from is loaded by now."""
        self._averaging.begin(pl_module, trainer.optimizers[0] if trainer.optimizers else None)
        self._keep_up(trainer)
        self._seen = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average, if it is time to: a batch whose gradients are only accumulated is no step."""
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        outcome = self._averaging.step()
        if outcome is None:
            return
        self._keep_up(trainer)
        self._seen = trainer.global_step
        pl_module.log_dict(self._averaging.numbers)
        if outcome.spent:
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say goodbye."""
        self._averaging.end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The others need not wait."""
        self._averaging.end()

    def _keep_up(self, trainer: pl.Trainer) -> None:
        """Count the steps that the swarm has made without this peer."""
        ahead = self._averaging.steps - trainer.global_step
        if ahead > 0:
            loop = trainer.fit_loop.epoch_loop
            loop.automatic_optimization.optim_progress.optimizer.step.total.completed += ahead
            by_step = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
            advance(by_step, ahead)
