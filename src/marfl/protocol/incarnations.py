"""Which process speaks in a peer's name: its incarnation, and what another one of the same key means.

Every start of a key takes a new incarnation: a counter that its vote log keeps, and random bits below it. A restored
backup of the log counts from where it was; two processes with one copy count alike, but differ in the bits. Either
would vote again where the key has voted, so whoever hears it does not count the vote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from marfl.net.base import PeerId

BITS = 20  # random ones, below the counter
MOST = 65_536  # peers that are remembered
SECOND = "second incarnation"  # a vote that is not counted: in `Net.refused`


def incarnation_of(starts: int, random: Callable[[int], int]) -> int:
    """The incarnation of a key's start number `starts`; `random` draws so many bits. 0 starts: nobody counts them."""
    return starts << BITS | random(BITS)


class Heard(NamedTuple):
    """What is known of the processes that spoke in one peer's name."""

    latest: int  # the incarnation that has counted furthest
    voted_as: int = -1  # the one whose vote was heard last
    voted_in: bytes = b""  # and in which decision


def objection(incarnation: int, heard: Heard | None, decision: bytes) -> str:
    """Why a vote of this incarnation in this decision must not count; "" where it may."""
    if heard is None:
        return ""
    starts, before = incarnation >> BITS, heard.latest >> BITS
    if starts < before:
        return f"is a restored backup, or another process uses its key (incarnation {starts} after {before})"
    if starts == before and incarnation != heard.latest:
        return "two processes use its key"
    if decision == heard.voted_in and incarnation != heard.voted_as:
        return "has voted in this iteration under another incarnation"
    return ""


class Incarnations:
    """Of everybody who was heard lately, the one that has counted furthest and the last vote."""

    def __init__(self, most: int = MOST) -> None:
        self._heard: dict[PeerId, Heard] = {}  # the one not heard for longest first
        self._most = most

    def note(self, peer: PeerId, incarnation: int) -> None:
        """Somebody said something. An old word that comes late, or a twin's, changes nothing."""
        heard = self._heard.pop(peer, Heard(incarnation))
        later = incarnation >> BITS > heard.latest >> BITS
        self._keep(peer, heard._replace(latest=incarnation) if later else heard)

    def vote(self, peer: PeerId, incarnation: int, decision: bytes) -> str:
        """Somebody votes; why that must not count, or "" where it does: then it is remembered."""
        why = objection(incarnation, self._heard.get(peer), decision)
        if not why:
            self._heard.pop(peer, None)
            self._keep(peer, Heard(incarnation, incarnation, decision))
        return why

    def _keep(self, peer: PeerId, heard: Heard) -> None:
        self._heard[peer] = heard
        if len(self._heard) > self._most:  # anybody may say something in an open run
            del self._heard[next(iter(self._heard))]
