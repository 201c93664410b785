"""A commit that is given up is never lost without a word, whichever lineage it was of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from marfl.net.virtual_clock import run_virtual
from marfl.protocol.commits import Commits
from marfl.protocol.roster import Member, given_up
from marfl.state import Snapshot
from stages.forgery import certified
from stages.virtual import Swarm

A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")


@pytest.mark.parametrize(
    ("mine", "theirs", "lost"),
    [
        ({1: A, 2: B}, {2: B, 3: C}, 0),
        ({1: A, 2: B}, {1: A, 2: C}, 1),
        ({1: A, 2: B, 3: C}, {1: A, 2: D, 3: D, 4: D}, 2),
        ({1: A, 2: B, 3: C}, {9: D}, 0),  # nobody tells: the past is taken to be the same
        ({1: A, 2: B, 3: C}, {1: A}, 2),  # fewer iterations, but it wins
        ({0: A}, {0: B}, 0),  # the beginning is no commit
        ({0: A}, {3: B}, 0),
    ],
)
def test_what_is_given_up_is_counted_from_where_two_histories_part(
    mine: dict[int, bytes], theirs: dict[int, bytes], lost: int
) -> None:
    assert given_up(mine, theirs) == lost


@pytest.mark.parametrize("further", [0, 1, 3])
def test_a_commit_that_is_lost_within_one_lineage_is_counted(further: int) -> None:
    """One of two peers has committed something else than the other in one iteration: it must not be, but is said."""

    async def play() -> None:
        swarm = Swarm(2)
        await swarm.iterate()
        right, wrong = swarm.people["p0"], swarm.people["p1"]
        base = swarm.record
        roster = right.record.roster
        assert roster is not None
        other = Snapshot(1, {"theta": swarm.start.vectors["theta"] - 1.0}, {})
        alone = replace(roster, members=(Member("p1", 1, 1.0),))
        wrong.standing.state, wrong.standing.record = other, base.after(alone, other.hash)
        wrong.standing.history = {1: wrong.record}
        wrong.standing.proofs = Commits("test", 1, wrong.net.verify, base)
        wrong.standing.proofs.enter(wrong.record, None, (), 1)  # it went by somebody's word
        swarm.people = {"p0": right}
        for _ in range(further):
            before = right.record
            later = replace(roster, iteration=before.iteration + 1, base=before.hash)
            right.standing.record = before.after(later, right.state.hash)
            right.history[right.record.iteration] = right.record
            nets = {name: port.net for name, port in swarm.network.ports.items()}
            right.standing.proofs.enter(right.record, certified(nets, before, right.record), (), 0)
        await right.standing.announce_head()
        assert wrong.record.lineage == right.record.lineage
        assert await wrong.catch_up()
        assert wrong.state.hash == right.state.hash
        assert wrong.discarded == 1
        assert wrong.standing.commits.get(1, right.standing.commits[1]) == right.standing.commits[1]

    run_virtual(play())
