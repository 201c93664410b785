"""What the paper does not ask: time over wireless links, and numbers of peers that are no perfect grid."""

from __future__ import annotations

from marfl.reproduce.cases import Case, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.experiments.common import EXACT, PAPER, TASKS, both
from marfl.reproduce.numbers import Mean, Ratio
from marfl.reproduce.scales import Crowd, Scale

PROFILES = ("wifi", "lte", "mixed")
_WAYS = {
    "grid": EXACT,
    "paper mar": PAPER,
    "fedavg": EXACT | {"technique": "fedavg"},
    "ring": EXACT | {"technique": "ring"},
    "rdfl": PAPER | {"technique": "rdfl"},
    "arfl": PAPER | {"technique": "arfl"},
}


def _wireless_cases(scale: Scale) -> dict[str, Case]:
    return {
        f"{bench.name} {way} {profile}": simulated(
            bench.settings(bench.sizes[-1]) | settings, bench.seeds[:1], links=profile
        )
        for bench in scale.benches
        for profile in PROFILES
        for way, settings in _WAYS.items()
    }


def _time(case: str) -> Mean:
    return Mean(case, "virtual_seconds")


def _quicker(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if min(values[f"paper_{task}"] for task in TASKS) > 1 else Word.REFINED,
        "Over LTE the vision run takes {grid_vision:s} with our exchange, {paper_vision:x} that as published, "
        "{fedavg_vision:x} with FedAvg, {ring_vision:x} with a ring and {arfl_vision:x} with AR-FL; the text run takes "
        "{grid_text:s}, and {paper_text:x}, {fedavg_text:x}, {ring_text:x} and {arfl_text:x} that.",
        "Where the model is large, bytes decide; where it is small, the number of messages that must wait for one "
        "another does, which is what a ring has most of.",
    )


WIRELESS = Experiment(
    "wireless",
    "Time over wireless links (ours)",
    "The runs of the largest crowd once more, with virtual time from the plan's own messages over links of typical "
    "rates, latencies and losses. Same models, so the time to an accuracy differs by the technique alone.",
    _wireless_cases,
    (
        Claim(
            "wireless", "ours",
            "Over wireless links MAR with the exchange `grid` reaches an accuracy sooner than MAR-FL as published.",
            both("grid", ((task, _time(f"{task} grid lte")) for task in TASKS))
            | {
                f"{name}_{task}": Ratio(_time(f"{task} {way} lte"), _time(f"{task} grid lte"))
                for task in TASKS
                for name, way in (("paper", "paper mar"), ("fedavg", "fedavg"), ("ring", "ring"), ("arfl", "arfl"))
            },
            _quicker,
            cases=tuple(f"{task} {way} {profile}" for task in TASKS for profile in ("wifi", "mixed") for way in _WAYS),
        ),
    ),
    tuple(
        Figure(
            f"wireless-{profile}-{task}", "accuracy-time", f"Accuracy over virtual time, links {profile}",
            tuple(f"{task} {way} {profile}" for way in _WAYS),
        )
        for task in TASKS
        for profile in PROFILES
    ),
)  # fmt: skip


def _number_cases(scale: Scale) -> dict[str, Case]:
    settings, seeds = scale.text.settings(Crowd(100, 5)), scale.text.seeds
    return {"keys 100": simulated(settings | PAPER, seeds), "exact 100": simulated(settings | EXACT, seeds)}


def _any(values: Values) -> Judgement:
    return Judgement(
        Word.CONFIRMED if values["exact"] == 0 < values["keys"] else Word.REFUTED,
        "On a hundred peers in groups of five the paper's keys leave the models {keys:g} apart (the largest distance "
        "from the mean, relative to it); ours {exact:g}.",
        "A hundred is no power of five: the keys end near the mean. Our planner lays the rest out as spares and is "
        "exact for every number.",
    )


ANY_NUMBER = Experiment(
    "any-number",
    "Any number of peers (ours)",
    "A number of peers that is no perfect grid, by the paper's keys and by our planner.",
    _number_cases,
    (
        Claim(
            "any-number", "ours",
            "The average is exact for any number of peers, and all end on the same bits.",
            {"keys": Mean("keys 100", "disagreement"), "exact": Mean("exact 100", "disagreement")},
            _any,
        ),
    ),
)  # fmt: skip
