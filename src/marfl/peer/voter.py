"""What makes a participant a real peer: it writes its votes down before it casts them, and computes in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from marfl.errors import InputError, SyncError, WireError
from marfl.net.base import Net, PeerId
from marfl.peer.state_dir import VoteLog
from marfl.protocol.participant import Participant
from marfl.protocol.protocol_settings import Settings
from marfl.protocol.roster import Record, Roster
from marfl.protocol.standing import Advance, Diary, Standing
from marfl.state import Layout, Snapshot

log = logging.getLogger("marfl.peer")
T = TypeVar("T")


class VoteDiary(Diary):
    """Has a peer that is killed at any moment never vote twice in one decision: it writes down where it votes."""

    keeps = True

    def __init__(self, net: Net, run: str, votes: VoteLog) -> None:
        self.net, self.run, self.votes = net, run, votes
        self.incarnation = votes.incarnation
        self._noted = b""

    def knows(self, iteration: int) -> bool:
        """Every iteration that is voted in is written down before."""
        return iteration <= self.votes.highest

    def revoke(self, record: Record, *, cast_here: bool) -> None:
        """Vote no more: the log was lost or is old, or somebody else has the key."""
        counted = f"run {self.run!r}: the others count a vote of this peer in iteration {record.iteration}"
        place, highest = self.votes.place, self.votes.highest
        if cast_here:
            self.revoked = (
                f"{counted}, but its vote log{place} ends with iteration {highest}: the log was lost or is a restored "
                "backup, or another process uses the key; go on with a new key"
            )
        else:
            self.revoked = (
                f"{counted} that it has not cast: its vote log{place} is a restored backup, or another process uses "
                "the key; go on with a new key"
            )

    def entering(self, standing: Standing) -> None:
        """Every vote is cast in an iteration that was entered; it is on the disk before that, or nothing is entered."""
        if self.revoked:
            raise InputError(self.revoked)
        iteration, base = standing.record.iteration + 1, standing.record.hash
        if base != self._noted:
            self.votes.note(iteration, base)
            standing.barred = iteration if self.votes.cast_before(base) else -1
            self._noted = base

    def caught(self, liar: PeerId, why: str) -> None:
        """Written down before anything else: a liar is left out after a restart, too."""
        self.votes.note_liar(liar, why)

    def liars(self) -> dict[PeerId, str]:
        return self.votes.liars


async def in_a_thread(work: Callable[[], T]) -> T:
    """A large model's masks take a second, in which nobody would get an answer."""
    return await asyncio.to_thread(work)


def real_participant(
    net: Net, settings: Settings, index: int, layout: Layout, state: Snapshot, record: Record, advance: Advance
) -> Participant:
    """A participant of a real run: it computes in a thread."""
    made = Participant(net, settings, index, layout.hash, state, record, advance)
    made.talk.compute = in_a_thread
    made.standing.keep(VoteDiary(net, settings.run, VoteLog()))  # of a key that no other process ever has
    return made


async def hand_over(voter: Participant) -> None:
    """Before a peer ends, after its goodbye: somebody else is to hold what it alone holds. Says what it waits for."""
    heirs, patience = len(voter.heirs), voter.settings.ready_timeout
    if heirs:
        log.info("nobody else holds the newest state: staying up to %g s until one of %d takes it", patience, heirs)
        if not await voter.hand_over(patience):
            log.warning("nobody took the state of iteration %d, which this peer alone holds", voter.record.iteration)


def noting(advance: Advance, broken: asyncio.Future[InputError]) -> Advance:
    """The same rule; a strategy that cannot go on is noted, so that its peer ends instead of trying for ever."""

    def noted(state: Snapshot, mean: Tensor, roster: Roster) -> Snapshot:
        try:
            return advance(state, mean, roster)
        except InputError as error:
            if not broken.done():
                broken.set_result(error)
            raise SyncError(str(error)) from error

    return noted


def restore_proofs(participant: Participant, data: bytes) -> None:
    """Have a participant prove its record with what it kept; without that others may, and its record stands."""
    try:
        participant.standing.restore(data)
    except WireError as error:
        log.warning("the kept proof of iteration %d cannot be read: %s", participant.record.iteration, error)


def keep_votes(participant: Participant, votes: VoteLog) -> None:
    """Keep a participant's votes in this log from now on; it must know of those that the others count."""
    diary = VoteDiary(participant.net, participant.settings.run, votes)
    participant.standing.keep(diary)
    standing = participant.standing
    standing.look_back(standing.record, *standing.proofs.votes_of(participant.net.me, standing.record))


