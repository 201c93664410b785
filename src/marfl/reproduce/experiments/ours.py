"""What the paper does not ask: time over wireless links, and numbers of peers that are no perfect grid."""

from __future__ import annotations

from marfl.reproduce.cases import Case, simulated
from marfl.reproduce.claims import Claim, Experiment, Figure, Judgement, Values, Word
from marfl.reproduce.experiments.common import DATA, EXACT, NAMES, PAPER, TASKS
from marfl.reproduce.numbers import Mean, Number, Ratio
from marfl.reproduce.scales import Crowd, Scale

PROFILES = ("wifi", "lte", "mixed")
_WAYS = {
    "paper mar": PAPER,
    "grid": EXACT,
    "fedavg": EXACT | {"technique": "fedavg"},
    "ring": EXACT | {"technique": "ring"},
    "rdfl": PAPER | {"technique": "rdfl"},
    "arfl": PAPER | {"technique": "arfl"},
}


_LINES = {"paper mar": NAMES["mar"], "grid": "ours (grid)"} | {
    way: NAMES[way] for way in ("fedavg", "ring", "rdfl", "arfl")
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
    def over_all(name: str, spec: str) -> str:
        return ", ".join(f"{{{name}_{profile}:{spec}}}" for profile in PROFILES)

    return Judgement(
        Word.CONFIRMED if min(values[f"paper_{profile}"] for profile in PROFILES) > 1 else Word.REFINED,
        f"Over Wi-Fi, LTE and a mix of links the run takes {over_all('grid', 's')} with our exchange. MAR-FL as "
        f"published takes {over_all('paper', 'x')} that, FedAvg {over_all('fedavg', 'x')}, a ring all-reduce "
        f"{over_all('ring', 'x')}, AR-FL {over_all('arfl', 'x')}.",
        "The models after an iteration are the same for all, so these ratios hold on the way to any accuracy. Where "
        "the model is large, bytes decide; where it is small, the number of messages that must wait for one another "
        "does, which is what a ring has most of. FedAvg has a server in a data centre here, on a gigabit link.",
    )


def _times(task: str) -> dict[str, Number]:
    found: dict[str, Number] = {}
    for profile in PROFILES:
        ours = _time(f"{task} grid {profile}")
        found[f"grid_{profile}"] = ours
        for name, way in (("paper", "paper mar"), ("fedavg", "fedavg"), ("ring", "ring"), ("arfl", "arfl")):
            found[f"{name}_{profile}"] = Ratio(_time(f"{task} {way} {profile}"), ours)
    return found


WIRELESS = Experiment(
    "wireless",
    "Time over wireless links (ours)",
    "The runs of the largest crowd once more, with virtual time from the plan's own messages over links of typical "
    "rates, latencies and losses. Same models, so the time to an accuracy differs by the technique alone.",
    _wireless_cases,
    tuple(
        Claim(
            f"wireless-{task}", "ours",
            "Over wireless links MAR with the exchange `grid` reaches an accuracy sooner than MAR-FL as published "
            f"({data}).",
            _times(task), _quicker,
            cases=tuple(f"{task} rdfl {profile}" for profile in PROFILES),
        )
        for task, data in DATA.items()
    ),
    tuple(
        Figure(
            f"wireless-{profile}-{task}", "accuracy-time", f"accuracy over virtual time, links {profile}",
            {f"{task} {way} {profile}": label for way, label in _LINES.items()},
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
