"""Masked sums among real peers: the simulator's bits, and a SIGKILL in every phase of an iteration."""

from __future__ import annotations

import os

import pytest

from stages.processes import PROGRAMS
from stages.swarms import QUICK, TINY, simulated, swarm

pytestmark = pytest.mark.slow
LETHAL = PROGRAMS / "lethal"
VICTIM = 5
SUMMED = ("after the sum", "revealing", "finishing")  # its value is in the sum by then
LOST = ("voting", "shares", "before the first value", "reduce")


@pytest.mark.parametrize(
    "way",
    [
        ("--wire", "fixed"), ("--masks",), ("--wire", "int8"), ("--wire", "int4", "--wire-down", "8"),
        ("--wire", "int4", "--masks"),
    ],
)  # fmt: skip
def test_integers_and_masks_equal_the_simulator_to_the_bit_and_byte(tmp_path, way):
    flags = ("--peers", "8", "--iterations", "3", *TINY, *way)
    expected = simulated(*flags)
    result = swarm(tmp_path / "run", *flags, *QUICK)
    assert result.summary["model_hash"] == expected["model_hash"]
    rows = result.rows()
    assert sum(row["bytes_payload"] + row["bytes_masks"] for row in rows) == expected["bytes_total"]
    assert all((row["bytes_masks"] > 0) == ("--masks" in way) for row in rows)


@pytest.mark.parametrize("phase", [*LOST, "gather", *SUMMED])
def test_the_others_go_on_after_a_kill_in_any_phase(tmp_path, monkeypatch, phase):
    """Eight real peers; one kills itself in the second of four iterations, the others sum in all of them."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(LETHAL), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MARFL_TEST_DEATH", f"{VICTIM}:2:{phase}")
    result = swarm(tmp_path / "run", "--peers", "8", "--iterations", "4", "--masks", *TINY, *QUICK)
    assert set(result.summary["missing"]) == {str(VICTIM)}
    finals = {p["model_hash"] for p in result.summary["processes"] if p["index"] != VICTIM}
    assert finals == {result.summary["model_hash"]}
    rows = {row["iteration"]: row for row in result.rows()}
    assert [rows[t]["aggregators"] for t in (1, 3, 4)] == [8, 7, 7]
    assert rows[2]["aggregators"] in ({7} if phase in LOST else {8} if phase in SUMMED else {7, 8})
