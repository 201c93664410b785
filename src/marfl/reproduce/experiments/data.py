"""Equality of the techniques, IID against Dirichlet, and approximate aggregation: the appendix."""

from __future__ import annotations

from marfl.reproduce.cases import Case, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.experiments.common import (
    DATA,
    EXACT,
    NAMES,
    NOTICEABLE,
    PAPER,
    RIVALS,
    TASKS,
    above,
    accuracy,
    sent,
    times,
)
from marfl.reproduce.numbers import Gap, Number, Ratio
from marfl.reproduce.scales import Crowd, Scale


def _equality_cases(scale: Scale) -> dict[str, Case]:
    return {
        f"{bench.name} {technique} apart": simulated(
            bench.settings(Crowd(16, 4)) | PAPER | {"engine": "bitwise"}, bench.seeds[:1], technique=technique
        )
        for bench in scale.benches
        for technique in ("mar", *RIVALS)
    }


def _equal(values: Values) -> Judgement:
    worst = max(abs(values[rival]) for rival in RIVALS)
    return Judgement(
        Word.CONFIRMED if worst < 0.005 else Word.REFUTED,
        "Trained apart, MAR-FL ends at {mar:%}; FedAvg, RDFL and AR-FL end {fedavg:pt}, {rdfl:pt} and {arfl:pt} above.",
        "On a perfect grid all four compute the same mean; what is left is the order of additions.",
    )


EQUALITY = Experiment(
    "equality",
    "Equality of the four techniques (appendix)",
    "Every technique trained by itself, one peer at a time, on sixteen peers; nothing is shared between these runs.",
    _equality_cases,
    tuple(
        Claim(
            f"equality-{task}", "Appendix, qualitative identity",
            "MAR-FL achieves the same training performance as FedAvg, RDFL and AR-FL, as all yield the same global "
            f"averages ({data}).",
            {"mar": accuracy(f"{task} mar apart")}
            | {rival: above(f"{task} {rival} apart", f"{task} mar apart") for rival in RIVALS},
            _equal,
        )
        for task, data in DATA.items()
    ),
    tuple(
        Figure(
            f"equality-{task}", "accuracy-iterations", "four techniques, trained apart",
            {f"{task} {technique} apart": NAMES[technique] for technique in ("mar", *RIVALS)},
        )
        for task in TASKS
    ),
)  # fmt: skip


def _heterogeneity_cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in scale.benches:
        found[f"{bench.name} dirichlet"] = simulated(bench.settings() | PAPER, bench.seeds)
        found[f"{bench.name} iid"] = simulated(bench.settings() | PAPER, bench.seeds, partition__kind="iid")
    return found


def _stable(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if abs(values["gap"]) < NOTICEABLE else Word.REFUTED,
        "Vision ends at {iid:%} on IID shards and at {dirichlet:%} on Dirichlet shards.",
        "One batch from every peer and an exact mean: each step sees nearly the whole distribution.",
    )


def _impaired(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if values["gap"] > NOTICEABLE else Word.REFUTED,
        "Text ends at {iid:%} on IID shards and at {dirichlet:%} on Dirichlet shards.",
        "With a common start and one batch each, the mean of the local steps is one step on the joint batch, whatever "
        "the split; a Dirichlet split changes only how often each sample is drawn, since small shards repeat sooner.",
    )


def _shards(task: str) -> dict[str, Number]:
    iid, dirichlet = f"{task} iid", f"{task} dirichlet"
    return {"iid": accuracy(iid), "dirichlet": accuracy(dirichlet), "gap": above(iid, dirichlet)}


HETEROGENEITY = Experiment(
    "heterogeneity",
    "IID against Dirichlet (appendix)",
    "The same training on shards drawn at random, and on shards with label shares from Dirichlet(1).",
    _heterogeneity_cases,
    (
        Claim(
            "iid-vision", "Appendix, heterogeneous peer data",
            "A Dirichlet split (α = 1) has no significant effect on MNIST.",
            _shards("vision"),
            _stable,
        ),
        Claim(
            "iid-text", "Appendix, heterogeneous peer data",
            "On 20NG performance is noticeably impaired against nearly IID shards.",
            _shards("text"),
            _impaired,
        ),
    ),
    tuple(
        Figure(
            f"heterogeneity-{task}", "accuracy-iterations", "IID and Dirichlet shards",
            {f"{task} iid": "MAR-FL on IID", f"{task} dirichlet": "MAR-FL on Dirichlet(1)"},
        )
        for task in TASKS
    ),
)  # fmt: skip


def _approximate_cases(scale: Scale) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bench in scale.benches:
        crowd = bench.sizes[-1]
        settings = bench.settings(crowd)
        seeds = bench.seeds
        found[f"{bench.name} exact groups"] = simulated(settings | PAPER, seeds)
        found[f"{bench.name} approximate"] = simulated(
            settings | PAPER, seeds, group_size=3, rounds=4, technique_options={"dimension": 4}
        )
        found[f"{bench.name} grid groups"] = simulated(settings | EXACT, seeds)
    return found


def _third(values: Values) -> Judgement:
    kept = values["gap"] < NOTICEABLE
    return Judgement(
        Word.CONFIRMED if values["share"] > 0.3 and kept else Word.REFINED if kept else Word.REFUTED,
        "It sends {share:%} less and ends at {approximate:%}; exact groups end at {exact:%}.",
        "Groups of three, four times, leave a little variance, which further iterations mix. But what it saves is "
        "small: the approximation still sends {grid:x} what our exchange `grid` sends for the exact mean.",
    )


def _saved(task: str) -> Ratio:
    return Ratio(Gap(sent(f"{task} exact groups"), sent(f"{task} approximate")), sent(f"{task} exact groups"))


APPROXIMATE = Experiment(
    "approximate",
    "Approximate aggregation (appendix)",
    "125 peers in groups of 3 for 4 rounds, as the paper has it, beside the exact 5³.",
    _approximate_cases,
    tuple(
        Claim(
            f"approximate-{task}", "Appendix, approximate aggregation",
            "Groups of 3 and 4 rounds on 125 peers reduce communication by up to 33 %, without substantial loss of "
            f"model utility ({data}).",
            {
                "share": _saved(task), "approximate": accuracy(f"{task} approximate"),
                "exact": accuracy(f"{task} exact groups"),
                "gap": above(f"{task} exact groups", f"{task} approximate"),
                "grid": times(f"{task} approximate", f"{task} grid groups"),
            },
            _third,
        )
        for task, data in DATA.items()
    ),
    tuple(
        Figure(
            f"approximate-{task}", "accuracy-bytes", "exact and approximate averages",
            {
                f"{task} exact groups": "MAR-FL exact",
                f"{task} approximate": "MAR-FL approximate",
                f"{task} grid groups": "ours (grid)",
            },
        )
        for task in TASKS
    ),
)  # fmt: skip
