"""marfl's own network, forward and backward passes alone: what `bitwise` cannot be faster than.

    python passes.py cnn|small ITERATIONS

Processes of one thread share the peers evenly, as in plain.py. Nothing is copied, stepped, added up or hashed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.multiprocessing
from workload import Stopwatch, Workload, arguments

from marfl.learn import Loader, Worker, initial_model, load_task, shard_of
from marfl.learn.worker import keep_freed_memory


def serve(pipe: Any, workload: Workload, peers: range) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    options = {} if workload.name == "cnn" else {"samples": 20 * workload.peers}
    task = load_task("mnist" if workload.name == "cnn" else "synthetic", **options)
    worker = Worker(task, initial_model(task, 0))
    loaders = [Loader(shard_of(task, p, workload.peers, 0), seed=0, peer=p, batch_size=workload.batch) for p in peers]
    pipe.send(None)
    while (iteration := pipe.recv()) is not None:
        for loader in loaders:
            worker.differentiate(loader.minibatch(iteration, iteration, 0))
        pipe.send(None)


def main() -> None:
    workload, iterations = arguments()
    cores = os.cpu_count() or 1
    context = torch.multiprocessing.get_context("spawn")
    pipes = []
    for core in range(cores):
        here, there = context.Pipe()
        peers = range(core, workload.peers, cores)
        context.Process(target=serve, args=(there, workload, peers), daemon=True).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    watch = Stopwatch()
    for iteration in range(iterations):
        for pipe in pipes:
            pipe.send(iteration)
        for pipe in pipes:
            pipe.recv()
        watch.lap()
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
