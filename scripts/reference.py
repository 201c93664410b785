"""The parts of docs/ that follow from the code: the CLI, the settings, and pictures of the grid.

    python scripts/reference.py          # writes docs/cli.md, docs/config.md and docs/pictures/
    python scripts/reference.py --check  # says what is stale, and fails if anything is
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
NOTE = "<!-- Made by `make docs` from the code. Do not edit. -->\n"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#D6B500", "#56B4E9", "#882255", "#7A4B1E", "#332288")
STEP, RADIUS = 44, 15  # pixels


def cli_page() -> str:
    """Every command with its help and its options."""
    lines = ["# Command line", "", NOTE]
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in sorted(commands.items()):
        lines += [f"## marfl {name}", "", *_help(command.help or ""), ""]
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [_option(parameter) for parameter in command.params if "--help" not in parameter.opts]
        lines.append("")
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
        "## `marfl.Peer`", "", "Options of the library's peer; it takes those of `[network]` by name as well.", "",
        *_rows(PeerOptions, "option"),
        "## Presets", "",
        "| `--preset` | sets |", "|---|---|",
    ]  # fmt: skip
    lines += [
        f"| `{name}` | {_cell(', '.join(f'`{k} = {v}`' for k, v in settings.items()))} |"
        for name, settings in PRESETS.items()
    ]
    return "\n".join([*lines, ""])


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


def pages() -> dict[Path, str]:
    """Everything that follows from the code."""
    return {
        DOCS / "cli.md": cli_page(),
        DOCS / "config.md": config_page(),
        DOCS / "pictures/grid-9.svg": grid_picture(9, 3),
        DOCS / "pictures/grid-11.svg": grid_picture(11, 3),
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
