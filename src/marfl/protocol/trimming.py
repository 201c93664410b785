"""Rosters made smaller before they are sealed: without those who cannot or will not be in the sum, or without a sum."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from marfl.net.base import PeerId
from marfl.protocol.exchange import VOID
from marfl.protocol.roster import Elector, Member, Roster, ranked

TOO_SMALL = "the sum would hold fewer contributions than its privacy budget allows"


def without(roster: Roster, left: Collection[PeerId], why: str) -> Roster:
    """The roster without these members, who only vote."""
    if not left:
        return roster
    kept = tuple(member for member in roster.members if member.id not in left)
    gone = [member for member in roster.members if member.id in left]
    voters = (*roster.witnesses, *(Elector(member.id, member.index) for member in gone))
    omitted = (*roster.omitted, *((member.id, why) for member in gone))
    return replace(roster, members=kept, witnesses=ranked(roster.run, roster.iteration, voters), omitted=omitted)


def willing(roster: Roster, acks: dict[PeerId, dict[str, Any]]) -> Roster:
    """The largest part of a roster whose sum is large enough for everybody in it (`Contribution.fewest`).

    Whoever wants more contributions than there are is left out; that may leave too few for others, and so on.
    """
    while unwilling := {m.id for m in roster.members if m.weight and acks[m.id]["fewest"] > roster.contributions}:
        roster = without(roster, unwilling, TOO_SMALL)
    return roster


def abandoned(roster: Roster) -> Roster:
    """The same peers let the iteration go by: nothing is summed, nothing revealed, the model stays as it is."""
    members = tuple(Member(member.id, member.index, 0.0) for member in roster.members)
    return replace(roster, exchange=VOID, members=members, wire="fp32", masks=b"", circle=())
