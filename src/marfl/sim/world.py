"""What one iteration does to the peers' models: exact semantics, and the paper's.

Exact: whoever takes part first holds the agreed (θ, m); only updates travel; all members end on the same bits. A peer
that was away catches up before it takes part, and the ledger shows what that costs.
Paper: a peer that was not in A_{t−1} keeps its own stale (θ_i, m_i), trains from it, and is averaged in at full weight.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from marfl.config import Config
from marfl.from_config import wire_of
from marfl.learn import (
    Metrics,
    MiniBatch,
    batched_update,
    batching_obstacle,
    minibatch_of_many,
    pooled_update,
    pooling_obstacle,
)
from marfl.net.base import Ledger
from marfl.plan.grid import order
from marfl.plan.masks import FEWEST, mask_cost
from marfl.plan.schedule import Phase, Transfer
from marfl.privacy.agreed import CLIP, PrivateAgreement, agreement_of
from marfl.protocol.fixed import VALUE_BYTES, abstains, fits
from marfl.protocol.participant import ABANDONED
from marfl.sim.churn import Cast
from marfl.sim.executor import Done, Executor, InProcess, Job, Memory, Setup, Sum, make_executor, noise_for
from marfl.sim.lessons import Lessons, models_shown, teach
from marfl.sim.links import links
from marfl.state import Snapshot, vector_hash
from marfl.techniques import MixContext, Technique
from marfl.techniques.mar import Mar

BATCHED_PEERS = 32  # peers stepped at once by batched matmuls: more do not fit the cache
POOLED_PEERS = 32  # peers whose rows are gathered at once


@dataclass
class Step:
    """What one iteration came to."""

    members: tuple[int, ...] = ()  # whose updates are in the new model, in plan order
    sent: int = 0  # updates that peers brought to the exchange
    arrived: int = 0  # updates in the new model: members that only help to aggregate bring none
    losses: list[float] = field(default_factory=list)
    bytes: Ledger = field(default_factory=Ledger)
    disagreement: float = 0.0
    update_seconds: float = 0.0
    aggregate_seconds: float = 0.0
    checks: list[str] = field(default_factory=list)  # what the robustness checks found
    lessons: list[Phase] = field(default_factory=list)  # the models that travelled before the averaging
    phases: Iterable[Phase] | None = None  # the messages, when the technique chose them this time
    stale: tuple[int, ...] = ()  # who caught up first
    seconds: float | None = None  # virtual, when a network told it
    facts: dict[str, Any] = field(default_factory=dict)  # further columns of the row

    def note_lessons(self, lessons: Lessons, length: int) -> None:
        """Count the models that were shown, and say who could not use them."""
        self.lessons += lessons.phases
        self.bytes.distill += 4 * length * lessons.messages
        self.bytes.messages += lessons.messages
        self.checks += [f"peer {peer}: distillation led to NaN or infinity and was undone" for peer in lessons.undone]


class World(Protocol):
    """The models of all peers, and how an iteration changes them."""

    technique: Technique
    reason: str  # which way was taken, and why
    length: int  # values of the model
    values: int  # values that a peer sends

    def step(self, iteration: int, cast: Cast) -> Step: ...

    def evaluate(self) -> Metrics: ...

    def model_hash(self) -> bytes: ...

    def clip(self) -> float | None:
        """The clipping bound of the next iteration, in a private run."""

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class ExactWorld:
    """Exact semantics: one agreed state."""

    def __init__(self, config: Config, setup: Setup, technique: Technique) -> None:
        self.config, self.technique, self.practice = config, technique, setup.practice
        self.cost = lru_cache(maxsize=64)(technique.cost)  # the same for every iteration of so many members
        self.local = InProcess(setup, Memory(*(torch.empty(0),) * 4))  # evaluates, and steps pooled batches
        self.agreement = agreement_of(config, setup.practice, self.local.worker.trainable)
        self.private = self.agreement if isinstance(self.agreement, PrivateAgreement) else None
        self.local.setup = setup = replace(setup, private=self.private)
        self.state = self.agreement.start(self.local.worker.flat.clone())
        self.length = self.state.vectors["theta"].numel()
        self.values = self.agreement.values(self.length)
        self.held = dict.fromkeys(range(config.peers), 0)  # which version each peer holds
        self.consumed = dict.fromkeys(range(config.peers), 0)
        self.wire = wire_of(config)
        self.fast, self.reason = self._way()
        pooled = self.fast == "pooled"
        rows = config.peers if self.agreement.momentum == "local" else 1
        self.memory = Memory(
            torch.empty(1, self.length),
            torch.zeros(rows, self.length),
            torch.empty(0 if pooled else config.peers, self.values),
            torch.empty(self.values),
        )
        self._load_state()
        self.local.memory = self.memory
        single = bool(self.fast)
        self.executor: Executor = self.local if single else make_executor(setup, self.memory, config.workers)

    def _way(self) -> tuple[str, str]:
        """How local updates are computed: for `fast`, the cheapest way that is the same up to rounding."""
        if self.config.engine != "fast":
            return "", "one peer at a time on one thread: the bits of a real swarm"
        worker = self.local.worker
        if self.practice.distill is not None:
            return "", "one peer at a time: distillation (or the local steps that match it) has no cheaper way here"
        obstacle = pooling_obstacle(worker)
        if self.config.local_batches > 1:
            obstacle = f"local_batches = {self.config.local_batches}"
        if self.wire != "fp32":
            obstacle = f"wire = {self.wire}"
        if self.agreement.momentum != "derive":
            obstacle = f"momentum = {self.agreement.momentum}"
        if self.private is not None:
            obstacle = "privacy, which clips every peer's update by itself"
        if obstacle is None:
            return "pooled", "one pooled batch: a common start and one batch each make it the same up to rounding"
        stacking = batching_obstacle(worker)
        if stacking is None:
            return "batched", f"batched matmuls, not pooled because of {obstacle}"
        return "", f"one peer at a time: not pooled because of {obstacle}; not batched because {stacking}"

    def _load_state(self) -> None:
        self.memory.theta[0] = self.state.vectors["theta"]
        if "momentum" in self.state.vectors:
            self.memory.momentum[0] = self.state.vectors["momentum"]

    # --- one iteration ---

    def step(self, iteration: int, cast: Cast) -> Step:
        step = Step()
        stale = self._catch_up(cast, step)
        begun = time.perf_counter()
        done = self._update(iteration, cast, step)
        step.update_seconds = time.perf_counter() - begun
        if self.wire != "fp32":
            done = [item._replace(finite=item.finite and fits(self.memory.updates[item.out])) for item in done]
        weights = {item.peer: 1.0 for item in done if item.finite}
        step.checks += [f"peer {item.peer}: {abstains(self.wire)}" for item in done if not item.finite]
        step.losses = [item.loss for item in done if item.finite and math.isfinite(item.loss)]
        step.sent = len(weights)
        weights |= dict.fromkeys(cast.aggregators - cast.updaters, 0.0)
        weights = self._survivors(iteration, self._in_order(weights), cast, step)
        if not any(weights.values()):
            step.checks.append("nobody brought an update: the model stays as it is")
            return step
        if self.wire == "masked" and sum(weight > 0 for weight in weights.values()) < FEWEST:
            self._abandon(weights, step)
            return step
        begun = time.perf_counter()
        rows = {item.peer: item.out for item in done}
        if self.practice.in_groups(iteration):
            self._teach(iteration, weights, rows, step)
        self._aggregate(weights, rows, step)
        step.aggregate_seconds = time.perf_counter() - begun
        step.stale = stale
        return step

    def _catch_up(self, cast: Cast, step: Step) -> tuple[int, ...]:
        """Whoever takes part first holds the agreed state: one missed iteration costs Δ̄, more cost the whole state."""
        stale = [p for p in cast.updaters | cast.aggregators if self.held[p] < self.state.version]
        if not self.technique.server:  # FedAvg's server sends the model to whoever takes part: that is in its price
            for peer in stale:
                one = self.state.version - self.held[peer] == 1
                step.bytes.sync += 4 * (self.values if one else self.length * len(self.state.vectors))
                step.bytes.messages += 1
        for peer in stale:
            self.held[peer] = self.state.version
        return tuple(sorted(stale))

    def _update(self, iteration: int, cast: Cast, step: Step) -> list[Done]:
        wanted = cast.updaters if self.agreement.momentum == "local" else cast.updaters & cast.aggregators
        bound = self.state.scalars.get(CLIP, 0.0)
        jobs = [
            Job(peer, iteration, self.consumed[peer], 0, peer if self.agreement.momentum == "local" else 0, out, bound)
            for out, peer in enumerate(sorted(wanted))
        ]
        for peer in cast.updaters:
            self.consumed[peer] += self.practice.consumes(iteration)
        if self.fast == "pooled":
            return self._pooled(jobs)
        done = self._batched(jobs) if self.fast == "batched" else self.executor.update(jobs, in_place=False)
        return [item for item in done if item.peer in cast.aggregators]

    def _pooled(self, jobs: Sequence[Job]) -> list[Done]:
        """All updates as one: the mean goes straight to `memory.mean`; a peer with broken data is left out."""
        kept, broken = list(jobs), list[Job]()
        while kept:
            minibatches = (self._minibatch(kept[i : i + POOLED_PEERS]) for i in range(0, len(kept), POOLED_PEERS))
            theta, momentum = self.memory.theta[0], self.memory.momentum[0]
            weights = [1.0] * len(kept)
            result = pooled_update(self.local.worker, theta, momentum, minibatches, weights, self.agreement.optimizer)
            if result.finite:
                self.memory.mean.copy_(result.delta)
                rest = [Done(j.peer, j.out, math.nan, 0, False) for j in broken]
                return [Done(j.peer, j.out, result.loss, 0, True) for j in kept] + rest
            bad = [job for job in kept if not self._is_finite(job)]
            broken += bad
            kept = [job for job in kept if job not in bad] if bad else []
        return [Done(j.peer, j.out, math.nan, 0, False) for j in jobs]

    def _minibatch(self, jobs: Sequence[Job]) -> MiniBatch:
        return minibatch_of_many([(self.local.loader(job.peer), job.consumed) for job in jobs], jobs[0].iteration)

    def _is_finite(self, job: Job) -> bool:
        """Whether this peer's batch alone gives a finite update: only asked when the pooled one does not."""
        minibatch = self._minibatch([job])
        start = self.memory.theta[0], self.memory.momentum[0]
        return pooled_update(self.local.worker, *start, [minibatch], [1.0], self.agreement.optimizer).finite

    def _batched(self, jobs: Sequence[Job]) -> list[Done]:
        done: list[Done] = []
        for first in range(0, len(jobs), BATCHED_PEERS):
            some = jobs[first : first + BATCHED_PEERS]
            steps = [
                [self.local.loader(j.peer).minibatch(j.consumed + b, j.iteration, b) for j in some]
                for b in range(self.config.local_batches)
            ]
            thetas = self.memory.theta[0].expand(len(some), -1)
            momenta = self.memory.momentum[[j.momentum_row for j in some]]
            result = batched_update(self.local.worker, thetas, momenta, steps, self.agreement.optimizer)
            for row, job in enumerate(some):
                self._write_update(job, result.deltas[row], self.memory.momentum[job.momentum_row])
                if self.agreement.momentum == "send":
                    self.memory.updates[job.out, self.length :] = result.momenta[row]
                elif self.agreement.momentum == "local" and result.finite[row]:
                    self.memory.momentum[job.momentum_row] = result.momenta[row]
                usable = self.private is not None or bool(result.finite[row])
                done.append(Done(job.peer, job.out, float(result.losses[row]), 0, usable))
        return done

    def _write_update(self, job: Job, delta: Tensor, momentum: Tensor) -> None:
        """Put what a peer sends of its update into its row."""
        if self.private is None:
            self.memory.updates[job.out, : self.length] = delta
        else:
            source = noise_for(self.local.setup, job)
            self.memory.updates[job.out] = self.private.privatised(delta, momentum, job.iteration, job.bound, source)

    def _survivors(self, iteration: int, weights: dict[int, float], cast: Cast, step: Step) -> dict[int, float]:
        """Deaths during the exchange: what had been sent is lost, and the survivors go on without them."""
        if not weights or not cast.dies:
            return weights
        rounds = self.cost(len(weights), self.values).phases
        deaths = {peer: when for peer, when in cast.deaths(rounds).items() if peer in weights}
        if not deaths:
            return weights
        loss = self.technique.lost(len(weights), self.values, min(deaths.values()), len(deaths))
        step.bytes.repair += loss.wasted_bytes * VALUE_BYTES[self.wire] // VALUE_BYTES["fp32"]
        if loss.outcome == "retry" and isinstance(self.technique, Mar) and self.practice.in_groups(iteration):
            present = [rank for rank, weight in enumerate(weights.values()) if weight]
            models = models_shown(self.technique.plan_for(len(weights)), present)  # the next attempt shows others
            step.bytes.distill += 4 * self.length * models
        step.checks.append(f"{len(deaths)} died during the exchange ({loss.outcome})")
        return {peer: weight for peer, weight in weights.items() if peer not in deaths}

    def _in_order(self, weights: dict[int, float]) -> dict[int, float]:
        """As the roster lists them."""
        names = [(peer, "") for peer in weights]
        return {peer: weights[peer] for peer, _ in order(self.config.run_name, self.state.version + 1, names)}

    def _teach(self, iteration: int, weights: dict[int, float], rows: dict[int, int], step: Step) -> None:
        """Moshpit-KD in the groups of the averaging; whoever brings no update neither teaches nor learns."""
        assert isinstance(self.technique, Mar)
        used = self.practice.consumes(iteration)
        jobs = {
            rank: Job(peer, iteration, self.consumed[peer] - used, 0, 0, rows[peer])
            for rank, (peer, weight) in enumerate(weights.items())
            if weight
        }
        layout = self.technique.plan_for(len(weights))
        step.note_lessons(teach(self.executor, layout, jobs, self.length, in_place=False), self.length)

    def _aggregate(self, weights: dict[int, float], rows: dict[int, int], step: Step) -> None:
        """The mean over the roster, whose order is that of `weights`, and the state that follows."""
        members = list(weights)
        total = 0.0
        for peer in members:  # in roster order, as every peer adds them
            total += weights[peer]
        if self.fast != "pooled":
            own = tuple(rows.get(peer, 0) for peer in members)
            self.executor.mean(Sum(self.technique, own, tuple(weights.values()), total, self.wire))
        self.state = self.agreement.advance(self.state, self.memory.mean)
        self._load_state()
        for peer in members:
            self.held[peer] = self.state.version
        cost = self.cost(len(members), self.values)
        step.bytes.payload += cost.with_values_of(VALUE_BYTES[self.wire]).bytes_total
        step.bytes.messages += cost.messages
        if self.wire == "masked":
            voters = order(self.config.run_name, self.state.version, [(peer, "") for peer in range(self.config.peers)])
            masks = mask_cost(len(members), leader_inside=voters[0][0] in weights)  # who votes first leads
            step.bytes.masks += masks.bytes_total
            step.bytes.messages += masks.messages
        step.members = tuple(members)
        step.arrived = sum(weight > 0 for weight in weights.values())

    def _abandon(self, weights: dict[int, float], step: Step) -> None:
        """Too few for a masked sum: the iteration goes by, and the model stays as it is."""
        step.checks.append(ABANDONED)
        self.state = replace(self.state, version=self.state.version + 1)
        for peer in weights:
            self.held[peer] = self.state.version

    # --- the rest ---

    def evaluate(self) -> Metrics:
        self.local.worker.load(self.state.vectors["theta"])
        return self.local.task.evaluate(self.local.worker.module)

    def model_hash(self) -> bytes:
        return self.state.hash

    def clip(self) -> float | None:
        return self.state.scalars.get(CLIP)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"state.{name}": vector for name, vector in self.state.vectors.items()}
        if self.agreement.momentum == "local":
            tensors["momenta"] = self.memory.momentum
        held, consumed = list(self.held.values()), list(self.consumed.values())
        scalars = dict(self.state.scalars)
        return tensors, {"version": self.state.version, "scalars": scalars, "held": held, "consumed": consumed}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        vectors = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
        self.state = Snapshot(meta["version"], vectors, meta["scalars"])
        if "momenta" in tensors:
            self.memory.momentum.copy_(tensors["momenta"])
        self.held, self.consumed = dict(enumerate(meta["held"])), dict(enumerate(meta["consumed"]))
        self._load_state()

    def close(self) -> None:
        self.executor.close()


class PaperWorld:
    """The paper's semantics: every peer has a model of its own."""

    def __init__(self, config: Config, setup: Setup, technique: Technique) -> None:
        self.config, self.technique, self.practice = config, technique, setup.practice
        self.cost = lru_cache(maxsize=64)(technique.cost)  # the same for every iteration of so many members
        self.local = InProcess(setup, Memory(*(torch.empty(0),) * 4))
        start = self.local.worker.flat.clone()
        self.length = start.numel()
        sends_momentum = config.momentum == "send" and (technique.exact or technique.name == "mar")
        self.values = self.length * (2 if sends_momentum else 1)
        peers = config.peers
        self.memory = Memory(
            start.expand(peers, -1).clone(),
            torch.zeros(peers, self.length),
            torch.empty(0, self.length),
            torch.empty(0),
        )
        self.local.memory = self.memory
        self.executor = make_executor(setup, self.memory, config.workers)
        self.consumed = dict.fromkeys(range(peers), 0)
        self.notes: dict[str, Any] = {}  # the technique's own state
        self.speed = links(config.links, peers, config.seed).speed if config.links else None
        self.fresh: tuple[int, ...] = tuple(range(peers))  # A_{t-1}: whose models are the newest
        self.reason = "every peer from its own model, one at a time on one thread"
        if config.engine == "fast":
            self.reason += ": paper semantics has no cheaper way here"

    def step(self, iteration: int, cast: Cast) -> Step:
        step = Step()
        begun = time.perf_counter()
        jobs = [
            Job(peer, iteration, self.consumed[peer], peer, peer, out) for out, peer in enumerate(sorted(cast.updaters))
        ]
        done = self.executor.update(jobs, in_place=True)
        for peer in cast.updaters:
            self.consumed[peer] += self.practice.consumes(iteration)
        step.update_seconds = time.perf_counter() - begun
        broken = {item.peer for item in done if not item.finite}
        step.checks += [f"peer {peer}: its update is not finite, so it abstains" for peer in sorted(broken)]
        step.losses = [item.loss for item in done if item.finite]
        members = self._survivors(sorted(cast.aggregators - broken), cast, step)
        if not members:
            step.checks.append("nobody aggregates")
            return step
        begun = time.perf_counter()
        if self.practice.in_groups(iteration):
            self._teach(iteration, members, cast, step)
        self._mix(iteration, members, step)
        step.aggregate_seconds = time.perf_counter() - begun
        step.members = self.fresh = tuple(members)
        return step

    def _survivors(self, members: list[int], cast: Cast, step: Step) -> list[int]:
        if not members or not cast.dies:
            return members
        rounds = self.cost(len(members), self.length).phases
        deaths = {peer: when for peer, when in cast.deaths(rounds).items() if peer in members}
        if deaths:
            loss = self.technique.lost(len(members), 2 * self.length, min(deaths.values()), len(deaths))
            step.bytes.repair += loss.wasted_bytes
            step.checks.append(f"{len(deaths)} died during the exchange ({loss.outcome})")
        return [peer for peer in members if peer not in deaths]

    def _teach(self, iteration: int, members: list[int], cast: Cast, step: Step) -> None:
        """Moshpit-KD in the groups of the averaging, of all who aggregate (Algorithm 1), updated or not."""
        assert isinstance(self.technique, Mar)
        used = {peer: self.practice.consumes(iteration) if peer in cast.updaters else 0 for peer in members}
        jobs = {
            rank: Job(peer, iteration, self.consumed[peer] - used[peer], peer, peer, rank)
            for rank, peer in enumerate(members)
        }
        layout = self.technique.groups(len(members), self.config.seed, iteration)
        step.note_lessons(teach(self.executor, layout, jobs, self.length, in_place=True), self.length)

    def _travelling(self) -> list[Tensor]:
        """What the members average: matrices with a row for each peer."""
        return [self.memory.theta] if self.values == self.length else [self.memory.theta, self.memory.momentum]

    def _mix(self, iteration: int, members: list[int], step: Step) -> None:
        matrices = self._travelling()
        if self.technique.exact_for(len(members)):
            for matrix in matrices:
                mean = self.technique.total([matrix[peer] for peer in members]) / len(members)
                for peer in members:
                    matrix[peer] = mean
            cost = self.cost(len(members), self.values)
            step.bytes.payload, step.bytes.messages = cost.bytes_total, cost.messages
            return
        samples = tuple(self.local.loader(peer).samples for peer in members)
        context = MixContext(tuple(members), iteration, self.config.seed, self.notes, samples, self.speed)
        phases: list[list[Phase]] = []
        for matrix in matrices:
            mixed = self.technique.mix([matrix[peer] for peer in members], context)
            for peer, value in zip(members, mixed.values, strict=True):
                matrix[peer] = value
            phases.append(mixed.phases)
        self.notes = dict(mixed.memory)
        sent = [transfer for each in phases for phase in each for transfer in phase]
        step.bytes.payload = 4 * sum(t.stop - t.start for t in sent)
        step.bytes.messages = len(sent)
        step.phases = [_joined(together) for together in zip(*phases, strict=True)]
        step.disagreement = _disagreement([self.memory.theta[peer] for peer in members])

    def evaluate(self) -> Metrics:
        """The mean over up to five of the newest models; one is enough where they are all the same."""
        rows = self.memory.theta[list(self.fresh[:: max(1, len(self.fresh) // 5)][:5])]
        if all(torch.equal(rows[0], row) for row in rows[1:]):
            rows = rows[:1]
        found = []
        for row in rows:
            self.local.worker.load(row)
            found.append(self.local.task.evaluate(self.local.worker.module))
        count = len(found)
        return Metrics(sum(m.loss for m in found) / count, sum(m.accuracy for m in found) / count, found[0].count)

    def model_hash(self) -> bytes:
        first = self.memory.theta[self.fresh[0]]
        if all(torch.equal(first, self.memory.theta[peer]) for peer in self.fresh[1:]):
            return vector_hash(first, self.memory.momentum[self.fresh[0]])
        return vector_hash(*(self.memory.theta[peer] for peer in self.fresh))

    def clip(self) -> float | None:
        return None

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        meta = {"consumed": list(self.consumed.values()), "notes": self.notes, "fresh": list(self.fresh)}
        return {"theta": self.memory.theta, "momentum": self.memory.momentum}, meta

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        self.memory.theta.copy_(tensors["theta"])
        self.memory.momentum.copy_(tensors["momentum"])
        self.consumed, self.notes = dict(enumerate(meta["consumed"])), meta["notes"]
        self.fresh = tuple(meta["fresh"])

    def close(self) -> None:
        self.executor.close()


def _joined(phases: tuple[Phase, ...]) -> Phase:
    """The same phase of several vectors as one: between the same peers, so many values in all."""
    return tuple(
        Transfer(each[0].source, each[0].dest, 0, sum(t.stop - t.start for t in each))
        for each in zip(*phases, strict=True)
    )


def _disagreement(rows: list[Tensor]) -> float:
    """The largest distance from the mean, relative to it, in float64; 0 when all are the same."""
    if all(torch.equal(rows[0], row) for row in rows[1:]):
        return 0.0
    mean = torch.zeros_like(rows[0], dtype=torch.float64)
    for row in rows:
        mean += row
    mean /= len(rows)
    return max(float((row.to(torch.float64) - mean).norm()) for row in rows) / float(mean.norm())
