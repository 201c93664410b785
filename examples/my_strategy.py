"""A strategy of your own: what the mean of the updates does to the model. The simulator and real peers run it alike.

From this folder:
    marfl simulate --strategy my_strategy:SignOfTheMean --set strategy.step=0.003 --peers 8
    marfl peer --strategy my_strategy:SignOfTheMean --index 0 --of 8 --state-dir peer0
Or run this file: it simulates 8 peers and prints the accuracy. signSGD with a majority's sign: arXiv 1802.04434.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import marfl


@dataclass(frozen=True)
class SignOfTheMean(marfl.Strategy):
    """Every value takes a step of one size, in the direction of a running mean of Δ̄."""

    step: float = 0.005
    decay: float = 0.8

    def init(self, theta: Tensor) -> Mapping[str, Tensor]:
        return {"smoothed": torch.zeros_like(theta)}

    def apply(self, step: marfl.StrategyStep) -> tuple[Tensor, Mapping[str, Tensor]]:
        smoothed = self.decay * step.state["smoothed"] + (1 - self.decay) * step.delta
        return step.theta + self.step * smoothed.sign(), {"smoothed": smoothed}


if __name__ == "__main__":
    summary = marfl.simulate(strategy="my_strategy:SignOfTheMean", peers=8, iterations=40, batch=16)
    print(f"accuracy {summary['final_accuracy']:.1%} after {summary['iterations']} iterations among 8 peers")
