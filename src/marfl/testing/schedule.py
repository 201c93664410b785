"""What befalls a world: one fault that its seed determines, a few more at random, and what it is like otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from marfl.net.base import PeerId
from marfl.protocol.settings import EXCHANGES
from marfl.testing.faults import MASKED_PHASES, ON_MESSAGES, PHASES, Fault, Strike, strikeable

PHASES_OF = {"fp32": PHASES, "fixed": PHASES, "masked": MASKED_PHASES}  # by how values travel
LATEST = 12  # the last iteration in which something may begin, in the longest worlds
WITNESS, IDLE, MEMBER = "only votes", "helps to aggregate", "brings an update"  # a peer's part in an iteration

First = tuple[Fault, str, str]  # the fault, phase and exchange that a seed stands for


@lru_cache
def combinations(wire: str, faults: tuple[Fault, ...]) -> tuple[First, ...]:
    """Every fault in every phase where it can strike, under every exchange."""
    return tuple(
        (fault, phase, exchange)
        for exchange in EXCHANGES
        for phase in PHASES_OF[wire]
        for fault in faults
        if strikeable(fault, phase, exchange)
    )


@dataclass(frozen=True)
class Conditions:
    """What a world is like apart from its strikes. Each has dice of its own: what else a seed stands for stays."""

    seed: int = 0
    size: int = 0  # of a large world; 0: as the seed's other dice say
    delay: int = 0  # iterations before the first strike may fall
    more: int = 0  # strikes that may fall at any time
    clocks: bool = False  # everybody's clock has its own origin, and is a little fast or slow
    watching: float = 0.0  # the share of those who only vote, in each iteration
    idle: float = 0.0  # and of those who bring nothing and help to aggregate
    empty: frozenset[int] = frozenset()  # iterations to which nobody brings anything

    def part(self, index: int, iteration: int) -> str:
        """What a peer does in an iteration."""
        dice = Random(f"part of {index} in {iteration} of {self.seed}")
        if iteration in self.empty:
            return dice.choice([WITNESS, IDLE])
        if index == 0 or not (self.watching or self.idle):
            return MEMBER  # somebody brings something
        drawn = dice.random()
        return WITNESS if drawn < self.watching else IDLE if drawn < self.watching + self.idle else MEMBER


def conditions(seed: int) -> Conditions:
    """Most worlds are small, short and everybody takes part; some are not."""
    parts, later, empty = (Random(f"{what} of {seed}") for what in ("parts", "strikes", "empty iterations"))
    large = Random(f"size of {seed}")
    return Conditions(
        seed,
        size=large.choice([20, 27, 33, 40]) if large.random() < 0.02 else 0,
        delay=later.randint(1, LATEST - 3) if later.random() < 0.1 else 0,
        more=later.randint(1, 4) if later.random() < 0.1 else 0,
        clocks=Random(f"clocks of {seed}").random() < 0.3,
        watching=parts.choice([0.0, 0.0, 0.0, 0.2, 0.5]),
        idle=parts.choice([0.0, 0.0, 0.0, 0.2, 0.5]),
        empty=frozenset(empty.sample(range(1, 8), empty.randint(1, 3)) if empty.random() < 0.1 else ()),
    )


def schedule(
    random: Random, names: list[PeerId], wire: str, first: First, faults: Sequence[Fault] = tuple(Fault)
) -> list[Strike]:
    """One to four faults in the first three iterations; mostly few enough that nobody else may notice."""
    fault, phase, exchange = first
    strikes = [_strike(random, fault, phase, names, names, since=1)]
    if phase == "sync":  # somebody must come who has something to catch up with
        strikes.append(Strike(Fault.LATE_JOINER, "announce", random.choice([2, 3]), victim=None))
    spared = [name for name in names if name != strikes[0].victim]  # the first fault is to find its victim alive
    for _ in range(random.choice([0, 0, 0, 1, 2, 3])):
        strikes.append(_any(random, faults, wire, exchange, names, spared, since=strikes[0].iteration))
    return strikes


def delayed(
    seed: int, around: Conditions, strikes: list[Strike], names: list[PeerId], wire: str, exchange: str
) -> list[Strike]:
    """The same strikes later, and more of them at any time."""
    random = Random(f"more strikes of {seed}")
    late = [s if s.fault is Fault.CLOCK_SKEW else replace(s, iteration=s.iteration + around.delay) for s in strikes]
    spared = [name for name in names if name != strikes[0].victim]
    for _ in range(around.more):
        strike = _any(random, tuple(Fault), wire, exchange, names, spared, since=1)
        when = 1 if strike.fault is Fault.CLOCK_SKEW else random.randint(strikes[0].iteration, LATEST)
        late.append(replace(strike, iteration=when))
    return late


def _any(
    random: Random, faults: Sequence[Fault], wire: str, exchange: str, names: list[PeerId], victims: list[PeerId],
    *, since: int,
) -> Strike:  # fmt: skip
    another = random.choice(list(faults))
    phases = [p for p in PHASES_OF[wire] if strikeable(another, p, exchange)]
    return _strike(random, another, random.choice(phases), names, victims, since=since)


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
