"""The paper's semantics (MAR-FL, arXiv 2512.05234), without and with its differential privacy.

Whoever was not in A_{t−1} keeps its own stale (θ_i, m_i), trains from it, and counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marfl.config import Config
from marfl.dp.calibration import NoisePlan
from marfl.dp.noise import NoiseSource, derived_noise
from marfl.dp.paper import Obtained, next_bound, prepare
from marfl.dp.privacy_settings import first_bound, noise_of, paper_rule
from marfl.errors import InputError
from marfl.learn import Metrics, ShardedTest, batched_update, batching_obstacle
from marfl.plan.cost import Messages
from marfl.protocol.fixed_point import field_bits
from marfl.rng import numpy_stream
from marfl.sim.churn import Participation
from marfl.sim.executor import Done, InProcess, Job, Matrices, Setup, make_executor
from marfl.sim.fast import BATCHED_PEERS
from marfl.sim.iteration import ClipRange, IterationResult, distill_groups
from marfl.sim.links import links
from marfl.state import all_finite, vector_hash
from marfl.techniques.mar import Mar
from marfl.techniques.technique import MixContext, Mixed, Technique


class PaperWorld:
    """The paper's semantics: every peer has a model of its own. With `privacy`, what it sends is clipped and noised."""

    def __init__(self, config: Config, setup: Setup, technique: Technique) -> None:
        self.config, self.technique, self.local_work = config, technique, setup.local_work
        self.cost = lru_cache(maxsize=64)(technique.cost)  # the same for every iteration of so many members
        self.local = InProcess(setup, Matrices(*(torch.empty(0),) * 4))
        start = self.local.worker.flat.clone()
        self.length = start.numel()
        sends_momentum = config.momentum == "send" and (technique.exact or technique.name == "mar")
        self.values = self.length * (2 if sends_momentum else 1)
        peers = config.peers
        self.matrices = Matrices(
            start.expand(peers, -1).clone(),
            torch.zeros(peers, self.length),
            torch.empty(0, self.length),
            torch.empty(0),
        )
        self.local.matrices = self.matrices
        self.executor = make_executor(setup, self.matrices, config)
        self.consumed = dict.fromkeys(range(peers), 0)
        self.notes: dict[str, Any] = {}  # the technique's own state
        self.speed = links(config.links, peers, config.seed).speed if config.links else None
        self.fresh: tuple[int, ...] = tuple(range(peers))  # A_{t-1}: whose models are the newest
        self.sharded = ShardedTest(self.local.task, peers, config.seed) if config.test_on == "shards" else None
        self.slow: set[int] = set()  # who has passed optimizer.slow_above
        self.reason = "every peer from its own model, one at a time on one thread"
        self.wire = "fp32"
        self.stacked = False  # whether local updates of many peers are batched matmuls
        if config.engine == "fast":
            obstacle = batching_obstacle(self.local.worker)
            self.stacked = obstacle is None
            self.reason = "every peer from its own model, " + (
                "batched matmuls: the same up to rounding" if self.stacked else f"one at a time: {obstacle}"
            )
        self.privacy = PaperPrivacy(config, self.matrices) if config.privacy.mode == "paper" else None
        if self.privacy is not None:
            self.values = 3 * self.length + 1

    def step(self, iteration: int, who: Participation) -> IterationResult:
        step = IterationResult()
        begun = time.perf_counter()
        jobs = [
            Job(peer, iteration, self.consumed[peer], peer, peer, out, slow=peer in self.slow)
            for out, peer in enumerate(sorted(who.updaters))
        ]
        alike = not self.local_work.active(iteration) or self.local_work.in_groups(iteration)  # as many steps for all
        done = self._batched(jobs) if self.stacked and alike else self.executor.update(jobs, in_place=True)
        for peer in who.updaters:
            self.consumed[peer] += self.local_work.consumes(iteration)
        step.update_seconds = time.perf_counter() - begun
        broken = {item.peer for item in done if not item.finite}
        step.checks += [f"peer {peer}: its update is not finite, so it abstains" for peer in sorted(broken)]
        step.losses = [item.loss for item in done if item.finite]
        members = self._survivors(sorted(who.aggregators - broken), who, step)
        if not members:
            step.checks.append("nobody aggregates")
            return step
        begun = time.perf_counter()
        if self.local_work.in_groups(iteration):
            self._distill(iteration, members, who, step)
        self._average(iteration, members, step)
        step.aggregate_seconds = time.perf_counter() - begun
        step.members = self.fresh = tuple(members)
        step.bits = field_bits(self.wire, None, len(members))
        return step

    def _batched(self, jobs: Sequence[Job]) -> list[Done]:
        """Local updates of many peers at once, those with smaller steps apart."""
        done: list[Done] = []
        for slow in (False, True):
            alike = [job for job in jobs if job.slow == slow]
            for first in range(0, len(alike), BATCHED_PEERS):
                done += self._stack(alike[first : first + BATCHED_PEERS], slow)
        return sorted(done, key=lambda item: item.out)

    def _stack(self, jobs: Sequence[Job], slow: bool) -> list[Done]:
        rows, matrices, work = [job.row for job in jobs], self.matrices, self.local_work
        steps = [
            [self.local.loader(job.peer).minibatch(job.consumed + b, job.iteration, b) for job in jobs]
            for b in range(work.batches)
        ]
        optimizer = work.optimizer.slowed if slow else work.optimizer
        found = batched_update(self.local.worker, matrices.theta[rows], matrices.momentum[rows], steps, optimizer)
        fine = [place for place, finite in enumerate(found.finite.tolist()) if finite]
        kept = [rows[place] for place in fine]
        matrices.theta[kept] += found.deltas[fine]
        matrices.momentum[kept] = found.momenta[fine]
        return [
            Done(job.peer, job.out, float(loss), 0, bool(finite))
            for job, loss, finite in zip(jobs, found.losses, found.finite, strict=True)
        ]

    def _survivors(self, members: list[int], who: Participation, step: IterationResult) -> list[int]:
        if not members or not who.dies:
            return members
        rounds = self.cost(len(members), self.length).phases
        deaths = {peer: when for peer, when in who.deaths(rounds).items() if peer in members}
        if deaths:
            loss = self.technique.lost(len(members), 2 * self.length, min(deaths.values()), len(deaths))
            step.bytes.repair += loss.wasted_bytes
            step.checks.append(f"{len(deaths)} died during the exchange ({loss.outcome})")
        return [peer for peer in members if peer not in deaths]

    def _distill(self, iteration: int, members: list[int], who: Participation, step: IterationResult) -> None:
        """Moshpit-KD in the groups of the averaging, of all who aggregate (Algorithm 1), updated or not."""
        assert isinstance(self.technique, Mar)
        used = {peer: self.local_work.consumes(iteration) if peer in who.updaters else 0 for peer in members}
        jobs = {
            rank: Job(peer, iteration, self.consumed[peer] - used[peer], peer, peer, rank, slow=peer in self.slow)
            for rank, peer in enumerate(members)
        }
        layout = self.technique.groups(len(members), self.config.seed, iteration)
        step.note_distillation(distill_groups(self.executor, layout, jobs, self.length, in_place=True), self.length)

    def _average(self, iteration: int, members: list[int], step: IterationResult) -> None:
        if self.privacy is None:
            self._mix(iteration, members, step)
            return
        noise = self.privacy.prepare(iteration, members)
        self._mix(iteration, members, step)
        step.clips = self.privacy.settle(members, noise)

    def _travelling(self) -> list[Tensor]:
        """What the members average: matrices with a row for each peer."""
        if self.values == self.length:
            return [self.matrices.theta]
        blurred = [self.privacy.smoothed] if self.privacy else []
        return [self.matrices.theta, self.matrices.momentum, *blurred]

    def _mix(self, iteration: int, members: list[int], step: IterationResult) -> None:
        context = MixContext(
            tuple(members), iteration, self.config.seed, self.notes,
            samples=lambda position: self.local.loader(members[position]).samples, speed=self.speed,
        )  # fmt: skip
        phases: list[list[Messages]] = []
        for matrix in self._travelling():
            mixed = checked(self.technique.mix([matrix[peer] for peer in members], context), self.technique, matrix)
            for peer, value in zip(members, mixed.values, strict=True):
                matrix[peer] = value
            if mixed.phases is not None:
                phases.append(mixed.phases)
        self.notes = dict(mixed.memory)
        if not phases:  # one average over everybody, by the technique's usual messages
            cost = self.cost(len(members), self.values)
            step.bytes.payload, step.bytes.messages = cost.bytes_total, cost.messages
            return
        step.bytes.payload = 4 * sum(phase.total for each in phases for phase in each)
        step.bytes.messages = sum(len(phase.source) for each in phases for phase in each)
        step.phases = [_joined(together) for together in zip(*phases, strict=True)]
        step.disagreement = _disagreement([self.matrices.theta[peer] for peer in members])

    def evaluate(self) -> Metrics:
        """The mean over up to five of the newest models; one is enough where they are all the same."""
        if self.sharded is not None:
            return self._evaluate_shards(self.sharded)
        rows = self.matrices.theta[list(self.fresh[:: max(1, len(self.fresh) // 5)][:5])]
        if all(torch.equal(rows[0], row) for row in rows[1:]):
            rows = rows[:1]
        found = []
        for row in rows:
            self.local.worker.load(row)
            found.append(self.local.task.evaluate(self.local.worker.module))
        count = len(found)
        return Metrics(sum(m.loss for m in found) / count, sum(m.accuracy for m in found) / count, found[0].count)

    def _evaluate_shards(self, sharded: ShardedTest) -> Metrics:
        """The mean over those who aggregated last, each with its own model on its own shard, as the paper's code does.

        Whoever is good enough goes on in smaller steps, where the settings say so.
        """
        worker, above, found = self.local.worker, self.config.optimizer.slow_above, list[Metrics]()
        for peer in self.fresh:
            worker.load(self.matrices.theta[peer])
            found.append(sharded.of_peer(worker.module, peer))
            if above is not None and found[-1].accuracy > above:
                self.slow.add(peer)
        loss, accuracy = (sum(each) / len(found) for each in zip(*((m.loss, m.accuracy) for m in found), strict=True))
        return Metrics(loss, accuracy, sum(each.count for each in found))

    def model_hash(self) -> bytes:
        first = self.matrices.theta[self.fresh[0]]
        if all(torch.equal(first, self.matrices.theta[peer]) for peer in self.fresh[1:]):
            return vector_hash(first, self.matrices.momentum[self.fresh[0]])
        return vector_hash(*(self.matrices.theta[peer] for peer in self.fresh))

    def clip(self) -> float | None:
        return self.privacy.mean_bound(self.fresh) if self.privacy else None

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {"theta": self.matrices.theta, "momentum": self.matrices.momentum}
        meta: dict[str, Any] = {"consumed": list(self.consumed.values()), "notes": self.notes}
        meta |= {"fresh": list(self.fresh), "slow": sorted(self.slow)}
        if self.privacy is not None:
            tensors |= {"obtained": self.privacy.obtained, "smoothed": self.privacy.smoothed}
            meta |= {"bounds": self.privacy.bounds, "aggregated": self.privacy.aggregated}
        return tensors, meta

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        self.matrices.theta.copy_(tensors["theta"])
        self.matrices.momentum.copy_(tensors["momentum"])
        self.consumed, self.notes = dict(enumerate(meta["consumed"])), meta["notes"]
        self.fresh, self.slow = tuple(meta["fresh"]), set(meta.get("slow", ()))
        if self.privacy is not None:
            self.privacy.obtained.copy_(tensors["obtained"])
            self.privacy.smoothed.copy_(tensors["smoothed"])
            self.privacy.bounds, self.privacy.aggregated = list(meta["bounds"]), list(meta["aggregated"])

    def close(self) -> None:
        self.executor.close()


class NoiseOfIteration(NamedTuple):
    """What an iteration's noise is drawn from, before and after the averaging."""

    plan: NoisePlan
    sources: dict[int, NoiseSource]  # by peer


class PaperPrivacy:
    """The paper's differential privacy: Algorithm 4 of MAR-FL to the letter, over the rows of all peers.

    For comparison only: it gives no guarantee (see `marfl.dp.paper`). Every peer clips and noises its own way from
    the model it last obtained; models θ̂, momenta m, indicators b and smoothed updates Δ̄ are averaged; then every peer
    moves its own clipping bound by noise of its own.
    """

    def __init__(self, config: Config, matrices: Matrices) -> None:
        peers, length = matrices.theta.shape
        self.config, self.matrices, self.rule = config, matrices, paper_rule(config)
        self.obtained = matrices.theta.clone()  # θ̄_i, by peer
        self.smoothed = torch.zeros(peers, length + 1)  # Δ̄_i, and b_i as the last value
        self.aggregated = [False] * peers  # who has a Δ̄ to smooth with
        self.bounds = [first_bound(config)] * peers  # C_i

    def prepare(self, iteration: int, members: list[int]) -> NoiseOfIteration:
        """Clip and noise what the members are about to send, in place."""
        noise = noise_of(self.config, len(members))
        sources = {p: derived_noise(numpy_stream(self.config.seed, p, iteration, "privacy")) for p in members}
        theta, momentum = self.matrices.theta, self.matrices.momentum
        for peer in members:
            last = Obtained(self.obtained[peer], self.smoothed[peer, :-1] if self.aggregated[peer] else None)
            sent = prepare(theta[peer], momentum[peer], last, self.bounds[peer], noise, sources[peer], self.rule)
            theta[peer] = sent.theta
            self.smoothed[peer, :-1] = sent.smoothed
            self.smoothed[peer, -1] = sent.indicator
        return NoiseOfIteration(noise, sources)

    def settle(self, members: list[int], noise: NoiseOfIteration) -> ClipRange:
        """After the averaging: every member keeps what it obtained and moves its own bound."""
        for peer in members:
            self.obtained[peer] = self.matrices.theta[peer]
            self.aggregated[peer] = True
            mean_indicator = float(self.smoothed[peer, -1])
            bound = next_bound(self.bounds[peer], mean_indicator, noise.plan, noise.sources[peer], self.rule)
            self.bounds[peer] = bound
        held = [self.bounds[peer] for peer in members]
        return ClipRange(min(held), max(held))

    def mean_bound(self, members: Sequence[int]) -> float:
        """The mean of these peers' bounds: they drift apart."""
        return sum(self.bounds[peer] for peer in members) / len(members)


def checked(mixed: Mixed, technique: Technique, matrix: Tensor) -> Mixed:
    """What a technique came to; `InputError` where that is not a finite model for every member."""
    for value in {id(value): value for value in mixed.values}.values():
        if value.shape != matrix.shape[1:] or not all_finite(value):
            found = f"{list(value.shape)} of {list(matrix.shape[1:])} values, or NaN or infinity"
            raise InputError(f"technique = {technique.name}: its mix has {found}")
    return mixed


def _joined(phases: tuple[Messages, ...]) -> Messages:
    """The same phase of several vectors as one: between the same peers, so many values in all."""
    first = phases[0]
    return Messages(first.source, first.dest, np.sum([phase.values for phase in phases], axis=0))


def _disagreement(rows: list[Tensor]) -> float:
    """The largest distance from the mean, relative to it, in float64; 0 when all are the same."""
    if all(torch.equal(rows[0], row) for row in rows[1:]):
        return 0.0
    mean = torch.zeros_like(rows[0], dtype=torch.float64)
    for row in rows:
        mean += row
    mean /= len(rows)
    return max(float((row.to(torch.float64) - mean).norm()) for row in rows) / float(mean.norm())
