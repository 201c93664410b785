"""The report as files: every figure as PNG and SVG, and one HTML page with everything inside.

The page fits any screen, dark or light, and works without a network.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.filesize import decimal

from marfl.errors import InputError
from marfl.report.series import Facts, look_of, series_of, splits_of
from marfl.runs.files import write_atomic, writing
from marfl.runs.reader import Run

PAGE = "index.html"
CSS = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 76rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; padding: .5rem; border: 1px solid #8886; border-radius: .5rem; }
figure img { display: block; width: 100%; max-width: 40rem; margin: auto; background: #fff; border-radius: .25rem; }
figcaption { font-size: .85rem; padding: .5rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #8886; text-align: right; }
th { vertical-align: bottom; white-space: normal; } .text { text-align: left; } .long { white-space: normal; }
.dot { display: inline-block; width: .7em; height: .7em; border: 1px solid #8888; border-radius: 50%; }
.notice { border-left: .3rem solid #d55e00; padding-left: .6rem; }
"""
NOTHING = "–"
MOST_FINDINGS = 4  # of a run, that are spelt out


@dataclass(frozen=True)
class DrawnReport:
    """What was drawn."""

    page: Path
    figures: tuple[Path, ...]  # PNG and SVG
    facts: tuple[Facts, ...]  # of every run, in the order of the page's table


def draw(runs: Sequence[Run], out: Path, *, title: str | None = None) -> DrawnReport:
    """Draw a report on `runs` into `out`: the figures they have data for, and one page that works offline.

    The same runs give the same bytes. Files of an earlier report are replaced, others are left alone.
    """
    if not runs:
        raise InputError("report: there is no run to draw")
    series = series_of(runs)
    with needing_plots("report"):
        from marfl.report.figures import drawings  # here, because it needs matplotlib, which is an extra
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    pictures: list[Picture] = []
    files: list[Path] = []
    for drawing in drawings(series, splits_of(series)):
        for kind in ("png", "svg"):
            files.append(out / f"{drawing.name}.{kind}")
            write_atomic(files[-1], drawing.rendered(kind))
        pictures.append(Picture(drawing.caption, files[-1].read_bytes()))
    facts = tuple(each for group in series for each in group.facts)
    write_atomic(out / PAGE, html_of(title or _title(facts), pictures, facts).encode())
    return DrawnReport(out / PAGE, tuple(files), facts)


@contextmanager
def needing_plots(command: str) -> Iterator[None]:
    """Turn the lack of a library that the extra `plots` brings into one line of `command`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(f"{command}: {error.name} is not installed; run: pip install 'marfl[plots]'") from error


def inlined(svg: bytes) -> str:
    """A figure as an address that holds all of it, so that the page needs no other file."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _title(facts: Sequence[Facts]) -> str:
    tasks = sorted({each.task for each in facts if each.task})
    peers = sorted({each.peers for each in facts if each.peers})
    counts = f"{', '.join(f'{count:,}' for count in peers)} peers" if peers else ""
    return ", ".join(filter(None, [*tasks, counts])) or "runs"


@dataclass(frozen=True)
class Picture:
    """A figure for the page."""

    caption: str
    svg: bytes


@dataclass(frozen=True)
class Column:
    """A column of the table: its head, and what it says about a run."""

    head: str
    cell: Callable[[Facts], str | None]
    text: bool = False
    long: bool = False  # whole sentences, that may take several lines


def html_of(title: str, pictures: Sequence[Picture], facts: Sequence[Facts]) -> str:
    """The whole page; every text from a run is escaped, and nothing is loaded from elsewhere."""
    unfinished = [each.run for each in facts if each.state != "finished"]
    notice = f'<p class="notice">Unfinished, drawn as far as they got: {escape(", ".join(unfinished))}.</p>'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{notice if unfinished else ""}
<div class="figures">
{"".join(map(_figure, pictures))}</div>
<h2>Runs</h2>
{_table(RUN_COLUMNS, facts)}
<h2>Bytes by kind, of all peers and iterations</h2>
{_table([*RUN_COLUMNS[:2], *_byte_columns(facts)], facts)}
<h2>How they were computed, and what the checks of the iterations found</h2>
{_table([*RUN_COLUMNS[:2], *CHECK_COLUMNS], facts)}
</body>
</html>
"""


def _figure(picture: Picture) -> str:
    caption = escape(picture.caption)
    return f"""<figure>
<img alt="{caption}" src="{inlined(picture.svg)}">
<figcaption>{caption}</figcaption>
</figure>
"""


def _table(columns: Sequence[Column], facts: Sequence[Facts]) -> str:
    heads = "".join(f"<th{_kind(column)}>{escape(column.head)}</th>" for column in columns)
    rows = "\n".join(f"<tr>{''.join(_cell(column, each) for column in columns)}</tr>" for each in facts)
    return f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _cell(column: Column, facts: Facts) -> str:
    dot = f'<span class="dot" style="background:{look_of(facts.technique).colour}"></span> '
    mark = dot if column.head == "technique" else ""
    return f"<td{_kind(column)}>{mark}{escape(column.cell(facts) or NOTHING)}</td>"


def _kind(column: Column) -> str:
    return ' class="text long"' if column.long else ' class="text"' if column.text else ""


def _count(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.2%}"


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _found(findings: Mapping[str, int]) -> str:
    """The most frequent findings, and how many others there are."""
    if not findings:
        return "nothing"
    shown = [f"{finding} ({count:,} ×)" for finding, count in list(findings.items())[:MOST_FINDINGS]]
    others = len(findings) - len(shown)
    return "; ".join(shown) + (f"; and {others:,} others" if others else "")


def _byte_columns(facts: Sequence[Facts]) -> list[Column]:
    def column(kind: str) -> Column:
        return Column(kind, lambda each: decimal(each.bytes_by_kind[kind]))

    return [column(kind) for kind in facts[0].bytes_by_kind]


RUN_COLUMNS = (
    Column("run", lambda each: each.run, text=True),
    Column("technique", lambda each: look_of(each.technique).name, text=True),
    Column("semantics", lambda each: each.semantics, text=True),
    Column("exchange", lambda each: each.exchange, text=True),
    Column("peers", lambda each: _count(each.peers)),
    Column("seed", lambda each: None if each.seed is None else str(each.seed)),
    Column("iterations", lambda each: _count(each.iterations)),
    Column("final accuracy", lambda each: _share(each.final_accuracy)),
    Column("best accuracy", lambda each: _share(each.best_accuracy)),
    Column("bytes in all", lambda each: decimal(each.bytes_total)),
    Column("S per peer and iteration", lambda each: _short(each.models_per_peer_iteration)),
    Column("disagreement", lambda each: _short(each.disagreement)),
    Column("model hash", lambda each: each.model_hash and each.model_hash[:8], text=True),
    Column("virtual s", lambda each: _short(each.virtual_seconds)),
    Column("wall s", lambda each: _short(each.wall_seconds)),
    Column("state", lambda each: each.state, text=True),
)
CHECK_COLUMNS = (
    Column("engine", lambda each: each.engine, text=True),
    Column("its way", lambda each: each.engine_reason, text=True, long=True),
    Column("findings", lambda each: _found(each.findings), text=True, long=True),
)
