"""A run's settings on the disk: TOML that reads back the same, and a hash of what decides the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from marfl.errors import InputError

Config = Mapping[str, Any]  # nested tables of str, int, float, bool, lists of these, and None for "not set"

# Settings, by dotted path, that change where and how fast a run goes, but not one bit of its result.
NOT_DECISIVE = frozenset({"checkpoint_every", "cluster", "other_nodes", "out", "overwrite", "resume", "workers"})
PROLONGS = frozenset({"iterations", "patience", "target_accuracy"})  # when a run ends: a resumed one may have others


def config_hash(config: Config) -> str:
    """sha256 over the canonical JSON of what decides the result: sorted keys, no None, nothing of `NOT_DECISIVE`.

    A config and what `dumps` made of it have the same hash.
    """
    canonical = json.dumps(_plain_table(config, "", NOT_DECISIVE), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def state_hash(config: Config) -> str:
    """sha256 over what decides the state after an iteration: everything but when the run ends."""
    return config_hash({name: value for name, value in config.items() if name not in PROLONGS})


def flattened(config: Config) -> dict[str, Any]:
    """What decides the result, by dotted path: {"links": {"profile": "wifi"}} gives {"links.profile": "wifi"}."""
    return dict(_leaves(_plain_table(config, "", NOT_DECISIVE), ""))


def dumps(config: Config) -> str:
    """The config as TOML; None is left out, because TOML has no word for it."""
    return tomli_w.dumps(_plain_table(config, "", frozenset()))


def _plain_table(table: Config, path: str, left_out: frozenset[str]) -> dict[str, Any]:
    return {
        key: _plain(value, f"{path}{key}", left_out)
        for key, value in table.items()
        if value is not None and f"{path}{key}" not in left_out
    }


def _plain(value: Any, path: str, left_out: frozenset[str]) -> Any:
    """The value in tables, lists and scalars, without None and the settings `left_out`; anything else is refused."""
    match value:
        case Mapping():
            return _plain_table(value, f"{path}.", left_out)
        case list() | tuple():
            return [_plain(each, path, left_out) for each in value]
        case str() | bool() | int() | float():
            return value
        case _:
            raise InputError(f"setting {path}: {value!r} has no place in TOML; use text, numbers, booleans or lists")


def _leaves(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
