"""Hugging Face's `Trainer` among peers: one callback, and nothing else in the script changes."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from marfl.integrations.averaging import SwarmCallback, advance


class TransformersCallback(SwarmCallback, TrainerCallback):
    """Averages the model with the others every so many optimizer steps.

        Trainer(model, args, train_dataset=…, callbacks=[TransformersCallback(run="demo", join=[…], every=50)])

    What is saved at a multiple of `every` is the average. Who joins late, or comes back with `state_dir`, goes on at
    the swarm's step, schedule included. Whatever ends the training (an early stop, too) is a goodbye to the others.
    """

    def on_train_begin(self, args: Args, state: State, control: Control, **more: Any) -> None:
        """Join the run."""
        self._averaging.begin(more["model"], more.get("optimizer"))
        self._keep_up(state, more)

    def on_step_end(self, args: Args, state: State, control: Control, **more: Any) -> None:
        """Average, if it is time to; not called for gradients that are still being accumulated."""
        outcome = self._averaging.step()
        if outcome is None:
            return
        self._keep_up(state, more)
        if outcome.spent or state.global_step >= state.max_steps:
            control.should_training_stop = True

    def on_log(self, args: Args, state: State, control: Control, **more: Any) -> None:
        """Numbers of the newest average stand beside the loss."""
        for row in (more.get("logs"), state.log_history[-1] if state.log_history else None):
            if row is not None:
                row.update(self._averaging.numbers)

    def on_train_end(self, args: Args, state: State, control: Control, **more: Any) -> None:
        """Say goodbye."""
        self._averaging.end()

    def close(self) -> None:
        """Say goodbye after a training that an exception ended; at the end of the program it is said by itself."""
        self._averaging.end()

    def _keep_up(self, state: State, more: dict[str, Any]) -> None:
        """Count the steps that the swarm has made without this peer."""
        ahead = self._averaging.steps - state.global_step
        if ahead > 0:
            state.global_step += ahead
            advance(filter(None, [more.get("lr_scheduler")]), ahead)
