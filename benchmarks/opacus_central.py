"""Opacus beside ours, in an interpreter of its own that needs nothing but opacus and torch.

    PYTHON benchmarks/opacus_central.py cost [TURNS]      a private step of the paper's networks, beside a plain one
    PYTHON benchmarks/opacus_central.py train FILE.pt     all data in one place; `record_accuracy.py` writes the file

Training takes Poisson samples at the very rate of the file, in parts of 64 records, and steps as our peers agree to:
m ← μ·m + (1 − μ)·g, θ ← θ − η·m. Both print one line of JSON last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

PART = 64  # records whose gradients are in memory at a time


def cnn() -> nn.Module:
    """The paper's network for MNIST; its parameters are in the order of ours."""
    features = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))


def head(width: int = 768, dropout: float = 0.0) -> nn.Module:
    """The paper's network for 20NG, over embeddings of this width."""
    layers = [nn.Linear(width, 72), nn.ReLU(), nn.Dropout(dropout), nn.Linear(72, 20)]
    return nn.Sequential(nn.Dropout(dropout), *layers)


def private_optimizer(
    module: nn.Module, *, learning_rate: float, decay: float, noise: float, clip: float, expected: int
) -> DPOptimizer:
    plain = torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=decay, dampening=decay)
    for parameter in module.parameters():  # else torch's first step has no dampening
        plain.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return DPOptimizer(plain, noise_multiplier=noise, max_grad_norm=clip, expected_batch_size=expected)


def step(module: nn.Module, optimizer: DPOptimizer, inputs: Tensor, labels: Tensor) -> None:
    """One step over all of these records, a part of them in memory at a time."""
    loss = nn.CrossEntropyLoss()
    for start in range(0, len(labels), PART):
        optimizer.signal_skip_step(do_skip=start + PART < len(labels))
        optimizer.zero_grad()
        loss(module(inputs[start : start + PART]), labels[start : start + PART]).backward()
        optimizer.step()
    optimizer.zero_grad()


def train(file: str) -> None:
    kept = torch.load(file)
    given, (inputs, labels), (test_inputs, test_labels) = kept["settings"], kept["train"], kept["test"]
    torch.manual_seed(given["seed"])
    network = cnn() if given["task"] == "mnist" else head(inputs.shape[1], dropout=0.2)
    torch.nn.utils.vector_to_parameters(kept["theta"], network.parameters())
    module = GradSampleModule(network)
    names = ("learning_rate", "decay", "noise", "clip", "expected")
    optimizer = private_optimizer(module, **{name: given[name] for name in names})
    module.train()
    for _ in range(given["iterations"]):
        rows = torch.nonzero(torch.rand(len(labels)) < given["rate"])[:, 0]
        step(module, optimizer, inputs[rows], labels[rows])
    module.eval()
    with torch.no_grad():
        found = torch.cat([network(some).argmax(dim=1) for some in test_inputs.split(500)])
    print(json.dumps({"accuracy": float((found == test_labels).float().mean())}))


def cost(turns: int) -> None:
    """Medians of CPU seconds, plain and private steps taking turns."""
    found: dict[str, Any] = {}
    for name, make, shape in (("CNN", cnn, (1, 28, 28)), ("head", head, (768,))):
        torch.manual_seed(0)
        inputs, labels = torch.randn(PART, *shape), torch.randint(0, 10, (PART,))
        network, loss, module = make(), nn.CrossEntropyLoss(), GradSampleModule(make())
        optimizer = private_optimizer(module, learning_rate=1.0, decay=0.9, noise=1.0, clip=1.0, expected=PART)

        def plain(network: nn.Module = network, given: Any = (inputs, labels, loss)) -> None:
            network.zero_grad()
            given[2](network(given[0]), given[1]).backward()

        def private(given: Any = (module, optimizer, inputs, labels)) -> None:
            step(*given)

        taken = [(seconds(plain), seconds(private)) for _ in range(turns + 1)][1:]  # the first warms up
        usual, hidden = (statistics.median(column) for column in zip(*taken, strict=True))
        found[name] = {"plain": usual, "private": hidden}
    print(json.dumps(found))


def seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        train(sys.argv[2])
    else:
        cost(int(sys.argv[2]) if len(sys.argv) > 2 else 5)
