"""What an experiment runs: cases, each one setting under several seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from marfl.config import Config, load
from marfl.runs import config_hash, flattened


@dataclass(frozen=True)
class Calculation:
    """A result that needs no training: a function of `marfl.reproduce.calculations` by name, and its arguments."""

    function: str
    arguments: tuple[tuple[str, Any], ...] = ()

    def settings(self) -> dict[str, Any]:
        return {"calculation": self.function, "arguments": dict(self.arguments)}


Source = Config | Calculation


@dataclass(frozen=True)
class Case:
    """One setting: a source for each seed."""

    sources: tuple[Source, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(map(key_of, self.sources))


def key_of(source: Source) -> str:
    """What names a source: a hash over the settings that are not at their defaults.

    So a setting that comes into being later, with a default that changes nothing, makes no finished run stale.
    """
    if isinstance(source, Calculation):
        return config_hash(source.settings())[:12]
    usual = _defaults()
    given = {name: value for name, value in flattened(source.as_dict()).items() if usual.get(name) != value}
    return config_hash(given)[:12]


@cache
def _defaults() -> Mapping[str, Any]:
    return flattened(Config().resolved().as_dict())


def calculated(function: str, **arguments: Any) -> Case:
    """A case of one calculation."""
    return Case((Calculation(function, tuple(sorted(arguments.items()))),))


def simulated(settings: Mapping[str, Any], seeds: tuple[int, ...], **more: Any) -> Case:
    """A case of simulations: `settings`, then `more` (`churn__dropout=0.2` for churn.dropout), for each seed."""
    chosen = dict(settings) | {name.replace("__", "."): value for name, value in more.items()}
    return Case(tuple(load(overrides=chosen | {"seed": seed}) for seed in seeds))
