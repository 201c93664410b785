"""Worlds in which one peer lies in sums, and all sums are audited: no wrong sum is ever missed, and nobody is wronged.

    python -m marfl.testing.miscounts --seeds 300

A seed says how many peers there are (4, 7 or 16), what they exchange and who lies. The liar leads when it is its turn,
like everybody. In some attempts it adds to a sum, adds up another input than it claimed, passes on or shows others
something else than it was given, or does not sign. In some iterations it answers no audit, denies what it was sent, and
accuses those whom it audits. What must hold is in `MiscountingWorld.broken`. Nothing else fails here: what other faults
do to votes is played by the soak.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor

from marfl.errors import InputError
from marfl.net.base import PeerId, Tag
from marfl.net.virtual import Delivery, Departure, Link, VirtualNetwork
from marfl.net.virtual_clock import run_virtual
from marfl.protocol.attempt import Attempt, Outgoing
from marfl.protocol.audit import NO_ANSWER, NO_CLAIM
from marfl.protocol.exchange import Contribution, replay_mean
from marfl.protocol.former_states import in_the_model, went_back
from marfl.protocol.fraud import CONTRADICTION, FORGED, WRONG_SUM, Proof
from marfl.protocol.instance import Instance, passed_by
from marfl.protocol.messages import Fraud
from marfl.protocol.participant import Participant, genesis
from marfl.protocol.protocol_settings import EXCHANGES, Settings
from marfl.protocol.roster import Record, Roster
from marfl.protocol.signed_slices import UNANSWERED, UNSIGNED, Signed, Slot, signed_slot
from marfl.protocol.standing import Diary, Standing
from marfl.protocol.statements import statement
from marfl.state import Snapshot

SIZES = (4, 7, 16)
ITERATIONS = 6
LENGTH = 48
TRAINING = 4.0  # virtual seconds, in which audits happen
FAR = 3000.0  # virtual seconds: a world that is not done by then is stuck
LAYOUT = hashlib.sha256(b"miscounts").digest()
Change: TypeAlias = Callable[[Attempt], None]  # what a liar does to its own exchange


def advance(state: Snapshot, mean: Tensor, roster: Roster) -> Snapshot:
    """The simplest agreed state: one vector, moved by the mean update."""
    return Snapshot(state.version + 1, {"theta": state.vectors["theta"] + mean}, {})


# --- lies ---


def adds(round: int, at: int) -> Change:
    """Adds 1,000 to one value of what it has summed in a round."""

    def change(attempt: Attempt) -> None:
        honest = attempt.sum_in_order

        async def lying(*work: Any) -> Tensor:
            total = await honest(*work)
            if work[1] == round and total.numel():
                total[at % total.numel()] += 1000
            return total

        attempt.sum_in_order = lying  # type: ignore[assignment, method-assign]

    return change


def sums_another_input(round: int, _: int) -> Change:
    """Adds up something else than the part of its vector that it said it keeps."""

    def change(attempt: Attempt) -> None:
        honest = attempt.sum_in_order

        async def lying(phase: int, at: int, sources: Any, own: Tensor, room: Tensor, start: int) -> Tensor:
            return await honest(phase, at, sources, own + 1000 if at == round else own, room, start)

        attempt.sum_in_order = lying  # type: ignore[assignment, method-assign]

    return change


def passes_on(round: int, at: int) -> Change:
    """Changes what the owners of its group gave it, before it sends that on."""

    def change(attempt: Attempt) -> None:
        honest = attempt.gather

        async def lying(phase: int, number: int, wants: Any, room: Tensor, inputs: Any = ()) -> None:
            wants = list(wants)
            await honest(phase, number, wants, room, inputs)
            if number == round and wants:
                room[wants[at % len(wants)].start] += 1000

        attempt.gather = lying  # type: ignore[assignment, method-assign]

    return change


def two_faced(round: int, at: int) -> Change:
    """Shows one of those to whom it sends something another value than the rest, and signs both."""

    def change(attempt: Attempt) -> None:
        book, honest = attempt.book, attempt._outgoing
        if book is None:
            return
        chosen: list[int] = []

        def lying(rank: int, tag: Tag, value: Tensor) -> Outgoing:
            slot = signed_slot(book.roster, book.length, tag.channel, tag.round, (book.rank, rank))
            seat = attempt.plan.seats(book.rank)[min(tag.round, len(attempt.plan.rounds) - 1)]
            # To one alone it shows its update, whatever that is.
            alone = seat is None or len({*seat.core} - {book.rank}) < 2
            if slot is None or tag.round != round or (chosen and chosen != [rank]) or (slot.done == 0 and alone):
                return honest(rank, tag, value)
            chosen[:] = [rank]
            before, book._signed, changed = book._signed, {}, value.clone()
            changed[at % value.numel()] += 1000
            mine = book._mine.get(slot.done)
            if mine is not None and tag.channel == "reduce":
                start, whole = mine[0], mine[1].clone()
                whole[slot.start - start : slot.stop - start] = changed
                book._mine[slot.done] = start, whole
            try:
                return honest(rank, tag, changed)
            finally:
                book._signed = before
                if mine is not None:
                    book._mine[slot.done] = mine

        attempt._outgoing = lying  # type: ignore[method-assign]

    return change


def unsigned(round: int, at: int) -> Change:
    """Adds to its sum, and signs nothing of it."""

    def change(attempt: Attempt) -> None:
        adds(round, at)(attempt)
        if attempt.book is None:
            return
        honest = attempt.book._claim

        def claim(slot: Slot, *given: Any) -> tuple[list[bytes], bytes]:
            hashes, signature = honest(slot, *given)
            return hashes, bytes(64) if slot.done > round else signature

        attempt.book._claim = claim  # type: ignore[assignment, method-assign]

    return change


SILENCE = {"audit": NO_ANSWER, "recall": NO_CLAIM}
LIES = (adds, sums_another_input, passes_on, two_faced, unsigned)


# --- the world ---


class Notes(Diary):
    """Writes down what one honest peer knows to be certified, and whom it complains of."""

    def __init__(self, world: MiscountingWorld) -> None:
        self.world = world

    def _note(self, standing: Standing) -> None:
        self.world.states.setdefault(standing.state.hash, standing.state)
        if standing.proofs.settled:
            self.world.certain.setdefault(standing.record.hash, standing.record)

    def entering(self, standing: Standing) -> None:
        self._note(standing)

    def decided(self, standing: Standing, instance: Instance, before: Record) -> None:
        self._note(standing)

    def installed(self, standing: Standing, before: Record) -> None:
        self._note(standing)

    def complained(self, peer: PeerId, why: str) -> None:
        self.world.complaints.setdefault(peer, set()).add(why)


@dataclass(frozen=True)
class Told:
    """One lie of an attempt."""

    iteration: int
    name: str


class MiscountingWorld:
    """One swarm in which one peer miscounts, played from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed, dice = seed, Random(f"miscounts {seed}")
        self.size = SIZES[seed % len(SIZES)]
        exchange = dice.choice(EXCHANGES)
        self.settings = Settings(
            run=f"miscounts{seed}", group_size=dice.choice([2, 3, 5]), exchange=exchange, fallbacks=(exchange,),
            wire=dice.choice(["fp32", "fp32", "fixed", "masked"]), piece=dice.choice([2**20, 32]), audit=1.0,
            on_fraud=dice.choice(["go on", "rollback"]),
        )  # fmt: skip
        self.dice = Random(f"lies {seed}")
        self.names = [f"peer{index:02}" for index in range(self.size)]
        self.liar = dice.choice(self.names)
        self.honest = [name for name in self.names if name != self.liar]
        self.start = Snapshot(0, {"theta": torch.zeros(LENGTH)}, {})
        self.record = genesis(self.start, tuple((name, index) for index, name in enumerate(self.names)))
        self.network = VirtualNetwork(seed, Link(latency=0.01, jitter=0.01))
        self.states = {self.start.hash: self.start}
        self.certain: dict[bytes, Record] = {}
        self.complaints: dict[PeerId, set[str]] = {}
        self.told: list[Told] = []
        self.people = {name: self._join(name, index) for index, name in enumerate(self.names)}
        self._corrupt(self.people[self.liar])

    def _join(self, name: PeerId, index: int) -> Participant:
        net = self.network.join(name)
        me = Participant(net, self.settings, index, LAYOUT, self.start, self.record, advance)
        if name != self.liar:
            me.standing.keep(Notes(self))
        return me

    def _corrupt(self, me: Participant) -> None:
        begin = me.audits.begin

        def lying(attempt: Attempt) -> None:
            begin(attempt)
            if attempt.book is not None and self.dice.random() < 0.5:
                lie = self.dice.choice(LIES)
                self.told.append(Told(attempt.roster.iteration, lie.__name__))
                lie(self.dice.randrange(len(attempt.plan.rounds)), self.dice.randrange(LENGTH))(attempt)

        me.audits.begin = lying  # type: ignore[method-assign]
        self.network.intercept = self._withhold

    def _withhold(self, _: VirtualNetwork, event: Departure, delivery: Delivery) -> None:
        """The liar does not answer some audits, and denies some of what it was sent."""
        said = SILENCE.get(event.tag.channel) if (event.op, event.source) == ("answer", self.liar) else None
        if said is not None and self.dice.random() < 0.3:
            delivery.parcel = said

    def contribution(self, index: int, base: bytes) -> Contribution:
        key = hashlib.sha256(base + index.to_bytes(4)).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:6]))
        return Contribution(base, torch.randn(LENGTH, generator=generator))

    async def _live(self, name: PeerId, until: int | None) -> None:
        """As a daemon does; the liar for as long as anybody answers it."""
        me = self.people[name]
        while until is None or me.record.iteration < until or me.behind:
            if await me.catch_up() and (until is None or me.record.iteration < until):
                await me.net.sleep_until(me.net.now() + TRAINING)
                await me.run_iteration(self.contribution(me.index, me.record.hash))
            else:
                await me.net.sleep_until(me.net.now() + 1.0)

    async def _accuse(self) -> None:
        """The liar says now and then that somebody honest lied, with whatever it has."""
        me = self.people[self.liar]
        while True:
            await me.net.sleep_until(me.net.now() + self.dice.uniform(2.0, 8.0))
            victim, roster = self.dice.choice(self.honest), me.record.roster
            said = ("vote" if self.dice.random() < 0.5 else "slice", (b"x", 1, 0, 0, LENGTH, bytes(32)))
            word = Signed(*said, me.net.sign(statement(said[0], *said[1])))
            kind = self.dice.choice([CONTRADICTION, FORGED, WRONG_SUM])
            proof = Proof(kind, victim, (word, word), roster.encoded if roster else b"")
            for peer in self.honest:
                await me.talk.ask(peer, "fraud", Fraud(victim).parcel(proof.encoded))

    async def _play(self) -> None:
        others = [
            self.network.spawn(self.liar, self._live(self.liar, None)), self.network.spawn(self.liar, self._accuse())
        ]  # fmt: skip
        async with asyncio.timeout(FAR):
            await asyncio.gather(*(self.network.spawn(name, self._live(name, ITERATIONS)) for name in self.honest))
            await asyncio.sleep(2 * TRAINING)  # the last audits
        for task in others:
            task.cancel()

    def run(self) -> list[str]:
        """Play it; what is broken, one line each."""
        torch.set_num_threads(1)
        try:
            run_virtual(self._play())
        except TimeoutError:
            at = sorted({self.people[name].record.iteration for name in self.honest})
            return [f"seed {self.seed}: stuck at iterations {at}"]
        return [f"seed {self.seed} ({self.size} peers, {self._what()}): {line}" for line in self.broken()]

    def _what(self) -> str:
        lies = ", ".join(f"{told.name} in {told.iteration}" for told in self.told) or "no lies"
        return f"{self.settings.exchange}, {self.settings.wire}, on_fraud = {self.settings.on_fraud}; {lies}"

    # --- what must hold ---

    def broken(self) -> Iterator[str]:
        """Nobody honest is proven a liar, no wrong sum is missed, all end on one model, and it holds no proven lie."""
        people = [self.people[name] for name in self.honest]
        for me in people:
            if wronged := me.standing.banned.keys() - {self.liar}:
                yield f"{me.net.me} takes {', '.join(sorted(wronged))} for liars"
        if len({me.state.hash for me in people}) != 1:
            yield "the honest end on different models"
        wrong = self.wrong()
        suspected = self.complaints.get(self.liar, set()) & {UNANSWERED, UNSIGNED}
        if wrong and not (self.is_named() or suspected):
            yield f"a wrong sum in iteration {wrong} is certified, and nobody knows of it"
        proven = {at for me in people for at in me.standing.lies}
        if more := proven - {told.iteration for told in self.told}:  # it need not have changed the sum
            yield f"lies are proven of iterations {sorted(more)}, in which nobody lied"
        if self.settings.on_fraud == "rollback":
            for me in people:
                known = me.history | {me.record.iteration: me.record}
                left = proven & set(in_the_model(known, me.record.iteration)) & set(range(1, ITERATIONS - 1))
                if left:
                    yield f"{me.net.me}: what is wrong in iterations {sorted(left)} is still in the model"

    def wrong(self) -> list[int]:
        """Iterations with a certified sum that is not its roster's."""
        return sorted(record.iteration for record in self.certain.values() if not self._is_right(record))

    def is_named(self) -> bool:
        """Whether everybody honest has seen it proven who lies."""
        return all(self.liar in self.people[name].standing.banned for name in self.honest)

    def _is_right(self, record: Record) -> bool:
        """Whether a certified state is what its roster makes of the state before."""
        roster, state = record.roster, self.states.get(record.roster.base) if record.roster else None
        if roster is None or state is None:
            return True
        if roster.restores is not None:
            return any(went_back(each, state, roster).hash == record.hash for each in self.states.values())
        if not roster.is_sum:
            return passed_by(state, roster).hash == record.hash
        mine = {member.id: self.contribution(member.index, roster.base) for member in roster.members}
        mine = {peer: replace(given, weight=roster.members[roster.ranks[peer]].weight) for peer, given in mine.items()}
        return advance(state, replay_mean(roster, mine), roster).hash == record.hash


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Worlds in which one peer miscounts, and all sums are audited.")
    parser.add_argument("--seeds", type=int, default=100, help="how many worlds to play (default 100)")
    parser.add_argument("--start", type=int, default=0, help="the first world's seed (default 0)")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        raise InputError(f"--seeds: {options.seeds} is too few; play at least one world")
    worlds = [MiscountingWorld(seed) for seed in range(options.start, options.start + options.seeds)]
    broken, wrong, named, lied = [], 0, 0, 0
    for world in worlds:
        found = world.run()
        for line in found:
            print(line, flush=True)
        broken += found
        lied += bool(world.told)
        wrong += bool(world.wrong())
        named += bool(world.wrong()) and world.is_named()
    print(f"{len(worlds)} worlds; in {lied} somebody lied in a sum, in {wrong} a wrong one was certified: in {named} "
          f"of them that is proven, in the others the liar did not sign or answer; {len(broken)} broken")  # fmt: skip
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
