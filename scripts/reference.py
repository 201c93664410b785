"""The parts of docs/ that follow from the code: the CLI, the settings, and pictures of the grid and of the rooms.

    python scripts/reference.py          # writes docs/cli.md, docs/config.md and docs/pictures/
    python scripts/reference.py --check  # says what is stale, and fails if anything is
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from marfl.cli import app
from marfl.config import PRESETS, Config
from marfl.peer.options import PeerOptions
from marfl.plan.grid import Plan, plan
from marfl.schema import REQUIRED, Setting, settings_of, tables_of
from marfl.settings import Network

DOCS = Path(__file__).parent.parent / "docs"
ARCHITECTURE = DOCS / "architecture.md"  # its table of rooms is held true by tests/test_layering.py
PYTHON, MARK = DOCS / "python.md", "<!-- options: made by `make docs` from the code, do not edit below -->"
NOTE = "<!-- Made by `make docs` from the code. Do not edit. -->\n"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#D6B500", "#56B4E9", "#882255", "#7A4B1E", "#332288")
STEP, RADIUS = 44, 15  # pixels
ROOM, FLOOR = 130, 70  # pixels
ROOM_STYLE = (
    "<style>svg{font:12px system-ui,sans-serif}line{stroke:#888}",
    "rect{fill:#eef4fa;stroke:#0072B2}path{fill:#888}</style>",
    '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">',
    '<path d="M0 0L8 4L0 8z"/></marker></defs>',
    '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>',
)


def cli_page() -> str:
    """Every command with its help and its options."""
    lines = ["# Command line", "", NOTE]
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in sorted(commands.items()):
        lines += [f"## marfl {name}", "", *_help(command.help or ""), ""]
        by_panel: dict[str, list[Any]] = {}
        for parameter in command.params:
            if "--help" not in parameter.opts:
                by_panel.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(parameter)
        for panel, parameters in by_panel.items():
            lines += [f"**{panel}**", "", "| option | default | |", "|---|---|---|"]
            lines += [*map(_option, parameters), ""]
    return "\n".join(lines)


def _help(text: str) -> Iterator[str]:
    """Paragraphs as they are; examples, which are indented, as code."""
    for paragraph in text.replace("\b", "").split("\n\n"):
        code = paragraph.startswith("  ")
        yield "\n".join(["```", *(line.strip() for line in paragraph.split("\n")), "```"]) if code else paragraph
        yield ""


def _option(parameter: Any) -> str:
    names = parameter.opts + parameter.secondary_opts if parameter.param_type_name == "option" else [parameter.metavar]
    value = f" {parameter.metavar}" if parameter.metavar and parameter.param_type_name == "option" else ""
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    default = "" if shown is None or shown is False or callable(shown) else f"`{shown}`"
    spelled = ", ".join(f"`{name}`" for name in names)
    return f"| {_cell(spelled + value)} | {default} | {_cell(parameter.help or '')} |"


def config_page() -> str:
    """Every setting with its type, its default and its meaning, and the presets."""
    lines = [
        "# Settings", "", NOTE,
        "A config file is TOML; `marfl simulate --config FILE` reads it, and every run directory holds the one it ran "
        "with. Flags override the file, the file overrides the preset. `--set NAME=VALUE` sets any of these by its "
        "name, such as `--set churn.dropout=0.2`. `marfl.simulate` takes the same names: "
        "`marfl.simulate(peers=27, churn=marfl.Churn(dropout=0.2))`.", "",
        *_tables(Config),
        *_tables(Network, "network"),
        "The options of the library's peer are on the page [Python API](python.md#options-of-peer).", "",
        "## Presets", "",
        "| `--preset` | sets |", "|---|---|",
    ]  # fmt: skip
    lines += [
        f"| `{name}` | {_cell(', '.join(f'`{k} = {v}`' for k, v in settings.items()))} |"
        for name, settings in PRESETS.items()
    ]
    return "\n".join([*lines, ""])


def python_page() -> str:
    """The page on the library, with every option of `marfl.Peer` below its mark."""
    written = PYTHON.read_text(encoding="utf-8")
    prose = written[: written.index(MARK) + len(MARK)]
    reset = "| `reset` | optimizer |  | an optimizer whose state is cleared whenever the model changes |"
    options = list(_rows(PeerOptions, "option"))
    network = ["### Patience and ways through routers", "", "The `[network]` settings, by name:", ""]
    return "\n".join([prose, "", *options[:2], reset, *options[2:], *network, *_rows(Network, "option")])


def _tables(model: type, name: str = "") -> Iterator[str]:
    for inner, table in tables_of(model, name and f"{name}."):
        about = (table.__doc__ or "").strip().split("\n")[0]
        yield from (f"## {f'`[{inner}]`' if inner else 'Top level'}", "", about, "")
        yield from _rows(table, "setting")


def _rows(model: type, head: str) -> Iterator[str]:
    yield from (f"| {head} | kind | default | |", "|---|---|---|---|")
    for name, setting in settings_of(model).items():
        if "." not in name:  # those of a table within have rows of their own
            default = "" if setting.default in (None, REQUIRED, {}) else f"`{setting.default}`"
            yield f"| `{name}` | {_cell(_kind(setting))} | {default} | {_cell(setting.help)} |"
    yield ""


def _kind(setting: Setting) -> str:
    return ", ".join(f"`{word}`" for word in setting.choices) or setting.allowed.removeprefix("a ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def grid_picture(peers: int, group_size: int) -> str:
    """A plan as SVG: a panel for each round, peers of one group in one colour, joined by a line."""
    chosen = plan(peers, group_size)
    across, down = _places(chosen)
    panel = STEP * (1 + max(across.values())) + STEP
    height = STEP * (1 + max(down.values())) + 60
    width = panel * len(chosen.rounds)
    body = []
    for number, groups in enumerate(chosen.rounds):
        left = panel * number + STEP
        text = f"round {number + 1}"
        body.append(f'<text x="{left - RADIUS}" y="20" font-weight="bold">{text}</text>')
        resting = set(range(peers)) - {rank for group in groups for rank in group}
        for index, group in enumerate([*groups, *((rank,) for rank in sorted(resting))]):
            colour = "#bbbbbb" if group[0] in resting else COLOURS[index % len(COLOURS)]
            points = [(left + STEP * across[rank], 48 + STEP * down[rank]) for rank in group]
            joined = " ".join(f"{x},{y}" for x, y in points)
            body.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="6" opacity=".35"/>')
            for rank, (x, y) in zip(group, points, strict=True):
                body.append(f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="{colour}"/>')
                body.append(f'<text x="{x}" y="{y + 4}" text-anchor="middle" fill="#fff">{rank}</text>')
    style = "font: 12px system-ui, sans-serif"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" style="{style}">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *body, "</svg>", ""])


def _places(chosen: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """A cell is a row: its core from the left, its spare last. So round 1 goes along rows."""
    across, down = {}, {}
    for row, cell in enumerate(chosen.rounds[0]):
        for column, rank in enumerate(cell):
            across[rank], down[rank] = column, row
    return across, down


def rooms(page: str) -> dict[str, set[str]]:
    """The table of rooms on the page: what each may import, from the ground up."""
    table = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", page, re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)`", cell)) for room, cell in table}


def rooms_picture(table: Mapping[str, set[str]]) -> str:
    """The rooms as SVG: each stands above all that it imports, and arrows that follow from others are left out."""
    places, width, height = _room_places(_floors(table))
    reached: dict[str, set[str]] = {}
    body = []
    for room, imports in table.items():
        reached[room] = imports.union(*(reached[other] for other in imports))
        for other in sorted(imports - set().union(*(reached[nearer] for nearer in imports))):
            (x, y), (to_x, to_y) = places[room], places[other]
            body.append(f'<line x1="{x:g}" y1="{y + 14:g}" x2="{to_x:g}" y2="{to_y - 15:g}" marker-end="url(#tip)"/>')
    for room, (x, y) in places.items():
        body.append(f'<rect x="{x - 48:g}" y="{y - 14:g}" width="96" height="28" rx="5"/>')
        body.append(f'<text x="{x:g}" y="{y + 4:g}" text-anchor="middle">{room}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    return "\n".join([head, *ROOM_STYLE, *body, "</svg>", ""])


def _floors(table: Mapping[str, set[str]]) -> dict[str, int]:
    """How high each room stands: above all that it imports, and as near as can be to those that import it."""
    floors: dict[str, int] = {}
    for room, imports in table.items():
        floors[room] = 1 + max((floors[other] for other in imports), default=-1)
    for room in reversed(table):
        above = [floors[other] for other, imports in table.items() if room in imports]
        floors[room] = min(above, default=floors[room] + 1) - 1
    return floors


def _room_places(floors: Mapping[str, int]) -> tuple[dict[str, tuple[float, float]], float, float]:
    """The middle of each room, and the width and height of the picture."""
    rows = [[room for room in floors if floors[room] == floor] for floor in range(1 + max(floors.values()))]
    width, height = ROOM * max(map(len, rows)), FLOOR * len(rows)
    places = {
        room: (width * (place + 0.5) / len(row), height - FLOOR * (floor + 0.5))
        for floor, row in enumerate(rows)
        for place, room in enumerate(row)
    }
    return places, width, height


def pages() -> dict[Path, str]:
    """Everything that follows from the code."""
    return {
        DOCS / "cli.md": cli_page(),
        DOCS / "config.md": config_page(),
        DOCS / "python.md": python_page(),
        DOCS / "pictures/grid-9.svg": grid_picture(9, 3),
        DOCS / "pictures/grid-11.svg": grid_picture(11, 3),
        DOCS / "pictures/rooms.svg": rooms_picture(rooms(ARCHITECTURE.read_text(encoding="utf-8"))),
    }


def stale() -> list[str]:
    """The files that are not what the code says."""
    return [
        str(path.relative_to(DOCS.parent))
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    if "--check" in sys.argv[1:]:
        old = stale()
        print(f"stale: {', '.join(old)}; run make docs" if old else "fresh")
        return 1 if old else 0
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
