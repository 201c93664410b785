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
from marfl.reproduce.numbers import Shown, Spread, Summary, spread_of
from marfl.reproduce.paper_settings import settings_table

FIGURES = "reproduction"  # the folder of figures beside the page
MARKS = {Word.CONFIRMED: "✔", Word.REFUTED: "✘", Word.REFINED: "◐", Word.NOT_SHOWN: "○", Word.NOT_RUN: "–"}
VERDICT_CSS = """
.confirmed { color: #0a7d33; } .refuted { color: #c2361b; } .refined { color: #9a6700; }
.not-run, .not-shown-here { color: #777; }
main { max-width: 60rem; margin: auto; } main img { max-width: 100%; background: #fff; border-radius: .25rem; }
main table { white-space: normal; margin: 1rem 0; } main th, main td { text-align: left; vertical-align: top; }
main table { display: block; overflow-x: auto; max-width: 100%; }
main details table { white-space: nowrap; } summary { cursor: pointer; }
blockquote { margin: .5rem 0; padding-left: .8rem; border-left: .3rem solid #8886; } details { overflow-x: auto; }
@media (prefers-color-scheme: dark) {
.confirmed { color: #4cc26f; } .refuted { color: #ff7a5c; } .refined { color: #e0a72e; }
.not-run, .not-shown-here { color: #999; }
}
"""


def markdown_page(
    scale: Scale,
    findings: Sequence[Findings],
    captions: Mapping[str, str],
    absent: Sequence[str] = (),
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """The page: every claim with its verdict, then experiment by experiment how it came about.

    `absent` names the experiments that are not on it; `costs` are CPU seconds, by scale and experiment.
    """
    parts = [
        _head(scale, findings, absent), _overview(findings), _sizes(scale), _taken(), _costs(costs),
        _chapters(scale, findings, captions),
    ]  # fmt: skip
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
        "A number is a mean over seeds; ± is half of its 95 % confidence interval (Student's t, paired by seed), and "
        "is left out where all seeds agree or there is one seed only. *Confirmed*: the claim holds on the whole "
        "interval. *Refined*: it holds under a condition that the paper does not name, or for another reason. "
        "*Refuted*: it fails on the whole interval, with three seeds and the paper's own settings. *Not shown here*: "
        "anything else. *As published*: the model and its momentum travel whole, and who was absent goes on from a "
        "stale model. *Ours*: exact semantics; whoever takes part first holds the newest model, "
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
    seeds = "one seed" if len(bench.seeds) == 1 else f"up to {len(bench.seeds)} seeds"
    peers = f"{bench.crowd.peers} peers"
    return f"{bench.name.capitalize()} is {bench.title}: mostly {peers}, {bench.iterations} iterations, {seeds}."


def _sizes(scale: Scale) -> Iterator[str]:
    """What the scale means for either task."""
    rows: dict[str, Callable[[Bench], str]] = {
        "data": lambda bench: bench.title,
        "seeds": lambda bench: f"{len(bench.seeds)}",
        "peers, where the paper has 125": lambda bench: f"{bench.crowd.peers}",
        "iterations": lambda bench: f"{bench.iterations}",
        "iterations: 16 and 64 peers": lambda bench: f"{bench.brief or bench.iterations}",
        "iterations: equality": lambda bench: f"{bench.apart or bench.iterations}",
        "iterations: privacy": lambda bench: f"{bench.private or bench.iterations}",
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


def _taken() -> Iterator[str]:
    yield "## What we take from where"
    yield ""
    yield (
        "The paper's text, its [published code](https://github.com/felix-fjm/mar-fl), and what is run here. Where text "
        "and code differ we take the text, and a setting gives the other. The presets `paper-…` of `marfl simulate` "
        "are these."
    )
    yield ""
    yield from settings_table()
    yield ""


def _costs(costs: Mapping[str, Mapping[str, float]] | None) -> Iterator[str]:
    """CPU hours of every experiment at every scale."""
    if not costs:
        return
    scales = list(costs)
    yield "## What it costs"
    yield ""
    yield (
        "CPU hours of each experiment by itself, at most (runs to a target accuracy end sooner, and experiments share "
        "runs): `marfl reproduce list --scale paper`. They are worked out from the CPU time of a local step, a test, "
        "an average and noise, measured at small scale: `python benchmarks/reproduction_cost.py`. All of a scale needs "
        "less than the sum. One claim runs alone, by its name: `marfl reproduce mkd-text --scale paper`."
    )
    yield ""
    yield f"| experiment | {' | '.join(scales)} |"
    yield f"|---|{'--:|' * len(scales)}"
    for name in costs[scales[0]]:
        yield f"| {name} | {' | '.join(f'{costs[scale][name] / 3600:.1f}' for scale in scales)} |"
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
            yield from _verdict(found, claim, verdict)
        for figure in found.experiment.figures:
            if figure.name in captions:
                yield f"![{figure.title}]({FIGURES}/{figure.name}.svg)"
                yield ""
                yield f"*{captions[figure.name]}*"
                yield ""
        yield from _measured(found)


def _verdict(found: Findings, claim: Claim, verdict: ClaimVerdict) -> Iterator[str]:
    used, departs = found.used(claim), found.departs(claim)
    yield f'<a id="{claim.name}"></a>'
    yield ""
    yield f"> **{claim.source}:** {claim.says}"
    yield ""
    yield f"- We measured: {verdict.ours}"
    yield f"- Verdict: **{verdict.word.value}**. {verdict.reason}"
    if verdict.word is not Word.NOT_RUN:
        counts = sorted({len(done) for done in used.values() if "seed" in done[0]})  # a calculation has none
        seeds = f"; {' and '.join(map(str, counts))} {'seed' if counts == [1] else 'seeds'}" if counts else ""
        differ = f" Not as in the paper: {departs}." if departs else ""
        yield f"- From: {', '.join(used)}{seeds}.{differ}"
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
        yield (
            "¹ Models that a peer sends in an iteration, on average. ² Run by an earlier version under the same "
            "settings; only its summary was kept, so no figure shows it."
        )
        yield ""
    for name, done in found.evidence.items():
        if name not in trained:
            what = f"real peers, {len(done)} × by itself" if "seed" in done[0] else "a calculation"
            yield f"- {name}: {what}, `{found.cases[name].keys[0]}`."
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

    def over_seeds(field: str) -> Spread:
        return spread_of([summary[field] for summary in summaries], settled=True)

    accuracies = [summary["final_accuracy"] for summary in summaries]
    spread = f" ({Shown(min(accuracies)):%} … {Shown(max(accuracies)):%})" if len(accuracies) > 1 else ""
    sent = mean("bytes_per_peer_iteration") / summaries[0]["model_bytes"]
    virtual = "–" if summaries[0]["virtual_seconds"] is None else f"{Shown(over_seeds('virtual_seconds')):s}"
    models = re.search(r"the models of run \S+-([0-9a-f]+),", summaries[0]["engine_reason"])
    cells = [
        name, f"`{case.keys[0]}`", f"{len(summaries)}", f"{summaries[0]['peers']}",
        f"{Shown(over_seeds('iterations')):n}", f"{Shown(statistics.fmean(accuracies)):%}{spread}",
        f"{Shown(over_seeds('bytes_total')):B}", f"{sent:.3f}", virtual,
        (f"of `{models.group(1)}`" if models else "its own") + ("" if summaries[0].get("rows_kept", True) else " ²"),
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
