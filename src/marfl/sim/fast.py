"""Local updates of many peers at once (`engine = fast`): the same as one by one, up to rounding."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marfl.config import Config
from marfl.dp.private_agreement import PrivateAgreement, RecordAgreement
from marfl.from_config import wire_of
from marfl.learn import (
    LocalResult,
    MiniBatch,
    batched_update,
    batching_obstacle,
    minibatch_of_many,
    pooled_update,
    pooling_obstacle,
)
from marfl.learn.agreement import Agreement
from marfl.learn.local_work import LocalWork
from marfl.learn.many_peers import MOST_ROWS, best_rows
from marfl.sim.executor import Done, InProcess, Job, Matrices, noise_for

BATCHED_PEERS = 32  # peers stepped at once by batched matmuls: more do not fit the cache
POOLED_PEERS = 32  # peers whose rows are gathered at once, at most


def fastest_way(config: Config, local_work: LocalWork, agreement: Agreement, local: InProcess) -> tuple[str, str]:
    """How local updates are computed: for `fast`, the fastest way that is the same up to rounding."""
    worker = local.worker
    if isinstance(agreement, RecordAgreement):
        return "", f"one peer at a time on one thread; {local.records.way}"
    if config.engine != "fast":
        return "", "one peer at a time on one thread: the bits of a real swarm"
    if local_work.distill is not None or config.churn.slow or local_work.strategy.is_local or config.local:
        why = "distillation (or the local steps that match it)" if local_work.distill else str(local_work.strategy)
        why = "what comes late" if config.churn.slow else "a model with personal layers" if config.local else why
        return "", f"one peer at a time: {why} has no cheaper way here"
    obstacle = pooling_obstacle(worker)
    if config.local_batches > 1 or config.overlap:
        obstacle = "overlap" if config.overlap else f"local_batches = {config.local_batches}"
    if wire_of(config) != "fp32":
        obstacle = f"wire = {wire_of(config)}"
    if agreement.momentum != "derive":
        obstacle = f"momentum = {agreement.momentum}"
    if isinstance(agreement, PrivateAgreement):
        obstacle = "privacy, which clips every peer's update by itself"
    if obstacle is None:
        return "pooled", "one pooled batch: a common start and one batch each make it the same up to rounding"
    stacking = batching_obstacle(worker)
    if stacking is None:
        return "batched", f"batched matmuls, not pooled because of {obstacle}"
    return "", f"one peer at a time: not pooled because of {obstacle}; not batched because {stacking}"


@dataclass(frozen=True)
class FastWays:
    """The two fast ways, which need peers that start from one model."""

    local: InProcess
    matrices: Matrices
    agreement: Agreement
    threads: int = 0  # for long passes; 0: as many as there are cores

    def pooled(self, jobs: Sequence[Job]) -> list[Done]:
        """All updates as one: the mean goes straight to `matrices.mean`; a peer with broken data is left out."""
        kept, broken = list(jobs), list[Job]()
        while kept:
            result = self._pool(kept)
            if result.finite:
                self.matrices.mean.copy_(result.delta)
                rest = [Done(j.peer, j.out, math.nan, 0, False) for j in broken]
                return [Done(j.peer, j.out, result.loss, 0, True) for j in kept] + rest
            bad = [job for job in kept if not self._is_finite(job)]
            broken += bad
            kept = [job for job in kept if job not in bad] if bad else []
        return [Done(j.peer, j.out, math.nan, 0, False) for j in jobs]

    def _pool(self, jobs: Sequence[Job]) -> LocalResult:
        """One gradient over everybody's batch. Passes that are long take all cores."""
        worker, rows = self.local.worker, best_rows(self.local.worker)
        peers = max(1, min(POOLED_PEERS, rows // self.local.setup.batches[0]))
        minibatches = (self._minibatch(jobs[i : i + peers]) for i in range(0, len(jobs), peers))
        start = self.matrices.theta[0], self.matrices.momentum[0]
        torch.set_num_threads(self.threads or (os.cpu_count() or 1) if rows < MOST_ROWS else 1)
        try:
            return pooled_update(worker, *start, minibatches, [1.0] * len(jobs), self.agreement.optimizer)
        finally:
            torch.set_num_threads(1)

    def _minibatch(self, jobs: Sequence[Job]) -> MiniBatch:
        return minibatch_of_many([(self.local.loader(job.peer), job.consumed) for job in jobs], jobs[0].iteration)

    def _is_finite(self, job: Job) -> bool:
        """Whether this peer's batch alone gives a finite update: only asked when the pooled one does not."""
        return self._pool([job]).finite

    def batched(self, jobs: Sequence[Job], local_batches: int) -> list[Done]:
        """A block of peers at a time, each from the same model."""
        done: list[Done] = []
        private = isinstance(self.agreement, PrivateAgreement)
        for first in range(0, len(jobs), BATCHED_PEERS):
            some = jobs[first : first + BATCHED_PEERS]
            steps = [
                [self.local.loader(j.peer).minibatch(j.consumed + b, j.iteration, b) for j in some]
                for b in range(local_batches)
            ]
            thetas = self.matrices.theta[[j.row for j in some]]
            momenta = self.matrices.momentum[[j.momentum_row for j in some]]
            result = batched_update(self.local.worker, thetas, momenta, steps, self.agreement.optimizer)
            for row, job in enumerate(some):
                self._write_update(job, result.deltas[row], self.matrices.momentum[job.momentum_row])
                if self.agreement.momentum == "send":
                    self.matrices.updates[job.out, -result.momenta.shape[1] :] = result.momenta[row]
                elif self.agreement.momentum == "local" and result.finite[row]:
                    self.matrices.momentum[job.momentum_row] = result.momenta[row]
                usable = private or bool(result.finite[row])
                done.append(Done(job.peer, job.out, float(result.losses[row]), 0, usable))
        return done

    def _write_update(self, job: Job, delta: Tensor, momentum: Tensor) -> None:
        """Put what a peer sends of its update into its row."""
        if not isinstance(self.agreement, PrivateAgreement):
            self.matrices.updates[job.out, : delta.numel()] = delta
        else:
            source = noise_for(self.local.setup, job)
            self.matrices.updates[job.out] = self.agreement.privatised(
                delta, momentum, job.iteration, job.bound, source
            )
