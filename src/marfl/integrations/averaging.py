"""What every callback does: one peer for one model, an average every so many optimizer steps, and where the swarm is.

A step is one step of the optimizer, whatever gradients were accumulated for it. The swarm's iteration t is worth
t · `every` steps: who joins late, or was away, goes on from there, so that its schedule ends with everybody's.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from marfl.errors import InputError
from marfl.peer.api import Aggregated, Peer


class SwarmTraining:
    """One training's part in a swarm, from its first step to its last."""

    def __init__(self, *, every: int, weight: float = 1.0, reset_optimizer: bool = False, **options: Any) -> None:
        """`options` are those of `marfl.Peer`."""
        if every < 1:
            raise InputError(f"every = {every}: must be a whole number of steps, at least 1")
        self.every, self.weight, self._reset, self._options = every, weight, reset_optimizer, options
        self.peer: Peer | None = None
        self.last: Aggregated | None = None  # the newest outcome
        self._since = 0  # steps since the last average

    def begin(self, model: nn.Module, optimizer: Optimizer | None = None) -> int:
        """Join; the model then holds the swarm's state. How many steps the swarm has made."""
        reset = optimizer if self._reset else None
        self.peer = Peer(model, reset=reset, **self._options)
        self.peer.__enter__()
        atexit.register(self.end)  # an exception may end the training: others need not wait
        self._since = 0
        return self.steps

    @property
    def steps(self) -> int:
        """Steps that the swarm's state is worth."""
        return self.peer.iteration * self.every if self.peer else 0

    def step(self) -> Aggregated | None:
        """The optimizer has made a step; the outcome of an average, if one was due."""
        self._since += 1
        if self.peer is None or self._since < self.every:
            return None
        self._since = 0
        self.last = self.peer.aggregate(self.weight)
        return self.last

    def end(self) -> None:
        """Say goodbye; does nothing the second time."""
        peer, self.peer = self.peer, None
        if peer is not None:
            atexit.unregister(self.end)
            peer.__exit__(None, None, None)

    @property
    def numbers(self) -> dict[str, float]:
        """Of the newest outcome, for a log."""
        if self.last is None:
            return {}
        return {
            "swarm_iteration": self.last.iteration, "swarm_peers": len(self.last.present),
            "swarm_known": self.last.known, "swarm_bytes_sent": self.last.sent.total(),
            "swarm_seconds": self.last.seconds,
        }  # fmt: skip


class SwarmCallback:
    """What a trainer's callback is besides that trainer's hooks."""

    def __init__(self, *, every: int = 50, weight: float = 1.0, reset_optimizer: bool = False, **options: Any) -> None:
        """A callback for one training.

        Args:
            every: optimizer steps between two averages; the same for all peers
            weight: how much this peer's updates count
            reset_optimizer: clear the optimizer's state after every average
            options: those of `marfl.Peer`, such as run, join, listen and state_dir
        """
        self._averaging = SwarmTraining(every=every, weight=weight, reset_optimizer=reset_optimizer, **options)

    @property
    def peer(self) -> Peer | None:
        """The peer, while the training runs."""
        return self._averaging.peer

    @property
    def last(self) -> Aggregated | None:
        """What the newest average came to."""
        return self._averaging.last


def advance(schedulers: Iterable[Any], steps: int) -> None:
    """Bring schedules that count steps forward by so many: their warm-up and decay are the swarm's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch misses the optimizer's steps: the swarm made them
        for scheduler in schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                for _ in range(steps):
                    scheduler.step()
