"""Deterministic simulation testing, the part that is always run: every fault strikes in every phase in which it can."""

from __future__ import annotations

from marfl.testing.soak import missing, soak, table, verdict

# A small choice of the soak's seeds in which every combination of fault and phase strikes once at least.
SEEDS = [
    1, 3, 6, 11, 19, 22, 24, 41, 42, 51, 84, 96, 98, 112, 113, 115, 143, 160, 211, 216, 231, 243, 244, 258, 328,
    333, 338, 345, 366, 381, 412, 425, 442, 511, 596, 1008, 1010, 1076, 1125, 1169, 1204, 1235,
]  # fmt: skip


def test_a_choice_of_fault_schedules_breaks_no_promise_and_leaves_no_fault_untested_in_any_phase() -> None:
    reports = soak(SEEDS)
    print(table(reports))
    assert verdict(reports) == []
    struck = set(missing([])) - set(missing(reports))
    assert in_any_exchange(struck) == in_any_exchange(missing([]))


def in_any_exchange(lines: list[str] | set[str]) -> set[str]:
    """Faults and phases, from lines that say `FAULT in PHASE with EXCHANGE`."""
    return {line.rpartition(" with ")[0] for line in lines}
