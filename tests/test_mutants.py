"""Mutants of the protocol, each with one rule broken: the soak must catch every one of them within 300 seeds.

A mutant is made by editing a function's own source, so a rule that moves elsewhere makes its mutant fail loudly here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from marfl.protocol import attempt, instance, leader, participant, wire
from marfl.testing.world import World

SEEDS = 300
P, A, I = participant.Participant, attempt.Attempt, instance.Instance  # noqa: E741 - as in the table below


class Edit(NamedTuple):
    """In the function `name` of `owner`, `old` becomes `new`."""

    owner: Any
    name: str
    old: str
    new: str


MUTANTS: dict[str, list[Edit]] = {
    "tags and headers without the roster": [
        Edit(A, "tag", "self.roster.attempt, round, self._part", "0, round, 0"),
        Edit(wire, "tensor_from", "fields['digest'] != digest", "False"),
    ],
    "sums in another order on every peer": [
        Edit(A, "sum_in_order", "for rank in sources:", "for rank in sorted(sources, key=lambda r: r != self.rank):")
    ],
    "a missing slice counts as zeros": [
        Edit(
            A,
            "_repair",
            "raise Stuck(f'no slice of {self.roster.members[want.rank].id} from anybody')",
            "return torch.zeros(want.stop - want.start)",
        )
    ],
    "an earlier result is not adopted": [Edit(leader, "_earlier_result", "if not voted:", "if True:")],
    "votes for lower attempts too": [
        Edit(P, "vote", "or attempt < instance.promised", ""),
        Edit(P, "begin", "or attempt < instance.promised", ""),
        Edit(I, "promise", "if attempt > self.promised:", "if True:"),
    ],
    "a proxy serves its own sum for anybody's": [
        Edit(A, "find", "same = rank == self.rank or self.rank in self.plan.replicas(rank, done)", "same = True")
    ],
    "the leader waits for nobody": [Edit(leader, "_gather_ready", "if not first or", "if True or")],
    "nobody catches up": [Edit(P, "catch_up", "heads = await self.heads()", "return not self.behind")],
    "a heavier lineage is not looked for": [
        Edit(leader, "_elsewhere", "in await me.heads()", "in []"),
    ],
}


def edited(owner: Any, name: str, edits: list[Edit]) -> Callable[..., Any]:
    """The function with its source changed, in its own module's world."""
    original = inspect.unwrap(getattr(owner, name))
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(original))))
    for edit in edits:
        assert source.count(edit.old) == 1, f"{name}: {edit.old!r} is there {source.count(edit.old)} times"
        source = source.replace(edit.old, edit.new)
    space: dict[str, Any] = {}
    exec(
        compile(f"from __future__ import annotations\n{source}", f"<mutant of {name}>", "exec"),
        original.__globals__,
        space,
    )
    return space[name]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_soak_catches_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {(edit.owner, edit.name) for edit in MUTANTS[name]}
    for owner, function in places:
        edits = [edit for edit in MUTANTS[name] if (edit.owner, edit.name) == (owner, function)]
        mutant = edited(owner, function, edits)
        monkeypatch.setattr(owner, function, mutant)
        if owner is wire:
            monkeypatch.setattr(attempt, function, mutant)
    attempted = committed = 0
    for seed in range(SEEDS):
        report = World(seed).run()
        if report.broken:
            print(f"caught by seed {seed}: {report.broken[0]}")
            return
        if report.light:
            attempted, committed = attempted + report.attempted, committed + report.committed
    assert committed < 0.95 * attempted, f"no promise was broken in {SEEDS} worlds"
