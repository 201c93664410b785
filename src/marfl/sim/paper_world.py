"""The paper's semantics: whoever was not in A_{t−1} keeps its own stale (θ_i, m_i), trains from it, and counts."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from marfl.config import Config
from marfl.learn import Metrics
from marfl.plan.schedule import Phase, Transfer
from marfl.sim.churn import Cast
from marfl.sim.executor import InProcess, Job, Memory, Setup, make_executor
from marfl.sim.lessons import teach
from marfl.sim.links import links
from marfl.sim.world import Step
from marfl.state import vector_hash
from marfl.techniques import MixContext, Technique
from marfl.techniques.mar import Mar


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
