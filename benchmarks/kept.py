"""Results of many runs kept in a JSON file, so that a long benchmark can be stopped and gone on with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marfl.errors import InputError

Result = dict[str, Any]


class Kept:
    """Results by name, all made with the same settings; without a path they live in memory alone."""

    def __init__(self, path: Path | None, settings: dict[str, Any], budget: float | None = None) -> None:
        self.path, self.settings = path, settings
        self.results: dict[str, Result] = {}
        self.missing = 0  # asked for when the time was up
        self._until = None if budget is None else time.monotonic() + budget
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["settings"] != settings:
                raise InputError(f"--results {path}: was made with {found['settings']}, not {settings}; choose another")
            self.results = found["results"]

    def get(self, name: str, compute: Callable[[], Result]) -> Result | None:
        """The result of this name, computed and kept if there is none; None when the time for new ones is up."""
        if name not in self.results:
            if self._until is not None and time.monotonic() > self._until:
                self.missing += 1
                return None
            self.results[name] = compute()
            self._write()
        return self.results[name]

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(
            json.dumps({"settings": self.settings, "results": self.results}, indent=1) + "\n", encoding="utf-8"
        )
        os.replace(new, self.path)
