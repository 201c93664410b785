"""Mutants of the protocol, each with one rule broken: the soak must catch every one of them within 300 seeds."""

from __future__ import annotations

import pytest

from marfl.protocol import leader, member, readiness, sealing, voting, wire
from marfl.protocol.attempt import Attempt
from marfl.protocol.instance import Instance
from marfl.protocol.participant import Participant
from marfl.testing.world import World
from mutation import Edit, mutate

SEEDS = 300

MUTANTS: dict[str, list[Edit]] = {
    "tags and headers without the roster": [
        Edit(Attempt.tag, "self.roster.attempt, round, self._part", "0, round, 0"),
        Edit(wire.slice_from, "fields['digest'] != digest", "False"),
    ],
    "sums in another order on every peer": [
        Edit(Attempt._sum_piece, "rank in sources:", "rank in sorted(sources, key=lambda r: r != self.rank):")
    ],
    "a missing slice counts as zeros": [
        Edit(
            Attempt._repair,
            "raise Stuck(f'no slice of {self.roster.members[want.rank].id} from anybody')",
            "return torch.zeros(want.stop - want.start)",
        )
    ],
    "an earlier result is not adopted": [Edit(sealing._earlier_result, "if not voted:", "if True:")],
    "votes for lower attempts too": [
        Edit(voting.vote, "or attempt < instance.promised", ""),
        Edit(member.begin, "or attempt < instance.promised", ""),
        Edit(Instance.promise, "if attempt > self.promised:", "if True:"),
    ],
    "a proxy serves its own sum for anybody's": [
        Edit(Attempt.find, "same = rank == self.rank or self.rank in self.plan.replicas(rank, done)", "same = True")
    ],
    "a commit without a majority of its roster": [
        Edit(Instance.decided_hash, "if quorum(members, holders) or ", "if holders or "),
    ],
    "a commit without a majority of the electors": [
        Edit(Instance.decided_hash, "quorum(self.electors, holders | set(endorsers))", "True"),
    ],
    "an update from a stale state is summed": [
        Edit(Participant.run_iteration, "self.behind or mine.base != self.record.hash", "False"),
        Edit(voting._ack, "mine is not None and (not me.behind)", "mine is not None"),
    ],
    "NaN and infinity are let in": [
        Edit(wire.summable, "not within(vector, largest)", "False"),
        Edit(member._result, "not all_finite(update)", "False"),
    ],
    "the leader waits for nobody": [Edit(readiness.gather_ready, "if not first or", "if True or")],
    "nobody catches up": [Edit(Participant.catch_up, "heads = await self.heads()", "return not self.behind")],
    "a heavier lineage is not looked for": [Edit(leader._elsewhere, "in await me.heads()", "in []")],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_soak_catches_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(MUTANTS[name], monkeypatch)
    attempted = committed = 0
    for seed in range(SEEDS):
        report = World(seed).run()
        if report.broken:
            print(f"caught by seed {seed}: {report.broken[0]}")
            return
        if report.light:
            attempted, committed = attempted + report.attempted, committed + report.committed
    assert committed < 0.95 * attempted, f"no promise was broken in {SEEDS} worlds"
