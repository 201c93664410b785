"""A small disk of its own, that a test may fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def mounted(place: Path, *options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", ",".join(("size=1m", *options)), "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk of its own can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One mebibyte: enough for two checkpoints of the small model, and not for three."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted(place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
