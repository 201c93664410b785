"""Plain PyTorch: processes of one thread that share the peers evenly. The floor of the race.

    python plain.py cnn|small ITERATIONS
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.multiprocessing
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from workload import LEARNING_RATE, Stopwatch, Workload, arguments, loss_of


def serve(pipe: Any, workload: Workload, peers: range, theta: torch.Tensor, total: torch.Tensor) -> None:
    """Step these peers from θ whenever asked, and leave the sum of their models in `total`."""
    torch.set_num_threads(1)
    model, (inputs, labels) = workload.model(), workload.data()
    parameters = list(model.parameters())
    pipe.send(None)
    while (iteration := pipe.recv()) is not None:
        total.zero_()
        losses = 0.0
        for peer in peers:
            vector_to_parameters(theta, parameters)
            rows = workload.rows(peer, iteration, len(labels))
            loss = loss_of(model, torch.from_numpy(inputs[rows]), torch.from_numpy(labels[rows]))
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in parameters:
                    parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
                total += parameters_to_vector(parameters)
            losses += loss.item()
        pipe.send(losses)


def main() -> None:
    workload, iterations = arguments()
    cores = os.cpu_count() or 1
    theta = parameters_to_vector(workload.model().parameters()).detach().share_memory_()
    totals = torch.zeros(cores, len(theta)).share_memory_()
    context = torch.multiprocessing.get_context("spawn")
    pipes = []
    for core in range(cores):
        here, there = context.Pipe()
        peers = range(core, workload.peers, cores)
        context.Process(target=serve, args=(there, workload, peers, theta, totals[core]), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    watch = Stopwatch()
    for iteration in range(iterations):
        for pipe in pipes:
            pipe.send(iteration)
        loss = sum(pipe.recv() for pipe in pipes) / workload.peers
        theta.copy_(totals.sum(dim=0) / workload.peers)
        watch.lap(loss)
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
