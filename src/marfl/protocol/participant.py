"""What a peer does in an iteration: one async function over `Net`, and the answers it gives to others.

The steps: announce, be sealed into a roster (propose, ack, publish), exchange, finish, commit. Each iteration is one
Paxos decision (see `roster`): a peer that acks attempt `a` never finishes an earlier one; a result that anybody may
have committed is adopted by every later attempt; (roster, hash) is committed once a majority of the roster holds the
data and a majority of the electors voted for it. Whoever is late, hung or cut off finds out and syncs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from marfl.errors import DeadlineExceeded, InputError, PeerGone, SyncError, WireError
from marfl.net.base import Ledger, Net, Parcel, PeerId
from marfl.plan.grid import plan
from marfl.protocol.attempt import Attempt, Stuck, answer_resend
from marfl.protocol.exchange import EXCHANGES, PHASES, mean
from marfl.protocol.instance import Accepted, Contribution, Instance
from marfl.protocol.leader import drive
from marfl.protocol.roster import NO_HASH, Elector, Record, Roster, decode_record, ranked, unbrief
from marfl.protocol.settings import Settings
from marfl.protocol.sync import Caught, answer_sync, fetch
from marfl.protocol.wire import pack, unpack
from marfl.state import Snapshot, all_finite

Advance: TypeAlias = Callable[[Snapshot, Tensor, Roster], Snapshot]  # the agreed state, the mean update: the next state


@dataclass(frozen=True)
class Outcome:
    """How an iteration ended for one peer. Churn is data: whoever is missing is named here."""

    iteration: int
    status: str  # "committed", "stale" (others are elsewhere: sync), "undecided" (no majority in time)
    hash: bytes | None = None
    attempt: int = -1
    exchange: str = ""
    present: tuple[PeerId, ...] = ()
    missing: dict[PeerId, str] = field(default_factory=dict)
    holds: bool = False  # this peer holds the committed state
    discarded: int = 0  # committed iterations of a lighter lineage that were given up
    sent: Ledger = field(default_factory=Ledger)
    received: Ledger = field(default_factory=Ledger)
    seconds: float = 0.0


class Participant:
    """A peer of one run: the agreed state it holds, its votes, and its answers to the others."""

    def __init__(
        self, net: Net, settings: Settings, index: int, layout: bytes, state: Snapshot, record: Record, advance: Advance
    ) -> None:
        if state.hash != record.hash:
            raise InputError("the state does not belong to the record: their hashes differ")
        self.net, self.settings, self.index, self.layout = net, settings, index, layout
        self.state, self.record, self.advance = state, record, advance
        self.instance: Instance | None = None
        self.barred = -1  # after a restart: the iteration it may have voted in before, and never votes in again
        self.last_mean: tuple[bytes, Tensor | None] | None = None  # (from which state, the update to mine)
        self.last_attempt: Attempt | None = None
        self.history: dict[int, Record] = {}
        self.donors: dict[PeerId, None] = {}  # who has shown that it is ahead, newest last
        self.discarded = 0
        for channel, handler in {
            "propose": self._on_propose, "seal": self._on_seal, "finish": self._on_finish,
            "endorse": self._on_endorse, "decided": self._on_decided, "heavier": self._on_heavier,
        }.items():  # fmt: skip
            net.serve(channel, handler)
        net.serve("resend", self._on_resend, kind="repair")
        net.serve("sync", self._on_sync, kind="sync")

    # --- one iteration ---

    async def run_iteration(self, mine: Contribution | None) -> Outcome:
        """Take part in the next iteration: with a contribution, or (None) as a witness that only votes."""
        if mine is not None and not _usable(mine):
            mine = None  # a sender checks its own update: what is not finite never leaves
        if mine is not None and (self.behind or mine.base != self.record.hash):
            return Outcome(self.record.iteration + 1, "stale")  # others went on while it was made
        started, sent, received = self.net.now(), self.net.sent.copy(), self.net.received.copy()
        instance = self.enter()
        instance.mine = mine
        instance.entered = started
        instance.patience = self._first_turn(instance)
        await self._announce("witness" if mine is None else "member", mine.weight if mine else 0.0)
        driver = asyncio.create_task(drive(self, instance))
        try:
            await self.until(instance.over, started + self.settings.iteration_timeout)
        finally:
            driver.cancel()
        await self._settle(instance)
        ledgers = self.net.sent.minus(sent), self.net.received.minus(received)
        return self._outcome(instance, *ledgers, self.net.now() - started)

    def enter(self) -> Instance:
        """The decision that follows the last one known; votes cast before entering are kept."""
        if self.instance is None or self.instance.base != self.record.hash:
            if self.instance:
                self.instance.stop()
            self.net.forget(self.record.iteration)
            self.instance = Instance.after(self.settings.run, self.record, self.net.now())
        elif self.instance.stale:  # it could not sync: try again with the votes it has
            self.instance.stale = False
            self.instance.over.clear()
        return self.instance

    def _first_turn(self, instance: Instance) -> float:
        rank = instance.rank(self.net.me)
        if rank == 0 or not instance.electors:
            return self.net.now()
        return self.net.now() + self.settings.ready_timeout + (rank or len(instance.electors)) * self.settings.takeover

    async def _announce(self, role: str, weight: float = 0.0) -> None:
        """Say in the DHT that this peer is there for the next iteration, and what for."""
        record = pack(
            "ready", base=self.record.hash, index=self.index, weight=float(weight), layout=self.layout,
            mass=self.record.mass, role=role,
        )  # fmt: skip
        await self.net.announce(self.key(f"ready/{self.record.iteration + 1}"), record, ttl=self.settings.record_ttl)

    async def _settle(self, instance: Instance) -> None:
        """After the decision: tell latecomers where the head is, and fetch the result if it was missed here."""
        record = instance.record
        if record is None or record.roster is None:
            return
        if instance.leading >= 0:
            brief = record.brief(instance.electors)
            notice = Parcel(pack("decided", record=brief, holders=list(instance.holders[:16])))
            told = [e.id for e in record.roster.witnesses if e.id != self.net.me]
            await asyncio.gather(*(self.ask(peer, "decided", notice) for peer in told))
        if instance.leading >= 0 or self.net.me in record.roster.ids[:2]:
            head = pack("head", iteration=record.iteration, hash=record.hash, mass=record.mass, lineage=record.lineage)
            await self.net.announce(self.key("head"), head, ttl=self.settings.record_ttl)
        if instance.mine is not None and self.state.hash != record.hash:
            try:
                self.install(await fetch(self, (p for p in instance.holders if p != self.net.me), record.hash))
            except SyncError:
                self.donors.update(dict.fromkeys(instance.holders))  # stale for now: the next catch-up goes on

    def _outcome(self, instance: Instance, sent: Ledger, received: Ledger, seconds: float) -> Outcome:
        record = instance.record
        if record is None or record.roster is None:
            status = "stale" if instance.stale else "undecided"
            return Outcome(instance.iteration, status, sent=sent, received=received, seconds=seconds)
        roster = record.roster
        return Outcome(
            instance.iteration, "committed", record.hash, roster.attempt, roster.exchange, roster.ids,
            dict(roster.omitted), self.state.hash == record.hash, self.discarded, sent, received, seconds,
        )  # fmt: skip

    # --- catch-up ---

    @property
    def behind(self) -> bool:
        return self.state.hash != self.record.hash

    async def catch_up(self) -> bool:
        """Fetch the winning head's state if it is not mine; whether this peer now holds the newest it knows of."""
        heads = await self.heads()
        better = [p for p, mass, digest in heads if not self.record.beats(mass, digest)]
        donors = [p for p in dict.fromkeys([*better, *reversed(self.donors)]) if p != self.net.me]
        if self.behind and self.record.roster:
            donors += [p for p in self.record.roster.ids if p not in donors and p != self.net.me]
        try:
            self.install(await fetch(self, donors, None))
        except SyncError:
            return not self.behind and not any(d != self.record.hash for p, m, d in heads if p in better)
        self.donors.clear()
        await self._announce("training")  # so that the leader waits for it: else it would always be late
        return True

    async def heads(self) -> list[tuple[PeerId, int, bytes]]:
        """Every announced head, the winning lineage first."""
        found = []
        for peer, value in (await self.net.lookup(self.key("head"))).items():
            try:
                fields = unpack("head", value)
            except WireError:
                continue  # not a record of ours: it announces nothing
            found.append((peer, fields["mass"], fields["hash"]))
        return sorted(found, key=lambda head: (-head[1], head[2]))

    def install(self, caught: Caught) -> None:
        """Replace my state by a verified one; my own lineage's iterations are given up when it is another's."""
        record = caught.record
        assert record is not None
        if record.lineage != self.record.lineage:
            founded = [since for since in (self.record.since, record.since) if since]  # 0: the lineage of the beginning
            self.discarded = max(0, self.record.iteration - min(founded, default=1) + 1)
        self.last_mean = (self.state.hash, caught.mean) if caught.mean is not None else None
        self.state, self.record = caught.state, record
        self.history[record.iteration] = record

    # --- answers to others ---

    async def _on_propose(self, sender: PeerId, request: Parcel) -> Parcel:
        return Parcel(pack("ack", **self.vote(sender, unpack("propose", request.header))))

    def vote(self, sender: PeerId, proposal: dict[str, Any]) -> dict[str, Any]:
        """Ack a proposal, or say why not. One vote per attempt, by whoever leads it, from the same state as mine."""
        attempt = proposal["attempt"]
        if proposal["base"] != self.record.hash:
            if self.record.beats(proposal["mass"], proposal["base"]):
                return self._ack("behind", record=self.record.encoded)
            self.gone_elsewhere(sender)
            return self._ack("stale")
        instance = self.enter()
        if proposal["iteration"] != instance.iteration:
            return self._ack("refused")
        if proposal["founding"]:
            if not self._may_follow(instance, sender, proposal["lineage"]):
                return self._ack("refused", instance)
            if instance.lineage != proposal["lineage"]:
                instance.found(proposal["lineage"], sender)
        elif self.barred == instance.iteration:
            return self._ack("barred", instance)
        if instance.lineage != proposal["lineage"]:
            return self._ack("left", instance)
        # A late proposal has no grounds to end an attempt that its leader knew nothing of.
        late = instance.busy and attempt > instance.working > proposal["seen"]
        if late or instance.leader(attempt) != sender or attempt < instance.promised:
            return self._ack("refused", instance)
        blame = instance.blame()
        instance.promise(attempt)
        self.wait_for_leader(instance, self.settings.call_timeout * 2)
        return self._ack("ack", instance, blame=blame)

    def _ack(
        self,
        status: str,
        instance: Instance | None = None,
        *,
        blame: dict[str, Any] | None = None,
        record: bytes | None = None,
    ) -> dict[str, Any]:
        mine = instance.mine if instance else None
        accepted = instance.accepted if instance else None
        return {
            "status": status, "attempt": instance.promised if instance else -1, "record": record,
            "join": mine is not None and not self.behind, "index": self.index, "layout": self.layout,
            "weight": float(mine.weight) if mine else 0.0,
            **(blame or {"blamed": [], "waits": False, "unsent": []}),
            "accepted": accepted.roster.encoded if accepted else None,
            "accepted_hash": accepted.hash if accepted else None,
            "accepted_attempt": accepted.attempt if accepted else -1,
            "holds": accepted is not None and accepted.state is not None,
        }  # fmt: skip

    def _may_follow(self, instance: Instance, sender: PeerId, lineage: bytes) -> bool:
        """Whether to help found a new lineage: at the beginning, or after hearing of no majority for long enough."""
        if instance.lineage == lineage:
            return instance.founder == sender
        now, patience = self.net.now(), self.settings.minority_timeout / 2
        lonely = self.settings.on_minority == "fork" and now - max(instance.entered, instance.heard) >= patience
        if self.record.electors and not lonely:
            return False
        if instance.founder is None:
            return True
        older = now - instance.heard > self.settings.ready_timeout
        return older or (not instance.electors and instance.promised <= 0 and sender < instance.founder)

    async def _on_seal(self, sender: PeerId, request: Parcel) -> Parcel:
        fields = unpack("seal", request.header)
        roster = unbrief(fields["roster"], self.instance.electors if self.instance else ())
        accepted = self.begin(sender, roster, fields["attempt"], fields["adopt"], fields["holders"])
        return Parcel(pack("ok", status="ok" if accepted else "refused"))

    def begin(self, sender: PeerId, roster: Roster, attempt: int, adopt: bytes | None, holders: list[PeerId]) -> bool:
        """Start my part in a sealed attempt, unless I have promised a later one."""
        instance = self.instance
        if instance is None or instance.over.is_set() or roster.iteration != instance.iteration:
            return False
        if roster.exchange not in EXCHANGES:
            return False
        if roster.base != self.record.hash or roster.lineage != instance.lineage or roster.run != self.settings.run:
            return False
        if instance.leader(attempt) != sender or attempt < instance.promised or self.net.me not in roster.ranks:
            return False
        if self.barred == instance.iteration and instance.founder is None:
            return False
        if instance.working == attempt:
            return True  # sent twice
        if adopt is None and (instance.mine is None or roster.attempt != attempt or roster.layout != self.layout):
            return False
        instance.promise(attempt)
        if roster.electors:
            instance.electors = ranked(self.settings.run, roster.iteration, roster.electors)
        instance.working, instance.heard, instance.tries = attempt, self.net.now(), instance.tries + 1
        instance.interrupted = False
        instance.task = asyncio.create_task(self._take_part(instance, sender, roster, attempt, adopt, holders))
        return True

    async def _take_part(
        self,
        instance: Instance,
        leader: PeerId,
        roster: Roster,
        attempt: int,
        adopt: bytes | None,
        holders: list[PeerId],
    ) -> None:
        """Exchange (or fetch the result to adopt), vote for the hash, and wait for the leader's verdict."""
        phases = PHASES[roster.exchange](plan(len(roster.members), roster.group_size))
        seconds = (phases + 1) * self.settings.phase_timeout + 2 * self.settings.call_timeout
        self.wait_for_leader(instance, seconds)
        try:
            if adopt:
                result: Accepted | None = await self._adopt(instance, attempt, roster, adopt, holders)
            else:
                result = await self._exchange(instance, leader, roster)
        except (Stuck, SyncError):
            result = None
        if result is not None and instance.promised == attempt:
            instance.accepted = result
        if not instance.over.is_set():
            await self._report(instance, leader, result.hash if result else None, self.net.now() + seconds)

    async def _exchange(self, instance: Instance, leader: PeerId, roster: Roster) -> Accepted:
        """The sum over exactly the roster, the mean, and the state that follows."""
        mine = instance.mine
        assert mine is not None
        layout = plan(len(roster.members), roster.group_size)

        async def overtaken() -> bool:
            return await self.news(instance, leader)

        attempt = Attempt(self.net, roster, layout, mine.delta.numel(), self.settings.phase_timeout, overtaken)
        instance.attempt = self.last_attempt = attempt
        update = await mean(attempt, weighted(mine))
        if not all_finite(update):
            raise Stuck("the sum overflows")
        state = self.advance(self.state, update, roster)
        return Accepted(roster.attempt, roster, state.hash, state, update)

    async def _adopt(
        self, instance: Instance, attempt: int, roster: Roster, digest: bytes | None, holders: list[PeerId]
    ) -> Accepted:
        """Vote for an earlier attempt's result; it is fetched first where it is missing."""
        had = instance.accepted
        if had and had.hash == digest and had.state:
            return Accepted(attempt, roster, had.hash, had.state, had.mean)
        caught = await fetch(self, (p for p in holders if p != self.net.me), digest)
        return Accepted(attempt, roster, caught.state.hash, caught.state, caught.mean)

    async def _report(
        self, instance: Instance, leader: PeerId, digest: bytes | None, limit: float, *, final: bool = True
    ) -> None:
        """Tell the leader how the attempt went, until it has a verdict, vanishes or falls silent."""
        attempt = instance.working
        report = Parcel(pack("finish", iteration=instance.iteration, attempt=attempt, hash=digest, final=final))
        while self.net.now() < limit and not instance.over.is_set() and (instance.promised == attempt or not final):
            try:
                if leader == self.net.me:
                    answer = await self._on_finish(leader, report)
                else:
                    deadline = self.net.now() + self.settings.call_timeout
                    answer = await self.net.call(leader, "finish", report, deadline=deadline)
                verdict = unpack("verdict", answer.header)
                if verdict["status"] == "commit" and verdict["record"]:
                    record = decode_record(verdict["record"], instance.electors)
                    self.decide(instance, record, tuple(map(str, verdict["holders"])))
                    return
            except DeadlineExceeded:
                continue
            except (PeerGone, WireError):  # an answer that is no answer is as good as none
                break
            if verdict["status"] != "pending" or not final:
                break
        if final:
            self.wait_for_leader(instance, 0.0)

    async def news(self, instance: Instance, peer: PeerId) -> bool:
        """Ask a peer whether this iteration is committed; whether it is over now."""
        await self._report(instance, peer, None, self.net.now() + self.settings.call_timeout, final=False)
        return instance.over.is_set()

    async def _on_finish(self, sender: PeerId, request: Parcel) -> Parcel:
        """As the leader: note a member's report, and answer once there is a verdict (or ask it to come again)."""
        fields = unpack("finish", request.header)
        known = self.history.get(fields["iteration"])
        instance = self.instance
        if known is None and instance is not None and instance.iteration == fields["iteration"]:
            if instance.leading != fields["attempt"]:
                return Parcel(pack("verdict", status="unknown", record=None, holders=[]))
            if fields["final"]:
                instance.finished(sender, fields["hash"])
                await self.until(instance.over, self.net.now() + self.settings.call_timeout / 2)
            known = instance.record
            if known is None:
                status = "pending" if instance.leading == fields["attempt"] else "retry"
                return Parcel(pack("verdict", status=status, record=None, holders=[]))
        if known is None or known.roster is None:
            return Parcel(pack("verdict", status="unknown", record=None, holders=[]))
        current = instance if instance and instance.record is known else None
        holders, electors = (current.holders, current.electors) if current else (known.roster.ids, ())
        return Parcel(pack("verdict", status="commit", record=known.brief(electors), holders=list(holders[:16])))

    async def _on_endorse(self, sender: PeerId, request: Parcel) -> Parcel:
        """An elector without the data votes for a hash that a majority of the roster holds."""
        fields = unpack("endorse", request.header)
        return Parcel(pack("ok", status="ok" if self.endorse(sender, fields) else "refused"))

    def endorse(self, sender: PeerId, fields: dict[str, Any]) -> bool:
        instance, attempt = self.instance, fields["attempt"]
        if instance is None or instance.iteration != fields["iteration"] or self.barred == instance.iteration:
            return False
        roster = unbrief(fields["roster"], instance.electors)
        if instance.leader(attempt) != sender or attempt < instance.promised or roster.lineage != instance.lineage:
            return False
        if roster.base != self.record.hash:
            return False
        had = instance.accepted if instance.accepted and instance.accepted.hash == fields["hash"] else None
        # The vote is for this attempt, also when the result was finished in an earlier one.
        state, update = (had.state, had.mean) if had else (None, None)
        instance.accepted = Accepted(attempt, roster, fields["hash"], state, update)
        instance.promised = max(instance.promised, attempt)
        return True

    async def _on_decided(self, sender: PeerId, request: Parcel) -> Parcel:
        """The leader tells a voter that was not in the roster: it needs the record to vote again."""
        fields = unpack("decided", request.header)
        instance = self.instance
        record = decode_record(fields["record"], instance.electors if instance else ())
        if instance and record.roster and record.roster.base == instance.base and record.lineage == instance.lineage:
            self.decide(instance, record, tuple(map(str, fields["holders"])))
        elif record.beats(self.record.mass, self.record.hash):
            self.gone_elsewhere(sender)
        return Parcel(pack("ok", status="ok"))

    async def _on_heavier(self, sender: PeerId, request: Parcel) -> Parcel:
        fields = unpack("heavier", request.header)
        if not self.record.beats(fields["mass"], fields["hash"]) and self.record.hash != fields["hash"]:
            self.gone_elsewhere(None)
        return Parcel(pack("ok", status="ok"))

    async def _on_resend(self, _: PeerId, request: Parcel) -> Parcel:
        return await answer_resend(self.last_attempt, request)

    async def _on_sync(self, _: PeerId, request: Parcel) -> Parcel:
        return answer_sync(self, request)

    # --- decisions ---

    def decide(self, instance: Instance, record: Record, holders: tuple[PeerId, ...]) -> None:
        """This iteration is committed: move on to its state if I hold it, else remember who does."""
        roster = record.roster
        if instance.over.is_set() or roster is None or roster.base != instance.base:
            return
        mine = instance.accepted
        if mine is not None and mine.hash == record.hash and mine.state is not None:
            self.last_mean = (self.state.hash, mine.mean)
            self.state = mine.state
        if record.lineage != self.record.lineage:
            self.discarded = 0
        self.record = record
        self.history = {t: r for t, r in self.history.items() if t > record.iteration - 8} | {record.iteration: record}
        instance.record, instance.holders = record, holders
        instance.over.set()
        instance.progress.set()

    def gone_elsewhere(self, donor: PeerId | None) -> None:
        """Others hold a state that wins over mine: end the iteration and sync."""
        if donor is not None:
            self.donors.pop(donor, None)
            self.donors[donor] = None
        if self.instance is not None and not self.instance.over.is_set():
            self.instance.stale = True
            self.instance.over.set()
            self.instance.progress.set()

    # --- small things ---

    def key(self, name: str) -> str:
        return f"{name}/{self.settings.run}"

    def wait_for_leader(self, instance: Instance, seconds: float) -> None:
        """Let the present leader work for so long; then it is the next elector's turn, in rank order."""
        rank = instance.rank(self.net.me)
        size = max(1, len(instance.electors))
        turn = size if rank is None else (rank - instance.promised - 1) % size
        instance.patience = self.net.now() + seconds + turn * self.settings.takeover

    async def until(self, event: asyncio.Event, when: float) -> None:
        """Wait for an event, at most until `when` on this peer's clock."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self.net.sleep_until(when))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def ask(self, peer: PeerId, channel: str, parcel: Parcel) -> Parcel | None:
        """A small request, sent again when it or its answer is lost; None when there is no answer in time."""
        limit = self.net.now() + self.settings.call_timeout
        refusals = 0
        while self.net.now() < limit:
            try:
                deadline = min(limit, self.net.now() + self.settings.call_timeout / 3)
                return await self.net.call(peer, channel, parcel, deadline=deadline)
            except DeadlineExceeded:
                continue
            except PeerGone:  # also an answer to a request that arrived spoilt: worth a second try
                refusals += 1
                if refusals == 2:
                    return None
                await self.net.sleep_until(min(limit, self.net.now() + self.settings.poll))
        return None


def weighted(mine: Contribution) -> Tensor:
    """w·Δ, rounded once, by its owner. A weight of zero brings exact zeros, whatever Δ is."""
    if mine.weight == 1.0:
        return mine.delta
    return mine.delta * mine.weight if mine.weight else mine.delta.new_zeros(mine.delta.shape)


def _usable(mine: Contribution) -> bool:
    """Whether this contribution may leave."""
    if not 0 <= mine.weight < float("inf"):
        raise InputError(f"weight: {mine.weight} must be a number that is not negative")
    return mine.weight == 0 or all_finite(mine.delta)


def genesis(state: Snapshot, founders: tuple[tuple[PeerId, int], ...] = ()) -> Record:
    """The record of the beginning: everybody starts from this state; founders are named where they are known."""
    return Record(None, state.hash, 0, 0, tuple(Elector(peer, index) for peer, index in founders))


__all__ = ["NO_HASH", "Advance", "Outcome", "Participant", "genesis", "weighted"]
