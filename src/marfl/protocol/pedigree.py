"""Which of two lineages wins. Pure functions: whoever has two pedigrees says the same of them.

A pedigree is the foundings that a chain of records went through, oldest first, and how far it has come. Read as words,
one letter for an iteration (it went on, or was founded anew), pedigrees are compared like words: the first letter that
differs decides, and what comes after it adds nothing.

    went on         beats every founding in the same iteration: a quorum of the electors signed it
    founded         more signatures of the electors before win, ties go to the lower hash
    (the end)       is behind whatever goes on

Why a quorum beats a founding. Let n electors decide, f of them lie, and q votes be a quorum, so that 2q > n + f. At
least q − f voters are honest, so at most n − q honest electors did not vote. If nobody honest signs both, a founding
has their signatures and those of f liars at most: n − q + f < q. So the rule is no other than "more signatures win".

It is a rule of its own because somebody honest may sign both: an elector that voted, was cut off before it heard the
decision, and followed a founder. However many do so, what a quorum has signed may be in somebody's hands, and stays.
(Without liars exactly half of the electors may be a quorum, with the first of them; a founding may have the others.)
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple


class Founding(NamedTuple):
    """A record that founds a lineage, as pedigrees name it."""

    iteration: int
    signers: int  # electors of the record before that signed it, as far as is known: others may show more
    hash: bytes  # of the state after it, which no other founding has
    left: int = 0  # other electors of the record before whose goodbyes it shows: they do not hold it back

    def is_same(self, other: Founding) -> bool:
        return (self.iteration, self.hash) == (other.iteration, other.hash)

    def beats(self, other: Founding) -> bool:
        """Of two in one iteration: more signers first, goodbyes included, then the lower hash."""
        return (-self.support, self.hash) < (-other.support, other.hash)

    @property
    def support(self) -> int:
        """How many of the electors before signed it, or said goodbye to the others before it."""
        return self.signers + self.left


class Pedigree(NamedTuple):
    """A chain of records, as it is compared with others."""

    foundings: tuple[Founding, ...]  # oldest first
    head: int  # its last iteration


class Kinship(Enum):
    """What my chain is to another."""

    AHEAD = "mine goes on where theirs ends"
    BEHIND = "theirs goes on where mine ends"
    WINS = "they part, and mine stays"
    LOSES = "they part, and theirs stays"
    SAME = "the same, as far as pedigrees tell"


def compare(mine: Pedigree, theirs: Pedigree) -> Kinship:
    """Whether my chain stays. Whoever has seen more signatures of a founding that both have counts no more for it."""
    for one, other in zip_longest(mine.foundings, theirs.foundings):
        if one is None:
            return Kinship.WINS if mine.head >= other.iteration else Kinship.BEHIND
        if other is None:
            return Kinship.LOSES if theirs.head >= one.iteration else Kinship.AHEAD
        if one.iteration != other.iteration:  # the later one had gone on where the earlier one was founded
            return Kinship.WINS if one.iteration > other.iteration else Kinship.LOSES
        if not one.is_same(other):
            return Kinship.WINS if one.beats(other) else Kinship.LOSES
    if mine.head == theirs.head:
        return Kinship.SAME
    return Kinship.AHEAD if mine.head > theirs.head else Kinship.BEHIND


def parted_at(mine: Pedigree, theirs: Pedigree) -> int | None:
    """The iteration of the first founding that only one of two chains went through; None: there is none."""
    for one, other in zip_longest(mine.foundings, theirs.foundings):
        if one is None or other is None or not one.is_same(other):
            return min(founding.iteration for founding in (one, other) if founding is not None)
    return None


def informed(mine: Pedigree, others: Iterable[Pedigree]) -> Pedigree:
    """My pedigree with the most signers that anybody has shown for each of its foundings (shown, not only told).

    Two certificates of one founding may have different signatures. Peers show the most they know of, so in the end they
    all compare the same numbers.
    """
    told = [founding for other in others for founding in other.foundings]
    best = [max([f, *(t for t in told if f.is_same(t))], key=lambda f: (f.support, f.signers)) for f in mine.foundings]
    return mine._replace(foundings=tuple(best))
