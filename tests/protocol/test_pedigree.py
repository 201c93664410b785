"""Which of two lineages wins."""

from __future__ import annotations

import random
from functools import cmp_to_key
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marfl.protocol.pedigree import Founding, Kinship, Pedigree, compare, informed, parted_at

AHEAD, BEHIND, WINS, LOSES, SAME = Kinship
TURNED = {AHEAD: BEHIND, BEHIND: AHEAD, WINS: LOSES, LOSES: WINS, SAME: SAME}
SIGN = {AHEAD: 1, WINS: 1, SAME: 0, BEHIND: -1, LOSES: -1}


def founding(iteration: int, signers: int, name: int) -> Founding:
    return Founding(iteration, signers, bytes([name]) * 32)


A, B, C = founding(5, 3, 1), founding(5, 2, 0), founding(5, 3, 2)
LATER, ON_A = founding(7, 1, 3), founding(9, 1, 4)

TABLE: dict[str, tuple[Pedigree, Pedigree, Kinship]] = {
    "the same": (Pedigree((), 4), Pedigree((), 4), SAME),
    "later in one lineage": (Pedigree((), 5), Pedigree((), 4), AHEAD),
    "later in one lineage that was founded": (Pedigree((A,), 6), Pedigree((A,), 9), BEHIND),
    "who went on beats a founding in that iteration": (Pedigree((), 5), Pedigree((A,), 5), WINS),
    "and so it does if the other has come far": (Pedigree((), 5), Pedigree((A,), 500), WINS),
    "a founding where mine ends goes on": (Pedigree((), 4), Pedigree((A,), 5), BEHIND),
    "a founding after mine ends goes on": (Pedigree((), 2), Pedigree((A,), 8), BEHIND),
    "more signers": (Pedigree((A,), 5), Pedigree((B,), 90), WINS),
    "as many signers, and the higher hash": (Pedigree((C,), 90), Pedigree((A,), 5), LOSES),
    "who founded later had gone on": (Pedigree((LATER,), 7), Pedigree((A,), 90), WINS),
    "what comes after the first difference adds nothing": (Pedigree((B, LATER), 90), Pedigree((A,), 6), LOSES),
    "a second founding, where the other went on": (Pedigree((A, ON_A), 20), Pedigree((A,), 9), LOSES),
    "a second founding, where the other ended": (Pedigree((A, ON_A), 9), Pedigree((A,), 8), AHEAD),
    "one founding, of which one has seen more signatures": (
        Pedigree((A._replace(signers=1),), 6), Pedigree((A,), 6), SAME
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_first_difference_decides(name: str):
    mine, theirs, kinship = TABLE[name]
    assert compare(mine, theirs) is kinship
    assert compare(theirs, mine) is TURNED[kinship]


def forest(dice: random.Random, size: int) -> list[Pedigree]:
    """Chains grown from one beginning: each goes on in its lineage, once, or is founded anew, by whomever."""
    found = [Pedigree((), 0)]
    while len(found) < size:
        start = dice.choice(found)
        new = Founding(start.head + 1, dice.randrange(3), dice.randbytes(30) + len(found).to_bytes(2))
        founds = Pedigree((*start.foundings, new), start.head + 1)
        found.append(dice.choice([founds, start._replace(head=start.head + 1)]))
    return list(dict.fromkeys(found))


@given(st.integers(0, 2**32))
def test_pedigrees_are_in_one_order(seed: int):
    dice = random.Random(seed)
    chains = forest(dice, 12)
    for one in chains:
        assert compare(one, one) is SAME
        for two in chains:
            assert compare(one, two) is TURNED[compare(two, one)]
            assert (compare(one, two) is SAME) == (one == two)
            for three in chains:
                if SIGN[compare(one, two)] >= 0 and SIGN[compare(two, three)] >= 0:
                    assert SIGN[compare(one, three)] >= 0


@given(st.integers(0, 2**32))
def test_whoever_meets_whom_first_all_end_on_one_winner(seed: int):
    dice = random.Random(seed)
    peers = dice.choices(forest(dice, 12), k=6)
    best = max(peers, key=cmp_to_key(lambda one, two: SIGN[compare(one, two)]))
    meetings = list(permutations(range(6), 2)) * 2
    dice.shuffle(meetings)
    for me, other in [*meetings, *permutations(range(6), 2)]:
        if SIGN[compare(peers[me], peers[other])] < 0:
            peers[me] = peers[other]
    assert peers == [best] * 6


@given(st.integers(0, 2**32))
def test_peers_that_saw_different_signatures_of_a_founding_end_on_one_winner_too(seed: int):
    dice = random.Random(seed)
    def seen(chain: Pedigree) -> Pedigree:
        some = (f._replace(signers=dice.randint(0, f.signers)) for f in chain.foundings)
        return chain._replace(foundings=tuple(some))

    peers = [seen(chain) for chain in dice.choices(forest(dice, 8), k=6)]
    for _ in range(12):
        for me, other in dice.sample(list(permutations(range(6), 2)), 30):
            mine, theirs = informed(peers[me], [peers[other]]), informed(peers[other], [peers[me]])
            peers[me] = theirs if SIGN[compare(mine, theirs)] < 0 else mine
    assert len({compare(one, two) for one in peers for two in peers}) == 1


def test_the_most_signers_that_were_shown_count():
    mine = Pedigree((A, ON_A), 9)
    more = Pedigree((A._replace(signers=7),), 5)
    assert informed(mine, [more, Pedigree((B,), 5)]).foundings == (A._replace(signers=7), ON_A)


@pytest.mark.parametrize(
    ("mine", "theirs", "since"),
    [
        ((), (), None),
        ((), (5,), 5),
        ((5,), (), 5),
        ((5,), (5,), None),
        ((5, 9), (7,), 5),
        ((5, 9), (5, 7), 7),
        ((5, 9), (5,), 9),
    ],
)
def test_chains_part_where_the_first_founding_is_that_only_one_of_them_has(
    mine: tuple[int, ...], theirs: tuple[int, ...], since: int | None
):
    one, other = (Pedigree(tuple(Founding(at, 1, bytes([at]) * 32) for at in each), 20) for each in (mine, theirs))
    assert parted_at(one, other) == since
