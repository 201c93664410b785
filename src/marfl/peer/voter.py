"""A participant that writes down the iteration it is about to vote in, on the disk, before it votes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from marfl.errors import InputError
from marfl.net.base import Net, PeerId
from marfl.peer.compatibility import serve_layout
from marfl.peer.state_dir import VoteLog
from marfl.protocol.instance import Instance
from marfl.protocol.participant import Advance, Participant
from marfl.protocol.readiness import LEFT, announce_ready
from marfl.protocol.roster import Record
from marfl.protocol.settings import Settings
from marfl.protocol.sync import Caught
from marfl.state import Layout, Snapshot

T = TypeVar("T")


class Voter(Participant):
    """A peer that, killed at any moment, never votes twice in one decision (`Participant.barred`)."""

    def __init__(
        self,
        net: Net,
        settings: Settings,
        index: int,
        layout: Layout,
        state: Snapshot,
        record: Record,
        advance: Advance,
    ) -> None:
        super().__init__(net, settings, index, layout.hash, state, record, advance)
        self.revoked = ""  # why this peer must not vote any more
        self._noted = b""
        self.votes = VoteLog()  # of a key that no other process ever has
        self.incarnation = self.votes.incarnation
        serve_layout(net, layout)

    def vote_with(self, votes: VoteLog) -> None:
        """Keep the votes in this log from now on; `InputError` when others count a vote that it does not have."""
        self.votes, self.incarnation = votes, votes.incarnation
        self._check_log(self.record)

    def install(self, caught: Caught) -> None:
        """Replace my state by a verified one, unless it shows that somebody has voted in my name."""
        assert caught.record is not None
        self._check_log(caught.record)
        super().install(caught)

    def decide(self, instance: Instance, record: Record, holders: tuple[PeerId, ...]) -> None:
        """Take over a decision; a vote of mine that neither this process nor the log knows is another process's."""
        super().decide(instance, record, holders)
        roster = record.roster
        if roster is None or instance.record is not record or self.barred == record.iteration:
            return
        counted = any(elector.id == self.net.me for elector in roster.voters)
        if counted and (record.lineage, roster.attempt) not in self.acked.get(roster.base, ()):
            self.revoked = (
                f"run {self.settings.run!r}: the others count a vote of this peer in iteration {record.iteration} that "
                f"it has not cast: its vote log{self.votes.place} is a restored backup, or another process uses the "
                "key; go on with a new key"
            )

    def _check_log(self, record: Record) -> None:
        """`InputError` when the others count a vote of mine that my log does not know: it is written before each."""
        voters = {elector.id for elector in record.electors}
        if record.roster is None or self.net.me not in voters or record.iteration <= self.votes.highest:
            return
        self.revoked = (
            f"run {self.settings.run!r}: the others count a vote of this peer in iteration {record.iteration}, but its "
            f"vote log{self.votes.place} ends with iteration {self.votes.highest}: the log was lost or is a restored "
            "backup, or another process uses the key; go on with a new key"
        )
        raise InputError(self.revoked)

    def enter(self) -> Instance:
        """Enter the next iteration, once the disk has it that this peer may vote in it; before that it never votes."""
        if self.revoked:
            raise InputError(self.revoked)
        iteration, base = self.record.iteration + 1, self.record.hash
        if base != self._noted:
            self.votes.note(iteration, base)
            self.barred = iteration if self.votes.cast_before(base) else -1
            self._noted = base
        return super().enter()

    async def compute(self, work: Callable[[], T]) -> T:
        """Run this in a thread: a large model's masks take a second, and others are to be answered meanwhile."""
        return await asyncio.to_thread(work)

    async def announce_training(self) -> None:
        """The next iteration waits for me for a while."""
        await announce_ready(self, "training")

    async def farewell(self) -> None:
        """Say goodbye, so that nobody waits for this peer; once more where an iteration was decided meanwhile."""
        if self.revoked:
            return  # another process may speak in this name: it has not left
        self.leaving.set()  # whoever may not know what was decided is told now
        await self.rest(self.settings.poll)  # a notice that is under way must not arrive after the goodbye
        said = b""
        while said != self.record.hash:
            said = self.record.hash
            await asyncio.gather(announce_ready(self, LEFT), self.rest())
            while self.exchanging:
                await self.net.sleep_until(self.net.now() + self.settings.poll)

    @property
    def exchanging(self) -> bool:
        """Whether an attempt that others count on is under way here."""
        instance = self.instance
        task = instance.task if instance and not instance.over.is_set() else None
        return task is not None and not task.done()
