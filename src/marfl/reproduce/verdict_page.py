"""The verdict page: Markdown for the documentation, and one HTML file that needs nothing else."""

from __future__ import annotations

import importlib
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from marfl.config import Config
from marfl.report.page import CSS, inlined, needing_plots
from marfl.reproduce.cases import Bench, Case, Scale
from marfl.reproduce.claims import Claim, ClaimVerdict, Findings, Word
from marfl.reproduce.numbers import Shown, Summary

FIGURES = "reproduction"  # the folder of figures beside the page
MARKS = {Word.CONFIRMED: "✔", Word.REFUTED: "✘", Word.REFINED: "◐", Word.NOT_RUN: "–"}
VERDICT_CSS = """
.confirmed { color: #0a7d33; } .refuted { color: #c2361b; } .refined { color: #9a6700; } .not-run { color: #777; }
main { max-width: 60rem; margin: auto; } main img { max-width: 100%; background: #fff; border-radius: .25rem; }
main table { white-space: normal; margin: 1rem 0; } main th, main td { text-align: left; vertical-align: top; }
main details table { white-space: nowrap; } summary { cursor: pointer; }
blockquote { margin: .5rem 0; padding-left: .8rem; border-left: .3rem solid #8886; } details { overflow-x: auto; }
@media (prefers-color-scheme: dark) {
.confirmed { color: #4cc26f; } .refuted { color: #ff7a5c; } .refined { color: #e0a72e; } .not-run { color: #999; }
}
"""


def markdown_page(
    scale: Scale, findings: Sequence[Findings], captions: Mapping[str, str], absent: Sequence[str] = ()
) -> str:
    """The page: every claim with its verdict, then experiment by experiment how it came about.

    `absent` names the experiments that are not on it.
    """
    parts = [_head(scale, findings, absent), _overview(findings), _sizes(scale), _chapters(scale, findings, captions)]
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(scale: Scale, findings: Sequence[Findings], absent: Sequence[str]) -> Iterator[str]:
    words = [verdict.word for found in findings for _, verdict in found.verdicts]
    counts = ", ".join(f"{words.count(word)} {word.value}" for word in Word if word in words)
    yield "# Reproduction of MAR-FL: a verdict on every claim"
    yield ""
    yield f"<!-- Made by `marfl reproduce` at scale {scale.name}. Do not edit: run the command again. -->"
    yield ""
    yield (
        "What the paper ([MAR-FL, arXiv 2512.05234](https://arxiv.org/abs/2512.05234)) claims, in our words, and what "
        f"the same experiments gave here. Made by `marfl reproduce all --scale {scale.name}`: {scale.about}. "
        f"{' '.join(_size(bench) for bench in scale.benches)}"
    )
    yield ""
    yield f"**{len(words)} claims: {counts}.**"
    yield ""
    yield from _not_run(findings, absent)
    yield (
        "*Confirmed*: our number agrees. *Refuted*: it does not. *Refined*: it holds under a condition that the paper "
        "does not name, or for another reason. *As published*: the model and its momentum travel whole, and who was "
        "absent goes on from a stale model. *Ours*: exact semantics; whoever takes part first holds the newest model, "
        "and only updates travel, by the exchange `grid` unless another is named. Techniques that give the same models "
        "by construction share one training run; the bytes and times of each are computed apart, from its own "
        "messages, as the tables say."
    )
    yield ""


def _not_run(findings: Sequence[Findings], absent: Sequence[str]) -> Iterator[str]:
    missing = [
        f"{found.experiment.name} ({len(found.unfinished)} of {len(found.cases)} cases)"
        for found in findings
        if found.unfinished
    ]
    missing += [f"{name} (nothing)" for name in absent]
    if missing:
        yield f"**Not run**, or not yet: {', '.join(missing)}."
        yield ""
    sparse = [f"{found.experiment.name} ({len(found.sparse)})" for found in findings if found.sparse]
    if sparse:
        yield (
            f"**Fewer seeds** than planned, so far (number of cases): {', '.join(sparse)}. A claim is judged by as "
            "many seeds as all its cases have."
        )
        yield ""


def _size(bench: Bench) -> str:
    peers = " or ".join(dict.fromkeys(str(crowd.peers) for crowd in (bench.crowd, bench.sizes[-1])))
    seeds = "one seed" if len(bench.seeds) == 1 else f"up to {len(bench.seeds)} seeds"
    return f"{bench.name.capitalize()} is {bench.title}: mostly {peers} peers, {bench.iterations} iterations, {seeds}."


def _sizes(scale: Scale) -> Iterator[str]:
    """What the scale means for either task."""
    rows: dict[str, Callable[[Bench], str]] = {
        "data": lambda bench: bench.title,
        "iterations": lambda bench: f"{bench.iterations}",
        "samples of a peer in an iteration": lambda bench: f"{bench.batch}",
        "seeds": lambda bench: f"{len(bench.seeds)}",
        "peers: communication, wireless, approximate": lambda bench: ", ".join(str(c.peers) for c in bench.sizes),
        "peers: participation, privacy, heterogeneity": lambda bench: f"{bench.crowd.peers}",
        "peers: distillation": lambda bench: f"{bench.distill_crowd.peers}",
        "distillation: ends at": lambda bench: f"{Shown(bench.target):%} or iteration {bench.distill_iterations}",
        "distillation: K": lambda bench: f"{bench.distilled[0]} and {bench.distilled[1]}",
        "privacy: σ": lambda bench: "{:g}, {:g} and {:g}".format(*bench.noise),
    }
    yield "## Sizes at this scale"
    yield ""
    yield "| | vision | text |"
    yield "|---|---|---|"
    for name, cell in rows.items():
        yield f"| {name} | {cell(scale.vision)} | {cell(scale.text)} |"
    yield ""
    yield (
        "In the tables below, *settings* is the key of the first seed's run; *accuracy* the mean over the seeds, with "
        "the lowest … the highest; *models* says whether a case was trained by itself or has the models of another run."
    )
    yield ""


def _overview(findings: Sequence[Findings]) -> Iterator[str]:
    yield "| | claim | where | verdict |"
    yield "|---|---|---|---|"
    for found in findings:
        for claim, verdict in found.verdicts:
            yield (
                f"| {MARKS[verdict.word]} | [{claim.says}](#{claim.name}) | {claim.source} | **{verdict.word.value}** |"
            )
    yield ""


def _chapters(scale: Scale, findings: Sequence[Findings], captions: Mapping[str, str]) -> Iterator[str]:
    for found in findings:
        yield f"## {found.experiment.title}"
        yield ""
        yield f"{found.experiment.about} Again: `marfl reproduce {found.experiment.name} --scale {scale.name}`."
        yield ""
        for claim, verdict in found.verdicts:
            yield from _verdict(claim, verdict, found.used(claim))
        for figure in found.experiment.figures:
            if figure.name in captions:
                yield f"![{figure.title}]({FIGURES}/{figure.name}.svg)"
                yield ""
                yield f"*{captions[figure.name]}*"
                yield ""
        yield from _measured(found)


def _verdict(claim: Claim, verdict: ClaimVerdict, used: Mapping[str, Sequence[Summary]]) -> Iterator[str]:
    yield f'<a id="{claim.name}"></a>'
    yield ""
    yield f"> **{claim.source}:** {claim.says}"
    yield ""
    yield f"- We measured: {verdict.ours}"
    yield f"- Verdict: **{verdict.word.value}**. {verdict.reason}"
    if verdict.word is not Word.NOT_RUN:
        counts = sorted({len(done) for done in used.values() if "seed" in done[0]})  # a calculation has none
        seeds = f"; {' and '.join(map(str, counts))} {'seed' if counts == [1] else 'seeds'}" if counts else ""
        yield f"- From: {', '.join(used)}{seeds}."
    yield ""


def _measured(found: Findings) -> Iterator[str]:
    """A table of the cases: what was run, how often, and what came out."""
    trained = [name for name in found.evidence if isinstance(found.cases[name].sources[0], Config)]
    yield '<details markdown="1"><summary>How it was measured</summary>'
    yield ""
    if trained:
        yield "| case | settings | seeds | peers | iterations | accuracy | bytes | S¹ | virtual time | models |"
        yield "|---|---|--:|--:|--:|--:|--:|--:|--:|---|"
        yield from (_row(name, found.cases[name], found.evidence[name]) for name in trained)
        yield ""
        yield "¹ Models that a peer sends in an iteration, on average."
        yield ""
    for name in found.evidence:
        if name not in trained:
            yield f"- {name}: a calculation, `{found.cases[name].keys[0]}`."
    yield from _gaps(found)
    yield ""
    yield "</details>"
    yield ""


def _gaps(found: Findings) -> Iterator[str]:
    """What is missing: seeds, cases, and cases that could not be run, with the reason."""
    if found.sparse:
        yield f"- Fewer seeds than planned, so far: {', '.join(found.sparse)}."
    untried = [name for name in found.unfinished if name not in found.problems]
    if untried:
        yield f"- Not run: {', '.join(untried)}."
    for name in found.unfinished:
        if name in found.problems:
            yield f"- {name}: not run: {found.problems[name]}."


def _row(name: str, case: Case, summaries: Sequence[Summary]) -> str:
    def mean(field: str) -> float:
        return statistics.fmean(summary[field] for summary in summaries)

    accuracies = [summary["final_accuracy"] for summary in summaries]
    spread = f" ({Shown(min(accuracies)):%} … {Shown(max(accuracies)):%})" if len(accuracies) > 1 else ""
    sent = mean("bytes_per_peer_iteration") / summaries[0]["model_bytes"]
    virtual = "–" if summaries[0]["virtual_seconds"] is None else f"{Shown(mean('virtual_seconds')):s}"
    models = re.search(r"the models of run \S+-([0-9a-f]+),", summaries[0]["engine_reason"])
    cells = [
        name, f"`{case.keys[0]}`", f"{len(summaries)}", f"{summaries[0]['peers']}", f"{Shown(mean('iterations')):n}",
        f"{Shown(statistics.fmean(accuracies)):%}{spread}", f"{Shown(mean('bytes_total')):B}", f"{sent:.3f}", virtual,
        f"of `{models.group(1)}`" if models else "its own",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def html_page(markdown: str, figures: Path) -> str:
    """The Markdown page as one HTML file, its figures inside."""

    def inside(found: re.Match[str]) -> str:
        return f'src="{inlined((figures / found.group(1)).read_bytes())}"'

    with needing_plots("reproduce"):
        library = importlib.import_module("markdown")
    body = library.markdown(markdown, extensions=["tables", "md_in_html"])
    for word in Word:
        mark = f'<strong class="{word.value.replace(" ", "-")}">{word.value}</strong>'
        body = body.replace(f"<strong>{word.value}</strong>", mark)
    body = re.sub(rf'src="{FIGURES}/([\w-]+\.svg)"', inside, body)
    title = markdown.split("\n", 1)[0].removeprefix("# ")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{CSS}{VERDICT_CSS}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
