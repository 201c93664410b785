"""The dependency rule: who may import whom inside the package, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import marfl

SOURCE = Path(marfl.__file__).parent

ONLY = {  # these import nothing of ours but what is listed
    "errors": set(),
    "plan": {"errors"},
    "state": {"errors"},
    "learn": {"errors", "state"},
}
NEVER = {  # these do not even reach the listed ones through others
    "protocol": {"sim", "peer"},
    "techniques": {"sim", "peer"},
    "sim": {"peer"},
    "peer": {"sim"},
}
HIVEMIND_LIVES_IN = "net/libp2p/"


def imported_modules(path: Path, package: str) -> Iterator[str]:
    """Every module a file imports, anywhere in it, by absolute name; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def component(path: Path, root: Path) -> str:
    """The part of the package a file belongs to: plan/grid.py is in plan, state.py is state."""
    return path.relative_to(root).parts[0].removesuffix(".py")


def components_imported(root: Path) -> dict[str, set[str]]:
    """For every part of the package, the other parts it imports; names of the root itself count as __init__."""
    parts = {component(path, root) for path in root.rglob("*.py")}
    graph: dict[str, set[str]] = {part: set() for part in parts}
    for path in root.rglob("*.py"):
        package = ".".join([root.name, *path.relative_to(root).parent.parts])
        for name in imported_modules(path, package):
            top, *rest = name.split(".")
            if top == root.name:
                graph[component(path, root)].add(rest[0] if rest and rest[0] in parts else "__init__")
    return {part: imports - {part} for part, imports in graph.items()}


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Every part that can be reached by imports from `start`."""
    found: set[str] = set()
    ahead = list(graph.get(start, ()))
    while ahead:
        part = ahead.pop()
        if part not in found and part != "__init__":
            found.add(part)
            ahead.extend(graph.get(part, ()))
    return found


def violations(root: Path) -> list[str]:
    """One line for every import that breaks the rule."""
    graph = components_imported(root)
    found = [f"{part} imports {bad}" for part, ok in ONLY.items() for bad in sorted(graph.get(part, set()) - ok)]
    found += [f"{part} reaches {bad}" for part, no in NEVER.items() for bad in sorted(reached(graph, part) & no)]
    found += [
        f"{part} imports names of the root"
        for part in sorted(graph.keys() - ONLY.keys() - {"cli"})
        if "__init__" in graph[part]
    ]
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root).as_posix()
        names = imported_modules(path, root.name)
        if not where.startswith(HIVEMIND_LIVES_IN) and any(name.split(".")[0] == "hivemind" for name in names):
            found.append(f"{where} imports hivemind")
    return found


def test_no_part_of_the_package_imports_what_it_must_not():
    assert violations(SOURCE) == []


def test_the_rule_sees_all_parts_of_the_package():
    graph = components_imported(SOURCE)
    assert {"plan", "state", "errors", "cli", "commands"} <= graph.keys()
    assert graph["plan"] == {"errors"}
    assert "plan" in graph["commands"]


def test_every_kind_of_violation_is_caught(tmp_path):
    root = tmp_path / "marfl"
    files = {
        "plan/grid.py": "def f():\n    from marfl.net import base",
        "state.py": "from . import config",
        "learn/task.py": "import marfl.plan.grid",
        "protocol/wire.py": "from ..net import base",
        "net/base.py": "from marfl import sim",
        "sim/engine.py": "import torch\nfrom marfl.peer import Peer",
        "peer.py": "from hivemind.dht import DHTNode",
        "report/page.py": "from marfl import Peer",
        "config.py": "",
        "errors.py": "",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert violations(root) == [
        "plan imports net",
        "state imports config",
        "learn imports plan",
        "protocol reaches peer",
        "protocol reaches sim",
        "sim reaches peer",
        "report imports names of the root",
        "peer.py imports hivemind",
    ]
