"""Benchmarks that nobody runs for long break unseen: the quick ones run here, in the small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_proof_for_whoever_joins_is_measured() -> None:
    command = [sys.executable, BENCHMARKS / "joining.py", "--iterations", "30", "--electors", "4", "--change", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "promised: less than 100 kB where 1 % change: kept"
