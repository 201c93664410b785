"""What a leader seals where sums are masked: fresh masks, a recovery without those who sent nothing, or nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from marfl.net.base import PeerId
from marfl.protocol.instance import Instance
from marfl.protocol.roster import Elector, Roster, decode_roster
from marfl.protocol.trimming import abandoned, willing, without
from marfl.secagg.crypto import is_public
from marfl.secagg.graph import FEWEST, neighbours, threshold
from marfl.secagg.session import epoch_of

if TYPE_CHECKING:
    from marfl.protocol.participant import Participant

Acks = dict[PeerId, dict[str, Any]]


class Promised(NamedTuple):
    """A roster that may have been unmasked already: no other of its iteration ever is."""

    roster: Roster
    holders: list[PeerId]  # who has its masked sum; without any, or with too few shares, it is lost

    @property
    def lost(self) -> bool:
        return not self.holders


def promised(electors: Collection[Elector], acks: Acks) -> Promised | None:
    """The roster that an elector has pledged itself to in the newest attempt; others may hold its sum."""
    voters = [acks[elector.id] for elector in electors if elector.id in acks]
    pledged = [ack for ack in voters if ack["pledged"] is not None]
    if not pledged:
        return None
    newest = max(pledged, key=lambda ack: int(ack["pledged_attempt"]))["pledged"]
    same = {peer: ack for peer, ack in acks.items() if ack["pledged"] == newest}
    hopeless = any(ack["hopeless"] for ack in same.values())
    holders = [] if hopeless else sorted(peer for peer, ack in same.items() if ack["sum_here"])
    return Promised(decode_roster(newest), holders)


def can_mask(ack: dict[str, Any]) -> bool:
    """Whether a peer that wants to join brings keys, and a value that is in no other sum."""
    return is_public(ack["keys"]) and not ack["spent"]


def masked(me: Participant, instance: Instance, roster: Roster, acks: Acks) -> Roster:
    """The roster under masks: those of the last attempt where only peers are missing that sent nothing, else fresh."""
    everybody = roster
    unable = [peer for peer in roster.ids if not can_mask(acks[peer])]
    roster = willing(without(roster, unable, "its masked value may be in another sum"), acks)
    if roster.contributions < FEWEST:
        return abandoned(everybody)
    session = instance.masks.session
    if session and _recoverable(roster, session.epoch, session.members, acks):
        return replace(roster, masks=session.epoch, circle=session.members)
    keys = [acks[peer]["keys"] for peer in roster.ids]
    return replace(roster, masks=epoch_of(roster.run, roster.iteration, roster.ids, keys))


def _recoverable(roster: Roster, epoch: bytes, circle: tuple[PeerId, ...], acks: Acks) -> bool:
    """Whether all members' values are under these masks, and the others sent nothing and can be recovered."""
    if not set(roster.ids) <= set(circle) or any(acks[peer]["epoch"] != epoch for peer in roster.ids):
        return False
    lost = set(circle) - set(roster.ids)
    if lost & {peer for member in roster.ids for peer in acks[member]["heard"] if isinstance(peer, str)}:
        return False
    place = {peer: rank for rank, peer in enumerate(circle)}
    here = {place[peer] for peer in roster.ids}
    graph = neighbours(epoch, len(circle))
    return all(len(here.intersection(graph[place[peer]])) >= threshold(len(graph[place[peer]])) for peer in lost)


def keys_for(roster: Roster, acks: Acks) -> bytes:
    """Everybody's public keys, which go with a roster that founds an epoch."""
    if not roster.masks or roster.circle:
        return b""
    return b"".join(acks[peer]["keys"] for peer in roster.ids)
