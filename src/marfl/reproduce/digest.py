"""The verdicts for somebody in a hurry: the page "what we learned", and the README's table.

Both are templates whose numbers come from the verdicts, `{ten-times-text.rdfl:x}`; a sentence whose claim was not run
says so. No number is written here by hand but those that the paper states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import SimpleNamespace

from marfl.errors import InputError
from marfl.reproduce.cases import Scale
from marfl.reproduce.claims import ClaimVerdict, Findings, Word
from marfl.reproduce.numbers import Shown
from marfl.runs.files import write_atomic

LEARNED, LEARNED_HTML = "learned.md", "learned.html"
NOT_YET = "not run yet"
_NAMED = re.compile(r"\{([\w-]+)\.\w+:[^}]+\}")
Verdicts = Mapping[str, ClaimVerdict]  # by the claim's name


def verdicts_of(findings: Sequence[Findings]) -> Verdicts:
    return {claim.name: verdict for found in findings for claim, verdict in found.verdicts}


def told(template: str, verdicts: Verdicts) -> str:
    """A template with the numbers of verdicts; without all of them it says so."""
    names = set(_NAMED.findall(template))
    if any(name not in verdicts or verdicts[name].word is Word.NOT_RUN for name in names):
        return NOT_YET
    shown = {
        name: SimpleNamespace(**{each: Shown(number) for each, number in verdicts[name].numbers.items()})
        for name in names
    }
    return template.format_map(shown)


# --- what we learned ---


@dataclass(frozen=True)
class Lesson:
    """One thing worth knowing: what holds of the paper, what does not, what to do instead. All are templates."""

    title: str
    figure: str
    claims: Mapping[str, Word | None]  # whose verdicts are shown, and which one the lesson rests on
    holds: str
    fails: str
    instead: str


LESSONS = (
    Lesson(
        "Ten times fewer bytes than all-to-all, but not than a server",
        "growth-text", {"ten-times-text": Word.CONFIRMED, "ten-times-vision": None, "price": Word.REFINED},
        "Among 125 peers AR-FL and RDFL send {ten-times-text.arfl:x} what MAR-FL sends, for the same model.",
        "It still sends {price.paper:x} what FedAvg sends: whole vectors go to whole groups, with the momentum.",
        "Split vectors in the groups (`exchange = grid`) and send updates only: {price.grid:x} what FedAvg sends, "
        "exact for any number of peers.",
    ),
    Lesson(
        "Missing peers cost nothing; stale models do",
        "participation-text", {"participation-degrades": Word.REFINED, "exact-participation-text": None},
        "As published, half participation costs {participation-degrades.paper:pt} on 20NG, and dropouts on top of it a "
        "further {dropouts-harmless-text.paper:pt}.",
        "It is no law: the loss comes from peers that go on from a stale model.",
        "Let whoever was away catch up first (`semantics = exact`): half participation then costs "
        "{participation-degrades.exact:pt}.",
    ),
    Lesson(
        "Distillation saves bytes because it computes more",
        "distillation-text", {"mkd-text": Word.REFINED, "mkd-text-coded": None, "mkd-vision": None},
        "With MKD in many iterations 50 % on 20NG takes {mkd-text.many_bytes:x} fewer bytes, and "
        "{mkd-text.many_steps:x} the gradient steps.",
        "As many plain local steps take {mkd-text.many_matched_bytes:x} fewer bytes: the teachers are not what helps.",
        "Take more local steps before you average. They need no models of others, and go with masks and privacy.",
    ),
    Lesson(
        "The privacy budget holds for outsiders only",
        "privacy-text", {"noise": Word.CONFIRMED, "noise-supported": Word.REFINED, "sampling": None},
        "More noise lowers ε and, in the end, accuracy: {noise.none:%} without noise, {noise.extreme:%} at an ε of "
        "{noise.epsilon_extreme:g}.",
        "A member of one's own group sees {noise-supported.times:x} the ε of an outsider, and the published mechanism "
        "sends the momentum without any noise.",
        "Send one clipped and noised update, mask the sums (`privacy.masks`), and report ε for every observer.",
    ),
    Lesson(
        "On slow links the exchange decides",
        "wireless-lte-text", {"wireless-text": Word.CONFIRMED, "wireless-vision": None},
        "MAR-FL needs far less time than AR-FL, which takes {wireless-text.arfl_lte:x} ours over LTE.",
        "As published it takes {wireless-text.paper_lte:x} the time of `grid`; a ring all-reduce takes "
        "{wireless-text.ring_lte:x}, because so many messages wait for one another.",
        "Few phases and few bytes: `grid` takes {wireless-text.grid_lte:s} for a whole run; FedAvg with a server in a "
        "data centre takes {wireless-text.fedavg_lte:x} that.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class ToldLesson:
    """A lesson with its numbers."""

    title: str
    figure: str | None  # None: not drawn, as nothing of it was run
    verdicts: tuple[tuple[str, Word], ...]  # by claim
    sentences: tuple[tuple[str, str], ...]  # what it is about, and the sentence


def lessons(findings: Sequence[Findings], captions: Mapping[str, str]) -> list[ToldLesson]:
    """The lessons as far as they were run."""
    verdicts = verdicts_of(findings)
    return [
        ToldLesson(
            lesson.title,
            lesson.figure if lesson.figure in captions else None,
            tuple((name, _word(verdicts, name)) for name in lesson.claims),
            (
                *_caution(lesson, verdicts),
                ("Holds", told(lesson.holds, verdicts)),
                ("Does not", told(lesson.fails, verdicts)),
                ("Instead", told(lesson.instead, verdicts)),
            ),
        )
        for lesson in LESSONS
    ]


def _word(verdicts: Verdicts, claim: str) -> Word:
    return verdicts[claim].word if claim in verdicts else Word.NOT_RUN


def _caution(lesson: Lesson, verdicts: Verdicts) -> Iterator[tuple[str, str]]:
    """A warning where the runs do not say what the lesson rests on."""
    others = [
        f"{name} is {_word(verdicts, name).value}"
        for name, word in lesson.claims.items()
        if word not in (None, _word(verdicts, name))
    ]
    if others:
        yield "Careful", f"these runs do not show it: {', '.join(others)}."


_HEAD = "What we learned from MAR-FL"
_ABOUT = (
    "For somebody who has read the paper ([arXiv 2512.05234](https://arxiv.org/abs/2512.05234)) and has ten minutes. "
    "Every number is a mean over seeds with its 95 % interval; every verdict is on [the page of all "
    "claims](reproduction.md), with the runs behind it."
)


def learned_page(told_lessons: Sequence[ToldLesson]) -> str:
    """The lessons as Markdown."""
    made = "<!-- Made by `marfl reproduce`. Do not edit: run the command again. -->"
    lines = [f"# {_HEAD}", "", made, "", _ABOUT, ""]
    for lesson in told_lessons:
        lines += [f"## {lesson.title}", ""]
        if lesson.figure:
            lines += [f"![{lesson.title}](reproduction/{lesson.figure}.svg)", ""]
        lines += [f"- **{about}.** {sentence}" for about, sentence in lesson.sentences]
        links = ", ".join(f"[{name}](reproduction.md#{name}) {word.value}" for name, word in lesson.verdicts)
        lines += [f"- Verdicts: {links}.", ""]
    return "\n".join(lines)


def learned_html(told_lessons: Sequence[ToldLesson], scale: Scale) -> str:
    """The lessons on one screen: cards beside each other, below each other on a phone."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{_HEAD}</title>
<style>{_CSS}</style>
</head>
<body>
<header><h1>{_HEAD}</h1><p>{_plain_links(_ABOUT)} Scale <code>{scale.name}</code>.</p></header>
<main>
{"".join(map(_card, told_lessons))}</main>
</body>
</html>
"""


def _card(lesson: ToldLesson) -> str:
    picture = f'<img src="reproduction/{lesson.figure}.svg" alt="{escape(lesson.title)}">'
    image = f'<a href="reproduction/{lesson.figure}.svg">{picture}</a>\n' if lesson.figure else ""
    sentences = "\n".join(f"<dt>{about}</dt><dd>{_coded(sentence)}</dd>" for about, sentence in lesson.sentences)
    links = " · ".join(
        f'<a href="reproduction.md#{name}" class="{word.value.replace(" ", "-")}">{name}: {word.value}</a>'
        for name, word in lesson.verdicts
    )
    return f"<article>\n<h2>{escape(lesson.title)}</h2>\n{image}<dl>\n{sentences}\n</dl>\n<p>{links}</p>\n</article>\n"


def _coded(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _plain_links(text: str) -> str:
    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)


_CSS = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: .6rem 1rem; max-width: 120rem; font: 14px/1.35 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; gap: 0 1.5rem; align-items: baseline; }
h1 { font-size: 1.35rem; margin: .2rem 0; }
header p { margin: .2rem 0; flex: 1 1 22rem; } main { display: grid; gap: .7rem; }
@media (min-width: 38rem) { main { grid-template-columns: repeat(2, 1fr); } }
@media (min-width: 52rem) { main { grid-template-columns: repeat(3, 1fr); } }
@media (min-width: 70rem) { main { grid-template-columns: repeat(5, 1fr); } }
article { border: 1px solid #8884; border-radius: .4rem; padding: .5rem .7rem; min-width: 0; }
h2 { font-size: 1rem; margin: 0 0 .4rem; } img { width: 100%; background: #fff; border-radius: .25rem; }
dl { margin: .3rem 0; } dt { font-weight: 600; float: left; margin-right: .4rem; } dt::after { content: "."; }
dd { margin: 0 0 .3rem; } p { margin: .3rem 0 0; overflow-wrap: anywhere; } code { font-size: .9em; }
.confirmed { color: #0a7d33; } .refuted { color: #c2361b; } .refined { color: #9a6700; }
.not-shown-here, .not-run { color: #666; }
@media (prefers-color-scheme: dark) { a { color: #8ab4f8; } .confirmed { color: #4cc26f; } .refuted { color: #ff7a5c; }
  .refined { color: #e0a72e; } .not-shown-here, .not-run { color: #aaa; } }
"""


# --- the README's table ---

BEGIN, END = "<!-- verdicts: made by `marfl reproduce --docs docs` -->", "<!-- end of verdicts -->"


@dataclass(frozen=True)
class ReadmeRow:
    """A line of the README's table: what, what the paper says, what came out on either task, and by which command."""

    what: str
    paper: str
    text: str
    vision: str
    experiment: str


ROWS = (
    ReadmeRow(
        "bytes of AR-FL and RDFL against MAR-FL", "up to 10×", "{ten-times-text.arfl:x}", "{ten-times-vision.arfl:x}",
        "communication",
    ),
    ReadmeRow("bytes of MAR-FL as published against FedAvg", "“a gap”", "{price.paper:x}", "", "communication"),
    ReadmeRow("bytes of our exchange `grid` against FedAvg", "", "{price.grid:x}", "", "communication"),
    ReadmeRow(
        "lost when half of the peers take part, as published", "“substantial”, milder on MNIST",
        "{participation-degrades.paper:pt}", "{participation-milder.vision:pt}", "participation",
    ),
    ReadmeRow(
        "lost with half of them and a fifth of these dropped, exact semantics", "",
        "{exact-participation-text.lost:pt}", "{exact-participation-vision.lost:pt}", "participation",
    ),
    ReadmeRow(
        "bytes of AR-FL against MAR-FL under such losses", "more than 5×", "{five-times-text.ratio:x}",
        "{five-times-vision.ratio:x}", "participation",
    ),
    ReadmeRow(
        "bytes saved by groups of 3 in 4 rounds", "up to 33 %", "{approximate-text.share:%}",
        "{approximate-vision.share:%}", "approximate",
    ),
    ReadmeRow(
        "bytes to 50 % and 95 % accuracy: without MKD against with it", "over 2×, up to 3×",
        "{mkd-text.many_bytes:x}", "{mkd-vision.many_bytes:x}", "distillation",
    ),
    ReadmeRow(
        "the same: against as many plain local steps", "", "{mkd-text.many_matched_bytes:x}",
        "{mkd-vision.many_matched_bytes:x}", "distillation",
    ),
    ReadmeRow(
        "accuracy under most noise, with the ε of an outsider", "degrades eventually",
        "{noise.extreme:%} at {noise.epsilon_extreme:g}",
        "{noise-vision.extreme:%} at {noise-vision.epsilon_extreme:g}", "privacy",
    ),
    ReadmeRow(
        "time of a run over LTE, as published against `grid`", "", "{wireless-text.paper_lte:x}",
        "{wireless-vision.paper_lte:x}", "wireless",
    ),
)  # fmt: skip


def readme_table(findings: Sequence[Findings]) -> str:
    """The table, and how many claims came out how."""
    return "\n".join(_readme_lines(findings))


def _readme_lines(findings: Sequence[Findings]) -> Iterator[str]:
    verdicts = verdicts_of(findings)
    words = [verdict.word for verdict in verdicts.values()]
    counts = ", ".join(f"{words.count(word)} {word.value}" for word in Word if word in words)
    yield f"Of {len(words)} claims: {counts}. ± is the 95 % interval over seeds."
    yield ""
    yield "| | the paper | 20NG | MNIST | made by |"
    yield "|---|---|---|---|---|"
    for row in ROWS:
        cells = (row.what, row.paper, told(row.text, verdicts), told(row.vision, verdicts))
        yield f"| {' | '.join(cells)} | `marfl reproduce {row.experiment}` |"


def renew_readme(path: Path, findings: Sequence[Findings]) -> None:
    """Put the table between its marks in the README; one without marks is left alone."""
    if not path.is_file() or BEGIN not in (text := path.read_text(encoding="utf-8")):
        return
    before, rest = text.split(BEGIN, 1)
    if END not in rest:
        raise InputError(f"{path}: has the mark {BEGIN} but not {END} after it; put it there")
    table = f"{BEGIN}\n{readme_table(findings)}\n{END}"
    write_atomic(path, (before + table + rest.split(END, 1)[1]).encode())
