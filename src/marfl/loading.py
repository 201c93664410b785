"""Classes of users' own, found by `module:Class`: tasks, strategies and techniques from outside the package."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from marfl.errors import InputError


def find_class(what: str, spec: str, built_in: Mapping[str, str]) -> type[Any]:
    """The class that `spec` names: by a built-in name, or as `module:Class`. `what` is it, for a line that refuses."""
    module_name, colon, class_name = built_in.get(spec, spec).partition(":")
    if not colon or not module_name or not class_name:
        raise InputError(f"{what} {spec!r}: unknown. {_allowed(spec, list(built_in))}, or module:Class for your own")
    found = getattr(_import(what, spec, module_name), class_name, None)
    if not inspect.isclass(found):
        classes = {name: value for name, value in vars(sys.modules[module_name]).items() if inspect.isclass(value)}
        own = [name for name, value in classes.items() if value.__module__ == module_name]  # not what it imports
        hint = _allowed(class_name, own or list(classes))
        raise InputError(f"{what} {spec}: {module_name} has no class {class_name!r}. {hint}")
    return found


def construct(what: str, spec: str, found: type[Any], options: Mapping[str, Any]) -> Any:
    """An instance with these options; one line for an option that it does not take."""
    abstract = sorted(getattr(found, "__abstractmethods__", ()))
    if abstract:
        raise InputError(f"{what} {spec}: {found.__name__} must define {', '.join(abstract)}()")
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(found).parameters) or "no options"
        raise InputError(f"{what} {spec}: {error}; it takes {takes}") from error
    return found(**options)


def _import(what: str, spec: str, module_name: str) -> object:
    # A console script does not see the current directory, where a user's class usually lies; last, to shadow nothing.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{what} {spec}: cannot import {module_name} ({error})") from error


def _allowed(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}There are {', '.join(sorted(names))}"
