"""What came of an aggregation, as the library tells it."""

from __future__ import annotations

from dataclasses import dataclass, field

from marfl.net.base import PeerId, Traffic


@dataclass(frozen=True)
class Aggregated:
    """What `aggregate` came to. The model holds the swarm's state in every case but "undecided"."""

    iteration: int
    status: str  # "committed"; "stale": others went on, my update is discarded; "abstained"; "undecided": no majority
    hash: bytes  # of the agreed state that the model holds now
    attempt: int = -1
    exchange: str = ""
    present: tuple[PeerId, ...] = ()  # whose updates are in the average
    missing: dict[PeerId, str] = field(default_factory=dict)  # who is not in it, and why
    discarded: str = ""  # what of mine was given up
    epsilons: dict[str, float] = field(default_factory=dict)  # of a private peer, so far, by observer
    spent: bool = False  # its target ε has no room for another iteration: time to leave
    sent: Traffic = field(default_factory=Traffic)  # bytes by kind, since the outcome before
    received: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0
