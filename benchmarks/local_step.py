"""What a peer's local step costs: our worker against plain PyTorch, on the paper's CNN and on the 20NG-sized head.

    python benchmarks/local_step.py [--return-memory] [--rates]

All on one thread, taking turns; on a busy machine the fastest turn tells more than the median. "plain" is the textbook
loop: `nn.Dropout`, gradients per parameter and an in-place momentum step per parameter. A ratio below 1 is faster than
the first line. `--return-memory` leaves malloc as it is; without it, all candidates profit from `keep_freed_memory`.
`--rates` prints instead what the CNN's convolutions reach, beside a large matrix product: how much a step could gain.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from marfl.learn import Loader, MiniBatch, Optimizer, Worker, batched_update, local_update, pooled_update
from marfl.learn.data import row_keys
from marfl.learn.models import Cnn
from marfl.learn.task import initial_model, shard_of
from marfl.learn.tasks.mnist import Mnist
from marfl.learn.tasks.synthetic import Synthetic
from marfl.learn.worker import keep_freed_memory

OPTIMIZER = Optimizer()


def textbook_cnn() -> nn.Module:
    """The paper's CNN as one would write it with torch alone."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


class PlainDropoutCnn(Cnn):
    """Our CNN with torch's dropout: what remains of the difference is the worker's and the update's."""

    def __init__(self) -> None:
        super().__init__(side=28, channels=(32, 64), hidden=128)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)  # type: ignore[assignment]


def plain_step(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """A damped momentum step with nothing of ours."""
    parameters = list(model.parameters())
    momenta = [torch.zeros_like(parameter) for parameter in parameters]

    def step(images: Tensor, labels: Tensor) -> None:
        for parameter in parameters:
            parameter.grad = None
        functional.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            for parameter, momentum in zip(parameters, momenta, strict=True):
                momentum.mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.add_(momentum, alpha=-0.1)

    return step


def measure(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every call, the candidates taking turns so that a busy machine hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats + 1):  # the first turn warms up
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: found[1:] for name, found in times.items()}


def report(title: str, times: dict[str, list[float]]) -> None:
    print(f"{title:58} median   ratio    fastest   ratio")
    base = next(iter(times.values()))
    for name, found in times.items():
        median, fastest = statistics.median(found), min(found)
        ratios = median / statistics.median(base), fastest / min(base)
        print(f"  {name:50} {median:9.2f} ms  {ratios[0]:6.3f}  {fastest:6.2f} ms  {ratios[1]:6.3f}")


def cnn(repeats: int) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
    worker = Worker(Mnist(), initial_model(Mnist(), 0))
    theta, momentum = worker.flat.clone(), torch.zeros_like(worker.flat)
    minibatch = MiniBatch((images, labels), row_keys(0, 0, 0, 0, 64))
    textbook, same = plain_step(textbook_cnn()), plain_step(PlainDropoutCnn())
    candidates: dict[str, Callable[[], object]] = {
        "plain PyTorch, textbook model": lambda: textbook(images, labels),
        "plain PyTorch, our model": lambda: same(images, labels),
        "local_update": lambda: local_update(worker, theta, momentum, [minibatch], OPTIMIZER),
    }
    report(f"the paper's CNN, batch 64, {len(theta):,} parameters", measure(candidates, repeats))


def head(repeats: int, peers: int) -> None:
    task = Synthetic(samples=peers * 20)
    worker = Worker(task, initial_model(task, 0))
    theta, momentum = worker.flat.clone(), torch.zeros_like(worker.flat)
    loaders = [Loader(shard_of(task, p, peers, 0), seed=0, peer=p, batch_size=16) for p in range(peers)]
    data = [loader.minibatch(0, 0) for loader in loaders]
    weights = [1.0] * peers
    plain = plain_step(task.model())
    candidates: dict[str, Callable[[], object]] = {
        "plain PyTorch, one by one": lambda: [plain(*minibatch.batch) for minibatch in data],
        "local_update, one by one": lambda: [
            local_update(worker, theta, momentum, [minibatch], OPTIMIZER).loss for minibatch in data
        ],
        "batched_update": lambda: batched_update(
            worker, theta.expand(peers, -1), momentum.expand(peers, -1), [data], OPTIMIZER
        ),
        "pooled_update": lambda: pooled_update(worker, theta, momentum, data, weights, OPTIMIZER),
        "loading one mini-batch for each peer": lambda: [loader.minibatch(0, 0) for loader in loaders],
    }
    report(f"20NG-sized head, batch 16, {peers} peers, {len(theta):,} parameters", measure(candidates, repeats))


def rates(repeats: int) -> None:
    """Billions of operations a second of each part of the CNN's two convolutions, of its fastest turn in CPU time."""
    torch.manual_seed(0)
    left, right = torch.randn(2048, 1024), torch.randn(1024, 1024)
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "matrix product, 2,048 × 1,024 × 1,024": (2.0 * left.numel() * right.shape[1], lambda: left @ right)
    }
    for name, channels, filters, side in (("convolution 1", 1, 32, 28), ("convolution 2", 32, 64, 26)):
        images = torch.randn(64, channels, side, side).to(memory_format=torch.channels_last)
        weight, bias = torch.randn(filters, channels, 3, 3), torch.randn(filters)
        passed = torch.randn(64, filters, side - 2, side - 2).to(memory_format=torch.channels_last)
        operations = 2.0 * passed.numel() * weight[0].numel()
        ways = {"input": [True, False, False], "weight": [False, True, True]}
        calls[f"{name}, forward"] = operations, partial(functional.conv2d, images, weight, bias)
        for way, wanted in ways.items():
            if channels > 1 or way == "weight":  # nobody asks for the gradient of the images
                place = [filters], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted
                backward = partial(torch.ops.aten.convolution_backward, passed, images, weight, *place)
                calls[f"{name}, gradient of its {way}"] = operations, backward
    for name, (operations, call) in calls.items():
        fastest = math.inf
        for _ in range(repeats + 1):
            start = time.thread_time()
            call()
            fastest = min(fastest, time.thread_time() - start)
        print(f"  {name:40} {1e3 * fastest:7.2f} ms   {operations / fastest / 1e9:6.1f} billion operations a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--peers", type=int, default=125)
    parser.add_argument("--return-memory", action="store_true")
    parser.add_argument("--rates", action="store_true")
    arguments = parser.parse_args()
    if not arguments.return_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    if arguments.rates:
        rates(arguments.repeats)
    else:
        cnn(arguments.repeats)
        head(arguments.repeats, arguments.peers)


if __name__ == "__main__":
    main()
