"""Moshpit-KD among real peers: the simulator's model and bytes, and a swarm that loses somebody on the way."""

from __future__ import annotations

import pytest

from stages.swarms import BULKY, QUICK, TINY, simulated, swarm

pytestmark = pytest.mark.slow
DISTILL = ("--distill", "2", "--distill-batches", "2")


@pytest.mark.parametrize("more", [(), ("--distill-teacher", "previous"), ("--local-steps-match-distill",)])
def test_five_real_peers_distil_to_the_model_of_the_simulator(tmp_path, more):
    flags = ("--peers", "5", "--group-size", "3", "--iterations", "3", *TINY, *DISTILL, *more)
    expected = simulated(*flags)
    result = swarm(tmp_path / "run", *flags)
    assert result.summary["model_hash"] == expected["model_hash"]
    rows = result.rows()
    assert sum(row["bytes_payload"] + row["bytes_distill"] for row in rows) == expected["bytes_total"]
    assert [row["bytes_distill"] > 0 for row in rows] == ([False] * 3 if more else [True, True, False])


def test_a_peer_killed_while_groups_meet_or_average_is_left_out_and_the_rest_agrees(tmp_path):
    flags = ("--peers", "5", "--group-size", "3", "--iterations", "4", *BULKY, *QUICK, "--distill", "4")
    result = swarm(tmp_path / "run", *flags, "--kill", "3@2:exchanging")
    summary = result.summary
    assert summary["agreed"]
    assert summary["iterations"] == 4
    assert any(result.name(3) in row["missing"] for row in result.peer_rows(0).values())
