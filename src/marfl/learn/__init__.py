"""The learning side: tasks and their data, partitions, derived randomness, the local update and its shortcuts.

    task, registry, tasks/   what a user brings, and the built-in tasks
    partition, data, idx     who holds which samples, and where they come from
    randomness, loader       streams, batch orders and dropout keys from (seed, peer, iteration, purpose)
    dropout, models          masks that every engine agrees on
    worker, update           one peer's step on flat vectors
    distill, practice        learning from the models of others, and all that a peer computes in an iteration
    pooled, batched          many peers' steps at once, the same up to rounding
    memory                   freed memory kept for the next step

It knows nothing of peers, plans or networks: of ours it imports `errors`, `settings` and `state` alone.
"""

from marfl.learn.batched import BatchedResult, batched_update, batching_obstacle
from marfl.learn.distill import Lesson, distill
from marfl.learn.dropout import SeededDropout, dropout_context
from marfl.learn.loader import Loader, MiniBatch, minibatch_of_many
from marfl.learn.partition import label_table
from marfl.learn.pooled import PooledGradient, pooled_gradient, pooled_update, pooling_obstacle
from marfl.learn.practice import Practice
from marfl.learn.randomness import numpy_stream, stream
from marfl.learn.registry import load_task
from marfl.learn.task import ClassificationTask, Metrics, Task, initial_model, shard_of
from marfl.learn.update import LocalResult, derive_momentum, local_update
from marfl.learn.worker import Worker
from marfl.settings import Distill, Optimizer, Partition

__all__ = [
    "BatchedResult",
    "ClassificationTask",
    "Distill",
    "Lesson",
    "Loader",
    "LocalResult",
    "Metrics",
    "MiniBatch",
    "Optimizer",
    "Partition",
    "PooledGradient",
    "Practice",
    "SeededDropout",
    "Task",
    "Worker",
    "batched_update",
    "batching_obstacle",
    "derive_momentum",
    "distill",
    "dropout_context",
    "initial_model",
    "label_table",
    "load_task",
    "local_update",
    "minibatch_of_many",
    "numpy_stream",
    "pooled_gradient",
    "pooled_update",
    "pooling_obstacle",
    "shard_of",
    "stream",
]
