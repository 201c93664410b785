"""A task of your own: a model and data, by four methods. The simulator and real peers run it unchanged.

From this folder:
    marfl simulate --task my_task:Rings --peers 8 --iterations 30
    marfl peer --task my_task:Rings --index 0 --of 8 --iterations 30 --state-dir peer0
Or run this file: it simulates 8 peers and prints the accuracy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import marfl


class Rings(marfl.ClassificationTask):
    """Which of three rings around the origin a point lies in."""

    def __init__(self, samples: int = 3000) -> None:
        self.samples = samples

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))

    def train_set(self) -> TensorDataset:
        return TensorDataset(*_points(self.samples, seed=1))

    def test_set(self) -> TensorDataset:
        return TensorDataset(*_points(600, seed=2))


def _points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, 2, generator=generator)
    return points, torch.bucketize(points.norm(dim=1), torch.tensor([0.8, 1.5]))


if __name__ == "__main__":
    steps = marfl.Optimizer(learning_rate=0.5)
    summary = marfl.simulate(task="my_task:Rings", peers=8, iterations=150, optimizer=steps)
    print(f"accuracy {summary['final_accuracy']:.1%} after {summary['iterations']} iterations among 8 peers")
