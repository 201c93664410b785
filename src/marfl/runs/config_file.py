"""A run's settings on the disk: TOML that reads back the same, and a hash of what decides the result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from marfl.errors import InputError

Config = Mapping[str, Any]  # nested tables of str, int, float, bool, lists of these, and None for "not set"

# Settings, by dotted path, that change where and how fast a run goes, but not one bit of its result.
NOT_DECISIVE = frozenset({"checkpoint_every", "out", "overwrite", "resume", "workers"})

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def config_hash(config: Config) -> str:
    """sha256 over the canonical JSON of what decides the result: sorted keys, no None, nothing of `NOT_DECISIVE`.

    A config and what `dumps` made of it have the same hash.
    """
    canonical = json.dumps(_plain_table(config, ""), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def flattened(config: Config) -> dict[str, Any]:
    """What decides the result, by dotted path: {"links": {"profile": "wifi"}} gives {"links.profile": "wifi"}."""
    return dict(_leaves(_plain_table(config, ""), ""))


def dumps(config: Config) -> str:
    """The config as TOML: plain values first, then tables; None is left out, because TOML has no word for it."""
    return "".join(_table_lines(config, ""))


def _plain_table(table: Config, path: str) -> dict[str, Any]:
    return {
        key: _plain(value, f"{path}{key}")
        for key, value in table.items()
        if value is not None and f"{path}{key}" not in NOT_DECISIVE
    }


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return _plain_table(value, f"{path}.")
    if isinstance(value, list | tuple):
        return [_plain(each, path) for each in value]
    return value


def _leaves(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _table_lines(table: Config, path: str) -> Iterator[str]:
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{_key(key)} = {_value(value, key)}\n"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield f"\n[{path}{_key(key)}]\n"
            yield from _table_lines(value, f"{path}{_key(key)}.")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are a subset of TOML's, which also wants DEL escaped.
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any, key: str) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(int(value))
        case float():
            return repr(float(value))
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(_value(each, key) for each in value)}]"
        case Mapping():
            pairs = (f"{_key(name)} = {_value(each, key)}" for name, each in value.items() if each is not None)
            return f"{{{', '.join(pairs)}}}"
        case _:
            raise InputError(f"setting {key}: {value!r} has no place in TOML; use text, numbers, booleans or lists")
