"""The agreed state of a private run, (t, θ, m, C), and how the mean of the noised vectors moves it.

What travels is one vector of integers: the fresh part of the update and, where the bound adapts, the clipping indicator
behind it, bounded and noised (see `mechanism`). The protocol adds them up as it adds up all integers, and takes their
unit for 2⁻³² (see `fixed_point`). Everything after the mean is
post-processing: Δ̄ = E + ΣF̃_i/n, m from Δ̄, and the clipping bound of the next iteration, which is part of the state,
so that late peers and resumed runs get it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from marfl.config import Config
from marfl.dp.discrete_gaussian import Words
from marfl.dp.lattice import Lattice, lattice_of
from marfl.dp.mechanism import blur, privatise, public_step, settle
from marfl.dp.privacy_settings import Sound, sampling_of, sound_of
from marfl.dp.record_level import MOST_STEPS_POWER, Sampling, add_records, check_record_bound
from marfl.learn.agreement import Agreement
from marfl.learn.data import Loader
from marfl.learn.local_work import LocalWork
from marfl.learn.record_gradients import RecordGradients
from marfl.state import Snapshot
from marfl.wire.packing import NoiseRoom

CLIP = "clip"  # the scalar of the agreed state that holds C
UNIT = 2.0**-32  # what the protocol takes an integer for
WIDEST = 64  # bits of the usual field of integers


class Secret(NamedTuple):
    """Where one peer's secrets of one iteration come from."""

    sample: Words  # which records are in the batch, and their masks of dropout
    noise: Words


@dataclass(frozen=True)
class PrivateAgreement(Agreement):
    """How peers of a private run agree. With momentum "local" nothing of Δ is public, and all of it is fresh."""

    sound: Sound = field(kw_only=True)
    trainable: int = field(kw_only=True)  # values before the buffers, which momentum does not move, nor a strategy

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

    @property
    def scale(self) -> float:
        """What becomes of a bounded vector in the update."""
        return 1.0

    def advance(self, state: Snapshot, mean: Tensor, contributions: int) -> Snapshot:
        momentum = state.vectors.get("momentum")
        nothing = torch.zeros_like(state.vectors["theta"])
        public = nothing if momentum is None else self._public(momentum, state.version + 1)
        integers, lattice = mean / UNIT, self.lattice(public.numel())  # exactly: a power of two
        settled = settle(integers, public, state.scalars[CLIP], lattice, self.sound.adaptation, self.scale)
        following = super().advance(state, settled.mean_delta, contributions)
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


@dataclass(frozen=True)
class RecordAgreement(PrivateAgreement):
    """How peers agree where single records are hidden: what travels is the sum of their clipped gradients.

    One step of the agreed optimizer follows from it, from public constants alone: −η(1−μ)·C/(L·batch) times the mean
    of the peers' sums, and the agreed momentum.
    """

    sampling: Sampling = field(kw_only=True)

    def lattice(self, length: int) -> Lattice:
        room = 4 * self.sampling.batch  # a batch varies
        return lattice_of(self.sound.noise, length, units=room, most_power=MOST_STEPS_POWER)

    @property
    def scale(self) -> float:
        optimizer = self.optimizer
        return -optimizer.learning_rate * (1 - optimizer.decay) / self.sampling.batch

    def of_records(
        self, gradients: RecordGradients, loader: Loader, theta: Tensor, bound: float, secret: Secret
    ) -> Tensor:
        """All that a peer sends in an iteration: the sum over a secret sample of its records, and its share of noise.

        Masks of dropout are secret, too, and of each record by itself: masks that follow from the place in the batch
        would be other ones for all records that come after one more. The bound comes with the agreed state, and one
        that is no number would make of every record a number that no noise hides.
        """
        check_record_bound(bound)
        gradients.worker.load(theta)
        lattice = self.lattice(theta.numel())
        total = torch.zeros(lattice.values, dtype=torch.int64)
        rows = self.sampling.draw(loader.samples, secret.sample)
        if len(rows):
            keys = torch.from_numpy(secret.sample(len(rows)).view(np.int64).copy())
            add_records(gradients.slices(loader.records(rows), keys), bound, lattice.steps, total)
        return blur(total, lattice, secret.noise)


class WireTerms(NamedTuple):
    """How values travel among the peers of a run, as the protocol calls it, and what a private sum has room for."""

    wire: str
    room: NoiseRoom | None = None


def wire_terms(wire: str, agreement: Agreement, length: int) -> WireTerms:
    """The wire of a model of so many values: private integers take a field as narrow as their sum allows."""
    if not isinstance(agreement, PrivateAgreement):
        return WireTerms(wire)
    lattice = agreement.lattice(length)
    return WireTerms(wire if lattice.width == WIDEST else f"{wire}{lattice.width}", lattice.room)


def lattice_in(config: Config, length: int) -> Lattice:
    """The integers that a private run of a model of so many values sends."""
    agreement = agreement_of(config, LocalWork(), length)
    assert isinstance(agreement, PrivateAgreement)  # the settings of a run without noise are refused before
    return agreement.lattice(length)


def agreement_of(config: Config, local_work: LocalWork, trainable: int) -> Agreement:
    """How peers of this run agree, privately or not; `trainable` counts the model's values before its buffers."""
    momentum = config.momentum or "derive"
    if config.privacy.mode != "sound":
        return Agreement(local_work, momentum, trainable=trainable, peers=config.peers)
    sound, sampling = sound_of(config), sampling_of(config)
    if sampling is None:
        return PrivateAgreement(local_work, momentum, sound=sound, trainable=trainable)
    return RecordAgreement(local_work, momentum, sound=sound, trainable=trainable, sampling=sampling)
