"""The learning side: tasks and their data, the local update and its shortcuts, distillation, and the agreed state.

    task, tasks/         what a user brings, and the built-in tasks
    sharded_test         every peer tested on its own shard of the test set, as the paper's code does
    data, partition      from data sets to a peer's mini-batches, and who holds which samples
    embeddings           texts to vectors by a frozen encoder, kept on the disk
    models               the paper's network, and dropout masks that every engine agrees on
    worker, update       one peer's steps on flat vectors
    many_peers           many peers' steps at once, the same up to rounding
    distillation         learning from the models of others (Moshpit-KD)
    local_work           all that a peer computes in an iteration
    agreement            the state that all peers share, and how a mean update moves it

It knows nothing of peers, plans or networks: of ours it imports `errors`, `rng` and `state` alone.
"""

from marfl.learn.agreement import Agreement
from marfl.learn.data import Loader, MiniBatch, minibatch_of_many
from marfl.learn.distillation import Distilled, distill, distill_in_groups
from marfl.learn.local_work import LocalWork
from marfl.learn.many_peers import (
    BatchedResult,
    PooledGradient,
    batched_update,
    batching_obstacle,
    pooled_gradient,
    pooled_update,
    pooling_obstacle,
)
from marfl.learn.models import SeededDropout, dropout_context
from marfl.learn.partition import label_table
from marfl.learn.sharded_test import ShardedTest
from marfl.learn.task import ClassificationTask, Metrics, Task, initial_model, load_task, shard_of
from marfl.learn.update import LocalResult, derive_momentum, local_update
from marfl.learn.worker import Worker, keep_freed_memory
from marfl.settings import Distill, Optimizer, Partition

__all__ = [
    "Agreement",
    "BatchedResult",
    "ClassificationTask",
    "Distill",
    "Distilled",
    "Loader",
    "LocalResult",
    "LocalWork",
    "Metrics",
    "MiniBatch",
    "Optimizer",
    "Partition",
    "PooledGradient",
    "SeededDropout",
    "ShardedTest",
    "Task",
    "Worker",
    "batched_update",
    "batching_obstacle",
    "derive_momentum",
    "distill",
    "distill_in_groups",
    "dropout_context",
    "initial_model",
    "keep_freed_memory",
    "label_table",
    "load_task",
    "local_update",
    "minibatch_of_many",
    "pooled_gradient",
    "pooled_update",
    "pooling_obstacle",
    "shard_of",
]
