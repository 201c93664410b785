"""What a peer keeps of an iteration's masks, and the rules of what it may give away. Nothing here talks.

- Its seed, or shares of others' secrets, only for a roster that a majority of the electors has pledged itself to. A
  pledge is a vote as in Paxos (see `marfl.protocol.ballot`): the leader of a later attempt that hears of one must see
  the same roster through, or let the iteration go by. So at most one set of inputs of an iteration is ever unmasked.
- Nothing in a second lineage once its value has left in a first one, and nothing for a second roster of an iteration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from marfl.byte_kinds import ByteKind
from marfl.net.base import PeerId
from marfl.protocol.ballot import Acks, abandoned, willing, without
from marfl.protocol.roster import Elector, Roster, decode_roster
from marfl.secagg.crypto import KeyPair, is_public
from marfl.secagg.graph import FEWEST, KEY_BYTES, neighbours, threshold
from marfl.secagg.session import Session, epoch_of

KIND = ByteKind.MASKS  # what keys, shares and seeds are called in the ledger

Keys = Mapping[PeerId, bytes]  # the public keys that came with each ack


@dataclass(frozen=True)
class Pledged:
    """Which roster may be unmasked, and the attempt in which that was promised."""

    attempt: int
    roster: Roster


class MaskNews(NamedTuple):
    """What a leader must know of a peer's masks before it seals a roster: fields of its ack."""

    spent: bool = False
    epoch: bytes | None = None
    heard: tuple[PeerId, ...] = ()
    pledged: bytes | None = None
    pledged_attempt: int = -1
    sum_here: bool = False
    hopeless: bool = False


@dataclass
class Masking:
    """One iteration's masks, as one peer holds them."""

    offered: dict[int, KeyPair] = field(default_factory=dict)  # by attempt: a vote asked for twice says the same
    session: Session | None = None
    working: Roster | None = None  # the masked roster under way
    total: tuple[Roster, Tensor] | None = None  # a masked sum that is here
    pledge: Pledged | None = None
    lineage: bytes | None = None  # where my value may have left
    hopeless: set[bytes] = field(default_factory=set)  # rosters that too few can unmask
    # as the leader
    held: dict[PeerId, bytes] = field(default_factory=dict)  # who holds which masked sum
    news: asyncio.Event = field(default_factory=asyncio.Event)  # somebody holds it
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # the secrets are here, or will never be
    secrets: bytes | None = None  # everybody's seed, and the keys of those who are lost

    def offer(self, attempt: int) -> bytes:
        """My public keys for an attempt: fresh ones for every attempt."""
        return self.offered.setdefault(attempt, KeyPair()).public

    def open(self, roster: Roster, me: PeerId, keys: bytes) -> bool:
        """Begin a roster's epoch with everybody's keys, or go on with it; False when this is none of mine."""
        if not keys:
            fits_here = self.session is not None and self.session.epoch == roster.masks
            self.working = roster if fits_here else self.working
            return fits_here
        count, pair = len(roster.members), self.offered.get(roster.attempt)
        publics = tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
        if pair is None or len(keys) != KEY_BYTES * count or publics[roster.ranks[me]] != pair.public:
            return False
        if epoch_of(roster.run, roster.iteration, roster.ids, publics) != roster.masks:
            return False
        self.session = Session(roster.masks, roster.ids, roster.ranks[me], pair, publics)
        self.working, self.total = roster, None
        return True

    def sum_of(self, roster: Roster) -> Tensor | None:
        """The masked sum over this roster, if it is here."""
        return self.total[1] if self.total and self.total[0].digest == roster.digest else None

    def begin_leading(self) -> None:
        self.held, self.secrets = {}, None
        self.news.clear()
        self.settled.clear()

    def is_spent(self, lineage: bytes, helped: Roster | None, *, barred: bool) -> bool:
        """Whether my value may be in a sum that this lineage knows nothing of: then it must not be in another."""
        if self.lineage not in (None, lineage) or barred:
            return True  # sent elsewhere, or perhaps before a restart
        return helped is not None and (self.pledge is None or self.pledge.roster.digest != helped.digest)

    def told(self, lineage: bytes, heard: tuple[PeerId, ...], *, spent: bool) -> MaskNews:
        """What my ack says of all this; `heard`: whose values have arrived in the last attempt."""
        session, promise = self.session, self.pledge
        mine = promise if promise and promise.roster.lineage == lineage else None
        return MaskNews(
            spent,
            session.epoch if session and session.spent else None,
            heard if session else (),
            mine.roster.encoded if mine else None,
            mine.attempt if mine else -1,
            mine is not None and self.sum_of(mine.roster) is not None,
            mine is not None and mine.roster.digest in self.hopeless,
        )


# --- what a leader seals where sums are masked ---


class Promised(NamedTuple):
    """A roster that may have been unmasked already: no other of its iteration ever is."""

    roster: Roster
    holders: tuple[PeerId, ...]  # who has its masked sum; without any, or with too few shares, it is lost

    @property
    def lost(self) -> bool:
        return not self.holders


def promised(electors: Collection[Elector], acks: Acks) -> Promised | None:
    """The roster that an elector has pledged itself to in the newest attempt; others may hold its sum."""
    voters = [acks[elector.id] for elector in electors if elector.id in acks]
    pledged = [ack for ack in voters if ack.pledged is not None]
    if not pledged:
        return None
    newest = max(pledged, key=lambda ack: ack.pledged_attempt).pledged
    assert newest is not None
    same = {peer: ack for peer, ack in acks.items() if ack.pledged == newest}
    hopeless = any(ack.hopeless for ack in same.values())
    holders = () if hopeless else tuple(sorted(peer for peer, ack in same.items() if ack.sum_here))
    return Promised(decode_roster(newest), holders)


def masked(session: Session | None, roster: Roster, acks: Acks, keys: Keys) -> Roster:
    """The roster under masks: those of the last attempt where only peers are missing that sent nothing, else fresh.

    Who wants to join must bring keys, and a value that is in no other sum.
    """
    everybody = roster
    unable = [peer for peer in roster.ids if not is_public(keys[peer]) or acks[peer].spent]
    roster = willing(without(roster, unable, "its masked value may be in another sum"), acks)
    if roster.contributions < FEWEST:
        return abandoned(everybody)
    if session and _recoverable(roster, session.epoch, session.members, acks):
        return replace(roster, masks=session.epoch, circle=session.members)
    published = [keys[peer] for peer in roster.ids]
    return replace(roster, masks=epoch_of(roster.run, roster.iteration, roster.ids, published))


def _recoverable(roster: Roster, epoch: bytes, circle: tuple[PeerId, ...], acks: Acks) -> bool:
    """Whether all members' values are under these masks, and the others sent nothing and can be recovered."""
    if not set(roster.ids) <= set(circle) or any(acks[peer].epoch != epoch for peer in roster.ids):
        return False
    lost = set(circle) - set(roster.ids)
    if lost & {peer for member in roster.ids for peer in acks[member].heard}:
        return False
    place = {peer: rank for rank, peer in enumerate(circle)}
    here = {place[peer] for peer in roster.ids}
    graph = neighbours(epoch, len(circle))
    return all(len(here.intersection(graph[place[peer]])) >= threshold(len(graph[place[peer]])) for peer in lost)


def keys_for(roster: Roster, keys: Keys) -> bytes:
    """Everybody's public keys, which go with a roster that founds an epoch."""
    if not roster.masks or roster.circle:
        return b""
    return b"".join(keys[peer] for peer in roster.ids)
