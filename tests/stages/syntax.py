"""Source text as a tree."""

from __future__ import annotations

import ast
import gc


def tree_of(source: str) -> ast.Module:
    """The tree of a file's text.

    Without the collector: an object that dies meanwhile may log its traceback, which is parsed as well, and Python 3.11
    cannot parse within parsing ("AST constructor recursion depth mismatch").
    """
    was = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was:
            gc.enable()
