"""The agreed state of a private run, (t, θ, m, C), and how the mean of the noised vectors moves it.

What travels is one vector of integers: the fresh part of the update and, where the bound adapts, the clipping indicator
behind it, bounded and noised (see `mechanism`). The protocol adds them up as it adds up all integers, and takes their
unit for 2⁻³² (see `fixed_point`). Everything after the mean is
post-processing: Δ̄ = E + ΣF̃_i/n, m from Δ̄, and the clipping bound of the next iteration, which is part of the state,
so that late peers and resumed runs get it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from marfl.config import Config
from marfl.dp.discrete_gaussian import Words
from marfl.dp.lattice import Lattice, lattice_of
from marfl.dp.mechanism import privatise, public_step, settle
from marfl.dp.privacy_settings import Sound, sound_of
from marfl.learn.agreement import Agreement
from marfl.learn.local_work import LocalWork
from marfl.state import Snapshot

CLIP = "clip"  # the scalar of the agreed state that holds C
UNIT = 2.0**-32  # what the protocol takes an integer for


@dataclass(frozen=True)
class PrivateAgreement(Agreement):
    """How peers of a private run agree. With momentum "local" nothing of Δ is public, and all of it is fresh."""

    sound: Sound = field(kw_only=True)
    trainable: int = field(kw_only=True)  # values before the buffers, which momentum does not move

    def values(self, length: int) -> int:
        return self.lattice(length).values

    def lattice(self, length: int) -> Lattice:
        """The integers of a model of so many values."""
        return lattice_of(self.sound.noise, length)

    def start(self, theta: Tensor) -> Snapshot:
        begin = super().start(theta)
        return Snapshot(begin.version, begin.vectors, {CLIP: self.sound.bound})

    def privatised(self, delta: Tensor, momentum: Tensor, iteration: int, bound: float, words: Words) -> Tensor:
        """All that a peer sends of its local update, whatever came of it: a NaN is sent as zero and noise."""
        fresh = delta - self._public(momentum, iteration)
        return privatise(fresh, bound, self.lattice(fresh.numel()), words)

    def advance(self, state: Snapshot, mean: Tensor) -> Snapshot:
        momentum = state.vectors.get("momentum")
        nothing = torch.zeros_like(state.vectors["theta"])
        public = nothing if momentum is None else self._public(momentum, state.version + 1)
        integers, lattice = mean.to(torch.float64) / UNIT, self.lattice(public.numel())
        settled = settle(integers, public, state.scalars[CLIP], lattice, self.sound.adaptation)
        following = super().advance(state, settled.mean_delta)
        return Snapshot(following.version, following.vectors, {CLIP: settled.bound})

    def _public(self, momentum: Tensor, iteration: int) -> Tensor:
        """E, which everybody can compute."""
        if self.momentum == "local":
            return torch.zeros_like(momentum)
        return public_step(
            momentum,
            learning_rate=self.optimizer.learning_rate,
            decay=self.optimizer.decay,
            batches=self.local_work.steps(iteration),
            trainable=self.trainable,
        )


def agreement_of(config: Config, local_work: LocalWork, trainable: int) -> Agreement:
    """How peers of this run agree, privately or not; `trainable` counts the model's values before its buffers."""
    momentum = config.momentum or "derive"
    if config.privacy.mode != "sound":
        return Agreement(local_work, momentum)
    return PrivateAgreement(local_work, momentum, sound=sound_of(config), trainable=trainable)
