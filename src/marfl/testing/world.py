"""A whole swarm on the virtual network, with faults, and the promises it must keep whatever happens.

One seed makes one world: how many peers, which exchange, what strikes whom and when. `World.run` plays it and returns
a `Report`; `Report.broken` lists every broken promise. The same seed gives the same report, to the bit.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from marfl.errors import BrokenPromise, InputError, SyncError
from marfl.net.base import PeerId
from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.ballot import Way, choose, quorum
from marfl.protocol.commits import began_apart
from marfl.protocol.exchange import Contribution, replay_mean
from marfl.protocol.incarnations import BITS, SECOND
from marfl.protocol.instance import Accepted, Instance, passed_by
from marfl.protocol.messages import LEFT
from marfl.protocol.participant import Outcome, Participant, genesis
from marfl.protocol.pedigree import Kinship, Pedigree, compare
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import LEAST_PIECE, PIECE, VOID, Record, Roster, ranked
from marfl.protocol.standing import Diary, Standing
from marfl.state import Snapshot
from marfl.testing.faults import (
    FIRST_FAULTS,
    IDLE,
    SLOW_LENGTH,
    WITNESS,
    Backup,
    Conditions,
    Fault,
    Strike,
    combinations,
    conditions,
    delayed,
    schedule,
)
from marfl.testing.injector import Hooks, Injector
from marfl.testing.lying_peer import Liar
from marfl.testing.promises import (
    Votes,
    agreed,
    bounded,
    certain_sums,
    counted_once,
    fragile,
    honest,
    in_company,
    modest,
    nobody_left_out,
    nobody_wronged,
    nothing_lost,
    one_certain_commit,
    one_commit,
    replayed,
    said,
    unhindered,
    unmasked_once,
)

LAYOUT = hashlib.sha256(b"soak").digest()
END = 1200.0  # virtual seconds: most worlds are done by 100, and one that is not done by then is stuck


def advance(state: Snapshot, mean: torch.Tensor, roster: Roster) -> Snapshot:
    """The simplest agreed state: one vector, moved by the mean update."""
    return Snapshot(state.version + 1, {"theta": state.vectors["theta"] + mean}, {})


Log = dict[bytes, tuple[int, int]]  # the states whose successor a peer voted on: in which life, and which iteration
Saved = tuple[Snapshot, Record, bytes, Log, int]  # a backup: state, record, its proof, log of votes, lives until then


@dataclass
class Decision:
    """One commit, as one peer saw it."""

    time: float
    peer: PeerId
    record: Record


@dataclass
class Report:
    """What happened in one world, and which promises it broke."""

    seed: int
    exchange: str
    peers: int
    hits: Counter[tuple[Fault, str]]
    light: bool  # a connected majority lived, and at most 20 % were faulty
    attempted: int  # iterations that fault-free peers began
    committed: int
    broken: list[str]
    fingerprint: bytes  # of everything that was decided, for exact replays


def _pedigree(me: Participant) -> Pedigree:
    return me.standing.proofs.chronicle.head.pedigree


def _winning(live: list[Participant]) -> Participant:
    """Whose chain of records stays, among these."""
    best = live[0]
    for me in live[1:]:
        if compare(_pedigree(best), _pedigree(me)) in (Kinship.BEHIND, Kinship.LOSES):
            best = me
    return best


def _by_beginning(live: list[Participant]) -> list[list[Participant]]:
    """Peers by the beginning that they have in common: those who began apart stay apart once they are not young."""
    groups: list[list[Participant]] = []
    for me in live:
        mine = me.standing.proofs.chronicle.head.pedigree
        near = [some for some in groups if not began_apart(some[0].standing.proofs.chronicle.head.pedigree, mine)]
        if near:
            near[0].append(me)
        else:
            groups.append([me])
    return groups


class Watcher(Diary):
    """Writes down a peer's votes, decisions and losses, and refuses to go on where a real peer would."""

    keeps = True

    def __init__(self, world: World, name: PeerId, incarnation: int) -> None:
        self.world, self.name, self.incarnation = world, name, incarnation

    def knows(self, iteration: int) -> bool:
        known = max((iteration for _, iteration in self.world.cast.get(self.name, {}).values()), default=0)
        return iteration <= known

    def revoke(self, record: Record, *, cast_here: bool) -> None:
        """As a real peer, refuse to go on where others have a vote that is not on the disk."""
        self.revoked = f"{self.name}: a vote up to iteration {record.iteration} that it does not know of"

    def entering(self, standing: Standing) -> None:
        """Votes are on the disk before they are cast, as those of a real peer."""
        if self.revoked:
            raise InputError(self.revoked)
        cast, iteration = self.world.cast.setdefault(self.name, {}), standing.record.iteration + 1
        life, _ = cast.setdefault(standing.record.hash, (standing.incarnation, iteration))
        standing.barred = iteration if life != standing.incarnation else -1
        self._note_certain(standing)

    def _note_certain(self, standing: Standing) -> None:
        """Where somebody lies, what counts is what an honest peer knows to be certified."""
        record, world = standing.record, self.world
        if standing.proofs.settled and record.roster is not None and self.name != world.liar:
            world.certain.setdefault((record.lineage, record.iteration), {})[record.encoded] = record
            world.keep(record)

    def voted(self, standing: Standing, result: Accepted) -> None:
        votes = self.world.votes.setdefault((result.roster.lineage, result.hash), {})
        votes[self.name] = votes.get(self.name, False) or result.state is not None

    def decided(self, standing: Standing, instance: Instance, before: Record) -> None:
        record = standing.record
        self._note_certain(standing)
        if self.world.liar is not None:
            return  # it may have the liar's word alone
        self.world.broken += in_company(self.world, before, record)
        if record.encoded not in {decision.record.encoded for decision in self.world.decisions}:
            liars = self.world.settings.liars
            self.world.broken += agreed(self.world.votes, instance, record, liars)  # of its leader, who knows them
        self.world.decisions.append(Decision(self.world.network.time, self.name, record))

    def installed(self, standing: Standing, before: Record) -> None:
        self._note_certain(standing)
        if self.world.liar is None:
            self.world.broken += said(self.world, standing, before)

    def helped(self, roster: Roster) -> None:
        self.world.unmasked.setdefault(roster.iteration, {})[roster.digest] = roster


class World:
    """One swarm, one schedule of faults. `piece`: the bytes of a message, where the seed is not to choose them.

    `classic`: only the faults and conditions that seeds stood for at first, so that a world found then can be played.
    `calm`: nothing fails and nobody lies, though some are slow and some join late; all else is the seed's.
    `carries`: what somebody learned too late it brings to a later iteration.
    """

    def __init__(
        self, seed: int, wire: str = "fp32", piece: int | None = None, *, classic: bool = False, calm: bool = False,
        carries: bool = False,
    ) -> None:  # fmt: skip
        self.seed, self.calm, self.carries = seed, calm, carries
        self.random = Random(seed)
        self.around = Conditions(seed) if classic else conditions(seed)
        if calm or carries:
            self.around = replace(self.around, slowest=5.0 if carries else 1.5)  # who carries nothing is waited for
        faults = FIRST_FAULTS if classic else tuple(Fault)
        firsts = combinations(wire, faults)
        first = firsts[seed % len(firsts)]  # every seed's first fault is another one
        size = self.random.choice([5, 5, 6, 7, 8, 9, 10, 11, 12, 16])
        self.size = self.around.size or size
        self.names = {f"peer{i:02}": i for i in range(self.size)}
        # Where the exchange itself is struck everybody has something to send: one value for each of 16 peers.
        sends = first[1] in ("reduce", "gather")
        self.length = self.random.choice([16, 40] if sends else [1, 3, 7, 16, 40])
        self.around = replace(self.around, watching=0.0, idle=0.0, empty=frozenset()) if sends else self.around
        self.settings = Settings(
            run=f"soak{seed}",
            exchange=first[2],
            group_size=self.random.choice([2, 3, 3, 4, 5]),
            on_minority=self.random.choice(["fork", "fork", "wait"]),
            wire=wire,
        )
        strikes = schedule(self.random, list(self.names), wire, first, faults)
        strikes = delayed(seed, self.around, strikes, list(self.names), wire, first[2])
        strikes = [strike for strike in strikes if strike.fault is Fault.LATE_JOINER] if calm else strikes
        if any(strike.fault is Fault.SLOW_LINK for strike in strikes):
            self.length = SLOW_LENGTH
        self.settings = replace(self.settings, piece=piece or self._piece(), liars=0 if classic else self._liars())
        self.liar = None if classic or calm else self._who_lies(strikes)
        if self.liar is not None and Random(f"audits of {seed}").random() < 0.5:  # whoever is honest could be wronged
            self.settings = replace(self.settings, audit=1.0)
        self.lies: Liar | None = None
        self.certain: dict[tuple[bytes, int], dict[bytes, Record]] = {}  # by lineage and iteration, as the honest know
        self.start = Snapshot(0, {"theta": torch.zeros(self.length)}, {})
        self.record = genesis(self.start, tuple(self.names.items()))
        self.network = VirtualNetwork(seed, Link(latency=0.01, jitter=0.01))
        self.people: dict[PeerId, Participant] = {}
        self.lives: Counter[PeerId] = Counter()
        self.held: dict[PeerId, dict[int, bytes]] = {}
        self.saved: dict[PeerId, list[Saved]] = {}
        self.cast: dict[PeerId, Log] = {}
        self.forgetful: set[PeerId] = set()  # who came back without its last votes
        self.faulty: set[PeerId] = set()
        self.latecomers: set[PeerId] = set()
        self.votes: Votes = {}
        self.decisions: list[Decision] = []
        self.unmasked: dict[int, dict[bytes, Roster]] = {}  # by iteration: whose masks somebody helped to take off
        self.outcomes: list[tuple[PeerId, float, float, Outcome]] = []
        self.calm_at = 0.0  # when the last lasting fault ends
        self.stormy = False  # nobody's links were well for a while
        self.records: dict[bytes, Record] = {self.record.hash: self.record}  # of every committed state
        self._of_lineage: dict[tuple[bytes, bytes], Record] = {}  # two lineages may come to the same state
        self.lost: list[tuple[PeerId, int]] = []  # whose update came too late for an iteration and is in no other
        self.broken: list[str] = []
        polite = Random(f"goodbyes of {seed}").random() < 0.3  # dice of its own, as for pieces
        farewell = self._farewell if polite else None
        hooks = Hooks(
            self._restart, self._newcomer, self._rival, self.faulty.add, self._lasts, self._storm, farewell
        )  # fmt: skip
        self.injector = Injector(strikes, Random(seed + 1), hooks, masked=wire != "fp32")
        self.network.intercept = self._intercept

    def _intercept(self, network: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        self.injector(network, event, delivery)
        if self.lies is not None and event.source == self.liar:
            self.lies.tamper(event, delivery)
        elif self.lies is not None and event.dest == self.liar:
            self.lies.overhear(event, delivery)

    def _piece(self) -> int:
        """In every second world slices travel in pieces: a quarter of the vector, or ever less of it.

        Dice of its own: whatever else a seed stands for stays the same.
        """
        cuts = Random(f"pieces of {self.seed}").choice([0, 0, 0, 4, 12, 40])
        return max(LEAST_PIECE, 4 * self.length // cuts) if cuts else PIECE

    def _liars(self) -> int:
        """In two of three worlds quorums bear a liar. Dice of its own, as for pieces."""
        return Random(f"liars of {self.seed}").choice([0, 1, 1])

    def _who_lies(self, strikes: list[Strike]) -> PeerId | None:
        """In one of five worlds whose quorums bear it, a peer lies; whoever forgets its votes would be one more."""
        dice = Random(f"lies of {self.seed}")
        if not self.settings.liars or any(strike.fault is Fault.OLD_BACKUP for strike in strikes):
            return None
        return dice.choice(sorted(self.names)) if dice.random() < 0.2 else None

    # --- what only the world can do for the injector ---

    def _lasts(self, until: float) -> None:
        self.calm_at = max(self.calm_at, until)

    def _storm(self) -> None:
        self.stormy = True

    def _restart(self, name: PeerId, after: float, backup: Backup) -> None:
        self._lasts(self.network.time + after)
        asyncio.get_running_loop().call_later(after, self._come_back, name, backup)

    def _farewell(self, name: PeerId) -> None:
        if self.network.alive(name):
            self.network.spawn(name, self.people[name].readiness.announce(LEFT))

    def _come_back(self, name: PeerId, backup: Backup) -> None:
        """With the last checkpoint, or with an old one; then the log of votes may be an old one as well."""
        if self.network.alive(name):
            return
        saved = self.saved.get(name, [(self.start, self.record, b"", {}, 0)])
        old = backup is not Backup.LAST
        dice = Random(f"backup of {name} of {self.seed}")
        state, record, proofs, votes, lives = dice.choice(saved) if old else saved[-1]
        if backup is Backup.WHOLE:
            self.cast[name], self.lives[name] = dict(votes), lives
            self.forgetful.add(name)
        me = self._start(name, self.names[name], state, record)
        if proofs:
            me.standing.restore(proofs)

    def _newcomer(self) -> None:
        name = f"peer{len(self.names):02}"
        self.names[name] = len(self.names)
        self.latecomers.add(name)
        self._lasts(self.network.time)
        self._start(name, self.names[name], self.start, self.record)

    def _rival(self, name: PeerId, iteration: int) -> None:
        me = self.people[name]
        instance = me.instance
        rank = instance.rank(name) if instance else None
        if instance is None or rank is None or not instance.electors or not self.network.alive(name):
            return
        if me.standing.barred == instance.iteration:
            return  # it has voted in an earlier life: only a liar would lead now
        self.network.spawn(name, me.leader.lead(instance, instance.next_attempt(rank)))

    # --- playing ---

    def _start(self, name: PeerId, index: int, state: Snapshot, record: Record) -> Participant:
        net = self.network.join(name)
        me = Participant(net, self.settings, index, LAYOUT, state, record, advance)
        me.standing.carries = self.carries
        self.lives[name] += 1
        me.standing.keep(Watcher(self, name, self.lives[name] << BITS))
        self.people[name] = me
        if name == self.liar:
            self.lies = Liar(me, Random(f"what {name} says in life {self.lives[name]} of {self.seed}"))
            self.network.spawn(name, self.lies.live())
        self.network.spawn(name, self._live(me))
        return me

    def contribution(self, index: int, record: Record) -> Contribution:
        """A peer's update is a function of who it is and which state it starts from: so commits can be replayed."""
        key = hashlib.sha256(record.hash + index.to_bytes(4)).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:6]))
        weight = 1.0 if key[6] < 160 else (0.25 if key[6] < 220 or index == 0 else 0.0)
        if self.around.part(index, record.iteration + 1) == IDLE:
            weight = 0.0
        return Contribution(record.hash, torch.randn(self.length, generator=generator), weight)

    def watches(self, index: int, iteration: int) -> bool:
        """Whether a peer only votes in this iteration."""
        return self.around.part(index, iteration) == WITNESS

    async def _live(self, me: Participant) -> None:
        """Until it is killed, or finds that it has lost its votes: then it ends with one line, as a real peer does."""
        try:
            await self._iterate(me)
        except InputError as error:
            if me.net.me not in self.forgetful and me.net.me != self.liar:
                self.broken.append(f"refuses to go on, though it has its votes: {error}")
            self.network.crash(me.net.me)

    async def _iterate(self, me: Participant) -> None:
        """What a real peer's main loop does: catch up when needed (and after a restart), train, aggregate, save."""
        await self._catch_up(me)
        while True:
            next_one = me.record.iteration + 1
            watches = self.watches(me.index, next_one)
            if (me.behind and not watches) or me.record.hash == self.record.hash:
                await self._catch_up(me)
            if me.record.iteration + 1 != next_one:
                continue
            if not me.behind or watches:
                self._save(me)
                mine = self.contribution(me.index, me.record)
                training = (4.0 + abs(float(mine.delta[0]))) * self.around.pace(me.index)
                training += self.injector.straggles(self.network, me.net.me, next_one)
                if self.carries:
                    me.talk.aside(me.readiness.say_how_long(training))
                await me.net.sleep_until(me.net.now() + training)
                begun = self.network.time
                self._note_held(me)  # others may have gone on while it trained
                outcome = await self._bring(me, None if watches else mine)
                self.outcomes.append((me.net.me, begun, self.network.time, outcome))
                self.broken += honest(me, outcome) if me.net.me != self.liar else ()
                if outcome.status == "committed" and (outcome.holds or watches):
                    self._save(me)
                    continue
            await self._catch_up(me)
            await me.net.sleep_until(me.net.now() + 0.5)

    async def _bring(self, me: Participant, mine: Contribution | None) -> Outcome:
        """Take part; and what came too late goes to a later iteration, once, where peers do that."""
        learned = me.record if mine is None or mine.base == me.record.hash else self.records[mine.base]
        outcome = await me.run_iteration(mine)
        if mine is None or not mine.weight or outcome.status == "undecided":
            return outcome
        if outcome.status == "stale" and me.may_carry(mine):
            me.discarded = 0
            await self._catch_up(me)
            if not me.behind and not me.discarded:
                late = replace(mine, base=me.record.hash, age=me.record.iteration - learned.iteration)
                outcome = await me.run_iteration(late)
        if outcome.status == "stale" and me.net.me in self.well:
            self.lost.append((me.net.me, outcome.iteration))
        return outcome

    async def _catch_up(self, me: Participant) -> None:
        try:
            await me.catch_up()
        except SyncError as error:
            raise BrokenPromise(f"catch-up raised {error}") from error

    def _save(self, me: Participant) -> None:
        """The checkpoint: written before each iteration begins."""
        if not me.behind:
            log, lives = dict(self.cast.get(me.net.me, {})), self.lives[me.net.me]
            proofs = me.standing.kept
            self.saved.setdefault(me.net.me, []).append((me.state, me.record, proofs, log, lives))
        self._note_held(me)

    def _note_held(self, me: Participant) -> None:
        if not me.behind or self.watches(me.index, me.record.iteration):  # it knows the model that it did not ask for
            # Later ones were of a lighter lineage, which it has given up.
            before = {t: h for t, h in self.held.get(me.net.me, {}).items() if t < me.record.iteration}
            self.held[me.net.me] = before | {me.record.iteration: me.record.hash}

    async def _play(self) -> None:
        asyncio.get_running_loop().set_task_factory(self._watched_task)
        for name, index in list(self.names.items()):
            self._start(name, index, self.start, self.record)
        self._set_clocks()
        target = None
        while self.network.time < END:
            await asyncio.sleep(1.0)
            live = [me for name, me in self.people.items() if self.network.alive(name) and name != self.liar]
            # Who is not alone waits for its electors before it follows a lineage that few of them founded.
            founded = any(_pedigree(me).foundings for me in live)
            calm = self.network.time >= self.calm_at + founded * self.settings.minority_timeout / 2
            if not live and calm:
                self.broken.append("nobody lives")
                return
            if not live:
                continue  # a power cut after another: somebody is still to come back
            head = _winning(live).record
            quiet = calm and not self._still_to_come(head.iteration)
            if target is None and quiet:
                target = head.iteration + (8 if self.calm else 3)  # the one under way may have suffered; then two
            if target is not None and not quiet:
                target = None
            settled = target is not None and all(self._settled(some, target) for some in _by_beginning(live))
            if settled or self.broken or (calm and self._waits(live, head)):
                return
        where = {me.net.me: me.record.iteration for name, me in self.people.items() if self.network.alive(name)}
        self.broken.append(f"no agreement by the virtual deadline: iterations {where}")

    def _set_clocks(self) -> None:
        dice = Random(f"rates of {self.seed}")
        for name in self.names if self.around.clocks else ():
            self.network.skew(name, rate=dice.uniform(0.98, 1.02), offset=dice.uniform(-1e4, 1e4))
        self.injector.set_clocks(self.network)

    def _watched_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """No task of anybody may end with an exception: where nobody awaits it, it would be lost."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        task.add_done_callback(self._ended)
        return task

    def _still_to_come(self, iteration: int) -> bool:
        """Whether some strike may still fall: its iteration has not passed."""
        return any(strike.last > iteration - 1 for strike in self.injector.strikes)

    # --- the promises ---

    def _settled(self, live: list[Participant], target: int) -> bool:
        """Whether these live peers hold one model of this iteration. Whoever never gets there breaks the promise.

        The winning lineage counts: one peer alone in another may have run ahead of it, and gives that up.
        """
        winner = _winning(live).record.lineage
        known = [(me, self.held.get(me.net.me, {})) for me in live]
        if self.liar is not None:  # some may have believed a liar for a while, and all come together later
            common = set.intersection(*(set(log.items()) for _, log in known))
            return any(iteration >= target for iteration, _ in common)
        if self.carries:  # who is slow skips iterations
            return all(max(log, default=0) >= target for _, log in known)
        hashes = {log[target] for _, log in known if target in log}
        late = [me.net.me for me, log in known if target not in log]
        if len(hashes) > 1:
            self.broken.append(f"iteration {target}: live peers hold {len(hashes)} different models")
        elif late and any(me.record.iteration > target for me in live if me.record.lineage == winner):
            self.broken.append(f"iteration {target}: never held by {', '.join(late)}, though all faults were over")
        return not late

    def _waits(self, live: list[Participant], head: Record) -> bool:
        """Whether all hold the head, and wait for what is lost for good: they were told not to fork.

        That is a majority, or the vote of a dead elector: with it and a liar's a result may be committed that only one
        peer stands behind.
        """
        iteration = head.iteration + 1
        lacks = [me for me in live if me.behind and not self.watches(me.index, iteration)]
        if lacks or any(me.record.hash != head.hash for me in live):
            return False
        if self.settings.on_minority != "wait":
            return False
        voters = {me.net.me: me.instance for me in live if me.standing.barred != iteration}
        electors = ranked(self.settings.run, iteration, head.electors)
        votes = {peer: instance.accepted if instance else None for peer, instance in voters.items()}
        enough = quorum(electors, voters, self.settings.liars)
        return not enough or choose(electors, votes, self.settings.liars).way is Way.WAIT

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.broken.append(f"{task.get_coro()!s:.60} ended with {type(error).__name__}: {error}")

    @property
    def well(self) -> set[PeerId]:
        """Who was there from the beginning and never struck."""
        return set(self.names) - self.faulty - self.latecomers

    def keep(self, record: Record) -> None:
        """Remember a commit."""
        self.records.setdefault(record.hash, record)
        self._of_lineage.setdefault((record.hash, record.lineage), record)

    def base_of(self, roster: Roster) -> Record:
        """The record that a roster begins with: of its own lineage, if it does not found one."""
        return self._of_lineage.get((roster.base, roster.lineage)) or self.records[roster.base]

    def before(self, record: Record, age: int) -> Record:
        """The record so many iterations before this one: what is so late was learned from its state."""
        for _ in range(age):
            assert record.roster is not None
            record = self.base_of(record.roster)
        return record

    def replay(self, state: Snapshot, base: Record, roster: Roster) -> Snapshot:
        """The state that this roster's commit must lead to, computed in one place."""
        if roster.exchange == VOID:
            return passed_by(state, roster)
        ages = dict(roster.ages)
        mine = {
            member.id: self.contribution(member.index, self.before(base, ages.get(member.id, 0)))
            for member in roster.members
        }
        return advance(state, replay_mean(roster, mine), roster)

    def run(self) -> Report:
        """Play the world to its end and check every promise."""
        torch.set_num_threads(1)
        try:
            run_virtual(self._play())
        except BrokenPromise as error:
            self.broken.append(str(error))
        late = any(fault in (Fault.LATE, Fault.ECHO) for fault, _ in self.injector.hits)  # a word from an earlier life
        again = self.liar is not None and self.lives[self.liar] > 1  # it votes once more after a restart
        doubted = any(me.net.refused[SECOND] for me in self.people.values())
        if doubted and not late and not self.forgetful and not again:
            self.broken.append("an honest peer's vote was taken for that of another process with its key")
        light = len(self.faulty) <= 0.2 * self.size and not self.stormy and self.liar is None
        promises = [bounded, one_commit, replayed, unmasked_once, modest, counted_once]
        if self.liar is not None:
            promises = [bounded, one_certain_commit, certain_sums, unmasked_once, nobody_wronged]
            if fragile(self):
                self.broken = []
                promises = []
        kind = [unhindered, nobody_left_out] if light else []
        for promise in [*promises, *kind, *([nothing_lost] if self.calm else [])]:
            self.broken += promise(self)
        mine = [outcome.status == "committed" for name, _, _, outcome in self.outcomes if name in self.well]
        seen = sorted((d.peer, d.record.iteration, d.record.hash) for d in self.decisions)
        return Report(
            self.seed, self.settings.exchange, self.size, self.injector.hits, light, len(mine), sum(mine), self.broken,
            hashlib.sha256(repr(seen).encode()).digest(),
        )  # fmt: skip
