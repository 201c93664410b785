"""Worlds in which one peer lies in sums: no wrong sum is missed, and nobody is wronged; broken rules are noticed."""

from __future__ import annotations

import pytest

from marfl.protocol import signed_slices
from marfl.protocol.audit import Audits
from marfl.protocol.fraud import check_fraud
from marfl.protocol.leader import Leader
from marfl.testing.miscounts import LIES, SIZES, MiscountingWorld, main
from stages.mutation import Edit, mutate

SEEDS = range(18)


def test_no_wrong_sum_is_missed_and_nobody_is_wronged() -> None:
    worlds = [MiscountingWorld(seed) for seed in SEEDS]
    assert [line for world in worlds for line in world.run()] == []
    assert {told.name for world in worlds for told in world.told} == {lie.__name__ for lie in LIES}
    assert {world.size for world in worlds} == {*SIZES}
    proven = [world for world in worlds if world.people[world.honest[0]].standing.banned]
    assert len(proven) > 5


@pytest.mark.slow
def test_hundreds_of_worlds_miss_nothing() -> None:
    assert main(["--seeds", "300", "--start", "1000"]) == 0


MUTANTS = {
    "nobody audits": Edit(Audits.settled, "auditor == self.net.me", "False"),
    "auditors keep what they found to themselves": Edit(
        Audits.answer_fraud, "self._believe(proof) and proof.culprit == culprit", "False"
    ),
    "who is accused is guilty": Edit(check_fraud, "CHECKS[proof.kind](proof, verify)", "return proof.culprit"),
    "a run never goes back": Edit(Leader._seal, "to is not None and", "False and"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_world_notices_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate([MUTANTS[name]], monkeypatch)
    if name == "who is accused is guilty":  # nor are signatures looked at
        monkeypatch.setattr("marfl.protocol.audit.check_fraud", lambda proof, verify: proof.culprit)
    signed_slices.auditors.cache_clear()
    assert any(MiscountingWorld(seed).run() for seed in SEEDS)
