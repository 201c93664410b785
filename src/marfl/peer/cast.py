"""Who updates and who aggregates in which iteration, when somebody else has drawn it (`--cast FILE`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from marfl.errors import InputError


class Part(NamedTuple):
    """What a peer does in an iteration; with neither it only votes."""

    updates: bool = True
    aggregates: bool = True


@dataclass(frozen=True)
class Cast:
    """The parts of one peer. Iterations that are not listed are everybody's."""

    index: int = 0
    parts: dict[int, Part] = field(default_factory=dict)

    def part(self, iteration: int) -> Part:
        return self.parts.get(iteration, Part())

    def consumed(self, iteration: int, consumes: Callable[[int], int]) -> int:
        """Mini-batches trained on before an iteration: as the simulator counts them, absences left out."""
        return sum(consumes(earlier) for earlier in range(1, iteration) if self.part(earlier).updates)


def read_cast(path: Path, index: int) -> Cast:
    """The parts of one peer from a JSON file: {"3": {"updaters": [0, 1], "aggregators": [0, 1]}, …}."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Cast(index, {int(iteration): _part(iteration, row, index) for iteration, row in table.items()})
    except OSError as error:
        raise InputError(f"--cast {path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--cast {path}: is not a table of updaters and aggregators by iteration ({error})") from None


def _part(iteration: str, row: dict[str, Any], index: int) -> Part:
    updaters, aggregators = set(row["updaters"]), set(row["aggregators"])
    if not updaters & aggregators:
        raise ValueError(f"in iteration {iteration} nobody brings an update")
    return Part(index in updaters, index in aggregators)
