"""The report as files: every figure as PNG and SVG, and one HTML page with everything inside.

The page fits any screen, dark or light, and works without a network.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.filesize import decimal

from marfl.errors import InputError
from marfl.report.series import Facts, Series, look_of, mean, series_of, splits_of, telling_settings
from marfl.runs.config_file import flattened
from marfl.runs.files import write_atomic, writing
from marfl.runs.reader import Run

T = TypeVar("T")
PAGE, TABLE = "index.html", "runs.csv"
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
.small { font-size: .85rem; overflow-wrap: anywhere; }
td:first-child { position: sticky; left: 0; }
.results table { white-space: normal; } .results td { min-width: 3.2rem; vertical-align: top; }
.results td:first-child { min-width: 0; }
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
    table: Path  # the same as CSV


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
    write_atomic(out / PAGE, html_of(title or _title(facts), pictures, series).encode())
    write_atomic(out / TABLE, csv_of(series).encode())
    return DrawnReport(out / PAGE, tuple(files), facts, out / TABLE)


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
class Column(Generic[T]):
    """A column of a table: its head, and what it says about a row."""

    head: str
    cell: Callable[[T], str | None]
    text: bool = False
    long: bool = False  # whole sentences, that may take several lines


def html_of(title: str, pictures: Sequence[Picture], series: Sequence[Series]) -> str:
    """The whole page; every text from a run is escaped, and nothing is loaded from elsewhere."""
    facts = [(each, group.look.colour) for group in series for each in group.facts]
    unfinished = [each.run for each, _ in facts if each.state != "finished"]
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
<div class="results">{_table(_results(series), [(each, each.look.colour) for each in series])}</div>
<p class="small">{escape(_shared(series))}</p>
<div class="figures">
{"".join(map(_figure, pictures))}</div>
<h2>Every run</h2>
{_table(RUN_COLUMNS, facts)}
<h2>Bytes by kind, of all peers and iterations</h2>
{_table([RUN_COLUMNS[0], *_byte_columns([each for each, _ in facts])], facts)}
<h2>How they were computed, and what the checks of the iterations found</h2>
{_table([RUN_COLUMNS[0], *CHECK_COLUMNS], facts)}
</body>
</html>
"""


# --- the first table: a row for each setting, seeds pooled, and only the columns that differ ---


def _results(series: Sequence[Series]) -> list[Column[Series]]:
    names, values = telling_settings(series)
    found = dict(zip(map(id, series), values, strict=True))

    def setting(name: str) -> Column[Series]:
        head = name.rpartition(".")[2].replace("_", " ")
        return Column(head, lambda each: _text(found[id(each)].get(name)), text=True)

    several = any(len(each.facts) > 1 for each in series)
    seeds: Column[Series] = Column("seeds", lambda each: _seeds(each.seeds), text=True)
    technique: Column[Series] = Column("technique", lambda each: each.look.name, text=True)
    named = len({each.technique for each in series}) > 1 or not names
    lengths = {facts.iterations for each in series for facts in each.facts}
    measured = [column for column in MEASURED if column.head != "iterations" or len(lengths) > 1]
    return [*[technique] * named, *map(setting, names), *measured, *[seeds] * several]


def _shared(series: Sequence[Series]) -> str:
    """What all runs have in common, of what a reader asks for first."""
    configs = [run.config for each in series for run in each.runs]
    names = ("task", "semantics", "exchange", "peers", "group_size", "iterations", "local_batches", "batch", "engine")
    same = [(name, configs[0].get(name)) for name in names if all(c.get(name) == configs[0].get(name) for c in configs)]
    words = [f"{name.replace('_', ' ')} {value}" for name, value in same if value is not None]
    ranges = " Where seeds are pooled: their mean, and in brackets the lowest and the highest." if any(
        len(each.facts) > 1 for each in series) else ""  # fmt: skip
    return f"All runs: {', '.join(words)}.{ranges} The same as CSV: {TABLE}." if words else f"As CSV: {TABLE}."


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _seeds(seeds: Sequence[int]) -> str:
    run = seeds == list(range(seeds[0], seeds[0] + len(seeds))) and len(seeds) > 2 if seeds else False
    return f"{seeds[0]}–{seeds[-1]}" if run else ", ".join(map(str, seeds))


def _over_seeds(read: Callable[[Facts], float | None], say: Callable[[float], str]) -> Callable[[Series], str | None]:
    """The mean over the runs of a series, and their range where it is one."""

    def cell(series: Series) -> str | None:
        values = [value for facts in series.facts if (value := read(facts)) is not None]
        if not values:
            return None
        low, high = say(min(values)), say(max(values))
        return say(mean(values)) + (f" ({low} to {high})" if low != high else "")

    return cell


def _hashes(series: Series) -> str | None:
    found = [facts.model_hash[:8] for facts in series.facts if facts.model_hash]
    return found[0] if len(set(found)) == 1 else None


MEASURED: tuple[Column[Series], ...] = (
    Column("final accuracy", _over_seeds(lambda each: each.final_accuracy, lambda value: f"{value:.1%}")),
    Column("best accuracy", _over_seeds(lambda each: each.best_accuracy, lambda value: f"{value:.1%}")),
    Column("bytes in all", _over_seeds(lambda each: each.bytes_total, lambda value: decimal(round(value)))),
    Column("models sent per peer and iteration",
           _over_seeds(lambda each: each.models_per_peer_iteration, lambda value: f"{value:.4g}")),
    Column("iterations", _over_seeds(lambda each: each.iterations, lambda value: f"{value:,.0f}")),
    Column("virtual time", _over_seeds(lambda each: each.virtual_seconds, lambda value: f"{value:,.0f} s")),
    Column("wall time", _over_seeds(lambda each: each.wall_seconds, lambda value: f"{value:,.1f} s")),
    Column("model hash", _hashes, text=True),
)  # fmt: skip


def csv_of(series: Sequence[Series]) -> str:
    """Every run as a line: its facts, and after them all its settings."""
    rows: list[dict[str, object]] = []
    for each in series:
        for run, facts in zip(each.runs, each.facts, strict=True):
            named = {name: value for name, value in asdict(facts).items() if name not in ("findings", "bytes_by_kind")}
            sent = {f"bytes_{kind}": count for kind, count in facts.bytes_by_kind.items()}
            found = {"findings": "; ".join(facts.findings)}
            settings = {f"setting.{name}": value for name, value in flattened(run.config).items()}
            rows.append({"label": each.label, **named, **sent, **found, **settings})
    heads = list(dict.fromkeys(name for row in rows for name in row))
    with io.StringIO(newline="") as file:
        writer = csv.DictWriter(file, heads, restval="")
        writer.writeheader()
        writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)
        return file.getvalue()


def _figure(picture: Picture) -> str:
    caption = escape(picture.caption)
    return f"""<figure>
<img alt="{caption}" src="{inlined(picture.svg)}">
<figcaption>{caption}</figcaption>
</figure>
"""


def _table(columns: Sequence[Column[T]], rows: Sequence[tuple[T, str]]) -> str:
    """A table of rows with their colours; a column of which nobody says anything is left out."""
    cells = {column.head: [column.cell(row) for row, _ in rows] for column in columns}
    shown = [column for column in columns if any(cell is not None for cell in cells[column.head])]
    heads = "".join(f"<th{_kind(column)}>{escape(column.head)}</th>" for column in shown)
    lines = []
    for place, (_, colour) in enumerate(rows):
        found = "".join(f"<td{_kind(each)}>{escape(cells[each.head][place] or NOTHING)}</td>" for each in shown)
        lines.append(f'<tr><td><span class="dot" style="background:{colour}"></span></td>{found}</tr>')
    head, body = f"<thead><tr><th></th>{heads}</tr></thead>", "\n".join(lines)
    return f'<div class="wide"><table>\n{head}\n<tbody>\n{body}\n</tbody></table></div>'


def _kind(column: Column[Any]) -> str:
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


def _byte_columns(facts: Sequence[Facts]) -> list[Column[Facts]]:
    def column(kind: str) -> Column[Facts]:
        return Column(kind, lambda each: decimal(each.bytes_by_kind[kind]))

    back: Column[Facts] = Column("payload back", lambda each: decimal(each.payload_down) if each.payload_down else None)
    return [*map(column, facts[0].bytes_by_kind), back]


def _bits(each: Facts) -> str:
    """In how many bits, each way."""
    if each.bits_up is None:
        return ""
    down = "" if each.bits_up == each.bits_down else f", {each.bits_down} back"
    return f": {each.bits_up} bits{down}"


RUN_COLUMNS: tuple[Column[Facts], ...] = (
    Column("run", lambda each: each.run, text=True),
    Column("technique", lambda each: look_of(each.technique).name, text=True),
    Column("semantics", lambda each: each.semantics, text=True),
    Column("exchange", lambda each: each.exchange, text=True),
    Column("wire", lambda each: each.wire and each.wire + _bits(each), text=True),
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
CHECK_COLUMNS: tuple[Column[Facts], ...] = (
    Column("engine", lambda each: each.engine, text=True),
    Column("its way", lambda each: each.engine_reason, text=True, long=True),
    Column("findings", lambda each: _found(each.findings), text=True, long=True),
)
