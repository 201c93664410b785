"""The same experiment with the real protocol on the virtual network: its messages, its votes, its catching up."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from marfl.byte_kinds import ByteKind
from marfl.config import Config
from marfl.dp.private_agreement import CLIP, PrivateAgreement, RecordAgreement, agreement_of, wire_terms
from marfl.errors import BrokenPromise, InputError, SyncError
from marfl.from_config import integers_of, smallest_sum_of, test_of, wire_of
from marfl.learn import LocalResult, Metrics, distill_in_groups
from marfl.learn.feedback_files import load_feedback, save_feedback
from marfl.learn.small_integers import IntegerUpdates, SmallIntegers
from marfl.learn.strategy import part_of
from marfl.learn.strategy_memory import FORGOTTEN, StrategyMemory
from marfl.net.base import PeerId, Traffic
from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import VirtualLoop
from marfl.plan.cost import Cost
from marfl.protocol.exchange import Contribution, Quantise
from marfl.protocol.fixed_point import abstains, can_carry
from marfl.protocol.meetings import Meetings, Prepare
from marfl.protocol.participant import ABANDONED, Outcome, Participant, genesis
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import VOID, Record, Roster, decode_record
from marfl.sim.churn import Participation
from marfl.sim.executor import Done, Executor, InProcess, Job, Matrices, Setup, make_executor
from marfl.sim.iteration import NOBODY, IterationResult
from marfl.sim.links import Links, links
from marfl.state import Snapshot
from marfl.techniques.technique import Technique
from marfl.wire.error_feedback import LOST

# When nobody ever dies, nobody ever has to give up waiting: slow links then cannot look like deaths.
PATIENT: dict[str, Any] = {
    "phase_timeout": 3600.0,
    "call_timeout": 600.0,
    "ready_timeout": 7200.0,
    "iteration_timeout": 1e6,
}

Tensors: TypeAlias = dict[str, Tensor]
Meta: TypeAlias = dict[str, Any]  # plain JSON values


class ProtocolWorld:
    """One `Participant` per peer, exactly as a real swarm runs them."""

    def __init__(self, config: Config, setup: Setup, technique: Technique) -> None:
        self.config, self.technique, self.local_work = config, technique, setup.local_work
        self.reason = "the real protocol on the virtual network"
        self.local = InProcess(setup, Matrices(*(torch.empty(0),) * 4))
        self.test = test_of(config, self.local.task)
        self.agreement = agreement_of(config, setup.local_work, self.local.worker.trainable)
        self.private = self.agreement if isinstance(self.agreement, PrivateAgreement) else None
        if isinstance(self.private, RecordAgreement):
            self.reason += f"; {self.local.records.way}"
        self.local.setup = replace(setup, private=self.private)
        if self.agreement.momentum == "local":
            raise InputError("momentum = local: runs with engine = bitwise; the protocol engine derives or sends it")
        wire = integers_of(config)
        self.small = SmallIntegers(self.agreement, wire, self.local.worker.trainable, config.overlap) if wire else None
        self.start = (self.small or self.agreement).start(self.local.worker.flat.clone())
        self.updates = [IntegerUpdates(self.small, config.seed, p) for p in range(config.peers)] if self.small else []
        remembers, trainable = self.agreement.strategy.remembers, self.local.worker.trainable
        self.memories = [StrategyMemory(trainable) for _ in range(config.peers)] if remembers else []
        self.length = self.start.vectors["theta"].numel()
        self.values = self.agreement.values(self.length)
        self.consumed = dict.fromkeys(range(config.peers), 0)
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.network = VirtualNetwork(config.seed, log=False)
        self.links = links(config.links, config.peers, config.seed) if config.links else None
        self.people = self._people()
        self.broken: asyncio.Future[InputError] | None = None  # why the strategy cannot go on, in an iteration
        self.executor: Executor | None = None  # of a cluster
        if config.cluster:
            self.executor = make_executor(self.local.setup, self.local.matrices, config)
        self.unsure: set[int] = set()  # they died or missed a decision: they do not know what was decided
        self.ahead: dict[int, Snapshot] = {}  # where the work began that peers have under way
        self.late: dict[int, Contribution] = {}  # what slow peers have learned and not yet brought
        self.buried = Traffic()  # what the dead had sent before they came back

    def _people(self) -> list[Participant]:
        config = self.config
        count = config.peers + self.technique.server  # FedAvg's server is one more peer, without data
        names = [f"peer{index}" for index in range(count)]
        terms = wire_terms(wire_of(config), self.agreement, self.length)
        self.wire = terms.wire
        chosen = {**self._patience(), **self.technique.protocol(config.peers), **terms._asdict()}
        chosen["wire_down"] = config.wire_down
        chosen["smallest_sum"] = smallest_sum_of(config)
        chosen |= {"liars": config.liars, "seniority": config.seniority, "alike": config.privacy.mode != "off"}
        chosen["sync_states"] = 1e9  # virtual time may stand still: whoever misses much would seem to ask too often
        chosen |= {"audit": config.audit, "on_fraud": config.on_fraud}
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

    def _advance(self, state: Snapshot, mean: Tensor, roster: Roster) -> Snapshot:
        if self.small is not None:
            return self.small.advance(state, mean, roster.weight, roster.contributions)
        try:
            return self.agreement.advance(state, mean, roster.contributions)
        except InputError as error:  # of a strategy: no peer can go on
            if self.broken is not None and not self.broken.done():
                self.broken.set_result(error)
            raise SyncError(str(error)) from error

    def step(self, iteration: int, who: Participation) -> IterationResult:
        step = IterationResult()
        begun = time.perf_counter()
        before = self._sent()
        clock = self.runner.run(self._time())
        self.runner.run(self._catch_up(who))
        newest = {peer: self.people[peer].state.version for peer in self.ahead}
        self.ahead = {peer: start for peer, start in self.ahead.items() if newest[peer] == start.version + 1}
        mine = self._contributions(iteration, self._without_the_unsure(who, step), step)
        step.sent = sum(contribution.weight > 0 for contribution in mine.values())
        step.ahead, began = frozenset(self.ahead), {peer: self.people[peer].state for peer in range(self.config.peers)}
        step.update_seconds = time.perf_counter() - begun
        begun = time.perf_counter()
        reaper = self._reaper(mine, who)
        dying = [peer for peer in self.people if peer.net.me in reaper.dies]
        saved = {peer.net.me: (peer.state, peer.record, peer.standing.kept) for peer in dying}
        outcomes = self.runner.run(self._iterate(mine, reaper))
        step.aggregate_seconds = time.perf_counter() - begun
        step.bytes = self._sent().minus(before)
        step.seconds = self.runner.run(self._time()) - clock
        self._note(outcomes, mine, step)
        for name in reaper.dead:
            self._revive(name, *saved[name])
        if self.config.overlap:  # who was in the exchange has trained on meanwhile; who died has nothing under way
            self.ahead = {peer: began[peer] for peer in step.members if peer not in self.unsure}
        return step

    async def _time(self) -> float:
        return self.network.time

    async def _catch_up(self, who: Participation) -> None:
        """Bring everybody who takes part to the agreed state; whoever died looks for it, too, to vote at least."""
        active = who.updaters | who.aggregators
        behind = [p for p in self.people if p.index in self.unsure or (p.index in active and p.behind)]
        caught = await asyncio.gather(*(peer.catch_up() for peer in behind))
        self.unsure = {peer.index for peer, well in zip(behind, caught, strict=True) if not well}
        if self.unsure and not self.config.churn.death:
            raise BrokenPromise("a peer could not catch up although nobody failed")

    def _without_the_unsure(self, who: Participation, step: IterationResult) -> Participation:
        late = self.unsure & (who.updaters | who.aggregators)
        step.checks += [f"peer {peer}: could not catch up, so it sits out" for peer in sorted(late)]
        return replace(who, updaters=who.updaters - late, aggregators=who.aggregators - late) if late else who

    def _contributions(self, iteration: int, who: Participation, step: IterationResult) -> dict[int, Contribution]:
        """Local updates, one peer at a time: only those that reach the aggregation need to be computed."""
        contributions = {
            peer: replace(self.late.pop(peer), base=self.people[peer].state.hash, age=age)
            for peer, age in sorted(who.ages.items())
            if peer in self.late
        }
        step.checks += [f"peer {peer}: its update is {who.ages[peer]} iterations late" for peer in contributions]
        every = self.config.churn.slow or self.config.local
        trains = who.updaters if every else who.updaters & who.aggregators
        elsewhere = self._on_the_cluster(iteration, sorted(trains)) if self.executor and trains else {}
        for peer in sorted(trains):
            state = self.people[peer].state
            update = torch.empty(1, self.values, dtype=torch.int64 if self.private else None)
            start = self.ahead.get(peer, state)
            theta, momentum = start.vectors["theta"][None], start.vectors["momentum"][None]
            self.local.matrices = Matrices(theta, momentum, update, torch.empty(0))
            self.local.agreed, self.local.own = {0: part_of(start.vectors)}, self._remembered(peer, step)
            job = Job(peer, iteration, self.consumed[peer], 0, 0, 0, state.scalars.get(CLIP, 0.0))
            if peer in elsewhere:
                done, update[0] = elsewhere[peer]
            else:
                done = self.local.update([job], in_place=False)[0]
            if peer not in who.aggregators and not self.config.churn.slow:
                continue  # it only trained what stays at home
            quantise = self._quantise(peer, update[0], step)
            carried = quantise is not None or not self.small
            if not done.finite or not carried or not can_carry(self.people[peer].settings.wire, update[0]):
                step.checks.append(f"peer {peer}: {abstains(self.people[peer].settings.wire)}")
                continue
            if math.isfinite(done.loss) and peer in who.aggregators:
                step.losses.append(done.loss)
            if self.memories:
                news = update[0, -self.length :]
                self.memories[peer].sent(state.hash, state.version + 1, self.local.own.get(peer), news)
            prepare = self._prepare(job, theta[0], update[0], step)
            mine = Contribution(state.hash, update[0], fewest=who.fewest, prepare=prepare, quantise=quantise)
            (contributions if peer in who.aggregators else self.late)[peer] = mine
        for peer in who.updaters:
            self.consumed[peer] += self.local_work.consumes(iteration)
        helpers = who.aggregators - who.updaters - who.ages.keys()
        if self.technique.server and contributions:
            helpers = helpers | {self.config.peers}
        for peer in helpers:
            contributions[peer] = Contribution(self.people[peer].record.hash, torch.zeros(self.values), 0.0)
        return contributions

    def _remembered(self, peer: int, step: IterationResult) -> dict[int, Tensor]:
        """What this peer remembers for the strategy, if anything."""
        if not self.memories:
            return {}
        standing, memory = self.people[peer].standing, self.memories[peer]
        lost = memory.memory.lost
        memory.settle({**standing.history, standing.record.iteration: standing.record}, standing.net.me)
        own = memory.current(standing.chain)
        if memory.memory.lost > lost:
            step.checks.append(f"peer {peer}: {FORGOTTEN}")
        return {} if own is None else {peer: own}

    def _on_the_cluster(self, iteration: int, peers: Sequence[int]) -> dict[int, tuple[Done, Tensor]]:
        """The local updates of all these peers at once, on the cluster."""
        states = {peer: self.people[peer].state for peer in peers}
        starts = {state.hash: state for state in states.values()}  # nearly always one
        rows = {hash: row for row, hash in enumerate(starts)}
        theta, momentum = (
            torch.stack([state.vectors[name] for state in starts.values()]) for name in ("theta", "momentum")
        )
        updates = torch.empty(len(peers), self.values, dtype=torch.int64 if self.private else None)
        matrices = Matrices(theta, momentum, updates, torch.empty(0))
        assert self.executor is not None
        self.executor.matrices = matrices
        jobs = []
        for out, (peer, state) in enumerate(states.items()):
            row, bound = rows[state.hash], state.scalars.get(CLIP, 0.0)
            jobs.append(Job(peer, iteration, self.consumed[peer], row, row, out, bound))
        return {item.peer: (item, updates[item.out]) for item in self.executor.update(jobs, in_place=False)}

    def _quantise(self, peer: int, update: Tensor, step: IterationResult) -> Quantise | None:
        """How a peer makes integers of its update, where few bits travel; None also for what they cannot carry."""
        if not self.small:
            return None
        standing, updates = self.people[peer].standing, self.updates[peer]
        lost = updates.memory.lost
        updates.settle(standing.decisions)
        sender = updates.sender(standing.state, standing.chain)
        if updates.memory.lost > lost:
            step.checks.append(f"peer {peer}: {LOST}")
        return partial(updates.quantise, sender) if sender.can_send(update) else None

    def _prepare(self, job: Job, theta: Tensor, update: Tensor, step: IterationResult) -> Prepare | None:
        """How a peer learns from its groups before it brings its update, where this iteration distils."""
        if not self.local_work.in_groups(job.iteration):
            return None
        loader = self.local.loader(job.peer)
        delta, momentum = update.view(2, -1)

        async def distill_once(state: LocalResult, models: list[Tensor], round: int) -> LocalResult:
            worker = self.local.worker
            distilled = self.local_work.distill_round(worker, loader, state, models, job.iteration, job.consumed, round)
            if distilled.undone:
                step.checks.append(f"peer {job.peer}: distillation led to NaN or infinity and was undone")
            return distilled.result

        async def prepare(meetings: Meetings) -> Tensor:
            before = LocalResult(theta, delta, momentum, 0.0, 0, True)
            after = await distill_in_groups(meetings, before, distill_once)
            for round, name in meetings.missed:
                step.checks.append(f"peer {job.peer}, round {round + 1}: no model of {name} to learn from")
            return self.agreement.outgoing(after)

        return prepare

    def _reaper(self, mine: dict[int, Contribution], who: Participation) -> Reaper:
        """Who of the contributors dies in which phase of the exchange."""
        if not mine or not who.dies:
            return Reaper({})
        rounds = self.technique.cost(len(mine), self.values).phases
        return Reaper({f"peer{peer}": when for peer, when in who.deaths(rounds).items() if peer in mine})

    async def _iterate(self, mine: dict[int, Contribution], reaper: Reaper) -> dict[int, Outcome]:
        """One iteration of everybody; the dead have no outcome."""
        self.network.intercept = reaper if reaper.dies else None
        lives = [self.network.spawn(p.net.me, p.run_iteration(mine.get(p.index))) for p in self.people]
        ends = await self._all_of(lives)
        self.network.intercept = None
        outcomes = {}
        for peer, end in zip(self.people, ends, strict=True):
            if isinstance(end, BaseException):
                if peer.net.me not in reaper.dead:
                    raise end
            else:
                outcomes[peer.index] = end
        return outcomes

    async def _all_of(self, lives: Sequence[asyncio.Task[Outcome]]) -> list[Outcome | BaseException]:
        """How everybody ended; a strategy that cannot go on ends it for all of them."""
        self.broken = asyncio.get_running_loop().create_future()
        either: set[asyncio.Future[Any]] = {asyncio.gather(*lives, return_exceptions=True), self.broken}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.broken.done():
            for life in lives:
                life.cancel()
            raise self.broken.result()
        return await asyncio.gather(*lives, return_exceptions=True)

    def _note(self, outcomes: dict[int, Outcome], mine: dict[int, Contribution], step: IterationResult) -> None:
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
            step.checks.append(f"{len(hashes)} lineages: one of them will win")
        self.unsure |= outcomes.keys() - committed.keys()
        index = {peer.net.me: peer.index for peer in self.people}
        present = next((outcome.present for outcome in committed.values()), ())
        step.members = tuple(index[name] for name in present if index[name] < self.config.peers)
        step.arrived = sum(mine[peer].weight > 0 for peer in step.members)
        step.bits = next((outcome.bits for outcome in committed.values() if outcome.bits), None)
        abandoned = {outcome.iteration for outcome in committed.values() if outcome.exchange == VOID}
        if abandoned:
            step.checks.append(ABANDONED if step.sent else NOBODY)
            step.arrived = step.arrived or self._seen(abandoned)

    def _seen(self, abandoned: set[int]) -> int:
        """Shares of noise in a total whose masks came off before its iteration was abandoned: somebody has seen it."""
        seen = (peer.helped[t] for peer in self.people for t in abandoned if t in peer.helped)
        return min((roster.contributions for roster in seen), default=0)

    def _revive(self, name: PeerId, state: Snapshot, record: Record, proofs: bytes) -> None:
        """A dead peer comes back with what it had saved, and never votes again in the iteration it died in."""
        old = next(peer for peer in self.people if peer.net.me == name)
        self.buried = self.buried.plus(old.net.sent)
        net = self.network.join(name)
        new = Participant(net, old.settings, old.index, old.standing.layout, state, record, self._advance)
        new.standing.barred = record.iteration + 1
        new.standing.restore(proofs)
        self.people[old.index] = new
        self.unsure.add(old.index)

    def _sent(self) -> Traffic:
        total = self.buried
        for peer in self.people:
            total = total.plus(peer.net.sent)
        return total

    def _newest(self) -> Participant:
        return max((p for p in self.people if not p.behind), key=lambda p: (p.record.iteration, len(p.record.electors)))

    def evaluate(self) -> Metrics:
        if self.config.local:
            return self.local.test_at_home(self._newest().state.vectors["theta"])
        self.local.worker.load(self._newest().state.vectors["theta"])
        return self.test(self.local.worker.module)

    def model_hash(self) -> bytes:
        return self._newest().state.hash

    def clip(self) -> float | None:
        return self._newest().state.scalars.get(CLIP)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = save_people(self.people)
        heads = save_heads(self.network, self.people[0].talk.key("head"), self.runner.run(self._time()))
        kept = [each.memory for each in self.updates] + [each.memory for each in self.memories]  # of one kind, or none
        if kept:
            left, rows = save_feedback(kept)
            tensors, meta = tensors | left, meta | {"left": rows}
        tensors |= {f"home.{peer}": home for peer, home in self.local.homes.items()}
        begun = {start.hash.hex(): start for start in self.ahead.values()}
        tensors |= {f"ahead.{digest}.{name}": v for digest, each in begun.items() for name, v in each.vectors.items()}
        meta["ahead"] = [[peer, start.hash.hex(), start.version] for peer, start in self.ahead.items()]
        tensors |= {f"late.{peer}": mine.delta for peer, mine in self.late.items()}
        own = {"consumed": list(self.consumed.values()), "unsure": sorted(self.unsure), "heads": heads}
        return tensors, meta | own

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        restore_people(self.people, tensors, meta)
        restore_heads(self.network, self.people[0].talk.key("head"), self.runner.run(self._time()), meta["heads"])
        self.consumed, self.unsure = dict(enumerate(meta["consumed"])), set(meta["unsure"])
        self.ahead = {
            peer: Snapshot(version, _vectors(tensors, f"ahead.{digest}"), {})
            for peer, digest, version in meta.get("ahead", ())
        }
        self.local.homes = {int(name.removeprefix("home.")): t for name, t in tensors.items() if name[:5] == "home."}
        late = {int(name.removeprefix("late.")): t for name, t in tensors.items() if name.startswith("late.")}
        self.late = {peer: Contribution(b"", delta) for peer, delta in late.items()}
        keepers: list[IntegerUpdates | StrategyMemory] = [*self.updates, *self.memories]
        for keeper, row in zip(keepers, meta.get("left", ()), strict=True):
            keeper.memory = load_feedback(row, tensors)

    def close(self) -> None:
        if self.executor is not None:
            self.executor.close()
        self.runner.close()


# --- deaths in the midst of an exchange: how long the others wait, and who dies when ---


def patience(given: Links | None, cost: Cost, largest: int) -> dict[str, Any]:
    """Time-outs for peers that may die: twice what the slowest link needs for all that the busiest peer carries.

    `largest` is the most that one message of a later attempt may hold, in bytes.
    """
    phase = 4.0
    if given is not None:
        slowest = min(given.up.min(), given.down.min())
        phase += float(2 * max(*cost.bytes_sent, *cost.bytes_received, largest) / slowest + 8 * given.latency.max())
    return {
        "phase_timeout": phase,
        "call_timeout": phase,
        "ready_timeout": 4 * phase,
        "minority_timeout": 20 * phase,
        "iteration_timeout": 100 * phase,
    }


class Reaper:
    """Crashes peers when their time has come: plug into `VirtualNetwork.intercept`.

    A peer that dies in round r (from 0) has sent all that it sends in r phases, and nothing of the next one.
    """

    def __init__(self, dies: Mapping[PeerId, int]) -> None:
        self.dies = dict(dies)
        self.dead: list[PeerId] = []
        self._begun: dict[PeerId, set[tuple[int, str, int]]] = defaultdict(set)

    def __call__(self, network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        peer, tag = event.source, event.tag
        if peer not in self.dies or event.op != "send" or tag.kind is not ByteKind.PAYLOAD:
            return
        self._begun[peer].add((tag.attempt, tag.channel, tag.round))
        if len(self._begun[peer]) > self.dies[peer]:
            del self.dies[peer]
            self.dead.append(peer)
            delivery.copies = 0
            network.crash(peer)


# --- what virtual peers hold between two iterations, as a checkpoint: each state once, however many hold it ---


def save_people(people: Sequence[Participant]) -> tuple[Tensors, Meta]:
    """States, records and last mean updates of all peers."""
    tensors: Tensors = {}
    states: dict[bytes, Meta] = {}
    records: dict[str, str] = {}  # by hash, those of the last commits
    rows = []
    for peer in people:
        state = peer.state
        if state.hash not in states:
            tensors |= {f"{state.hash.hex()}.{name}": vector for name, vector in state.vectors.items()}
            states[state.hash] = {"version": state.version, "scalars": dict(state.scalars)}
        row: Meta = {"state": state.hash.hex(), "record": peer.record.encoded.hex(), "barred": peer.standing.barred}
        row["history"] = [record.hash.hex() for record in peer.history.values()]
        row["before"] = peer.standing.before.encoded.hex()
        proofs = peer.standing.kept
        row["proofs"] = hashlib.sha256(proofs).hexdigest()
        tensors[f"proofs.{row['proofs']}"] = torch.frombuffer(bytearray(proofs), dtype=torch.uint8)
        records |= {record.hash.hex(): record.encoded.hex() for record in peer.history.values()}
        mean = peer.standing.last_mean
        if mean is not None and mean[1] is not None:
            row["mean_from"] = mean[0].hex()
            tensors[f"{state.hash.hex()}.mean.{row['mean_from']}"] = mean[1]
        rows.append(row)
    kept = {digest.hex(): state for digest, state in states.items()}
    return tensors, {"people": rows, "states": kept, "records": records}


def restore_people(people: Sequence[Participant], tensors: Tensors, meta: Meta) -> None:
    """Give peers that have just begun what `save_people` kept."""
    states = {
        digest: Snapshot(kept["version"], _vectors(tensors, digest), kept["scalars"])
        for digest, kept in meta["states"].items()
    }
    records = {digest: decode_record(bytes.fromhex(data)) for digest, data in meta["records"].items()}
    for peer, row in zip(people, meta["people"], strict=True):
        standing = peer.standing
        standing.history = {records[digest].iteration: records[digest] for digest in row["history"]}
        standing.state, standing.record = states[row["state"]], decode_record(bytes.fromhex(row["record"]))
        standing.barred = row["barred"]
        if "proofs" in row:
            standing.before = decode_record(bytes.fromhex(row["before"]))
            standing.restore(tensors[f"proofs.{row['proofs']}"].numpy().tobytes())
        if "mean_from" in row:
            mean = tensors[f"{row['state']}.mean.{row['mean_from']}"]
            standing.last_mean = (bytes.fromhex(row["mean_from"]), mean)


def _vectors(tensors: Tensors, digest: str) -> Tensors:
    found = {name.removeprefix(f"{digest}."): t for name, t in tensors.items() if name.startswith(f"{digest}.")}
    return {name: vector for name, vector in found.items() if not name.startswith("mean.")}


def save_heads(network: VirtualNetwork, key: str, now: float) -> dict[str, tuple[str, float]]:
    """Where the DHT says that the newest state is, and for how much longer."""
    return {peer: (value.hex(), until - now) for peer, (value, until) in network.dht[key].items()}


def restore_heads(network: VirtualNetwork, key: str, now: float, heads: dict[str, tuple[str, float]]) -> None:
    network.dht[key] = {peer: (bytes.fromhex(value), now + left) for peer, (value, left) in heads.items()}
