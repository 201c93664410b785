"""The very same experiment with the real protocol on the virtual network: messages, votes, catch-up and all."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from marfl.config import Config
from marfl.errors import BrokenPromise, InputError
from marfl.from_config import wire_of
from marfl.learn import LocalResult, Metrics
from marfl.lessons import learn_in_groups
from marfl.net.base import Ledger, PeerId
from marfl.net.virtual import Link, VirtualLoop, VirtualNetwork
from marfl.privacy.agreed import CLIP, PrivateAgreement, agreement_of
from marfl.protocol.exchange import Contribution
from marfl.protocol.fixed_point import abstains, can_carry
from marfl.protocol.meetings import Meetings, Prepare
from marfl.protocol.participant import ABANDONED, Outcome, Participant, genesis
from marfl.protocol.roster import VOID, Record, Roster
from marfl.protocol.settings import Settings
from marfl.sim.churn import Cast
from marfl.sim.executor import InProcess, Job, Memory, Setup
from marfl.sim.links import links
from marfl.sim.protocol_deaths import PATIENT, Reaper, patience
from marfl.sim.protocol_saved import restore_heads, restore_people, save_heads, save_people
from marfl.sim.world import NOBODY, Step
from marfl.state import Snapshot
from marfl.techniques import Technique


class ProtocolWorld:
    """One `Participant` per peer, exactly as a real swarm runs them."""

    def __init__(self, config: Config, setup: Setup, technique: Technique) -> None:
        self.config, self.technique, self.practice = config, technique, setup.practice
        self.reason = "the real protocol on the virtual network"
        self.local = InProcess(setup, Memory(*(torch.empty(0),) * 4))
        self.agreement = agreement_of(config, setup.practice, self.local.worker.trainable)
        self.private = self.agreement if isinstance(self.agreement, PrivateAgreement) else None
        self.local.setup = replace(setup, private=self.private)
        if self.agreement.momentum == "local":
            raise InputError("momentum = local: runs with engine = bitwise; the protocol engine derives or sends it")
        self.start = self.agreement.start(self.local.worker.flat.clone())
        self.length = self.start.vectors["theta"].numel()
        self.values = self.agreement.values(self.length)
        self.consumed = dict.fromkeys(range(config.peers), 0)
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.network = VirtualNetwork(config.seed, log=False)
        self.links = links(config.links, config.peers, config.seed) if config.links else None
        self.people = self._people()
        self.unsure: set[int] = set()  # they died or missed a decision: they do not know what was decided
        self.buried = Ledger()  # what the dead had sent before they came back

    def _people(self) -> list[Participant]:
        config = self.config
        count = config.peers + self.technique.server  # FedAvg's server is one more peer, without data
        names = [f"peer{index}" for index in range(count)]
        chosen = {**self._patience(), **self.technique.protocol(config.peers), "wire": wire_of(config)}
        chosen["sync_states"] = 1e9  # virtual time may stand still: whoever misses much would seem to ask too often
        settings = Settings(run=config.run_name, meet_until=config.meet_until, **chosen)
        record = genesis(self.start, tuple((name, index) for index, name in enumerate(names)))
        layout = self.local.worker.layout.hash
        given = self.links
        people = []
        for index, name in enumerate(names):
            link = Link()
            if given is not None:
                link = Link(float(given.up[index]), float(given.down[index]), float(given.latency[index]))
            net = self.network.join(name, link)
            people.append(Participant(net, settings, index, layout, self.start, record, self._advance))
        return people

    def _patience(self) -> dict[str, Any]:
        if not self.config.churn.death:
            return PATIENT
        cost = self.technique.cost(self.config.peers, self.values)
        return patience(self.links, cost, 4 * self.values * self.config.group_size)

    def _advance(self, state: Snapshot, mean: Tensor, _: Roster) -> Snapshot:
        return self.agreement.advance(state, mean)

    def step(self, iteration: int, cast: Cast) -> Step:
        step = Step()
        begun = time.perf_counter()
        before = self._sent()
        clock = self.runner.run(self._time())
        self.runner.run(self._catch_up(cast))
        mine = self._contributions(iteration, self._without_the_unsure(cast, step), step)
        step.sent = sum(contribution.weight > 0 for contribution in mine.values())
        step.update_seconds = time.perf_counter() - begun
        begun = time.perf_counter()
        reaper = self._reaper(mine, cast)
        saved = {peer.net.me: (peer.state, peer.record) for peer in self.people if peer.net.me in reaper.dies}
        outcomes = self.runner.run(self._iterate(mine, reaper))
        step.aggregate_seconds = time.perf_counter() - begun
        step.bytes = self._sent().minus(before)
        step.seconds = self.runner.run(self._time()) - clock
        self._note(outcomes, mine, step)
        for name in reaper.dead:
            self._revive(name, *saved[name])
        return step

    async def _time(self) -> float:
        return self.network.time

    async def _catch_up(self, cast: Cast) -> None:
        """Whoever takes part first holds the agreed state; whoever died looks for it, to vote at least."""
        active = cast.updaters | cast.aggregators
        behind = [p for p in self.people if p.index in self.unsure or (p.index in active and p.behind)]
        caught = await asyncio.gather(*(peer.catch_up() for peer in behind))
        self.unsure = {peer.index for peer, well in zip(behind, caught, strict=True) if not well}
        if self.unsure and not self.config.churn.death:
            raise BrokenPromise("a peer could not catch up although nobody failed")

    def _without_the_unsure(self, cast: Cast, step: Step) -> Cast:
        late = self.unsure & (cast.updaters | cast.aggregators)
        step.checks += [f"peer {peer}: could not catch up, so it sits out" for peer in sorted(late)]
        return replace(cast, updaters=cast.updaters - late, aggregators=cast.aggregators - late) if late else cast

    def _contributions(self, iteration: int, cast: Cast, step: Step) -> dict[int, Contribution]:
        """Local updates, one peer at a time: only those that reach the aggregation need to be computed."""
        contributions = {}
        for peer in sorted(cast.updaters & cast.aggregators):
            state = self.people[peer].state
            update = torch.empty(1, self.values)
            theta, momentum = state.vectors["theta"][None], state.vectors["momentum"][None]
            self.local.memory = Memory(theta, momentum, update, torch.empty(0))
            job = Job(peer, iteration, self.consumed[peer], 0, 0, 0, state.scalars.get(CLIP, 0.0))
            done = self.local.update([job], in_place=False)[0]
            if not done.finite or not can_carry(self.people[peer].settings.wire, update[0]):
                step.checks.append(f"peer {peer}: {abstains(self.people[peer].settings.wire)}")
                continue
            if math.isfinite(done.loss):
                step.losses.append(done.loss)
            prepare = self._prepare(job, theta[0], update[0], step)
            contributions[peer] = Contribution(state.hash, update[0], fewest=cast.fewest, prepare=prepare)
        for peer in cast.updaters:
            self.consumed[peer] += self.practice.consumes(iteration)
        helpers = cast.aggregators - cast.updaters
        if self.technique.server and contributions:
            helpers = helpers | {self.config.peers}
        for peer in helpers:
            contributions[peer] = Contribution(self.people[peer].record.hash, torch.zeros(self.values), 0.0)
        return contributions

    def _prepare(self, job: Job, theta: Tensor, update: Tensor, step: Step) -> Prepare | None:
        """How a peer learns from its groups before it brings its update, where this iteration distils."""
        if not self.practice.in_groups(job.iteration):
            return None
        loader = self.local.loader(job.peer)
        delta, momentum = update.view(2, -1)

        async def study(state: LocalResult, models: list[Tensor], round: int) -> LocalResult:
            worker = self.local.worker
            lesson = self.practice.lesson(worker, loader, state, models, job.iteration, job.consumed, round)
            if lesson.undone:
                step.checks.append(f"peer {job.peer}: distillation led to NaN or infinity and was undone")
            return lesson.result

        async def prepare(meetings: Meetings) -> Tensor:
            before = LocalResult(theta, delta, momentum, 0.0, 0, True)
            after = await learn_in_groups(meetings, before, study)
            for round, name in meetings.missed:
                step.checks.append(f"peer {job.peer}, round {round + 1}: no model of {name} to learn from")
            return self.agreement.outgoing(after)

        return prepare

    def _reaper(self, mine: dict[int, Contribution], cast: Cast) -> Reaper:
        """Who of the contributors dies in which phase of the exchange."""
        if not mine or not cast.dies:
            return Reaper({})
        rounds = self.technique.cost(len(mine), self.values).phases
        return Reaper({f"peer{peer}": when for peer, when in cast.deaths(rounds).items() if peer in mine})

    async def _iterate(self, mine: dict[int, Contribution], reaper: Reaper) -> dict[int, Outcome]:
        """One iteration of everybody; the dead have no outcome."""
        self.network.intercept = reaper if reaper.dies else None
        lives = [self.network.spawn(p.net.me, p.run_iteration(mine.get(p.index))) for p in self.people]
        ends = await asyncio.gather(*lives, return_exceptions=True)
        self.network.intercept = None
        outcomes = {}
        for peer, end in zip(self.people, ends, strict=True):
            if isinstance(end, BaseException):
                if peer.net.me not in reaper.dead:
                    raise end
            else:
                outcomes[peer.index] = end
        return outcomes

    def _note(self, outcomes: dict[int, Outcome], mine: dict[int, Contribution], step: Step) -> None:
        committed = {peer: outcome for peer, outcome in outcomes.items() if outcome.status == "committed"}
        hashes = {outcome.hash for outcome in committed.values()}
        dead, lost = len(self.people) - len(outcomes), len(outcomes) - len(committed)
        if (lost or len(hashes) != 1) and not self.config.churn.death:
            raise BrokenPromise(f"{len(hashes)} models after an iteration in which nobody failed")
        if dead:
            step.checks.append(f"{dead} died during the exchange")
        if lost:
            step.checks.append(f"{lost} survivors came to no decision")
        if len(hashes) > 1:
            step.checks.append(f"{len(hashes)} lineages: the heavier will win")
        self.unsure |= outcomes.keys() - committed.keys()
        index = {peer.net.me: peer.index for peer in self.people}
        present = next((outcome.present for outcome in committed.values()), ())
        step.members = tuple(index[name] for name in present if index[name] < self.config.peers)
        step.arrived = sum(mine[peer].weight > 0 for peer in step.members)
        abandoned = {outcome.iteration for outcome in committed.values() if outcome.exchange == VOID}
        if abandoned:
            step.checks.append(ABANDONED if step.sent else NOBODY)
            step.arrived = step.arrived or self._seen(abandoned)

    def _seen(self, abandoned: set[int]) -> int:
        """Shares of noise in a total whose masks came off before its iteration was abandoned: somebody has seen it."""
        seen = (peer.helped[t] for peer in self.people for t in abandoned if t in peer.helped)
        return min((roster.contributions for roster in seen), default=0)

    def _revive(self, name: PeerId, state: Snapshot, record: Record) -> None:
        """A dead peer comes back with what it had saved, and never votes again in the iteration it died in."""
        old = next(peer for peer in self.people if peer.net.me == name)
        _add(self.buried, old.net.sent)
        net = self.network.join(name)
        new = Participant(net, old.settings, old.index, old.standing.layout, state, record, self._advance)
        new.standing.barred = record.iteration + 1
        self.people[old.index] = new
        self.unsure.add(old.index)

    def _sent(self) -> Ledger:
        total = self.buried.copy()
        for peer in self.people:
            _add(total, peer.net.sent)
        return total

    def _newest(self) -> Participant:
        return max((p for p in self.people if not p.behind), key=lambda p: (p.record.iteration, p.record.mass))

    def evaluate(self) -> Metrics:
        self.local.worker.load(self._newest().state.vectors["theta"])
        return self.local.task.evaluate(self.local.worker.module)

    def model_hash(self) -> bytes:
        return self._newest().state.hash

    def clip(self) -> float | None:
        return self._newest().state.scalars.get(CLIP)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = save_people(self.people)
        heads = save_heads(self.network, self.people[0].talk.key("head"), self.runner.run(self._time()))
        own = {"consumed": list(self.consumed.values()), "unsure": sorted(self.unsure), "heads": heads}
        return tensors, meta | own

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        restore_people(self.people, tensors, meta)
        restore_heads(self.network, self.people[0].talk.key("head"), self.runner.run(self._time()), meta["heads"])
        self.consumed, self.unsure = dict(enumerate(meta["consumed"])), set(meta["unsure"])

    def close(self) -> None:
        self.runner.close()


def _add(total: Ledger, more: Ledger) -> None:
    for name in Ledger.__slots__:
        setattr(total, name, getattr(total, name) + getattr(more, name))
