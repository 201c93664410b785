"""What a peer keeps of an iteration's masks: keys and secrets, the masked sum it holds, and what it has pledged.

What it may give away follows from this:

- Its seed, or shares of others' secrets, only for a roster that a majority of the electors has pledged itself to. A
  pledge is a vote as in Paxos (see `roster`): the leader of a later attempt that hears of one must see the same roster
  through, or let the iteration go by. So at most one set of inputs of an iteration is ever unmasked.
- Nothing in a second lineage once its value has left in a first one, and nothing for a second roster of an iteration.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from marfl.net.base import PeerId
from marfl.protocol.roster import Roster
from marfl.secagg.crypto import KeyPair
from marfl.secagg.graph import KEY_BYTES
from marfl.secagg.session import Session, epoch_of

if TYPE_CHECKING:
    from marfl.protocol.instance import Instance
    from marfl.protocol.participant import Participant

KIND = "masks"  # what keys, shares and seeds are called in the ledger


@dataclass(frozen=True)
class Pledge:
    """Which roster may be unmasked, and the attempt in which that was promised."""

    attempt: int
    roster: Roster


@dataclass
class Masking:
    """One iteration's masks, as one peer holds them."""

    offered: dict[int, KeyPair] = field(default_factory=dict)  # by attempt: a vote asked for twice says the same
    session: Session | None = None
    working: Roster | None = None  # the masked roster under way
    total: tuple[Roster, Tensor] | None = None  # a masked sum that is here
    pledge: Pledge | None = None
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


def spent(me: Participant, instance: Instance) -> bool:
    """Whether my value may be in a sum that this lineage knows nothing of: then it must not be in another."""
    masks = instance.masks
    if masks.lineage not in (None, instance.lineage) or me.barred == instance.iteration:
        return True  # sent elsewhere, or perhaps before a restart
    helped = me.helped.get(instance.iteration)
    return helped is not None and (masks.pledge is None or masks.pledge.roster.digest != helped.digest)
