"""Who votes after a roster. Pure functions: every elector asks them before it votes for one, so no leader decides it.

    an elector of this decision     stays one, if the roster names it
    a newcomer                      has signed that it takes part (its *arrival*), or the roster is not voted for. It is
                                    a *junior* until it has contributed to so many commits (`seniority`) without being
                                    missing in between; then it is an elector
    a founder of a lineage          is an elector at once; it has signed its arrival as well
    an elector that is missing      stays one where fewer liars would be borne without it, until another leader misses
                                    it, too

Juniors and their counts are in the roster, so the electors after a record follow from the record alone. Where fewer
than `FEW` electors would be left none of them may lie anyway, and whoever has contributed once votes.

What that stops: a leader that names peers which do not exist, or never answered. In a closed run an arrival comes with
its peer's token, so nobody without one becomes an elector. In an open run whoever has many names can still have each of
them contribute: it takes `seniority` commits longer, and no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import msgpack

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.protocol.ballot import bearable
from marfl.protocol.roster import VOID, DecisionId, Elector, Record, Roster, Staying
from marfl.protocol.statements import MOST_SIGNATURES, SIGNATURE_BYTES, Verify, statement

FEW = 4  # electors: of fewer none may lie
LONGEST_TOKEN = 256  # bytes
MARK = b"\xc1"  # no msgpack begins so: arrivals come before promises

Entitled: TypeAlias = Callable[[PeerId, bytes], bool]  # whether a peer with this token may take part: see `Net`
Juniors: TypeAlias = tuple[tuple[PeerId, int], ...]


# --- who votes ---


def juniors_after(
    before: Record, electors: Sequence[Elector], roster: Roster, seniority: int, liars: int
) -> Juniors:
    """Who of a roster does not vote after it yet, and to how many commits each has contributed.

    `electors`: who decide on it, in the order in which they lead. Whoever was missing begins again.
    """
    counts = _counts(before, electors, roster)
    seniors = len(roster.party) - sum(count < seniority for count in counts.values())
    missed = len(_missed(before, electors, roster)) if bearable(len(electors), liars) else 0
    needed = seniority if seniors + missed >= FEW else 1
    return tuple((peer, count) for peer, count in counts.items() if count < needed)


def _missed(before: Record, electors: Sequence[Elector], roster: Roster) -> tuple[Staying, ...]:
    """Electors that a roster does not name, and that no other leader has missed before."""
    if roster.electors:
        return ()
    here = {one.id for one in roster.party}
    leader = electors[roster.attempt % len(electors)].id
    earlier = {one.id: one.missed_by for one in before.roster.stays} if before.roster else {}
    missed = [Staying(*one, earlier.get(one.id, leader)) for one in electors if one.id not in here]
    return tuple(one for one in missed if one.missed_by == leader)


def _counts(before: Record, electors: Iterable[Elector], roster: Roster) -> dict[PeerId, int]:
    """By newcomer: to how many commits it has contributed, this one included."""
    known = {elector.id for elector in electors}
    earlier = dict(before.roster.juniors) if before.roster else {}
    gives = roster.ranks if roster.exchange != VOID else {}
    new = [elector.id for elector in roster.party if elector.id not in known]
    return {peer: earlier.get(peer, 0) + (peer in gives) for peer in new}


def hasty(before: Record, roster: Roster, seniority: int) -> tuple[PeerId, ...]:
    """Who votes after a roster though it has contributed to fewer commits: because too few seniors are left."""
    counts = _counts(before, roster.electors or before.electors, roster)
    voters = {elector.id for elector in roster.voters}
    return tuple(peer for peer, count in counts.items() if count < seniority and peer in voters)


def staying(before: Record, electors: Sequence[Elector], roster: Roster, liars: int) -> tuple[Staying, ...]:
    """Which electors that a roster does not name vote after it all the same; its juniors are known.

    So one leader alone cannot leave out others until there are so few that none of them may lie (`bearable`).
    """
    fewer = bearable(len(roster.voters), liars) < bearable(len(electors), liars)
    return _missed(before, electors, roster) if fewer else ()


def graded(before: Record, electors: Sequence[Elector], roster: Roster, seniority: int, liars: int) -> Roster:
    """The roster with its juniors, and with those who vote though they are missing."""
    young = replace(roster, juniors=juniors_after(before, electors, roster, seniority, liars))
    return replace(young, stays=staying(before, electors, young, liars))


# --- arrivals: that somebody takes part, in its own words ---


class Arrival(NamedTuple):
    """A newcomer's signature that it takes part in an attempt, and what lets it."""

    signature: bytes
    token: bytes  # empty in an open run

    @classmethod
    def cut(cls, data: bytes) -> Arrival:
        """As an ack carries it."""
        return cls(data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:])


def arrival(decision: DecisionId, attempt: int, index: int) -> bytes:
    """What somebody signs who acks an attempt at a decision in which it has no vote yet."""
    return statement("arrival", *decision, attempt, index)


def is_arrival(
    shown: Arrival, who: Elector, attempt: int, decision: DecisionId, verify: Verify, entitled: Entitled
) -> bool:
    """Whether a newcomer has signed that it takes part, and may."""
    said = arrival(decision, attempt, who.index)
    fits = len(shown.token) <= LONGEST_TOKEN
    return fits and verify(who.id, said, shown.signature) and entitled(who.id, shown.token)


def arriving(electors: Sequence[Elector], roster: Roster) -> tuple[Elector, ...]:
    """Whose arrival must be shown: of all that a roster names who have no vote in it, or found its lineage."""
    known = set(electors)
    return tuple(one for one in dict.fromkeys([*roster.electors, *roster.party]) if one not in known)


def pack_arrivals(wanted: Iterable[Elector], known: Mapping[PeerId, Arrival]) -> bytes:
    """These peers' arrivals in this order, as far as they are known; nothing where nobody arrives."""
    rows = [known[one.id] for one in wanted if one.id in known]
    data: bytes = msgpack.packb(rows) if rows else b""
    return data


def unpack_arrivals(data: bytes, wanted: Sequence[Elector]) -> dict[PeerId, Arrival]:
    """The arrivals of these peers, one of each, or `WireError`; nothing is verified yet."""
    try:
        rows = msgpack.unpackb(data, raw=False, max_array_len=MOST_SIGNATURES, max_ext_len=0) if data else []
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not arrivals: {type(error).__name__}") from None
    if not isinstance(rows, list) or len(rows) != len(wanted):
        raise WireError("not the arrivals of all who are new")
    if any(not isinstance(row, list) or [type(part) for part in row] != [bytes, bytes] for row in rows):
        raise WireError("not arrivals: bad fields")
    return {one.id: Arrival(*row) for one, row in zip(wanted, rows, strict=True)}


def joined(promises: bytes, arrivals: bytes) -> bytes:
    """What a leader shows of an attempt, in one: `parted` undoes it. Without arrivals these are the promises."""
    return MARK + len(arrivals).to_bytes(4) + arrivals + promises if arrivals else promises


def parted(data: bytes) -> tuple[bytes, bytes]:
    """Promises and arrivals, or `WireError`; neither is read yet."""
    if data[:1] != MARK:
        return data, b""
    end = 5 + int.from_bytes(data[1:5])
    if len(data) < end:
        raise WireError("arrivals that end too soon")
    return data[end:], data[5:end]
