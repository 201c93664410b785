"""What a leader makes of acks: which of them are well-formed, and who spoiled the attempt before. Pure functions.

An ack is a peer's word. Its numbers must be in bounds, or nobody could follow a roster made of them; and nobody is left
out for what one peer alone says of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from marfl.errors import WireError
from marfl.net.base import PeerId
from marfl.protocol.roster import MAX_INDEX, Roster, decode_roster

BAD_ACK = "bad ack"  # counted in `Net.refused`; whoever sent it is as good as silent
ROLES = ("member", "witness", "training", "behind")
MOST_NAMES = 100_000  # in a list of peers
LATE = "its data did not arrive"
ACCUSES_MANY = "accuses several peers, each of them alone"
ACCUSES_ALONE = "alone accuses another peer, and either may be wrong"

Ack = Mapping[str, Any]
Acks = Mapping[PeerId, Ack]
Decision: TypeAlias = tuple[str, int, bytes, bytes]  # run, iteration, hash of the state before, lineage


def check_ack(ack: Ack, attempt: int, decision: Decision, heaviest: float) -> None:
    """`WireError` for an ack that no honest peer gives to a proposal of this attempt at a decision."""
    _need(ack["role"] in ROLES, "role")
    _need(0 <= ack["index"] <= MAX_INDEX, "index")
    _need(0 <= ack["weight"] <= heaviest, f"weight (max_weight is {heaviest:g})")
    _need(0 <= ack["fewest"] <= MAX_INDEX, "number of contributions")
    _need(not ack["join"] or ack["role"] == "member", "role")
    for name in ("unsent", "heard"):
        _need(len(ack[name]) <= MOST_NAMES and all(isinstance(peer, str) for peer in ack[name]), "names")
    _need(len(ack["blamed"]) <= MOST_NAMES and all(_is_complaint(row) for row in ack["blamed"]), "complaints")
    if ack["status"] == "ack":
        _need(ack["attempt"] == attempt, "attempt")
        _need((ack["accepted"] is None) == (ack["accepted_hash"] is None), "vote")
        for roster, when in ((ack["accepted"], ack["accepted_attempt"]), (ack["pledged"], ack["pledged_attempt"])):
            _need(roster is None or _is_earlier(decode_roster(roster), when, attempt, decision), "vote")


def _is_earlier(roster: Roster, when: int, attempt: int, decision: Decision) -> bool:
    of = roster.run, roster.iteration, roster.base, roster.lineage
    return of == decision and roster.attempt <= when <= attempt


def _is_complaint(row: Any) -> bool:
    return isinstance(row, list) and [type(value) for value in row] == [str, str, bool] and len(row[1]) <= 200


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise WireError(f"an ack with a bad {what}")


# --- blame ---


def culprits(acks: Acks, *, patient: bool) -> dict[PeerId, str]:
    """Who must be left out of the next roster, and why: peers that sent bad data, and the roots of the waiting.

    A peer that is waited for, but waits for somebody itself or cannot be rid of what it has for somebody who is silent
    or has a bad link, is excused, unless its own link is bad; so is one of whom a single peer complains, unless it says so itself. If that
    leaves nobody, nobody is blamed while there is patience; after that whoever the most peers wait for.
    """
    guilty = _caught(acks)
    waits = _complaints(acks, caught=False)
    slow = _bad_links(acks, waits)
    able = {p: ack for p, ack in acks.items() if not ack["waits"] and ack["accepted"] is None}
    free = {p for p, ack in able.items() if not _held_up(ack, acks.keys() - slow)}
    roots = {p for p, by in waits.items() if p in slow or (p in free and _is_supported(acks[p], by))}
    if not roots and not guilty and waits and not patient:
        worst = max(waits, key=lambda peer: (len(waits[peer]), peer))
        roots = {worst} if len(waits[worst]) > 1 else {worst, *waits[worst]}
    return dict.fromkeys(roots, LATE) | guilty


def _complaints(acks: Acks, *, caught: bool) -> dict[PeerId, dict[PeerId, str]]:
    """By accused: who complains of it, and of what. Nobody complains of itself."""
    found: defaultdict[PeerId, dict[PeerId, str]] = defaultdict(dict)
    for accuser, ack in acks.items():
        for peer, reason, is_caught in ack["blamed"]:
            if is_caught is caught and peer != accuser:
                found[peer][accuser] = reason
    return dict(found)


def _caught(acks: Acks) -> dict[PeerId, str]:
    """Who sent what must not be used. Where one peer alone says so, either of the two may be to blame: both sit out.

    Who says so of several, each time alone, is the one that they have in common.
    """
    accused = _complaints(acks, caught=True)
    guilty = {peer: next(iter(by.values())) for peer, by in accused.items() if len(by) > 1}
    alone = [(next(iter(by)), peer) for peer, by in accused.items() if len(by) == 1]
    counts = Counter(accuser for accuser, _ in alone)
    guilty |= {accuser: ACCUSES_MANY for accuser, count in counts.items() if count > 1 and accuser not in guilty}
    for accuser, peer in alone:
        if accuser not in guilty and peer not in guilty:
            guilty |= {peer: f"{accused[peer][accuser]}, says {accuser}", accuser: ACCUSES_ALONE}
    return guilty


def _is_supported(ack: Ack, accusers: Collection[PeerId]) -> bool:
    """Whether a complaint counts: several have it, or the accused itself has not got rid of what it owes."""
    return len(accusers) > 1 or any(accuser in ack["unsent"] for accuser in accusers)


def _held_up(ack: Ack, reached: Collection[PeerId]) -> bool:
    """Whether this peer still has something for somebody who is not reached: what it sends after that is late."""
    return any(to not in reached for to in ack["unsent"])


def _bad_links(acks: Acks, waits: dict[PeerId, dict[PeerId, str]]) -> set[PeerId]:
    """The fewest peers that explain all the messages that could not be sent between peers that live.

    Of two ends that explain as much: the one that several wait for, unless it waits for the other; else the sender.
    """
    stuck = {(sender, to) for sender, ack in acks.items() for to in ack["unsent"] if to in acks}
    found: set[PeerId] = set()
    while stuck:
        ends = Counter(end for pair in stuck for end in pair)
        senders = {sender for sender, _ in stuck}
        both_ways = stuck | {(to, sender) for sender, to in stuck}
        excused = {one for one, other in both_ways if one in waits.get(other, ())}
        missed = {peer for peer in ends if len(waits.get(peer, ())) > 1} - excused
        worst = max(ends, key=lambda peer: (ends[peer], peer in missed, peer in senders, peer))
        found.add(worst)
        stuck = {pair for pair in stuck if worst not in pair}
    return found
