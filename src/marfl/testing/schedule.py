"""What befalls a world: one fault that its seed determines, and a few more at random."""

from __future__ import annotations

from random import Random

from marfl.net.base import PeerId
from marfl.protocol.settings import EXCHANGES
from marfl.testing.faults import MASKED_PHASES, ON_MESSAGES, PHASES, Fault, Strike, strikeable

PHASES_OF = {"fp32": PHASES, "fixed": PHASES, "masked": MASKED_PHASES}  # by how values travel
COMBINATIONS = {
    wire: [
        (fault, phase, exchange)
        for exchange in EXCHANGES
        for phase in phases
        for fault in Fault
        if strikeable(fault, phase, exchange)
    ]
    for wire, phases in PHASES_OF.items()
}


def schedule(random: Random, names: list[PeerId], wire: str, first: tuple[Fault, str, str]) -> list[Strike]:
    """One to four faults in the first three iterations; mostly few enough that nobody else may notice."""
    fault, phase, exchange = first
    strikes = [_strike(random, fault, phase, names, names, since=1)]
    if phase == "sync":  # somebody must come who has something to catch up with
        strikes.append(Strike(Fault.LATE_JOINER, "announce", random.choice([2, 3]), victim=None))
    for _ in range(random.choice([0, 0, 0, 1, 2, 3])):
        another = random.choice(list(Fault))
        phases = [p for p in PHASES_OF[wire] if strikeable(another, p, exchange)]
        spared = [name for name in names if name != strikes[0].victim]  # the first fault is to find its victim alive
        strikes.append(_strike(random, another, random.choice(phases), names, spared, since=strikes[0].iteration))
    return strikes


def _strike(
    random: Random, fault: Fault, phase: str, names: list[PeerId], victims: list[PeerId], *, since: int
) -> Strike:
    """A fault for one of these victims, or for whoever gets there."""
    size = len(names)
    anybody = fault in (*ON_MESSAGES, Fault.SEALER_DIES, Fault.LATE_JOINER) or phase in ("sync", "gather")
    if fault is Fault.CRASH_HALFWAY and phase == "commit":
        anybody = True  # only a leader sends more than one message there
    before = {"sync": 1, "seal": size, "reduce": 2 * size - 2, "gather": 2 * size - 2}.get(phase, 0)
    return Strike(
        fault,
        phase,
        iteration=1 if fault is Fault.CLOCK_SKEW else random.randint(since, 3),
        victim=None if anybody else random.choice(victims),
        seconds=random.choice([3.0, 15.0, 40.0, 100.0]),
        skip=int(fault is Fault.CRASH_HALFWAY),
        others=random.randint(0, before) if anybody else 0,
    )
