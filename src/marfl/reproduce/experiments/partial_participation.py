"""Figure 3 and its appendix: half of the peers take part, some of them are lost on the way, and some die."""

from __future__ import annotations

from typing import Any

from marfl.reproduce.cases import DATA, EXACT, NAMES, PAPER, RIVALS, TASKS, Case, Scale, calculated, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.numbers import NOTICEABLE, SUBSTANTIAL, Mean, Number, above, accuracy, peers, ratio, times

# --- half of the peers, and losses ---

TAKE_PART, LOST = 0.5, 0.2
HALF = {"churn.participation": TAKE_PART}
CHURN = HALF | {"churn.dropout": LOST}
_SHORT: dict[str, dict[str, Any]] = {"full": {}, "half": HALF, "churn": CHURN}
_WHERE = {"text": "Fig. 3, section 3.2", "vision": "Appendix, partial participation"}  # the paper says it of the task
_LINES = {
    "mar full": "MAR-FL full", "mar half": "MAR-FL half", "mar churn": "MAR-FL churn", "exact half": "ours half",
    "exact churn": "ours churn",
}  # fmt: skip


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
    crowd = scale.text.sizes[-1].settings()
    found["thinned"] = calculated("thinned_groups", **crowd, participation=TAKE_PART, dropout=LOST)
    return found


def _degrades(values: Values) -> Judgement:
    ours = (
        "As published, text falls from {full:%} to {half:%} when half of the peers take part, by {paper:pt}; with "
        "exact semantics, after as many iterations, by {exact:pt}."
    )
    if values["paper"] < SUBSTANTIAL:
        return Judgement(Word.REFUTED, ours, "Half of the peers learn about as much as all of them.")
    if values["exact"] < NOTICEABLE:
        return Judgement(
            Word.REFINED,
            ours,
            "It holds as published, where a peer that was absent goes on from its stale model and is averaged in at "
            "full weight. When absentees first catch up, partial participation costs less than seeds do: the "
            "degradation comes from stale models, not from missing peers.",
        )
    return Judgement(Word.CONFIRMED, ours, "Exact semantics loses as well, if not as much.")


def _milder(values: Values) -> Judgement:
    milder = values["vision"] < values["text"]
    return Judgement(
        Word.CONFIRMED if milder else Word.REFUTED,
        "As published, half participation costs {vision:pt} on vision ({peers_vision:n} peers, {iterations_vision:n} "
        "iterations) and {text:pt} on text ({peers_text:n} peers, {iterations_text:n} iterations).",
        "Vision is learned sooner: by then a stale model is not far from the newest, while text still moves."
        if milder
        else "It is the other way round after so many iterations.",
    )


def _no_more(values: Values) -> Judgement:
    worst = max(values.values())
    return Judgement(
        Word.CONFIRMED if worst < NOTICEABLE else Word.REFINED if worst < SUBSTANTIAL else Word.REFUTED,
        "Losing a fifth of the participants before the aggregation costs a further {paper:pt} as published, and "
        "{exact:pt} with exact semantics.",
        "Whoever is lost brings no update, but the mean over the others is nearly as good a step.",
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
    ours = (
        "Among {peers:n} peers RDFL and AR-FL send {ratio:x} what MAR-FL sends. By calculation for {many:n} peers: "
        "{filled:x} where those who are left fill their groups up, as in these runs, and {holes:x} where they keep the "
        "keys of the full grid, so that absentees leave holes."
    )
    exact = " With exact semantics and the exchange `grid`, catch-up included, AR-FL sends {grid:x} as much."
    if values["ratio"] > 5:
        return Judgement(Word.CONFIRMED, ours, f"All to all stays dearer than a few groups.{exact}")
    if values["holes"] > 5:
        return Judgement(
            Word.REFINED,
            ours,
            "It depends on how groups form among those who are left, which the paper does not say. Groups with holes "
            "send less and mix worse: they leave {variance_holes:%} of the variance, full ones {variance_filled:%}. "
            f"Either way the advantage shrinks with the number of those who take part.{exact}",
        )
    return Judgement(Word.REFUTED, ours, f"With fewer peers everybody has fewer others to send to.{exact}")


def _exact(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if values["lost"] < NOTICEABLE else Word.REFUTED,
        "Half of the peers, and a fifth of these lost: {churn:%}; all of them: {full:%}.",
        "Whoever takes part first holds the agreed model; what that costs is in the ledger under `sync`.",
    )


def _under_churn(task: str) -> dict[str, Number]:
    names = ("filled", "holes", "variance_filled", "variance_holes")
    calculated_too: dict[str, Number] = {name: Mean("thinned", name) for name in names}
    return calculated_too | {
        "ratio": times(f"{task} arfl churn", f"{task} mar churn"),
        "peers": peers(f"{task} mar churn"),
        "many": Mean("thinned", "arguments.peers"),
        "grid": times(f"{task} arfl churn", f"{task} exact churn"),
    }


PARTICIPATION = Experiment(
    "participation",
    "Partial participation and churn (Fig. 3 and appendix)",
    "All peers take part (full), half of them (half), or half of them with a dropout likelihood of 20 % between update "
    "and aggregation (churn): as published, and with exact semantics (ours), where whoever takes part first holds the "
    "newest model and what that costs is counted.",
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
            {task: above(f"{task} mar full", f"{task} mar half") for task in TASKS}
            | {f"peers_{task}": peers(f"{task} mar half") for task in TASKS}
            | {f"iterations_{task}": Mean(f"{task} mar half", "iterations") for task in TASKS},
            _milder,
        ),
        *(
            Claim(
                f"dropouts-harmless-{task}", where,
                f"Sudden dropouts (20 %) do not cause additional accuracy drops ({DATA[task]}).",
                {
                    "paper": above(f"{task} mar half", f"{task} mar churn"),
                    "exact": above(f"{task} exact half", f"{task} exact churn"),
                },
                _no_more,
            )
            for task, where in _WHERE.items()
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
        *(
            Claim(
                f"five-times-{task}", where,
                "Even with 50 % participation and 20 % dropout likelihood, RDFL and AR-FL need more than 5× the "
                f"communication of MAR-FL to reach the same model utility ({DATA[task]}).",
                _under_churn(task),
                _five_times,
                cases=(f"{task} rdfl churn",),
            )
            for task, where in _WHERE.items()
        ),
        *(
            Claim(
                f"exact-participation-{task}", "ours",
                f"With exact semantics, partial participation and churn cost no accuracy ({DATA[task]}).",
                {
                    "full": accuracy(f"{task} exact full"), "churn": accuracy(f"{task} exact churn"),
                    "lost": above(f"{task} exact full", f"{task} exact churn"),
                },
                _exact,
            )
            for task in TASKS
        ),
    ),
    tuple(
        figure
        for task in TASKS
        for figure in (
            Figure(
                f"participation-{task}", "accuracy-iterations", "accuracy under partial participation",
                {f"{task} {case}": label for case, label in _LINES.items()},
            ),
            Figure(
                f"participation-baselines-{task}", "accuracy-iterations", "the baselines under the same churn",
                {
                    f"{task} {who} {case}": f"{NAMES[who]} {case}"
                    for who in ("mar", *RIVALS)
                    for case in ("full", "churn")
                },
            ),
            Figure(
                f"participation-bytes-{task}", "bytes-techniques", "what an iteration sends under churn",
                {f"{task} {who} churn": (NAMES | {"exact": "ours"})[who] for who in ("exact", "mar", *RIVALS)},
            ),
        )
    ),
)  # fmt: skip


# --- butterflies when peers die ---


def _stall_cases(scale: Scale) -> dict[str, Case]:
    settings = scale.text.settings() | EXACT | {"engine": "bitwise", "churn.death": 0.01}
    return {
        f"{name} deaths": simulated(settings | way, scale.text.seeds)
        for name, way in (
            ("butterfly", {"technique": "butterfly"}),
            ("grid", {}),
            ("full", {"exchange": "full"}),
        )
    }


def _stalls(values: Values) -> Judgement:
    return Judgement(
        Word.REFINED if values["butterfly"] > 0 else Word.REFUTED,
        "With deaths during the exchange, {butterfly:%} of a butterfly's bytes are for attempts that come to nothing, "
        "{grid:%} with `grid` and {full:%} with `full`.",
        "A part whose owner dies is missing for everybody, so the butterfly as it stands must wait for ever. Here "
        "whoever is left seals a new roster and repeats the exchange, which serves every technique alike; what a death "
        "costs is the bytes that had been sent.",
    )


def _wasted(case: str) -> Number:
    return ratio(Mean(case, "bytes_by_kind.repair"), Mean(case, "bytes_total"))


STALL = Experiment(
    "stall",
    "Butterfly all-reduce under churn (appendix)",
    "One peer in a hundred dies in every round of the exchange; whoever is left seals a new roster.",
    _stall_cases,
    (
        Claim(
            "butterfly-stalls", "Appendix, FL baselines",
            "Butterfly all-reduce stalls under churn: it needs peers that are totally reliable.",
            {name: _wasted(f"{name} deaths") for name in ("butterfly", "grid", "full")},
            _stalls,
        ),
    ),
)  # fmt: skip
