"""The paper's semantics under the paper's differential privacy: Algorithm 4 of MAR-FL (arXiv 2512.05234) to the letter.

For comparison only: it gives no guarantee (see `marfl.dp.paper`). Every peer clips and noises its own way from the
model it last obtained; models, momenta, indicators and smoothed updates are averaged; then every peer moves its own
clipping bound by noise of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from marfl.config import Config
from marfl.dp.noise import derived_noise
from marfl.dp.paper import Obtained, next_bound, prepare
from marfl.dp.privacy_settings import noise_of, paper_rule
from marfl.rng import numpy_stream
from marfl.sim.executor import Setup
from marfl.sim.paper_world import PaperWorld
from marfl.sim.world import Step
from marfl.techniques import Technique


class PrivatePaperWorld(PaperWorld):
    """`PaperWorld` in which θ̂, m, b and Δ̄ travel."""

    def __init__(self, config: Config, setup: Setup, technique: Technique) -> None:
        super().__init__(config, setup, technique)
        self.rule = paper_rule(config)
        self.obtained = self.memory.theta.clone()  # θ̄_i, by peer
        self.smoothed = torch.zeros(config.peers, self.length + 1)  # Δ̄_i, and b_i as the last value
        self.aggregated = [False] * config.peers  # who has a Δ̄ to smooth with
        self.bounds = [config.privacy.clip] * config.peers  # C_i
        self.values = 3 * self.length + 1

    def _travelling(self) -> list[Tensor]:
        return [self.memory.theta, self.memory.momentum, self.smoothed]

    def _mix(self, iteration: int, members: list[int], step: Step) -> None:
        noise = noise_of(self.config, len(members))
        sources = {p: derived_noise(numpy_stream(self.config.seed, p, iteration, "privacy")) for p in members}
        theta, momentum = self.memory.theta, self.memory.momentum
        for peer in members:
            last = Obtained(self.obtained[peer], self.smoothed[peer, :-1] if self.aggregated[peer] else None)
            sent = prepare(theta[peer], momentum[peer], last, self.bounds[peer], noise, sources[peer], self.rule)
            theta[peer] = sent.theta
            self.smoothed[peer, :-1] = sent.smoothed
            self.smoothed[peer, -1] = sent.indicator
        super()._mix(iteration, members, step)
        for peer in members:
            self.obtained[peer] = theta[peer]
            self.aggregated[peer] = True
            mean_indicator = float(self.smoothed[peer, -1])
            self.bounds[peer] = next_bound(self.bounds[peer], mean_indicator, noise, sources[peer], self.rule)
        held = [self.bounds[peer] for peer in members]
        step.facts = {"clip_lowest": min(held), "clip_highest": max(held)}

    def clip(self) -> float | None:
        """The mean of the newest members' bounds: they drift apart."""
        return sum(self.bounds[peer] for peer in self.fresh) / len(self.fresh)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = super().save()
        tensors |= {"obtained": self.obtained, "smoothed": self.smoothed}
        return tensors, meta | {"bounds": self.bounds, "aggregated": self.aggregated}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        super().restore(tensors, meta)
        self.obtained.copy_(tensors["obtained"])
        self.smoothed.copy_(tensors["smoothed"])
        self.bounds, self.aggregated = list(meta["bounds"]), list(meta["aggregated"])
