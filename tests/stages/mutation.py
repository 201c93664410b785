"""Mutants: a rule broken on purpose, by editing a function's own source, to see whether anything notices.

A rule that moves elsewhere makes its mutant fail loudly, because the source to be edited is not there any more.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import pytest

from stages.syntax import tree_of


class Edit(NamedTuple):
    """In this function, `old` becomes `new`."""

    function: Callable[..., Any]
    old: str
    new: str


def mutate(edits: Sequence[Edit], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the edits, for as long as the test lasts."""
    for function in dict.fromkeys(edit.function for edit in edits):
        # The code itself is replaced, so that whoever imported the function by name runs the mutant too.
        monkeypatch.setattr(function, "__code__", edited(function, [e for e in edits if e.function is function]))


def edited(function: Callable[..., Any], edits: list[Edit]) -> CodeType:
    """The code of a function with its source changed."""
    tree = tree_of(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    definition.decorator_list.clear()  # only the code is wanted
    source = ast.unparse(tree)
    for edit in edits:
        assert source.count(edit.old) == 1, f"{function}: {edit.old!r} is there {source.count(edit.old)} times"
        source = source.replace(edit.old, edit.new)
    space: dict[str, Any] = {}
    exec(
        compile(f"from __future__ import annotations\n{source}", f"<mutant of {function.__name__}>", "exec"),
        dict(function.__globals__),
        space,
    )
    code: CodeType = space[function.__name__].__code__
    return code
