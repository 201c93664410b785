"""The rules of one decision, and nothing else: what an elector may promise and vote for, what a leader must adopt, what
is decided. Pure functions: no clock, no network, no waiting. `marfl.testing.exhaustive` tries every order of events on
these very functions.

This is single-decree Paxos (Lamport, "Paxos made simple", 2001). Lamport's words beside ours: acceptor, elector;
proposer, leader; ballot number, attempt; prepare and promise, propose and ack; accept, finish (with the data) or
endorse (without it). One thing differs: a leader does not name the value. It seals a roster, and the hash of the new
state comes of it; so members that compute wrongly may vote for different hashes in one attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from marfl.net.base import PeerId
from marfl.protocol.roster import Elector, quorum

COPIES = 3  # of a committed state, at least, where so many peers vote


class Vote(Protocol):
    """A vote for a result (Lamport: an accepted proposal)."""

    @property
    def attempt(self) -> int:
        """The attempt in which it was cast, which may be later than the one that made the result."""

    @property
    def hash(self) -> bytes: ...

    @property
    def holds(self) -> bool:
        """Whether the voter has the data, not only the hash."""


V = TypeVar("V", bound=Vote)


@dataclass(frozen=True)
class Ballot(Generic[V]):
    """What an elector has bound itself to in one iteration."""

    promised: int = -1  # the highest attempt acked: it never votes in an earlier one
    accepted: V | None = None  # its last vote


def may_promise(ballot: Ballot[V], attempt: int) -> bool:
    """Whether to ack a proposal (phase 1b): unless a later attempt was promised."""
    return attempt >= ballot.promised


def promise(ballot: Ballot[V], attempt: int) -> Ballot[V]:
    """The elector after its ack. Its last vote stays, and is told with the ack."""
    return Ballot(max(ballot.promised, attempt), ballot.accepted)


def may_vote(ballot: Ballot[V], attempt: int, digest: bytes) -> bool:
    """Whether to vote for a result of this attempt (phase 2b): unless a later attempt was promised.

    An attempt gets one vote of an elector: who has endorsed one hash in it does not finish with another one.
    """
    last = ballot.accepted
    once = last is None or last.attempt != attempt or last.hash == digest
    return once and attempt >= ballot.promised


def voted(ballot: Ballot[V], vote: V) -> Ballot[V]:
    """The elector after this vote."""
    return Ballot(max(ballot.promised, vote.attempt), vote)


class Way(Enum):
    """What a leader may do once a quorum has acked its attempt."""

    FREE = "seal a new roster"  # nothing can have been committed
    ADOPT = "have everybody vote for an earlier result again"
    WAIT = "do nothing"  # something may be committed, and nobody here can tell what, or has its data


class Choice(NamedTuple):
    """What the leader of an attempt must do."""

    way: Way
    hash: bytes | None = None  # of the result to adopt
    holders: tuple[PeerId, ...] = ()  # who has its data, among those who acked


def choose(electors: Sequence[Elector], acks: Mapping[PeerId, Vote | None]) -> Choice:
    """What a leader must do, from the last votes of those who acked (phase 2a). The acks hold a quorum of the electors.

    Only electors vote. Others who finished a result (newcomers) may give its data, if an elector voted for it.

    If a result was committed in some attempt, every vote of a later attempt is for the same result: this rule keeps
    that up. So only what was voted for in the newest attempt heard of can be committed, though the votes that made it
    so may be of any attempt. It cannot be, if its voters and all who are silent are no quorum together.
    """
    named = {elector.id for elector in electors}
    votes = {peer: vote for peer, vote in acks.items() if vote is not None and peer in named}
    if not votes:
        return Choice(Way.FREE)
    newest = max(vote.attempt for vote in votes.values())
    hashes = sorted({vote.hash for vote in votes.values() if vote.attempt == newest})
    backers = {h: {peer for peer, vote in votes.items() if vote.hash == h} for h in hashes}
    silent = named - acks.keys()
    possible = [h for h in hashes if quorum(electors, backers[h] | silent)]
    if len(possible) > 1:
        return Choice(Way.WAIT)
    likely = possible[0] if possible else max(hashes, key=lambda h: len(backers[h]))
    holders = tuple(sorted(peer for peer, vote in acks.items() if vote and vote.hash == likely and vote.holds))
    if holders:
        return Choice(Way.ADOPT, likely, holders)
    return Choice(Way.WAIT if possible else Way.FREE)


class Tally(NamedTuple):
    """What the leader of an attempt has heard of its results."""

    finished: Mapping[PeerId, bytes | None]  # by member: the hash of the state it holds; None: it could not finish
    endorsed: Mapping[PeerId, bytes]  # by elector: the hash that it voted for without being asked for the data


def held(electors: Sequence[Elector], members: Sequence[Elector], tally: Tally, *, again: bool) -> bytes | None:
    """The hash whose data a majority of the roster holds.

    `again`: the result is of an earlier attempt, whose roster may be lost; then a majority of the electors will do.
    """
    for digest in sorted({got for got in tally.finished.values() if got is not None}):
        holders = _voters(tally.finished, digest)
        if quorum(members, holders) or (again and quorum(electors, holders)):
            return digest
    return None


def decided(electors: Sequence[Elector], members: Sequence[Elector], tally: Tally, *, again: bool) -> bytes | None:
    """The hash that is committed: its data is held (see `held`), and a majority of the electors voted for it."""
    digest = held(electors, members, tally, again=again)
    if digest is None:
        return None
    voters = _voters(tally.finished, digest) | _voters(tally.endorsed, digest)
    return digest if quorum(electors, voters) else None


def kept(voters: Sequence[Elector], holders: Collection[PeerId]) -> bool:
    """Whether enough peers hold the data of a result before it is committed: `COPIES`, or a majority of its voters.

    The voters decide the next iteration. In a small swarm any majority of them that lives then has the state; in a
    large one a commit costs no more than `COPIES` copies, however few peers bring an update.
    """
    return len(holders) >= COPIES or quorum(voters, holders)


def _voters(said: Mapping[PeerId, bytes | None] | Mapping[PeerId, bytes], digest: bytes) -> set[PeerId]:
    return {peer for peer, got in said.items() if got == digest}
