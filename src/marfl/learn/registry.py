"""Tasks by name: the built-in ones, or `module:Class` for a user's own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from difflib import get_close_matches
from typing import Any

from marfl.errors import InputError
from marfl.learn.task import ClassificationTask, Task
from marfl.settings import Partition

BUILT_IN = {
    "20ng": "marfl.learn.tasks.news20:News20",
    "digits": "marfl.learn.tasks.digits:Digits",
    "mnist": "marfl.learn.tasks.mnist:Mnist",
    "synthetic": "marfl.learn.tasks.synthetic:Synthetic",
}
_METHODS = ("model", "shard", "loss", "evaluate")


def load_task(spec: str, *, partition: Partition | None = None, **options: Any) -> Task:
    """The task that `spec` names: a built-in name or `module:Class`, with `options` for its constructor.

    `partition` replaces the task's own; a task that splits its data itself refuses one.
    """
    task = _construct(spec, _find(spec), options)
    missing = [method for method in _METHODS if not callable(getattr(task, method, None))]
    if missing or not isinstance(task, Task):
        raise InputError(f"task {spec}: lacks {', '.join(missing)}(); a task needs {', '.join(_METHODS)}")
    if partition is not None:
        if not isinstance(task, ClassificationTask) or type(task).shard is not ClassificationTask.shard:
            raise InputError(f"task {spec}: splits its data itself, so partition settings cannot apply to it")
        task.partition = partition
    return task


def _find(spec: str) -> type:
    module_name, colon, class_name = BUILT_IN.get(spec, spec).partition(":")
    if not colon or not module_name or not class_name:
        raise InputError(f"task {spec!r}: unknown. {_allowed(spec, list(BUILT_IN))}, or module:Class for your own")
    found = getattr(_import(spec, module_name), class_name, None)
    if not inspect.isclass(found):
        names = [name for name, value in vars(sys.modules[module_name]).items() if inspect.isclass(value)]
        raise InputError(f"task {spec}: {module_name} has no class {class_name!r}. {_allowed(class_name, names)}")
    return found


def _import(spec: str, module_name: str) -> object:
    # A console script does not see the current directory, where a user's task usually lies; last, to shadow nothing.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"task {spec}: cannot import {module_name} ({error})") from error


def _construct(spec: str, found: type, options: dict[str, Any]) -> object:
    abstract = sorted(getattr(found, "__abstractmethods__", ()))
    if abstract:
        raise InputError(f"task {spec}: {found.__name__} must define {', '.join(abstract)}()")
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(found).parameters) or "no options"
        raise InputError(f"task {spec}: {error}; it takes {takes}") from error
    return found(**options)


def _allowed(name: str, names: list[str]) -> str:
    near = get_close_matches(name, names)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}There are {', '.join(sorted(names))}"
