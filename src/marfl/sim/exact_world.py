"""Exact semantics: whoever takes part holds the agreed (θ, m), only updates travel, all members end on the same bits.

A peer that was away catches up before it takes part, and the ledger shows what that costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from marfl.config import Config
from marfl.dp.private_agreement import CLIP, PrivateAgreement, agreement_of, wire_terms
from marfl.from_config import integers_of, smallest_sum_of, technique_of, test_of, wire_of
from marfl.learn import Metrics
from marfl.learn.small_integers import Sender, SmallIntegers
from marfl.learn.strategy import part_of
from marfl.plan.cost import BYTES_PER_VALUE, Cost
from marfl.plan.grid import order
from marfl.protocol.fixed_point import VALUE_BYTES, abstains, field_bits, fits, is_masked
from marfl.protocol.participant import ABANDONED
from marfl.protocol.slice_codec import delta_form
from marfl.secagg.graph import mask_cost
from marfl.sim.churn import Participation
from marfl.sim.executor import Done, Executor, InProcess, Job, Matrices, Setup, Sum, make_executor
from marfl.sim.fast import FastWays, fastest_way
from marfl.sim.iteration import NOBODY, IterationResult, distill_groups, models_shown
from marfl.state import Snapshot
from marfl.techniques.mar import Mar
from marfl.techniques.technique import Technique
from marfl.wire.packing import SliceFormat
from marfl.wire.rounded_sum import round_back


class ExactWorld:
    """Exact semantics: one agreed state."""

    def __init__(self, config: Config, setup: Setup, technique: Technique) -> None:
        self.config, self.technique, self.local_work = config, technique, setup.local_work
        self.cost = lru_cache(maxsize=64)(technique.cost)  # the same for every iteration of so many members
        self.local = InProcess(setup, Matrices(*(torch.empty(0),) * 4))  # evaluates, and steps pooled batches
        self.test = test_of(config, self.local.task)
        self.agreement = agreement_of(config, setup.local_work, self.local.worker.trainable)
        self.private = self.agreement if isinstance(self.agreement, PrivateAgreement) else None
        self.local.setup = setup = replace(setup, private=self.private)
        wire = integers_of(config)
        self.small = SmallIntegers(self.agreement, wire, self.local.worker.trainable, config.overlap) if wire else None
        self.state = (self.small or self.agreement).start(self.local.worker.flat.clone())
        self.length = self.state.vectors["theta"].numel()
        self.values = self.agreement.values(self.length)
        self.held = dict.fromkeys(range(config.peers), 0)  # which version each peer holds
        self.consumed = dict.fromkeys(range(config.peers), 0)
        self.wire = wire_terms(wire_of(config), self.agreement, self.length).wire
        self.late: dict[int, tuple[Done, Tensor]] = {}  # what slow peers have learned and not yet brought
        self.left: dict[int, Tensor] = {}  # of each peer's updates, where they travel in a few bits
        self.own: dict[int, Tensor] = {}  # what each peer remembers for the strategy
        self.delta_bytes = BYTES_PER_VALUE * self.values  # what one missed iteration costs
        self.fast, self.reason = fastest_way(config, self.local_work, self.agreement, self.local)
        pooled = self.fast == "pooled"
        self.before = self.state  # the state before the newest: where work that is under way began
        self.ahead: frozenset[int] = frozenset()  # who has some
        common = 1 + config.overlap  # states that updates begin from
        rows = config.peers if self.agreement.momentum == "local" else common
        self.matrices = Matrices(
            torch.empty(common, self.length),
            torch.zeros(rows, self.length),
            torch.empty(0 if pooled else config.peers, self.values, dtype=torch.int64 if self.private else None),
            torch.empty(self.values),
        )
        self._load_state()
        self.local.matrices = self.matrices
        at_hand = self.agreement.strategy.is_local or bool(config.local)  # what other processes do not have
        single = bool(self.fast) or at_hand
        self.executor: Executor = self.local if single else self._make_executor(setup)

    def _make_executor(self, setup: Setup) -> Executor:
        reads = self.wire != "fp32" or bool(self.config.churn.slow)  # what is late is kept here
        return make_executor(setup, self.matrices, self.config, reads_updates=reads)

    def _load_state(self) -> None:
        self.matrices.theta[0] = self.state.vectors["theta"]
        if "momentum" in self.state.vectors:
            self.matrices.momentum[0] = self.state.vectors["momentum"]
        self.local.agreed, self.local.own = {0: part_of(self.state.vectors)}, self.own
        if self.config.overlap:
            self.matrices.theta[1] = self.before.vectors["theta"]
            self.matrices.momentum[1] = self.before.vectors["momentum"]
            self.local.agreed[1] = part_of(self.before.vectors)

    # --- one iteration ---

    def step(self, iteration: int, who: Participation) -> IterationResult:
        step = IterationResult(ahead=self.ahead)
        began = self.state
        stale = self._catch_up(who, step)
        begun = time.perf_counter()
        done = self._update(iteration, who)
        step.update_seconds = time.perf_counter() - begun
        if self.wire != "fp32":
            done = [item._replace(finite=item.finite and self._fits(item)) for item in done]
        weights = {item.peer: 1.0 for item in done if item.finite}
        step.checks += [f"peer {item.peer}: {abstains(self.wire)}" for item in done if not item.finite]
        fresh = [item for item in done if item.finite and item.peer not in who.ages]
        step.losses = [item.loss for item in fresh if math.isfinite(item.loss)]
        step.sent = len(weights)
        weights |= dict.fromkeys(who.aggregators - who.updaters - who.ages.keys(), 0.0)
        step.checks += [f"peer {peer}: its update is {who.ages[peer]} iterations late" for peer in sorted(who.ages)]
        weights = self._survivors(iteration, self._in_order(weights), who, step)
        self.before, self.ahead = began, frozenset(weights) if self.config.overlap else frozenset()
        if not any(weights.values()):
            step.checks.append(NOBODY)
            self._pass_by([peer for peer, version in self.held.items() if version == self.state.version])
            return step
        fewest = max(who.fewest, smallest_sum_of(self.config) if is_masked(self.wire) else 0)
        if sum(weight > 0 for weight in weights.values()) < fewest:
            step.checks.append(ABANDONED)  # too few for a masked sum, or for the privacy budget
            self._pass_by(weights)
            return step
        begun = time.perf_counter()
        rows = {item.peer: item.out for item in done}
        if self.local_work.in_groups(iteration):
            self._distill(iteration, weights, rows, step)
        self._aggregate(weights, rows, step)
        step.aggregate_seconds = time.perf_counter() - begun
        step.stale = stale
        return step

    def _fits(self, item: Done) -> bool:
        """Whether an update can travel as integers."""
        update = self.matrices.updates[item.out]
        if self.small is None:
            return fits(update)
        sender = self._sender(item.peer, self.small.public(self.state))
        return sender.can_send(update)

    def _sender(self, peer: int, public: Tensor | None) -> Sender:
        assert self.small is not None
        return Sender(self.small, self.state, public, self.left.get(peer), self.config.seed, peer)

    def _catch_up(self, who: Participation, step: IterationResult) -> tuple[int, ...]:
        """Bring all who take part to the agreed state: one missed iteration costs Δ̄, more cost the whole state."""
        stale = [p for p in who.updaters | who.aggregators if self.held[p] < self.state.version]
        if not self.technique.server:  # FedAvg's server sends the model to whoever takes part: that is in its price
            for peer in stale:
                one = self.state.version - self.held[peer] == 1
                whole = BYTES_PER_VALUE * sum(vector.numel() for vector in self.state.vectors.values())
                step.bytes.sync += self.delta_bytes if one else whole
                step.bytes.messages += 1
        for peer in stale:
            self.held[peer] = self.state.version
        return tuple(sorted(stale))

    def _update(self, iteration: int, who: Participation) -> list[Done]:
        every = self.agreement.momentum == "local" or self.config.churn.slow or self.config.local
        wanted = who.updaters if every else who.updaters & who.aggregators
        bound = self.state.scalars.get(CLIP, 0.0)
        starts = {peer: int(peer in self.ahead) for peer in wanted}
        own = {peer: peer if self.agreement.momentum == "local" else row for peer, row in starts.items()}
        jobs = [
            Job(peer, iteration, self.consumed[peer], starts[peer], own[peer], out, bound)
            for out, peer in enumerate(sorted(wanted))
        ]
        for peer in who.updaters:
            self.consumed[peer] += self.local_work.consumes(iteration)
        if self.fast == "pooled":
            return self._fast_ways().pooled(jobs)
        if self.fast == "batched":
            done = self._fast_ways().batched(jobs, self.config.local_batches)
        else:
            done = self.executor.update(jobs, in_place=False)
        brought = self._brought_late(who, len(jobs))
        if self.config.churn.slow:
            begun = [item for item in done if item.peer not in who.aggregators]
            self.late |= {item.peer: (item, self.matrices.updates[item.out].clone()) for item in begun}
        return [item for item in done if item.peer in who.aggregators] + brought

    def _brought_late(self, who: Participation, free: int) -> list[Done]:
        """What slow peers bring now, in the rows behind those of this iteration's own updates."""
        brought = []
        for out, peer in enumerate(sorted(who.ages), start=free):
            item, update = self.late.pop(peer)
            self.matrices.updates[out] = update
            brought.append(item._replace(out=out))
        return brought

    def _fast_ways(self) -> FastWays:
        return FastWays(self.local, self.matrices, self.agreement, self.config.workers)

    def _survivors(
        self, iteration: int, weights: dict[int, float], who: Participation, step: IterationResult
    ) -> dict[int, float]:
        """Deaths during the exchange: what had been sent is lost, and the survivors go on without them."""
        if not weights or not who.dies:
            return weights
        rounds = self.cost(len(weights), self.values).phases
        deaths = {peer: when for peer, when in who.deaths(rounds).items() if peer in weights}
        if not deaths:
            return weights
        loss = self.technique.lost(len(weights), self.values, min(deaths.values()), len(deaths))
        step.bytes.repair += loss.wasted_bytes * self._value_bytes // BYTES_PER_VALUE
        if loss.outcome == "retry" and isinstance(self.technique, Mar) and self.local_work.in_groups(iteration):
            present = [rank for rank, weight in enumerate(weights.values()) if weight]
            models = models_shown(self.technique.plan_for(len(weights)), present)  # the next attempt shows others
            step.bytes.distill += 4 * self.length * models
        step.checks.append(f"{len(deaths)} died during the exchange ({loss.outcome})")
        return {peer: weight for peer, weight in weights.items() if peer not in deaths}

    def _in_order(self, weights: dict[int, float]) -> dict[int, float]:
        """As the roster lists them."""
        names = [(peer, "") for peer in weights]
        return {peer: weights[peer] for peer, _ in order(self.config.run_name, self.state.version + 1, names)}

    def _distill(self, iteration: int, weights: dict[int, float], rows: dict[int, int], step: IterationResult) -> None:
        """Moshpit-KD in the groups of the averaging; whoever brings no update neither teaches nor learns."""
        assert isinstance(self.technique, Mar)
        used = self.local_work.consumes(iteration)
        jobs = {
            rank: Job(peer, iteration, self.consumed[peer] - used, 0, 0, rows[peer])
            for rank, (peer, weight) in enumerate(weights.items())
            if weight
        }
        layout = self.technique.plan_for(len(weights))
        step.note_distillation(distill_groups(self.executor, layout, jobs, self.length, in_place=False), self.length)

    def _aggregate(self, weights: dict[int, float], rows: dict[int, int], step: IterationResult) -> None:
        """The mean over the roster, whose order is that of `weights`, and the state that follows."""
        members = list(weights)
        total = 0.0
        for peer in members:  # in roster order, as every peer adds them
            total += weights[peer]
        cost = self._note_cost(len(members), step)
        step.bits = field_bits(self.wire, self.small.wire_at(self.state) if self.small else None, len(members))
        if self.small is not None:
            self._add_integers(self.small, weights, rows, total)
        else:
            if self.fast != "pooled":
                own = tuple(rows.get(peer, 0) for peer in members)
                self.executor.mean(Sum(self.technique, own, tuple(weights.values()), total, self.wire))
            self.state = self.agreement.advance(self.state, self.matrices.mean, sum(map(bool, weights.values())))
            if self.agreement.strategy.remembers:
                self._remember(weights, rows)
        self._load_state()
        for peer in members:
            self.held[peer] = self.state.version
        step.bytes.payload += cost.bytes_total
        step.bytes.down += cost.bytes_down
        step.bytes.messages += cost.messages
        if is_masked(self.wire):
            voters = order(self.config.run_name, self.state.version, [(peer, "") for peer in range(self.config.peers)])
            inside = voters[0][0] in weights  # who votes first leads
            masks = mask_cost(len(members), electors=len(voters), liars=self.config.liars, leader_inside=inside)
            step.bytes.masks += masks.bytes_total
            step.bytes.messages += masks.messages
        step.members = tuple(members)
        step.arrived = sum(weight > 0 for weight in weights.values())

    def _remember(self, weights: dict[int, float], rows: dict[int, int]) -> None:
        """What peers sent behind their updates counts now: it is part of what they remember."""
        trained = slice(self.local.worker.trainable)
        for peer in (peer for peer, weight in weights.items() if weight):
            news = self.matrices.updates[rows[peer], -self.length :][trained]
            self.own[peer] = self.own[peer] + news if peer in self.own else news.clone()

    @property
    def _value_bytes(self) -> int:
        """Of values that are not packed."""
        return VALUE_BYTES.get(self.wire, BYTES_PER_VALUE)

    def _note_cost(self, members: int, step: IterationResult) -> Cost:
        """What the exchange costs. While there are no scales yet it is another: then its messages are noted, too."""
        if self.small is None:
            wide = self._value_bytes // BYTES_PER_VALUE  # links carry bytes
            step.phases = list(self.technique.messages(members, self.values * wide)) if wide > 1 else None
            return self.cost(members, self.values).with_values_of(self._value_bytes)
        wire = self.small.wire_at(self.state)
        if wire == self.small.wire:
            return self.cost(members, self.values)
        first = technique_of(self.config, wire)
        step.phases = list(first.messages(members, self.values))
        return first.cost(members, self.values)

    def _add_integers(
        self, small: SmallIntegers, weights: dict[int, float], rows: dict[int, int], weight: float
    ) -> None:
        """Add up what the members send in a few bits, and keep what is left of it; then the state that follows."""
        bring = [peer for peer, each in weights.items() if each]
        public, down = small.public(self.state), small.wire_at(self.state).down
        total = torch.zeros(self.values, dtype=torch.int32)
        for peer in bring:
            sender = self._sender(peer, public)
            found = sender.quantised(self.matrices.updates[rows[peer]], weights[peer], len(bring))
            total += found.sent
            self.left[peer] = found.left
        rounded = total if down == 32 else round_back(total, down)
        form = delta_form(total, small.wire.down) if down == 32 else SliceFormat(down, rounded=True)
        self.delta_bytes = form.size(self.values)
        self.state = small.advance(self.state, rounded, weight, len(bring))

    def _pass_by(self, peers: Iterable[int]) -> None:
        """The iteration goes by for these peers, and the model stays as it is."""
        self.state = replace(self.state, version=self.state.version + 1)
        self._load_state()
        for peer in peers:
            self.held[peer] = self.state.version

    # --- the rest ---

    def evaluate(self) -> Metrics:
        if self.config.local:
            return self.local.test_at_home(self.state.vectors["theta"])
        self.local.worker.load(self.state.vectors["theta"])
        return self.test(self.local.worker.module)

    def model_hash(self) -> bytes:
        return self.state.hash

    def clip(self) -> float | None:
        return self.state.scalars.get(CLIP)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"state.{name}": vector for name, vector in self.state.vectors.items()}
        if self.agreement.momentum == "local":
            tensors["momenta"] = self.matrices.momentum
        tensors |= {f"left.{peer}": left for peer, left in self.left.items()}
        tensors |= {f"own.{peer}": own for peer, own in self.own.items()}
        tensors |= {f"home.{peer}": home for peer, home in self.local.homes.items()}
        tensors |= {f"late.{peer}": update for peer, (_, update) in self.late.items()}
        if self.config.overlap:
            tensors |= {f"before.{name}": vector for name, vector in self.before.vectors.items()}
        held, consumed = list(self.held.values()), list(self.consumed.values())
        meta = {"version": self.state.version, "scalars": dict(self.state.scalars), "held": held, "consumed": consumed}
        meta |= {"late": [item for item, _ in self.late.values()]} if self.late else {}
        meta |= {"ahead": sorted(self.ahead)} if self.config.overlap else {}
        return tensors, meta | ({"delta_bytes": self.delta_bytes} if self.small else {})

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        vectors = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
        self.state = Snapshot(meta["version"], vectors, meta["scalars"])
        before = {name.removeprefix("before."): t for name, t in tensors.items() if name.startswith("before.")}
        self.before = replace(self.state, version=self.state.version - 1, vectors=before) if before else self.state
        self.ahead = frozenset(meta.get("ahead", ()))
        if "momenta" in tensors:
            self.matrices.momentum.copy_(tensors["momenta"])
        left = {name.removeprefix("left."): t.float() for name, t in tensors.items() if name.startswith("left.")}
        self.left = {int(peer): value for peer, value in left.items()}
        self.own = {int(name.removeprefix("own.")): t for name, t in tensors.items() if name.startswith("own.")}
        self.local.homes = {int(name.removeprefix("home.")): t for name, t in tensors.items() if name[:5] == "home."}
        late = [Done(*item) for item in meta.get("late", ())]
        self.late = {item.peer: (item, tensors[f"late.{item.peer}"]) for item in late}
        self.delta_bytes = meta.get("delta_bytes", self.delta_bytes)
        self.held, self.consumed = dict(enumerate(meta["held"])), dict(enumerate(meta["consumed"]))
        self._load_state()

    def close(self) -> None:
        self.executor.close()
