"""Names: a file and a class are found by their name alone, and what users need has a public one."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import marfl
from marfl import errors
from stages.syntax import tree_of

SOURCE = Path(marfl.__file__).parent
ARCHITECTURE = SOURCE.parents[1] / "docs/architecture.md"


def twice(places: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that stand in more than one place."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, place in places:
        found[name].append(place)
    return {name: where for name, where in found.items() if len(where) > 1}


def files() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name != "__init__.py":
            yield path.name, path.relative_to(SOURCE).as_posix()


def public_classes() -> Iterator[tuple[str, str]]:
    for _, place in files():
        for node in tree_of((SOURCE / place).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, place


def test_no_two_files_of_the_source_have_one_name() -> None:
    assert twice(files()) == {}


def test_no_two_public_classes_of_the_source_have_one_name() -> None:
    assert twice(public_classes()) == {}


def test_public_names_are_sorted_and_an_editor_sees_each_of_them() -> None:
    assert marfl.__all__ == sorted(set(marfl.__all__))
    shown = [
        alias.name
        for node in ast.walk(tree_of((SOURCE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("marfl.")
        for alias in node.names
    ]
    assert sorted(shown) == marfl.__all__


def test_every_exception_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert raised <= set(marfl.__all__)


def mentioned(hint: Any) -> Iterator[type]:
    """Our own classes in an annotation."""
    for part in typing.get_args(hint):
        yield from [each for inner in part for each in mentioned(inner)] if isinstance(part, list) else mentioned(part)
    if inspect.isclass(hint) and hint.__module__.startswith("marfl"):
        yield hint


def signatures(value: Any) -> Iterator[Any]:
    """The functions that users call of a public name."""
    if inspect.isfunction(value):
        yield value
    elif inspect.isclass(value):
        for name, function in vars(value).items():
            if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
                yield function


def test_what_public_functions_take_and_return_is_public() -> None:
    asked = [marfl.simulate, marfl.load, marfl.Peer, marfl.AsyncPeer, marfl.Task, marfl.ClassificationTask]
    functions = [function for value in asked for function in signatures(value)]
    assert len(functions) > 10
    for function in functions:
        for hint in typing.get_type_hints(function).values():
            for kind in mentioned(hint):
                assert kind.__name__ in marfl.__all__, f"{function.__qualname__} has {kind.__name__} in its signature"


# --- what docs/architecture.md names ---


def hops() -> list[tuple[str, str]]:
    """Every `file.py: function` on the page."""
    return re.findall(r"`([\w/]+\.py): ([\w.]+)`", ARCHITECTURE.read_text())


def test_each_walk_of_an_update_has_at_most_ten_hops() -> None:
    walks = re.findall(r"(?:^\d+\. `.*\n(?:   .*\n)*)+", ARCHITECTURE.read_text(), re.MULTILINE)
    assert len(walks) == 2
    assert all(len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 10 for walk in walks)


@pytest.mark.parametrize(("file", "function"), hops())
def test_a_function_that_the_architecture_names_exists(file: str, function: str) -> None:
    nodes: list[ast.AST] = [tree_of((SOURCE / file).read_text())]
    *classes, name = function.split(".")
    for each in classes:
        nodes = [inner for node in nodes for inner in ast.walk(node) if getattr(inner, "name", None) == each]
    assert any(getattr(inner, "name", None) == name for node in nodes for inner in ast.walk(node))


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", ARCHITECTURE.read_text().split("## The walk")[1])
    places = (SOURCE, SOURCE.parents[1])
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
