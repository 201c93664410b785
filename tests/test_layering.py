"""The layers: who imports whom inside the package, read from the source and compared with docs/architecture.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import marfl
from marfl.cli import app
from stages.syntax import tree_of
from test_docs import reference

SOURCE = Path(marfl.__file__).parent
DOCS = reference()
TABLE: dict[str, set[str]] = DOCS.rooms(DOCS.ARCHITECTURE.read_text())
UPWARDS = {("config", "dp")}  # imports against the order, each named below the table: the fewer the better
HIVEMIND_LIVES_IN = ("net/libp2p", "reproduce/hivemind_averager.py")  # the second races against it
SLOW = ("torch", "hivemind", "scipy", "sklearn", "dp_accounting")  # to import


def imported_modules(path: Path, package: str) -> Iterator[str]:
    """Every module a file imports, anywhere in it, by absolute name; `from a import b` counts as a.b."""
    for node in ast.walk(tree_of(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room_of(path: Path, root: Path) -> str:
    """The room a file belongs to: plan/grid.py is in plan, state.py is state, the root's own names are marfl."""
    name = path.relative_to(root).parts[0].removesuffix(".py")
    return "marfl" if name == "__init__" else name


def imports_of_rooms(root: Path) -> dict[str, dict[str, str]]:
    """For every room, the other rooms it imports and a file that does it."""
    rooms = {room_of(path, root) for path in root.rglob("*.py")}
    graph: dict[str, dict[str, str]] = {room: {} for room in rooms}
    for path in sorted(root.rglob("*.py")):
        package = ".".join([root.name, *path.relative_to(root).parent.parts])
        here = room_of(path, root)
        for name in imported_modules(path, package):
            top, *rest = name.split(".")
            if top == root.name:
                other = rest[0] if rest and rest[0] in rooms else "marfl"
                graph[here].setdefault(other, path.relative_to(root).as_posix())
    return {room: {other: file for other, file in found.items() if other != room} for room, found in graph.items()}


def violations(root: Path, table: Mapping[str, set[str]], upwards: Collection[tuple[str, str]] = ()) -> list[str]:
    """One line for every difference between the source and the table, and for hivemind out of its place."""
    graph = imports_of_rooms(root)
    found = [f"{room} is not in the table" for room in sorted(graph.keys() - table.keys())]
    found += [f"{room} is in the table, but not in the source" for room in sorted(table.keys() - graph.keys())]
    for room in sorted(graph.keys() & table.keys()):
        allowed = table[room] | {other for one, other in upwards if one == room}
        found += [f"{graph[room][bad]} imports {bad}" for bad in sorted(graph[room].keys() - allowed)]
        found += [f"{room} may import {other}, but does not" for other in sorted(allowed - graph[room].keys())]
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root).as_posix()
        if not where.startswith(HIVEMIND_LIVES_IN) and any(
            name.split(".")[0] == "hivemind" for name in imported_modules(path, root.name)
        ):
            found.append(f"{where} imports hivemind")
    return found


def test_every_import_is_in_the_table_and_the_table_allows_no_other():
    found = violations(SOURCE, TABLE, UPWARDS)
    assert not found, "\n".join(found)


def test_rooms_import_only_from_rooms_above_them_in_the_table_so_there_is_no_circle():
    seen: set[str] = set()
    for room, imports in TABLE.items():
        assert imports <= seen, f"{room} stands above {', '.join(sorted(imports - seen))}"
        seen.add(room)


def test_every_kind_of_violation_is_caught(tmp_path):
    root = tmp_path / "marfl"
    files = {
        "__init__.py": "",
        "errors.py": "",
        "plan/grid.py": "def f():\n    from marfl.net import base",
        "state.py": "from . import config",
        "protocol/wire.py": "if TYPE_CHECKING:\n    from ..net import base",
        "net/base.py": "import marfl.sim.engine",
        "net/libp2p.py": "import hivemind",
        "sim/engine.py": "import torch\nfrom marfl import Peer",
        "config.py": "from marfl.errors import InputError\nfrom marfl.config import load",
        "peer.py": "from hivemind.dht import DHTNode\nimport marfl.config as given",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    nothing = {room: set[str]() for room in ("errors", "plan", "state", "protocol", "net", "sim", "marfl", "gone")}
    table = nothing | {"config": {"errors"}, "protocol": {"plan"}}
    assert violations(root, table) == [
        "peer is not in the table",
        "gone is in the table, but not in the source",
        "net/base.py imports sim",
        "plan/grid.py imports net",
        "protocol/wire.py imports net",
        "protocol may import plan, but does not",
        "sim/engine.py imports marfl",
        "state.py imports config",
        "peer.py imports hivemind",
    ]


def test_the_table_is_read_whole():
    assert next(iter(TABLE)) == "errors"
    assert TABLE["errors"] == set()
    assert TABLE["learn"] == {"errors", "loading", "rng", "schema", "settings", "state", "system", "wire"}
    assert len(TABLE) >= 20


def test_a_plan_and_every_help_wait_for_nothing_that_takes_long_to_import():
    names = [command.name for command in app.registered_commands]
    lines = [["plan", "--peers", "16", "--group-size", "4"], ["--help"], *([name, "--help"] for name in names)]
    script = f"""
import sys
from marfl.cli import main
for line in {lines}:
    code = main(line)
    slow = [name for name in {SLOW} if name in sys.modules]
    if code or slow:
        sys.exit(f"{{line}}: {{code}} {{slow}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
