"""Figure 3 and its appendix: half of the peers take part, and some of them are lost on the way."""

from __future__ import annotations

from typing import Any

from marfl.reproduce.cases import Case, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.experiments.common import (
    EXACT,
    NOTICEABLE,
    PAPER,
    RIVALS,
    SUBSTANTIAL,
    TASKS,
    above,
    accuracy,
    both,
    times,
)
from marfl.reproduce.scales import Scale

HALF = {"churn.participation": 0.5}
CHURN = HALF | {"churn.dropout": 0.2}
_SHORT: dict[str, dict[str, Any]] = {"full": {}, "half": HALF, "churn": CHURN}


def _cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in scale.benches:
        settings = bench.settings()
        for name, churn in _SHORT.items():
            found[f"{bench.name} exact {name}"] = simulated(settings | EXACT | churn, bench.seeds)
            found[f"{bench.name} mar {name}"] = simulated(settings | PAPER | churn, bench.seeds)
        for technique in RIVALS:
            found[f"{bench.name} {technique} full"] = simulated(settings | PAPER, bench.seeds, technique=technique)
            found[f"{bench.name} {technique} churn"] = simulated(
                settings | PAPER | CHURN, bench.seeds, technique=technique
            )
    return found


def _degrades(values: Values) -> Judgement:
    ours = (
        "As published, text falls from {full:%} to {half:%}, by {paper:pt}; with exact semantics by {exact:pt}."
    )
    if values["paper"] < SUBSTANTIAL:
        return Judgement(Word.REFUTED, ours, "Half of the peers learn about as much as all of them.")
    if values["exact"] < NOTICEABLE:
        return Judgement(
            Word.REFINED,
            ours,
            "It holds for the semantics of the paper, where who was absent goes on from a stale model and is averaged "
            "in at full weight. When absentees first catch up, partial participation costs nothing that one can see: "
            "the degradation is an artefact of stale models, not a law.",
        )
    return Judgement(Word.CONFIRMED, ours, "Exact semantics loses as well, if not as much.")


def _milder(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if values["vision"] < values["text"] else Word.REFUTED,
        "As published, half participation costs {vision:pt} on vision and {text:pt} on text.",
        "The tasks learn at different speeds, and a stale model is worse where the models still move.",
    )


def _no_more(values: Values) -> Judgement:
    worst = max(values.values())
    return Judgement(
        Word.CONFIRMED if worst < NOTICEABLE else Word.REFINED if worst < SUBSTANTIAL else Word.REFUTED,
        "Losing a fifth of the participants before the aggregation costs a further {paper_vision:pt} (vision) and "
        "{paper_text:pt} (text) as published, {exact_vision:pt} and {exact_text:pt} with exact semantics.",
        "Who is lost brings no update, but the mean over the others is as good a step.",
    )


def _alike(values: Values) -> Judgement:
    apart = abs(values["apart"])
    return Judgement(
        Word.CONFIRMED if apart < SUBSTANTIAL else Word.REFINED,
        "Text, half participation and losses: MAR-FL {mar:%}, the three baselines {rivals:%} (one training for all "
        "three: they average exactly).",
        "The baselines average those who are there exactly; MAR-FL's keys only nearly, as the number of those who are "
        "left is no perfect grid.",
    )


def _five_times(values: Values) -> Judgement:
    word = Word.CONFIRMED if values["text"] > 5 else Word.REFUTED
    reason = (
        "With so few left, everybody sends to fewer others, while MAR-FL still takes its rounds: the advantage shrinks "
        "with the number of those who take part. With exact semantics and the exchange `grid`, catch-up included, the "
        "baselines send {grid:x} as much."
    )
    return Judgement(word, "RDFL and AR-FL send {text:x} what MAR-FL sends (text), {vision:x} (vision).", reason)


def _exact(values: Values) -> Judgement:
    worst = max(values.values())
    return Judgement(
        Word.CONFIRMED if worst < NOTICEABLE else Word.REFUTED,
        "Half of the peers, and a fifth of these lost: {vision:pt} (vision) and {text:pt} (text) below full "
        "participation.",
        "Whoever takes part first holds the agreed model; what that costs is in the ledger under `sync`.",
    )


PARTICIPATION = Experiment(
    "participation",
    "Partial participation and churn (Fig. 3 and appendix)",
    "All peers, half of them, and half of them with a dropout likelihood of 20 % between update and aggregation: as "
    "published, and with exact semantics.",
    _cases,
    (
        Claim(
            "participation-degrades", "Fig. 3a, section 3.2",
            "Partial participation leads to a substantial degradation of training performance (20NG).",
            {
                "full": accuracy("text mar full"), "half": accuracy("text mar half"),
                "paper": above("text mar full", "text mar half"), "exact": above("text exact full", "text exact half"),
            },
            _degrades,
        ),
        Claim(
            "participation-milder", "Appendix",
            "On MNIST the degradation is milder than on 20NG.",
            {task: above(f"{task} mar full", f"{task} mar half") for task in TASKS},
            _milder,
        ),
        Claim(
            "dropouts-harmless", "Fig. 3a, section 3.2",
            "Sudden dropouts (20 %) do not cause additional accuracy drops.",
            both("paper", ((task, above(f"{task} mar half", f"{task} mar churn")) for task in TASKS))
            | both("exact", ((task, above(f"{task} exact half", f"{task} exact churn")) for task in TASKS)),
            _no_more,
        ),
        Claim(
            "baselines-alike", "Appendix",
            "FedAvg, RDFL and AR-FL degrade to a similar extent as MAR-FL.",
            {
                "mar": accuracy("text mar churn"), "rivals": accuracy("text fedavg churn"),
                "apart": above("text fedavg churn", "text mar churn"),
            },
            _alike,
        ),
        Claim(
            "five-times", "Fig. 3b, section 3.2",
            "Even with 50 % participation and 20 % dropout likelihood, RDFL and AR-FL need more than 5× the "
            "communication of MAR-FL.",
            {task: times(f"{task} arfl churn", f"{task} mar churn") for task in TASKS}
            | {"grid": times("text arfl churn", "text exact churn")},
            _five_times,
            cases=("text rdfl churn", "vision rdfl churn"),
        ),
        Claim(
            "exact-participation", "ours",
            "With exact semantics, partial participation and churn cost no accuracy.",
            {task: above(f"{task} exact full", f"{task} exact churn") for task in TASKS},
            _exact,
        ),
    ),
    tuple(
        figure
        for task in TASKS
        for figure in (
            Figure(
                f"participation-{task}", "accuracy-iterations", "Accuracy under partial participation",
                tuple(f"{task} {name}" for name in ("mar full", "mar half", "mar churn", "exact half", "exact churn")),
            ),
            Figure(
                f"participation-baselines-{task}", "accuracy-iterations", "The baselines under the same churn",
                tuple(f"{task} {who} {name}" for who in ("mar", *RIVALS) for name in ("full", "churn")),
            ),
            Figure(
                f"participation-bytes-{task}", "bytes-techniques", "What an iteration sends under churn",
                tuple(f"{task} {who} churn" for who in ("exact", "mar", *RIVALS)),
            ),
        )
    ),
)  # fmt: skip
