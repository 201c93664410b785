"""A grid of runs from a file: every combination of the values that `[grid]` names, over the settings that all share.

    preset = "demo"                # may be left out

    [settings]                     # as in a config file
    iterations = 40

    [grid]                         # any setting, by its dotted name
    technique = ["mar", "fedavg"]
    "churn.participation" = [1.0, 0.5]
    seed = [0, 1, 2]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from marfl.config import Config, load, read_toml
from marfl.errors import InputError
from marfl.reproduce.archive import Archive
from marfl.reproduce.cases import key_of
from marfl.reproduce.runner import Bundle
from marfl.runs.config_file import NOT_DECISIVE
from marfl.schema import nearest
from marfl.sim.engine import check

MOST_RUNS = 10_000
PARTS = ("preset", "settings", "grid")


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    varied: Mapping[str, Any]  # what makes it differ from the others, seed included
    config: Config

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.varied.items()) or "the settings"

    @property
    def but_seed(self) -> tuple[tuple[str, Any], ...]:
        """What runs share that are pooled."""
        return tuple((name, value) for name, value in self.varied.items() if name != "seed")


def read_sweep(path: Path, more: Mapping[str, Any] | None = None) -> list[Point]:
    """The runs of a sweep, each checked as far as that goes without data; `more` are settings of all of them."""
    tree = read_toml(path)
    for name in tree:
        if name not in PARTS:
            raise InputError(f"{path}: {name} is no part of a sweep; {nearest(name, PARTS)}")
    settings, grid = (_table(path, tree, part) for part in ("settings", "grid"))
    axes = {name: _values(path, name, values) for name, values in _flat(grid)}
    if prod(map(len, axes.values())) > MOST_RUNS:
        raise InputError(f"{path}: more than {MOST_RUNS:,} runs; take fewer values in [grid]")
    points: dict[str, Point] = {}
    for chosen in product(*axes.values()):
        varied = dict(zip(axes, chosen, strict=True))
        point = Point(varied, _config(path, tree.get("preset"), dict(_flat(settings)) | varied | dict(more or {})))
        same = points.setdefault(key_of(point.config), point)
        if same is not point:
            raise InputError(f"{path}: {same.name} and {point.name} are the same run")
    return list(points.values())


def _config(path: Path, preset: Any, given: Mapping[str, Any]) -> Config:
    if preset is not None and not isinstance(preset, str):
        raise InputError(f"{path}: preset = {preset!r}: must be text")
    try:
        config = load(preset, overrides=given)
        check(config)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return config


def _table(path: Path, tree: Mapping[str, Any], part: str) -> dict[str, Any]:
    found = tree.get(part, {})
    if not isinstance(found, dict):
        raise InputError(f"{path}: [{part}] must be a table")
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A table by dotted names, however it is written: "churn.dropout" or [grid.churn]."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _values(path: Path, name: str, values: Any) -> list[Any]:
    if name in NOT_DECISIVE:
        raise InputError(f"{path}: grid.{name}: changes nothing that a run results in")
    if not isinstance(values, list) or not values:
        raise InputError(f"{path}: grid.{name} must be a list of values, not {values!r:.60}")
    if any(values.count(value) > 1 for value in values):
        raise InputError(f"{path}: grid.{name} names a value twice")
    return values


def todo_of_sweep(archive: Archive, points: list[Point]) -> list[Bundle]:
    """The runs that are not finished yet, in the order of the grid, the first seed of all before the second of any."""
    seeds = list(dict.fromkeys(point.config.seed for point in points))
    in_order = sorted(points, key=lambda point: seeds.index(point.config.seed))
    return [Bundle(point.config) for point in in_order if archive.summary(point.config) is None]
